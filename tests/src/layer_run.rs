//! A MoE layer, forward and backward, over any number of ranks.

use std::ops::Range;
use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_moe::comm::{Communicator, RankOptions, Topology};
use burn_moe::layer::{Moe, MoeConfig};
use burn_moe::parallel::{Balance, CombineOrder, ExpertParallel, LayerStats, ParallelOptions};

use serde::{Deserialize, Serialize};

use crate::{random, ranks, values};

/// One layer applied to the tokens of a batch that is divided among ranks.
#[derive(Debug, Clone)]
pub struct LayerRun {
    /// The layer.
    pub config: MoeConfig,
    /// Tokens in the batch.
    pub tokens: usize,
    /// Expert that all tokens are pushed to, by a large selection bias.
    pub hot_expert: Option<usize>,
    /// Added to the tokens' gate scores by position, so that load is uneven.
    pub skew: bool,
    /// Ranks.
    pub ranks: usize,
    /// Tokens of each rank; evenly divided when empty.
    pub split: Vec<usize>,
    /// Balancer.
    pub balance: Balance,
    /// Replica slots a rank.
    pub slots: usize,
    /// Order of additions.
    pub combine: CombineOrder,
    /// Nodes that the ranks are said to be on.
    pub nodes: usize,
    /// Whether rows between nodes go through ranks of the same index.
    pub hierarchical: bool,
    /// Whether replicas' weights are sent before the tokens.
    pub overlap: bool,
    /// Where all ranks compute.
    pub device: Device,
}

/// What came out, put together over the ranks. All values of the batch are in token order.
#[derive(Debug)]
pub struct LayerResult {
    /// `[T, D]`
    pub output: Vec<f32>,
    /// `[T, D]`
    pub grad_x: Vec<f64>,
    /// `[E, D, 2F]`
    pub grad_gate_up: Vec<f64>,
    /// `[E, F, D]`
    pub grad_down: Vec<f64>,
    /// `[D, E]`, summed over ranks
    pub grad_gate: Vec<f64>,
    /// Of rank 0.
    pub stats: LayerStats,
}

/// What came out on one rank.
#[derive(Debug, Serialize, Deserialize)]
pub struct LayerPart {
    /// `[tokens of the rank, D]`
    pub output: Vec<f32>,
    /// `[tokens of the rank, D]`
    pub grad_x: Vec<f64>,
    /// `[experts of the rank, D, 2F]`
    pub grad_gate_up: Vec<f64>,
    /// `[experts of the rank, F, D]`
    pub grad_down: Vec<f64>,
    /// `[D, E]`, this rank's share
    pub grad_gate: Vec<f64>,
    /// What the layer did.
    pub stats: LayerStats,
}

impl LayerRun {
    /// A run of `config` on one rank, with the exact order of additions.
    pub fn single(config: MoeConfig, tokens: usize) -> Self {
        Self {
            config,
            tokens,
            hot_expert: None,
            skew: true,
            ranks: 1,
            split: Vec::new(),
            balance: Balance::None,
            slots: 0,
            combine: CombineOrder::Exact,
            nodes: 1,
            hierarchical: false,
            overlap: true,
            device: Device::flex(),
        }
    }

    /// The tokens, `[T, D]`.
    pub fn tokens(&self) -> Vec<f32> {
        let width = self.config.router.d_model;
        let mut x: Vec<f32> = random(self.tokens * width, 7)
            .into_iter()
            .map(|v| v as f32)
            .collect();
        if self.skew {
            // A common direction makes some experts popular.
            let common = random(width, 8);
            for x in x.chunks_mut(width) {
                for (x, common) in x.iter_mut().zip(&common) {
                    *x = 0.5 * *x + *common as f32;
                }
            }
        }
        x
    }

    /// Factors on the outputs in the loss, `[T, D]`.
    pub fn loss_factors(&self) -> Vec<f32> {
        random(self.tokens * self.config.router.d_model, 9)
            .into_iter()
            .map(|v| v as f32)
            .collect()
    }

    /// Runs forward and backward of `sum(output * loss_factors)`.
    pub fn run(&self) -> LayerResult {
        let parts = ranks::run(self.ranks, RankOptions::default(), |comm| self.rank(comm));
        let mut grad_gate = vec![0.0; parts[0].grad_gate.len()];
        for part in &parts {
            for (sum, v) in grad_gate.iter_mut().zip(&part.grad_gate) {
                *sum += v;
            }
        }
        LayerResult {
            output: parts.iter().flat_map(|p| p.output.clone()).collect(),
            grad_x: parts.iter().flat_map(|p| p.grad_x.clone()).collect(),
            grad_gate_up: parts.iter().flat_map(|p| p.grad_gate_up.clone()).collect(),
            grad_down: parts.iter().flat_map(|p| p.grad_down.clone()).collect(),
            grad_gate,
            stats: parts[0].stats.clone(),
        }
    }

    /// What one of the ranks does: its tokens, its experts.
    pub fn rank(&self, comm: Arc<dyn Communicator>) -> LayerPart {
        let width = self.config.router.d_model;
        let (x, factors) = (self.tokens(), self.loss_factors());
        let device = self.device.clone().autodiff();
        let tokens = self.tokens_of(comm.rank());
        let part = |all: &[f32]| {
            let own = all[tokens.start * width..tokens.end * width].to_vec();
            Tensor::<2>::from_data(
                TensorData::new(own, [tokens.len(), width]),
                (&device, DType::F32),
            )
        };
        let options = ParallelOptions {
            balance: self.balance,
            slots: self.slots,
            combine: self.combine,
            topology: Some(Topology::nodes(self.ranks, self.nodes).unwrap()),
            hierarchical: self.hierarchical,
            overlap: self.overlap,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm, options).unwrap();
        let mut moe = self.config.init_parallel(&ep, 3, &device).unwrap();
        self.heat(&mut moe);
        let x = part(&x).require_grad();
        let out = moe.forward(x.clone());
        let grads = (out.clone() * part(&factors)).sum().backward();
        let grad = |weights: Tensor<3>| {
            let grad = weights.grad(&grads);
            values(&grad.unwrap_or_else(|| weights.inner().zeros_like()))
        };
        LayerPart {
            output: out.to_data().iter::<f32>().collect(),
            grad_x: values(&x.grad(&grads).unwrap()),
            grad_gate_up: grad(moe.experts.gate_up.val()),
            grad_down: grad(moe.experts.down.val()),
            grad_gate: values(&moe.router.gate.val().grad(&grads).unwrap()),
            stats: ep.take_stats().remove(0),
        }
    }

    fn heat(&self, moe: &mut Moe) {
        if let (Some(hot), Some(bias)) = (self.hot_expert, moe.router.bias.take()) {
            let mut values = vec![0.0f32; self.config.router.num_experts];
            values[hot] = 100.0;
            moe.router.bias = Some(bias.map(|bias| {
                let len = values.len();
                Tensor::from_data(TensorData::new(values, [len]), &bias.device())
                    .set_require_grad(false)
            }));
        }
    }

    fn tokens_of(&self, rank: usize) -> Range<usize> {
        if self.split.is_empty() {
            return self.tokens * rank / self.ranks..self.tokens * (rank + 1) / self.ranks;
        }
        let start = self.split[..rank].iter().sum();
        start..start + self.split[rank]
    }
}
