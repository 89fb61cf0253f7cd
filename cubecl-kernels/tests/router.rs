//! The router chooses what a plain sort chooses, to the bit, and weighs as f64 does.

mod common;

use cubecl_kernels::router::{
    RouterOptions, ScoreFunction, TopK, expert_weights, route, scores, select_experts,
};
use cubecl_kernels::{DeviceTensor, KernelError};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

fn top_k(k: usize, groups: usize, kept_groups: usize) -> TopK {
    TopK {
        k,
        groups,
        kept_groups,
    }
}

/// Ids `[T, K]` by full sorts.
fn expected(scores: &[f32], bias: &[f32], top_k: TopK) -> Vec<u32> {
    let size = bias.len() / top_k.groups;
    let better = |a: &(f32, usize), b: &(f32, usize)| {
        b.0.partial_cmp(&a.0).expect("no NaN").then(a.1.cmp(&b.1))
    };
    let mut ids = Vec::new();
    for row in scores.chunks_exact(bias.len()) {
        let biased: Vec<f32> = row
            .iter()
            .zip(bias)
            .map(|(score, bias)| score + bias)
            .map(|biased| {
                if biased.is_nan() {
                    f32::NEG_INFINITY
                } else {
                    biased
                }
            })
            .collect();
        let mut groups: Vec<(f32, usize)> = biased
            .chunks(size)
            .enumerate()
            .map(|(group, members)| {
                let mut members = members.to_vec();
                members.sort_by(|a, b| b.partial_cmp(a).expect("no NaN"));
                (members.iter().take(2).sum(), group)
            })
            .collect();
        groups.sort_by(better);
        let mut candidates: Vec<(f32, usize)> = groups
            .iter()
            .take(top_k.kept_groups)
            .flat_map(|(_, group)| group * size..(group + 1) * size)
            .map(|expert| (biased[expert], expert))
            .collect();
        candidates.sort_by(better);
        ids.extend(candidates.iter().take(top_k.k).map(|(_, id)| *id as u32));
    }
    ids
}

fn check(scores: &[f32], bias: &[f32], top_k: TopK) {
    let client = common::client();
    let tokens = scores.len() / bias.len();
    let score_tensor = DeviceTensor::from_data(&client, scores, [tokens, bias.len()]).unwrap();
    let bias_tensor = DeviceTensor::from_data(&client, bias, [bias.len()]).unwrap();
    let ids = select_experts(&client, &score_tensor, &bias_tensor, top_k).unwrap();
    assert_eq!(ids.shape(), [tokens, top_k.k]);
    assert_eq!(
        ids.read::<u32>(&client).unwrap(),
        expected(scores, bias, top_k),
        "{tokens} tokens, {} experts, {top_k:?}",
        bias.len()
    );
}

#[test]
fn models() {
    // DeepSeek-V3, GLM-4.5, Qwen3, Mixtral, and the ends of the range.
    for (experts, top_k) in [
        (256, top_k(8, 8, 4)),
        (160, top_k(8, 1, 1)),
        (128, top_k(8, 1, 1)),
        (8, top_k(2, 1, 1)),
        (512, top_k(10, 8, 2)),
        (1, top_k(1, 1, 1)),
        (6, top_k(3, 6, 3)),
        (12, top_k(12, 4, 4)),
        (30, top_k(5, 3, 1)),
    ] {
        for tokens in [0, 1, 3, 100] {
            let scores = common::random(tokens * experts, 1);
            check(&scores, &common::random(experts, 2), top_k);
        }
    }
}

/// Few different scores: the lowest ids win, among experts and among groups.
#[test]
fn ties() {
    let mut rng = StdRng::seed_from_u64(3);
    for top_k in [top_k(8, 8, 4), top_k(5, 1, 1), top_k(3, 16, 2)] {
        let scores: Vec<f32> = (0..64 * 50)
            .map(|_| f32::from(rng.random_range(0..3i8)) / 4.0)
            .collect();
        check(&scores, &[0.0; 64], top_k);
    }
    check(
        &[0.0, -0.0, 0.0, -0.0],
        &[0.0, -0.0, -0.0, -0.0],
        top_k(4, 1, 1),
    );
    check(&[0.5; 8], &[0.0; 8], top_k(8, 1, 1));
}

