//! What is compared, each with weights of its own made of the same numbers.

use std::hint::black_box;

use burn::module::Param;
use burn::tensor::activation::silu;
use burn::tensor::{Device, Gradients, IndexingUpdateOp, Int, Tensor, TensorData};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::ops::{Replication, expert_swiglu, gather_rows, sum_rows};
use candle_core::{DType, Device as CandleDevice, Result as CandleResult, Var};

use super::loss;
use super::memory;
use super::shapes::{Case, Shape, tensor};

/// Times what it is given.
pub type Timer<'a> = &'a mut dyn FnMut(&mut dyn FnMut());

/// One way to compute a layer.
pub trait Peer {
    fn name(&self) -> &'static str;

    /// Times the forward pass, without a graph.
    fn forward(&self, case: &Case, timer: Timer<'_>);

    /// Times the forward and the backward pass, with gradients for tokens, weights of the choice
    /// and all experts.
    fn training(&self, case: &Case, timer: Timer<'_>);

    /// Output, gradient of the tokens, and gradient of the first busy expert's down matrix.
    fn results(&self, case: &Case) -> Vec<Vec<f32>>;
}

/// The tensors of a case on a device, tracked where it has autodiff.
struct Inputs {
    x: Tensor<2>,
    weights: Tensor<2>,
    grad: Tensor<2>,
}

impl Inputs {
    fn new(case: &Case, device: &Device) -> Self {
        let (t, d, k) = (case.tokens, case.shape.d_model, case.shape.top_k);
        let tracked = |tensor: Tensor<2>| match device.is_autodiff() {
            true => tensor.require_grad(),
            false => tensor,
        };
        Self {
            x: tracked(tensor(case.x.clone(), [t, d], device)),
            weights: tracked(tensor(case.weights.clone(), [t, k], device)),
            grad: tensor(case.grad.clone(), [t, d], device),
        }
    }
}

fn ints<const D: usize>(values: Vec<i32>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

fn floats<const D: usize>(tensor: &Tensor<D>) -> Vec<f32> {
    tensor.to_data().iter::<f32>().collect()
}

fn first_busy(case: &Case) -> usize {
    let busiest = case.ids.iter().min().expect("a token");
    *busiest as usize
}

/// Experts in Burn, from chosen experts and weights of the choice.
trait Experts: Sized {
    const NAME: &'static str;

    /// The same with gradients.
    fn tracked(&self) -> Self;

    fn output(&self, case: &Case, inputs: &Inputs) -> Tensor<2>;

    /// Gradient of an expert's down matrix.
    fn down_grad(&self, grads: &Gradients, expert: usize) -> Option<Vec<f32>>;
}

impl<E: Experts> Peer for E {
    fn name(&self) -> &'static str {
        E::NAME
    }

    fn forward(&self, case: &Case, timer: Timer<'_>) {
        let inputs = Inputs::new(case, &Device::flex());
        timer(&mut || _ = black_box(self.output(case, &inputs)));
    }

    fn training(&self, case: &Case, timer: Timer<'_>) {
        let inputs = Inputs::new(case, &Device::flex().autodiff());
        let tracked = self.tracked();
        timer(&mut || {
            let output = tracked.output(case, &inputs);
            black_box(loss(output, &inputs.grad).backward());
        });
    }

    fn results(&self, case: &Case) -> Vec<Vec<f32>> {
        let inputs = Inputs::new(case, &Device::flex().autodiff());
        let tracked = self.tracked();
        let output = tracked.output(case, &inputs);
        let grads = loss(output.clone(), &inputs.grad).backward();
        let down = tracked.down_grad(&grads, first_busy(case));
        vec![
            floats(&output),
            floats(&inputs.x.grad(&grads).expect("a gradient")),
            down.expect("a gradient"),
        ]
    }
}

/// The operations of this crate, without the router.
pub struct Ours {
    gate_up: Tensor<3>,
    down: Tensor<3>,
}

impl Ours {
    pub fn new(shape: &Shape) -> Self {
        let (gate_up, down) = stacked(shape, &Device::flex());
        Self { gate_up, down }
    }

    /// Reads the weights of the experts that the case needs, once: what a forward pass takes at least.
    pub fn read(&self, case: &Case, timer: Timer<'_>) {
        let busy: Vec<usize> = {
            let rows = case.rows_of_experts();
            (0..rows.len()).filter(|e| !rows[*e].is_empty()).collect()
        };
        let weights = [&self.gate_up, &self.down].map(|weights| weights.to_data());
        timer(&mut || {
            for weights in &weights {
                let weights = weights.as_slice::<f32>().expect("weights are f32");
                let size = weights.len() / case.shape.experts;
                for expert in &busy {
                    black_box(sum(&weights[expert * size..][..size]));
                }
            }
        });
    }

    /// Peak memory of one training step, less what `others` held before, and what it must hold:
    /// weights, inputs, the activations that the backward pass reads, and the gradients.
    pub fn memory_of_training(&self, case: &Case, others: usize) -> [usize; 2] {
        let floats = |tensors: &[usize]| tensors.iter().sum::<usize>() * size_of::<f32>();
        let Shape {
            d_model: d,
            d_hidden: f,
            ..
        } = case.shape;
        let (t, n) = (case.tokens, case.ids.len());
        let weights: usize = [&self.gate_up, &self.down]
            .map(|weights| weights.shape().num_elements())
            .iter()
            .sum();
        let inputs = [t * d, n, t * d];
        let saved = [n * d, n * 2 * f, n * d];
        let gradients = [t * d, n, weights];
        let floor = floats(&[weights]) + floats(&inputs) + floats(&saved) + floats(&gradients);
        let tracked = self.tracked();
        let peak = memory::peak(|| {
            let inputs = Inputs::new(case, &Device::flex().autodiff());
            let grads = loss(tracked.output(case, &inputs), &inputs.grad).backward();
            black_box(grads);
        });
        [peak.saturating_sub(others), floor]
    }
}

/// In many chains, so that only memory limits it.
fn sum(values: &[f32]) -> f32 {
    let mut sums = [0.0; 32];
    for values in values.chunks_exact(sums.len()) {
        for (sum, value) in sums.iter_mut().zip(values) {
            *sum += value;
        }
    }
    sums.iter().sum()
}

/// Gate and up side by side, `[E, D, 2F]`, and down `[E, F, D]`.
fn stacked(shape: &Shape, device: &Device) -> (Tensor<3>, Tensor<3>) {
    let Shape {
        d_model: d,
        d_hidden: f,
        experts: e,
        ..
    } = *shape;
    let [gate, up, down] = shape.weights();
    let mut gate_up = Vec::with_capacity(2 * gate.len());
    for (gate, up) in gate.chunks_exact(f).zip(up.chunks_exact(f)) {
        gate_up.extend_from_slice(gate);
        gate_up.extend_from_slice(up);
    }
    (
        tensor(gate_up, [e, d, 2 * f], device),
        tensor(down, [e, f, d], device),
    )
}

impl Experts for Ours {
    const NAME: &'static str = "ours";

    fn tracked(&self) -> Self {
        let tracked = |weights: &Tensor<3>| weights.clone().autodiff().require_grad();
        Self {
            gate_up: tracked(&self.gate_up),
            down: tracked(&self.down),
        }
    }

    fn output(&self, case: &Case, inputs: &Inputs) -> Tensor<2> {
        let device = inputs.x.device();
        let (t, k) = (case.tokens, case.shape.top_k);
        let mut offsets = vec![0i32; case.shape.experts + 1];
        for id in &case.ids {
            offsets[*id as usize + 1] += 1;
        }
        for expert in 0..case.shape.experts {
            offsets[expert + 1] += offsets[expert];
        }
        let mut next = offsets.clone();
        let mut token_of_row = vec![0; t * k];
        let mut row_of_copy = vec![0; t * k];
        for (copy, id) in case.ids.iter().enumerate() {
            let row = &mut next[*id as usize];
            token_of_row[*row as usize] = (copy / k) as i32;
            row_of_copy[copy] = *row;
            *row += 1;
        }
        let rows = gather_rows(inputs.x.clone(), ints(token_of_row, [t * k], &device));
        let outputs = expert_swiglu(
            rows,
            self.gate_up.clone(),
            self.down.clone(),
            ints(offsets, [case.shape.experts + 1], &device),
            Replication::none(),
        );
        let index = ints(row_of_copy, [t, k], &device);
        sum_rows(outputs, index, inputs.weights.clone())
    }

    fn down_grad(&self, grads: &Gradients, expert: usize) -> Option<Vec<f32>> {
        let down = self.down.grad(grads)?;
        Some(floats(&down.slice_dim(0, expert..expert + 1)))
    }
}

/// A whole layer of this crate, on one rank.
pub struct Layer {
    moe: Moe,
    trained: Moe,
}

impl Layer {
    pub fn new(shape: &Shape) -> Self {
        let device = Device::flex();
        let (gate_up, down) = stacked(shape, &device);
        let with = |device: &Device, gate_up, down| {
            let router = RouterConfig::new(shape.d_model, shape.experts, shape.top_k);
            let mut moe = MoeConfig::new(router, shape.d_hidden).init(device);
            moe.experts.gate_up = Param::from_tensor(gate_up);
            moe.experts.down = Param::from_tensor(down);
            moe
        };
        let trained = with(
            &device.clone().autodiff(),
            gate_up.clone().autodiff(),
            down.clone().autodiff(),
        );
        Self {
            moe: with(&device, gate_up, down),
            trained,
        }
    }
}

impl Peer for Layer {
    fn name(&self) -> &'static str {
        "layer"
    }

    fn forward(&self, case: &Case, timer: Timer<'_>) {
        let inputs = Inputs::new(case, &Device::flex());
        timer(&mut || _ = black_box(self.moe.forward(inputs.x.clone())));
    }

    fn training(&self, case: &Case, timer: Timer<'_>) {
        let inputs = Inputs::new(case, &Device::flex().autodiff());
        timer(&mut || {
            let output = self.trained.forward(inputs.x.clone());
            black_box(loss(output, &inputs.grad).backward());
        });
    }

    fn results(&self, _case: &Case) -> Vec<Vec<f32>> {
        Vec::new()
    }
}

/// A loop over experts in Burn, as one writes it without this crate.
pub struct LoopOverExperts {
    /// Gate `[D, F]`, up `[D, F]`, down `[F, D]` of each expert.
    experts: Vec<[Tensor<2>; 3]>,
}

impl LoopOverExperts {
    pub fn new(shape: &Shape) -> Self {
        let device = Device::flex();
        let (d, f) = (shape.d_model, shape.d_hidden);
        let weights = shape.weights();
        let experts = (0..shape.experts).map(|expert| {
            let of = |matrix: usize, shape| {
                let place = expert * d * f..(expert + 1) * d * f;
                tensor(weights[matrix][place].to_vec(), shape, &device)
            };
            [of(0, [d, f]), of(1, [d, f]), of(2, [f, d])]
        });
        Self {
            experts: experts.collect(),
        }
    }
}

impl Experts for LoopOverExperts {
    const NAME: &'static str = "loop";

