//! Rows and weights over NCCL, on real GPUs: is what arrives right, and how fast is it.
//!
//! ```sh
//! cargo build --release --package burn-moe-tests --features nccl --bin nccl_check
//!
//! target/release/nccl_check                       # one GPU: sends to itself
//! mpirun -n 8 target/release/nccl_check           # eight GPUs of one machine, or
//! torchrun --no-python --nproc-per-node 8 target/release/nccl_check       # or
//! for rank in 1 2 3 4 5 6 7 0; do
//!   RANK=$rank LOCAL_RANK=$rank WORLD_SIZE=8 MASTER_ADDR=127.0.0.1 target/release/nccl_check &
//! done; wait
//! ```
//!
//! Over several machines each process also needs `MASTER_ADDR`, and a secret in `BURN_MOE_SECRET`. NCCL must be where the
//! system looks for libraries, or in `BURN_MOE_NCCL`. Ends with 0 when all is right, with 1 and a line on the standard error
//! otherwise, as where there is no CUDA device.

use std::error::Error;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Instant;

use burn::module::Param;
use burn::optim::GradientsParams;
use burn::tensor::{DType, Device, Distribution, Tensor};
use burn_moe::comm::nccl::{self, NcclOptions};
use burn_moe::comm::tcp::{Launch, LaunchError, try_run_tcp};
use burn_moe::comm::{CommError, Communicator, Key, Op, RankOptions, solo};
use burn_moe::layer::{FeedForwardConfig, MoeConfig, RouterConfig};
use burn_moe::ops::{
    Pass, Replica, ReplicaPool, Replication, RowExchange, all_to_all_rows, expert_swiglu,
    send_experts,
};
use burn_moe::parallel::{Balance, CombineOrder, reduce_gradients};
use burn_moe_tests::layer_run::{LayerPart, LayerRun};
use burn_moe_tests::{index_of, random, relative_error, tensor_of, values};

type Check = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> ExitCode {
    let result = match Launch::from_env() {
        Ok(launch) if launch.world_size > 1 => {
            let options = RankOptions::default();
            try_run_tcp(&launch, launch.world_size, options, check).map_err(Into::into)
        }
        Ok(_) | Err(LaunchError::NoLauncher) => check(solo()),
        Err(error) => Err(error.into()),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("nccl_check: {error}");
            ExitCode::FAILURE
        }
    }
}

fn check(host: Arc<dyn Communicator>) -> Check {
    let number = nccl::local_device()?;
    let linked = nccl::connect(host.clone(), number, NcclOptions::default())?;
    let say = |line: String| {
        if host.rank() == 0 {
            println!("{line}");
        }
    };
    let version = nccl::library_version()?;
    say(format!("NCCL {version}, {} rank(s), linked", host.size()));
    let device = Device::cuda(number);
    rows(&linked, &device)?;
    say("rows arrive as over the host, bit by bit".into());
    replicas_of_its_own(&linked, &device)?;
    say("replicas of a rank's own experts: forward and gradients as without".into());
    sums(&host, &linked, &device)?;
    say("gradients of dense parameters: summed as through the host, bit by bit".into());
    layers(&host, &linked, &device, &say)?;
    let traffic = linked.device_link().expect("a link").traffic();
    say(format!("rank 0 sent over the link: {traffic:?}"));
    speed(&linked, &device, &say)
}

fn ensure(right: bool, what: impl FnOnce() -> String) -> Check {
    match right {
        true => Ok(()),
        false => Err(what().into()),
    }
}

/// From rank `a` to rank `b` go `(a + 2 b) % 5` rows.
fn rows(linked: &Arc<dyn Communicator>, device: &Device) -> Check {
    let (rank, size, width) = (linked.rank(), linked.size(), 33);
    let count = |from: usize, to: usize| (from + 2 * to + 1) % 5;
    let exchange = RowExchange {
        comm: linked.clone(),
        key: Key::new(Op::Dispatch, 0, 0),
        backward_key: Key::new(Op::DispatchBackward, 0, 0),
        send: (0..size).map(|to| count(rank, to)).collect(),
        receive: (0..size).map(|from| count(from, rank)).collect(),
        before_backward: None,
    };
    let of_rank = |rank: usize| random(10 * size * width, rank as u64);
    let sent: usize = exchange.send.iter().sum();
    let x = tensor_of(
        &of_rank(rank)[..sent * width],
        [sent, width],
        DType::F32,
        device,
    );
    let arrived = values(&all_to_all_rows(x, exchange));
    let mut expected = Vec::new();
    for from in 0..size {
        let start: usize = (0..rank).map(|to| count(from, to)).sum();
        let end = start + count(from, rank);
        let values = &of_rank(from)[start * width..end * width];
        expected.extend(values.iter().map(|value| f64::from(*value as f32)));
    }
    ensure(arrived == expected, || {
        format!("rank {rank}: other rows arrived than were sent")
    })
}