/// Groups that are not kept stay out even where everything else is lower than any mask could be.
#[test]
fn nothing_brings_a_dropped_group_back() {
    let bias = [-1e30f32, -1e30, -1e30, -1e30, -2e30, -2e30, -2e30, -2e30];
    check(&common::random(8 * 20, 4), &bias, top_k(4, 2, 1));
    let minus = [f32::NEG_INFINITY; 8];
    check(&common::random(8 * 3, 5), &minus, top_k(4, 2, 1));
    check(&common::random(8 * 3, 5), &minus, top_k(8, 1, 1));
}

#[test]
fn nan_is_the_lowest() {
    let mut scores = common::random(16 * 10, 6);
    scores
        .iter_mut()
        .step_by(3)
        .for_each(|score| *score = f32::NAN);
    check(&scores, &[0.0; 16], top_k(6, 1, 1));
    check(&[f32::NAN; 8], &[0.0; 8], top_k(8, 1, 1));
}

/// Large biases that are close: nothing may be rounded on the way.
#[test]
fn close_large_biases() {
    let bias: Vec<f32> = common::random(256, 7)
        .iter()
        .map(|b| 34.5 + 0.14 * b)
        .collect();
    let scores: Vec<f32> = common::random(256 * 40, 8)
        .iter()
        .map(|s| s.abs())
        .collect();
    check(&scores, &bias, top_k(8, 8, 4));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn any_choice(
        (groups, size, kept, k) in (1usize..9, 1usize..33).prop_flat_map(|(groups, size)| {
            (1..=groups).prop_flat_map(move |kept| {
                (Just(groups), Just(size), Just(kept), 1..=(kept * size).min(10))
            })
        }),
        tokens in 0usize..20,
        steps in 1i32..1000,
        seed: u64,
    ) {
        let experts = groups * size;
        let rounded = |values: Vec<f32>| -> Vec<f32> {
            values.into_iter().map(|v| (v * steps as f32).round() / steps as f32).collect()
        };
        check(
            &rounded(common::random(tokens * experts, seed)),
            &rounded(common::random(experts, seed ^ 1)),
            top_k(k, groups, kept),
        );
    }
}

fn wide_scores(logits: &[f32], experts: usize, function: ScoreFunction) -> Vec<f64> {
    let mut scores = Vec::new();
    for row in logits.chunks_exact(experts) {
        let row: Vec<f64> = row.iter().map(|v| f64::from(*v)).collect();
        let largest = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = row.iter().map(|v| (v - largest).exp()).sum();
        scores.extend(row.iter().map(|v| match function {
            ScoreFunction::Sigmoid => 1.0 / (1.0 + (-v).exp()),
            ScoreFunction::Softmax => (v - largest).exp() / sum,
        }));
    }
    scores
}

#[test]
fn scores_of_logits() {
    let client = common::client();
    for function in [ScoreFunction::Sigmoid, ScoreFunction::Softmax] {
        for (tokens, experts) in [(0, 4), (1, 1), (3, 7), (50, 128), (9, 300)] {
            let logits: Vec<f32> = common::random(tokens * experts, 9)
                .iter()
                .map(|v| v * 20.0)
                .collect();
            let tensor = DeviceTensor::from_data(&client, &logits, [tokens, experts]).unwrap();
            let got = scores(&client, &tensor, function).unwrap();
            let expected = wide_scores(&logits, experts, function);
            for (a, b) in got.read::<f32>(&client).unwrap().iter().zip(&expected) {
                let error = (f64::from(*a) - b).abs() / b;
                assert!(error < 1e-5, "{function:?}: {a:e}, expected {b:e}");
            }
        }
    }
}

