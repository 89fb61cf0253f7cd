//! Compares expert-load planners on recorded or synthetic routing, and gives the sizes of models:
//! `cargo run --release --bin plan -- --help`.

#[path = "../plan/mod.rs"]
mod plan;

use anyhow::{Context, Result, bail, ensure};
use burn_moe::balance::{CostModel, LoadMatrix, PLANNERS, Placement, planner};
use clap::Parser;
use indicatif::{ProgressBar, ProgressStyle};
use plan::measure::{Measurement, Row, Setting};
use plan::model::Question;
use plan::output::{Emitter, print_table, write_file};
use plan::report::{Recorder, Report};
use plan::routing::Routing;
use plan::sizes::Precision;
use plan::synthetic::Synthetic;
use std::path::PathBuf;
use std::process::ExitCode;

/// Compares expert-load planners on recorded or synthetic routing, or gives the sizes of a model.
///
/// A routing file is a safetensors with `ids` [layers, tokens, k] (u8, u16 or i32) and the number of experts as metadata
/// `experts`. Tokens are taken in order, file after file; a micro-batch is --micro-batch consecutive tokens, split evenly
/// and in order over the source ranks; expert e lives on rank e / (experts / ranks).
#[derive(Debug, Parser)]
#[command(name = "plan", version)]
struct Args {
    /// Routing files; all of the same model
    #[arg(long, value_name = "FILE", num_args = 1.., required_unless_present_any = ["synthetic", "model"])]
    routing: Vec<PathBuf>,
    /// Make Zipf loads of the imbalances in --imbalance instead of reading routing files
    #[arg(long, conflicts_with = "routing")]
    synthetic: bool,
    /// Give the sizes of this model on --ep ranks instead: a name, a config.json, or a folder that has
    /// one
    #[arg(long, value_name = "MODEL", conflicts_with_all = ["routing", "synthetic"])]
    model: Option<String>,
    /// With --model: the least time of a forward pass on this accelerator: a100, h100, h200, b200 or
    /// gb200
    #[arg(long, value_name = "GPU")]
    gpu: Option<String>,
    /// With --model: what weights, tokens on the way and products are
    #[arg(long, default_value = "bf16")]
    precision: Precision,
    /// Numbers of ranks
    #[arg(
        long,
        value_name = "RANKS",
        value_delimiter = ',',
        default_value = "8,16,32"
    )]
    ep: Vec<usize>,
    /// Numbers of replica slots on each rank
    #[arg(
        long,
        value_name = "SLOTS",
        value_delimiter = ',',
        default_value = "1,2"
    )]
    slots: Vec<usize>,
    /// Tokens of a micro-batch, over all ranks (routing files)
    #[arg(long, value_name = "TOKENS", default_value_t = 2048)]
    micro_batch: usize,
    /// Planners to compare: `all`, or names separated by commas
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "all"
    )]
    planner: Vec<String>,
    /// Ranks of a fast domain, in which replicas must stay; 0 for one domain of all ranks
    #[arg(long, value_name = "RANKS", default_value_t = 0)]
    domain: usize,
    /// Write one JSON row for each planner, ep and slots; with --model, its sizes
    #[arg(long, value_name = "OUT")]
    json: Option<PathBuf>,
    /// Write every plan, one JSON object a line; `loads` are token copies of each expert
    #[arg(long, value_name = "PLANS.jsonl")]
    emit: Option<PathBuf>,
    /// Write a page to look at, DIR/report.html
    #[arg(long, value_name = "DIR")]
    report: Option<PathBuf>,

    /// Experts of the synthetic loads
    #[arg(long, default_value_t = 256)]
    experts: usize,
    /// Experts that a token chooses in the synthetic loads
    #[arg(long, default_value_t = 8)]
    top_k: usize,
    /// Tokens of each rank in the synthetic loads, and with --model
    #[arg(long, value_name = "TOKENS", default_value_t = 8192)]
    tokens_per_rank: u32,
    /// Wanted max/mean of the synthetic loads without balancing
    #[arg(long, value_delimiter = ',', default_value = "1.5,2,3")]
    imbalance: Vec<f64>,
    /// Synthetic micro-batches for each imbalance
    #[arg(long, default_value_t = 30)]
    batches: usize,
    /// Seed of the synthetic loads
    #[arg(long, default_value_t = 0)]
    seed: u64,

    /// Time of one token copy through one expert, for the predicted step
    #[arg(long, value_name = "NS", default_value_t = 660)]
    token_ns: u64,
    /// Size of one expert's weights, for the predicted step (DeepSeek-V3 in FP8: 42)
    #[arg(long, value_name = "MIB", default_value_t = 42)]
    expert_mib: u64,
    /// Bytes that a rank can send and receive, for the predicted step; 0 when weights cannot move
    #[arg(long, value_name = "GB/S", default_value_t = 400)]
    bandwidth: u64,
    /// Latency of a transfer, for the predicted step
    #[arg(long, value_name = "NS", default_value_t = 5000)]
    latency_ns: u64,
    /// Let `exact-fit` weigh the transfer as the predicted step does; otherwise it takes transfer as free
    #[arg(long)]
    priced: bool,
}

