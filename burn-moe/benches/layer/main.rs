//! One MoE layer on one thread, against a loop over experts in Burn and against candle, all in one
//! run: `cargo bench -p burn-moe`.
//!
//! - `BURN_MOE_SHAPES`: comma-separated of S, M, V, or `all`; M by default.
//! - `BURN_MOE_TOKENS`: comma-separated token counts, or `all` for 1, 16, 128, 512, 2048; 1, 16, 512
//!   by default.
//! - `BURN_MOE_CLOCK`: `wall`, or `cpu` on a machine that is not idle.
//!
//! The four benchmarks of a shape, f32, weights and routing the same:
//!
//! - `ours`: the experts, from chosen experts and weights: sorting copies, gathering rows, grouped
//!   SwiGLU, weighted sum.
//! - `layer`: a whole `Moe` layer: that, the router, and planning and dispatch over one rank.
//! - `loop`: what `ours` does, as a loop over experts in Burn: select rows, three products, add to the
//!   output; each expert with tensors of its own.
//! - `candle`: what `ours` does, by the algorithm of candle's MoE blocks.
//!
//! `read` beside them reads the weights of the experts that have tokens, once. With the machine's matrix product it
//! makes the ceiling of a forward pass: the later of the two.
//!
//! A table of medians and ratios comes last.

mod clock;
mod memory;
mod peers;
mod report;
mod shapes;

use std::hint::black_box;
use std::time::Duration;

use burn::tensor::{Device, Tensor};
use criterion::{BenchmarkGroup, Criterion, SamplingMode};

use clock::Clock;
use peers::{Candle, Layer, LoopOverExperts, Ours, Peer};
use report::{READ, Report};
use shapes::{Case, Shape, cases};

#[global_allocator]
static ALLOCATOR: memory::Counting = memory::Counting;

fn main() {
    // SAFETY: no other thread runs yet. Candle asks this variable for its number of threads.
    unsafe { std::env::set_var("RAYON_NUM_THREADS", "1") };
    rayon::ThreadPoolBuilder::new()
        .num_threads(1)
        .build_global()
        .expect("no pool has been made yet");
    // As criterion decides it.
    let args: Vec<String> = std::env::args().collect();
    let test = args.iter().any(|a| a == "--test") || !args.iter().any(|a| a == "--bench");
    if let Ok(case) = std::env::var(MEMORY) {
        print_memory(&case, test);
        return;
    }
    let clock = Clock::chosen();
    let mut report = Report::new(criterion_home(), clock.name());
    let mut criterion = Criterion::default()
        .with_measurement(clock)
        .sample_size(10)
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(1))
        .without_plots()
        .configure_from_args()
        .output_directory(report.home());

    let size = if test { 64 } else { 2048 };
    for (shape, tokens) in cases(test) {
        for tokens in tokens {
            report.memory(memory_alone(&shape, tokens, &args[1..]));
        }
    }
    report.ceiling = ceiling(&mut criterion, size);
    for (shape, tokens) in cases(test) {
        bench_shape(&mut criterion, &mut report, &shape, &tokens);
    }
    if !test {
        report.print();
    }
}

/// Set to a case for a process that only measures its memory.
const MEMORY: &str = "BURN_MOE_MEMORY";

/// What [`print_memory`] prints for a single case, in a process of its own: buffers that other cases have left
/// for use again would count.
fn memory_alone(shape: &Shape, tokens: usize, args: &[String]) -> String {
    let program = std::env::current_exe().expect("this program's path");
    let output = std::process::Command::new(program)
        .args(args)
        .env(MEMORY, memory_case(shape, tokens))
        .stderr(std::process::Stdio::inherit())
        .output()
        .expect("this program starts again");
    assert!(output.status.success(), "measuring memory failed");
    String::from_utf8_lossy(&output.stdout).trim_end().into()
}

fn memory_case(shape: &Shape, tokens: usize) -> String {
    format!("{} {tokens}", shape.name)
}