    fn tracked(&self) -> Self {
        let tracked = |weights: &Tensor<2>| weights.clone().autodiff().require_grad();
        let experts = self.experts.iter();
        Self {
            experts: experts
                .map(|expert| expert.each_ref().map(tracked))
                .collect(),
        }
    }

    fn output(&self, case: &Case, inputs: &Inputs) -> Tensor<2> {
        let device = inputs.x.device();
        let mut output = Tensor::zeros([case.tokens, case.shape.d_model], &device);
        let weights: Tensor<1> = inputs.weights.clone().flatten(0, 1);
        for (rows, [gate, up, down]) in case.rows_of_experts().iter().zip(&self.experts) {
            if rows.is_empty() {
                continue;
            }
            let tokens = rows.iter().map(|(token, _)| *token).collect();
            let tokens = ints(tokens, [rows.len()], &device);
            let places = rows.iter().map(|(_, place)| *place).collect();
            let weights = weights
                .clone()
                .select(0, ints(places, [rows.len()], &device));
            let x = inputs.x.clone().select(0, tokens.clone());
            let hidden = silu(x.clone().matmul(gate.clone())) * x.matmul(up.clone());
            let y = hidden.matmul(down.clone()) * weights.reshape([rows.len(), 1]);
            output = output.select_assign(0, tokens, y, IndexingUpdateOp::Add);
        }
        output
    }

