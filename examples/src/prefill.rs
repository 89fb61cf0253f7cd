//! Prefill: a batch of prompts through a trained model over ranks, and what it would write next.

mod input;
mod logits;

use std::path::PathBuf;
use std::sync::Arc;

use burn_moe::comm::{Communicator, Key, Op};
use burn_moe::parallel::{ExpertParallel, LayerStats, ParallelOptions};
use burn_moe_models::{DecoderOutput, ModelConfig, TokenBatch};
use clap::Args;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use crate::cli::{BalanceArg, CliError, RankArgs, check};
use crate::page;
use crate::report::{
    self, Continuation, LayerSummary, PrefillReport, PrefillRun, RoutingRecord, spread,
};
use input::Source;
use logits::PromptOutputs;

/// Options of `prefill`.
#[derive(Debug, Clone, Args)]
pub struct PrefillArgs {
    /// Folder that `train --checkpoint` saved to.
    #[arg(long, required_unless_present = "model")]
    pub checkpoint: Option<PathBuf>,
    /// Folder of Hugging Face's: config.json and safetensors. Needs --ids.
    #[arg(long, conflicts_with_all = ["checkpoint", "prompt"])]
    pub model: Option<PathBuf>,
    /// Text file, one prompt a line; empty lines are left out. Bytes are the tokens.
    #[arg(long, required_unless_present = "ids")]
    pub prompt: Option<PathBuf>,
    /// JSON file with a list of prompts, each a list of token ids.
    #[arg(long, conflicts_with = "prompt")]
    pub ids: Option<PathBuf>,
    /// File to save the first balancer's logits and routing of the prompts to, as safetensors: for
    /// prompt i logits.i [length, vocab], for MoE layer N router.N.indices.i and router.N.weights.i
    /// [length, k].
    #[arg(long)]
    pub logits: Option<PathBuf>,
    /// Refuse the checkpoint unless it is of this config (a name or a JSON file).
    #[arg(long)]
    pub config: Option<String>,
    /// Tokens to write after each prompt, chosen greedily.
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

/// Runs the prompts, prints continuations and the table, and writes the report.
///
/// # Errors
///
/// When an option, the checkpoint or the prompts are not usable, a rank fails, or a file cannot be
/// written.
pub fn run(args: &PrefillArgs) -> Result<PrefillReport, CliError> {
    let source = Source::open(args)?;
    let model = source.config()?;
    args.ranks.validate(&model)?;
    check(
        args.max_new_tokens > 0,
        "--max-new-tokens",
        args.max_new_tokens,
        || "1 or more".into(),
    )?;
    if let Some(name) = &args.config {
        check(
            ModelConfig::resolve(name)? == model,
            "--config",
            name,
            || format!("the config of {}", source.folder().display()),
        )?;
    }
    let prompts = input::prompts(args, &model)?;
    let longest = prompts.iter().map(Vec::len).max().unwrap_or(0);
    check(
        longest + args.max_new_tokens <= model.max_sequence_length,
        "--max-new-tokens",
        args.max_new_tokens,
        || {
            format!(
                "at most the model's max_sequence_length ({}) less the longest prompt ({longest})",
                model.max_sequence_length
            )
        },
    )?;
    let progress = ProgressBar::new((args.balance.len() * args.max_new_tokens) as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:30} {pos}/{len} forward passes [{eta}]") {
        progress.set_style(style);
    }
    let mut outcomes = args
        .ranks
        .run(|comm| run_rank(args, &source, &model, &prompts, &progress, comm))?;
    progress.finish_and_clear();
    if let Some(path) = &args.save_routing {
        let records: Vec<_> = outcomes
            .iter()
            .map(|rank| std::slice::from_ref(&rank[0].routing))
            .collect();
        report::save_routing(path, &model, &records)?;
    }
    if let Some(path) = &args.logits {
        let first = outcomes.iter_mut().filter_map(|rank| rank[0].exact.take());
        logits::save(path, &model, first.collect())?;
    }
    let prompt_tokens = prompts.iter().map(Vec::len).sum();
    let runs = (0..args.balance.len())
        .map(|run| summarise(args.balance[run], prompt_tokens, &mut outcomes, run))
        .collect();
    let report = PrefillReport {
        config: model,
        checkpoint: source.folder().into(),
        ranks: args.ranks.ranks,
        slots: args.ranks.slots,
        planner: args.ranks.planner.clone(),
        timing: args.ranks.timing().name(),
        prompt_tokens,
        runs,
    };
    for Continuation {
        prompt,
        continuation,
    } in &report.runs[0].continuations
    {
        println!("{prompt:?} -> {continuation:?}");
    }
    println!("{}", table(&report));
    let page = report::write(&args.report, &report, &page::prefill(&report))?;
    println!("report: {}", page.display());
    Ok(report)
}

