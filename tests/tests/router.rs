//! The router decides what DeepSeek-V3, GLM-4.5, Qwen3 and Mixtral decide: the same as loops in f64
//! that follow their equations, and without the faults found in other implementations.

use std::collections::BTreeSet;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor};
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::layer::{ConfigError, MoeConfig, Router, RouterConfig, Routing, ScoreFunction};
use burn_moe::ops::{TopK, select_experts};
use burn_moe::parallel::{Balance, ExpertParallel, ParallelError, ParallelOptions};
use burn_moe_tests::naive::{NaiveRouter, NaiveRouting};
use burn_moe_tests::{
    assert_close, assert_gradient, assert_near, bits, cast, dot, random, rounded, tensor_of,
    tensor64, values, with_values,
};
use proptest::prelude::*;

/// A router with these values, computing in `dtype`; and the same as loops in f64.
fn routers(
    config: &RouterConfig,
    gate: &[f64],
    bias: &[f64],
    dtype: DType,
    device: &Device,
) -> (Router, NaiveRouter) {
    let mut router = cast(config.init(device), dtype);
    router.gate = with_values(router.gate, gate);
    router.bias = router.bias.map(|param| with_values(param, bias));
    let naive = NaiveRouter {
        config: config.clone(),
        gate: rounded(gate, dtype),
        bias: rounded(bias, dtype),
    };
    (router, naive)
}

fn ids(routing: &Routing) -> Vec<usize> {
    let ids = routing.ids.to_data();
    ids.iter::<i64>().map(|id| id as usize).collect()
}

fn assert_same(what: &str, actual: &Routing, expected: &NaiveRouting, tolerance: f64) {
    assert_eq!(ids(actual), expected.ids, "ids: {what}");
    for (name, actual, expected) in [
        ("weights", &actual.weights, &expected.weights),
        ("scores", &actual.scores, &expected.scores),
        ("logits", &actual.logits, &expected.logits),
    ] {
        assert_near(
            &format!("{name}: {what}"),
            &values(actual),
            expected,
            tolerance,
        );
    }
}

