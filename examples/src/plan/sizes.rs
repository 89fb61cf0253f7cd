//! Sizes of a model at an expert parallelism: parameters, bytes, and how fast it can be at most. All
//! from the definitions of its modules; no weight is allocated.

use anyhow::{Context, Result};
use burn::tensor::Device;
use burn_moe_models::attention::AttentionConfig;
use burn_moe_models::{ModelConfig, ParameterCounts};
use serde::Serialize;

use super::gpu::Gpu;

/// What does not depend on the number of ranks.
#[derive(Debug, Serialize)]
pub struct ModelSizes {
    pub model: String,
    pub parameters: u64,
    /// That a token passes.
    pub active: u64,
    pub embedding: u64,
    pub head: u64,
    /// Of all routed experts, and of one.
    pub routed: u64,
    pub expert: u64,
    pub layers: usize,
    pub moe_layers: u64,
    pub experts: usize,
    pub top_k: usize,
    /// Of layers for multi-token prediction, which are not among the parameters.
    pub mtp: u64,
    pub bytes: Bytes,
    /// Numbers that a token leaves in the cache of keys and values, over all layers.
    pub kv_values_per_token: u64,
    pub kv_bytes_per_token: Bytes,
}

/// Bytes of so many numbers, by kind; of FP8 without scales (4 bytes for 128 x 128).
#[derive(Debug, Clone, Copy, Serialize)]
pub struct Bytes {
    pub f32: u64,
    pub bf16: u64,
    pub fp8: u64,
}

impl Bytes {
    fn of(count: u64) -> Self {
        Self {
            f32: 4 * count,
            bf16: 2 * count,
            fp8: count,
        }
    }
}

impl ModelSizes {
    pub fn new(name: &str, config: &ModelConfig) -> Result<(Self, ParameterCounts)> {
        let counts = config.counts(&Device::flex())?;
        let kv = kv_values(config);
        let sizes = Self {
            model: name.into(),
            parameters: counts.total,
            active: counts.active,
            embedding: counts.embedding,
            head: counts.head,
            routed: counts.routed,
            expert: counts.expert,
            layers: config.num_layers,
            moe_layers: counts.moe_layers,
            experts: config.num_experts,
            top_k: config.top_k,
            mtp: counts.mtp,
            bytes: Bytes::of(counts.total),
            kv_values_per_token: kv,
            kv_bytes_per_token: Bytes::of(kv),
        };
        Ok((sizes, counts))
    }
}

/// Layers without an indexer of their own have no keys of it.
fn kv_values(config: &ModelConfig) -> u64 {
    let all = config.attention.cached_values() * config.num_layers;
    let shared = match &config.attention {
        AttentionConfig::Mla(mla) => mla.indexer.as_ref().map_or(0, |indexer| {
            let layers = indexer.shared_layers.iter();
            layers.filter(|layer| **layer < config.num_layers).count() * indexer.head_dim
        }),
        AttentionConfig::Gqa(_) => 0,
    };
    (all - shared) as u64
}

/// The kind of number that weights, activations on the wire and products have.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Precision {
    Bf16,
    Fp8,
}

impl Precision {
    pub fn bytes(self) -> u64 {
        match self {
            Self::Bf16 => 2,
            Self::Fp8 => 1,
        }
    }
}

/// What one rank holds, moves and computes for a micro-batch.
#[derive(Debug, Serialize)]
pub struct RankSizes {
    pub ep: usize,
    pub slots: usize,
    pub tokens_per_rank: u32,
    /// Of its own: its experts, and everything else.
    pub parameters: u64,
    /// In replica slots, which all layers share.
    pub slot_parameters: u64,
    pub bytes: Bytes,
    pub precision: Precision,
    /// Other ranks that a token is sent to in a layer, on average, when all experts are as likely.
    pub remote_ranks_per_token: f64,
    /// A rank's tokens sent to other ranks in a layer; as many come back.
    pub dispatched_bytes_per_layer: f64,
    /// Weights that a rank receives in a layer at most: when all its slots are filled anew.
    pub replicated_bytes_per_layer: u64,
    pub floor: Option<Floor>,
}

