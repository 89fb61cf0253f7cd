//! CubeCL, all its runtimes: the kernels of `cubecl-kernels` on Burn's tensors. Nothing here waits
//! for the device or for another rank; what talks to other ranks runs on the rank's own thread:
//! over NCCL where there is a link between the ranks' CUDA devices, else in its default bodies,
//! through host memory.

use burn::backend::cubecl::dtype_to_elem_type;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn::tensor::{DType, Shape};
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice, cubecl::client::Client};
use cubecl_kernels::{DeviceTensor, ExpertWeights, KernelError, matmul, router, rows, swiglu};

#[cfg(feature = "link")]
use super::link;
use crate::ops::{MoeOps, TopK};
#[cfg(feature = "link")]
use crate::ops::{Pass, Replication, RowExchange, exchange};

impl MoeOps for CubeBackend {
    fn select_experts(
        scores: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        top_k: TopK,
    ) -> IntTensor<Self> {
        let place = Place::of(&scores);
        let TopK {
            k,
            groups,
            kept_groups,
        } = top_k;
        let top_k = router::TopK {
            k,
            groups,
            kept_groups,
        };
        let [scores, bias] = [scores, bias].map(|values| operand(cast(values, DType::F32)));
        let ids = router::select_experts(&place.client, &scores, &bias, top_k);
        // Burn's integers are signed; ids are the same bits.
        place.result(done(ids), DType::I32)
    }

    fn gather_rows(x: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        let (place, dtype) = (Place::of(&x), x.dtype);
        let (x, index) = (operand(x), indices(index));
        let out = rows::gather_rows(&place.client, &x, &index, x.dtype());
        place.result(done(out), dtype)
    }

    fn scatter_add_rows(
        grad: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        let (place, dtype) = (Place::of(&grad), grad.dtype);
        let out = rows::scatter_add_rows(&place.client, &operand(grad), &indices(index), rows);
        place.result(done(out), dtype)
    }

    fn sum_rows(
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        let (place, dtype) = (Place::of(&y), y.dtype);
        let (index, weights) = (indices(index), operand(weights));
        let out = rows::sum_rows(&place.client, &operand(y), &index, &weights);
        place.result(done(out), dtype)
    }