/// Settings as models have them, and everything in between.
fn configs() -> impl Strategy<Value = RouterConfig> {
    let groups = prop_oneof![
        Just((1usize, 1usize, 1usize)),
        (1usize..6, 1usize..5, 1usize..5)
    ];
    (
        groups,
        1usize..17,
        1usize..9,
        1usize..6,
        any::<[bool; 3]>(),
        prop_oneof![Just(1.0), Just(2.5)],
    )
        .prop_map(
            |((n_group, size, topk_group), experts, k, d_model, flags, scale)| {
                let experts = if n_group == 1 {
                    experts
                } else {
                    n_group * size
                };
                let topk_group = topk_group.min(n_group);
                let k = k.min(experts / n_group * topk_group);
                let [softmax, norm, bias] = flags;
                RouterConfig::new(d_model, experts, k)
                    .with_n_group(n_group)
                    .with_topk_group(topk_group)
                    .with_score_function(match softmax {
                        true => ScoreFunction::Softmax,
                        false => ScoreFunction::Sigmoid,
                    })
                    .with_norm_topk_prob(norm)
                    .with_routed_scaling_factor(scale)
                    .with_selection_bias(bias)
            },
        )
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn any_router_in_f64(
        config in configs(),
        tokens in prop_oneof![Just(0usize), Just(1), 2usize..12],
        // Biases on both sides of zero and of -1, and all scores small beside them.
        shift in prop_oneof![Just(0.0), Just(-5.0), Just(34.5)],
        seed in 0u64..1000,
    ) {
        let device = Device::flex();
        let gate = random(config.d_model * config.num_experts, seed);
        let gate: Vec<f64> = gate.iter().map(|v| 3.0 * v).collect();
        let bias: Vec<f64> = match config.selection_bias {
            true => random(config.num_experts, seed + 1).iter().map(|v| shift + v).collect(),
            false => vec![0.0; config.num_experts],
        };
        let (router, naive) = routers(&config, &gate, &bias, DType::F64, &device);
        let x = random(tokens * config.d_model, seed + 2);
        let routing = router.forward(tensor64(&x, [tokens, config.d_model], &device));
        assert_same("f64", &routing, &naive.route(&x), 1e-12);
    }

    /// With small whole numbers, sums are exact and scores often equal: the lowest id wins, among
    /// experts and among groups.
    #[test]
    fn ties_go_to_the_lowest_id(config in configs(), tokens in 1usize..12, seed in 0u64..1000) {
        let device = Device::flex();
        let whole = |len, seed| random(len, seed).iter().map(|v| (1.4 * v).round()).collect::<Vec<_>>();
        let gate = whole(config.d_model * config.num_experts, seed);
        let bias = match config.selection_bias {
            true => whole(config.num_experts, seed + 1),
            false => vec![0.0; config.num_experts],
        };
        let x = whole(tokens * config.d_model, seed + 2);
        // Softmax depends on the order of its additions; its ties survive, but not in its sum.
        let config = config.with_score_function(ScoreFunction::Sigmoid);
        for dtype in [DType::F64, DType::F32] {
            let (router, naive) = routers(&config, &gate, &bias, dtype, &device);
            let routing = router.forward(tensor_of(&x, [tokens, config.d_model], dtype, &device));
            // Sums of two scores may tie in f32 and not in f64: compare there without groups.
            if dtype == DType::F64 || config.topk_group == config.n_group {
                prop_assert_eq!(ids(&routing), naive.route(&x).ids);
            }
        }
    }

    #[test]
    fn no_expert_is_picked_twice(
        scores in prop::collection::vec(
            prop_oneof![Just(f64::NEG_INFINITY), Just(f64::NAN), Just(0.0), -3.0f64..3.0],
            24,
        ),
        k in 1usize..7,
        kept_groups in 2usize..5,
    ) {
        let device = Device::flex();
        for dtype in [DType::F32, DType::F64] {
            let ids = select_experts(
                tensor_of(&scores, [2, 12], dtype, &device),
                Tensor::zeros([12], (&device, dtype)),
                TopK { k: k.min(3 * kept_groups), groups: 4, kept_groups },
            );
            let data = ids.to_data();
            for ids in data.iter::<i64>().collect::<Vec<_>>().chunks(k.min(3 * kept_groups)) {
                let different: BTreeSet<_> = ids.iter().copied().collect();
                prop_assert_eq!(different.len(), ids.len(), "{:?}", ids);
                prop_assert!(different.iter().all(|id| (0..12).contains(id)));
                let groups: BTreeSet<_> = different.iter().map(|id| id / 3).collect();
                prop_assert!(groups.len() <= kept_groups);
            }
        }
    }
}

/// A score that is no number is as good as none: below every other, however low.
#[test]
fn scores_that_are_no_numbers_come_last() {
    let device = Device::flex();
    let (nan, low) = (f64::NAN, -9.0);
    let choose = |groups, kept_groups| {
        let scores = [nan, low, nan, -8.0, nan, nan, -7.0, nan];
        let top_k = TopK {
            k: 3,
            groups,
            kept_groups,
        };
        let scores = tensor_of(&scores, [1, 8], DType::F32, &device);
        let ids = select_experts(scores, Tensor::zeros([8], &device), top_k).to_data();
        ids.iter::<i64>().collect::<Vec<_>>()
    };
    assert_eq!(choose(1, 1), [6, 3, 1]);
    // Only the first group of four has two numbers.
    assert_eq!(choose(2, 1), [3, 1, 0]);
    // None at all, more than are compared at a time; and one number, which comes first.
    let mut scores = [nan; 35];
    let top_k = TopK {
        k: 35,
        groups: 1,
        kept_groups: 1,
    };
    let all = |scores: &[f64]| {
        let scores = tensor_of(scores, [1, 35], DType::F32, &device);
        let ids = select_experts(scores, Tensor::zeros([35], &device), top_k).to_data();
        ids.iter::<i64>().collect::<Vec<_>>()
    };
    assert_eq!(all(&scores), (0..35).collect::<Vec<_>>());
    scores[20] = low;
    let others = (0..35).filter(|id| *id != 20);
    assert_eq!(
        all(&scores),
        [20].into_iter().chain(others).collect::<Vec<_>>()
    );
}

/// Scores given directly, as logits of a sigmoid router with an identity gate.
fn route_scores(config: RouterConfig, scores: &[f64], bias: &[f64]) -> Routing {
    let device = Device::flex();
    let experts = config.num_experts;
    let mut gate = vec![0.0; experts * experts];
    for i in 0..experts {
        gate[i * experts + i] = 1.0;
    }
    let (router, _) = routers(&config, &gate, bias, DType::F64, &device);
    let logits: Vec<f64> = scores.iter().map(|s| (s / (1.0 - s)).ln()).collect();
    router.forward(tensor64(
        &logits,
        [logits.len() / experts, experts],
        &device,
    ))
}