/// Least times of a forward pass of the micro-batch on a rank, in milliseconds, all layers.
#[derive(Debug, Serialize)]
pub struct Floor {
    pub gpu: Gpu,
    /// Products with the parameters that a token passes; attention scores are not counted.
    pub compute_ms: f64,
    /// Reading the rank's weights once.
    pub memory_ms: f64,
    /// Tokens out and back, over NVLink within a fast domain and the network beyond.
    pub tokens_ms: f64,
    /// Filling all replica slots in each layer, within a fast domain.
    pub replicas_ms: f64,
    /// The largest: what perfect overlap could reach.
    pub step_ms: f64,
    pub tokens_per_second_per_gpu: f64,
    /// Whether weights and replica slots fit into memory.
    pub fits: bool,
}

impl RankSizes {
    pub fn new(
        config: &ModelConfig,
        counts: &ParameterCounts,
        [ep, slots]: [usize; 2],
        tokens_per_rank: u32,
        precision: Precision,
        gpu: Option<&Gpu>,
    ) -> Result<Self> {
        let own = counts
            .per_rank(ep as u64)
            .with_context(|| format!("--ep {ep}"))?;
        let slot_parameters = slots as u64 * counts.expert;
        let hit = rank_probability(config, ep);
        let row_bytes = (config.d_model as u64 * precision.bytes()) as f64;
        let tokens = f64::from(tokens_per_rank);
        let mut sizes = Self {
            ep,
            slots,
            tokens_per_rank,
            parameters: own,
            slot_parameters,
            bytes: Bytes::of(own + slot_parameters),
            precision,
            remote_ranks_per_token: hit * (ep - 1) as f64,
            dispatched_bytes_per_layer: tokens * hit * (ep - 1) as f64 * row_bytes,
            replicated_bytes_per_layer: slot_parameters * precision.bytes(),
            floor: None,
        };
        if let Some(gpu) = gpu {
            sizes.floor = Some(sizes.floor(counts, hit * row_bytes * tokens, gpu)?);
        }
        Ok(sizes)
    }

    /// `bytes_to_rank`: a rank's tokens to one other, in a layer.
    fn floor(&self, counts: &ParameterCounts, bytes_to_rank: f64, gpu: &Gpu) -> Result<Floor> {
        let tflops = match self.precision {
            Precision::Bf16 => gpu.bf16_tflops,
            Precision::Fp8 => gpu.fp8_tflops.with_context(|| {
                format!(
                    "--precision is fp8, which {} does not have; allowed: bf16",
                    gpu.name
                )
            })?,
        };
        let tokens = f64::from(self.tokens_per_rank);
        // A lookup is no product; a tied embedding is, as the head.
        let lookup = if counts.head == 0 {
            0
        } else {
            counts.embedding
        };
        let operations = 2.0 * (counts.active - lookup) as f64 * tokens;
        let weights = (self.parameters * self.precision.bytes()) as f64;
        let near = self.ep.min(gpu.nvlink_domain) - 1;
        let far = self.ep - 1 - near;
        let layers = counts.moe_layers as f64;
        // Both ways of a link work at once, so out and back follow one another only by layer.
        let out = f64::max(
            near as f64 * bytes_to_rank / (gpu.nvlink_gb_s * 1e9),
            far as f64 * bytes_to_rank / (gpu.network_gb_s * 1e9),
        );
        let replicas = self.replicated_bytes_per_layer as f64 / (gpu.nvlink_gb_s * 1e9);
        let compute_ms = operations / (tflops * 1e12) * 1e3;
        let memory_ms = weights / (gpu.memory_gb_s * 1e9) * 1e3;
        let tokens_ms = 2.0 * out * layers * 1e3;
        let replicas_ms = if self.ep > 1 {
            replicas * layers * 1e3
        } else {
            0.0
        };
        let step_ms = compute_ms.max(memory_ms).max(tokens_ms);
        Ok(Floor {
            gpu: *gpu,
            compute_ms,
            memory_ms,
            tokens_ms,
            replicas_ms,
            step_ms,
            tokens_per_second_per_gpu: tokens / step_ms * 1e3,
            fits: (self.parameters + self.slot_parameters) as f64 * self.precision.bytes() as f64
                <= gpu.memory_gb * 1e9,
        })
    }
}

