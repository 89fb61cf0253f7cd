//! The decoder as a whole: causality, independence of batching and ranks, checkpoints.

use std::path::Path;

use burn::tensor::Device;
use burn_moe::comm::{RankOptions, run_ranks};
use burn_moe::parallel::{Balance, CombineOrder, ExpertParallel, ParallelOptions};
use burn_moe_models::checkpoint::{self, CheckpointError};
use burn_moe_models::{ModelConfig, TokenBatch};

fn options() -> ParallelOptions {
    ParallelOptions {
        balance: Balance::Exact,
        combine: CombineOrder::Exact,
        ..Default::default()
    }
}

fn sequences() -> Vec<Vec<u32>> {
    [5usize, 9, 9, 1, 17]
        .iter()
        .enumerate()
        .map(|(i, length)| {
            (0..*length)
                .map(|t| ((t * 37 + i * 11) % 256) as u32)
                .collect()
        })
        .collect()
}

/// Logits of all sequences, divided among `ranks`; from a checkpoint or freshly drawn.
fn logits(ranks: usize, sequences: &[Vec<u32>], from: Option<&Path>) -> Vec<f32> {
    let config = ModelConfig::named("smoke").unwrap();
    run_ranks(ranks, RankOptions::default(), |comm| {
        let (rank, count) = (comm.rank(), sequences.len());
        let ep = ExpertParallel::new(comm, options()).unwrap();
        let mut decoder = config.init(&ep, 3, &Device::flex()).unwrap();
        if let Some(folder) = from {
            decoder = config.init(&ep, 99, &Device::flex()).unwrap();
            decoder = checkpoint::load(decoder, &config, &ep, folder).unwrap();
        }
        let own = &sequences[count * rank / ranks..count * (rank + 1) / ranks];
        let out = decoder.forward(&TokenBatch::new(own));
        assert_eq!(out.routings.len(), 2);
        out.logits.into_data().iter::<f32>().collect::<Vec<_>>()
    })
    .unwrap()
    .concat()
}

fn assert_close(a: &[f32], b: &[f32], what: &str) {
    assert_eq!(a.len(), b.len());
    for (i, (a, b)) in a.iter().zip(b).enumerate() {
        assert!((a - b).abs() < 2e-5, "{what}: logit {i}: {a} and {b}");
    }
}

#[test]
fn a_token_sees_only_what_comes_before() {
    let sequence: Vec<u32> = (0..20).map(|t| t * 13 % 256).collect();
    let mut changed = sequence.clone();
    for id in &mut changed[12..] {
        *id = (*id + 1) % 256;
    }
    let a = logits(1, &[sequence], None);
    let b = logits(1, &[changed], None);
    assert_close(&a[..12 * 256], &b[..12 * 256], "before the change");
    let differs = (12..20).all(|t| a[t * 256..(t + 1) * 256] != b[t * 256..(t + 1) * 256]);
    assert!(
        differs,
        "a changed token changes its own and all later logits"
    );
    assert!(
        a[..256] != a[256..512] && a.iter().all(|v| v.is_finite()),
        "logits depend on the position"
    );
}

#[test]
fn batching_and_ranks_change_nothing() {
    let sequences = sequences();
    let alone: Vec<f32> = sequences
        .iter()
        .flat_map(|s| logits(1, std::slice::from_ref(s), None))
        .collect();
    // 8 ranks for 5 sequences: some have nothing to compute.
    for ranks in [1, 2, 4, 8] {
        let together = logits(ranks, &sequences, None);
        assert_close(&together, &alone, &format!("{ranks} ranks"));
    }
}

#[test]
fn a_checkpoint_loads_on_any_number_of_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("checkpoint");
    let config = ModelConfig::named("smoke").unwrap();
    let sequences = sequences();
    let expected = logits(1, &sequences, None);
    // The second save replaces the first.
    for ranks in [4, 2] {
        run_ranks(ranks, RankOptions::default(), |comm| {
            let ep = ExpertParallel::new(comm, options()).unwrap();
            let decoder = config.init(&ep, 3, &Device::flex()).unwrap();
            checkpoint::save(&decoder, &config, &ep, &target, 0).unwrap();
        })
        .unwrap();
        assert_eq!(checkpoint::read_config(&target).unwrap(), config);
        for ranks in [1, 2, 8] {
            let loaded = logits(ranks, &sequences, Some(&target));
            assert_close(&loaded, &expected, "loaded");
        }
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(left.len(), 1, "nothing is left beside the checkpoint");
}

#[test]
fn a_folder_with_anything_else_is_left_alone() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("checkpoint");
    let config = ModelConfig::named("smoke").unwrap();
    let other = ModelConfig {
        top_k: 2,
        ..config.clone()
    };
    let ep = ExpertParallel::solo(options()).unwrap();
    let decoder = config.init(&ep, 3, &Device::flex()).unwrap();
    checkpoint::save(&decoder, &config, &ep, &target, 0).unwrap();
    let before = std::fs::read(target.join("index.json")).unwrap();
    let refused = checkpoint::save(&decoder, &other, &ep, &target, 0);
    assert!(matches!(refused, Err(CheckpointError::Occupied { .. })));
    assert_eq!(std::fs::read(target.join("index.json")).unwrap(), before);

    let foreign = folder.path().join("foreign");
    std::fs::create_dir(&foreign).unwrap();
    std::fs::write(foreign.join("thesis.tex"), "years of work").unwrap();
    let refused = checkpoint::save(&decoder, &config, &ep, &foreign, 0);
    assert!(matches!(refused, Err(CheckpointError::Occupied { .. })));
    assert!(foreign.join("thesis.tex").exists());
}

#[test]
fn a_damaged_checkpoint_is_refused_by_name() {
    let folder = tempfile::tempdir().unwrap();
    let target = folder.path().join("checkpoint");
    let config = ModelConfig::named("smoke").unwrap();
    let ep = ExpertParallel::solo(options()).unwrap();
    let decoder = config.init(&ep, 3, &Device::flex()).unwrap();
    checkpoint::save(&decoder, &config, &ep, &target, 0).unwrap();
    let refusal = |config: &ModelConfig| {
        let decoder = config.init(&ep, 3, &Device::flex()).unwrap();
        checkpoint::load(decoder, config, &ep, &target)
            .unwrap_err()
            .to_string()
    };

    let wider = ModelConfig {
        d_hidden_dense: 64,
        ..config.clone()
    };
    assert!(refusal(&wider).contains("layers.0"), "{}", refusal(&wider));
    let shorter = ModelConfig {
        num_layers: 2,
        ..config.clone()
    };
    assert!(
        refusal(&shorter).contains("tensors"),
        "{}",
        refusal(&shorter)
    );

    let shard = target.join("rank-00000-of-00001.safetensors");
    let bytes = std::fs::read(&shard).unwrap();
    std::fs::write(&shard, &bytes[..bytes.len() / 2]).unwrap();
    assert!(refusal(&config).contains("rank-00000-of-00001.safetensors"));
    std::fs::remove_file(&shard).unwrap();
    assert!(refusal(&config).contains("rank-00000-of-00001.safetensors"));

    let index = target.join("index.json");
    let text = std::fs::read_to_string(&index).unwrap();
    std::fs::write(&index, text.replace("rank-00000", "../rank-00000")).unwrap();
    assert!(refusal(&config).contains("leaves the folder"));
}
