//! Prints what dispatch, combine and replication cost in a training step, over threads and (feature `mpi`) processes of
//! this machine, and what sending replicas' weights early wins.
//!
//! `cargo run --release -p burn-moe-tests --features mpi --bin comm_table`

use std::collections::BTreeMap;
use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{DType, Device, Tensor};
use burn_moe::comm::{Communicator, Key, Meter, Op, RankOptions, Traffic, run_ranks};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_tests::{random, tensor_of};
use serde::{Deserialize, Serialize};

const LAYERS: u32 = 3;
const WIDTH: usize = 256;
const TOKENS: usize = 512;
const WARM: usize = 2;
const STEPS: usize = 12;

/// Weights of replicas sent when they are waited for, and before.
const WAYS: [&str; 2] = ["late", "early"];

/// Means over steps of one way.
#[derive(Clone, Default, Serialize, Deserialize)]
struct Costs {
    /// Seconds of each step.
    steps: Vec<f64>,
    /// Bytes that this rank sent, and seconds in the calls, by group of operations.
    groups: BTreeMap<String, (f64, f64)>,
    replicas: f64,
}

/// Of both ways, on one rank.
type Measured = Vec<Costs>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    #[cfg(feature = "mpi")]
    if let [only, ranks] = arguments
        && only == "--process"
    {
        return processes::rank(ranks.parse()?);
    }
    if !arguments.is_empty() {
        return Err("there are no arguments".into());
    }
    println!(
        "{LAYERS} layers of width {WIDTH}, 32 experts of 1.5 MB, top-4, {TOKENS} tokens a rank, 2 slots; forward and \
         backward. Bytes and time in calls per step, mean over ranks; step: median.\n"
    );
    println!(
        "| ranks | weights sent | dispatch MB, ms | combine MB, ms | replication MB, ms | copies a step | step ms |"
    );
    println!("|---|---|---|---|---|---|---|");
    for ranks in [2, 4] {
        let options = RankOptions {
            timeout: Duration::from_secs(120),
            ..Default::default()
        };
        show("threads", ranks, &run_ranks(ranks, options, measure)?);
        #[cfg(feature = "mpi")]
        show("processes", ranks, &processes::start(ranks)?);
    }
    Ok(())
}

fn show(engine: &str, ranks: usize, measured: &[Measured]) {
    let mut medians = Vec::new();
    for (way, name) in WAYS.iter().enumerate() {
        let group = |name: &str| {
            let mean = |of: fn(&(f64, f64)) -> f64| {
                let all = measured
                    .iter()
                    .filter_map(|rank| rank[way].groups.get(name));
                all.map(of).sum::<f64>() / measured.len() as f64
            };
            format!("{:.2}, {:.1}", mean(|it| it.0) / 1e6, mean(|it| it.1) * 1e3)
        };
        let mut steps = measured[0][way].steps.clone();
        steps.sort_by(f64::total_cmp);
        let median = steps[steps.len() / 2] * 1e3;
        println!(
            "| {ranks} {engine} | {name} | {} | {} | {} | {:.1} | {median:.1} |",
            group("dispatch"),
            group("combine"),
            group("replication"),
            measured[0][way].replicas,
        );
        medians.push(median);
    }
    let won = 100.0 * (1.0 - medians[1] / medians[0]);
    println!("| {ranks} {engine} | early wins | | | | | {won:.1} % |");
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

/// One rank: both ways in turn, step by step, so that whatever else the machine does meets both.
fn measure(comm: Arc<dyn Communicator>) -> Measured {
    let meter = Meter::new(comm);
    let device = Device::flex().autodiff();
    let lanes: Vec<(Arc<ExpertParallel>, Vec<Moe>)> = (0..WAYS.len())
        .map(|way| {
            let options = ParallelOptions {
                overlap: WAYS[way] == "early",
                lane: way as u64,
                lanes: WAYS.len() as u64,
                ..Default::default()
            };
            let ep = ExpertParallel::new(meter.clone(), options).expect("options");
            let config = MoeConfig::new(RouterConfig::new(WIDTH, 32, 4), 512);
            let layer = |layer| config.init_parallel(&ep, layer, &device).expect("a layer");
            let layers = (0..LAYERS).map(layer).collect();
            (ep, layers)
        })
        .collect();
    // A common direction makes some experts popular.
    let common = random(WIDTH, 8);
    let mut costs = vec![Costs::default(); WAYS.len()];
    for step in 0..WARM + STEPS {
        let seed = (step * meter.size() + meter.rank()) as u64;
        let mut tokens = random(TOKENS * WIDTH, seed);
        for (i, x) in tokens.iter_mut().enumerate() {
            *x = 0.5 * *x + common[i % WIDTH];
        }
        for (way, (ep, layers)) in lanes.iter().enumerate() {
            let x = tensor_of(&tokens, [TOKENS, WIDTH], DType::F32, &device).require_grad();
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
            if step < WARM {
                continue;
            }
            let costs = &mut costs[way];
            costs.steps.push(seconds);
            let replicas: usize = stats.iter().map(|it| it.replicas.len()).sum();
            costs.replicas += replicas as f64 / STEPS as f64;
            for (op, Traffic { bytes, time, .. }) in meter.take() {
                if let Some(group) = group(op) {
                    let sum = costs.groups.entry(group.into()).or_default();
                    sum.0 += bytes as f64 / STEPS as f64;
                    sum.1 += time.as_secs_f64() / STEPS as f64;
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

#[cfg(feature = "mpi")]
mod processes {
    use std::process::Command;

    use burn_moe::comm::mpi::try_run_mpi;
    use burn_moe_tests::ranks;

    use super::*;

    /// Starts as many processes of this program, and reads what they measure.
    pub fn start(count: usize) -> Result<Vec<Measured>, Box<dyn Error>> {
        let output = Command::new("mpirun")
            .args([
                "--oversubscribe",
                "--bind-to",
                "none",
                "-n",
                &count.to_string(),
            ])
            .arg(std::env::current_exe()?)
            .args(["--process", &count.to_string()])
            // Containers often run everything as root.
            .env("OMPI_ALLOW_RUN_AS_ROOT", "1")
            .env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
            .output()?;
        if !output.status.success() {
            return Err(String::from_utf8_lossy(&output.stderr).into());
        }
        Ok(serde_json::from_slice(&output.stdout)?)
    }

    /// One of them; that of rank 0 prints.
    pub fn rank(count: usize) -> Result<(), Box<dyn Error>> {
        let options = RankOptions {
            timeout: Duration::from_secs(120),
            ..Default::default()
        };
        try_run_mpi(count, options.clone(), |comm| {
            ranks::use_world(comm.clone());
            let all = ranks::run(count, options, measure);
            if comm.rank() == 0 {
                println!("{}", serde_json::to_string(&all)?);
            }
            Ok::<(), Box<dyn Error + Send + Sync>>(())
        })?;
        Ok(())
    }
}
