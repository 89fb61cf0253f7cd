use std::convert::Infallible;

use burn::tensor::Device;
use burn_moe::layer::ConfigError;
use burn_moe::parallel::{ExpertParallel, ParallelOptions};

use crate::parameters::{self, Parameter};
use crate::{Decoder, ModelConfig, ModelError};

/// Parameters of a model, selection biases of routers included, from the definitions of its modules.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ParameterCounts {
    /// Of the whole model, without multi-token prediction.
    pub total: u64,
    /// That a token passes: without the routed experts that it is not sent to.
    pub active: u64,
    /// Of the table of token vectors.
    pub embedding: u64,
    /// Of the last product, to the logits; 0 when the embedding also is that.
    pub head: u64,
    /// Of one routed expert.
    pub expert: u64,
    /// Of all routed experts.
    pub routed: u64,
    /// Layers with experts.
    pub moe_layers: u64,
    /// Of one layer's attention, without the indexer.
    pub attention_layer: u64,
    /// Of one layer's indexer; 0 when there is none.
    pub indexer_layer: u64,
    /// Of the layers for multi-token prediction that the decoder leaves out, without the embedding
    /// and head that they share with it.
    pub mtp: u64,
}

impl ParameterCounts {
    /// Of one of `ranks` expert-parallel ranks: its experts, and everything else.
    ///
    /// # Errors
    ///
    /// When the ranks do not divide the routed experts of a layer.
    pub fn per_rank(&self, ranks: u64) -> Result<u64, ConfigError> {
        let per_layer = self.routed / (self.expert * self.moe_layers).max(1);
        ConfigError::check(
            ranks > 0 && per_layer.is_multiple_of(ranks),
            "ranks",
            ranks,
            format!("a divisor of num_experts ({per_layer})"),
        )?;
        Ok(self.total - self.routed + self.routed / ranks)
    }
}

impl ModelConfig {
    /// Counts the parameters of the model's modules, none of which is allocated.
    ///
    /// # Errors
    ///
    /// When a field is not allowed.
    pub fn counts(&self, device: &Device) -> Result<ParameterCounts, ModelError> {
        let solo = ExpertParallel::solo(ParallelOptions::default())?;
        let model = count(&self.init_lazy(&solo, 0, device)?);
        let layers = self.num_layers;
        let moe_layers = self.moe_layers().count() as u64;
        let num_experts = self.num_experts as u64;
        let routed = model.routed;
        let expert = routed / (moe_layers * num_experts).max(1);
        let unused = moe_layers * (num_experts - self.top_k as u64) * expert;
        // A layer for multi-token prediction is a last layer, with three norms and a product that
        // joins the token's vector and the next token's.
        let d_model = self.d_model as u64;
        let mtp_layer = model.last_layer + 3 * d_model + 2 * d_model * d_model;
        Ok(ParameterCounts {
            total: model.total,
            active: model.total - unused,
            embedding: model.embedding,
            head: model.head,
            expert,
            routed,
            moe_layers,
            attention_layer: model.attention / layers as u64,
            indexer_layer: model.first_indexer,
            mtp: self.num_mtp_layers as u64 * (mtp_layer + self.indexer_missing_in_last(&model)),
        })
    }

    /// Parameters of an indexer, when the model has them but the last layer shares one.
    fn indexer_missing_in_last(&self, model: &Count) -> u64 {
        match &self.attention {
            crate::attention::AttentionConfig::Mla(config) => match &config.indexer {
                Some(i) if i.shared_layers.contains(&(self.num_layers - 1)) => model.first_indexer,
                _ => 0,
            },
            crate::attention::AttentionConfig::Gqa(_) => 0,
        }
    }
}

#[derive(Default)]
struct Count {
    total: u64,
    embedding: u64,
    head: u64,
    routed: u64,
    attention: u64,
    first_indexer: u64,
    last_layer: u64,
}

fn count(decoder: &Decoder) -> Count {
    let mut count = Count::default();
    let last = decoder.layers.len().saturating_sub(1).to_string();
    let Ok(()) = parameters::visit(decoder, |parameter| {
        count.add(&parameter, &last);
        Ok::<(), Infallible>(())
    });
    count
}

impl Count {
    fn add(&mut self, parameter: &Parameter<'_>, last: &str) {
        let count: u64 = parameter.shape.iter().map(|side| *side as u64).product();
        self.total += count;
        if parameter.path.inside_experts() {
            self.routed += count;
        }
        match parameter.path.parts()[..] {
            ["embedding", ..] => self.embedding += count,
            ["head", ..] => self.head += count,
            ["layers", "0", "attention", "indexer", ..] => self.first_indexer += count,
            ["layers", _, "attention", "indexer", ..] => {}
            ["layers", _, "attention", ..] => self.attention += count,
            _ => {}
        }
        if let ["layers", layer, ..] = parameter.path.parts()[..]
            && layer == last
        {
            self.last_layer += count;
        }
    }
}
