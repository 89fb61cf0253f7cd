//! Gradients of the parameters that every rank holds.
#![cfg(feature = "autodiff")]

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor, TensorData};

use crate::comm::{CommError, Communicator, Key};

/// The module whose parameters differ between ranks.
const SHARDED: &str = "GroupedExperts";

/// Adds up, over all ranks, the gradients of all parameters but those of
/// [`GroupedExperts`](crate::layer::GroupedExperts), whose gradients are complete where they live.
/// With a loss that is each rank's share of the whole batch's, the result is the gradient of the
/// whole batch. Sums in rank order, so all ranks get the same bits.
///
/// A parameter without gradient on this rank counts as zero, and gets the sum of the others.
///
/// # Errors
///
/// When a rank is lost or too late.
pub fn reduce_gradients<M: Module>(
    grads: GradientsParams,
    module: &M,
    comm: &dyn Communicator,
    key: Key,
) -> Result<GradientsParams, CommError> {
    if comm.size() == 1 {
        return Ok(grads);
    }
    let mut collect = Collect {
        grads,
        flat: Vec::new(),
        inside_sharded: 0,
    };
    module.visit(&mut collect);
    let Collect {
        grads, mut flat, ..
    } = collect;
    comm.all_reduce_sum_f32(key, &mut flat)?;
    let mut spread = Spread {
        grads,
        flat: &flat,
        inside_sharded: 0,
    };
    module.visit(&mut spread);
    Ok(spread.grads)
}

struct Collect {
    grads: GradientsParams,
    flat: Vec<f32>,
    inside_sharded: usize,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded += usize::from(is_sharded(container));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded -= usize::from(is_sharded(container));
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.inside_sharded > 0 || !param.is_require_grad() {
            return;
        }
        match self.grads.remove::<D>(param.id) {
            Some(grad) => {
                let data = grad.cast(DType::F32).into_data();
                self.flat.extend(data.iter::<f32>());
            }
            None => {
                let len = self.flat.len() + param.lazy_shape().num_elements();
                self.flat.resize(len, 0.0);
            }
        }
    }
}

struct Spread<'a> {
    grads: GradientsParams,
    flat: &'a [f32],
    inside_sharded: usize,
}

impl ModuleVisitor for Spread<'_> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded += usize::from(is_sharded(container));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded -= usize::from(is_sharded(container));
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.inside_sharded > 0 || !param.is_require_grad() {
            return;
        }
        let value = param.val().inner();
        let (own, rest) = self.flat.split_at(value.shape().num_elements());
        self.flat = rest;
        let data = TensorData::new(own.to_vec(), value.shape());
        let grad = Tensor::<D>::from_data(data, &value.device()).cast(value.dtype());
        self.grads.register(param.id, grad);
    }
}

fn is_sharded(container: &str) -> bool {
    container.rsplit(':').next() == Some(SHARDED)
}
