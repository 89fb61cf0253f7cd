//! Prefill: a batch of prompts through a model over ranks, and what it writes next.

mod logits;
mod rank;
mod source;
mod tokens;

use std::path::PathBuf;

use burn_moe::parallel::LayerStats;
use burn_moe_models::ModelConfig;
use clap::Args;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use crate::cli::{BalanceArg, CliError, RankArgs, check};
use crate::page;
use crate::report::{
    self, Continuation, DecodeRun, LayerSummary, PrefillReport, PrefillRun, StepStats, Summary,
    spread,
};
use rank::{Job, RunOutcome};
use source::Source;
use tokens::Tokens;

/// Options of `prefill`.
#[derive(Debug, Clone, Args)]
pub struct PrefillArgs {
    /// Folder that `train --checkpoint` saved to.
    #[arg(long, required_unless_present = "model")]
    pub checkpoint: Option<PathBuf>,
    /// Folder of Hugging Face's: config.json, safetensors and, for --prompt, tokenizer.json.
    #[arg(long, conflicts_with = "checkpoint")]
    pub model: Option<PathBuf>,
    /// Text file, one prompt a line; empty lines are left out. The tokens are those of the model's
    /// tokenizer, or bytes with --checkpoint.
    #[arg(long, required_unless_present = "ids")]
    pub prompt: Option<PathBuf>,
    /// JSON file with a list of prompts, each a list of token ids.
    #[arg(long, conflicts_with = "prompt")]
    pub ids: Option<PathBuf>,
    /// Most tokens of a prompt that one forward pass reads. Default: all.
    #[arg(long)]
    pub chunk: Option<usize>,
    /// File to save the first balancer's logits and routing of the prompts to, as safetensors: for
    /// prompt i logits.i [length, vocab], for MoE layer N router.N.indices.i and router.N.weights.i
    /// [length, k].
    #[arg(long)]
    pub logits: Option<PathBuf>,
    /// Refuse the model unless it is of this config (a name or a JSON file).
    #[arg(long)]
    pub config: Option<String>,
    /// Tokens to write behind each prompt, chosen greedily; fewer where the model ends its text.
    #[arg(long, default_value_t = 32)]
    pub max_new_tokens: usize,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ranks: RankArgs,
    /// Balancers to run one after another on the same prompts.
    #[arg(long, value_delimiter = ',', default_value = "exact")]
    pub balance: Vec<BalanceArg>,
    /// Folder for report.json and report.html.
    #[arg(long, default_value = "target/prefill-report")]
    pub report: PathBuf,
    /// File to save the first balancer's routing of the prompts to, as safetensors
    /// (ids [layers, tokens, k]).
    #[arg(long)]
    pub save_routing: Option<PathBuf>,
}

/// Runs the prompts, prints continuations and the tables, and writes the report.
///
/// # Errors
///
/// When an option, the model or the prompts are not usable, a rank fails, or a file cannot be
/// written.
pub fn run(args: &PrefillArgs) -> Result<PrefillReport, CliError> {
    let source = Source::open(args)?;
    let model = source.config()?;
    args.ranks.validate(&model, args.ranks.ranks)?;
    check(args.chunk != Some(0), "--chunk", 0, || "1 or more".into())?;
    if let Some(name) = &args.config {
        check(
            ModelConfig::resolve(name)? == model,
            "--config",
            name,
            || format!("the config of {}", source.folder().display()),
        )?;
    }
    let tokens = Tokens::open(args)?;
    let prompts = tokens.prompts(args)?;
    check_prompts(args, &model, &prompts)?;
    let eos = source.eos()?;
    let job = Job {
        args,
        source: &source,
        model: &model,
        prompts: &prompts,
        eos: &eos,
    };
    let mut outcomes = args.ranks.run(|comm| job.run(comm))?;
    if let Some(path) = &args.save_routing {
        let records: Vec<_> = outcomes.iter().map(|rank| &rank[0].routing[..]).collect();
        report::save_routing(path, &model, &records)?;
    }
    if let Some(path) = &args.logits {
        let first = outcomes
            .iter_mut()
            .map(|rank| std::mem::take(&mut rank[0].exact));
        logits::save(path, &model, first.flatten())?;
    }
    let runs = args.balance.iter().enumerate().map(|(lane, balance)| {
        let ranks = outcomes.iter_mut().map(|rank| &mut rank[lane]).collect();
        summarise(*balance, &model, &prompts, &tokens, ranks)
    });
    let report = PrefillReport {
        runs: runs.collect(),
        checkpoint: source.folder().into(),
        ranks: args.ranks.ranks,
        slots: args.ranks.slots,
        planner: args.ranks.planner.clone(),
        timing: args.ranks.timing().name(),
        tokens: tokens.name(),
        prompt_tokens: prompts.iter().map(Vec::len).sum(),
        chunk: args.chunk,
        max_new_tokens: args.max_new_tokens,
        config: model,
    };
    for Continuation {
        prompt,
        continuation,
    } in &report.runs[0].continuations
    {
        println!("{prompt:?} -> {continuation:?}");
    }
    println!("{}\n{}", table(&report), layer_table(&report));
    let page = report::write(&args.report, &report, &page::prefill(&report))?;
    println!("report: {}", page.display());
    Ok(report)
}

