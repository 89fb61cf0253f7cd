use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

use super::{LayerCache, Packing, RopeConfig, scaled_dot_product};

/// What is normalised in queries and keys before rotation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum QkNorm {
    /// Nothing (Mixtral, GLM-4.5-Air).
    None,
    /// Each head by itself, with the same scales (GLM-4.5, Qwen3).
    PerHead,
    /// All heads of a token together (MiniMax-M2).
    AllHeads,
}

/// Sizes of [`Gqa`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GqaConfig {
    /// Heads of the queries.
    pub num_heads: usize,
    /// Heads of the keys and values, each for `num_heads / num_kv_heads` heads of queries.
    pub num_kv_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Dimensions of a head that are rotated by position, the first ones.
    pub rotary_dim: usize,
    /// Rotation by position.
    pub rope: RopeConfig,
    /// Norm of queries and keys.
    pub qk_norm: QkNorm,
    /// Whether queries, keys and values have a bias.
    pub qkv_bias: bool,
    /// Whether the last product has a bias.
    pub output_bias: bool,
}

impl GqaConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, value) in [("num_heads", self.num_heads), ("head_dim", self.head_dim)] {
            ConfigError::check(value > 0, field, value, "1 or more")?;
        }
        ConfigError::check(
            self.num_kv_heads > 0 && self.num_heads.is_multiple_of(self.num_kv_heads),
            "num_kv_heads",
            self.num_kv_heads,
            format!("a divisor of num_heads ({})", self.num_heads),
        )?;
        ConfigError::check(
            (2..=self.head_dim).contains(&self.rotary_dim) && self.rotary_dim.is_multiple_of(2),
            "rotary_dim",
            self.rotary_dim,
            format!("an even number from 2 to head_dim ({})", self.head_dim),
        )?;
        self.rope.validate()
    }

    /// Creates the layer, with weights from the device's random state.
    pub fn init(&self, d_model: usize, rms_norm_eps: f64, device: &Device) -> Gqa {
        let linear =
            |d_in, d_out, bias| LinearConfig::new(d_in, d_out).with_bias(bias).init(device);
        let (q, kv) = (
            self.num_heads * self.head_dim,
            self.num_kv_heads * self.head_dim,
        );
        let norm = |all_heads| {
            let width = match self.qk_norm {
                QkNorm::None => return None,
                QkNorm::PerHead => self.head_dim,
                QkNorm::AllHeads => all_heads,
            };
            let norm = RmsNormConfig::new(width).with_epsilon(rms_norm_eps);
            Some(norm.init(device))
        };
        Gqa {
            query: linear(d_model, q, self.qkv_bias),
            key: linear(d_model, kv, self.qkv_bias),
            value: linear(d_model, kv, self.qkv_bias),
            q_norm: norm(q),
            k_norm: norm(kv),
            output: linear(q, d_model, self.output_bias),
            num_heads: self.num_heads,
            num_kv_heads: self.num_kv_heads,
            norm_of_heads: self.qk_norm == QkNorm::PerHead,
        }
    }
}

/// Grouped-query attention, causal (arXiv 2305.13245): several heads of queries share one head of
/// keys and values.
#[derive(Module, Debug)]
pub struct Gqa {
    /// To the heads' queries.
    pub query: Linear,
    /// To the heads' keys.
    pub key: Linear,
    /// To the heads' values.
    pub value: Linear,
    /// Norm of the queries, of a head or of all.
    pub q_norm: Option<RmsNorm>,
    /// Norm of the keys, of a head or of all.
    pub k_norm: Option<RmsNorm>,
    /// From the heads' outputs.
    pub output: Linear,
    #[module(skip)]
    num_heads: usize,
    #[module(skip)]
    num_kv_heads: usize,
    #[module(skip)]
    norm_of_heads: bool,
}

impl Gqa {
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        packing: &Packing,
        mut cache: Option<&mut LayerCache>,
    ) -> Tensor<2> {
        let [tokens, _] = x.dims();
        let (heads, kv_heads) = (self.num_heads, self.num_kv_heads);
        let queries = self.heads(&self.query, &self.q_norm, x.clone(), heads);
        let keys = self.heads(&self.key, &self.k_norm, x.clone(), kv_heads);
        let values = self.value.forward(x);
        let [_, _, _, dims] = keys.dims();
        let queries = packing.angles.apply(queries);
        let queries = queries.reshape([tokens, heads * dims]);
        let keys = packing
            .angles
            .apply(keys)
            .reshape([tokens, kv_heads * dims]);
        let scale = 1.0 / (dims as f64).sqrt();
        let mixed = packing.each(|run| {
            let split = |x: Tensor<3>, heads| {
                let [sequences, length, _] = x.dims();
                x.reshape([sequences, length, heads, dims])
            };
            let keys = run.behind_past(&keys, cache.as_deref_mut().map(|c| &mut c.keys));
            let values = run.behind_past(&values, cache.as_deref_mut().map(|c| &mut c.values));
            scaled_dot_product(
                split(run.of(&queries), heads),
                split(keys, kv_heads),
                split(values, kv_heads),
                scale,
                &run.hidden,
            )
        });
        self.output.forward(mixed)
    }

    /// `[1, tokens, heads, head_dim]`, normalised.
    fn heads(
        &self,
        product: &Linear,
        norm: &Option<RmsNorm>,
        x: Tensor<2>,
        heads: usize,
    ) -> Tensor<4> {
        let mut flat = product.forward(x);
        if let (Some(norm), false) = (norm, self.norm_of_heads) {
            flat = norm.forward(flat);
        }
        let [tokens, width] = flat.dims();
        let split = flat.reshape([1, tokens, heads, width / heads]);
        match norm {
            Some(norm) if self.norm_of_heads => norm.forward(split),
            _ => split,
        }
    }
}
