//! What a run reports, as JSON and as a page.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};

use burn_moe::layer::Routing;
use burn_moe::parallel::LayerStats;
use burn_moe_models::ModelConfig;
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};

use crate::cli::CliError;

/// Report of `train`.
#[derive(Debug, Clone, Serialize)]
pub struct TrainReport {
    /// The model.
    pub config: ModelConfig,
    /// As asked for.
    pub config_name: String,
    /// Trainable parameters of the whole model.
    pub parameters: usize,
    /// All ranks.
    pub ranks: usize,
    /// Data-parallel replicas of the model: `ranks / dp` ranks share the experts of each.
    pub dp: usize,
    /// Nodes that the ranks are on, if that was said.
    pub nodes: Option<usize>,
    /// Whether tokens travelled between nodes in two hops.
    pub hierarchical: bool,
    /// Replica slots of a rank.
    pub slots: usize,
    /// Planner of the run `exact`.
    pub planner: String,
    /// Seed of weights and data.
    pub seed: u64,
    /// Optimizer steps.
    pub steps: usize,
    /// Steps that were done when the run was resumed. Losses and norms are those of all steps,
    /// everything else is of the steps after these.
    pub first_step: usize,
    /// Sequences of a step.
    pub batch: usize,
    /// Tokens of a sequence.
    pub sequence_length: usize,
    /// Micro-batches of a step.
    pub accumulate: usize,
    /// Whether activations were recomputed in the backward pass.
    pub checkpointing: bool,
    /// Type of the weights: `f32` or `bf16`.
    pub dtype: &'static str,
    /// Highest learning rate.
    pub lr: f64,
    /// `constant` or `cosine`.
    pub schedule: &'static str,
    /// Steps in which the learning rate rose.
    pub warmup: usize,
    /// Weight decay of AdamW.
    pub weight_decay: f64,
    /// Largest norm of the gradients, if it was limited.
    pub clip: Option<f64>,
    /// What a token is: `byte`, or `token` of a tokenizer.
    pub unit: &'static str,
    /// `wall` or `critical-path`: what all times and rates are.
    pub timing: &'static str,
    /// Where the text comes from.
    pub data: String,
    /// One for each balancer.
    pub runs: Vec<RunReport>,
}

/// Report of `prefill`.
#[derive(Debug, Clone, Serialize)]
pub struct PrefillReport {
    /// The model.
    pub config: ModelConfig,
    /// Where its weights come from.
    pub checkpoint: PathBuf,
    /// Expert-parallel ranks.
    pub ranks: usize,
    /// Replica slots of a rank.
    pub slots: usize,
    /// Planner of the run `exact`.
    pub planner: String,
    /// `wall` or `critical-path`: what all times and rates are.
    pub timing: &'static str,
    /// What the tokens are: `bytes`, `ids` or `text`.
    pub tokens: &'static str,
    /// Tokens of all prompts.
    pub prompt_tokens: usize,
    /// Most tokens of a prompt that one forward pass read; null: all.
    pub chunk: Option<usize>,
    /// Tokens to write behind each prompt, at most.
    pub max_new_tokens: usize,
    /// One for each balancer.
    pub runs: Vec<PrefillRun>,
}

/// One balancer's pass over the prompts.
#[derive(Debug, Clone, Serialize)]
pub struct PrefillRun {
    /// `none`, `exact` or `ideal`.
    pub balance: &'static str,
    /// Seconds until the first token behind every prompt was known.
    pub time_to_first_token: f64,
    /// Prompt tokens by these seconds.
    pub tokens_per_second: f64,
    /// Most bytes of replica weights held at once, by rank.
    pub replica_buffer_bytes: Vec<usize>,
    /// Bytes of keys and values at the end, with the room made for them, by rank.
    pub kv_cache_bytes: Vec<usize>,
    /// What the layers did in the passes over the prompts.
    #[serde(flatten)]
    pub layers: LayerSummary,
    /// The passes after those.
    pub decode: DecodeRun,
    /// What the model would write next.
    pub continuations: Vec<Continuation>,
}

/// Passes that read one written token of each sequence.
#[derive(Debug, Clone, Default, Serialize)]
pub struct DecodeRun {
    /// Forward passes.
    pub passes: usize,
    /// Tokens written, without the first behind each prompt.
    pub tokens: usize,
    /// Seconds they took.
    pub seconds: f64,
    /// Tokens by seconds; 0 without tokens.
    pub tokens_per_second: f64,
    /// Max over mean of token copies a rank, over all layers and passes, had nothing been moved.
    pub imbalance_before: Summary,
    /// The same as computed.
    pub imbalance_after: Summary,
}

