//! Kinds of attention.

mod cache;
mod gqa;
mod indexer;
mod mla;
mod packing;
mod rope;
mod select;

use burn::module::Module;
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

pub(crate) use cache::{LayerCache, SequenceCache};
pub use gqa::{Gqa, GqaConfig, QkNorm};
pub use indexer::{Indexer, IndexerConfig};
pub use mla::{Mla, MlaConfig};
pub use packing::Packing;
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

    /// Angles of tokens at these positions, the same for all layers.
    pub fn angles(&self, positions: &[usize], device: &Device) -> Rope {
        let (dims, rope) = match self {
            Self::Mla(config) => (config.qk_rope_head_dim, &config.rope),
            Self::Gqa(config) => (config.rotary_dim, &config.rope),
        };
        Rope::new(positions, dims, rope, device)
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
    /// - `x` and result: `[tokens, d_model]`, the sequences as `packing` has them. Layers in front
    ///   may have narrowed in it what the tokens see.
    pub fn forward(&self, x: Tensor<2>, packing: &mut Packing) -> Tensor<2> {
        self.forward_behind(x, packing, None)
    }

    /// [`forward`](Self::forward) of tokens behind those in the cache, if there is one.
    pub(crate) fn forward_behind(
        &self,
        x: Tensor<2>,
        packing: &mut Packing,
        cache: Option<&mut LayerCache>,
    ) -> Tensor<2> {
        match self {
            Self::Mla(mla) => mla.forward(x, packing, cache),
            Self::Gqa(gqa) => gqa.forward(x, packing, cache),
        }
    }
}

/// Softmax attention where several heads of queries share one of keys and values, in order.
///
/// # Shapes
///
/// - `queries`: `[batch, length, heads, dims]`
/// - `keys`: `[batch, keys, shared heads, dims]`
/// - `values`: `[batch, keys, shared heads, dims of values]`
/// - `hidden`: `[1 or batch, 1, length, keys]`, true where a query does not see a key
/// - result: `[batch, length, heads * dims of values]`
fn scaled_dot_product(
    queries: Tensor<4>,
    keys: Tensor<4>,
    values: Tensor<4>,
    scale: f64,
    hidden: &Tensor<4, Bool>,
) -> Tensor<3> {
    let [batch, length, heads, dims] = queries.dims();
    let [_, count, shared, width] = values.dims();
    let rows = heads / shared * length;
    let scores = queries
        .swap_dims(1, 2)
        .reshape([batch, shared, rows, dims])
        .matmul(keys.swap_dims(1, 2).swap_dims(2, 3))
        .reshape([batch, heads, length, count])
        * scale;
    softmax(scores.mask_fill(hidden.clone(), f32::NEG_INFINITY), 3)
        .reshape([batch, shared, rows, count])
        .matmul(values.swap_dims(1, 2))
        .reshape([batch, heads, length, width])
        .swap_dims(1, 2)
        .reshape([batch, length, heads * width])
}
