use burn::module::Module;
use burn::nn::{Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Tensor};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

use super::packing::Run;
use super::{Indexer, IndexerConfig, LayerCache, Packing, RopeConfig, scaled_dot_product};

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
    pub(super) fn forward(
        &self,
        x: Tensor<2>,
        packing: &mut Packing,
        mut cache: Option<&mut LayerCache>,
    ) -> Tensor<2> {
        let [tokens, _] = x.dims();
        let latent = match (&self.q_down, &self.q_norm) {
            (Some(down), Some(norm)) => norm.forward(down.forward(x.clone())),
            _ => x.clone(),
        };
        if let Some(indexer) = &self.indexer {
            indexer.choose(x.clone(), latent.clone(), packing, cache.as_deref_mut());
        }
        let shape = [1, tokens, self.num_heads, self.nope + self.rope];
        let queries = self.q_up.forward(latent).reshape(shape);
        let q_nope = queries.clone().slice_dim(3, 0..self.nope);
        let q_rope = queries.slice_dim(3, self.nope..self.nope + self.rope);
        let q_rope = packing.angles.apply(q_rope);

        // What a cache keeps: the compressed vector, and the rotated key that the heads share.
        let compressed = self.kv_down.forward(x);
        let rank = compressed.dims()[1] - self.rope;
        let k_rope = compressed.clone().slice_dim(1, rank..rank + self.rope);
        let k_rope = packing
            .angles
            .apply(k_rope.reshape([1, tokens, 1, self.rope]))
            .reshape([tokens, self.rope]);
        let latent = self.kv_norm.forward(compressed.slice_dim(1, 0..rank));
        let kept = Tensor::cat(vec![latent, k_rope], 1);

        let absorbs = cache.is_some() && self.absorbing_is_cheaper(packing, rank);
        let kept = |run: &Run| run.behind_past(&kept, cache.as_deref_mut().map(|c| &mut c.keys));
        let mixed = match absorbs {
            true => self.absorbed(q_nope, q_rope, packing, kept),
            false => self.expanded(q_nope, q_rope, packing, kept),
        };
        self.output.forward(mixed)
    }

    /// Keys and values of each head, made from the compressed vectors.
    fn expanded(
        &self,
        q_nope: Tensor<4>,
        q_rope: Tensor<4>,
        packing: &Packing,
        mut kept: impl FnMut(&Run) -> Tensor<3>,
    ) -> Tensor<2> {
        let heads = self.num_heads;
        let queries = Tensor::cat(vec![q_nope, q_rope], 3);
        let [_, tokens, _, dims] = queries.dims();
        let queries = queries.reshape([tokens, heads * dims]);
        packing.each(|run| {
            let kept = kept(run);
            let [sequences, count, width] = kept.dims();
            let rank = width - self.rope;
            let k_rope = kept
                .clone()
                .slice_dim(2, rank..width)
                .reshape([sequences, count, 1, self.rope])
                .expand([sequences, count, heads, self.rope]);
            let keys_values = self.kv_up.forward(kept.slice_dim(2, 0..rank));
            let per_head = keys_values.dims()[2] / heads;
            let keys_values = keys_values.reshape([sequences, count, heads, per_head]);
            let k_nope = keys_values.clone().slice_dim(3, 0..self.nope);
            let values = keys_values.slice_dim(3, self.nope..per_head);
            let keys = Tensor::cat(vec![k_nope, k_rope], 3);
            let queries = run
                .of(&queries)
                .reshape([sequences, run.length, heads, dims]);
            scaled_dot_product(queries, keys, values, self.scale, &run.hidden)
        })
    }

    /// The same with the products that make keys and values moved to queries and outputs (DeepSeek-V2,
    /// section 2.1.2): the compressed vectors are keys and values of all heads as they are.
    fn absorbed(
        &self,
        q_nope: Tensor<4>,
        q_rope: Tensor<4>,
        packing: &Packing,
        mut kept: impl FnMut(&Run) -> Tensor<3>,
    ) -> Tensor<2> {
        let [_, tokens, heads, nope] = q_nope.dims();
        let up = self.kv_up.weight.val();
        let [rank, width] = up.dims();
        let per_head = width / heads;
        let up = up.reshape([1, rank, heads, per_head]);
        // [1, heads, nope, rank] and [1, heads, rank, v]
        let of_keys = up.clone().slice_dim(3, 0..nope).permute([0, 2, 3, 1]);
        let of_values = up.slice_dim(3, nope..per_head).swap_dims(1, 2);
        let queries = q_nope.swap_dims(1, 2).matmul(of_keys).swap_dims(1, 2);
        let queries = Tensor::cat(vec![queries, q_rope], 3);
        let dims = rank + self.rope;
        let queries = queries.reshape([tokens, heads * dims]);
        let mixed = packing.each(|run| {
            let keys = kept(run).unsqueeze_dim::<4>(2);
            let values = keys.clone().slice_dim(3, 0..rank);
            let [sequences, _, _, _] = keys.dims();
            let queries = run
                .of(&queries)
                .reshape([sequences, run.length, heads, dims]);
            scaled_dot_product(queries, keys, values, self.scale, &run.hidden)
        });
        mixed
            .reshape([1, tokens, heads, rank])
            .swap_dims(1, 2)
            .matmul(of_values)
            .swap_dims(1, 2)
            .reshape([tokens, heads * (per_head - nope)])
    }

    /// Whether [`absorbed`](Self::absorbed) takes fewer multiplications than
    /// [`expanded`](Self::expanded), which makes keys and values of the whole past again: it does for
    /// few tokens behind many.
    fn absorbing_is_cheaper(&self, packing: &Packing, rank: usize) -> bool {
        let per_head = self.kv_up.weight.lazy_shape()[1] / self.num_heads;
        let (mut absorbed, mut expanded) = (0u128, 0u128);
        for run in &packing.runs {
            let (new, all) = (run.length as u128, (run.past() + run.length) as u128);
            absorbed += new * all * 2 * rank as u128 + new * (rank * per_head) as u128;
            expanded += new * all * per_head as u128 + all * (rank * per_head) as u128;
        }
        absorbed < expanded
    }
}
