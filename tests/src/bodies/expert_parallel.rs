//! Expert parallelism changes nothing: any number of ranks, any balancer and any number of slots
//! give the outputs and gradients of a single rank.

use burn_moe::layer::{MoeConfig, RouterConfig};
use burn_moe::parallel::{Balance, CombineOrder};

use crate::layer_run::{LayerResult, LayerRun};
use crate::{ranks, relative_error};

fn config(experts: usize, k: usize) -> MoeConfig {
    MoeConfig::new(RouterConfig::new(24, experts, k), 20)
        .with_num_shared_experts(1)
        .with_seed(5)
}

bodies! {
    skewed_load,
    one_expert_per_token,
    every_expert_for_every_token,
    all_tokens_on_one_expert,
    fewer_tokens_than_ranks,
    all_tokens_start_on_one_rank,
    groups_softmax_and_dropping,
    deep_and_thin_products,
    ideal_routing_is_balanced,
    two_runs_give_the_same_bits,
    two_nodes,
    early_weights_change_nothing,
}

/// Runs `single` over ranks, balancers and slots, and compares. Returns the most replicas seen.
fn compare_all(single: &LayerRun, ranks: &[usize]) -> usize {
    let expected = single.run();
    let mut replicas = 0;
    for ranks in ranks::sizes(ranks) {
        for balance in [Balance::None, Balance::Exact] {
            for slots in [0, 1, 2] {
                for combine in [CombineOrder::Exact, CombineOrder::Rank] {
                    let run = LayerRun {
                        ranks,
                        balance,
                        slots,
                        combine,
                        ..single.clone()
                    };
                    let result = run.run();
                    compare(&run, &result, &expected);
                    replicas = replicas.max(result.stats.replicas.len());
                }
            }
        }
    }
    replicas
}

fn compare(run: &LayerRun, result: &LayerResult, expected: &LayerResult) {
    let what = format!(
        "{} ranks, {:?}, {} slots, {:?}, {} tokens",
        run.ranks, run.balance, run.slots, run.combine, run.tokens
    );
    match run.combine {
        CombineOrder::Exact => assert!(
            result
                .output
                .iter()
                .map(|v| v.to_bits())
                .eq(expected.output.iter().map(|v| v.to_bits())),
            "output bits differ: {what}"
        ),
        CombineOrder::Rank => {
            let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
            let error = relative_error(&wide(&result.output), &wide(&expected.output));
            assert!(error < 1e-5, "output differs by {error:e}: {what}");
        }
    }
    for (name, a, b) in [
        ("x", &result.grad_x, &expected.grad_x),
        ("gate_up", &result.grad_gate_up, &expected.grad_gate_up),
        ("down", &result.grad_down, &expected.grad_down),
        ("gate", &result.grad_gate, &expected.grad_gate),
    ] {
        let error = relative_error(a, b);
        assert!(
            error < 1e-5,
            "gradient of {name} differs by {error:e}: {what}"
        );
    }
}

/// Uneven load, with all balancers, slots and orders.
pub fn skewed_load() {
    let replicas = compare_all(&LayerRun::single(config(16, 3), 203), &[2, 4, 8]);
    assert!(replicas > 0, "the balancer had nothing to do");
}

/// Top-1.
pub fn one_expert_per_token() {
    compare_all(&LayerRun::single(config(8, 1), 61), &[2, 4, 8]);
}

/// As many experts a token as there are.
pub fn every_expert_for_every_token() {
    compare_all(&LayerRun::single(config(8, 8), 19), &[2, 4, 8]);
}

/// All load on one expert.
pub fn all_tokens_on_one_expert() {
    let single = LayerRun {
        hot_expert: Some(5),
        ..LayerRun::single(config(8, 1), 64)
    };
    let replicas = compare_all(&single, &[2, 4, 8]);
    assert!(replicas > 0, "the balancer had nothing to do");
}

/// Ranks and experts without tokens.
pub fn fewer_tokens_than_ranks() {
    // Most experts and some ranks have no token at all; ranks with one token take the path of
    // single rows.
    for tokens in [1, 2, 3, 5] {
        compare_all(&LayerRun::single(config(8, 2), tokens), &[2, 4, 8]);
    }
}

/// Sources of very different size.
pub fn all_tokens_start_on_one_rank() {
    let single = LayerRun::single(config(8, 3), 40);
    let expected = single.run();
    if ranks::sizes(&[4]).is_empty() {
        return;
    }
    for combine in [CombineOrder::Exact, CombineOrder::Rank] {
        let run = LayerRun {
            ranks: 4,
            split: vec![0, 39, 0, 1],
            balance: Balance::Exact,
            slots: 2,
            combine,
            ..single.clone()
        };
        compare(&run, &run.run(), &expected);
    }
}

