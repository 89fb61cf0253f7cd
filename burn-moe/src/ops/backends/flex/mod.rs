//! Flex, Burn's CPU backend. Work is spread over the rayon pool of the calling thread, which is
//! the rank's own when ranks are threads of one process.

mod activation;
mod buffers;
mod exchange;
mod kernels;
mod matmul;
mod rows;
mod select;
mod swiglu;

use burn::backend::ops::FloatTensorOps;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::backend::{Flex, TensorMetadata};
use burn::tensor::{DType, FloatDType, Shape};
use burn_flex::{FlexTensor, Layout};
use burn_std::Bytes;

use crate::ops::{MoeOps, Pass, Replication, RowExchange, TopK};
use activation::Real;
use buffers::Buffer;
use swiglu::{Groups, Weights};

/// Runs `$body` with `$real` standing for the type that tensors of `$dtype` are computed in: f64,
/// or f32 for everything narrower.
macro_rules! with_real {
    ($dtype:expr, $real:ident => $body:expr) => {
        match $dtype {
            DType::F64 => {
                type $real = f64;
                $body
            }
            _ => {
                type $real = f32;
                $body
            }
        }
    };
}

impl MoeOps for Flex {
    fn select_experts(
        scores: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        top_k: TopK,
    ) -> IntTensor<Self> {
        let [tokens, experts] = dims(&scores);
        let dtype = scores.dtype();
        let ids = with_real!(dtype, T => {
            let (scores, bias) = (operand::<T>(scores), operand::<T>(bias));
            select::select_experts(slice::<T>(&scores), slice::<T>(&bias), experts, top_k)
        });
        FlexTensor::new(
            Bytes::from_elems(ids),
            Layout::contiguous(Shape::new([tokens, top_k.k])),
            DType::I32,
        )
    }

    fn gather_rows(x: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        let ([_, width], dtype) = (dims(&x), x.dtype());
        let index = indices(&index);
        with_real!(dtype, T => {
            let x = operand::<T>(x);
            let out = rows::gather(slice::<T>(&x), width, &index);
            result(out, [index.len(), width], dtype)
        })
    }

    fn scatter_add_rows(
        grad: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let ([_, width], dtype) = (dims(&grad), grad.dtype());
        let index = indices(&index);
        with_real!(dtype, T => {
            let grad = operand::<T>(grad);
            let out = rows::scatter_add(slice::<T>(&grad), width, &index, rows);
            result(out, [rows, width], dtype)
        })
    }

    fn sum_rows(
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let ([_, width], [tokens, k], dtype) = (dims(&y), dims(&index), y.dtype());
        let index = indices(&index);
        with_real!(dtype, T => {
            let (y, weights) = (operand::<T>(y), operand::<T>(weights));
            let out = rows::weighted_sum(slice::<T>(&y), width, &index, slice::<T>(&weights), k);
            result(out, [tokens, width], dtype)
        })
    }

    fn sum_rows_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let ([rows, width], [tokens, k]) = (dims(&y), dims(&index));
        let (dtype, weight_dtype) = (y.dtype(), weights.dtype());
        let index = indices(&index);
        with_real!(dtype, T => {
            let (grad, y) = (operand::<T>(grad), operand::<T>(y));
            let weights = operand::<T>(weights);
            let (dy, dw) = rows::weighted_sum_backward(
                slice::<T>(&grad),
                slice::<T>(&y),
                width,
                &index,
                slice::<T>(&weights),
                k,
            );
            (
                result(dy, [rows, width], dtype),
                result(dw, [tokens, k], weight_dtype),
            )
        })
    }

    fn grouped_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let weights = [gate_up, down, slot_gate_up, slot_down];
        forward(x, weights, offsets, true)
    }

    /// Without the hidden values, which only the backward pass needs.
    fn expert_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        replication: Replication,
    ) -> FloatTensor<Self> {
        let (slot_gate_up, slot_down) = Self::fetch_experts(
            gate_up.clone(),
            down.clone(),
            replication.clone(),
            Pass::Forward,
        );
        let weights = [gate_up, down, slot_gate_up.clone(), slot_down.clone()];
        let (output, _) = forward(x, weights, offsets, false);
        replication.release((slot_gate_up, slot_down));
        output
    }

    fn grouped_swiglu_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        hidden: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    ) {
        let ([rows, d_model], dtype) = (dims(&x), x.dtype());
        let [home, d_hidden, _] = dims(&down);
        let [slots, ..] = dims::<3>(&slot_down);
        let offsets = indices(&offsets);
        with_real!(dtype, T => {
            let [grad, x, hidden] = [grad, x, hidden].map(operand::<T>);
            let [gate_up, down, slot_gate_up, slot_down] =
                [gate_up, down, slot_gate_up, slot_down].map(operand::<T>);
            let groups = Groups::new(
                &offsets,
                Weights { home: slice::<T>(&gate_up), slots: slice::<T>(&slot_gate_up) },
                Weights { home: slice::<T>(&down), slots: slice::<T>(&slot_down) },
                d_model,
                d_hidden,
            );
            let grads = swiglu::backward(
                slice::<T>(&grad),
                slice::<T>(&x),
                slice::<T>(&hidden),
                &groups,
            );
            (
                result(grads.x, [rows, d_model], dtype),
                result(grads.gate_up.0, [home, d_model, 2 * d_hidden], dtype),
                result(grads.down.0, [home, d_hidden, d_model], dtype),
                result(grads.gate_up.1, [slots, d_model, 2 * d_hidden], dtype),
                result(grads.down.1, [slots, d_hidden, d_model], dtype),
            )
        })
    }

    fn fetch_experts(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        replication: Replication,
        pass: Pass,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        exchange::fetch_experts(gate_up, down, &replication, pass)
    }

    fn return_expert_grads(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        replication: Replication,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        exchange::return_grads([gate_up, down], [slot_gate_up, slot_down], &replication)
    }

    fn all_to_all_rows(x: FloatTensor<Self>, exchange: RowExchange) -> FloatTensor<Self> {
        exchange::all_to_all_rows(x, &exchange)
    }
}

