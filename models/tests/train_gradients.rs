//! Gradients of a decoder: over micro-batches, recomputed, and their norm over ranks.
#![cfg(feature = "autodiff")]

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_moe::comm::{Communicator, Key, Op, RankOptions, run_ranks};
use burn_moe::layer::loss::sequence_balancing;
use burn_moe::parallel::{
    ExpertParallel, ParallelOptions, clip_gradients, gradient_norm, reduce_gradients,
};
use burn_moe_models::attention::AttentionConfig;
use burn_moe_models::train::Accumulator;
use burn_moe_models::{Decoder, ModelConfig, TokenBatch};

const LENGTH: usize = 12;
const SEQUENCES: usize = 8;

/// Sequences with their last target.
fn sequences() -> Vec<Vec<u32>> {
    let byte = |i: usize| ((i * i * 31 + i * 7) % 251) as u32;
    (0..SEQUENCES)
        .map(|s| (0..=LENGTH).map(|i| byte(s * 100 + i)).collect())
        .collect()
}

/// The gradients of these sequences' share of the mean loss of all.
fn gradients(decoder: &Decoder, sequences: &[Vec<u32>], device: &Device) -> GradientsParams {
    let inputs = TokenBatch::new(sequences.iter().map(|s| &s[..LENGTH]));
    let targets = sequences
        .iter()
        .flat_map(|s| s[1..].iter().map(|id| *id as i32));
    let targets: Vec<i32> = targets.collect();
    let rows = targets.len();
    let targets = Tensor::<2, Int>::from_data(TensorData::new(targets, [rows, 1]), device);
    let out = decoder.forward(&inputs);
    let share = 1.0 / (SEQUENCES * LENGTH) as f64;
    let mut loss = log_softmax(out.logits, 1).gather(1, targets).sum() * -share;
    for routing in &out.routings {
        loss = loss + sequence_balancing(routing, LENGTH) * (0.01 * rows as f64 * share);
    }
    GradientsParams::from_grads(loss.backward(), decoder)
}

/// All gradients by the path of their parameter.
fn by_path(decoder: &Decoder, grads: &GradientsParams) -> BTreeMap<String, Vec<f64>> {
    struct Read<'a> {
        grads: &'a GradientsParams,
        path: Vec<String>,
        found: BTreeMap<String, Vec<f64>>,
    }
    impl ModuleVisitor for Read<'_> {
        fn enter_module(&mut self, name: &str, _container: &str) {
            self.path.push(name.into());
        }
        fn exit_module(&mut self, _name: &str, _container: &str) {
            self.path.pop();
        }
        fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
            if let Some(grad) = self.grads.get::<D>(param.id) {
                let values = grad.into_data().iter().collect();
                self.found.insert(self.path.join("."), values);
            }
        }
    }
    let mut read = Read {
        grads,
        path: Vec::new(),
        found: BTreeMap::new(),
    };
    decoder.visit(&mut read);
    read.found
}

fn options() -> RankOptions {
    RankOptions {
        timeout: Duration::from_secs(60),
        ..Default::default()
    }
}

fn parallel(comm: &Arc<dyn Communicator>) -> Arc<ExpertParallel> {
    ExpertParallel::new(comm.clone(), ParallelOptions::default()).unwrap()
}

/// The reduced gradients of each rank, of a step in `parts` micro-batches.
fn step(ranks: usize, parts: usize) -> Vec<BTreeMap<String, Vec<f64>>> {
    let sequences = sequences();
    run_ranks(ranks, options(), |comm| {
        let device = Device::flex().autodiff();
        let config = ModelConfig::named("smoke").unwrap();
        let decoder = config.init(&parallel(&comm), 3, &device).unwrap();
        let rank = comm.rank();
        let own = &sequences[SEQUENCES * rank / ranks..SEQUENCES * (rank + 1) / ranks];
        let mut accumulator = Accumulator::default();
        for part in 0..parts {
            let part = &own[own.len() * part / parts..own.len() * (part + 1) / parts];
            accumulator.add(gradients(&decoder, part, &device), &decoder);
        }
        let key = Key::new(Op::GradReduce, 0, 0);
        let grads = reduce_gradients(accumulator.take(), &decoder, &comm, key).unwrap();
        by_path(&decoder, &grads)
    })
    .unwrap()
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|v| v * v).sum::<f64>().sqrt()
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for ranks in [1, 2] {
        let whole = step(ranks, 1);
        for parts in [2, 4] {
            for (whole, parted) in whole.iter().zip(step(ranks, parts)) {
                assert!(whole.len() > 20 && whole.keys().eq(parted.keys()));
                for (path, want) in whole {
                    let got = &parted[path];
                    let apart: Vec<f64> = got.iter().zip(want).map(|(a, b)| a - b).collect();
                    let off = norm(&apart) / norm(want).max(1e-30);
                    assert!(off < 1e-6, "{path} on {ranks} ranks in {parts}: {off:e}");
                }
            }
        }
    }
}