/// Group-limited routing, softmax scores, and experts of limited capacity.
pub fn groups_softmax_and_dropping() {
    let mut config = config(16, 4).with_capacity_factor(Some(1.1));
    config.router = config.router.with_n_group(4).with_topk_group(2);
    compare_all(&LayerRun::single(config.clone(), 90), &[2, 4]);
    config.router = config
        .router
        .with_score_function(burn_moe::layer::ScoreFunction::Softmax)
        .with_norm_topk_prob(false)
        .with_selection_bias(false);
    compare_all(&LayerRun::single(config, 90), &[2, 4]);
}

/// Products deeper than 512 with at most 64 columns: there the number of rows, which differs
/// between ranks, can decide in which order a matrix product adds.
pub fn deep_and_thin_products() {
    for (d_model, d_hidden) in [(600, 8), (16, 600)] {
        let config = MoeConfig::new(RouterConfig::new(d_model, 8, 2), d_hidden)
            .with_num_shared_experts(1)
            .with_seed(5);
        let single = LayerRun::single(config, 150);
        let expected = single.run();
        for ranks in ranks::sizes(&[2, 4]) {
            let balance = match ranks {
                2 => Balance::None,
                _ => Balance::Exact,
            };
            let run = LayerRun {
                ranks,
                balance,
                slots: 2,
                ..single.clone()
            };
            compare(&run, &run.run(), &expected);
        }
    }
}

/// Forced routing is balanced.
pub fn ideal_routing_is_balanced() {
    for ranks in ranks::sizes(&[1, 2, 4]) {
        let run = LayerRun {
            ranks,
            balance: Balance::Ideal,
            ..LayerRun::single(config(16, 4), 64)
        };
        assert_eq!(run.run().stats.imbalance_after, 1.0);
    }
}

/// Nothing depends on time.
pub fn two_runs_give_the_same_bits() {
    let run = LayerRun {
        ranks: ranks::sizes(&[2, 4]).pop().unwrap_or(1),
        balance: Balance::Exact,
        slots: 2,
        combine: CombineOrder::Rank,
        ..LayerRun::single(config(16, 3), 203)
    };
    let (first, second) = (run.run(), run.run());
    assert_eq!(first.output, second.output);
    assert_eq!(first.grad_x, second.grad_x);
    assert_eq!(first.grad_gate_up, second.grad_gate_up);
    assert_eq!(first.grad_down, second.grad_down);
}

/// All of `a`'s values have the bits of `b`'s.
fn same_bits(a: &LayerResult, b: &LayerResult) -> bool {
    let bits = |values: &[f64]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    let all = |it: &LayerResult| {
        [&it.grad_x, &it.grad_gate_up, &it.grad_down, &it.grad_gate].map(|v| bits(v))
    };
    let outputs = |it: &LayerResult| it.output.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    outputs(a) == outputs(b) && all(a) == all(b)
}

/// Replicas stay on their node, and the way of rows between nodes is of no matter.
pub fn two_nodes() {
    let single = LayerRun::single(config(16, 3), 203);
    let expected = single.run();
    for ranks in ranks::sizes(&[4, 8]) {
        for combine in [CombineOrder::Exact, CombineOrder::Rank] {
            let direct = LayerRun {
                ranks,
                balance: Balance::Exact,
                slots: 2,
                combine,
                nodes: 2,
                ..single.clone()
            };
            let result = direct.run();
            compare(&direct, &result, &expected);
            assert!(
                !result.stats.replicas.is_empty(),
                "the balancer had nothing to do"
            );
            for replica in &result.stats.replicas {
                let home = replica.expert as usize / (16 / ranks);
                let node = |rank: usize| rank / (ranks / 2);
                assert_eq!(node(replica.rank as usize), node(home), "{replica:?}");
            }
            let hierarchical = LayerRun {
                hierarchical: true,
                ..direct.clone()
            };
            assert!(
                same_bits(&hierarchical.run(), &result),
                "{ranks} ranks, {combine:?}"
            );
        }
    }
}

/// When replicas' weights are sent is of no matter.
pub fn early_weights_change_nothing() {
    for ranks in ranks::sizes(&[2, 4]) {
        for combine in [CombineOrder::Exact, CombineOrder::Rank] {
            let early = LayerRun {
                ranks,
                balance: Balance::Exact,
                slots: 2,
                combine,
                ..LayerRun::single(config(16, 3), 203)
            };
            let late = LayerRun {
                overlap: false,
                ..early.clone()
            };
            let early = early.run();
            assert!(
                !early.stats.replicas.is_empty(),
                "the balancer had nothing to do"
            );
            assert!(same_bits(&early, &late.run()), "{ranks} ranks, {combine:?}");
        }
    }
}
