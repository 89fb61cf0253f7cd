use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Bool, Device, Tensor};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

use super::{Indexer, IndexerConfig, Rope, RopeConfig, scaled_dot_product};

/// Sizes of [`Mla`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MlaConfig {
    /// Heads.
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
    /// Rotation by position.
    pub rope: RopeConfig,
    /// Added to the mean square in the norms of the compressed vectors.
    pub latent_norm_eps: f64,
    /// Whether the products that compress, and the last, have a bias.
    #[serde(default)]
    pub bias: bool,
    /// Chooses a few keys for each query (DeepSeek-V3.2, GLM-5); absent: every query sees all keys
    /// before it.
    #[serde(default)]
    pub indexer: Option<IndexerConfig>,
}

impl MlaConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [
            ("num_heads", self.num_heads),
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("v_head_dim", self.v_head_dim),
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
            self.latent_norm_eps.is_finite() && self.latent_norm_eps > 0.0,
            "latent_norm_eps",
            self.latent_norm_eps,
            "a positive number",
        )?;
        if let Some(indexer) = &self.indexer {
            ConfigError::check(
                self.q_lora_rank.is_some(),
                "q_lora_rank",
                "null",
                "a number where an indexer chooses the keys",
            )?;
            indexer.validate(self.qk_rope_head_dim)?;
        }
        self.rope.validate()
    }

    /// Creates layer number `layer`, with weights from the device's random state.
    ///
    /// # Shapes
    ///
    /// - tokens: `[.., d_model]`
    pub fn init(&self, d_model: usize, layer: usize, device: &Device) -> Mla {
        let linear =
            |d_in, d_out, bias| LinearConfig::new(d_in, d_out).with_bias(bias).init(device);
        let norm = |width| {
            RmsNormConfig::new(width)
                .with_epsilon(self.latent_norm_eps)
                .init(device)
        };
        let qk = self.qk_nope_head_dim + self.qk_rope_head_dim;
        let heads = self.num_heads;
        let compressed = self.kv_lora_rank + self.qk_rope_head_dim;
        let of_heads = heads * (self.qk_nope_head_dim + self.v_head_dim);
        let q_rank = self.q_lora_rank;
        Mla {
            q_down: q_rank.map(|rank| linear(d_model, rank, self.bias)),
            q_norm: q_rank.map(norm),
            q_up: linear(q_rank.unwrap_or(d_model), heads * qk, false),
            kv_down: linear(d_model, compressed, self.bias),
            kv_norm: norm(self.kv_lora_rank),
            kv_up: linear(self.kv_lora_rank, of_heads, false),
            output: linear(heads * self.v_head_dim, d_model, self.bias),
            indexer: match (&self.indexer, q_rank) {
                (Some(indexer), Some(rank)) if !indexer.shared_layers.contains(&layer) => {
                    Some(indexer.init(d_model, rank, device))
                }
                _ => None,
            },
            num_heads: heads,
            nope: self.qk_nope_head_dim,
            rope: self.qk_rope_head_dim,
            scale: self.rope.score_factor() / (qk as f64).sqrt(),
        }
    }
}

/// Multi-head latent attention, causal (DeepSeek-V2, arXiv 2405.04434, section 2.1): keys and
/// values of all heads come from one compressed vector a token, beside one rotated key that the
/// heads share.
#[derive(Module, Debug)]
pub struct Mla {
    /// To the compressed queries.
    pub q_down: Option<Linear>,
    /// Norm of the compressed queries.
    pub q_norm: Option<RmsNorm>,
    /// To the heads' queries.
    pub q_up: Linear,
    /// To the compressed keys and values, and the shared rotated key.
    pub kv_down: Linear,
    /// Norm of the compressed keys and values.
    pub kv_norm: RmsNorm,
    /// To the heads' keys and values.
    pub kv_up: Linear,
    /// From the heads' outputs.
    pub output: Linear,
    /// Chooses the keys of each query, for this layer and those behind it that have none.
    pub indexer: Option<Indexer>,
    #[module(skip)]
    num_heads: usize,
    #[module(skip)]
    nope: usize,
    #[module(skip)]
    rope: usize,
    #[module(skip)]
    scale: f64,
}

impl Mla {
    /// # Shapes
    ///
    /// - `x` and result: `[batch, length, d_model]`
    /// - `future`: `[1, 1, length, length]`, true where a key comes after the query
    /// - `hidden`: `[1 or batch, 1, length, length]`, true where a query does not see a key. A layer
    ///   with an indexer replaces it, for itself and the layers behind it.
    pub fn forward(
        &self,
        x: Tensor<3>,
        angles: &Rope,
        future: &Tensor<4, Bool>,
        hidden: &mut Tensor<4, Bool>,
    ) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let heads = self.num_heads;

        let latent = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x.clone())),
            _ => x.clone(),
        };
        if let Some(indexer) = &self.indexer {
            *hidden = indexer.hidden(x.clone(), latent.clone(), angles, future);
        }
        let queries =
            self.q_up
                .forward(latent)
                .reshape([batch, length, heads, self.nope + self.rope]);
        let q_nope = queries.clone().slice_dim(3, 0..self.nope);
        let q_rope = angles.apply(queries.slice_dim(3, self.nope..self.nope + self.rope));
        let queries = Tensor::cat(vec![q_nope, q_rope], 3);

        let compressed = self.kv_down.forward(x);
        let rank = compressed.dims()[2] - self.rope;
        let k_rope = compressed
            .clone()
            .slice_dim(2, rank..rank + self.rope)
            .reshape([batch, length, 1, self.rope]);
        let k_rope = angles
            .apply(k_rope)
            .expand([batch, length, heads, self.rope]);
        let keys_values = self
            .kv_up
            .forward(self.kv_norm.forward(compressed.slice_dim(2, 0..rank)));
        let per_head = keys_values.dims()[2] / heads;
        let keys_values = keys_values.reshape([batch, length, heads, per_head]);
        let k_nope = keys_values.clone().slice_dim(3, 0..self.nope);
        let values = keys_values.slice_dim(3, self.nope..per_head);
        let keys = Tensor::cat(vec![k_nope, k_rope], 3);
        self.output.forward(scaled_dot_product(
            queries, keys, values, self.scale, hidden,
        ))
    }
}