/// Fault 1: with biases below -1, a masked group that counts as 0 beats every kept one.
#[test]
fn masked_groups_stay_out_when_biases_are_low() {
    let config = RouterConfig::new(8, 8, 2)
        .with_n_group(4)
        .with_topk_group(1);
    let scores = [0.1, 0.2, 0.9, 0.8, 0.3, 0.4, 0.5, 0.6];
    let routing = route_scores(config, &scores, &[-5.0; 8]);
    assert_eq!(ids(&routing), [2, 3]);
    // As many as the kept groups hold.
    let config = RouterConfig::new(8, 8, 4)
        .with_n_group(4)
        .with_topk_group(2);
    let routing = route_scores(config, &scores, &[-5.0; 8]);
    assert_eq!(ids(&routing), [2, 3, 7, 6]);
}

/// Fault 2: the best single expert is in group 0, the best pair in group 1.
#[test]
fn a_group_counts_by_its_two_best() {
    let config = RouterConfig::new(6, 6, 2)
        .with_n_group(2)
        .with_topk_group(1);
    let scores = [0.9, 0.1, 0.1, 0.2, 0.6, 0.7];
    assert_eq!(ids(&route_scores(config, &scores, &[0.0; 6])), [5, 4]);
    // The bias counts for the group too.
    let config = RouterConfig::new(6, 6, 2)
        .with_n_group(2)
        .with_topk_group(1);
    let bias = [0.3, 0.3, 0.0, 0.0, 0.0, 0.0];
    assert_eq!(ids(&route_scores(config, &scores, &bias)), [0, 1]);
    // A group of one expert counts by that.
    let config = RouterConfig::new(3, 3, 2)
        .with_n_group(3)
        .with_topk_group(2);
    let routing = route_scores(config, &[0.2, 0.9, 0.6], &[0.0; 3]);
    assert_eq!(ids(&routing), [1, 2]);
}

/// Faults 3 and 5: the weights are the unbiased scores to the last bit, however large the bias.
#[test]
fn the_bias_never_enters_the_weights() {
    let device = Device::flex();
    let config = RouterConfig::new(5, 16, 4)
        .with_norm_topk_prob(false)
        .with_n_group(4)
        .with_topk_group(2);
    for scale in [1e-3, 1.0, 1e4, 1e9] {
        let bias: Vec<f64> = random(16, 1).iter().map(|v| scale * v).collect();
        let (router, _) = routers(&config, &random(80, 2), &bias, DType::F32, &device);
        let x = tensor_of(&random(7 * 5, 3), [7, 5], DType::F32, &device);
        let routing = router.forward(x);
        let expected = routing.scores.clone().gather(1, routing.ids.clone());
        assert_eq!(bits(&routing.weights), bits(&expected), "biases of {scale}");
        assert!(
            values(&routing.weights)
                .iter()
                .all(|w| (0.05..0.95).contains(w))
        );
    }
}

/// Fault 4: biases of 34.5 +- 0.14 are a few steps of bf16 apart, and must stay f32.
#[test]
fn large_close_biases_decide_as_in_f64() {
    let device = Device::flex();
    let config = RouterConfig::new(16, 64, 6)
        .with_n_group(8)
        .with_topk_group(4)
        .with_norm_topk_prob(true);
    let bias: Vec<f64> = random(64, 1).iter().map(|v| 34.5 + 0.14 * v).collect();
    let gate: Vec<f64> = random(16 * 64, 2).iter().map(|v| 0.3 * v).collect();
    let x = rounded(&random(200 * 16, 3), DType::BF16);
    let (router, naive) = routers(&config, &gate, &bias, DType::F32, &device);
    let routing = router.forward(tensor_of(&x, [200, 16], DType::BF16, &device));
    let expected = naive.route(&x);
    let ids = ids(&routing);
    let (mut compared, mut other_in_bf16) = (0, 0);
    let narrow = NaiveRouter {
        bias: rounded(&bias, DType::BF16),
        ..naive.clone()
    }
    .route(&x);
    for (token, margin) in naive.margins(&expected).into_iter().enumerate() {
        let copies = token * 6..(token + 1) * 6;
        // f32 holds sums of this size to 4e-6.
        if margin > 2e-5 {
            compared += 1;
            assert_eq!(ids[copies.clone()], expected.ids[copies.clone()]);
            let weights = &values(&routing.weights)[copies.clone()];
            assert_close("weights", weights, &expected.weights[copies.clone()], 1e-6);
        }
        other_in_bf16 += usize::from(narrow.ids[copies.clone()] != expected.ids[copies]);
    }
    assert!(compared > 150, "only {compared} tokens were far from a tie");
    assert!(
        other_in_bf16 > 100,
        "the case tells nothing: {other_in_bf16}"
    );
}

