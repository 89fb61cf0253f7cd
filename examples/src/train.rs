//! Training over ranks, several balancers side by side on the same batches.

mod progress;
mod rank;

use std::collections::HashSet;
use std::path::PathBuf;

use burn_moe_models::{ModelConfig, checkpoint};
use clap::Args;
use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use crate::cli::{BalanceArg, CliError, RankArgs, check};
use crate::data::Corpus;
use crate::page;
use crate::report::{self, LayerSummary, RunReport, StepStats, Summary, TrainReport, spread};
use progress::Progress;
use rank::RankOutcome;

/// Options of `train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Named config (tiny, smoke) or a JSON file with all fields of one.
    #[arg(long, default_value = "tiny")]
    pub config: String,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ranks: RankArgs,
    /// Balancers to run side by side on the same batches.
    #[arg(long, value_delimiter = ',', default_value = "none,exact,ideal")]
    pub balance: Vec<BalanceArg>,
    /// Optimizer steps.
    #[arg(long, default_value_t = 50)]
    pub steps: usize,
    /// Seed of weights and data.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Sequences of a step, over all ranks.
    #[arg(long, default_value_t = 16)]
    pub batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    pub sequence_length: usize,
    /// Learning rate at the start; falls to a tenth along a cosine.
    #[arg(long, default_value_t = 3e-3)]
    pub lr: f64,
    /// Step of the routers' selection bias.
    #[arg(long, default_value_t = 1e-3)]
    pub bias_speed: f64,
    /// Weight of the sequence-wise auxiliary loss.
    #[arg(long, default_value_t = 1e-4)]
    pub aux_loss: f64,
    /// Text to train on, a file or a folder. Default: the sources of this workspace's dependencies.
    #[arg(long)]
    pub data: Option<PathBuf>,
    /// Folder for report.json and report.html.
    #[arg(long, default_value = "target/train-report")]
    pub report: PathBuf,
    /// Folder to save the first balancer's model to.
    #[arg(long)]
    pub checkpoint: Option<PathBuf>,
    /// File to save the first balancer's routing to, as safetensors (ids [layers, tokens, k]).
    #[arg(long)]
    pub save_routing: Option<PathBuf>,
}

impl TrainArgs {
    fn validate(&self, model: &ModelConfig) -> Result<(), CliError> {
        self.ranks.validate(model)?;
        let one_or_more = || "1 or more".to_owned();
        check(self.steps > 0, "--steps", self.steps, one_or_more)?;
        check(
            self.batch >= self.ranks.ranks,
            "--batch",
            self.batch,
            || format!("at least one sequence a rank ({})", self.ranks.ranks),
        )?;
        check(
            (1..=model.max_sequence_length).contains(&self.sequence_length),
            "--sequence-length",
            self.sequence_length,
            || {
                format!(
                    "1 to the config's max_sequence_length ({})",
                    model.max_sequence_length
                )
            },
        )?;
        check(self.lr > 0.0 && self.lr <= 1.0, "--lr", self.lr, || {
            "more than 0, at most 1".into()
        })?;
        for (option, value) in [
            ("--bias-speed", self.bias_speed),
            ("--aux-loss", self.aux_loss),
        ] {
            check(value.is_finite() && value >= 0.0, option, value, || {
                "0 or more".into()
            })?;
        }
        check(
            self.balance.iter().collect::<HashSet<_>>().len() == self.balance.len(),
            "--balance",
            self.balance
                .iter()
                .map(|b| b.name())
                .collect::<Vec<_>>()
                .join(","),
            || "each of none, exact, ideal at most once".into(),
        )?;
        check(model.vocab_size >= 256, "--config", &self.config, || {
            format!(
                "configs with a vocab_size of 256 or more, bytes are the vocabulary (it has {})",
                model.vocab_size
            )
        })
    }

    fn tokens_per_step(&self) -> usize {
        self.batch * self.sequence_length
    }
}

