use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::{DType, Tensor};

/// Sums the gradients of micro-batches, so that a batch need not fit into memory at once. Sums are
/// f32 where gradients are narrower. With losses that are shares of the whole batch's, the sum is
/// the gradient of the whole batch.
#[derive(Debug, Default)]
pub struct Accumulator {
    sum: GradientsParams,
}

impl Accumulator {
    /// Adds the gradients of one micro-batch.
    pub fn add<M: Module>(&mut self, grads: GradientsParams, module: &M) {
        module.visit(&mut Add {
            sum: &mut self.sum,
            grads,
        });
    }

    /// The sum so far; the next one starts at zero.
    pub fn take(&mut self) -> GradientsParams {
        std::mem::take(&mut self.sum)
    }
}

struct Add<'a> {
    sum: &'a mut GradientsParams,
    grads: GradientsParams,
}

impl ModuleVisitor for Add<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let Some(grad) = self.grads.remove::<D>(param.id) else {
            return;
        };
        let grad = wide(grad);
        let sum = match self.sum.remove::<D>(param.id) {
            Some(sum) => sum + grad,
            None => grad,
        };
        self.sum.register(param.id, sum);
    }
}

/// In f32, unless it is f64.
pub(super) fn wide<const D: usize>(tensor: Tensor<D>) -> Tensor<D> {
    match tensor.dtype() {
        DType::F32 | DType::F64 => tensor,
        _ => tensor.cast(DType::F32),
    }
}
