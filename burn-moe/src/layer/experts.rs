use std::ops::Range;

use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};

use super::init::{Drawn, draw, lazy};
use crate::ops::{Replication, expert_swiglu};

/// Configuration to create [`GroupedExperts`] with [`init`](GroupedExpertsConfig::init).
#[derive(Config, Debug)]
pub struct GroupedExpertsConfig {
    /// Experts in the layer, over all ranks.
    pub num_experts: usize,
    /// Width of the tokens.
    pub d_model: usize,
    /// Width of an expert between its two products.
    pub d_hidden: usize,
    /// Seed of the initial weights. An expert's weights depend on the seed and its id alone, not
    /// on where it lives.
    #[config(default = 0)]
    pub seed: u64,
}

impl GroupedExpertsConfig {
    /// Creates all experts.
    pub fn init(&self, device: &Device) -> GroupedExperts {
        self.init_shard(0..self.num_experts, device)
    }

    /// Creates the experts with the ids of `experts`, which live on this rank.
    ///
    /// # Panics
    ///
    /// Panics when `experts` does not lie in `0..num_experts`.
    pub fn init_shard(&self, experts: Range<usize>, device: &Device) -> GroupedExperts {
        assert!(
            experts.start <= experts.end && experts.end <= self.num_experts,
            "experts {experts:?} of {}",
            self.num_experts
        );
        let Self {
            d_model,
            d_hidden,
            seed,
            ..
        } = *self;
        let count = experts.len();
        let all = move |drawn: fn(u64) -> Drawn, rows, columns| {
            let ids = experts.start as u64..experts.end as u64;
            ids.flat_map(|expert| draw(seed, drawn(expert), rows, columns))
                .collect()
        };
        GroupedExperts {
            gate_up: lazy([count, d_model, 2 * d_hidden], device, move || {
                all(Drawn::ExpertGateUp, d_model, 2 * d_hidden)
            }),
            down: lazy([count, d_hidden, d_model], device, move || {
                all(Drawn::ExpertDown, d_hidden, d_model)
            }),
        }
    }
}

/// SwiGLU experts, their weights stacked: those of this rank when the layer is sharded.
#[derive(Module, Debug)]
pub struct GroupedExperts {
    /// `[experts, d_model, 2 * d_hidden]`, gate first.
    pub gate_up: Param<Tensor<3>>,
    /// `[experts, d_hidden, d_model]`
    pub down: Param<Tensor<3>>,
}

impl GroupedExperts {
    /// Computes every expert over its rows; see [`expert_swiglu`].
    ///
    /// # Shapes
    ///
    /// - `x` and result: `[rows, d_model]`, sorted by expert
    /// - `offsets`: `[experts + replicas + 1]`
    pub fn forward(
        &self,
        x: Tensor<2>,
        offsets: Tensor<1, Int>,
        replication: Replication,
    ) -> Tensor<2> {
        expert_swiglu(x, self.gate_up.val(), self.down.val(), offsets, replication)
    }

    /// Experts held here.
    pub fn len(&self) -> usize {
        self.gate_up.lazy_shape()[0]
    }

    /// Whether no expert is held here.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