/// Ids of the vocabulary, not too many, and room for what is to be written.
fn check_prompts(
    args: &PrefillArgs,
    model: &ModelConfig,
    prompts: &[Vec<u32>],
) -> Result<(), CliError> {
    let option = match args.ids {
        Some(_) => "--ids",
        None => "--prompt",
    };
    let highest = prompts.iter().flatten().max().copied().unwrap_or(0);
    check(
        (highest as usize) < model.vocab_size,
        option,
        highest,
        || format!("ids below the model's vocab_size ({})", model.vocab_size),
    )?;
    for (i, prompt) in prompts.iter().enumerate() {
        let value = format!("prompt {i} with {} tokens", prompt.len());
        let most = model.max_sequence_length;
        check((1..=most).contains(&prompt.len()), option, value, || {
            format!("prompts of 1 to the model's max_sequence_length ({most}) tokens")
        })?;
    }
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    check(
        args.max_new_tokens <= model.max_sequence_length - longest,
        "--max-new-tokens",
        args.max_new_tokens,
        || {
            format!(
                "at most the model's max_sequence_length ({}) less the longest prompt ({longest})",
                model.max_sequence_length
            )
        },
    )
}

/// One balancer's report from all ranks' parts.
fn summarise(
    balance: BalanceArg,
    model: &ModelConfig,
    prompts: &[Vec<u32>],
    tokens: &Tokens,
    mut ranks: Vec<&mut RunOutcome>,
) -> PrefillRun {
    let layers = model.moe_layers().count();
    let ranks_of_group = ranks.len();
    let mut steps = |of: fn(&mut RunOutcome) -> &mut Vec<LayerStats>| -> Vec<StepStats> {
        let stats: Vec<Vec<LayerStats>> = ranks.iter_mut().map(|r| std::mem::take(of(r))).collect();
        let passes = stats.first().map_or(0, |rank| rank.len() / layers.max(1));
        let pass = |pass: usize| {
            let of_rank = |rank: &Vec<LayerStats>| rank[pass * layers..][..layers].to_vec();
            stats.iter().map(of_rank).collect()
        };
        (0..passes).map(pass).collect()
    };
    let prefill = LayerSummary::of(&steps(|rank| &mut rank.prefill_stats), ranks_of_group);
    let decode_steps = steps(|rank| &mut rank.decode_stats);
    let decode = LayerSummary::of(&decode_steps, ranks_of_group);
    let written: Vec<&Vec<u32>> = ranks.iter().flat_map(|rank| &rank.written).collect();
    let after_first = written.iter().map(|ids| ids.len().saturating_sub(1)).sum();
    let prompt_tokens: usize = prompts.iter().map(Vec::len).sum();
    let RunOutcome {
        time_to_first_token,
        decode_seconds,
        ..
    } = *ranks[0];
    PrefillRun {
        balance: balance.name(),
        time_to_first_token,
        tokens_per_second: prompt_tokens as f64 / time_to_first_token,
        replica_buffer_bytes: ranks.iter().map(|rank| rank.replica_bytes).collect(),
        kv_cache_bytes: ranks.iter().map(|rank| rank.cache_bytes).collect(),
        layers: prefill,
        decode: DecodeRun {
            passes: decode_steps.len(),
            tokens: after_first,
            seconds: decode_seconds,
            tokens_per_second: match after_first {
                0 => 0.0,
                tokens => tokens as f64 / decode_seconds,
            },
            imbalance_before: decode.imbalance_before,
            imbalance_after: decode.imbalance_after,
        },
        continuations: prompts
            .iter()
            .zip(written)
            .map(|(prompt, written)| Continuation {
                prompt: tokens.text(prompt),
                continuation: tokens.text(written),
            })
            .collect(),
    }
}

fn table(report: &PrefillReport) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "balance",
        "time to first\ntoken (ms)",
        "prompt\ntokens/s",
        "new\ntokens/s",
        "imbalance before\nmean / p95 / max",
        "imbalance after\nmean / p95 / max",
        "copies\na plan",
        "KV cache\n(KiB, all ranks)",
    ]);
    for run in &report.runs {
        table.add_row([
            run.balance.to_owned(),
            format!("{:.1}", run.time_to_first_token * 1e3),
            format!("{:.0}", run.tokens_per_second),
            format!("{:.0}", run.decode.tokens_per_second),
            spread(&run.layers.imbalance_before),
            spread(&run.layers.imbalance_after),
            format!("{:.1}", run.layers.copies_per_plan.mean),
            format!(
                "{:.0}",
                run.kv_cache_bytes.iter().sum::<usize>() as f64 / 1024.0
            ),
        ]);
    }
    table
}

/// Imbalance of each layer before and after, the mean of the passes over the prompts.
fn layer_table(report: &PrefillReport) -> Table {
    let mut table = Table::new();
    let names = report
        .runs
        .iter()
        .map(|run| format!("{}\nbefore / after", run.balance));
    let header = std::iter::once("layer".to_owned()).chain(names);
    table.load_preset(UTF8_FULL_CONDENSED).set_header(header);
    let layers = report
        .runs
        .first()
        .map_or(&[][..], |run| &run.layers.layers);
    for (i, layer) in layers.iter().enumerate() {
        let mean = |run: &PrefillRun, when: usize| {
            let passes = run.layers.imbalance.iter();
            Summary::of(passes.map(|layers| layers[i][when])).mean
        };
        let cells = report
            .runs
            .iter()
            .map(|run| format!("{:.3} / {:.3}", mean(run, 0), mean(run, 1)));
        table.add_row(std::iter::once(layer.to_string()).chain(cells));
    }
    table
}