/// A rank that replicates its own experts, so that one GPU is enough: half of each expert's rows at home, half in a slot.
fn replicas_of_its_own(linked: &Arc<dyn Communicator>, device: &Device) -> Check {
    let (experts, width, hidden, rows) = (3, 24, 20, 60);
    let shapes = [
        experts * width * 2 * hidden,
        experts * hidden * width,
        rows * width,
    ];
    let run = |replicated: bool| {
        let device = device.clone().autodiff();
        let of = |len, seed| random(len, seed);
        let shape = [experts, width, 2 * hidden];
        let gate_up = tensor_of(&of(shapes[0], 1), shape, DType::F32, &device).require_grad();
        let shape = [experts, hidden, width];
        let down = tensor_of(&of(shapes[1], 2), shape, DType::F32, &device).require_grad();
        let x = tensor_of(&of(shapes[2], 3), [rows, width], DType::F32, &device).require_grad();
        // Rows of expert 0, 1, 2, then of the replicas of 1 and 2, which are rows of the same experts.
        let (offsets, replication): (&[i64], _) = match replicated {
            true => {
                let replica = |slot| Replica {
                    local_expert: slot + 1,
                    peer: linked.rank(),
                    slot,
                };
                let replicas = vec![replica(0), replica(1)];
                let pool = Arc::new(ReplicaPool::default());
                let all = Replication::new(linked.clone(), 1, 0, replicas.clone(), replicas, pool);
                send_experts(gate_up.clone(), down.clone(), &all, Pass::Forward);
                (&[0, 20, 30, 40, 50, 60], all)
            }
            false => (&[0, 20, 40, 60], Replication::none()),
        };
        // Without replicas the rows of an expert lie together.
        let order: Vec<i64> = match replicated {
            true => (0..60).collect(),
            false => (0..30).chain(40..50).chain(30..40).chain(50..60).collect(),
        };
        let sorted = burn_moe::ops::gather_rows(x.clone(), index_of(&order, [rows], &device));
        let offsets = index_of(offsets, [offsets.len()], &device);
        let out = expert_swiglu(sorted, gate_up.clone(), down.clone(), offsets, replication);
        let back = burn_moe::ops::gather_rows(out, index_of(&order, [rows], &device));
        let factors = tensor_of(&random(rows * width, 4), [rows, width], DType::F32, &device);
        let grads = (back.clone() * factors).sum().backward();
        let grad = |tensor: &Tensor<3>| values(&tensor.grad(&grads).expect("a gradient"));
        [
            values(&back),
            values(&x.grad(&grads).expect("a gradient")),
            grad(&gate_up),
            grad(&down),
        ]
    };
    let (with, without) = (run(true), run(false));
    for (what, (a, b)) in ["output", "x", "gate_up", "down"]
        .iter()
        .zip(with.iter().zip(&without))
    {
        let error = relative_error(a, b);
        // Gradients are added in two parts.
        ensure(error < 1e-4, || format!("{what} differs by {error:e}"))?;
    }
    Ok(())
}

/// Gradients of a module that all ranks hold, each with its own tokens.
fn sums(host: &Arc<dyn Communicator>, linked: &Arc<dyn Communicator>, device: &Device) -> Check {
    let (rows, width) = (10, 48);
    let device = device.clone().autodiff();
    let model = FeedForwardConfig::new(width, 41).init(&device);
    let x = random(rows * width, host.rank() as u64);
    let x = tensor_of(&x, [rows, width], DType::F32, &device);
    let sum = |comm: &Arc<dyn Communicator>| {
        let loss = model.forward(x.clone()).square().sum();
        let grads = GradientsParams::from_grads(loss.backward(), &model);
        let grads = reduce_gradients(grads, &model, comm, Key::new(Op::GradReduce, 0, 0))?;
        let of = |param: &Param<Tensor<2>>| grads.get::<2>(param.id).map(|grad| values(&grad));
        Ok::<_, CommError>([of(&model.gate_up), of(&model.down)])
    };
    let (over_link, through_host) = (sum(linked)?, sum(host)?);
    ensure(over_link == through_host && over_link[0].is_some(), || {
        "gradients summed over the link are not those summed on the host".into()
    })
}