/// How likely a token has at least one of its experts on a given rank, averaged over the ranks, when
/// groups are chosen with equal probability and the experts within them too. Experts lie in order:
/// `experts / ep` on each rank, `experts / n_group` in each group.
fn rank_probability(config: &ModelConfig, ep: usize) -> f64 {
    let experts = config.num_experts;
    let (groups, kept, k) = (config.n_group, config.topk_group, config.top_k);
    let (per_rank, per_group) = (experts / ep, experts / groups);
    let open = kept * per_group;
    let mut sum = 0.0;
    for rank in 0..ep {
        let own = rank * per_rank..(rank + 1) * per_rank;
        // ways[chosen groups][experts of the rank in them], as shares of all choices.
        let mut ways = vec![vec![0.0; per_rank + 1]; kept + 1];
        ways[0][0] = 1.0;
        for group in 0..groups {
            let of_group = group * per_group..(group + 1) * per_group;
            let both = own.start.max(of_group.start)..own.end.min(of_group.end);
            for chosen in (0..kept.min(group + 1)).rev() {
                for count in (0..=per_rank - both.len()).rev() {
                    ways[chosen + 1][count + both.len()] += ways[chosen][count];
                }
            }
        }
        let all: f64 = ways[kept].iter().sum();
        let missed: f64 = (0..=per_rank)
            .map(|count| ways[kept][count] / all * none_of(count, open, k))
            .sum();
        sum += 1.0 - missed;
    }
    sum / ep as f64
}

/// Probability that `k` of `open`, chosen without repetition, are none of `count` given ones.
fn none_of(count: usize, open: usize, k: usize) -> f64 {
    (0..k)
        .map(|i| open.saturating_sub(count + i) as f64 / (open - i) as f64)
        .product()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Against all choices of groups and experts, counted one by one.
    #[test]
    fn probability_equals_enumeration() {
        for (experts, groups, kept, k, ep) in [
            (8, 1, 1, 3, 4),
            (8, 4, 2, 3, 2),
            (8, 2, 1, 2, 8),
            (12, 4, 2, 4, 3),
            (12, 3, 2, 3, 4),
            (12, 3, 3, 5, 2),
        ] {
            let mut config = ModelConfig::named("smoke").unwrap();
            (config.num_experts, config.n_group) = (experts, groups);
            (config.topk_group, config.top_k) = (kept, k);
            let (mut hits, mut all) = (0u64, 0u64);
            for open in (0u32..1 << groups).filter(|open| open.count_ones() as usize == kept) {
                for chosen in (0u32..1 << experts).filter(|c| c.count_ones() as usize == k) {
                    let of = |e: usize| chosen >> e & 1 == 1;
                    let allowed =
                        (0..experts).all(|e| !of(e) || open >> (e * groups / experts) & 1 == 1);
                    if allowed {
                        let ranks = (0..ep)
                            .filter(|r| (0..experts).any(|e| of(e) && e * ep / experts == *r));
                        hits += ranks.count() as u64;
                        all += 1;
                    }
                }
            }
            let expected = hits as f64 / all as f64 / ep as f64;
            let got = rank_probability(&config, ep);
            assert!((got - expected).abs() < 1e-12, "{got} {expected}");
        }
    }
}
