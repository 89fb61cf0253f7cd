//! Scaled-down models of the published families.

use burn::tensor::Device;
use burn_moe::parallel::{ExpertParallel, ParallelOptions};
use burn_moe_models::attention::AttentionConfig;
use burn_moe_models::{ModelConfig, Scale, TokenBatch};

fn scale(text: &str) -> Scale {
    text.parse().unwrap()
}

#[test]
fn scales_are_fractions() {
    assert_eq!(scale("1/16").to_string(), "1/16");
    assert_eq!(scale("3 / 4").to_string(), "3/4");
    assert_eq!(scale("1"), Scale::ONE);
    for text in [
        "", "0", "0/2", "3/2", "1/0", "-1/2", "a/b", "1/2/3", "0.5", "2",
    ] {
        assert!(text.parse::<Scale>().is_err(), "{text}");
    }
}

/// Every published model keeps what shapes its routing, at every scale that leaves anything.
#[test]
fn routing_keeps_its_shape() {
    for name in ModelConfig::NAMES {
        let config = ModelConfig::named(name).unwrap();
        for text in ["1", "1/2", "1/3", "1/16", "1/20", "1/64"] {
            let Ok(scaled) = config.scaled(scale(text)) else {
                // Models that are small already.
                assert!(
                    ["tiny", "smoke"].contains(name) || text == "1/64",
                    "{name} {text}"
                );
                continue;
            };
            scaled.validate().unwrap();
            let routing = |c: &ModelConfig| {
                let counts = [c.num_experts, c.top_k, c.n_group, c.topk_group];
                let flags = (c.score_function, c.norm_topk_prob, c.selection_bias);
                let layers = (c.num_layers, c.num_dense_layers, c.num_shared_experts);
                (counts, flags, layers, c.routed_scaling_factor)
            };
            assert_eq!(routing(&scaled), routing(&config), "{name} {text}");
            if text == "1" {
                let num_mtp_layers = 0;
                assert_eq!(
                    scaled,
                    ModelConfig {
                        num_mtp_layers,
                        ..config.clone()
                    }
                );
                continue;
            }
            let ratio = |size: usize, of: usize| size as f64 / of as f64;
            let (numerator, denominator) = text.split_once('/').unwrap();
            let factor: f64 =
                numerator.parse::<f64>().unwrap() / denominator.parse::<f64>().unwrap();
            for (size, of) in [
                (scaled.d_model, config.d_model),
                (scaled.d_hidden_expert, config.d_hidden_expert),
                (scaled.d_hidden_dense, config.d_hidden_dense),
            ] {
                assert!(size.is_multiple_of(8));
                let near = (ratio(size, of) - factor).abs() * of as f64;
                assert!(near <= 4.0, "{name} {text}: {of} to {size}");
            }
            assert!(scaled.vocab_size >= 256.min(config.vocab_size));
            let heads = |c: &ModelConfig| match &c.attention {
                AttentionConfig::Mla(mla) => {
                    assert!(mla.qk_rope_head_dim.is_multiple_of(2));
                    (mla.num_heads, mla.num_heads * mla.v_head_dim)
                }
                AttentionConfig::Gqa(gqa) => {
                    assert!(gqa.rotary_dim.is_multiple_of(2));
                    assert!(gqa.num_heads.is_multiple_of(gqa.num_kv_heads));
                    (gqa.num_heads, gqa.num_heads * gqa.head_dim)
                }
            };
            let ((count, width), (_, full)) = (heads(&scaled), heads(&config));
            assert!(count >= 1);
            let off = ratio(width, full) / factor;
            assert!(
                (0.6..1.6).contains(&off),
                "{name} {text}: {full} to {width}"
            );
        }
    }
}

/// The numbers for DeepSeek-V3, worked out by hand.
#[test]
fn a_sixteenth_of_deepseek_v3() {
    let config = ModelConfig::named("deepseek-v3").unwrap();
    let scaled = config
        .scaled(scale("1/16"))
        .unwrap()
        .with_layers(4)
        .unwrap();
    assert_eq!(scaled.d_model, 448);
    assert_eq!(scaled.d_hidden_dense, 1152);
    assert_eq!(scaled.d_hidden_expert, 128);
    assert_eq!(scaled.vocab_size, 8080);
    assert_eq!((scaled.num_layers, scaled.num_dense_layers), (4, 1));
    let AttentionConfig::Mla(mla) = &scaled.attention else {
        panic!("latent attention");
    };
    assert_eq!(mla.num_heads, 8);
    assert_eq!((mla.q_lora_rank, mla.kv_lora_rank), (Some(96), 32));
    let dims = (mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.v_head_dim);
    assert_eq!(dims, (128, 64, 128));
}

#[test]
fn heads_shrink_when_one_is_left() {
    let config = ModelConfig::named("mixtral-8x7b").unwrap();
    let scaled = config.scaled(scale("1/64")).unwrap();
    let AttentionConfig::Gqa(gqa) = &scaled.attention else {
        panic!("grouped queries");
    };
    assert_eq!((gqa.num_heads, gqa.num_kv_heads), (1, 1));
    assert_eq!((gqa.head_dim, gqa.rotary_dim), (64, 64));
}

#[test]
fn layers_keep_the_share_of_dense_ones() {
    let of = |name: &str, layers| {
        let config = ModelConfig::named(name)
            .unwrap()
            .with_layers(layers)
            .unwrap();
        config.validate().unwrap();
        config.num_dense_layers
    };
    assert_eq!(of("deepseek-v3", 61), 3);
    assert_eq!(of("deepseek-v3", 30), 1);
    assert_eq!(of("deepseek-v3", 2), 1);
    assert_eq!(of("deepseek-v3", 1), 0);
    assert_eq!(of("mixtral-8x7b", 3), 0);
    // Its layers share indexers.
    assert_eq!(of("glm-5.2", 4), 1);
    let refused = |layers| {
        let config = ModelConfig::named("tiny").unwrap();
        config.with_layers(layers).unwrap_err().to_string()
    };
    assert!(refused(0).contains("num_layers is 0"));
    assert!(refused(5).contains("1 to 4"));
}

#[test]
fn scales_that_leave_nothing_are_refused() {
    let config = ModelConfig::named("deepseek-v3").unwrap();
    let error = config.scaled(scale("1/1000")).unwrap_err().to_string();
    assert!(error.contains("d_model is 7168 x 1/1000 = 7.2"), "{error}");
    assert!(error.contains("at least 8"), "{error}");
    let error = config.scaled(scale("1/512")).unwrap_err().to_string();
    assert!(
        error.contains("q_lora_rank is 1536 x 1/512 = 3.0"),
        "{error}"
    );
}

/// They can be built and run.
#[test]
fn scaled_models_compute() {
    let ep = ExpertParallel::solo(ParallelOptions::default()).unwrap();
    for name in [
        "deepseek-v3",
        "deepseek-v3.2",
        "glm-4.5",
        "glm-5.2",
        "minimax-m2",
        "qwen3-30b-a3b",
    ] {
        let config = ModelConfig::named(name).unwrap();
        let config = config
            .scaled(scale("1/64"))
            .unwrap()
            .with_layers(3)
            .unwrap();
        let decoder = config.init(&ep, 0, &Device::flex()).unwrap();
        let out = decoder.forward(&TokenBatch::new([[1, 2, 3, 4, 5]]));
        let logits: Vec<f32> = out.logits.into_data().iter().collect();
        assert_eq!(logits.len(), 5 * config.vocab_size, "{name}");
        assert!(logits.iter().all(|x| x.is_finite()), "{name}");
    }
}
