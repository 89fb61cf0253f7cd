//! Configs by name.

use burn_moe::layer::ScoreFunction;

use super::ModelConfig;
use crate::attention::{AttentionConfig, MlaConfig, RopeConfig, RopePairs};

/// `config.json` of published models, with the fields that shape the model.
const PUBLISHED: &[(&str, &str)] = &[
    (
        "deepseek-v3",
        include_str!("../../configs/deepseek-v3.json"),
    ),
    (
        "deepseek-r1",
        include_str!("../../configs/deepseek-v3.json"),
    ),
    (
        "deepseek-v3.2",
        include_str!("../../configs/deepseek-v3.2.json"),
    ),
    ("glm-4.5", include_str!("../../configs/glm-4.5.json")),
    (
        "glm-4.5-air",
        include_str!("../../configs/glm-4.5-air.json"),
    ),
    ("glm-4.6", include_str!("../../configs/glm-4.6.json")),
    ("glm-5", include_str!("../../configs/glm-5.json")),
    ("glm-5.1", include_str!("../../configs/glm-5.json")),
    ("glm-5.2", include_str!("../../configs/glm-5.2.json")),
    ("minimax-m2", include_str!("../../configs/minimax-m2.json")),
    (
        "mixtral-8x7b",
        include_str!("../../configs/mixtral-8x7b.json"),
    ),
    (
        "mixtral-8x22b",
        include_str!("../../configs/mixtral-8x22b.json"),
    ),
    (
        "qwen3-30b-a3b",
        include_str!("../../configs/qwen3-30b-a3b.json"),
    ),
    (
        "qwen3-235b-a22b",
        include_str!("../../configs/qwen3-235b-a22b.json"),
    ),
];

impl ModelConfig {
    /// The configs that [`named`](Self::named) knows.
    pub const NAMES: &[&str] = &[
        "tiny",
        "smoke",
        "deepseek-v3",
        "deepseek-r1",
        "deepseek-v3.2",
        "glm-4.5",
        "glm-4.5-air",
        "glm-4.6",
        "glm-5",
        "glm-5.1",
        "glm-5.2",
        "minimax-m2",
        "mixtral-8x7b",
        "mixtral-8x22b",
        "qwen3-30b-a3b",
        "qwen3-235b-a22b",
    ];

    /// A config by name: of a published model, or `tiny`, DeepSeek-V3 scaled down to what two cores
    /// train in minutes with its kinds of routing, or `smoke`, smaller still, for tests.
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "tiny" => Some(tiny()),
            "smoke" => Some(smoke()),
            _ => {
                let (_, text) = PUBLISHED.iter().find(|(known, _)| *known == name)?;
                Self::from_hugging_face(&serde_json::from_str(text).ok()?).ok()
            }
        }
    }
}

fn tiny() -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        d_model: 128,
        num_layers: 4,
        num_dense_layers: 1,
        other_dense_layers: Vec::new(),
        num_mtp_layers: 0,
        attention: AttentionConfig::Mla(MlaConfig {
            num_heads: 4,
            q_lora_rank: Some(64),
            kv_lora_rank: 32,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
            rope: RopeConfig::plain(10_000.0, RopePairs::Interleaved),
            latent_norm_eps: 1e-6,
            bias: false,
            indexer: None,
        }),
        max_sequence_length: 1024,
        d_hidden_dense: 384,
        d_hidden_expert: 128,
        num_experts: 64,
        top_k: 6,
        n_group: 8,
        topk_group: 4,
        num_shared_experts: 1,
        score_function: ScoreFunction::Sigmoid,
        norm_topk_prob: true,
        routed_scaling_factor: 2.5,
        selection_bias: true,
        rms_norm_eps: 1e-6,
        tied_embeddings: false,
    }
}

fn smoke() -> ModelConfig {
    ModelConfig {
        d_model: 32,
        num_layers: 3,
        attention: AttentionConfig::Mla(MlaConfig {
            num_heads: 2,
            q_lora_rank: None,
            kv_lora_rank: 16,
            qk_nope_head_dim: 8,
            qk_rope_head_dim: 8,
            v_head_dim: 16,
            rope: RopeConfig::plain(10_000.0, RopePairs::Interleaved),
            latent_norm_eps: 1e-6,
            bias: false,
            indexer: None,
        }),
        max_sequence_length: 64,
        d_hidden_dense: 48,
        d_hidden_expert: 24,
        num_experts: 16,
        top_k: 3,
        n_group: 4,
        topk_group: 2,
        ..tiny()
    }
}
