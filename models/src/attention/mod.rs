//! Kinds of attention.

mod gqa;
mod indexer;
mod mla;
mod rope;
mod select;

use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

pub use gqa::{Gqa, GqaConfig, QkNorm};
pub use indexer::{Indexer, IndexerConfig};
pub use mla::{Mla, MlaConfig};
pub use rope::{Rope, RopeConfig, RopePairs, YarnConfig};

/// The attention of a model's layers.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub enum AttentionConfig {
    /// Multi-head latent attention (DeepSeek-V3, GLM-5).
    Mla(MlaConfig),
    /// Grouped-query attention (GLM-4.5, Qwen3, MiniMax-M2, Mixtral).
    Gqa(GqaConfig),
}

impl AttentionConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        match self {
            Self::Mla(config) => config.validate(),
            Self::Gqa(config) => config.validate(),
        }
    }

    /// Creates the attention of layer number `layer`, with weights from the device's random state.
    pub fn init(
        &self,
        d_model: usize,
        rms_norm_eps: f64,
        layer: usize,
        device: &Device,
    ) -> Attention {
        match self {
            Self::Mla(config) => Attention::Mla(config.init(d_model, layer, device)),
            Self::Gqa(config) => Attention::Gqa(config.init(d_model, rms_norm_eps, device)),
        }
    }

    /// Angles for sequences of `length` tokens, the same for all layers.
    pub fn angles(&self, length: usize, device: &Device) -> Rope {
        let (dims, rope) = match self {
            Self::Mla(config) => (config.qk_rope_head_dim, &config.rope),
            Self::Gqa(config) => (config.rotary_dim, &config.rope),
        };
        Rope::new(length, dims, rope, device)
    }

    /// Numbers that one token leaves in a layer's cache of keys and values: of MLA the compressed
    /// vector and the rotated key, with an indexer also its key.
    pub fn cached_values(&self) -> usize {
        match self {
            Self::Mla(config) => {
                let indexed = config
                    .indexer
                    .as_ref()
                    .map_or(0, |indexer| indexer.head_dim);
                config.kv_lora_rank + config.qk_rope_head_dim + indexed
            }
            Self::Gqa(config) => 2 * config.num_kv_heads * config.head_dim,
        }
    }
}

/// The attention of a layer.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum Attention {
    /// Multi-head latent attention.
    Mla(Mla),
    /// Grouped-query attention.
    Gqa(Gqa),
}

impl Attention {
    /// # Shapes
    ///
    /// - `x` and result: `[batch, length, d_model]`
    /// - `future`: `[1, 1, length, length]`, true where a key comes after the query
    /// - `hidden`: `[1 or batch, 1, length, length]`, true where a query does not see a key: at
    ///   first `future`, then what the layers before have made of it
    pub fn forward(
        &self,
        x: Tensor<3>,
        angles: &Rope,
        future: &Tensor<4, Bool>,
        hidden: &mut Tensor<4, Bool>,
    ) -> Tensor<3> {
        match self {
            Self::Mla(mla) => mla.forward(x, angles, future, hidden),
            Self::Gqa(gqa) => gqa.forward(x, angles, hidden),
        }
    }
}

/// Softmax attention of each head. Queries, keys and values are `[batch, length, heads, dims]`, of
/// values others than of queries and keys; the result is `[batch, length, heads * dims of values]`.
fn scaled_dot_product(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    scale: f64,
    hidden: &Tensor<4, Bool>,
) -> Tensor<3> {
    let [batch, length, heads, dims] = values.dims();
    let scores = queries
        .swap_dims(1, 2)
        .matmul(keys.swap_dims(1, 2).swap_dims(2, 3))
        * scale;
    let attention = softmax(scores.mask_fill(hidden.clone(), f32::NEG_INFINITY), 3);
    attention
        .matmul(values.swap_dims(1, 2))
        .swap_dims(1, 2)
        .reshape([batch, length, heads * dims])
}
