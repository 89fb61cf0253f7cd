//! Router and sort.

use cubecl::CubeElement;
use cubecl_kernels::{
    router::{self, ScoreFunction, TopK},
    sort,
};

use super::{Checks, error_of, largest, same, tensor, text};
use crate::common;

const TOKENS: usize = 100;

pub fn run(checks: &mut Checks) {
    for (name, experts, top_k) in [
        ("DeepSeek-V3", 256, (8, 8, 4)),
        ("GLM-4.5-Air", 128, (8, 1, 1)),
        ("small", 6, (3, 3, 2)),
    ] {
        let top_k = TopK {
            k: top_k.0,
            groups: top_k.1,
            kept_groups: top_k.2,
        };
        let logits = common::random(TOKENS * experts, 1);
        // In few steps, so that there are ties.
        let round = |value: &f32| (value * 20.0).round() / 20.0;
        let scores: Vec<f32> = logits.iter().map(round).collect();
        let bias: Vec<f32> = common::random(experts, 2).iter().map(round).collect();
        let ids = select(&scores, &bias, top_k);

        checks.close::<f32>(&format!("scores, {name}"), |client| {
            let logits_tensor = tensor(client, &logits, &[TOKENS, experts])?;
            let functions = [ScoreFunction::Sigmoid, ScoreFunction::Softmax];
            largest(functions.map(|function| {
                let out = router::scores(client, &logits_tensor, function).map_err(text)?;
                error_of::<f32>(client, &out, &expected_scores(&logits, experts, function))
            }))
        });
        checks.equal(&format!("select_experts, {name}"), "f32", |client| {
            let scores = tensor(client, &scores, &[TOKENS, experts])?;
            let bias = tensor(client, &bias, &[experts])?;
            let out = router::select_experts(client, &scores, &bias, top_k).map_err(text)?;
            same(client, &out, &ids)
        });
        checks.close::<f32>(&format!("expert_weights, {name}"), |client| {
            let positive: Vec<f32> = scores.iter().map(|score| score + 1.1).collect();
            let scores = tensor(client, &positive, &[TOKENS, experts])?;
            let ids_tensor = tensor(client, &ids, &[TOKENS, top_k.k])?;
            let out = router::expert_weights(client, &scores, &ids_tensor, true, 2.5);
            let mut expected = Vec::new();
            for (chosen, row) in ids
                .chunks_exact(top_k.k)
                .zip(positive.chunks_exact(experts))
            {
                let chosen: Vec<f64> = chosen.iter().map(|id| row[*id as usize].into()).collect();
                let sum: f64 = chosen.iter().sum();
                expected.extend(chosen.iter().map(|weight| 2.5 * weight / (sum + 1e-20)));
            }
            error_of::<f32>(client, &out.map_err(text)?, &expected)
        });
        sorting(checks, name, &ids, experts);
    }
    // More experts than one pass of the sort takes.
    let ids: Vec<u32> = (0..5000u32)
        .map(|i| i.wrapping_mul(0x9E37_79B1) >> 20)
        .collect();
    sorting(checks, "4096 experts", &ids, 4000);
}

fn sorting(checks: &mut Checks, name: &str, ids: &[u32], experts: usize) {
    let mut counts = vec![0u32; experts];
    for id in ids.iter().filter(|id| (**id as usize) < experts) {
        counts[*id as usize] += 1;
    }
    let loads: Vec<usize> = counts.iter().map(|count| *count as usize).collect();
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    // Ids that name no expert come last.
    order.sort_by_key(|i| ids[*i as usize].min(experts as u32));
    checks.equal(
        &format!("histogram, {name}"),
        &u32::cube_type().to_string(),
        |client| {
            let ids = tensor(client, ids, &[ids.len()])?;
            same(
                client,
                &sort::histogram(client, &ids, experts).map_err(text)?,
                &counts,
            )
        },
    );
    checks.equal(
        &format!("sort_by_expert, {name}"),
        &u32::cube_type().to_string(),
        |client| {
            let ids = tensor(client, ids, &[ids.len()])?;
            let sorted = sort::sort_by_expert(client, &ids, experts).map_err(text)?;
            largest([
                same(client, &sorted.offsets, &common::offsets(&loads)),
                same(client, &sorted.order, &order),
            ])
        },
    );
}

fn expected_scores(logits: &[f32], experts: usize, function: ScoreFunction) -> Vec<f64> {
    let row_of = |row: &[f32]| -> Vec<f64> {
        let exps = row.iter().map(|logit| f64::from(*logit).exp());
        let sum: f64 = exps.clone().sum();
        match function {
            ScoreFunction::Sigmoid => exps.map(|e| e / (1.0 + e)).collect(),
            ScoreFunction::Softmax => exps.map(|e| e / sum).collect(),
        }
    };
    logits.chunks_exact(experts).flat_map(row_of).collect()
}

/// By full sorts; of equal scores the lower id wins.
fn select(scores: &[f32], bias: &[f32], top_k: TopK) -> Vec<u32> {
    let experts = bias.len();
    let size = experts / top_k.groups;
    let best_first = |values: &[f32]| {
        let mut ids: Vec<usize> = (0..values.len()).collect();
        ids.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        ids
    };
    let mut chosen = Vec::new();
    for row in scores.chunks_exact(experts) {
        // Adding 0 makes one zero of both.
        let biased: Vec<f32> = row.iter().zip(bias).map(|(s, b)| s + b + 0.0).collect();
        let groups: Vec<f32> = biased
            .chunks_exact(size)
            .map(|group| best_first(group).iter().take(2).map(|i| group[*i]).sum())
            .collect();
        let mut masked = vec![f32::NEG_INFINITY; experts];
        for group in best_first(&groups).into_iter().take(top_k.kept_groups) {
            let members = group * size..(group + 1) * size;
            masked[members.clone()].copy_from_slice(&biased[members]);
        }
        chosen.extend(
            best_first(&masked)
                .iter()
                .take(top_k.k)
                .map(|id| *id as u32),
        );
    }
    chosen
}
