//! Prints what dispatch, combine and replication cost in a training step, over threads and processes of this machine, and
//! what sending replicas' weights early wins.
//!
//! `cargo run --release -p burn-moe-tests --features mpi --bin comm_table`

use std::collections::BTreeMap;
use std::error::Error;
use std::net::TcpListener;
use std::process::{Child, Command, ExitCode, Stdio};
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
#[cfg(feature = "mpi")]
use burn_moe::comm::mpi::try_run_mpi;
use burn_moe::comm::tcp::{Launch, try_run_tcp};
use burn_moe::comm::{Communicator, Key, Meter, Op, RankOptions, Traffic, run_ranks};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_tests::{random, tensor_of};
use clap::{Parser, ValueEnum};
use serde::{Deserialize, Serialize};

/// Prints a Markdown table of what dispatch, combine and replication cost in a step of training, by engine and number of
/// ranks, and of what it wins to send the weights of replicas before the tokens they are for.
///
/// Two models train in turn on the same batches, step by step: one sends weights early, the other when they are waited
/// for. Bytes and times are of the first, forward and backward, a step, the mean over ranks; times are spent in the calls,
/// most of it waiting. The win is the median over pairs of steps.
#[derive(Parser)]
struct Cli {
    /// What connects the ranks.
    #[arg(long, value_delimiter = ',', default_values_t = Engine::built())]
    engines: Vec<Engine>,
    /// Numbers of ranks.
    #[arg(long, value_delimiter = ',', default_values_t = [2, 4])]
    ranks: Vec<usize>,
    /// Steps that are measured.
    #[arg(long, default_value_t = 12, value_parser = positive)]
    steps: usize,
    /// Steps before those.
    #[arg(long, default_value_t = 2)]
    warm: usize,
    /// Mixture-of-experts layers.
    #[arg(long, default_value_t = 3, value_parser = positive)]
    layers: usize,
    /// Width of a token.
    #[arg(long, default_value_t = 256, value_parser = positive)]
    width: usize,
    /// Width of an expert between its two products.
    #[arg(long, default_value_t = 512, value_parser = positive)]
    hidden: usize,
    /// Experts of a layer; the ranks must divide them.
    #[arg(long, default_value_t = 32, value_parser = positive)]
    experts: usize,
    /// Experts of a token.
    #[arg(long, default_value_t = 4, value_parser = positive)]
    top_k: usize,
    /// Tokens of a rank.
    #[arg(long, default_value_t = 512, value_parser = positive)]
    tokens: usize,
    /// Replica slots of a rank.
    #[arg(long, default_value_t = 2)]
    slots: usize,
    /// This process is one of so many ranks, connected by `process_engine`.
    #[arg(long, hide = true, requires = "process_engine")]
    process: Option<usize>,
    #[arg(long, hide = true)]
    process_engine: Option<Engine>,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Engine {
    Threads,
    Tcp,
    #[cfg(feature = "mpi")]
    Mpi,
}

impl Engine {
    fn built() -> Vec<Self> {
        Self::value_variants().to_vec()
    }
}

impl std::fmt::Display for Engine {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Threads => "threads",
            Self::Tcp => "tcp",
            #[cfg(feature = "mpi")]
            Self::Mpi => "mpi",
        })
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("1 or more".into()),
        Ok(number) => Ok(number),
    }
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let done = match (cli.process, cli.process_engine) {
        (Some(ranks), Some(engine)) => process(&cli, engine, ranks),
        _ => table(&cli),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn table(cli: &Cli) -> Result<(), Box<dyn Error>> {
    for ranks in &cli.ranks {
        router(cli).validate()?;
        if *ranks == 0 || !cli.experts.is_multiple_of(*ranks) {
            let experts = cli.experts;
            return Err(
                format!("--ranks is {ranks}, allowed: divisors of the {experts} experts").into(),
            );
        }
    }
    let expert = 4.0 * (3 * cli.width * cli.hidden) as f64 / 1e6;
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    println!(
        "{} layers of width {}, {} experts of {expert:.2} MB, top-{}, {} tokens and {} slots a rank; {cores} cores, {} steps. \
         MB sent and ms in the calls, a step and rank.\n",
        cli.layers, cli.width, cli.experts, cli.top_k, cli.tokens, cli.slots, cli.steps
    );
    println!(
        "| ranks | dispatch MB, ms | combine MB, ms | replication MB, ms | the same, sent late | copies a step | \
         step ms, early / late | won by early sends: median (quartiles) |"
    );
    println!("|---|---|---|---|---|---|---|---|");
    for ranks in &cli.ranks {
        for engine in &cli.engines {
            let measured = match engine {
                Engine::Threads => run_ranks(*ranks, options(), |comm| measure(cli, comm))?,
                _ => start(*engine, *ranks)?,
            };
            println!("| {ranks} {engine} {}", row(&measured));
        }
    }
    Ok(())
}

/// One way to send the weights of replicas, on one rank: sums over the measured steps.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Costs {
    /// Seconds of each step.
    steps: Vec<f64>,
    /// Bytes that this rank sent, and seconds in the calls, by group of operations.
    groups: BTreeMap<String, (f64, f64)>,
    replicas: usize,
}