/// Output and hidden values of the experts for rows `x`, from the weights `[gate_up, down]` at home
/// and in slots. The hidden values are empty where they are not kept.
fn forward(
    x: FlexTensor,
    weights: [FlexTensor; 4],
    offsets: FlexTensor,
    keep_hidden: bool,
) -> (FlexTensor, FlexTensor) {
    let ([rows, d_model], dtype) = (dims(&x), x.dtype());
    let [_, d_hidden, _] = dims(&weights[1]);
    let offsets = indices(&offsets);
    with_real!(dtype, T => {
        let x = operand::<T>(x);
        let [gate_up, down, slot_gate_up, slot_down] = weights.map(operand::<T>);
        let groups = Groups::new(
            &offsets,
            Weights { home: slice::<T>(&gate_up), slots: slice::<T>(&slot_gate_up) },
            Weights { home: slice::<T>(&down), slots: slice::<T>(&slot_down) },
            d_model,
            d_hidden,
        );
        let (out, hidden) = swiglu::forward(slice::<T>(&x), &groups, keep_hidden);
        let kept = if keep_hidden { rows } else { 0 };
        (
            result(out, [rows, d_model], dtype),
            result(hidden, [kept, 2 * d_hidden], dtype),
        )
    })
}

/// The dimensions of a tensor of rank `D`.
fn dims<const D: usize>(tensor: &FlexTensor) -> [usize; D] {
    tensor.shape().dims()
}

/// The tensor as the kernels read it: contiguous, of the type they compute in.
fn operand<T: Real>(tensor: FlexTensor) -> FlexTensor {
    let tensor = of_dtype(tensor, T::dtype());
    if tensor.as_slice::<T>().is_some() {
        tensor
    } else {
        tensor.to_contiguous()
    }
}

fn slice<T: Real>(operand: &FlexTensor) -> &[T] {
    operand
        .as_slice()
        .expect("operand() made it contiguous and of type T")
}

/// A new tensor of `dtype` from values computed as `T`.
fn result<T: Real, const D: usize>(
    values: Buffer<T>,
    dims: [usize; D],
    dtype: DType,
) -> FlexTensor {
    let tensor = FlexTensor::new(
        values.into_bytes(),
        Layout::contiguous(Shape::new(dims)),
        T::dtype(),
    );
    of_dtype(tensor, dtype)
}

fn of_dtype(tensor: FlexTensor, dtype: DType) -> FlexTensor {
    if tensor.dtype() == dtype {
        tensor
    } else {
        Flex::float_cast(tensor, float_dtype(dtype))
    }
}

fn float_dtype(dtype: DType) -> FloatDType {
    dtype.into()
}

/// Row numbers and offsets, whatever integer type the tensor has.
fn indices(tensor: &FlexTensor) -> Vec<i32> {
    let tensor = tensor.to_contiguous();
    match tensor.dtype() {
        DType::I32 => tensor.as_slice::<i32>().map(<[i32]>::to_vec),
        DType::I64 => tensor
            .as_slice::<i64>()
            .map(|values| values.iter().map(|v| *v as i32).collect()),
        DType::U32 => tensor
            .as_slice::<u32>()
            .map(|values| values.iter().map(|v| *v as i32).collect()),
        dtype => panic!("index tensors are of type i32, i64 or u32, this one is {dtype:?}"),
    }
    .expect("to_contiguous() made it contiguous")
}