/// A prompt and what follows.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Continuation {
    /// The prompt.
    pub prompt: String,
    /// The tokens behind it, greedily chosen; bytes that are no UTF-8 are replaced.
    pub continuation: String,
}

/// One balancer's run.
#[derive(Debug, Clone, Serialize)]
pub struct RunReport {
    /// `none`, `exact` or `ideal`.
    pub balance: &'static str,
    /// Bits per token of each step.
    pub loss: Vec<f64>,
    /// Norm of all gradients of each step, before clipping; empty without a limit.
    pub grad_norm: Vec<f64>,
    /// Seconds of each step.
    pub step_seconds: Vec<f64>,
    /// Tokens of a step by the median of its seconds.
    pub tokens_per_second: f64,
    /// Throughput as a ratio of `ideal`, if that ran beside: the median over steps.
    pub ratio_to_ideal: Option<f64>,
    /// Most bytes of replica weights held at once, by rank.
    pub replica_buffer_bytes: Vec<usize>,
    /// What the layers did.
    #[serde(flatten)]
    pub layers: LayerSummary,
}

/// Distribution of a quantity.
#[derive(Debug, Clone, Copy, Default, Serialize)]
pub struct Summary {
    /// Arithmetic mean.
    pub mean: f64,
    /// Median.
    pub p50: f64,
    /// 95th percentile.
    pub p95: f64,
    /// Largest.
    pub max: f64,
}

impl Summary {
    /// Of the values, in any order; zeros when there are none. Percentiles by nearest rank.
    pub fn of(values: impl IntoIterator<Item = f64>) -> Self {
        let mut values: Vec<f64> = values.into_iter().collect();
        if values.is_empty() {
            return Self::default();
        }
        values.sort_by(f64::total_cmp);
        let at = |share: f64| values[((values.len() as f64 * share).ceil() as usize).max(1) - 1];
        Self {
            mean: values.iter().sum::<f64>() / values.len() as f64,
            p50: at(0.5),
            p95: at(0.95),
            max: values[values.len() - 1],
        }
    }
}

/// `mean / p95 / max`, for tables.
pub fn spread(summary: &Summary) -> String {
    format!(
        "{:.3} / {:.3} / {:.3}",
        summary.mean, summary.p95, summary.max
    )
}

/// The statistics of one step's layers, of all ranks: `[rank][layer]`.
pub type StepStats = Vec<Vec<LayerStats>>;

/// What the MoE layers did, from the statistics of forward passes.
#[derive(Debug, Clone, Serialize)]
pub struct LayerSummary {
    /// Max over mean of token copies a rank, among those that share experts, over all layers and steps,
    /// had nothing been moved.
    pub imbalance_before: Summary,
    /// The same as computed.
    pub imbalance_after: Summary,
    /// Replicas of a plan.
    pub copies_per_plan: Summary,
    /// Microseconds of planning for one layer and micro-batch.
    pub planning_us: Summary,
    /// Mean bytes of token rows sent between ranks in a forward pass, all layers and ranks.
    pub bytes_dispatched_per_step: f64,
    /// Mean bytes of expert weights sent between ranks in a forward pass, all layers and ranks.
    pub bytes_replicated_per_step: f64,
    /// MoE layers, in the order of the next two; with accumulation, once for each micro-batch; with data
    /// parallelism, all of these once for each group of ranks that share experts.
    pub layers: Vec<u32>,
    /// Imbalance before and after, of each step and layer.
    pub imbalance: Vec<Vec<[f64; 2]>>,
    /// Who computed what, of each step and layer.
    pub loads: Vec<Vec<Loads>>,
}

/// Loads of one layer in one forward pass.
#[derive(Debug, Clone, Serialize)]
pub struct Loads {
    /// Token copies of each rank.
    pub ranks: Vec<u64>,
    /// Token copies of each expert.
    pub experts: Vec<u64>,
    /// Expert, rank and token copies of each replica.
    pub replicas: Vec<[u64; 3]>,
}

impl Loads {
    fn of(layer: &LayerStats) -> Self {
        Self {
            ranks: layer.rank_load.clone(),
            experts: layer.expert_load.clone(),
            replicas: layer
                .replicas
                .iter()
                .map(|r| [u64::from(r.expert), u64::from(r.rank), r.quota])
                .collect(),
        }
    }
}

