//! Training over expert-parallel ranks is training on one rank: the losses agree step by step, the
//! parameters that every rank holds stay the same to the bit, and the experts learn the same.

use std::sync::Arc;
use std::time::Duration;

use burn::module::{Module, Param};
use burn::nn::{Linear, LinearConfig};
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer, SgdConfig};
use burn::tensor::{DType, Device, Tensor, s};
use burn_moe::comm::{Communicator, Key, Op, RankOptions, run_ranks};
use burn_moe::layer::loss::load_balancing;
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::parallel::{
    Balance, CombineOrder, ExpertParallel, ParallelOptions, reduce_gradients,
};
use burn_moe_tests::{
    assert_close, bits, cast, random, relative_error, tensor_of, values, with_values,
};

const WIDTH: usize = 12;
const EXPERTS: usize = 8;
const STEPS: usize = 8;

#[derive(Module, Debug)]
struct Model {
    input: Linear,
    layers: Vec<Moe>,
    output: Linear,
}

impl Model {
    fn new(ep: &Arc<ExpertParallel>, device: &Device) -> Self {
        let moe = MoeConfig::new(
            RouterConfig::new(WIDTH, EXPERTS, 2).with_routed_scaling_factor(2.5),
            10,
        )
        .with_num_shared_experts(1);
        Self {
            input: linear(5, WIDTH, 1, device),
            layers: (0..2)
                .map(|layer| moe.init_parallel(ep, layer, device).expect("a layer"))
                .collect(),
            output: linear(WIDTH, 3, 2, device),
        }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        let mut x = self.input.forward(x);
        for layer in &self.layers {
            x = layer.forward(x.clone()) + x;
        }
        self.output.forward(x)
    }

    /// The parameters that all ranks hold, to the bit.
    fn replicated(&self) -> Vec<Vec<u32>> {
        let linear = |linear: &Linear| {
            let bias = linear.bias.as_ref().expect("a bias");
            [bits(&linear.weight.val()), bits(&bias.val())]
        };
        let mut all: Vec<_> = linear(&self.input).into();
        all.extend(linear(&self.output));
        for layer in &self.layers {
            let shared = layer.shared.as_ref().expect("a shared expert");
            all.push(bits(&layer.router.gate.val()));
            all.push(bits(&layer.router.bias.as_ref().expect("a bias").val()));
            all.push(bits(&shared.gate_up.val()));
            all.push(bits(&shared.down.val()));
        }
        all
    }

    /// The weights of this rank's experts.
    fn experts(&self) -> [Vec<f64>; 2] {
        [
            self.layers
                .iter()
                .flat_map(|layer| values(&layer.experts.gate_up.val()))
                .collect(),
            self.layers
                .iter()
                .flat_map(|layer| values(&layer.experts.down.val()))
                .collect(),
        ]
    }
}

/// A layer whose values come from the seed alone.
fn linear(d_input: usize, d_output: usize, seed: u64, device: &Device) -> Linear {
    let mut linear = LinearConfig::new(d_input, d_output).init(device);
    let weights = random(d_input * d_output, seed);
    linear.weight = with_values(linear.weight, &weights);
    linear.bias = linear
        .bias
        .map(|bias| with_values(bias, &random(d_output, seed + 100)));
    linear
}

/// What a rank has after training.
struct Trained {
    /// This rank's share of the loss of each step.
    losses: Vec<f64>,
    replicated: Vec<Vec<u32>>,
    experts: [Vec<f64>; 2],
    replicas: usize,
}

#[derive(Debug, Clone, Copy)]
enum Algorithm {
    Sgd,
    AdamW,
}

/// A group that fails rather than keep the tests waiting.
fn impatient() -> RankOptions {
    RankOptions {
        timeout: Duration::from_secs(20),
        ..Default::default()
    }
}

