use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_moe::comm::{CommError, Communicator, Key};
use burn_moe::layer::{FeedForward, FeedForwardConfig, Moe, Routing};
use burn_moe::parallel::ExpertParallel;

use crate::attention::{Attention, AttentionConfig, Packing};
use crate::{CacheError, KvCache, ModelConfig, ModelError};

/// Sequences of any lengths, one behind the other without padding.
#[derive(Debug, Clone, Default)]
pub struct TokenBatch {
    /// Token ids of all sequences, `[sum of lengths]`.
    pub ids: Vec<u32>,
    /// Tokens of each sequence.
    pub lengths: Vec<usize>,
}

impl TokenBatch {
    /// Sequences put one behind the other.
    pub fn new<S: AsRef<[u32]>>(sequences: impl IntoIterator<Item = S>) -> Self {
        let mut batch = Self::default();
        for sequence in sequences {
            let sequence = sequence.as_ref();
            batch.ids.extend_from_slice(sequence);
            batch.lengths.push(sequence.len());
        }
        batch
    }
}

/// A decoder-only language model. With expert parallelism, one rank's part of it.
#[derive(Module, Debug)]
pub struct Decoder {
    /// Token id to vector.
    pub embedding: Embedding,
    /// The layers.
    pub layers: Vec<Block>,
    /// Norm before the head.
    pub norm: RmsNorm,
    /// Vector to logits; without one, the embedding's table.
    pub head: Option<Linear>,
    #[module(skip)]
    attention: AttentionConfig,
    #[module(skip)]
    max_sequence_length: usize,
}

/// Attention and feed-forward, each behind a norm and added to the stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Norm before attention.
    pub attention_norm: RmsNorm,
    /// Attention.
    pub attention: Attention,
    /// Norm before the feed-forward.
    pub feed_forward_norm: RmsNorm,
    /// Feed-forward.
    pub feed_forward: FeedForwardKind,
}

/// The feed-forward of a layer.
#[derive(Module, Debug)]
#[allow(clippy::large_enum_variant)]
pub enum FeedForwardKind {
    /// One for all tokens.
    Dense(FeedForward),
    /// Experts.
    Moe(Moe),
}

/// Output of a [`Decoder`].
#[derive(Debug, Clone)]
pub struct DecoderOutput {
    /// `[tokens, vocab_size]`, of the tokens that [`LogitsOf`] says.
    pub logits: Tensor<2>,
    /// The routing of each MoE layer, in order.
    pub routings: Vec<Routing>,
}

/// Tokens whose logits are computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogitsOf {
    /// Every token.
    All,
    /// The last token of each sequence that has any.
    Last,
}

/// Serialises the drawing of weights: Burn's CPU backend has one random state for all threads.
static INIT: Mutex<()> = Mutex::new(());

impl ModelConfig {
    /// Creates this rank's part of the model. The initial weights depend on `seed` alone: ranks
    /// start with equal copies of what they share, and an expert is the same wherever it lives.
    ///
    /// # Errors
    ///
    /// When a field is not allowed, or the ranks do not divide the experts.
    pub fn init(
        &self,
        ep: &Arc<ExpertParallel>,
        seed: u64,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        let _drawing = INIT.lock().unwrap_or_else(PoisonError::into_inner);
        device.seed(seed);
        let decoder = self.init_lazy(ep, seed, device)?;
        decoder.visit(&mut Draw);
        Ok(decoder)
    }