/// Fault 6: all scores of the chosen experts underflow.
#[test]
fn weights_are_finite_when_all_scores_underflow() {
    let device = Device::flex().autodiff();
    for dtype in [DType::F32, DType::F64] {
        let config = RouterConfig::new(1, 4, 2).with_routed_scaling_factor(2.5);
        let (router, _) = routers(&config, &[1.0, 1.1, 1.2, 1.3], &[0.0; 4], dtype, &device);
        for x in [-1e3, -80.0, -60.0, -45.0] {
            let x = tensor_of(&[x, x], [2, 1], dtype, &device).require_grad();
            let routing = router.forward(x.clone());
            let weights = values(&routing.weights);
            assert!(
                weights.iter().all(|w| (0.0..=2.5).contains(w)),
                "{weights:?}"
            );
            let factors = tensor_of(&[1.0, 2.0, 3.0, 5.0], [2, 2], dtype, &device);
            let grads = (routing.weights * factors).sum().backward();
            for grad in [x.grad(&grads), router.gate.val().grad(&grads)] {
                let grad = values(&grad.expect("a gradient"));
                assert!(grad.iter().all(|g| g.is_finite()), "{grad:?}");
            }
        }
    }
}

/// Fault 7: two experts whose logits differ in f32 and tie in bf16.
#[test]
fn a_bf16_model_routes_in_f32() {
    let device = Device::flex();
    let config = RouterConfig::new(1, 3, 1).with_norm_topk_prob(false);
    let (router, _) = routers(
        &config,
        &[1.0, 1.0 + 1.0 / 4096.0, 1.0 + 1.0 / 8192.0],
        &[0.0; 3],
        DType::F32,
        &device,
    );
    for dtype in [DType::BF16, DType::F16, DType::F32] {
        let routing = router.forward(tensor_of(&[1.0, 1.0, -1.0], [3, 1], dtype, &device));
        assert_eq!(ids(&routing), [1, 1, 0], "{dtype:?}");
        for tensor in [&routing.weights, &routing.scores, &routing.logits] {
            assert_eq!(tensor.dtype(), DType::F32);
        }
    }

    let config = RouterConfig::new(64, 32, 4).with_routed_scaling_factor(2.5);
    let gate: Vec<f64> = random(64 * 32, 1).iter().map(|v| v / 8.0).collect();
    let (router, naive) = routers(&config, &gate, &random(32, 2), DType::F32, &device);
    let x = rounded(&random(50 * 64, 3), DType::BF16);
    let routing = router.forward(tensor_of(&x, [50, 64], DType::BF16, &device));
    let expected = naive.route(&x);
    assert!(naive.margins(&expected).iter().all(|margin| *margin > 1e-6));
    assert_same("bf16 tokens", &routing, &expected, 1e-6);
}

/// Fault 8: the factor counts once, with and without normalisation.
#[test]
fn scaling_is_applied_once() {
    let bias = [0.0; 4];
    let scores = [0.2, 0.8, 0.4, 0.1];
    for (norm, expected) in [(true, [2.0 / 3.0, 1.0 / 3.0]), (false, [0.8, 0.4])] {
        for scale in [1.0, 2.5] {
            let config = RouterConfig::new(4, 4, 2)
                .with_norm_topk_prob(norm)
                .with_routed_scaling_factor(scale);
            let weights = values(&route_scores(config, &scores, &bias).weights);
            assert_close("weights", &weights, &expected.map(|w| w * scale), 1e-12);
        }
    }
}

