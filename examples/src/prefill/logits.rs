//! What `--logits` saves.

use std::path::Path;

use burn_moe_models::{DecoderOutput, ModelConfig, TokenBatch};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};

use crate::cli::CliError;

/// Logits and routing of one prompt, all its tokens in order.
#[derive(Default, Serialize, Deserialize)]
pub(super) struct PromptOutput {
    length: usize,
    /// `[length, vocab_size]`
    logits: Vec<f32>,
    /// Of each MoE layer, ids and weights `[length, k]`.
    routings: Vec<(Vec<i64>, Vec<f32>)>,
}

impl PromptOutput {
    /// Appends the tokens of a forward pass to the prompts that they are of.
    pub fn extend(prompts: &mut [Self], batch: &TokenBatch, out: &DecoderOutput) {
        let logits: Vec<f32> = out.logits.to_data().iter().collect();
        let routings: Vec<(Vec<i64>, Vec<f32>)> = out
            .routings
            .iter()
            .map(|routing| {
                let ids = routing.ids.to_data().iter().collect();
                (ids, routing.weights.to_data().iter().collect())
            })
            .collect();
        let tokens = batch.ids.len();
        let mut start = 0;
        for (prompt, &length) in prompts.iter_mut().zip(&batch.lengths) {
            let rows = |all: usize| {
                let width = all / tokens.max(1);
                start * width..(start + length) * width
            };
            prompt.logits.extend(&logits[rows(logits.len())]);
            prompt.routings.resize(routings.len(), Default::default());
            for (own, (ids, weights)) in prompt.routings.iter_mut().zip(&routings) {
                own.0.extend(&ids[rows(ids.len())]);
                own.1.extend(&weights[rows(weights.len())]);
            }
            prompt.length += length;
            start += length;
        }
    }
}

/// Writes `logits.i`, and `router.N.indices.i` (i64) and `router.N.weights.i` for each MoE layer `N`
/// of the model, of prompt `i`.
///
/// # Errors
///
/// When the file cannot be written.
pub(super) fn save(
    path: &Path,
    model: &ModelConfig,
    prompts: impl Iterator<Item = PromptOutput>,
) -> Result<(), CliError> {
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
    for (i, prompt) in prompts.enumerate() {
        let shape = vec![prompt.length, model.vocab_size];
        let logits = f32s(&prompt.logits);
        tensors.push((format!("logits.{i}"), Dtype::F32, shape, logits));
        for (layer, (ids, weights)) in model.moe_layers().zip(&prompt.routings) {
            let shape = vec![prompt.length, model.top_k];
            let ids = ids.iter().flat_map(|id| id.to_le_bytes()).collect();
            let name = format!("router.{layer}.indices.{i}");
            tensors.push((name, Dtype::I64, shape.clone(), ids));
            let name = format!("router.{layer}.weights.{i}");
            tensors.push((name, Dtype::F32, shape, f32s(weights)));
        }
    }
    let views: Result<Vec<_>, _> = tensors
        .iter()
        .map(|(name, dtype, shape, bytes)| {
            TensorView::new(*dtype, shape.clone(), bytes).map(|view| (name.as_str(), view))
        })
        .collect();
    views
        .and_then(|views| safetensors::serialize_to_file(views, None, path))
        .map_err(|error| CliError::Write {
            path: path.into(),
            source: std::io::Error::other(error),
        })
}