fn main() -> ExitCode {
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() => {
            // One line says what is wrong; `--help` says the rest.
            let text = error.to_string();
            let line: Vec<_> = text
                .lines()
                .map(str::trim)
                .take_while(|l| !l.is_empty())
                .collect();
            eprintln!("{}", line.join(" "));
            return ExitCode::from(2);
        }
        Err(help) => {
            print!("{help}");
            return ExitCode::SUCCESS;
        }
    };
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::from(2)
        }
    }
}

fn run(args: &Args) -> Result<()> {
    for (name, values) in [("--ep", &args.ep), ("--slots", &args.slots)] {
        ensure!(
            !values.is_empty(),
            "{name} is empty, allowed: one number or more"
        );
    }
    for &ep in &args.ep {
        ensure!(
            (1..=1 << 16).contains(&ep),
            "--ep is {ep}, allowed: 1 to 65536"
        );
    }
    ensure!(
        args.tokens_per_rank > 0,
        "--tokens-per-rank is 0, allowed: at least 1"
    );
    if let Some(model) = &args.model {
        return plan::model::run(&Question {
            model,
            ep: &args.ep,
            slots: &args.slots,
            tokens_per_rank: args.tokens_per_rank,
            precision: args.precision,
            gpu: args.gpu.as_deref(),
            json: args.json.as_deref(),
        });
    }
    ensure!(
        args.gpu.is_none(),
        "--gpu is given, allowed: only with --model"
    );
    let planners = chosen_planners(&args.planner)?;
    let mut settings = Vec::new();
    for &slots in &args.slots {
        settings.extend(planners.iter().map(|planner| Setting {
            planner: planner.clone(),
            slots,
        }));
    }
    let mut run = Run {
        args,
        settings,
        emitter: args.emit.as_deref().map(Emitter::create).transpose()?,
        recorder: args.report.is_some().then(Recorder::default),
        rows: Vec::new(),
    };
    if args.synthetic {
        run.synthetic()?;
    } else {
        run.routing()?;
    }
    run.finish()
}

fn chosen_planners(names: &[String]) -> Result<Vec<String>> {
    let mut chosen = Vec::new();
    for name in names {
        if name == "all" {
            chosen.extend(PLANNERS.iter().map(|n| n.to_string()));
        } else {
            planner(name)?;
            chosen.push(name.clone());
        }
    }
    let mut seen = std::collections::HashSet::new();
    chosen.retain(|name| seen.insert(name.clone()));
    ensure!(
        !chosen.is_empty(),
        "--planner is empty, allowed: all, {}",
        PLANNERS.join(", ")
    );
    Ok(chosen)
}

/// One run of the program: all workloads, and what is written about them.
struct Run<'a> {
    args: &'a Args,
    settings: Vec<Setting>,
    emitter: Option<Emitter>,
    recorder: Option<Recorder>,
    rows: Vec<Row>,
}

