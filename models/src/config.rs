mod family;
mod fields;
mod json;
mod named;
mod scale;

use std::path::{Path, PathBuf};

use burn_moe::layer::{ConfigError, MoeConfig, RouterConfig, ScoreFunction};
use burn_moe::parallel::ParallelError;
use serde::{Deserialize, Serialize};

use crate::attention::AttentionConfig;

pub use scale::{Scale, ScaleError};

/// A decoder put together from parts: attention of some kind, a few dense layers, then
/// mixture-of-experts layers.
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
    /// Layers behind those that have one too, in ascending order.
    #[serde(default)]
    pub other_dense_layers: Vec<usize>,
    /// Layers behind the last that predict more tokens ahead. Checkpoints have them, the decoder
    /// leaves them out; they only count in [`counts`](Self::counts).
    #[serde(default)]
    pub num_mtp_layers: usize,
    /// Attention of every layer.
    pub attention: AttentionConfig,
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
    /// Whether the embedding also is the last product, to the logits.
    #[serde(default)]
    pub tied_embeddings: bool,
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
    /// A file of Hugging Face's has a field whose value is not allowed.
    #[error("{}: {source}", path.display())]
    File {
        /// The file.
        path: PathBuf,
        /// Which field, and what is allowed.
        source: ConfigError,
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
    /// A named config, or one read from a JSON file, or from `config.json` in a folder.
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
        match path.is_dir() {
            true => Self::read(&path.join("config.json")),
            false => Self::read(path),
        }
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
            ("max_sequence_length", self.max_sequence_length),
            ("d_hidden_dense", self.d_hidden_dense),
            ("d_hidden_expert", self.d_hidden_expert),
        ] {
            ConfigError::check(value > 0, field, value, "1 or more")?;
        }
        ConfigError::check(
            self.num_dense_layers <= self.num_layers,
            "num_dense_layers",
            self.num_dense_layers,
            format!("at most num_layers ({})", self.num_layers),
        )?;
        let others = &self.other_dense_layers;
        ConfigError::check(
            others.is_sorted_by(|a, b| a < b)
                && others.first().is_none_or(|a| *a >= self.num_dense_layers)
                && others.last().is_none_or(|b| *b < self.num_layers),
            "other_dense_layers",
            format!("{others:?}"),
            format!(
                "ascending numbers from num_dense_layers ({}) on, below num_layers ({})",
                self.num_dense_layers, self.num_layers
            ),
        )?;
        ConfigError::check(
            self.rms_norm_eps.is_finite() && self.rms_norm_eps > 0.0,
            "rms_norm_eps",
            self.rms_norm_eps,
            "a positive number",
        )?;
        self.attention.validate()?;
        self.moe(0).validate()
    }

    /// Whether the layer has one feed-forward for all tokens, instead of experts.
    pub fn is_dense(&self, layer: usize) -> bool {
        layer < self.num_dense_layers || self.other_dense_layers.contains(&layer)
    }

    /// The layers that have experts, in order.
    pub fn moe_layers(&self) -> impl Iterator<Item = usize> {
        (0..self.num_layers).filter(|layer| !self.is_dense(*layer))
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
}
