use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::activation::softmax;
use burn::tensor::{Bool, Device, Tensor};

use super::Rope;

/// Sizes of [`Mla`].
#[derive(Debug, Clone)]
pub struct MlaConfig {
    /// Width of the tokens.
    pub d_model: usize,
    /// Heads.
    pub num_heads: usize,
    /// Rank of the compressed queries; `None`: not compressed.
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
    /// Added to the mean square in norms.
    pub rms_norm_eps: f64,
}

impl MlaConfig {
    /// Creates the layer, with weights from the device's random state.
    pub fn init(&self, device: &Device) -> Mla {
        let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).with_bias(false).init(device);
        let norm = |width| {
            RmsNormConfig::new(width)
                .with_epsilon(self.rms_norm_eps)
                .init(device)
        };
        let qk = self.qk_nope_head_dim + self.qk_rope_head_dim;
        let heads = self.num_heads;
        Mla {
            q_down: self.q_lora_rank.map(|rank| linear(self.d_model, rank)),
            q_norm: self.q_lora_rank.map(norm),
            q_up: linear(self.q_lora_rank.unwrap_or(self.d_model), heads * qk),
            kv_down: linear(self.d_model, self.kv_lora_rank + self.qk_rope_head_dim),
            kv_norm: norm(self.kv_lora_rank),
            kv_up: linear(
                self.kv_lora_rank,
                heads * (self.qk_nope_head_dim + self.v_head_dim),
            ),
            output: linear(heads * self.v_head_dim, self.d_model),
            num_heads: heads,
            nope: self.qk_nope_head_dim,
            rope: self.qk_rope_head_dim,
            rope_theta: self.rope_theta,
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
    #[module(skip)]
    num_heads: usize,
    #[module(skip)]
    nope: usize,
    #[module(skip)]
    rope: usize,
    #[module(skip)]
    rope_theta: f64,
}

impl Mla {
    /// Angles for sequences of `length` tokens, to be shared by all layers.
    pub fn angles(&self, length: usize, device: &Device) -> Rope {
        Rope::new(length, self.rope, self.rope_theta, device)
    }

    /// # Shapes
    ///
    /// - `x` and result: `[batch, length, d_model]`
    /// - `future`: `[1, 1, length, length]`, true where a key comes after the query
    pub fn forward(&self, x: Tensor<3>, angles: &Rope, future: &Tensor<4, Bool>) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let heads = self.num_heads;

        let queries = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x.clone())),
            _ => x.clone(),
        };
        let queries =
            self.q_up
                .forward(queries)
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

        let scale = 1.0 / ((self.nope + self.rope) as f64).sqrt();
        let scores = queries
            .swap_dims(1, 2)
            .matmul(keys.swap_dims(1, 2).swap_dims(2, 3))
            * scale;
        let attention = softmax(scores.mask_fill(future.clone(), f32::NEG_INFINITY), 3);
        let mixed = attention
            .matmul(values.swap_dims(1, 2))
            .swap_dims(1, 2)
            .reshape([batch, length, heads * (per_head - self.nope)]);
        self.output.forward(mixed)
    }
}