    fn down_grad(&self, grads: &Gradients, expert: usize) -> Option<Vec<f32>> {
        let [_, _, down] = &self.experts[expert];
        down.grad(grads).map(|grad| floats(&grad))
    }
}

/// The loop of candle-transformers' `SparseMoeBlock`s over experts: `index_select`, three linear
/// layers whose weights are `[out, in]`, `index_add`.
pub struct Candle {
    /// Gate `[F, D]`, up `[F, D]`, down `[D, F]` of each expert.
    experts: Vec<[Var; 3]>,
}

impl Candle {
    pub fn new(shape: &Shape) -> Self {
        let (d, f) = (shape.d_model, shape.d_hidden);
        let weights = shape.weights();
        let experts = (0..shape.experts).map(|expert| {
            let of = |matrix: usize, shape| {
                let values = &weights[matrix][expert * d * f..(expert + 1) * d * f];
                let tensor = candle_core::Tensor::from_slice(values, shape, &CandleDevice::Cpu)?;
                Var::from_tensor(&tensor.t()?.contiguous()?)
            };
            Ok([of(0, (d, f))?, of(1, (d, f))?, of(2, (f, d))?])
        });
        Self {
            experts: experts
                .collect::<CandleResult<_>>()
                .expect("candle takes these shapes"),
        }
    }