/// Of one rank: early, late.
type Measured = [Costs; 2];

fn row(ranks: &[Measured]) -> String {
    let [early, late] = &ranks[0];
    let steps = early.steps.len() as f64;
    let group = |name: &str, way: usize| {
        let mean = |of: fn(&(f64, f64)) -> f64| {
            let all = ranks.iter().filter_map(|rank| rank[way].groups.get(name));
            all.map(of).sum::<f64>() / ranks.len() as f64 / steps
        };
        format!("{:.2}, {:.1}", mean(|it| it.0) / 1e6, mean(|it| it.1) * 1e3)
    };
    let pairs = early.steps.iter().zip(&late.steps);
    let won: Vec<f64> = pairs.map(|(early, late)| 1.0 - early / late).collect();
    let won = [0.5, 0.25, 0.75].map(|share| 100.0 * quantile(&won, share));
    format!(
        "| {} | {} | {} | {} | {:.1} | {:.1} / {:.1} | {:.1} % ({:.1} to {:.1}) |",
        group("dispatch", 0),
        group("combine", 0),
        group("replication", 0),
        group("replication", 1),
        early.replicas as f64 / steps,
        quantile(&early.steps, 0.5) * 1e3,
        quantile(&late.steps, 0.5) * 1e3,
        won[0],
        won[1],
        won[2],
    )
}

/// The value below which `share` of the others are; between two, in proportion.
fn quantile(values: &[f64], share: f64) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let at = (sorted.len() - 1) as f64 * share;
    let [below, above] = [at.floor(), at.ceil()].map(|at| sorted[at as usize]);
    below + (above - below) * at.fract()
}

/// The group that an operation is reported in.
fn group(op: Op) -> Option<&'static str> {
    match op {
        Op::Dispatch
        | Op::DispatchIds
        | Op::DispatchWeights
        | Op::DispatchBackward
        | Op::DispatchWeightsBackward => Some("dispatch"),
        Op::Combine | Op::CombineBackward => Some("combine"),
        Op::Replicate | Op::ReplicateBackward | Op::ReplicaGrad => Some("replication"),
        _ => None,
    }
}

fn router(cli: &Cli) -> RouterConfig {
    RouterConfig::new(cli.width, cli.experts, cli.top_k)
}

fn options() -> RankOptions {
    RankOptions {
        timeout: Duration::from_secs(120),
        ..Default::default()
    }
}

