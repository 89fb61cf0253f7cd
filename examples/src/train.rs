//! Training over ranks, several balancers side by side on the same batches.

mod args;
mod memory;
mod progress;
mod rank;
mod states;
mod subject;

use comfy_table::Table;
use comfy_table::presets::UTF8_FULL_CONDENSED;

use crate::cli::{BalanceArg, CliError};
use crate::page;
use crate::report::{self, LayerSummary, RunReport, StepStats, Summary, TrainReport, spread};
pub use args::{DtypeArg, OptimizerArgs, ScheduleArg, TrainArgs};
use progress::Progress;
use rank::RankOutcome;
pub use states::StateArgs;
use states::States;
use subject::Subject;

/// Trains, prints the table, and writes the report.
///
/// # Errors
///
/// When an option, the config or the data is not usable, a rank fails, or a file cannot be written.
pub fn run(args: &TrainArgs) -> Result<TrainReport, CliError> {
    let subject = Subject::open(args)?;
    let device = args.device()?;
    memory::check_memory(args, &subject.config, &device)?;
    let corpus = subject.corpus(args)?;
    println!(
        "{} on {}, {} ranks, {} slots, {} timing",
        subject.name,
        corpus.describe(),
        match args.dp {
            1 => args.ranks.ranks.to_string(),
            dp => format!("{dp} x {}", args.expert_ranks()),
        },
        args.ranks.slots,
        args.ranks.timing().name(),
    );
    if args.scale.is_some() || args.layers.is_some() {
        let config = serde_json::to_string_pretty(&subject.config);
        println!("{}", config.unwrap_or_default());
    }
    if subject.folder().is_some() && subject.unit() == "byte" {
        println!(
            "no tokenizer.json in {}: bytes are the tokens",
            subject.name
        );
    }
    let states = States::open(args, &subject.config, &corpus)?;
    let first_step = states.as_ref().map_or(0, States::steps_done);
    let progress = Progress::new(first_step, args.steps, &args.balance, subject.unit());
    let run = rank::Run {
        args,
        subject: &subject,
        corpus: &corpus,
        states: states.as_ref(),
        progress: &progress,
        device: &device,
    };
    let outcomes = args.ranks.run(|comm| rank::run(&run, comm))?;
    progress.finish();
    if let Some(path) = &args.save_routing {
        let records: Vec<_> = outcomes
            .iter()
            .map(|rank| rank.routing.as_slice())
            .collect();
        report::save_routing(path, &subject.config, &records)?;
    }
    if let Some(folder) = &args.save {
        println!("model: {}", folder.display());
    }
    let report = summarise(args, first_step, subject, corpus.source, outcomes);
    println!("{}", table(&report));
    let page = report::write(&args.report, &report, &page::train(&report))?;
    println!("report: {}", page.display());
    Ok(report)
}

fn summarise(
    args: &TrainArgs,
    first_step: usize,
    subject: Subject,
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
            let steps: Vec<StepStats> = (0..args.steps - first_step)
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
                grad_norm: outcomes[0].runs[run].grad_norm.clone(),
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
                layers: LayerSummary::of(&steps, args.expert_ranks()),
            }
        })
        .collect();
    TrainReport {
        unit: subject.unit(),
        config: subject.config,
        config_name: subject.name,
        parameters: outcomes[0].parameters,
        ranks: args.ranks.ranks,
        dp: args.dp,
        nodes: args.ranks.nodes,
        hierarchical: args.ranks.hierarchical,
        slots: args.ranks.slots,
        planner: args.ranks.planner.clone(),
        seed: args.seed,
        steps: args.steps,
        first_step,
        batch: args.batch,
        sequence_length: args.sequence_length,
        accumulate: args.accumulate,
        checkpointing: args.checkpointing,
        dtype: args.dtype.name(),
        lr: args.optimizer.lr,
        schedule: args.optimizer.schedule.name(),
        warmup: args.optimizer.warmup,
        weight_decay: args.optimizer.weight_decay,
        clip: args.optimizer.clip,
        timing: args.ranks.timing().name(),
        data,
        runs,
    }
}

fn table(report: &TrainReport) -> Table {
    let mut table = Table::new();
    let loss = format!("bits/{}\nfirst -> last", report.unit);
    table.load_preset(UTF8_FULL_CONDENSED).set_header([
        "balance",
        &loss,
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