    fn inputs(case: &Case) -> CandleResult<[candle_core::Tensor; 3]> {
        let (t, d, k) = (case.tokens, case.shape.d_model, case.shape.top_k);
        let of = |values: &[f32], shape| {
            candle_core::Tensor::from_slice(values, shape, &CandleDevice::Cpu)
        };
        Ok([
            of(&case.x, (t, d))?,
            of(&case.weights, (t * k, 1))?,
            of(&case.grad, (t, d))?,
        ])
    }

    fn output(
        &self,
        case: &Case,
        x: &candle_core::Tensor,
        weights: &candle_core::Tensor,
        tracked: bool,
    ) -> CandleResult<candle_core::Tensor> {
        let mut output = x.zeros_like()?;
        for (rows, matrices) in case.rows_of_experts().iter().zip(&self.experts) {
            if rows.is_empty() {
                continue;
            }
            let [gate, up, down] = matrices.each_ref().map(|matrix| match tracked {
                true => matrix.as_tensor().clone(),
                false => matrix.as_detached_tensor(),
            });
            let indices = |of: fn(&(i32, i32)) -> i32| {
                let indices: Vec<u32> = rows.iter().map(|row| of(row) as u32).collect();
                candle_core::Tensor::new(indices, x.device())
            };
            let tokens = indices(|row| row.0)?;
            let weights = weights.index_select(&indices(|row| row.1)?, 0)?;
            let rows = x.index_select(&tokens, 0)?;
            let hidden = (rows.matmul(&gate.t()?)?.silu()? * rows.matmul(&up.t()?)?)?;
            let y = hidden.matmul(&down.t()?)?.broadcast_mul(&weights)?;
            output = output.index_add(&tokens, &y, 0)?;
        }
        Ok(output)
    }

    fn train(
        &self,
        case: &Case,
        [x, weights]: &[Var; 2],
        grad: &candle_core::Tensor,
    ) -> CandleResult<(candle_core::Tensor, candle_core::backprop::GradStore)> {
        let output = self.output(case, x, weights, true)?;
        let grads = (&output * grad)?.sum_all()?.backward()?;
        Ok((output, grads))
    }
}

impl Peer for Candle {
    fn name(&self) -> &'static str {
        "candle"
    }

    fn forward(&self, case: &Case, timer: Timer<'_>) {
        let [x, weights, _] = Self::inputs(case).expect("candle takes these shapes");
        timer(&mut || _ = black_box(self.output(case, &x, &weights, false)));
    }

    fn training(&self, case: &Case, timer: Timer<'_>) {
        let [x, weights, grad] = Self::inputs(case).expect("candle takes these shapes");
        let inputs = [x, weights].map(|input| Var::from_tensor(&input).expect("a copy"));
        timer(&mut || _ = black_box(self.train(case, &inputs, &grad)));
    }

    fn results(&self, case: &Case) -> Vec<Vec<f32>> {
        let results = || -> CandleResult<_> {
            let [x, weights, grad] = Self::inputs(case)?;
            let inputs = [Var::from_tensor(&x)?, Var::from_tensor(&weights)?];
            let (output, grads) = self.train(case, &inputs, &grad)?;
            let [_, _, down] = &self.experts[first_busy(case)];
            [&output, &grads.get(&inputs[0]).cloned().unwrap_or(x), &{
                let down = grads.get(down).cloned();
                down.unwrap_or(output.clone()).t()?
            }]
            .map(|tensor| tensor.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>())
            .into_iter()
            .collect()
        };
        results().expect("candle computes these shapes")
    }
}