/// One rank: both ways in turn on the same tokens, now one first, now the other, so that whatever else the machine does
/// meets both.
fn measure(cli: &Cli, comm: Arc<dyn Communicator>) -> Measured {
    let meter = Meter::new(comm);
    let device = Device::flex().autodiff();
    let models = [true, false].map(|early| {
        let options = ParallelOptions {
            overlap: early,
            slots: cli.slots,
            lane: u64::from(!early),
            lanes: 2,
            ..Default::default()
        };
        let ep = ExpertParallel::new(meter.clone(), options).expect("options");
        let config = MoeConfig::new(router(cli), cli.hidden);
        let layer = |layer| config.init_parallel(&ep, layer, &device).expect("a layer");
        let layers: Vec<Moe> = (0..cli.layers as u32).map(layer).collect();
        (ep, layers)
    });
    // A common direction makes some experts popular.
    let common = random(cli.width, 8);
    let mut costs = Measured::default();
    for step in 0..cli.warm + cli.steps {
        let seed = (step * meter.size() + meter.rank()) as u64;
        let mut tokens = random(cli.tokens * cli.width, seed);
        for (i, x) in tokens.iter_mut().enumerate() {
            *x = 0.5 * *x + common[i % cli.width];
        }
        for turn in 0..2 {
            let way = (turn + step) % 2;
            let (ep, layers) = &models[way];
            let shape = [cli.tokens, cli.width];
            let x = tensor_of(&tokens, shape, DType::F32, &device).require_grad();
            let barrier = |part| {
                let key = Key::new(Op::Barrier, step as u64, way as u32).with_part(part);
                meter.barrier(key).expect("all ranks");
            };
            barrier(0);
            meter.take();
            let start = meter.clock();
            train(layers, x);
            barrier(1);
            let seconds = (meter.clock() - start).as_secs_f64();
            let stats = ep.take_stats();
            if step < cli.warm {
                continue;
            }
            let costs = &mut costs[way];
            costs.steps.push(seconds);
            costs.replicas += stats.iter().map(|it| it.replicas.len()).sum::<usize>();
            for (op, Traffic { bytes, time, .. }) in meter.take() {
                if let Some(group) = group(op) {
                    let sum = costs.groups.entry(group.into()).or_default();
                    sum.0 += bytes as f64;
                    sum.1 += time.as_secs_f64();
                }
            }
        }
    }
    costs
}

fn train(layers: &[Moe], mut x: Tensor<2>) {
    for layer in layers {
        x = layer.forward(x.clone()) + x;
    }
    x.sum().backward();
}

/// Starts as many processes of this program with its own options, and reads what they measure.
fn start(engine: Engine, ranks: usize) -> Result<Vec<Measured>, Box<dyn Error>> {
    let program = std::env::current_exe()?;
    let (engine_name, rank_count) = (engine.to_string(), ranks.to_string());
    let spawn = |command: &mut Command| {
        command.args(std::env::args_os().skip(1));
        command.args(["--process", &rank_count, "--process-engine", &engine_name]);
        command.stdin(Stdio::null()).stdout(Stdio::piped()).spawn()
    };
    let children: Vec<Child> = match engine {
        #[cfg(feature = "mpi")]
        Engine::Mpi => {
            let mut mpirun = Command::new("mpirun");
            mpirun
                .args(["--oversubscribe", "--bind-to", "none", "-n", &rank_count])
                .arg(program)
                // Containers often run everything as root.
                .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
                .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
            vec![spawn(&mut mpirun)?]
        }
        _ => {
            let port = TcpListener::bind("127.0.0.1:0")?.local_addr()?.port();
            let rank = |rank: usize| {
                let mut command = Command::new(&program);
                command
                    .env("RANK", rank.to_string())
                    .env("WORLD_SIZE", &rank_count)
                    .env("MASTER_ADDR", "127.0.0.1")
                    .env("MASTER_PORT", port.to_string());
                spawn(&mut command)
            };
            (0..ranks).map(rank).collect::<Result<_, _>>()?
        }
    };
    let outputs = children.into_iter().map(Child::wait_with_output);
    let outputs = outputs.collect::<Result<Vec<_>, _>>()?;
    if let Some(failed) = outputs.iter().find(|output| !output.status.success()) {
        return Err(format!("{ranks} ranks over {engine}: {}", failed.status).into());
    }
    Ok(serde_json::from_slice(&outputs[0].stdout)?)
}

/// One of these processes; that of rank 0 prints.
fn process(cli: &Cli, engine: Engine, ranks: usize) -> Result<(), Box<dyn Error>> {
    let rank = |comm: Arc<dyn Communicator>| {
        let own = serde_json::to_vec(&measure(cli, comm.clone()))?;
        let all = comm.all_gather(Key::new(Op::Telemetry, 0, 0), own.into())?;
        if comm.rank() == 0 {
            let all = all.iter().map(|text| serde_json::from_slice(text));
            let all: Vec<Measured> = all.collect::<Result<_, _>>()?;
            println!("{}", serde_json::to_string(&all)?);
        }
        Ok::<(), Box<dyn Error + Send + Sync>>(())
    };
    match engine {
        #[cfg(feature = "mpi")]
        Engine::Mpi => try_run_mpi(ranks, options(), rank)?,
        _ => try_run_tcp(&Launch::from_env()?, ranks, options(), rank)?,
    }
    Ok(())
}