#[test]
fn gradients_of_the_weights() {
    let device = Device::flex().autodiff();
    let (tokens, d_model, experts, k) = (5, 4, 8, 3);
    for score_function in [ScoreFunction::Sigmoid, ScoreFunction::Softmax] {
        for norm in [true, false] {
            let config = RouterConfig::new(d_model, experts, k)
                .with_n_group(4)
                .with_topk_group(2)
                .with_score_function(score_function)
                .with_norm_topk_prob(norm)
                .with_routed_scaling_factor(2.5);
            let gate = random(d_model * experts, 1);
            let (router, naive) = routers(&config, &gate, &random(experts, 2), DType::F64, &device);
            let factors = random(tokens * k, 4);
            for tokens in [tokens, 1] {
                let x_values = random(tokens * d_model, 3);
                let x = tensor64(&x_values, [tokens, d_model], &device).require_grad();
                let routing = router.forward(x.clone());
                assert_same("forward", &routing, &naive.route(&x_values), 1e-12);
                let factors = &factors[..tokens * k];
                let loss = (routing.weights * tensor64(factors, [tokens, k], &device)).sum();
                let grads = loss.backward();
                let of = |x: &[f64], gate: &[f64]| {
                    let naive = NaiveRouter {
                        gate: gate.to_vec(),
                        ..naive.clone()
                    };
                    dot(&naive.route(x).weights, factors)
                };
                let what = format!("{score_function:?}, norm {norm}, {tokens} tokens");
                assert_gradient(
                    &format!("x: {what}"),
                    &values(&x.grad(&grads).expect("a gradient")),
                    &x_values,
                    |x| of(x, &gate),
                );
                let router_grad = router.gate.val().grad(&grads).expect("a gradient");
                assert_gradient(
                    &format!("gate: {what}"),
                    &values(&router_grad),
                    &gate,
                    |gate| of(&x_values, gate),
                );
                let bias = router.bias.as_ref().expect("a bias");
                assert!(
                    bias.val().grad(&grads).is_none(),
                    "the bias has no gradient"
                );
            }
        }
    }
}

/// DeepSeek-V3, section 2.1.2: every step moves each bias by the same amount, against its load.
#[test]
fn the_bias_moves_against_the_load() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let mut router = RouterConfig::new(2, 4, 2).init(&device);
        let bias = |router: &Router| values(&router.bias.as_ref().expect("a bias").val());
        assert_eq!(bias(&router), [0.0; 4]);
        // The mean is 5.
        router.update_bias(&[9, 5, 0, 6], 0.25);
        assert_eq!(bias(&router), [-0.25, 0.0, 0.25, -0.25]);
        // The mean is 4.25: no expert has it.
        router.update_bias(&[4, 4, 5, 4], 0.5);
        assert_eq!(bias(&router), [0.25, 0.5, -0.25, 0.25]);
        // No tokens: nobody has more or less than the mean.
        router.update_bias(&[0; 4], 0.5);
        assert_eq!(bias(&router), [0.25, 0.5, -0.25, 0.25]);
        let param = router.bias.as_ref().expect("a bias");
        assert!(!param.is_require_grad());
        assert_eq!(param.val().dtype(), DType::F32);
        let without = RouterConfig::new(2, 4, 2).with_selection_bias(false);
        let mut router = without.init(&device);
        router.update_bias(&[9, 5, 0, 6], 0.25);
        assert!(router.bias.is_none());
    }
}

