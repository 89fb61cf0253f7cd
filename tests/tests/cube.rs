//! MoE layers on CubeCL's runtimes are those on Flex: the same choices to the bit, and the same
//! outputs and gradients, on one rank and on two. `BURN_DEVICE` names the runtime.
#![cfg(any(
    feature = "cpu",
    feature = "wgpu",
    feature = "vulkan",
    feature = "cuda"
))]

use burn::optim::{GradientsParams, SgdConfig};
use burn::tensor::{DType, Device, Tensor};
use burn_moe::layer::{MoeConfig, RouterConfig, ScoreFunction};
use burn_moe::ops::{Replication, TopK, expert_swiglu, gather_rows, select_experts, sum_rows};
use burn_moe::parallel::{Balance, CombineOrder};
use burn_moe_tests::layer_run::{LayerResult, LayerRun};
use burn_moe_tests::{assert_close, index_of, random, shuffled, tensor_of, values};

/// The device under test, which is no CPU backend of Burn's own.
fn device() -> Device {
    let device = Device::default();
    assert_ne!(
        device,
        Device::flex(),
        "BURN_DEVICE names no CubeCL runtime"
    );
    device
}

fn devices() -> [Device; 2] {
    [device(), Device::flex()]
}

fn f32_of<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor_of(values, shape, DType::F32, device)
}

#[test]
fn the_same_experts_are_chosen() {
    for (experts, k, groups, kept_groups) in [(256, 8, 8, 4), (64, 6, 1, 1), (7, 7, 1, 1)] {
        let top_k = TopK {
            k,
            groups,
            kept_groups,
        };
        for tokens in [0, 1, 50] {
            // In few steps, so that there are ties.
            let steps = |seed| -> Vec<f64> {
                let values = random(tokens.max(1) * experts, seed);
                values.iter().map(|v| (v * 20.0).round() / 20.0).collect()
            };
            let (scores, bias) = (steps(1), steps(2));
            let [here, there] = devices().map(|device| {
                let scores = f32_of(&scores[..tokens * experts], [tokens, experts], &device);
                let bias = f32_of(&bias[..experts], [experts], &device);
                let ids = select_experts(scores, bias, top_k);
                assert_eq!(ids.dims(), [tokens, k]);
                ids.to_data().iter::<i64>().collect::<Vec<_>>()
            });
            assert_eq!(here, there, "{tokens} tokens, {top_k:?}");
        }
    }
}

/// Rows out of order and back, half of them dropped, with the gradients of both ways.
#[test]
fn rows_are_moved_and_summed() {
    let (tokens, k, width) = (40, 3, 22);
    let copies = tokens * k;
    let order = shuffled(copies, 3);
    let source: Vec<i64> = order.iter().map(|copy| (copy / k) as i64).collect();
    let mut place = vec![-1i64; copies];
    for (row, copy) in order.iter().enumerate() {
        if row % 2 == 0 {
            place[*copy] = row as i64;
        }
    }
    let [here, there] = devices().map(|device| {
        let device = device.autodiff();
        let x = f32_of(&random(tokens * width, 4), [tokens, width], &device).require_grad();
        let weights = f32_of(&random(copies, 5), [tokens, k], &device).require_grad();
        let rows = gather_rows(x.clone(), index_of(&source, [copies], &device));
        let out = sum_rows(
            rows,
            index_of(&place, [tokens, k], &device),
            weights.clone(),
        );
        let factors = f32_of(&random(tokens * width, 6), [tokens, width], &device);
        let grads = (out.clone() * factors).sum().backward();
        [
            values(&out),
            values(&x.grad(&grads).expect("a gradient")),
            values(&weights.grad(&grads).expect("a gradient")),
        ]
    });
    for (what, (a, b)) in ["output", "x", "weights"]
        .iter()
        .zip(here.iter().zip(&there))
    {
        assert_close(what, a, b, 1e-5);
    }
}

/// Experts without rows, one row, many; and none at all.
#[test]
fn experts_compute_the_same() {
    for (counts, d_model, d_hidden) in [
        (vec![5, 0, 1, 40, 0, 2], 24, 20),
        (vec![0, 0, 0], 8, 4),
        (vec![33], 7, 5),
        (vec![100, 3, 64], 64, 48),
    ] {
        let experts = counts.len();
        let mut offsets = vec![0i64];
        for count in &counts {
            offsets.push(offsets[offsets.len() - 1] + count);
        }
        let rows = offsets[experts] as usize;
        let sizes = [
            experts * d_model * 2 * d_hidden,
            experts * d_hidden * d_model,
        ];
        let [here, there] = devices().map(|device| {
            let device = device.autodiff();
            let x = f32_of(&random(rows * d_model, 1), [rows, d_model], &device);
            let shape = [experts, d_model, 2 * d_hidden];
            let gate_up = f32_of(&random(sizes[0], 2), shape, &device);
            let down = f32_of(&random(sizes[1], 3), [experts, d_hidden, d_model], &device);
            let (x, gate_up, down) = (
                x.require_grad(),
                gate_up.require_grad(),
                down.require_grad(),
            );
            let offsets = index_of(&offsets, [experts + 1], &device);
            let none = Replication::none();
            let out = expert_swiglu(x.clone(), gate_up.clone(), down.clone(), offsets, none);
            let factors = f32_of(&random(rows * d_model, 4), [rows, d_model], &device);
            let grads = (out.clone() * factors).sum().backward();
            [
                values(&out),
                values(&x.grad(&grads).expect("a gradient")),
                values(&gate_up.grad(&grads).expect("a gradient")),
                values(&down.grad(&grads).expect("a gradient")),
            ]
        });
        let parts = ["output", "x", "gate_up", "down"];
        for (part, (a, b)) in parts.iter().zip(here.iter().zip(&there)) {
            assert_close(&format!("{part}, rows {counts:?}"), a, b, 1e-5);
        }
    }
}

