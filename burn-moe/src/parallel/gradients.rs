//! Gradients of the parameters that every rank holds.
#![cfg(feature = "autodiff")]

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};

use super::device_sum::sum_over_ranks;
use crate::comm::{CommError, Communicator, Key};
use crate::ops::reshape;

/// The module whose parameters differ between ranks.
const SHARDED: &str = "GroupedExperts";

/// Adds up, over all ranks, the gradients of all parameters but those of
/// [`GroupedExperts`](crate::layer::GroupedExperts), whose gradients are complete where they live.
/// With a loss that is each rank's share of the whole batch's, the result is the gradient of the
/// whole batch. Sums in rank order, so all ranks get the same bits.
///
/// A parameter without gradient on this rank counts as zero, and gets the sum of the others; one
/// that no rank has a gradient of gets none. A gradient keeps its type: that of the parameter, or
/// f32 where any rank has it in f32, as after accumulation.
///
/// Values travel through host memory, but over a link between devices (feature `nccl`) from one to the other; those of
/// f64 parameters through the host in any case. The sums have the same bits either way.
///
/// # Errors
///
/// When a rank is lost or too late.
pub fn reduce_gradients<M: Module>(
    grads: GradientsParams,
    module: &M,
    comm: &Arc<dyn Communicator>,
    key: Key,
) -> Result<GradientsParams, CommError> {
    reduce(grads, module, comm, key, false)
}

/// Adds up, over all ranks of `comm`, the gradients of the experts (`sharded`), or of everything else.
pub(super) fn reduce<M: Module>(
    grads: GradientsParams,
    module: &M,
    comm: &Arc<dyn Communicator>,
    key: Key,
    sharded: bool,
) -> Result<GradientsParams, CommError> {
    if comm.size() == 1 {
        return Ok(grads);
    }
    let mut collect = Collect {
        grads,
        flat: Vec::new(),
        flat64: Vec::new(),
        on_device: has_link(&**comm).then(Vec::new),
        inside_sharded: 0,
        sharded,
    };
    module.visit(&mut collect);
    let Collect {
        grads,
        mut flat,
        mut flat64,
        on_device,
        ..
    } = collect;
    comm.all_reduce_sum_f32(key, &mut flat)?;
    if !flat64.is_empty() {
        comm.all_reduce_sum_f64(key, &mut flat64)?;
    }
    let on_device = match on_device {
        Some(values) => Some(sum_over_ranks(values, comm, key)?.into_iter()),
        None => None,
    };
    let mut spread = Spread {
        grads,
        flat: &flat,
        flat64: &flat64,
        on_device,
        inside_sharded: 0,
        sharded,
    };
    module.visit(&mut spread);
    Ok(spread.grads)
}

struct Collect {
    grads: GradientsParams,
    /// Of each parameter: how many ranks have a gradient, how many have it in f32 although the
    /// parameter is narrower, then the values, unless they stay on the device.
    flat: Vec<f32>,
    /// Of f64 parameters.
    flat64: Vec<f64>,
    /// The values of a parameter each, where they are summed from device to device.
    on_device: Option<Vec<Tensor<1>>>,
    inside_sharded: usize,
    /// Which parameters: those inside of sharded modules, or the others.
    sharded: bool,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded += usize::from(is_sharded(container));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded -= usize::from(is_sharded(container));
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.inside_sharded > 0) != self.sharded || !param.is_require_grad() {
            return;
        }
        let len = param.lazy_shape().num_elements();
        if len == 0 {
            return;
        }
        let grad = self.grads.remove::<D>(param.id);
        let wide = grad
            .as_ref()
            .is_some_and(|grad| grad.dtype() == DType::F32 && param.val().dtype() != DType::F32);
        self.flat.push(f32::from(u8::from(grad.is_some())));
        self.flat.push(f32::from(u8::from(wide)));
        match (grad, param.val().dtype()) {
            (Some(grad), DType::F64) => self.flat64.extend(grad.into_data().iter::<f64>()),
            (None, DType::F64) => self.flat64.resize(self.flat64.len() + len, 0.0),
            (grad, _) => match (grad.map(|grad| grad.cast(DType::F32)), &mut self.on_device) {
                (Some(grad), Some(values)) => values.push(reshape(grad, [len])),
                (None, Some(values)) => {
                    let device = param.val().inner().device();
                    values.push(Tensor::zeros([len], (&device, DType::F32)));
                }
                (Some(grad), None) => self.flat.extend(grad.into_data().iter::<f32>()),
                (None, None) => self.flat.resize(self.flat.len() + len, 0.0),
            },
        }
    }
}

struct Spread<'a> {
    grads: GradientsParams,
    flat: &'a [f32],
    flat64: &'a [f64],
    on_device: Option<std::vec::IntoIter<Tensor<1>>>,
    inside_sharded: usize,
    sharded: bool,
}

impl ModuleVisitor for Spread<'_> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded += usize::from(is_sharded(container));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded -= usize::from(is_sharded(container));
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if (self.inside_sharded > 0) != self.sharded || !param.is_require_grad() {
            return;
        }
        let value = param.val().inner();
        let len = value.shape().num_elements();
        if len == 0 {
            return;
        }
        let having = self.take(2);
        let (any, wide) = (having[0] > 0.0, having[1] > 0.0);
        let dtype = if wide { DType::F32 } else { value.dtype() };
        let of_data = |data| Tensor::<D>::from_data(data, (&value.device(), dtype));
        let grad = if value.dtype() == DType::F64 {
            let own;
            (own, self.flat64) = self.flat64.split_at(len);
            of_data(TensorData::new(own.to_vec(), value.shape()))
        } else if let Some(on_device) = &mut self.on_device {
            let sum = on_device.next().expect("one sum for each of the values");
            reshape(sum, value.shape()).cast(dtype)
        } else {
            of_data(TensorData::new(self.take(len).to_vec(), value.shape()))
        };
        if any {
            self.grads.register(param.id, grad);
        }
    }
}

impl<'a> Spread<'a> {
    /// The next `len` of the f32 values.
    fn take(&mut self, len: usize) -> &'a [f32] {
        let own;
        (own, self.flat) = self.flat.split_at(len);
        own
    }
}

/// Whether there is a way from device to device.
fn has_link(comm: &dyn Communicator) -> bool {
    #[cfg(any(test, feature = "link"))]
    return comm.device_link().is_some();
    #[cfg(not(any(test, feature = "link")))]
    {
        let _ = comm;
        false
    }
}

/// Whether the parameters of a module differ between ranks.
pub(super) fn is_sharded(container: &str) -> bool {
    container.rsplit(':').next() == Some(SHARDED)
}
