//! Faults that other implementations of these models have had, and the tests that catch each here.
//! Each was put in once to see its tests fail.
//!
//! | fault | tests |
//! |---|---|
//! | 1. masked groups count as 0, not as -inf | `tests/tests/router.rs`: `masked_groups_stay_out_when_biases_are_low`; `parity.rs` |
//! | 2. a group counts by its best expert, not by its two best | `tests/tests/router.rs`: `a_group_counts_by_its_two_best`; `parity.rs` |
//! | 3. the selection bias leaks into the weights | `tests/tests/router.rs`: `the_bias_never_enters_the_weights`; `parity.rs` |
//! | 4. the selection bias is kept in bf16 | `tests/tests/router.rs`: `large_close_biases_decide_as_in_f64`; `tests/tests/narrow_model.rs`: `the_router_keeps_its_parameters_in_f32` |
//! | 5. the score is recovered as `(s + b) - b` | `tests/tests/router.rs`: `the_bias_never_enters_the_weights` |
//! | 6. no epsilon: NaN when all scores underflow | `tests/tests/router.rs`: `weights_are_finite_when_all_scores_underflow` |
//! | 7. the router multiplies in bf16 | `tests/tests/router.rs`: `a_bf16_model_routes_in_f32` |
//! | 8. scaling lost or applied twice; the shared expert scaled too | `tests/tests/router.rs`: `scaling_is_applied_once`; `tests/tests/moe_layer.rs`; `parity.rs` |
//! | 9. a sigmoid model run as softmax where `scoring_func` is absent; `rope_parameters` not read | `families.rs`: `both_spellings_mean_the_same`; `parity.rs` |
//! | 10. top-k picks an expert again when all that remain are -inf | `tests/tests/router.rs`: `no_expert_is_picked_twice` |
//! | 11. FP8 blocks that do not divide the matrix | `hf_read.rs`: `fp8_with_short_last_blocks` |
//! | 12. gate and up swapped in fused layouts | `hf_read.rs`: `fused_experts_are_the_same_as_single_ones` |
//! | 13. QK-norm of each head against of all heads | `families.rs`: `attention_follows_the_family`; `parity.rs` |
//! | 14. interleaved against half-split rotation | `families.rs`: `attention_follows_the_family`; `rope.rs`: `rotates_pairs_by_position`; `parity.rs` |
//! | 15. padding is routed and counted | here: `only_tokens_are_routed_and_counted`; `examples/tests/prefill_model.rs`: `text_is_read_with_the_models_tokenizer` |
//! | 16. values that are not finite in a router of a checkpoint | `hf_refusals.rs`: `router_values_that_are_not_finite`; here: `a_router_that_is_not_finite_is_refused` |
//!
//! Files without a folder are beside this one; `parity.rs` is `families_compute_what_transformers_computes`.

mod hf_common;

use std::fs;
use std::path::Path;

use burn::tensor::Device;
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::hf::Folder;
use burn_moe_models::{LogitsOf, TokenBatch, pretrained};
use hf_common::fixture;
use safetensors::SafeTensors;

/// Fault 15: of sequences of any lengths, as many tokens are routed and counted as there are, and
/// each sequence's are those that it has alone.
#[test]
fn only_tokens_are_routed_and_counted() {
    let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
    let folder = Folder::open(fixture("deepseek_v3")).unwrap();
    let config = pretrained::read_config(&folder).unwrap();
    let decoder = pretrained::load(&config, &ep, &folder, &Device::flex()).unwrap();
    let sequences: Vec<Vec<u32>> = [11u32, 1, 4, 4, 7]
        .iter()
        .map(|length| (0..*length).map(|t| (t * 19 + length) % 48).collect())
        .collect();
    let loads = || -> Vec<Vec<u64>> {
        let stats = ep.take_stats();
        stats.into_iter().map(|layer| layer.expert_load).collect()
    };
    let layers = config.num_layers - config.num_dense_layers;
    let mut alone = vec![vec![0; config.num_experts]; layers];
    let mut ids_alone: Vec<Vec<i64>> = vec![Vec::new(); layers];
    for sequence in &sequences {
        let out = decoder.forward(&TokenBatch::new([sequence]));
        for (all, routing) in ids_alone.iter_mut().zip(out.routings) {
            all.extend(routing.ids.into_data().iter::<i64>());
        }
        for (sum, load) in alone.iter_mut().zip(loads()) {
            sum.iter_mut()
                .zip(load)
                .for_each(|(sum, load)| *sum += load);
        }
    }
    let tokens: usize = sequences.iter().map(Vec::len).sum();
    for load in &alone {
        assert_eq!(load.iter().sum::<u64>() as usize, tokens * config.top_k);
    }

    let out = decoder.forward(&TokenBatch::new(&sequences));
    assert_eq!(loads(), alone, "together");
    for (routing, alone) in out.routings.into_iter().zip(&ids_alone) {
        assert_eq!(routing.ids.dims(), [tokens, config.top_k]);
        assert_eq!(
            routing.ids.into_data().iter::<i64>().collect::<Vec<_>>(),
            *alone
        );
    }

    let mut cache = decoder.cache(&sequences.iter().map(Vec::len).collect::<Vec<_>>(), 0);
    let mut sum = vec![vec![0; config.num_experts]; layers];
    for pass in 0..4 {
        let chunks = sequences
            .iter()
            .map(|s| s.chunks(3).nth(pass).unwrap_or(&[]));
        let batch = TokenBatch::new(chunks);
        decoder
            .forward_cached(&batch, &mut cache, LogitsOf::Last)
            .unwrap();
        for (sum, load) in sum.iter_mut().zip(loads()) {
            assert_eq!(
                load.iter().sum::<u64>() as usize,
                batch.ids.len() * config.top_k
            );
            sum.iter_mut()
                .zip(load)
                .for_each(|(sum, load)| *sum += load);
        }
    }
    assert_eq!(sum, alone, "in chunks");
}

/// Replaces the first value of a tensor of a folder.
fn spoil(folder: &Path, tensor: &str, value: f32) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path
            .extension()
            .is_none_or(|ending| ending != "safetensors")
        {
            continue;
        }
        let mut bytes = fs::read(&path).unwrap();
        let file = SafeTensors::deserialize(&bytes).unwrap();
        if let Ok(view) = file.tensor(tensor) {
            let at = view.data().as_ptr() as usize - bytes.as_ptr() as usize;
            bytes[at..at + 4].copy_from_slice(&value.to_le_bytes());
            return fs::write(&path, bytes).unwrap();
        }
    }
    panic!("no {tensor}");
}

/// Fault 16, as a model is loaded.
#[test]
fn a_router_that_is_not_finite_is_refused() {
    for tensor in ["gate.weight", "gate.e_score_correction_bias"] {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let folder = tempfile::tempdir().unwrap();
            for (name, bytes) in hf_common::files(&fixture("glm4_moe")) {
                fs::write(folder.path().join(name), bytes).unwrap();
            }
            let tensor = format!("model.layers.1.mlp.{tensor}");
            spoil(folder.path(), &tensor, value);
            let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
            let opened = Folder::open(folder.path()).unwrap();
            let config = pretrained::read_config(&opened).unwrap();
            let loaded = pretrained::load(&config, &ep, &opened, &Device::flex());
            let error = loaded.expect_err("a refusal").to_string();
            assert!(
                error.contains(&tensor) && error.contains("finite"),
                "{error}"
            );
        }
    }
}
