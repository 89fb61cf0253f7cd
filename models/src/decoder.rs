use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleVisitor, Param};
use burn::nn::{Embedding, EmbeddingConfig, Linear, LinearConfig, RmsNorm, RmsNormConfig};
use burn::tensor::{Bool, Device, Int, Tensor, TensorData};
use burn_moe::layer::{FeedForward, FeedForwardConfig, Moe, Routing};
use burn_moe::parallel::ExpertParallel;

use crate::attention::{Attention, AttentionConfig, Rope};
use crate::{ModelConfig, ModelError};

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

    /// Runs of sequences of equal length: tokens before, sequences, length.
    fn runs(&self) -> Vec<(usize, usize, usize)> {
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        let mut start = 0;
        for &length in &self.lengths {
            match runs.last_mut() {
                Some((_, sequences, of)) if *of == length => *sequences += 1,
                _ => runs.push((start, 1, length)),
            }
            start += length;
        }
        runs
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
    /// `[tokens, vocab_size]`
    pub logits: Tensor<2>,
    /// The routing of each MoE layer, in order.
    pub routings: Vec<Routing>,
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
        let device = self.embedding.weight.device();
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
        let mut runs: Vec<Run> = batch
            .runs()
            .into_iter()
            .map(|run| Run::new(run, self, &device))
            .collect();
        for block in &self.layers {
            let normed = block.attention_norm.forward(x.clone());
            x = x + attend(&block.attention, normed, &mut runs);
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

/// Sequences of equal length that are computed together.
struct Run {
    start: usize,
    sequences: usize,
    length: usize,
    angles: Rope,
    /// True above the diagonal: keys that come after the query.
    future: Tensor<4, Bool>,
    /// Keys that a query does not see, as the layers so far have left it.
    hidden: Tensor<4, Bool>,
}

impl Run {
    fn new(
        (start, sequences, length): (usize, usize, usize),
        decoder: &Decoder,
        device: &Device,
    ) -> Self {
        let future: Tensor<4, Bool> =
            Tensor::<2, Bool>::tril_mask([length, length], 0, device).unsqueeze();
        Self {
            start,
            sequences,
            length,
            angles: decoder.attention.angles(length, device),
            hidden: future.clone(),
            future,
        }
    }
}

/// Attention within each sequence.
fn attend(attention: &Attention, x: Tensor<2>, runs: &mut [Run]) -> Tensor<2> {
    let [_, width] = x.dims();
    let attended = runs
        .iter_mut()
        .map(|run| {
            let rows = run.sequences * run.length;
            let x = x
                .clone()
                .slice_dim(0, run.start..run.start + rows)
                .reshape([run.sequences, run.length, width]);
            attention
                .forward(x, &run.angles, &run.future, &mut run.hidden)
                .reshape([rows, width])
        })
        .collect();
    Tensor::cat(attended, 0)
}