    fn sum_rows_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (place, dtypes) = (Place::of(&y), (y.dtype, weights.dtype));
        let [grad, y, weights] = [grad, y, weights].map(operand);
        let (dy, dw) = done(rows::sum_rows_backward(
            &place.client,
            &grad,
            &y,
            &indices(index),
            &weights,
        ));
        (place.result(dy, dtypes.0), place.result(dw, dtypes.1))
    }

    fn grouped_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (place, dtype) = (Place::of(&x), x.dtype);
        let (x, offsets) = (operand(x), indices(offsets));
        let gate_up = weights(gate_up, slot_gate_up);
        let down = weights(down, slot_down);
        let client = &place.client;
        let first = done(matmul::grouped_swiglu(client, &x, &gate_up, &offsets));
        let out = matmul::grouped_matmul(client, &first.activation, &down, &offsets);
        (
            place.result(done(out), dtype),
            place.result(first.hidden, dtype),
        )
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
        let (place, dtype) = (Place::of(&x), x.dtype);
        let client = &place.client;
        let [grad, x, hidden] = [grad, x, hidden].map(operand);
        let offsets = indices(offsets);
        let [dgate_up, dslot_gate_up, ddown, dslot_down] =
            [&gate_up, &slot_gate_up, &down, &slot_down].map(|weights| place.zeros_like(weights));
        let gate_up = weights(gate_up, slot_gate_up);
        let down = weights(down, slot_down);

        let dactivation = matmul::grouped_matmul_data_grad(client, &grad, &down, &offsets);
        let dhidden = done(matmul::swiglu_backward(client, &hidden, &done(dactivation)));
        let dx = matmul::grouped_matmul_data_grad(client, &dhidden, &gate_up, &offsets);
        let of_weights = |x: &DeviceTensor, grad: &DeviceTensor, home, slots| {
            let out = done(ExpertWeights::with_replicas(home, slots));
            done(matmul::grouped_matmul_weight_grad(
                client, x, grad, &offsets, &out,
            ));
        };
        of_weights(&x, &dhidden, dgate_up.clone(), dslot_gate_up.clone());
        // Not kept since the forward pass, for `hidden` gives it again.
        let activation = done(swiglu::swiglu(client, &hidden));
        of_weights(&activation, &grad, ddown.clone(), dslot_down.clone());
        (
            place.result(done(dx), dtype),
            place.result(dgate_up, dtype),
            place.result(ddown, dtype),
            place.result(dslot_gate_up, dtype),
            place.result(dslot_down, dtype),
        )
    }

    #[cfg(feature = "link")]
    fn fetch_experts(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        replication: Replication,
        pass: Pass,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        match link::of_replicas(&replication, &gate_up) {
            Some(way) => link::fetch_experts([gate_up, down], &replication, pass, &way),
            None => exchange::fetch_experts_through_host::<Self>(gate_up, down, &replication, pass),
        }
    }

    #[cfg(feature = "link")]
    fn return_expert_grads(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        replication: Replication,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (home, slots) = ([gate_up, down], [slot_gate_up, slot_down]);
        match link::of_replicas(&replication, &home[0]) {
            Some(way) => link::return_expert_grads(home, slots, &replication, &way),
            None => {
                let ([gate_up, down], [slot_gate_up, slot_down]) = (home, slots);
                exchange::return_grads_through_host::<Self>(
                    gate_up,
                    down,
                    slot_gate_up,
                    slot_down,
                    &replication,
                )
            }
        }
    }

    #[cfg(feature = "link")]
    fn all_to_all_rows(x: FloatTensor<Self>, exchange: RowExchange) -> FloatTensor<Self> {
        match link::of(&exchange.comm, &x) {
            Some(way) => link::all_to_all_rows(x, &exchange, &way),
            None => exchange::all_to_all_through_host::<Self>(x, exchange),
        }
    }
}

/// Where tensors lie.
struct Place {
    client: Client,
    device: CubeDevice,
}

impl Place {
    fn of(tensor: &CubeTensor) -> Self {
        Self {
            client: tensor.client.clone(),
            device: tensor.device.clone(),
        }
    }

    /// A kernel's result as a tensor of `dtype`, whose elements are the same bits.
    fn result(&self, tensor: DeviceTensor, dtype: DType) -> CubeTensor {
        let shape = Shape::from(tensor.shape().to_vec());
        CubeTensor::new_contiguous(
            self.client.clone(),
            self.device.clone(),
            shape,
            tensor.into_handle(),
            dtype,
        )
    }

    fn zeros_like(&self, tensor: &CubeTensor) -> DeviceTensor {
        let shape = tensor.meta.shape().to_vec();
        DeviceTensor::zeros(&self.client, shape, dtype_to_elem_type(tensor.dtype))
    }
}

/// The tensor as kernels read it: contiguous.
fn operand(tensor: CubeTensor) -> DeviceTensor {
    let tensor = into_contiguous(tensor);
    let shape = tensor.meta.shape().to_vec();
    done(DeviceTensor::new(
        tensor.handle,
        shape,
        dtype_to_elem_type(tensor.dtype),
    ))
}

/// Row numbers and offsets, in 32 bits whatever integer type the tensor has.
fn indices(tensor: CubeTensor) -> DeviceTensor {
    operand(match tensor.dtype {
        DType::I32 | DType::U32 => tensor,
        _ => cast(tensor, DType::I32),
    })
}

/// Weights of the experts at home and in replica slots.
fn weights(home: CubeTensor, slots: CubeTensor) -> ExpertWeights {
    done(ExpertWeights::with_replicas(operand(home), operand(slots)))
}

/// The result of a kernel. Shapes are checked by the functions of [`ops`](crate::ops); what is left
/// to refuse is an element type that the device has no kernels for.
#[track_caller]
fn done<T>(result: Result<T, KernelError>) -> T {
    result.unwrap_or_else(|error| panic!("{error}"))
}
