//! Clipping by the norm of all gradients together.

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

use super::gradients::is_sharded;
use crate::comm::{CommError, Communicator, Key};
use crate::ops::reshape;

/// The norm of the gradients of the whole model, as one vector (Pascanu et al., arXiv 1211.5063,
/// algorithm 1). Each parameter counts once: those of
/// [`GroupedExperts`](crate::layer::GroupedExperts) on the rank where they live, the others, of
/// which every rank holds a copy, once for all. Call it on all ranks, with what
/// [`reduce_gradients`](super::reduce_gradients) returned; all get the same bits.
///
/// Rows are summed in f32 (f64 in an f64 model), and those sums in f64: the norm does not depend on
/// how many ranks share the experts.
///
/// # Errors
///
/// When a rank is lost or too late.
pub fn gradient_norm<M: Module>(
    grads: &GradientsParams,
    module: &M,
    comm: &dyn Communicator,
    key: Key,
) -> Result<f64, CommError> {
    let mut squares = Squares {
        grads,
        inside_sharded: 0,
        sharded: 0.0,
        replicated: 0.0,
    };
    module.visit(&mut squares);
    let mut sharded = [squares.sharded];
    comm.all_reduce_sum_f64(key, &mut sharded)?;
    Ok((sharded[0] + squares.replicated).sqrt())
}

/// Multiplies all gradients by `max_norm / norm` when `norm`, their [`gradient_norm`], is larger.
/// With a norm that is not finite nothing can be saved: the gradients stay as they are.
pub fn clip_gradients<M: Module>(
    grads: GradientsParams,
    module: &M,
    norm: f64,
    max_norm: f64,
) -> GradientsParams {
    if !norm.is_finite() || norm <= max_norm {
        return grads;
    }
    let mut scale = Scale {
        grads,
        factor: max_norm / norm,
    };
    module.visit(&mut scale);
    scale.grads
}

struct Squares<'a> {
    grads: &'a GradientsParams,
    inside_sharded: usize,
    sharded: f64,
    replicated: f64,
}

impl ModuleVisitor for Squares<'_> {
    fn enter_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded += usize::from(is_sharded(container));
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.inside_sharded -= usize::from(is_sharded(container));
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.get::<D>(param.id) else {
            return;
        };
        let sum = sum_of_squares(grad);
        if self.inside_sharded > 0 {
            self.sharded += sum;
        } else {
            self.replicated += sum;
        }
    }
}

fn sum_of_squares<const D: usize>(grad: Tensor<D>) -> f64 {
    let shape = grad.shape();
    let count = shape.num_elements();
    if count == 0 {
        return 0.0;
    }
    let grad = match grad.dtype() {
        DType::F64 => grad,
        _ => grad.cast(DType::F32),
    };
    let width = shape.last().copied().unwrap_or(1);
    let rows: Tensor<2> = reshape(grad, [count / width, width]).square().sum_dim(1);
    rows.into_data().iter::<f64>().sum()
}

struct Scale {
    grads: GradientsParams,
    factor: f64,
}

impl ModuleVisitor for Scale {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if let Some(grad) = self.grads.remove::<D>(param.id) {
            self.grads.register(param.id, grad * self.factor);
        }
    }
}