impl LayerSummary {
    /// Imbalance and copies are the same on all ranks of a group, which are `expert_ranks` consecutive
    /// ones, and taken from its first rank; bytes are added over the ranks.
    pub fn of(steps: &[StepStats], expert_ranks: usize) -> Self {
        let first: Vec<Vec<&LayerStats>> = steps
            .iter()
            .map(|step| step.iter().step_by(expert_ranks.max(1)).flatten().collect())
            .collect();
        let of = |f: &dyn Fn(&LayerStats) -> f64| {
            Summary::of(first.iter().flatten().map(|layer| f(layer)))
        };
        let per_step = |f: &dyn Fn(&LayerStats) -> usize| {
            let total: usize = steps.iter().flatten().flatten().map(f).sum();
            total as f64 / steps.len().max(1) as f64
        };
        Self {
            imbalance_before: of(&|layer| layer.imbalance_before),
            imbalance_after: of(&|layer| layer.imbalance_after),
            copies_per_plan: of(&|layer| layer.replicas.len() as f64),
            planning_us: of(&|layer| layer.planning.as_secs_f64() * 1e6),
            bytes_dispatched_per_step: per_step(&|layer| layer.dispatched_bytes),
            bytes_replicated_per_step: per_step(&|layer| layer.replicated_bytes),
            layers: first
                .first()
                .map(|layers| layers.iter().map(|layer| layer.layer).collect())
                .unwrap_or_default(),
            imbalance: first
                .iter()
                .map(|layers| {
                    layers
                        .iter()
                        .map(|layer| [layer.imbalance_before, layer.imbalance_after])
                        .collect()
                })
                .collect(),
            loads: first
                .iter()
                .map(|layers| layers.iter().map(|layer| Loads::of(layer)).collect())
                .collect(),
        }
    }
}

/// Experts chosen in one forward pass: of each MoE layer `[tokens, k]`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct RoutingRecord(Vec<Vec<u16>>);

impl RoutingRecord {
    /// Of the layers' routings.
    pub fn of(routings: &[Routing]) -> Self {
        Self(
            routings
                .iter()
                .map(|routing| routing.ids.to_data().iter::<u16>().collect())
                .collect(),
        )
    }
}

/// Writes routing as safetensors: `ids [layers, tokens, k]` (u8, or u16 for more than 256 experts),
/// metadata `experts`. `records` are each rank's forward passes; tokens are in order of pass, then
/// rank.
///
/// # Errors
///
/// When the file cannot be written.
pub fn save_routing(
    path: &Path,
    model: &ModelConfig,
    records: &[&[RoutingRecord]],
) -> Result<(), CliError> {
    let layers = model.moe_layers().count();
    let passes = records.iter().map(|rank| rank.len()).max().unwrap_or(0);
    let narrow = model.num_experts <= 256;
    let mut bytes = Vec::new();
    for layer in 0..layers {
        let parts = (0..passes).flat_map(|pass| records.iter().filter_map(move |r| r.get(pass)));
        for id in parts.flat_map(|record| &record.0[layer]) {
            let [low, high] = id.to_le_bytes();
            bytes.push(low);
            if !narrow {
                bytes.push(high);
            }
        }
    }
    let (dtype, size) = if narrow {
        (Dtype::U8, 1)
    } else {
        (Dtype::U16, 2)
    };
    let tokens = bytes.len() / (layers * model.top_k * size).max(1);
    let metadata = HashMap::from([("experts".to_owned(), model.num_experts.to_string())]);
    TensorView::new(dtype, vec![layers, tokens, model.top_k], &bytes)
        .and_then(|ids| safetensors::serialize_to_file([("ids", ids)], Some(metadata), path))
        .map_err(|error| CliError::Write {
            path: path.into(),
            source: std::io::Error::other(error),
        })
}

/// Writes `report.json` and `report.html` into `folder`. Returns the path of the page.
///
/// # Errors
///
/// When the folder or a file cannot be written.
pub fn write(folder: &Path, report: &impl Serialize, page: &str) -> Result<PathBuf, CliError> {
    let write = |name: &str, text: &str| {
        let path = folder.join(name);
        fs::write(&path, text)
            .map(|()| path.clone())
            .map_err(|source| CliError::Write { path, source })
    };
    fs::create_dir_all(folder).map_err(|source| CliError::Write {
        path: folder.into(),
        source,
    })?;
    let json = serde_json::to_string_pretty(report).map_err(|error| CliError::Write {
        path: folder.join("report.json"),
        source: error.into(),
    })?;
    write("report.json", &json)?;
    write("report.html", page)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn percentiles_are_values_that_occurred() {
        let summary = Summary::of((1..=100).rev().map(f64::from));
        assert_eq!(summary.mean, 50.5);
        assert_eq!((summary.p50, summary.p95, summary.max), (50.0, 95.0, 100.0));
        let one = Summary::of([3.0]);
        assert_eq!((one.mean, one.p50, one.p95, one.max), (3.0, 3.0, 3.0, 3.0));
        assert_eq!(Summary::of([]).max, 0.0);
    }
}