/// The layer counts the load of all ranks over the training passes since the last update.
#[test]
fn the_layer_updates_the_bias_from_the_load_of_all_ranks() {
    let config = MoeConfig::new(RouterConfig::new(6, 8, 2), 4);
    let x_of = |rank: usize, step: usize| {
        let tokens = [5, 0, 9][(rank + step) % 3];
        (tokens, random(tokens * 6, (10 * step + rank) as u64))
    };
    let run = |ranks: usize| {
        run_ranks(ranks, RankOptions::default(), |comm| {
            let device = Device::flex().autodiff();
            let ep =
                ExpertParallel::new(comm.clone(), ParallelOptions::default()).expect("options");
            let mut moe = config.init_parallel(&ep, 0, &device).expect("a layer");
            let mut biases = Vec::new();
            for step in 0..6 {
                // One rank takes the tokens of both.
                let (mut tokens, mut x) = (0, Vec::new());
                for rank in comm.rank() * 2 / ranks..(comm.rank() + 1) * 2 / ranks {
                    let (more, values) = x_of(rank, step);
                    tokens += more;
                    x.extend(values);
                }
                let x = tensor_of(&x, [tokens, 6], DType::F32, &device);
                // Passes without autodiff are not training, and count for nothing.
                moe.forward(x.clone().inner());
                moe.forward(x);
                if step % 2 == 1 {
                    moe.update_bias(0.01);
                    biases.push(values(&moe.router.bias.as_ref().expect("a bias").val()));
                }
            }
            biases
        })
        .expect("all ranks")
    };
    let single = run(1).remove(0);
    // By loops: the counts of two steps, then the rule.
    let device = Device::flex();
    let moe = config.init(&device);
    let mut naive = NaiveRouter {
        config: config.router.clone(),
        gate: values(&moe.router.gate.val()),
        bias: vec![0.0; 8],
    };
    for (update, biases) in single.iter().enumerate() {
        let mut load = [0.0; 8];
        for step in 2 * update..2 * update + 2 {
            for rank in 0..2 {
                let x = rounded(&x_of(rank, step).1, DType::F32);
                naive.route(&x).ids.iter().for_each(|id| load[*id] += 1.0);
            }
        }
        let mean = load.iter().sum::<f64>() / 8.0;
        for (bias, load) in naive.bias.iter_mut().zip(load) {
            *bias += match load.partial_cmp(&mean).expect("a number") {
                std::cmp::Ordering::Less => 0.01,
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Greater => -0.01,
            };
        }
        assert_close("bias", biases, &naive.bias, 1e-6);
    }
    assert_ne!(single[0], single[2], "nothing moved");
    for of_rank in run(2) {
        assert_eq!(of_rank, single);
    }
}

/// Forced balanced routing: as many copies for each expert, different experts for each token, and
/// the router's own weights for them.
#[test]
fn balanced_routing_is_balanced() {
    let device = Device::flex();
    for (experts, k, tokens, first) in [(8, 3, 16, 0), (8, 8, 5, 4), (6, 4, 3, 21), (5, 2, 7, 3)] {
        let config = RouterConfig::new(3, experts, k).with_routed_scaling_factor(2.5);
        let (router, naive) = routers(
            &config,
            &random(3 * experts, 1),
            &random(experts, 2),
            DType::F64,
            &device,
        );
        let x = random(tokens * 3, 3);
        let routing = router.forward_balanced(tensor64(&x, [tokens, 3], &device), first);
        let ids = ids(&routing);
        let mut load = vec![0usize; experts];
        ids.iter().for_each(|id| load[*id] += 1);
        let (least, most) = (tokens * k / experts, (tokens * k).div_ceil(experts));
        assert!(load.iter().all(|l| (least..=most).contains(l)), "{load:?}");
        for ids in ids.chunks(k) {
            assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), k, "{ids:?}");
        }
        // Another call goes on where this one ended.
        let more = tensor64(&random(6, 4), [2, 3], &device);
        let more = router.forward_balanced(more, first + tokens * k);
        self::ids(&more).iter().for_each(|id| load[*id] += 1);
        let copies = (tokens + 2) * k;
        let (least, most) = (copies / experts, copies.div_ceil(experts));
        assert!(load.iter().all(|l| (least..=most).contains(l)), "{load:?}");
        let expected = naive.route_to(&x, |token, _| ids[token * k..(token + 1) * k].to_vec());
        assert_same("balanced", &routing, &expected, 1e-12);
    }
}

fn refused(result: Result<(), ConfigError>, field: &str, value: &str, allowed: &str) {
    let error = result.expect_err(field);
    assert_eq!((error.field, error.value.as_str()), (field, value));
    assert_eq!(error.allowed, allowed, "{field}");
    let text = error.to_string();
    assert_eq!(text, format!("{field} is {value}, allowed: {allowed}"));
}