#[test]
fn extreme_logits_have_finite_scores() {
    let client = common::client();
    let logits = [-1e4f32, -100.0, 0.0, 100.0, 1e4];
    let tensor = DeviceTensor::from_data(&client, &logits, [1, 5]).unwrap();
    for function in [ScoreFunction::Sigmoid, ScoreFunction::Softmax] {
        let got = scores(&client, &tensor, function).unwrap();
        let got = got.read::<f32>(&client).unwrap();
        assert!(
            got.iter().all(|score| (0.0..=1.0).contains(score)),
            "{got:?}"
        );
        assert_eq!(got[4], 1.0);
        assert_eq!(got[0], 0.0);
    }
}

#[test]
fn weights_are_scores_without_bias() {
    let client = common::client();
    let (tokens, experts, k) = (20, 64, 6);
    let logits: Vec<f32> = common::random(tokens * experts, 10)
        .iter()
        .map(|v| 3.0 * v)
        .collect();
    let bias: Vec<f32> = common::random(experts, 11)
        .iter()
        .map(|v| 10.0 * v)
        .collect();
    for normalize in [true, false] {
        let options = RouterOptions {
            score_function: ScoreFunction::Sigmoid,
            top_k: top_k(k, 8, 4),
            normalize,
            scaling_factor: 2.5,
        };
        let routed = route(
            &client,
            &DeviceTensor::from_data(&client, &logits, [tokens, experts]).unwrap(),
            Some(&DeviceTensor::from_data(&client, &bias, [experts]).unwrap()),
            &options,
        )
        .unwrap();
        let ids = routed.ids.read::<u32>(&client).unwrap();
        let scores = wide_scores(&logits, experts, ScoreFunction::Sigmoid);
        let mut weights = Vec::new();
        for (token, ids) in ids.chunks_exact(k).enumerate() {
            let own: Vec<f64> = ids
                .iter()
                .map(|id| scores[token * experts + *id as usize])
                .collect();
            let divisor = if normalize {
                own.iter().sum::<f64>() + 1e-20
            } else {
                1.0
            };
            weights.extend(own.iter().map(|score| score / divisor * 2.5));
        }
        let got = routed.weights.read::<f32>(&client).unwrap();
        let error = common::relative_error(got.iter().map(|v| f64::from(*v)), &weights);
        assert!(error < 1e-6, "{error:e}");
    }
}

/// Scores that all underflow must not give NaN.
#[test]
fn weights_of_nothing_are_zero() {
    let client = common::client();
    let scores = DeviceTensor::from_data(&client, &[0.0f32; 8], [2, 4]).unwrap();
    let ids = DeviceTensor::from_data(&client, &[0u32, 1, 2, 3], [2, 2]).unwrap();
    let weights = expert_weights(&client, &scores, &ids, true, 2.5).unwrap();
    assert_eq!(weights.read::<f32>(&client).unwrap(), [0.0; 4]);
}

#[test]
fn misuse_is_named() {
    let client = common::client();
    let scores = DeviceTensor::from_data(&client, &[0.0f32; 12], [2, 6]).unwrap();
    let bias = DeviceTensor::from_data(&client, &[0.0f32; 6], [6]).unwrap();
    for (top_k, name) in [
        (top_k(1, 0, 1), "groups"),
        (top_k(1, 4, 1), "groups"),
        (top_k(1, 3, 4), "kept_groups"),
        (top_k(1, 3, 0), "kept_groups"),
        (top_k(3, 3, 1), "k"),
    ] {
        match select_experts(&client, &scores, &bias, top_k).unwrap_err() {
            KernelError::Value { argument, .. } => assert_eq!(argument, name),
            error => panic!("{error}"),
        }
    }
    let short = DeviceTensor::from_data(&client, &[0.0f32; 5], [5]).unwrap();
    let error = select_experts(&client, &scores, &short, top_k(1, 1, 1)).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Shape {
                argument: "bias",
                ..
            }
        ),
        "{error}"
    );
}
