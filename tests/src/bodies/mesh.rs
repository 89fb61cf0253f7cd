//! Data parallel times expert parallel trains as one rank does: the same losses, the same norm of the gradients, and ranks
//! that hold the same parameters keep the same bits.

use std::time::Duration;

use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor};
use burn_moe::comm::{Key, Op, RankOptions};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::parallel::{ExpertParallel, Mesh, ParallelOptions, clip_gradients};
use serde::{Deserialize, Serialize};

use crate::{bits, cast, random, ranks, relative_error, tensor_of, values};

bodies! {
    every_grid_trains_as_one_rank,
    the_norm_counts_every_parameter_once,
}

const WIDTH: usize = 12;
const EXPERTS: usize = 8;
const STEPS: usize = 6;
/// Some steps are above, some below.
const MAX_NORM: f64 = 0.05;

#[derive(Module, Debug)]
struct Model {
    layers: Vec<Moe>,
}

/// What a rank has after training.
#[derive(Serialize, Deserialize)]
struct Trained {
    /// This rank's share of the loss of each step.
    losses: Vec<f64>,
    /// Norm of all gradients in each step, before they were clipped.
    norms: Vec<f64>,
    /// The parameters that all ranks hold, as f32, to the bit.
    replicated: Vec<Vec<u32>>,
    /// The weights of this rank's experts, by layer and matrix.
    experts: Vec<Vec<f64>>,
    replicas: usize,
}

/// Trains over `size` ranks in groups of `ep`; the tokens of a step are dealt out in unequal parts.
fn train(size: usize, ep: usize, dtype: DType) -> Vec<Trained> {
    let options = RankOptions {
        timeout: Duration::from_secs(60),
        ..Default::default()
    };
    ranks::run(size, options, |world| {
        let device = Device::flex().autodiff();
        let mesh = Mesh::new(world, ep).expect("a grid");
        let ep =
            ExpertParallel::new(mesh.ep().clone(), ParallelOptions::default()).expect("options");
        let config =
            MoeConfig::new(RouterConfig::new(WIDTH, EXPERTS, 2), 10).with_num_shared_experts(1);
        let layer = |layer| config.init_parallel(&ep, layer, &device).expect("a layer");
        let mut model = cast(
            Model {
                layers: (0..2).map(layer).collect(),
            },
            dtype,
        );
        let mut optimizer: ModuleOptimizer = AdamWConfig::new().init();
        let (mut losses, mut norms) = (Vec::new(), Vec::new());
        for step in 0..STEPS {
            // In the last steps some ranks have no token.
            let tokens = [64, 37, 50, 41, 3, 1][step];
            let square = |rank: usize| tokens * rank * rank / (size * size);
            let own = square(mesh.world().rank())..square(mesh.world().rank() + 1);
            let part = |seed: u64| {
                let all = random(tokens * WIDTH, 10 * step as u64 + seed);
                let own = &all[own.start * WIDTH..own.end * WIDTH];
                tensor_of(own, [own.len() / WIDTH, WIDTH], dtype, &device)
            };
            let mut x = part(1).require_grad();
            for layer in &model.layers {
                x = layer.forward(x.clone()) + x;
            }
            let loss = (x - part(2)).square().sum() / (tokens * WIDTH) as f64;
            losses.extend(values(&loss));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let key = |op| Key::new(op, step as u64, 0);
            let grads = mesh
                .reduce_gradients(grads, &model, key(Op::GradReduce))
                .expect("all");
            let norm = mesh
                .gradient_norm(&grads, &model, key(Op::AllReduce))
                .expect("all");
            norms.push(norm);
            let grads = clip_gradients(grads, &model, norm, MAX_NORM);
            let clipped = mesh
                .gradient_norm(&grads, &model, key(Op::AllReduce))
                .expect("all");
            assert!(clipped <= MAX_NORM * 1.00001, "{clipped} after clipping");
            model = optimizer.step(0.01, model, grads);
        }
        let mut replicated = Vec::new();
        let mut experts = Vec::new();
        for layer in &model.layers {
            let shared = layer.shared.as_ref().expect("a shared expert");
            replicated.push(bits(&layer.router.gate.val()));
            replicated.push(bits(&shared.gate_up.val()));
            replicated.push(bits(&shared.down.val()));
            experts.push(values(&layer.experts.gate_up.val()));
            experts.push(values(&layer.experts.down.val()));
        }
        Trained {
            losses,
            norms,
            replicated,
            experts,
            replicas: ep.take_stats().iter().map(|it| it.replicas.len()).sum(),
        }
    })
}