fn configs() -> Vec<MoeConfig> {
    let router = |experts, k| RouterConfig::new(24, experts, k);
    let deepseek = router(16, 4)
        .with_n_group(4)
        .with_topk_group(2)
        .with_routed_scaling_factor(2.5);
    let mixtral = router(8, 2)
        .with_score_function(ScoreFunction::Softmax)
        .with_selection_bias(false);
    vec![
        MoeConfig::new(deepseek.clone(), 20)
            .with_num_shared_experts(1)
            .with_seed(5),
        MoeConfig::new(mixtral, 20),
        MoeConfig::new(deepseek, 12).with_capacity_factor(Some(1.1)),
    ]
}

fn compare(what: &str, result: &LayerResult, expected: &LayerResult) {
    let wide = |values: &[f32]| values.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
    for (part, a, b) in [
        ("output", &wide(&result.output), &wide(&expected.output)),
        ("x", &result.grad_x, &expected.grad_x),
        ("gate_up", &result.grad_gate_up, &expected.grad_gate_up),
        ("down", &result.grad_down, &expected.grad_down),
        ("gate", &result.grad_gate, &expected.grad_gate),
    ] {
        assert_close(&format!("{part}: {what}"), a, b, 1e-5);
    }
}

#[test]
fn a_layer_is_the_one_on_flex() {
    // Few tokens need one configuration: each shape is kernels to compile.
    for (config, tokens) in configs().into_iter().zip([&[0, 1, 64][..], &[64], &[64]]) {
        for &tokens in tokens {
            let flex = LayerRun::single(config.clone(), tokens);
            let here = LayerRun {
                device: device(),
                ..flex.clone()
            };
            let what = format!("{tokens} tokens, {config:?}");
            compare(&what, &here.run(), &flex.run());
        }
    }
}

#[test]
fn all_tokens_on_one_expert() {
    // Normalised, the weight of a single expert is 1, and the gradient of the gate only rounding.
    let router = RouterConfig::new(24, 8, 1).with_norm_topk_prob(false);
    let flex = LayerRun {
        hot_expert: Some(5),
        ..LayerRun::single(MoeConfig::new(router, 20), 64)
    };
    let here = LayerRun {
        device: device(),
        ..flex.clone()
    };
    compare("one expert", &here.run(), &flex.run());
}

/// Two ranks share the device, with and without replicas of experts.
#[test]
fn two_ranks_are_one() {
    let config = configs().remove(0);
    let combinations = [
        (Balance::None, 0, CombineOrder::Exact),
        (Balance::Exact, 2, CombineOrder::Rank),
        (Balance::Exact, 2, CombineOrder::Exact),
    ];
    for (hot_expert, tokens, combinations) in [
        (None, 61, &combinations[..2]),
        (Some(5), 40, &combinations[..]),
        (None, 1, &combinations[..2]),
    ] {
        let single = LayerRun {
            hot_expert,
            ..LayerRun::single(config.clone(), tokens)
        };
        let expected = single.run();
        let mut replicas = 0;
        for &(balance, slots, combine) in combinations {
            let run = LayerRun {
                ranks: 2,
                balance,
                slots,
                combine,
                device: device(),
                ..single.clone()
            };
            let result = run.run();
            let what = format!("{balance:?}, {combine:?}, {tokens} tokens, {hot_expert:?}");
            compare(&what, &result, &expected);
            replicas += result.stats.replicas.len();
        }
        assert!(
            replicas > 0 || hot_expert.is_none(),
            "no expert was replicated"
        );
    }
}

/// The same losses, step by step.
#[test]
fn a_layer_trains_as_on_flex() {
    let [here, there] = devices().map(|device| {
        let device = device.autodiff();
        let mut moe = configs().remove(0).init(&device);
        let mut optimizer = SgdConfig::new().init();
        let x = f32_of(&random(64 * 24, 1), [64, 24], &device);
        let target = f32_of(&random(64 * 24, 2), [64, 24], &device);
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = (moe.forward(x.clone()) - target.clone()).square().mean();
            losses.extend(values(&loss.clone()));
            let grads = GradientsParams::from_grads(loss.backward(), &moe);
            moe = optimizer.step(0.5, moe, grads);
            moe.update_bias(1e-3);
        }
        losses
    });
    assert_close("losses", &here, &there, 1e-5);
    assert!(here[3] < here[0], "the loss does not fall: {here:?}");
}