    /// [`init`](Self::init), with weights that are only drawn when they are first used: nothing is
    /// allocated for those that are replaced before.
    ///
    /// # Errors
    ///
    /// When a field is not allowed, or the ranks do not divide the experts.
    pub(crate) fn init_lazy(
        &self,
        ep: &Arc<ExpertParallel>,
        seed: u64,
        device: &Device,
    ) -> Result<Decoder, ModelError> {
        self.validate()?;
        let norm = || {
            RmsNormConfig::new(self.d_model)
                .with_epsilon(self.rms_norm_eps)
                .init(device)
        };
        let mut layers = Vec::with_capacity(self.num_layers);
        for layer in 0..self.num_layers {
            // Seeds of layers of neighbouring seeds must not meet.
            let seed = seed.wrapping_mul(1 << 16).wrapping_add(layer as u64);
            let feed_forward = if self.is_dense(layer) {
                FeedForwardKind::Dense(
                    FeedForwardConfig::new(self.d_model, self.d_hidden_dense)
                        .with_seed(seed)
                        .init(device),
                )
            } else {
                FeedForwardKind::Moe(self.moe(seed).init_parallel(ep, layer as u32, device)?)
            };
            layers.push(Block {
                attention_norm: norm(),
                attention: self
                    .attention
                    .init(self.d_model, self.rms_norm_eps, layer, device),
                feed_forward_norm: norm(),
                feed_forward,
            });
        }
        Ok(Decoder {
            embedding: EmbeddingConfig::new(self.vocab_size, self.d_model).init(device),
            layers,
            norm: norm(),
            head: (!self.tied_embeddings).then(|| {
                LinearConfig::new(self.d_model, self.vocab_size)
                    .with_bias(false)
                    .init(device)
            }),
            attention: self.attention.clone(),
            max_sequence_length: self.max_sequence_length,
        })
    }
}

/// Draws every parameter that Burn has put off until its first use.
struct Draw;

impl ModuleVisitor for Draw {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        param.val();
    }
}

impl Decoder {
    /// Logits for every token of this rank's sequences. With expert parallelism all ranks must
    /// call it, even without sequences.
    ///
    /// # Panics
    ///
    /// Panics on an id that is not in the vocabulary; unwinds with a
    /// [`CommError`](burn_moe::comm::CommError) when a rank is lost or too late.
    pub fn forward(&self, batch: &TokenBatch) -> DecoderOutput {
        let packing = Packing::new(&self.attention, &batch.lengths, &self.device());
        self.run(batch, packing, None, LogitsOf::All)
    }

    /// An empty cache for [`forward_cached`](Self::forward_cached), for prompts of these lengths and
    /// with room for `more` tokens behind each.
    pub fn cache(&self, prompts: &[usize], more: usize) -> KvCache {
        KvCache::new(self.layers.len(), prompts, more)
    }

    /// [`forward`](Self::forward) of tokens that come behind those in the cache, which they are added
    /// to: the batch has as many sequences as the cache, each with any number of new tokens. They
    /// get the logits that a forward pass over the whole sequences gives them. No gradient passes
    /// the cache.
    ///
    /// With expert parallelism all ranks must call it equally often, even without tokens.
    ///
    /// # Errors
    ///
    /// When the batch has another number of sequences, or one becomes longer than the model's
    /// `max_sequence_length`. Nothing is computed then.
    ///
    /// # Panics
    ///
    /// As [`forward`](Self::forward). The cache is then as before.
    pub fn forward_cached(
        &self,
        batch: &TokenBatch,
        cache: &mut KvCache,
        logits: LogitsOf,
    ) -> Result<DecoderOutput, CacheError> {
        cache.check(&batch.lengths, self.max_sequence_length)?;
        let packing = Packing::behind(
            &self.attention,
            &cache.sequences,
            &batch.lengths,
            &self.device(),
        );
        let out = self.run(batch, packing, Some(cache), logits);
        cache.advance(&batch.lengths);
        Ok(out)
    }

    /// Tokens in the vocabulary.
    pub fn vocab_size(&self) -> usize {
        self.embedding.weight.lazy_shape()[0]
    }

    /// Longest sequence.
    pub fn max_sequence_length(&self) -> usize {
        self.max_sequence_length
    }

    fn device(&self) -> Device {
        self.embedding.weight.device()
    }