/// One balancer on one rank.
#[derive(Serialize, Deserialize)]
struct RunOutcome {
    time_to_first_token: f64,
    stats: Vec<LayerStats>,
    replica_bytes: usize,
    routing: RoutingRecord,
    /// What `--logits` saves, of the first balancer.
    exact: Option<PromptOutputs>,
    continuations: Vec<Continuation>,
}

fn run_rank(
    args: &PrefillArgs,
    source: &Source,
    model: &ModelConfig,
    prompts: &[Vec<u32>],
    progress: &ProgressBar,
    comm: Arc<dyn Communicator>,
) -> Result<Vec<RunOutcome>, CliError> {
    let device = args.ranks.device();
    let (rank, ranks) = (comm.rank(), comm.size());
    let own = &prompts[prompts.len() * rank / ranks..prompts.len() * (rank + 1) / ranks];
    let mut outcomes = Vec::new();
    for (lane, balance) in args.balance.iter().enumerate() {
        let options = ParallelOptions {
            balance: (*balance).into(),
            planner: args.ranks.planner.clone(),
            slots: args.ranks.slots,
            lane: lane as u64,
            lanes: args.balance.len() as u64,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm.clone(), options)?;
        let decoder = source.load(model, &ep, &device)?;
        let barrier = |part| Key::new(Op::Barrier, lane as u64, 0).with_part(part);
        comm.barrier(barrier(0))?;
        let start = comm.clock();
        let mut sequences = own.to_vec();
        let out = decoder.forward(&TokenBatch::new(&sequences));
        let routing = RoutingRecord::of(&out.routings);
        let exact = (lane == 0 && args.logits.is_some()).then(|| PromptOutputs::of(&out, own));
        append_next(out, &mut sequences, source.candidates(model));
        comm.barrier(barrier(1))?;
        let time_to_first_token = (comm.clock() - start).as_secs_f64();
        let stats = ep.take_stats();
        for pass in 0..args.max_new_tokens {
            if pass > 0 {
                let out = decoder.forward(&TokenBatch::new(&sequences));
                append_next(out, &mut sequences, source.candidates(model));
            }
            if rank == 0 {
                comm.exclude(|| progress.inc(1));
            }
        }
        outcomes.push(RunOutcome {
            time_to_first_token,
            stats,
            replica_bytes: ep.replica_bytes(),
            routing,
            exact,
            continuations: own
                .iter()
                .zip(&sequences)
                .map(|(prompt, sequence)| Continuation {
                    prompt: input::text(prompt, args),
                    continuation: input::text(&sequence[prompt.len()..], args),
                })
                .collect(),
        });
    }
    Ok(outcomes)
}

/// Appends to each sequence the token that the model holds most likely, of the first `candidates`.
fn append_next(out: DecoderOutput, sequences: &mut [Vec<u32>], candidates: usize) {
    let [_, vocab_size] = out.logits.dims();
    let logits: Vec<f32> = out.logits.into_data().iter().collect();
    let mut end = 0;
    for sequence in sequences {
        end += sequence.len();
        // The first of equals wins.
        let last = &logits[(end - 1) * vocab_size..][..candidates];
        let next = (0..candidates)
            .rev()
            .max_by(|a, b| last[*a].total_cmp(&last[*b]));
        sequence.push(next.unwrap_or(0) as u32);
    }
}

fn summarise(
    balance: BalanceArg,
    prompt_tokens: usize,
    outcomes: &mut [Vec<RunOutcome>],
    run: usize,
) -> PrefillRun {
    let stats = outcomes
        .iter_mut()
        .map(|rank| std::mem::take(&mut rank[run].stats))
        .collect();
    let time_to_first_token = outcomes[0][run].time_to_first_token;
    PrefillRun {
        balance: balance.name(),
        time_to_first_token,
        tokens_per_second: prompt_tokens as f64 / time_to_first_token,
        replica_buffer_bytes: outcomes.iter().map(|r| r[run].replica_bytes).collect(),
        layers: LayerSummary::of(&[stats]),
        continuations: outcomes
            .iter_mut()
            .flat_map(|rank| std::mem::take(&mut rank[run].continuations))
            .collect(),
    }
}

fn table(report: &PrefillReport) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "balance",
        "time to first\ntoken (ms)",
        "prompt\ntokens/s",
        "imbalance before\nmean / p95 / max",
        "imbalance after\nmean / p95 / max",
        "copies\na plan",
    ]);
    for run in &report.runs {
        table.add_row([
            run.balance.to_owned(),
            format!("{:.1}", run.time_to_first_token * 1e3),
            format!("{:.0}", run.tokens_per_second),
            spread(&run.layers.imbalance_before),
            spread(&run.layers.imbalance_after),
            format!("{:.1}", run.layers.copies_per_plan.mean),
        ]);
    }
    table
}