/// Trains over `ranks`; `tokens` by step, dealt out in unequal parts.
fn train(
    ranks: usize,
    algorithm: Algorithm,
    dtype: DType,
    options: ParallelOptions,
) -> Vec<Trained> {
    run_ranks(ranks, impatient(), |comm| {
        let device = Device::flex().autodiff();
        let ep = ExpertParallel::new(comm.clone(), options.clone()).expect("options");
        let mut model = cast(Model::new(&ep, &device), dtype);
        let (mut optimizer, rate): (ModuleOptimizer, f64) = match algorithm {
            Algorithm::Sgd => (SgdConfig::new().init(), 0.05),
            Algorithm::AdamW => (AdamWConfig::new().init(), 0.01),
        };
        let mut losses = Vec::new();
        for step in 0..STEPS {
            // In the last steps some ranks have no token.
            let tokens = [64, 37, 50, 41, 64, 23, 3, 1][step];
            let own = split(tokens, ranks, comm.rank(), step);
            let part = |width: usize, seed: u64| {
                let all = random(tokens * width, 10 * step as u64 + seed);
                let own = &all[own.start * width..own.end * width];
                tensor_of(own, [own.len() / width, width], dtype, &device)
            };
            let error = model.forward(part(5, 1)) - part(3, 2);
            let loss = error.square().sum() / (tokens * 3) as f64;
            losses.extend(values(&loss));
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            let key = Key::new(Op::GradReduce, step as u64, 0);
            let grads = reduce_gradients(grads, &model, &comm, key).expect("all ranks");
            model = optimizer.step(rate, model, grads);
            for layer in &mut model.layers {
                layer.update_bias(0.01);
            }
        }
        Trained {
            losses,
            replicated: model.replicated(),
            experts: model.experts(),
            replicas: ep
                .take_stats()
                .iter()
                .map(|stats| stats.replicas.len())
                .sum(),
        }
    })
    .expect("all ranks")
}

/// The tokens of a rank: the first ranks have fewer, and none when there are not enough.
fn split(tokens: usize, ranks: usize, rank: usize, step: usize) -> std::ops::Range<usize> {
    let square = |rank: usize| match step % 2 {
        0 => tokens * rank / ranks,
        _ => tokens * rank * rank / (ranks * ranks),
    };
    square(rank)..square(rank + 1)
}

fn compare(
    ranks: usize,
    algorithm: Algorithm,
    dtype: DType,
    options: ParallelOptions,
    single: &Trained,
) {
    let (of_loss, of_experts) = match dtype {
        DType::F64 => (1e-9, 1e-9),
        _ => (1e-4, 1e-3),
    };
    let what = format!("{ranks} ranks, {algorithm:?}, {dtype:?}, {options:?}");
    let trained = train(ranks, algorithm, dtype, options);
    for step in 0..STEPS {
        let loss: f64 = trained.iter().map(|rank| rank.losses[step]).sum();
        let expected = single.losses[step];
        assert!(
            (loss - expected).abs() <= of_loss * expected,
            "loss of step {step} is {loss}, on one rank {expected}: {what}"
        );
    }
    for rank in &trained {
        for (own, first) in rank.replicated.iter().zip(&trained[0].replicated) {
            assert!(own == first, "a replicated parameter differs: {what}");
        }
    }
    let floats = |bits: &[u32]| {
        bits.iter()
            .map(|b| f64::from(f32::from_bits(*b)))
            .collect::<Vec<_>>()
    };
    for (own, expected) in trained[0].replicated.iter().zip(&single.replicated) {
        let error = relative_error(&floats(own), &floats(expected));
        assert!(error < 1e-3, "a parameter is off by {error:e}: {what}");
    }
    for matrix in 0..2 {
        // By layer, then rank.
        let halves = |v: &[f64], layer: usize| {
            let half = v.len() / 2;
            v[layer * half..(layer + 1) * half].to_vec()
        };
        let all: Vec<f64> = (0..2)
            .flat_map(|layer| {
                trained
                    .iter()
                    .flat_map(move |rank| halves(&rank.experts[matrix], layer))
            })
            .collect();
        let error = relative_error(&all, &single.experts[matrix]);
        assert!(error < of_experts, "experts are off by {error:e}: {what}");
    }
}

