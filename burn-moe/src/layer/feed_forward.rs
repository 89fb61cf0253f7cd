use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};

use super::init::{Drawn, draw, lazy};
use crate::ops::{Replication, expert_swiglu, reshape};

/// Configuration to create a [`FeedForward`] with [`init`](FeedForwardConfig::init).
#[derive(Config, Debug)]
pub struct FeedForwardConfig {
    /// Width of the tokens.
    pub d_model: usize,
    /// Width between the two products.
    pub d_hidden: usize,
    /// Seed of the initial weights.
    #[config(default = 0)]
    pub seed: u64,
}

impl FeedForwardConfig {
    /// Creates the layer, with weights drawn like those of an expert.
    pub fn init(&self, device: &Device) -> FeedForward {
        let Self {
            d_model,
            d_hidden,
            seed,
        } = *self;
        FeedForward {
            gate_up: lazy([d_model, 2 * d_hidden], device, move || {
                draw(seed, Drawn::DenseGateUp, d_model, 2 * d_hidden)
            }),
            down: lazy([d_hidden, d_model], device, move || {
                draw(seed, Drawn::DenseDown, d_hidden, d_model)
            }),
        }
    }
}

/// A SwiGLU feed-forward that all tokens pass: `(silu(x W_gate) * (x W_up)) W_down`. Used for
/// shared experts and for the dense layers of MoE models.
#[derive(Module, Debug)]
pub struct FeedForward {
    /// `[d_model, 2 * d_hidden]`, gate first.
    pub gate_up: Param<Tensor<2>>,
    /// `[d_hidden, d_model]`
    pub down: Param<Tensor<2>>,
}

impl FeedForward {
    /// # Shapes
    ///
    /// - `x` and result: `[..., d_model]`
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let shape = x.shape();
        let width = shape[D - 1];
        let rows = shape.num_elements() / width.max(1);
        let offsets: Tensor<1, Int> =
            Tensor::from_data(TensorData::from([0, rows as i32]), &x.device());
        let out = expert_swiglu(
            reshape(x, [rows, width]),
            self.gate_up.val().unsqueeze(),
            self.down.val().unsqueeze(),
            offsets,
            Replication::none(),
        );
        reshape(out, shape)
    }
}