/// All grids of 2 and 4 ranks, in f32 and f64.
pub fn every_grid_trains_as_one_rank() {
    for (dtype, of_loss, of_experts) in [(DType::F32, 1e-4, 1e-3), (DType::F64, 1e-9, 1e-8)] {
        let single = train(1, 1, dtype).remove(0);
        assert!(
            single.norms.iter().any(|norm| *norm > MAX_NORM),
            "nothing to clip: {:?}",
            single.norms
        );
        for size in ranks::sizes(&[2, 4]) {
            for ep in [1, 2, 4].into_iter().filter(|ep| size % ep == 0) {
                let what = format!("{} x {ep} ranks, {dtype:?}", size / ep);
                let trained = train(size, ep, dtype);
                for step in 0..STEPS {
                    let loss: f64 = trained.iter().map(|rank| rank.losses[step]).sum();
                    for (name, value, expected) in [
                        ("loss", loss, single.losses[step]),
                        ("norm", trained[0].norms[step], single.norms[step]),
                    ] {
                        assert!(
                            (value - expected).abs() <= of_loss * expected,
                            "{name} of step {step} is {value}, on one rank {expected}: {what}"
                        );
                    }
                }
                for (rank, own) in trained.iter().enumerate() {
                    assert!(
                        own.replicated == trained[0].replicated,
                        "rank {rank} differs: {what}"
                    );
                    assert!(
                        own.norms == trained[0].norms,
                        "norms of rank {rank} differ: {what}"
                    );
                    assert!(
                        own.experts == trained[rank % ep].experts,
                        "experts of rank {rank} differ: {what}"
                    );
                }
                for matrix in 0..single.experts.len() {
                    let all: Vec<f64> = trained[..ep]
                        .iter()
                        .flat_map(|rank| rank.experts[matrix].clone())
                        .collect();
                    let error = relative_error(&all, &single.experts[matrix]);
                    assert!(error < of_experts, "experts are off by {error:e}: {what}");
                }
                if ep == 4 {
                    assert!(trained[0].replicas > 0, "the balancer had nothing to do");
                }
            }
        }
    }
}

/// Against the plain sum over all gradients, known in closed form.
pub fn the_norm_counts_every_parameter_once() {
    for size in ranks::sizes(&[1, 2, 4]) {
        for ep in [1, 2, 4].into_iter().filter(|ep| size % ep == 0) {
            let norms = ranks::run(size, RankOptions::default(), |world| {
                let device = Device::flex().autodiff();
                let mesh = Mesh::new(world, ep).expect("a grid");
                let ep = ExpertParallel::new(mesh.ep().clone(), ParallelOptions::default())
                    .expect("options");
                let config = MoeConfig::new(RouterConfig::new(4, EXPERTS, 2), 3);
                let layer = config.init_parallel(&ep, 0, &device).expect("a layer");
                let mut grads = GradientsParams::new();
                let ones = |shape: [usize; 3]| Tensor::<3>::ones(shape, &Device::flex());
                let gate = &layer.router.gate;
                grads.register(
                    gate.id,
                    Tensor::<2>::ones([4, EXPERTS], &Device::flex()) * 2,
                );
                let experts = &layer.experts;
                grads.register(
                    experts.gate_up.id,
                    ones(experts.gate_up.lazy_shape().dims()) * 3,
                );
                grads.register(experts.down.id, ones(experts.down.lazy_shape().dims()));
                let key = Key::new(Op::AllReduce, 0, 0);
                mesh.gradient_norm(&grads, &layer, key).expect("all ranks")
            });
            // gate [4, 8] of twos, gate_up [8, 4, 6] of threes, down [8, 3, 4] of ones.
            let expected = f64::from(4 * 8 * 4 + 8 * 4 * 6 * 9 + 8 * 3 * 4).sqrt();
            for norm in norms {
                assert!(
                    (norm - expected).abs() < 1e-9,
                    "{norm}, expected {expected}"
                );
            }
        }
    }
}