#[test]
fn losses_agree_step_by_step() {
    for (algorithm, dtype) in [
        (Algorithm::Sgd, DType::F32),
        (Algorithm::AdamW, DType::F32),
        (Algorithm::AdamW, DType::F64),
    ] {
        let none = ParallelOptions {
            balance: Balance::None,
            ..Default::default()
        };
        let single = train(1, algorithm, dtype, none.clone()).remove(0);
        let (first, last) = (single.losses[0], single.losses[4]);
        assert!(last < 0.9 * first, "does not learn: {:?}", single.losses);
        for ranks in [2, 4] {
            compare(ranks, algorithm, dtype, none.clone(), &single);
            for combine in [CombineOrder::Rank, CombineOrder::Exact] {
                let exact = ParallelOptions {
                    combine,
                    ..Default::default()
                };
                compare(ranks, algorithm, dtype, exact, &single);
            }
        }
    }
    let options = ParallelOptions::default();
    let balanced = train(4, Algorithm::Sgd, DType::F32, options);
    assert!(balanced[0].replicas > 0, "the balancer had nothing to do");
}

/// On one rank the tokens of a layer are outside of the graph: an empty slice, or a constant.
#[test]
fn tokens_outside_of_the_graph_on_one_rank() {
    for tokens in [0, 3] {
        for combine in [CombineOrder::Rank, CombineOrder::Exact] {
            run_ranks(2, impatient(), |comm| {
                let device = Device::flex().autodiff();
                let options = ParallelOptions {
                    combine,
                    ..Default::default()
                };
                let ep = ExpertParallel::new(comm.clone(), options).expect("options");
                let model = Model::new(&ep, &device);
                let x = tensor_of(&random(8 * 5, 1), [8, 5], DType::F32, &device);
                let x = model.input.forward(x);
                let x = match comm.rank() {
                    0 => x.slice(s![0..tokens]).detach(),
                    _ => x,
                };
                let out = model.layers[1].forward(model.layers[0].forward(x.clone()) + x);
                let grads = out.sum().backward();
                // Experts 0 to 3 live on rank 0 and get tokens of rank 1.
                let grad = model.layers[0].experts.down.val().grad(&grads);
                assert!(values(&grad.expect("a gradient")).iter().any(|g| *g != 0.0));
            })
            .expect("both ranks");
        }
    }
}

/// A branch that only one rank takes: all get its gradient, and the sum where all have one.
#[test]
fn a_parameter_without_gradient_on_one_rank_gets_the_sum() {
    #[derive(Module, Debug)]
    struct Branches {
        common: Linear,
        rare: Linear,
        never: Linear,
        frozen: Param<Tensor<1>>,
    }
    let results = run_ranks(3, impatient(), |comm| {
        let device = Device::flex().autodiff();
        let frozen = Tensor::<1>::ones([4], &device);
        let model = Branches {
            common: linear(4, 4, 1, &device),
            rare: linear(4, 4, 2, &device),
            never: linear(4, 4, 3, &device),
            frozen: Param::from_tensor(frozen).set_require_grad(false),
        };
        let rank = comm.rank();
        let x = tensor_of(&random(8, rank as u64), [2, 4], DType::F32, &device);
        let mut y = model.common.forward(x) * model.frozen.val().unsqueeze();
        if rank == 1 {
            y = model.rare.forward(y);
        }
        let mut grads = y.sum().backward();
        let own = GradientsParams::from_module(&mut grads, &model);
        let read = |grads: &GradientsParams, linear: &Linear| {
            let weight = grads.get::<2>(linear.weight.id);
            weight.map(|grad| values(&grad))
        };
        let all = |grads: &GradientsParams| {
            [&model.common, &model.rare, &model.never].map(|linear| read(grads, linear))
        };
        let before = all(&own);
        let key = Key::new(Op::GradReduce, 0, 0);
        let reduced = reduce_gradients(own, &model, &comm, key).expect("all ranks");
        assert!(reduced.get::<1>(model.frozen.id).is_none());
        (before, all(&reduced))
    })
    .expect("all ranks");
    let zeros = vec![0.0; 16];
    for part in 0..3 {
        let mut sum = vec![0.0; 16];
        for (before, _) in &results {
            let grad = before[part].as_ref().unwrap_or(&zeros);
            sum.iter_mut()
                .zip(grad)
                .for_each(|(sum, grad)| *sum += grad);
        }
        for (_, after) in &results {
            // What no rank has a gradient of is left alone, as on one rank.
            let Some(grad) = after[part].as_ref() else {
                assert_eq!(part, 2, "a gradient");
                continue;
            };
            assert_ne!(part, 2, "a gradient from nowhere");
            assert_close("gradient", grad, &sum, 1e-6);
            assert_eq!(after[part], results[0].1[part], "not the same bits");
        }
    }
    assert!(results[1].0[1].is_some() && results[0].0[1].is_none());
    assert!(results[0].1[1].as_ref().is_some_and(|grad| *grad != zeros));
}

