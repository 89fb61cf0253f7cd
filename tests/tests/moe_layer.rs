//! The whole layer on one rank is a loop over tokens and experts, with its gradients, whatever is
//! dropped; and what it computes for a token does not depend on how many others there are.

use burn::tensor::{DType, Device, Tensor, TensorData, s};
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig, ScoreFunction};
use burn_moe::ops::{Replication, expert_swiglu};
use burn_moe_tests::naive::NaiveMoe;
use burn_moe_tests::{
    assert_close, assert_gradient, bits, cast, dot, index_of, random, rounded, tensor_of, tensor64,
    values, with_values,
};

fn configs() -> Vec<(&'static str, MoeConfig)> {
    let router = |experts, k| RouterConfig::new(5, experts, k).with_seed(1);
    let deepseek = router(8, 3)
        .with_n_group(4)
        .with_topk_group(2)
        .with_routed_scaling_factor(2.5);
    let mixtral = router(4, 2)
        .with_score_function(ScoreFunction::Softmax)
        .with_selection_bias(false);
    let qwen = router(6, 2)
        .with_score_function(ScoreFunction::Softmax)
        .with_norm_topk_prob(false);
    vec![
        (
            "DeepSeek",
            MoeConfig::new(deepseek.clone(), 4).with_num_shared_experts(1),
        ),
        (
            "two shared experts",
            MoeConfig::new(router(6, 2), 3).with_num_shared_experts(2),
        ),
        ("Mixtral", MoeConfig::new(mixtral, 4)),
        ("Qwen", MoeConfig::new(qwen, 4)),
        ("one expert a token", MoeConfig::new(router(7, 1), 4)),
        ("all experts", MoeConfig::new(router(3, 3), 4)),
        ("a single expert", MoeConfig::new(router(1, 1), 4)),
        (
            "dropping",
            MoeConfig::new(deepseek, 4)
                .with_num_shared_experts(1)
                .with_capacity_factor(Some(1.0)),
        ),
        (
            "dropping nearly all",
            MoeConfig::new(router(6, 2), 4).with_capacity_factor(Some(0.1)),
        ),
    ]
}

/// The layer in `dtype` with a selection bias, and the same as loops.
fn layers(config: &MoeConfig, dtype: DType, device: &Device) -> (Moe, NaiveMoe) {
    let mut moe = cast(config.init(device), dtype);
    let bias = random(config.router.num_experts, 2);
    moe.router.bias = moe.router.bias.map(|param| with_values(param, &bias));
    let naive = NaiveMoe::of(config, &moe);
    (moe, naive)
}

#[test]
fn forward_and_gradients() {
    let device = Device::flex().autodiff();
    for (name, config) in configs() {
        let (moe, naive) = layers(&config, DType::F64, &device);
        for tokens in [0, 1, 2, 7] {
            let what = format!("{name}, {tokens} tokens");
            let x_values = random(tokens * 5, 3);
            let factors = random(tokens * 5, 4);
            let x = tensor64(&x_values, [tokens, 5], &device).require_grad();
            let out = moe.forward(x.clone());
            assert_close(&what, &values(&out), &naive.forward(&x_values), 1e-12);
            let loss = (out * tensor64(&factors, [tokens, 5], &device)).sum();
            let grads = loss.backward();
            let of = |change: &dyn Fn(&mut NaiveMoe)| {
                let mut naive = naive.clone();
                change(&mut naive);
                dot(&naive.forward(&x_values), &factors)
            };
            let check = |part: &str, grad: Vec<f64>, at: &[f64], f: &dyn Fn(&[f64]) -> f64| {
                assert_gradient(&format!("{part}: {what}"), &grad, at, f);
            };
            let grad = |param: Tensor<3>| values(&param.grad(&grads).expect("a gradient"));
            check(
                "x",
                values(&x.grad(&grads).expect("a gradient")),
                &x_values,
                &|x| dot(&naive.forward(x), &factors),
            );
            check(
                "gate",
                values(&moe.router.gate.val().grad(&grads).expect("a gradient")),
                &naive.router.gate,
                &|v| of(&|naive| naive.router.gate = v.to_vec()),
            );
            check(
                "gate_up",
                grad(moe.experts.gate_up.val()),
                &naive.gate_up,
                &|v| of(&|naive| naive.gate_up = v.to_vec()),
            );
            check("down", grad(moe.experts.down.val()), &naive.down, &|v| {
                of(&|naive| naive.down = v.to_vec())
            });
            if let Some(shared) = &moe.shared {
                let gate_up = shared.gate_up.val().grad(&grads).expect("a gradient");
                check("shared gate_up", values(&gate_up), &naive.shared.0, &|v| {
                    of(&|naive| naive.shared.0 = v.to_vec())
                });
                let down = shared.down.val().grad(&grads).expect("a gradient");
                check("shared down", values(&down), &naive.shared.1, &|v| {
                    of(&|naive| naive.shared.1 = v.to_vec())
                });
            }
        }
    }
}