    fn run(
        &self,
        batch: &TokenBatch,
        mut packing: Packing,
        mut cache: Option<&mut KvCache>,
        logits: LogitsOf,
    ) -> DecoderOutput {
        let device = self.device();
        let [vocab_size, d_model] = self.embedding.weight.dims();
        let tokens = batch.ids.len();
        let mut routings = Vec::new();
        if tokens == 0 {
            // Nothing to compute, but the other ranks' tokens may need the experts that live here.
            for block in &self.layers {
                if let FeedForwardKind::Moe(moe) = &block.feed_forward {
                    routings.push(
                        moe.forward_routed(Tensor::zeros([0, d_model], &device))
                            .routing,
                    );
                }
            }
            return DecoderOutput {
                logits: Tensor::zeros([0, vocab_size], &device),
                routings,
            };
        }
        let ids: Vec<i32> = batch.ids.iter().map(|id| *id as i32).collect();
        let ids = Tensor::<2, Int>::from_data(TensorData::new(ids, [1, tokens]), &device);
        let mut x: Tensor<2> = self.embedding.forward(ids).reshape([tokens, d_model]);
        for (layer, block) in self.layers.iter().enumerate() {
            let normed = block.attention_norm.forward(x.clone());
            let cache = cache.as_deref_mut().map(|cache| &mut cache.layers[layer]);
            x = x + block.attention.forward_behind(normed, &mut packing, cache);
            let normed = block.feed_forward_norm.forward(x.clone());
            x = x + match &block.feed_forward {
                FeedForwardKind::Dense(dense) => dense.forward(normed),
                FeedForwardKind::Moe(moe) => {
                    let out = moe.forward_routed(normed);
                    routings.push(out.routing);
                    out.output
                }
            };
        }
        if logits == LogitsOf::Last {
            x = x.select(0, last_rows(&batch.lengths, &device));
        }
        DecoderOutput {
            logits: self.logits(x),
            routings,
        }
    }

    /// `[tokens, d_model]` behind the last layer to `[tokens, vocab_size]`.
    fn logits(&self, x: Tensor<2>) -> Tensor<2> {
        let x = self.norm.forward(x);
        match &self.head {
            Some(head) => head.forward(x),
            None => x.matmul(self.embedding.weight.val().transpose()),
        }
    }

    /// Adds up over the ranks of `comm` the loads that the next [`update_bias`](Self::update_bias) uses. With data
    /// parallelism, call it before, with the ranks that hold the same experts (`Mesh::dp`), so that all replicas of the
    /// model move their biases alike, by the load of the whole batch.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late.
    pub fn reduce_load(&self, comm: &dyn Communicator, key: Key) -> Result<(), CommError> {
        if comm.size() == 1 {
            return Ok(());
        }
        let moes = self
            .layers
            .iter()
            .filter_map(|block| match &block.feed_forward {
                FeedForwardKind::Moe(moe) => Some(moe),
                FeedForwardKind::Dense(_) => None,
            });
        let loads = moes.clone().flat_map(|moe| moe.take_load());
        // Whole numbers far below 2^53, so f64 adds them exactly.
        let mut loads: Vec<f64> = loads.map(|load| load as f64).collect();
        comm.all_reduce_sum_f64(key, &mut loads)?;
        let mut rest = loads.as_slice();
        for moe in moes {
            let (own, behind) = rest.split_at(moe.router.num_experts());
            let own: Vec<u64> = own.iter().map(|load| *load as u64).collect();
            moe.add_load(&own);
            rest = behind;
        }
        Ok(())
    }

    /// Moves the routers' selection biases against the load since the last call; see
    /// [`Moe::update_bias`].
    pub fn update_bias(&mut self, speed: f64) {
        for block in &mut self.layers {
            if let FeedForwardKind::Moe(moe) = &mut block.feed_forward {
                moe.update_bias(speed);
            }
        }
    }
}

/// The last row of each sequence that has any.
fn last_rows(lengths: &[usize], device: &Device) -> Tensor<1, Int> {
    let mut end = 0;
    let with_tokens = lengths.iter().filter(|length| **length > 0);
    let rows = with_tokens.map(|length| {
        end += length;
        end as i32 - 1
    });
    let rows: Vec<i32> = rows.collect();
    let count = rows.len();
    Tensor::from_data(TensorData::new(rows, [count]), device)
}