/// The gradients of experts are complete where they live, and must not be added up.
#[test]
fn experts_are_left_alone() {
    let results = run_ranks(2, impatient(), |comm| {
        let device = Device::flex().autodiff();
        let ep = ExpertParallel::new(comm.clone(), ParallelOptions::default()).expect("options");
        let model = Model::new(&ep, &device);
        let x = tensor_of(&random(40, comm.rank() as u64), [8, 5], DType::F32, &device);
        let mut grads = model.forward(x).sum().backward();
        let own = GradientsParams::from_module(&mut grads, &model);
        let id = model.layers[1].experts.gate_up.id;
        let before = own.get::<3>(id).expect("a gradient");
        let key = Key::new(Op::GradReduce, 0, 0);
        let reduced = reduce_gradients(own, &model, &comm, key).expect("both ranks");
        let after = reduced.get::<3>(id).expect("a gradient");
        (bits(&before), bits(&after))
    })
    .expect("both ranks");
    for (before, after) in results {
        assert_eq!(before, after);
    }
}

/// Auxiliary losses of each rank's own tokens train over ranks too.
#[test]
fn an_auxiliary_loss_reaches_the_router() {
    let grads = run_ranks(2, impatient(), |comm| {
        let device = Device::flex().autodiff();
        let ep = ExpertParallel::new(comm.clone(), ParallelOptions::default()).expect("options");
        let config = MoeConfig::new(RouterConfig::new(5, EXPERTS, 2), 4);
        let moe = config.init_parallel(&ep, 0, &device).expect("a layer");
        let x = tensor_of(&random(40, comm.rank() as u64), [8, 5], DType::F32, &device);
        let routed = moe.forward_routed(x);
        let both = routed.output.sum() + load_balancing(&routed.routing);
        let both = values(&moe.router.gate.val().grad(&both.backward()).expect("both"));
        both.iter().all(|g| g.is_finite())
    })
    .expect("both ranks");
    assert_eq!(grads, [true, true]);
}

/// Gradients of an f64 model keep their precision.
#[test]
fn f64_gradients_are_summed_in_f64() {
    let results = run_ranks(3, impatient(), |comm| {
        let device = Device::flex().autodiff();
        let model = cast(linear(4, 3, 1, &device), DType::F64);
        let x = tensor_of(&random(8, comm.rank() as u64), [2, 4], DType::F64, &device);
        let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
        let before = values(&grads.get::<2>(model.weight.id).expect("a gradient"));
        let key = Key::new(Op::GradReduce, 0, 0);
        let grads = reduce_gradients(grads, &model, &comm, key).expect("all ranks");
        let after = grads.get::<2>(model.weight.id).expect("a gradient");
        assert_eq!(after.dtype(), DType::F64);
        (before, values(&after))
    })
    .expect("all ranks");
    let mut sum = vec![0.0; 12];
    for (before, _) in &results {
        sum.iter_mut()
            .zip(before)
            .for_each(|(sum, grad)| *sum += grad);
    }
    for (_, after) in &results {
        assert_close("gradient", after, &sum, 1e-14);
    }
}

/// A communicator of one: nothing to do.
#[test]
fn one_rank_keeps_its_gradients() {
    let device = Device::flex().autodiff();
    let comm: Arc<dyn Communicator> = burn_moe::comm::solo();
    let model = linear(4, 3, 1, &device);
    let x = tensor_of(&random(8, 1), [2, 4], DType::F32, &device);
    let grads = GradientsParams::from_grads(model.forward(x).sum().backward(), &model);
    let before = bits(&grads.get::<2>(model.weight.id).expect("a gradient"));
    let key = Key::new(Op::GradReduce, 0, 0);
    let grads = reduce_gradients(grads, &model, &comm, key).expect("one rank");
    let after = bits(&grads.get::<2>(model.weight.id).expect("a gradient"));
    assert_eq!(before, after);
}
