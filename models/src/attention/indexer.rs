use burn::module::Module;
use burn::nn::{LayerNorm, LayerNormConfig, Linear, LinearConfig};
use burn::tensor::activation::relu;
use burn::tensor::{Device, Tensor, TensorData};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

use super::select::largest;
use super::{LayerCache, Packing, RopePairs};

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
    /// Hides from each query the keys that are not chosen, for this layer and those behind it.
    ///
    /// # Shapes
    ///
    /// - `x`: `[tokens, d_model]`
    /// - `latent`: `[tokens, q_rank]`, the compressed queries
    pub(super) fn choose(
        &self,
        x: Tensor<2>,
        latent: Tensor<2>,
        packing: &mut Packing,
        mut cache: Option<&mut LayerCache>,
    ) {
        let [tokens, _] = x.dims();
        let angles = packing.angles.with_pairs(self.pairs);
        let key = self.k_norm.forward(self.key.forward(x.clone()));
        let [_, dims] = key.dims();
        let key = angles.apply(key.reshape([1, tokens, 1, dims]));
        let key = key.reshape([tokens, dims]);
        let queries = self.query.forward(latent);
        let width = queries.dims()[1];
        let queries = angles.apply(queries.reshape([1, tokens, width / dims, dims]));
        let queries = queries.reshape([tokens, width]);
        let weights = self.weights.forward(x);
        for run in &mut packing.runs {
            let keys = run.behind_past(&key, cache.as_deref_mut().map(|c| &mut c.index_keys));
            let [sequences, count, _] = keys.dims();
            if count <= self.top_k {
                run.hidden = run.future.clone();
                continue;
            }
            let device = keys.device();
            let scores = scores(run.of(&queries), keys, run.of(&weights));
            let scores: Vec<f32> = scores.into_data().iter().collect();
            let mut hidden = vec![true; scores.len()];
            for (row, (scores, hidden)) in scores
                .chunks_exact(count)
                .zip(hidden.chunks_exact_mut(count))
                .enumerate()
            {
                let visible = run.past() + row % run.length + 1;
                for key in largest(&scores[..visible], run.span(), self.top_k) {
                    hidden[key] = false;
                }
            }
            let data = TensorData::new(hidden, [sequences, 1, run.length, count]);
            run.hidden = Tensor::from_data(data, &device);
        }
    }
}

/// `[batch, length, keys]` from queries `[batch, length, heads * dims]`, keys `[batch, keys, dims]`
/// and the heads' weights `[batch, length, heads]`.
fn scores(queries: Tensor<3>, keys: Tensor<3>, weights: Tensor<3>) -> Tensor<3> {
    let [batch, length, heads] = weights.dims();
    let [_, count, dims] = keys.dims();
    let queries = queries.reshape([batch, length, heads, dims]);
    let products = queries
        .swap_dims(1, 2)
        .matmul(keys.swap_dims(1, 2).unsqueeze_dim(1));
    let products = relu(products / (dims as f64).sqrt());
    // [batch, heads, length, 1]
    let weights = (weights / (heads as f64).sqrt())
        .swap_dims(1, 2)
        .reshape([batch, heads, length, 1]);
    (products * weights)
        .sum_dim(1)
        .reshape([batch, length, count])
}