/// A whole layer over the link: as through the host, bit by bit, and as on the CPU, nearly.
fn layers(
    host: &Arc<dyn Communicator>,
    linked: &Arc<dyn Communicator>,
    device: &Device,
    say: &dyn Fn(String),
) -> Check {
    let ranks = host.size();
    let router = RouterConfig::new(48, 8 * ranks, 4).with_routed_scaling_factor(2.5);
    let config = MoeConfig::new(router, 40).with_seed(5);
    let before = linked.device_link().map(|link| link.traffic());
    let mut replicas = 0;
    for (combine, overlap) in [
        (CombineOrder::Exact, true),
        (CombineOrder::Rank, true),
        (CombineOrder::Rank, false),
    ] {
        let on_cpu = LayerRun {
            hot_expert: Some(3),
            ranks,
            balance: Balance::Exact,
            slots: 2,
            combine,
            overlap,
            ..LayerRun::single(config.clone(), 64 * ranks)
        };
        let on_gpu = LayerRun {
            device: device.clone(),
            ..on_cpu.clone()
        };
        let [link, through_host, cpu] = [
            on_gpu.rank(linked.clone()),
            on_gpu.rank(host.clone()),
            on_cpu.rank(host.clone()),
        ];
        replicas += link.stats.replicas.len();
        for (what, a, b, c) in parts(&link, &through_host, &cpu) {
            ensure(a == b, || {
                format!(
                    "{what} over the link is not that through the host ({combine:?}, overlap {overlap})"
                )
            })?;
            let error = relative_error(&a, &c);
            ensure(error < 2e-3, || {
                format!("{what} differs by {error:e} from the CPU's ({combine:?})")
            })?;
        }
    }
    let after = linked.device_link().map(|link| link.traffic());
    ensure(before != after, || "nothing went over the link".into())?;
    ensure(ranks == 1 || replicas > 0, || "no replica was made".into())?;
    say(format!(
        "layers over the link: forward and gradients as through the host, bit by bit, and as on the CPU; {replicas} replicas"
    ));
    Ok(())
}

/// What is compared: of the link, through the host, on the CPU.
type Compared = (&'static str, Vec<f64>, Vec<f64>, Vec<f64>);

fn parts(a: &LayerPart, b: &LayerPart, c: &LayerPart) -> [Compared; 5] {
    let output = |part: &LayerPart| part.output.iter().map(|v| f64::from(*v)).collect();
    [
        ("output", output(a), output(b), output(c)),
        ("x", a.grad_x.clone(), b.grad_x.clone(), c.grad_x.clone()),
        (
            "gate_up",
            a.grad_gate_up.clone(),
            b.grad_gate_up.clone(),
            c.grad_gate_up.clone(),
        ),
        (
            "down",
            a.grad_down.clone(),
            b.grad_down.clone(),
            c.grad_down.clone(),
        ),
        (
            "gate",
            a.grad_gate.clone(),
            b.grad_gate.clone(),
            c.grad_gate.clone(),
        ),
    ]
}

/// Width and expert width of DeepSeek-V3.
const WIDTH: usize = 7168;
const HIDDEN: usize = 2048;
/// Rows that a rank sends in one dispatch.
const ROWS: usize = 8192;
const TIMES: usize = 20;

/// Gigabytes a second that a rank sends, in bf16: rows to everyone alike, and an expert to the next rank. Over one rank both
/// stay on its GPU.
fn speed(linked: &Arc<dyn Communicator>, device: &Device, say: &dyn Fn(String)) -> Check {
    let (rank, size) = (linked.rank(), linked.size());
    let random = |shape: [usize; 3]| {
        Tensor::<3>::random(shape, Distribution::Default, (device, DType::BF16))
    };
    let each = ROWS / size;
    let x = random([1, each * size, WIDTH]).reshape([each * size, WIDTH]);
    let gate_up = random([1, WIDTH, 2 * HIDDEN]);
    let down = random([1, HIDDEN, WIDTH]);
    let dispatch = |step: u64| {
        let exchange = RowExchange {
            comm: linked.clone(),
            key: Key::new(Op::Dispatch, step, 1),
            backward_key: Key::new(Op::DispatchBackward, step, 1),
            send: vec![each; size].into(),
            receive: vec![each; size].into(),
            before_backward: None,
        };
        all_to_all_rows(x.clone(), exchange);
    };
    let pool = Arc::new(ReplicaPool::default());
    let replicate = |step: u64| {
        let replica = |peer| Replica {
            local_expert: 0,
            peer,
            slot: 0,
        };
        let to = vec![replica((rank + 1) % size)];
        let from = vec![replica((rank + size - 1) % size)];
        let replication = Replication::new(linked.clone(), step, 1, to, from, pool.clone());
        // No rows: the experts are fetched and have nothing to do.
        let none = Tensor::<2>::empty([0, WIDTH], (device, DType::BF16));
        let offsets = index_of(&[0, 0, 0], [3], device);
        expert_swiglu(none, gate_up.clone(), down.clone(), offsets, replication);
    };
    let others = if size == 1 { 1 } else { size - 1 };
    for (what, bytes, run) in [
        (
            "dispatch",
            each * others * WIDTH * 2,
            &dispatch as &dyn Fn(u64),
        ),
        ("replication", 3 * WIDTH * HIDDEN * 2, &replicate),
    ] {
        for step in 0..3 {
            run(step);
        }
        linked.barrier(Key::new(Op::Barrier, 0, u32::MAX))?;
        let start = Instant::now();
        for step in 0..TIMES as u64 {
            run(3 + step);
        }
        let time = start.elapsed().as_secs_f64() / TIMES as f64;
        say(format!(
            "{what}: {:.1} MB a rank in {:.3} ms, {:.1} GB/s",
            bytes as f64 / 1e6,
            time * 1e3,
            bytes as f64 / time / 1e9
        ));
    }
    Ok(())
}