impl Run<'_> {
    fn routing(&mut self) -> Result<()> {
        let args = self.args;
        let files = args.routing.iter().map(|path| Routing::read(path));
        let files = files.collect::<Result<Vec<_>>>()?;
        let Some(first) = files.first() else {
            bail!("--routing names no file");
        };
        let size = args.micro_batch;
        ensure!(size > 0, "--micro-batch is 0, allowed: at least 1");
        for (file, path) in files.iter().zip(&args.routing) {
            ensure!(
                (file.layers, file.experts) == (first.layers, first.experts),
                "routing file {} has {} layers and {} experts, but {} has {} and {}",
                path.display(),
                file.layers,
                file.experts,
                args.routing[0].display(),
                first.layers,
                first.experts
            );
            ensure!(
                file.micro_batches(size) > 0,
                "routing file {} has {} tokens, fewer than --micro-batch {size}",
                path.display(),
                file.tokens
            );
        }
        let names = args.routing.iter().map(|p| {
            let name = p.file_stem().unwrap_or(p.as_os_str());
            name.to_string_lossy().into_owned()
        });
        let names: Vec<_> = names.collect();
        let workload = format!(
            "{}, {} experts, top-{}, micro-batches of {size} tokens",
            names.join(" + "),
            first.experts,
            first.top_k
        );
        let batches: usize = files.iter().map(|f| f.micro_batches(size)).sum();
        let progress = progress(args.ep.len() * first.layers * batches);
        for &ep in &args.ep {
            let mut load = LoadMatrix::new(ep, first.experts);
            let mut measurement = self.measurement(first.experts, ep)?;
            for layer in 0..first.layers {
                measurement.next_layer()?;
                let mut micro_batch = 0;
                for file in &files {
                    for i in 0..file.micro_batches(size) {
                        file.count(layer, i, size, &mut load);
                        self.plan(&mut measurement, &workload, &load, layer, micro_batch)?;
                        micro_batch += 1;
                        progress.inc(1);
                    }
                }
            }
            self.rows.extend(measurement.rows(&workload));
        }
        progress.finish_and_clear();
        Ok(())
    }

    fn synthetic(&mut self) -> Result<()> {
        let args = self.args;
        let experts = args.experts;
        ensure!(
            (1..=1 << 16).contains(&experts),
            "--experts is {experts}, allowed: 1 to 65536"
        );
        ensure!(
            (1..=experts).contains(&args.top_k),
            "--top-k is {}, allowed: 1 to --experts {experts}",
            args.top_k
        );
        ensure!(args.batches > 0, "--batches is 0, allowed: at least 1");
        for &imbalance in &args.imbalance {
            ensure!(
                imbalance >= 1.0,
                "--imbalance is {imbalance}, allowed: at least 1"
            );
        }
        let progress = progress(args.ep.len() * args.imbalance.len() * args.batches);
        for &ep in &args.ep {
            for &imbalance in &args.imbalance {
                let synthetic = Synthetic {
                    ranks: ep,
                    experts,
                    top_k: args.top_k,
                    tokens_per_rank: args.tokens_per_rank,
                    imbalance,
                };
                let workload = format!(
                    "synthetic, imbalance {imbalance}, EP{ep}, {experts} experts, top-{}, {} tokens a rank",
                    args.top_k, args.tokens_per_rank
                );
                let mut measurement = self.measurement(experts, ep)?;
                for (i, load) in synthetic.loads(args.seed).take(args.batches).enumerate() {
                    self.plan(&mut measurement, &workload, &load, 0, i)?;
                    progress.inc(1);
                }
                self.rows.extend(measurement.rows(&workload));
            }
        }
        progress.finish_and_clear();
        Ok(())
    }

    fn measurement(&self, experts: usize, ep: usize) -> Result<Measurement> {
        let args = self.args;
        let domain = if args.domain == 0 { ep } else { args.domain };
        let placement = Placement::contiguous(experts, ep).with_domains(domain)?;
        let expert_bytes = args.expert_mib.saturating_mul(1 << 20);
        let cost = CostModel {
            token_ps: args.token_ns.saturating_mul(1000),
            expert_bytes,
            bandwidth: args.bandwidth.saturating_mul(1_000_000_000),
            latency_ps: args.latency_ns.saturating_mul(1000),
            chunk_bytes: expert_bytes / 16,
        };
        Measurement::new(placement, self.settings.clone(), cost, args.priced)
    }

    fn plan(
        &mut self,
        measurement: &mut Measurement,
        workload: &str,
        load: &LoadMatrix,
        layer: usize,
        micro_batch: usize,
    ) -> Result<()> {
        measurement.micro_batch(load, layer, micro_batch, |outcome| {
            let setting = &self.settings[outcome.setting];
            if let Some(emitter) = &mut self.emitter {
                emitter.plan(workload, &setting.planner, setting.slots, &outcome)?;
            }
            if let Some(recorder) = &mut self.recorder {
                recorder.plan(workload, setting, &outcome);
            }
            Ok(())
        })
    }

    fn finish(self) -> Result<()> {
        print_table(&self.rows)?;
        if let Some(emitter) = self.emitter {
            emitter.finish()?;
        }
        if let Some(path) = &self.args.json {
            write_file(path, &serde_json::to_vec_pretty(&self.rows)?)?;
        }
        if let (Some(dir), Some(recorder)) = (&self.args.report, self.recorder) {
            std::fs::create_dir_all(dir)
                .with_context(|| format!("cannot create {}", dir.display()))?;
            let page = Report::new(recorder, &self.rows).html();
            write_file(&dir.join("report.html"), page.as_bytes())?;
        }
        Ok(())
    }
}

fn progress(steps: usize) -> ProgressBar {
    let style = ProgressStyle::with_template("{bar:40} {pos}/{len} micro-batches, {eta} left");
    let bar = ProgressBar::new(steps as u64);
    style
        .map(|style| bar.clone().with_style(style))
        .unwrap_or(bar)
}