/// Recomputed activations are the same numbers: so are the gradients, over ranks with replicas too,
/// with both kinds of attention and both kinds of scores.
#[test]
fn checkpointing_changes_no_bit() {
    let sequences = sequences();
    let small = |name: &str| {
        let config = ModelConfig::named(name).unwrap();
        let scale = "1/64".parse().unwrap();
        config.scaled(scale).unwrap().with_layers(2).unwrap()
    };
    let gqa = small("qwen3-30b-a3b");
    assert!(matches!(gqa.attention, AttentionConfig::Gqa(_)));
    for config in [ModelConfig::named("smoke").unwrap(), gqa] {
        for ranks in [1, 4] {
            run_ranks(ranks, options(), |comm| {
                let plain = Device::flex().autodiff();
                let rank = comm.rank();
                let own = &sequences[SEQUENCES * rank / ranks..SEQUENCES * (rank + 1) / ranks];
                let [kept, recomputed] =
                    [plain.clone(), plain.gradient_checkpointing()].map(|device| {
                        let decoder = config.init(&parallel(&comm), 3, &device).unwrap();
                        by_path(&decoder, &gradients(&decoder, own, &device))
                    });
                assert!(kept.len() > 15);
                assert!(kept == recomputed, "rank {rank} of {ranks}");
            })
            .unwrap();
        }
    }
}

/// The norm is that of all gradients, each once, however many ranks share the experts: the reference
/// is a sum in f64 over the gradients of a single rank.
#[test]
fn the_norm_counts_every_parameter_once() {
    let reference = {
        let grads = step(1, 1).swap_remove(0);
        norm(&grads.into_values().flatten().collect::<Vec<f64>>())
    };
    assert!(reference > 0.0);
    let sequences = sequences();
    for ranks in [1, 2, 4] {
        let norms = run_ranks(ranks, options(), |comm| {
            let device = Device::flex().autodiff();
            let config = ModelConfig::named("smoke").unwrap();
            let decoder = config.init(&parallel(&comm), 3, &device).unwrap();
            let rank = comm.rank();
            let own = &sequences[SEQUENCES * rank / ranks..SEQUENCES * (rank + 1) / ranks];
            let grads = gradients(&decoder, own, &device);
            let key = Key::new(Op::GradReduce, 0, 0);
            let grads = reduce_gradients(grads, &decoder, &comm, key).unwrap();
            let comm = comm.as_ref();
            let measured = |grads: &GradientsParams, step| {
                let key = Key::new(Op::AllReduce, step, 0);
                gradient_norm(grads, &decoder, comm, key).unwrap()
            };
            let before = measured(&grads, 0);
            let kept = by_path(&decoder, &grads);
            let grads = clip_gradients(grads, &decoder, before, before * 2.0);
            assert!(by_path(&decoder, &grads) == kept, "small enough");
            let grads = clip_gradients(grads, &decoder, before, before / 8.0);
            (before, measured(&grads, 1))
        })
        .unwrap();
        for (before, after) in &norms {
            assert_eq!(before.to_bits(), norms[0].0.to_bits(), "ranks agree");
            let off = (before / reference - 1.0).abs();
            assert!(off < 1e-6, "{ranks} ranks: {before} {reference}");
            assert!((after / (reference / 8.0) - 1.0).abs() < 1e-6);
        }
    }
}

#[test]
fn gradients_without_a_finite_norm_stay() {
    let device = Device::flex().autodiff();
    let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
    let decoder = ModelConfig::named("smoke")
        .unwrap()
        .init(&ep, 3, &device)
        .unwrap();
    let mut grads = GradientsParams::new();
    let id = decoder.norm.gamma.id;
    grads.register(id, Tensor::<1>::full([32], f32::INFINITY, &Device::flex()));
    let key = Key::new(Op::AllReduce, 0, 0);
    let norm = gradient_norm(&grads, &decoder, ep.comm().as_ref(), key).unwrap();
    assert!(norm.is_infinite());
    let grads = clip_gradients(grads, &decoder, norm, 1.0);
    let values: Vec<f32> = grads.get::<1>(id).unwrap().into_data().iter().collect();
    assert!(values.iter().all(|v| v.is_infinite()));
}
