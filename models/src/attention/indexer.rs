use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Bool, Device, Tensor, TensorData};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

use super::select::largest;
use super::{Rope, RopePairs};

/// Sizes of [`Indexer`].
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct IndexerConfig {
    /// Heads.
    pub num_heads: usize,
    /// Dimensions of a head.
    pub head_dim: usize,
    /// Keys that a query sees.
    pub top_k: usize,
    /// Which dimensions are rotated together, of the first `qk_rope_head_dim`.
    pub pairs: RopePairs,
    /// Layers without an indexer, which use the keys that the last one before them has chosen.
    #[serde(default)]
    pub shared_layers: Vec<usize>,
}

/// Added to the variance in the norm of the keys.
const NORM_EPSILON: f64 = 1e-6;

impl IndexerConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self, rotated: usize) -> Result<(), ConfigError> {
        for (field, value) in [
            ("index_n_heads", self.num_heads),
            ("index_topk", self.top_k),
        ] {
            ConfigError::check(value > 0, field, value, "1 or more")?;
        }
        ConfigError::check(
            self.head_dim >= rotated,
            "index_head_dim",
            self.head_dim,
            format!("at least qk_rope_head_dim ({rotated})"),
        )?;
        ConfigError::check(
            !self.shared_layers.contains(&0),
            "shared_layers",
            0,
            "layers behind one with an indexer",
        )
    }

    /// Creates the indexer of a layer whose compressed queries have `q_rank` dimensions.
    pub fn init(&self, d_model: usize, q_rank: usize, device: &Device) -> Indexer {
        let linear = |d_in, d_out| LinearConfig::new(d_in, d_out).with_bias(false).init(device);
        Indexer {
            query: linear(q_rank, self.num_heads * self.head_dim),
            key: linear(d_model, self.head_dim),
            k_norm: LayerNormConfig::new(self.head_dim)
                .with_epsilon(NORM_EPSILON)
                .init(device),
            weights: linear(d_model, self.num_heads),
            top_k: self.top_k,
            pairs: self.pairs,
        }
    }
}

/// Chooses the keys that each query sees (DeepSeek-V3.2, section 2.1, "lightning indexer"): those
/// with the highest `sum over heads of w relu(q k)`. Its parameters get no gradient from the choice.
#[derive(Module, Debug)]
pub struct Indexer {
    /// From the compressed queries to the heads' queries.
    pub query: Linear,
    /// To the key.
    pub key: Linear,
    /// Norm of the key.
    pub k_norm: LayerNorm,
    /// To the heads' weights.
    pub weights: Linear,
    #[module(skip)]
    top_k: usize,
    #[module(skip)]
    pairs: RopePairs,
}

impl Indexer {
    /// True where a query does not see a key: after it, or not chosen.
    ///
    /// # Shapes
    ///
    /// - `x`: `[batch, length, d_model]`
    /// - `latent`: `[batch, length, q_rank]`, the compressed queries
    /// - `future`: `[1, 1, length, length]`
    /// - result: `[1 or batch, 1, length, length]`
    pub fn hidden(
        &self,
        x: Tensor<3>,
        latent: Tensor<3>,
        angles: &Rope,
        future: &Tensor<4, Bool>,
    ) -> Tensor<4, Bool> {
        let [batch, length, _] = x.dims();
        if length <= self.top_k {
            return future.clone();
        }
        let device = x.device();
        let scores: Vec<f32> = self.scores(x, latent, angles).into_data().iter().collect();
        let mut hidden = vec![true; batch * length * length];
        for (row, (scores, hidden)) in scores
            .chunks_exact(length)
            .zip(hidden.chunks_exact_mut(length))
            .enumerate()
        {
            let visible = row % length + 1;
            for key in largest(scores, visible, self.top_k) {
                hidden[key] = false;
            }
        }
        let data = TensorData::new(hidden, [batch, 1, length, length]);
        Tensor::from_data(data, &device)
    }

    /// `[batch, length of queries, length of keys]`
    fn scores(&self, x: Tensor<3>, latent: Tensor<3>, angles: &Rope) -> Tensor<3> {
        let [batch, length, _] = x.dims();
        let angles = angles.with_pairs(self.pairs);
        let queries = self.query.forward(latent);
        let key = self.k_norm.forward(self.key.forward(x.clone()));
        let dims = key.dims()[2];
        let heads = queries.dims()[2] / dims;
        let queries = angles.apply(queries.reshape([batch, length, heads, dims]));
        let key = angles.apply(key.reshape([batch, length, 1, dims]));
        let products = queries
            .swap_dims(1, 2)
            .matmul(key.swap_dims(1, 2).swap_dims(2, 3));
        let products = relu(products / (dims as f64).sqrt());
        // [batch, heads, length, 1]
        let weights = (self.weights.forward(x) / (heads as f64).sqrt())
            .swap_dims(1, 2)
            .reshape([batch, heads, length, 1]);
        (products * weights)
            .sum_dim(1)
            .reshape([batch, length, length])
    }
}