/// bf16 and f16 models with the router in f32, as checkpoints have it.
#[test]
fn every_precision() {
    let device = Device::flex();
    for (dtype, tolerance) in [(DType::F32, 1e-5), (DType::BF16, 1e-2), (DType::F16, 1e-2)] {
        for (name, config) in configs() {
            let mut config = config;
            config.router.d_model = 32;
            let (wide, _) = layers(&config, DType::F32, &device);
            let mut moe = cast(wide.clone(), dtype);
            moe.router = wide.router;
            let naive = NaiveMoe::of(&config, &moe);
            let x = rounded(&random(20 * 32, 3), dtype);
            let out = moe.forward(tensor_of(&x, [20, 32], dtype, &device));
            assert_eq!(out.dtype(), dtype);
            let what = format!("{name} in {dtype:?}");
            assert_close(&what, &values(&out), &naive.forward(&x), tolerance);
        }
    }
}

/// Capacity counts copies, keeps those of earlier tokens, and leaves the others' weights alone.
#[test]
fn what_is_dropped() {
    let device = Device::flex().autodiff();
    // All tokens choose expert 2, then expert 0.
    let config = MoeConfig::new(RouterConfig::new(3, 4, 2), 2);
    for (factor, capacity) in [(0.5, 2), (0.6, 2), (1.0, 3), (1.2, 4), (2.0, 6), (9.0, 6)] {
        let config = config.clone().with_capacity_factor(Some(factor));
        let mut moe = cast(config.init(&device), DType::F64);
        moe.router.bias = moe
            .router
            .bias
            .map(|param| with_values(param, &[10.0, 0.0, 20.0, 0.0]));
        let x_values = random(6 * 3, 1);
        let x = tensor64(&x_values, [6, 3], &device).require_grad();
        let routed = moe.forward_routed(x.clone());
        let weights = values(&routed.routing.weights);
        // Without a limit, with weights of 0 from there on.
        let naive = NaiveMoe {
            capacity_factor: None,
            ..NaiveMoe::of(&config, &moe)
        };
        let mut routing = naive.router.route(&x_values);
        assert_eq!(routing.ids, [2, 0].repeat(6));
        assert_close("weights", &weights, &routing.weights, 1e-12);
        routing.weights[capacity * 2..].fill(0.0);
        let expected = naive.forward_routed(&x_values, &routing);
        let what = format!("factor {factor}");
        assert_close(&what, &values(&routed.output), &expected, 1e-12);
        // A dropped token passes no gradient.
        let grads = routed.output.sum().backward();
        let grad = values(&x.grad(&grads).expect("a gradient"));
        assert!(grad[..capacity * 3].iter().all(|g| *g != 0.0), "{what}");
        assert!(grad[capacity * 3..].iter().all(|g| *g == 0.0), "{what}");
    }
}

#[test]
fn any_number_of_dimensions() {
    let device = Device::flex();
    let config = MoeConfig::new(RouterConfig::new(5, 6, 2), 4).with_num_shared_experts(1);
    let moe = config.init(&device);
    let x = tensor_of(&random(2 * 3 * 4 * 5, 1), [24, 5], DType::F32, &device);
    let flat = moe.forward(x.clone());
    let cube = moe.forward(x.clone().reshape([4, 6, 5]));
    assert_eq!(cube.dims(), [4, 6, 5]);
    assert_eq!(bits(&cube), bits(&flat));
    let four = moe.forward(x.reshape([2, 3, 4, 5]));
    assert_eq!(four.dims(), [2, 3, 4, 5]);
    assert_eq!(bits(&four), bits(&flat));
    let none = moe.forward(Tensor::<3>::zeros([2, 0, 5], &device));
    assert_eq!(none.dims(), [2, 0, 5]);
}

/// Weights depend on the seed, and on nothing else.
#[test]
fn initial_weights_come_from_the_seed() {
    let device = Device::flex();
    let config = MoeConfig::new(RouterConfig::new(5, 6, 2), 4).with_num_shared_experts(1);
    let all = |moe: &Moe| {
        let shared = moe.shared.as_ref().expect("a shared expert");
        [
            bits(&moe.router.gate.val()),
            bits(&moe.experts.gate_up.val()),
            bits(&moe.experts.down.val()),
            bits(&shared.gate_up.val()),
            bits(&shared.down.val()),
        ]
    };
    let first = all(&config.init(&device));
    device.seed(99);
    assert_eq!(first, all(&config.init(&device)));
    let mut other = config.clone().with_seed(1);
    other.router = other.router.with_seed(1);
    for (a, b) in first.iter().zip(all(&other.init(&device))) {
        assert_ne!(*a, b);
    }
    // Experts differ from each other, and shared from routed ones.
    let sets = first[1].chunks(5 * 8).chain([&first[3][..]]);
    let different: std::collections::BTreeSet<_> = sets.collect();
    assert_eq!(different.len(), 7);
}

