//! What `--logits` saves.

use std::path::Path;

use burn_moe_models::{DecoderOutput, ModelConfig};
use safetensors::Dtype;
use safetensors::tensor::TensorView;
use serde::{Deserialize, Serialize};

use crate::cli::CliError;

/// Logits and routing of one rank's prompts.
#[derive(Serialize, Deserialize)]
pub(super) struct PromptOutputs {
    lengths: Vec<usize>,
    /// `[tokens, vocab_size]`
    logits: Vec<f32>,
    /// Of each MoE layer, ids and weights `[tokens, k]`.
    routings: Vec<(Vec<i64>, Vec<f32>)>,
}

impl PromptOutputs {
    pub fn of(out: &DecoderOutput, prompts: &[Vec<u32>]) -> Self {
        Self {
            lengths: prompts.iter().map(Vec::len).collect(),
            logits: out.logits.to_data().iter().collect(),
            routings: out
                .routings
                .iter()
                .map(|routing| {
                    let ids = routing.ids.to_data().iter().collect();
                    (ids, routing.weights.to_data().iter().collect())
                })
                .collect(),
        }
    }
}

/// Writes `logits.i`, and `router.N.indices.i` (i64) and `router.N.weights.i` for each MoE layer `N`
/// of the model, of prompt `i`. `ranks` are the ranks' prompts in order.
///
/// # Errors
///
/// When the file cannot be written.
pub(super) fn save(
    path: &Path,
    model: &ModelConfig,
    ranks: Vec<PromptOutputs>,
) -> Result<(), CliError> {
    let mut tensors: Vec<(String, Dtype, Vec<usize>, Vec<u8>)> = Vec::new();
    let mut prompt = 0;
    for rank in ranks {
        let mut start = 0;
        for length in rank.lengths {
            let rows = |width: usize| start * width..(start + length) * width;
            let f32s = |values: &[f32]| values.iter().flat_map(|v| v.to_le_bytes()).collect();
            let vocab = model.vocab_size;
            tensors.push((
                format!("logits.{prompt}"),
                Dtype::F32,
                vec![length, vocab],
                f32s(&rank.logits[rows(vocab)]),
            ));
            let k = model.top_k;
            for (layer, (ids, weights)) in rank.routings.iter().enumerate() {
                let layer = model.num_dense_layers + layer;
                tensors.push((
                    format!("router.{layer}.indices.{prompt}"),
                    Dtype::I64,
                    vec![length, k],
                    ids[rows(k)]
                        .iter()
                        .flat_map(|id| id.to_le_bytes())
                        .collect(),
                ));
                tensors.push((
                    format!("router.{layer}.weights.{prompt}"),
                    Dtype::F32,
                    vec![length, k],
                    f32s(&weights[rows(k)]),
                ));
            }
            start += length;
            prompt += 1;
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
