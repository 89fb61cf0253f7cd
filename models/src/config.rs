use burn_moe::layer::{ConfigError, MoeConfig, RouterConfig, ScoreFunction};
use burn_moe::parallel::ParallelError;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

use crate::attention::MlaConfig;

/// A decoder in the style of DeepSeek-V3 (arXiv 2412.19437): multi-head latent attention, a few
/// dense layers, then mixture-of-experts layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Tokens in the vocabulary.
    pub vocab_size: usize,
    /// Width of the tokens.
    pub d_model: usize,
    /// Layers, dense ones included.
    pub num_layers: usize,
    /// Layers from the first on that have a dense feed-forward.
    pub num_dense_layers: usize,
    /// Attention heads.
    pub num_heads: usize,
    /// Rank of the compressed queries; `null`: not compressed.
    pub q_lora_rank: Option<usize>,
    /// Rank of the compressed keys and values.
    pub kv_lora_rank: usize,
    /// Dimensions of a head's queries and keys without position.
    pub qk_nope_head_dim: usize,
    /// Dimensions of a head's queries and keys that are rotated by position.
    pub qk_rope_head_dim: usize,
    /// Dimensions of a head's values.
    pub v_head_dim: usize,
    /// Base of the rotation frequencies.
    pub rope_theta: f64,
    /// Longest sequence.
    pub max_sequence_length: usize,
    /// Width of the dense feed-forward.
    pub d_hidden_dense: usize,
    /// Width of an expert.
    pub d_hidden_expert: usize,
    /// Routed experts of a layer.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Groups of experts.
    pub n_group: usize,
    /// Groups a token may choose from.
    pub topk_group: usize,
    /// Experts that every token passes.
    pub num_shared_experts: usize,
    /// Scores from router logits.
    pub score_function: ScoreFunction,
    /// Whether a token's weights are divided by their sum.
    pub norm_topk_prob: bool,
    /// Factor on a token's weights.
    pub routed_scaling_factor: f64,
    /// Whether the router has a selection bias.
    pub selection_bias: bool,
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
}

/// What can be wrong with a model's description.
#[derive(Debug, thiserror::Error)]
pub enum ModelError {
    /// A field has a value that is not allowed.
    #[error("model config: {0}")]
    Field(#[from] ConfigError),
    /// Expert parallelism refuses its settings.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The file is no model config.
    #[error("{}: not a model config: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// Where and why.
        source: serde_json::Error,
    },
    /// Neither a named config nor a file.
    #[error(
        "no config named {name} and no such file; named configs: {}",
        ModelConfig::NAMES.join(", ")
    )]
    UnknownName {
        /// What was asked for.
        name: String,
    },
}

impl ModelConfig {
    /// The configs that [`named`](Self::named) knows.
    pub const NAMES: &[&str] = &["tiny", "smoke"];

    /// A config by name: `tiny` is DeepSeek-V3 scaled down to what two cores train in minutes, with
    /// its kinds of routing; `smoke` is smaller still, for tests.
    pub fn named(name: &str) -> Option<Self> {
        let tiny = Self {
            vocab_size: 256,
            d_model: 128,
            num_layers: 4,
            num_dense_layers: 1,
            num_heads: 4,
            q_lora_rank: Some(64),
            kv_lora_rank: 32,
            qk_nope_head_dim: 32,
            qk_rope_head_dim: 16,
            v_head_dim: 32,
            rope_theta: 10_000.0,
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
        };
        match name {
            "tiny" => Some(tiny),
            "smoke" => Some(Self {
                d_model: 32,
                num_layers: 3,
                num_heads: 2,
                q_lora_rank: None,
                kv_lora_rank: 16,
                qk_nope_head_dim: 8,
                qk_rope_head_dim: 8,
                v_head_dim: 16,
                max_sequence_length: 64,
                d_hidden_dense: 48,
                d_hidden_expert: 24,
                num_experts: 16,
                top_k: 3,
                n_group: 4,
                topk_group: 2,
                ..tiny
            }),
            _ => None,
        }
    }

    /// A named config, or one read from a JSON file.
    ///
    /// # Errors
    ///
    /// When there is no such name and file, or the file is not a valid config; names the field.
    pub fn resolve(name_or_file: &str) -> Result<Self, ModelError> {
        if let Some(config) = Self::named(name_or_file) {
            return Ok(config);
        }
        let path = Path::new(name_or_file);
        if !path.exists() {
            return Err(ModelError::UnknownName {
                name: name_or_file.into(),
            });
        }
        Self::read(path)
    }

    /// Reads and checks a JSON file. Every field must be there, and no other.
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is not a valid config; names the field.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path).map_err(|source| ModelError::Io {
            path: path.into(),
            source,
        })?;
        let config: Self = serde_json::from_str(&text).map_err(|source| ModelError::Json {
            path: path.into(),
            source,
        })?;
        config.validate()?;
        Ok(config)
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("num_layers", self.num_layers),
            ("num_heads", self.num_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
            ("max_sequence_length", self.max_sequence_length),
            ("d_hidden_dense", self.d_hidden_dense),
            ("d_hidden_expert", self.d_hidden_expert),
        ] {
            ConfigError::check(value > 0, field, value, "1 or more")?;
        }
        ConfigError::check(
            self.qk_rope_head_dim > 0 && self.qk_rope_head_dim.is_multiple_of(2),
            "qk_rope_head_dim",
            self.qk_rope_head_dim,
            "an even number, 2 or more",
        )?;
        ConfigError::check(
            self.num_dense_layers <= self.num_layers,
            "num_dense_layers",
            self.num_dense_layers,
            format!("at most num_layers ({})", self.num_layers),
        )?;
        for (field, value) in [
            ("rope_theta", self.rope_theta),
            ("rms_norm_eps", self.rms_norm_eps),
        ] {
            let allowed = value.is_finite() && value > 0.0;
            ConfigError::check(allowed, field, value, "a positive number")?;
        }
        self.moe(0).validate()
    }

    /// The mixture-of-experts layers, with the weights' seed of layer `layer`.
    pub(crate) fn moe(&self, seed: u64) -> MoeConfig {
        let router = RouterConfig::new(self.d_model, self.num_experts, self.top_k)
            .with_score_function(self.score_function)
            .with_n_group(self.n_group)
            .with_topk_group(self.topk_group)
            .with_norm_topk_prob(self.norm_topk_prob)
            .with_routed_scaling_factor(self.routed_scaling_factor)
            .with_selection_bias(self.selection_bias)
            .with_seed(seed);
        MoeConfig::new(router, self.d_hidden_expert)
            .with_num_shared_experts(self.num_shared_experts)
            .with_seed(seed)
    }

    /// The attention of every layer.
    pub(crate) fn attention(&self) -> MlaConfig {
        MlaConfig {
            d_model: self.d_model,
            num_heads: self.num_heads,
            q_lora_rank: self.q_lora_rank,
            kv_lora_rank: self.kv_lora_rank,
            qk_nope_head_dim: self.qk_nope_head_dim,
            qk_rope_head_dim: self.qk_rope_head_dim,
            v_head_dim: self.v_head_dim,
            rope_theta: self.rope_theta,
            rms_norm_eps: self.rms_norm_eps,
        }
    }
}