/// Peak memory of a training step of this case, and the least there can be.
fn print_memory(wanted: &str, test: bool) {
    let mib = |bytes: usize| bytes as f64 / f64::from(1 << 20);
    for (shape, tokens) in cases(test) {
        for tokens in tokens {
            if memory_case(&shape, tokens) != wanted {
                continue;
            }
            let others = memory::live();
            let case = Case::new(&shape, tokens);
            let inputs = memory::live() - others;
            let [peak, floor] = Ours::new(&shape).memory_of_training(&case, others + inputs);
            println!(
                "{:<16} peak {:8.1} MiB, floor {:8.1} MiB, ratio {:.2}",
                case.name(),
                mib(peak),
                mib(floor),
                peak as f64 / floor as f64
            );
        }
    }
}

/// Where criterion keeps its estimates, which the table is made of.
fn criterion_home() -> std::path::PathBuf {
    let target = std::env::var_os("CARGO_TARGET_DIR").map_or_else(
        || std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../target"),
        Into::into,
    );
    target.join("criterion").join("burn-moe")
}

/// One large product, in floating-point operations: what the machine can do at most.
fn ceiling(criterion: &mut Criterion<Clock>, size: usize) -> f64 {
    let device = Device::flex();
    let values = shapes::values(size * size, 1, 1.0);
    let matrix = shapes::tensor(values, [size, size], &device);
    let mut group = criterion.benchmark_group("ceiling");
    group.sampling_mode(SamplingMode::Flat);
    group.bench_function("matmul", |bencher| {
        bencher.iter(|| black_box(matrix.clone().matmul(matrix.clone())));
    });
    group.finish();
    2.0 * (size as f64).powi(3)
}

fn bench_shape(
    criterion: &mut Criterion<Clock>,
    report: &mut Report,
    shape: &Shape,
    tokens: &[usize],
) {
    let ours = Ours::new(shape);
    let layer = Layer::new(shape);
    let looped = LoopOverExperts::new(shape);
    let candle = Candle::new(shape);
    let peers: [&dyn Peer; 4] = [&ours, &layer, &looped, &candle];
    for &tokens in tokens {
        let case = Case::new(shape, tokens);
        agree(&case, &peers);
        for pass in ["forward", "training"] {
            let name = format!("{}-{tokens}-{pass}", shape.name);
            let mut group = criterion.benchmark_group(&name);
            group.sampling_mode(SamplingMode::Flat);
            for peer in peers {
                bench_peer(&mut group, report, &case, peer, pass);
            }
            if pass == "forward" {
                group.bench_function(READ, |bencher| {
                    ours.read(&case, &mut |run| bencher.iter(run));
                });
            }
            group.finish();
        }
    }
}

fn bench_peer(
    group: &mut BenchmarkGroup<'_, Clock>,
    report: &mut Report,
    case: &Case,
    peer: &dyn Peer,
    pass: &'static str,
) {
    group.bench_function(peer.name(), |bencher| {
        report.ran(case, pass, peer.name());
        match pass {
            "forward" => peer.forward(case, &mut |run| bencher.iter(run)),
            _ => peer.training(case, &mut |run| bencher.iter(run)),
        }
    });
}

/// All that compute the same must get the same, before any of them is timed.
fn agree(case: &Case, peers: &[&dyn Peer]) {
    let expected = peers[0].results(case);
    for peer in peers.iter().filter(|peer| peer.name() != "layer") {
        let results = peer.results(case).into_iter().zip(&expected);
        let names = ["output", "gradient of x", "gradient of an expert"];
        for (name, (got, expected)) in names.into_iter().zip(results) {
            let largest = expected.iter().fold(0f32, |max, v| max.max(v.abs()));
            let apart = got
                .iter()
                .zip(expected)
                .fold(0f32, |max, (a, b)| max.max((a - b).abs()));
            assert!(
                got.len() == expected.len() && apart <= 1e-4 * largest,
                "{}: {name} of {} is off by {apart} of {largest}",
                case.name(),
                peer.name()
            );
        }
    }
}

/// A scalar whose gradient for `out` is `factors`.
fn loss(out: Tensor<2>, factors: &Tensor<2>) -> Tensor<1> {
    (out * factors.clone()).sum()
}
