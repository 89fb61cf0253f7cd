//! Data parallel times expert parallel: the model is held several times over, and each of these replicas of the model
//! shares its experts among its ranks.

use std::sync::Arc;

use burn::module::{Module, ModuleVisitor, Param};
use burn::optim::GradientsParams;
use burn::tensor::Tensor;

use super::ParallelError;
use super::gradients::{is_sharded, reduce};
use crate::comm::{CommError, Communicator, Key, Op, split};
use crate::layer::ConfigError;

/// The ranks of a world as a grid: `size = dp * ep`. Rank `r` is member `r % ep` of expert-parallel group `r / ep`, so
/// that groups of consecutive ranks, which launchers place on one node, exchange tokens, and data parallelism goes
/// across.
///
/// Layers are made with an [`ExpertParallel`](super::ExpertParallel) over [`ep`](Self::ep). With a loss that is each
/// rank's share of the whole batch's (of all ranks of the world), [`reduce_gradients`](Self::reduce_gradients) gives the
/// gradient of the whole batch: a sum of shares is the average over data-parallel replicas.
pub struct Mesh {
    world: Arc<dyn Communicator>,
    ep: Arc<dyn Communicator>,
    dp: Arc<dyn Communicator>,
}

impl Mesh {
    /// Divides `world` into groups of `ep` ranks. All ranks call it, once for a communicator.
    ///
    /// # Errors
    ///
    /// When `ep` does not divide the ranks, or a rank is lost or too late.
    pub fn new(world: Arc<dyn Communicator>, ep: usize) -> Result<Self, ParallelError> {
        let (rank, size) = (world.rank(), world.size());
        ConfigError::check(
            ep > 0 && size.is_multiple_of(ep),
            "ep",
            ep,
            format!("a divisor of the {size} ranks"),
        )?;
        let key = |part| Key::new(Op::AllGather, u64::MAX, u32::MAX).with_part(part);
        Ok(Self {
            ep: split(&world, key(0), rank / ep)?,
            dp: split(&world, key(1), rank % ep)?,
            world,
        })
    }

    /// All ranks.
    pub fn world(&self) -> &Arc<dyn Communicator> {
        &self.world
    }

    /// The ranks that share the experts of this rank's replica of the model.
    pub fn ep(&self) -> &Arc<dyn Communicator> {
        &self.ep
    }

    /// The ranks that hold the same experts as this one, of each replica of the model.
    pub fn dp(&self) -> &Arc<dyn Communicator> {
        &self.dp
    }

    /// Adds up gradients: those of the experts over the ranks that hold the same ones, all others over all ranks. Sums in
    /// rank order, so ranks that hold the same parameter get the same bits.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late.
    pub fn reduce_gradients<M: Module>(
        &self,
        grads: GradientsParams,
        module: &M,
        key: Key,
    ) -> Result<GradientsParams, CommError> {
        let grads = reduce(grads, module, &*self.world, key, false)?;
        reduce(grads, module, &*self.dp, key, true)
    }

    /// The norm of the gradients of the whole model, as one vector (Pascanu et al., arXiv 1211.5063, algorithm 1), of
    /// which every parameter is a part once, however many ranks hold it. `grads` are
    /// [reduced](Self::reduce_gradients). Squares are summed in f64, and all ranks get the same bits.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late.
    pub fn gradient_norm<M: Module>(
        &self,
        grads: &GradientsParams,
        module: &M,
        key: Key,
    ) -> Result<f64, CommError> {
        let mut squares = Squares {
            grads,
            inside_sharded: 0,
            experts: [0.0],
            others: 0.0,
        };
        module.visit(&mut squares);
        // One replica of the model has all experts, each once.
        self.ep.all_reduce_sum_f64(key, &mut squares.experts)?;
        Ok((squares.experts[0] + squares.others).sqrt())
    }
}

/// Multiplies all gradients by `max_norm / norm` when `norm`, their [`gradient_norm`](Mesh::gradient_norm), is larger than
/// `max_norm`. A norm that is not finite leaves them as they are.
pub fn clip_by_norm<M: Module>(
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
    experts: [f64; 1],
    others: f64,
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
        let sum: f64 = grad.into_data().iter::<f64>().map(|g| g * g).sum();
        match self.inside_sharded > 0 {
            true => self.experts[0] += sum,
            false => self.others += sum,
        }
    }
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