/// Runs `f` on one thread, where all rows of an expert are one block, and on two.
fn with_threads<R: Send>(f: impl Fn() -> R + Sync) -> [R; 2] {
    [1, 2].map(|threads_per_rank| {
        let options = RankOptions {
            threads_per_rank,
            ..Default::default()
        };
        run_ranks(1, options, |_| f()).expect("a rank").remove(0)
    })
}

/// Numbers of rows around those where matrix products change their ways.
const FEW: [usize; 9] = [1, 2, 3, 17, 48, 64, 65, 97, 256];

/// A row's bits do not depend on how many rows there are: this is what makes expert parallelism
/// change nothing, since it deals the rows out anew.
#[test]
fn row_bits_do_not_depend_on_the_number_of_rows() {
    // Around vector registers, cache blocks (512 deep) and thin outputs (64 wide).
    let widths = [1, 2, 3, 16, 32, 33, 65, 512, 513, 1100];
    let mut sizes: Vec<(usize, usize)> = widths
        .iter()
        .flat_map(|d| widths.map(|f| (*d, f)))
        .filter(|(d, f)| d * f <= 20_000)
        .collect();
    sizes.extend([(3000, 1), (1, 3000), (3000, 5), (5, 3000), (1030, 70)]);
    for wrong in with_threads(|| {
        let mut wrong = Vec::new();
        for (seed, (d_model, d_hidden)) in sizes.iter().enumerate() {
            let few = rows_with_other_bits(*d_model, *d_hidden, 3 * seed as u64);
            if !few.is_empty() {
                wrong.push((*d_model, *d_hidden, few));
            }
        }
        wrong
    }) {
        assert!(
            wrong.is_empty(),
            "other bits for {} sizes (d_model, d_hidden, rows): {:?} ...",
            wrong.len(),
            &wrong[..wrong.len().min(4)]
        );
    }
}

/// Numbers of rows whose bits differ from those of many.
fn rows_with_other_bits(d_model: usize, d_hidden: usize, seed: u64) -> Vec<usize> {
    let device = Device::flex();
    let rows = if d_model * d_hidden < 600 { 300 } else { 70 };
    let draw = |len: usize, seed: u64| random(len, seed).into_iter().map(|v| v as f32).collect();
    let tensor = |shape: [usize; 3], seed| {
        let values: Vec<f32> = draw(shape.iter().product(), seed);
        Tensor::<3>::from_data(TensorData::new(values, shape), &device)
    };
    let x = tensor([1, rows, d_model], seed).squeeze_dim::<2>(0);
    let gate_up = tensor([1, d_model, 2 * d_hidden], seed + 1);
    let down = tensor([1, d_hidden, d_model], seed + 2);
    let forward = |rows: std::ops::Range<usize>| {
        let offsets = index_of(&[0, rows.len() as i64], [2], &device);
        bits(&expert_swiglu(
            x.clone().slice(s![rows]),
            gate_up.clone(),
            down.clone(),
            offsets,
            Replication::none(),
        ))
    };
    let all = forward(0..rows);
    FEW.into_iter()
        .filter(|count| *count < rows)
        .filter(|count| {
            // The first rows for odd numbers and the last ones for even.
            let start = if count % 2 == 1 { 0 } else { rows - count };
            forward(start..start + count) != all[start * d_model..(start + count) * d_model]
        })
        .collect()
}

/// The same for the whole layer: scores, choice, weights, experts, shared experts.
#[test]
fn token_bits_do_not_depend_on_the_number_of_tokens() {
    for wrong in with_threads(|| {
        let device = Device::flex();
        let mut wrong = Vec::new();
        for (d_model, experts) in [
            (16, 8),
            (600, 8),
            (513, 64),
            (600, 65),
            (1100, 16),
            (512, 64),
            (2, 4),
            (1, 3),
        ] {
            let router = RouterConfig::new(d_model, experts, 1.max(experts / 8)).with_seed(3);
            let config = MoeConfig::new(router, 8).with_num_shared_experts(1);
            let moe = config.init(&device);
            let tokens = 300;
            let x = tensor_of(
                &random(tokens * d_model, 1),
                [tokens, d_model],
                DType::F32,
                &device,
            );
            let forward = |count: usize| {
                let routed = moe.forward_routed(x.clone().slice(s![0..count]));
                [
                    ("logits", bits(&routed.routing.logits)),
                    ("weights", bits(&routed.routing.weights)),
                    ("output", bits(&routed.output)),
                ]
            };
            let all = forward(tokens);
            for count in FEW {
                for ((what, few), (_, all)) in forward(count).into_iter().zip(&all) {
                    if few[..] != all[..few.len()] {
                        wrong.push((what, d_model, experts, count));
                    }
                }
            }
        }
        wrong
    }) {
        assert!(
            wrong.is_empty(),
            "other bits for (what, d_model, experts, tokens): {} cases, {:?} ...",
            wrong.len(),
            &wrong[..wrong.len().min(12)]
        );
    }
}