/// Trains, prints the table, and writes the report.
///
/// # Errors
///
/// When an option, the config or the data is not usable, a rank fails, or a file cannot be written.
pub fn run(args: &TrainArgs) -> Result<TrainReport, CliError> {
    let model = ModelConfig::resolve(&args.config)?;
    args.validate(&model)?;
    if let Some(folder) = &args.checkpoint {
        checkpoint::check_target(folder, &model)?;
    }
    let needed = args.tokens_per_step();
    let corpus = Corpus::read(
        args.data.as_deref(),
        args.steps * needed + 1,
        (args.sequence_length + 1).min(needed),
        args.seed,
    )?;
    println!(
        "{} on {} ({} KiB), {} ranks, {} slots, {} timing",
        args.config,
        corpus.source,
        corpus.len() / 1024,
        args.ranks.ranks,
        args.ranks.slots,
        args.ranks.timing().name(),
    );
    let progress = Progress::new(args.steps, &args.balance);
    let outcomes = args
        .ranks
        .run(|comm| rank::run(args, &model, &corpus, &progress, comm))?;
    progress.finish();
    if let Some(path) = &args.save_routing {
        let records: Vec<_> = outcomes
            .iter()
            .map(|rank| rank.routing.as_slice())
            .collect();
        report::save_routing(path, &model, &records)?;
    }
    let report = summarise(args, model, corpus.source, outcomes);
    println!("{}", table(&report));
    let page = report::write(&args.report, &report, &page::train(&report))?;
    println!("report: {}", page.display());
    Ok(report)
}

fn summarise(
    args: &TrainArgs,
    config: ModelConfig,
    data: String,
    mut outcomes: Vec<RankOutcome>,
) -> TrainReport {
    let ideal = args.balance.iter().position(|b| *b == BalanceArg::Ideal);
    let seconds: Vec<Vec<f64>> = outcomes[0]
        .runs
        .iter()
        .map(|run| run.seconds.clone())
        .collect();
    let runs = (0..args.balance.len())
        .map(|run| {
            let steps: Vec<StepStats> = (0..args.steps)
                .map(|step| {
                    outcomes
                        .iter_mut()
                        .map(|rank| std::mem::take(&mut rank.runs[run].stats[step]))
                        .collect()
                })
                .collect();
            let median = Summary::of(seconds[run].iter().copied()).p50;
            RunReport {
                balance: args.balance[run].name(),
                loss: outcomes[0].runs[run].loss.clone(),
                step_seconds: seconds[run].clone(),
                tokens_per_second: args.tokens_per_step() as f64 / median,
                ratio_to_ideal: ideal.map(|ideal| {
                    let pairs = seconds[ideal].iter().zip(&seconds[run]);
                    Summary::of(pairs.map(|(ideal, own)| ideal / own)).p50
                }),
                replica_buffer_bytes: outcomes
                    .iter()
                    .map(|rank| rank.runs[run].replica_bytes)
                    .collect(),
                layers: LayerSummary::of(&steps),
            }
        })
        .collect();
    TrainReport {
        config,
        config_name: args.config.clone(),
        parameters: outcomes[0].parameters,
        ranks: args.ranks.ranks,
        slots: args.ranks.slots,
        planner: args.ranks.planner.clone(),
        seed: args.seed,
        steps: args.steps,
        batch: args.batch,
        sequence_length: args.sequence_length,
        timing: args.ranks.timing().name(),
        data,
        runs,
    }
}

fn table(report: &TrainReport) -> Table {
    let mut table = Table::new();
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "balance",
        "bits/byte\nfirst -> last",
        "tokens/s",
        "ratio to\nideal",
        "imbalance before\nmean / p95 / max",
        "imbalance after\nmean / p95 / max",
        "copies\na plan",
        "planning us\np50 / p95",
        "MB dispatched\na step",
        "MB replicated\na step",
        "replica KB\na rank",
    ]);
    for run in &report.runs {
        let layers = &run.layers;
        let ends = [run.loss.first(), run.loss.last()].map(|l| l.copied().unwrap_or(f64::NAN));
        let buffer = run.replica_buffer_bytes.iter().max().copied().unwrap_or(0);
        table.add_row([
            run.balance.to_owned(),
            format!("{:.3} -> {:.3}", ends[0], ends[1]),
            format!("{:.0}", run.tokens_per_second),
            run.ratio_to_ideal
                .map_or("-".into(), |ratio| format!("{ratio:.3}")),
            spread(&layers.imbalance_before),
            spread(&layers.imbalance_after),
            format!("{:.1}", layers.copies_per_plan.mean),
            format!(
                "{:.1} / {:.1}",
                layers.planning_us.p50, layers.planning_us.p95
            ),
            format!("{:.2}", layers.bytes_dispatched_per_step / 1e6),
            format!("{:.2}", layers.bytes_replicated_per_step / 1e6),
            format!("{:.0}", buffer as f64 / 1024.0),
        ]);
    }
    table
}