#[test]
fn configs_that_cannot_work_are_refused() {
    let good = || {
        RouterConfig::new(16, 12, 3)
            .with_n_group(4)
            .with_topk_group(2)
    };
    good().validate().expect("a config that works");
    let mut config = good();
    config.d_model = 0;
    refused(config.validate(), "d_model", "0", "1 or more");
    let mut config = good();
    config.num_experts = 0;
    refused(config.validate(), "num_experts", "0", "1 or more");
    let config = good().with_n_group(5);
    let divisor = "a divisor of num_experts (12)";
    refused(config.validate(), "n_group", "5", divisor);
    refused(good().with_n_group(0).validate(), "n_group", "0", divisor);
    let allowed = "1 to n_group (4)";
    let config = good().with_topk_group(5);
    refused(config.validate(), "topk_group", "5", allowed);
    let config = good().with_topk_group(0);
    refused(config.validate(), "topk_group", "0", allowed);
    // Six experts are in the kept groups.
    let allowed = "1 to the number of experts in the kept groups (6)";
    let mut config = good();
    config.top_k = 6;
    config.validate().expect("all experts of the kept groups");
    config.top_k = 7;
    refused(config.validate(), "top_k", "7", allowed);
    config.top_k = 0;
    refused(config.validate(), "top_k", "0", allowed);
    let config = RouterConfig::new(16, 12, 13);
    let allowed = "1 to the number of experts in the kept groups (12)";
    refused(config.validate(), "top_k", "13", allowed);
    for factor in [f64::NAN, f64::INFINITY] {
        let config = good().with_routed_scaling_factor(factor);
        let value = factor.to_string();
        refused(
            config.validate(),
            "routed_scaling_factor",
            &value,
            "a finite number",
        );
    }

    let moe = || MoeConfig::new(good(), 8);
    moe().validate().expect("a config that works");
    refused(
        MoeConfig::new(good(), 0).validate(),
        "d_hidden",
        "0",
        "1 or more",
    );
    for factor in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        let config = moe().with_capacity_factor(Some(factor));
        let value = factor.to_string();
        let allowed = "a positive number, or none";
        refused(config.validate(), "capacity_factor", &value, allowed);
    }
    refused(
        MoeConfig::new(good().with_topk_group(9), 8).validate(),
        "topk_group",
        "9",
        "1 to n_group (4)",
    );
}

#[test]
fn expert_parallelism_that_cannot_work_is_refused() {
    let layer = |ep: &Arc<ExpertParallel>, config: MoeConfig| {
        config.init_parallel(ep, 0, &Device::flex()).map(|_| ())
    };
    let texts = run_ranks(3, RankOptions::default(), |comm| {
        let ep = ExpertParallel::new(comm.clone(), ParallelOptions::default()).expect("options");
        let error = layer(&ep, MoeConfig::new(RouterConfig::new(4, 64, 2), 4)).expect_err("3");
        assert!(matches!(error, ParallelError::Config(_)));
        let wrong_k = layer(&ep, MoeConfig::new(RouterConfig::new(4, 6, 7), 4)).expect_err("k");
        let lanes = ParallelOptions {
            lane: 2,
            lanes: 2,
            ..Default::default()
        };
        let planner = ParallelOptions {
            planner: "magic".into(),
            ..Default::default()
        };
        let [lanes, planner] = [lanes, planner].map(|options| {
            ExpertParallel::new(comm.clone(), options)
                .expect_err("options")
                .to_string()
        });
        (error.to_string(), wrong_k.to_string(), lanes, planner)
    })
    .expect("all ranks");
    for (ranks, k, lanes, planner) in texts {
        assert_eq!(ranks, "ranks is 3, allowed: a divisor of num_experts (64)");
        assert_eq!(
            k,
            "top_k is 7, allowed: 1 to the number of experts in the kept groups (6)"
        );
        assert_eq!(lanes, "lane is 2, allowed: less than lanes (2)");
        assert!(
            planner.starts_with("planner is `magic`, allowed: ") && planner.contains("quota"),
            "{planner}"
        );
    }
}

/// Balanced routing through the layer: the ranks continue each other's round.
#[test]
fn ideal_balance_over_ranks() {
    let loads = run_ranks(4, RankOptions::default(), |comm| {
        let device = Device::flex();
        let options = ParallelOptions {
            balance: Balance::Ideal,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm.clone(), options).expect("options");
        let config = MoeConfig::new(RouterConfig::new(4, 8, 3), 4);
        let moe = config.init_parallel(&ep, 0, &device).expect("a layer");
        let routing = moe.forward_routed(Tensor::ones([6, 4], &device)).routing;
        (ids(&routing), ep.take_stats().remove(0).rank_load)
    })
    .expect("all ranks");
    let mut load = [0; 8];
    for (ids, rank_load) in &loads {
        assert_eq!(*rank_load, [18; 4]);
        ids.iter().for_each(|id| load[*id] += 1);
    }
    assert_eq!(load, [9; 8]);
}
