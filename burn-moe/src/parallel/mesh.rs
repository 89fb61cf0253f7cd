//! Data parallel times expert parallel: the model is held several times over, and each of these replicas of the model
//! shares its experts among its ranks.

use std::ops::Range;
use std::sync::Arc;

use burn::module::Module;
use burn::optim::GradientsParams;

use super::gradients::reduce;
use super::{ParallelError, local_experts};
use crate::comm::{CommError, Communicator, Key, Op, split};
use crate::layer::ConfigError;

/// The ranks of a world as a grid: `size = dp * ep`. Rank `r` is member `r % ep` of expert-parallel group `r / ep`, so
/// that groups of consecutive ranks, which launchers place on one node, exchange tokens, and data parallelism goes
/// across.
///
/// Layers are made with an [`ExpertParallel`](super::ExpertParallel) over [`ep`](Self::ep). With a loss that is each
/// rank's share of the whole batch's (of all ranks of the world), [`reduce_gradients`](Self::reduce_gradients) gives the
/// gradient of the whole batch: a sum of shares is the average over data-parallel replicas. Plans, imbalance and the
/// capacity of experts are each group's own; selection biases of routers move by the load of all groups when
/// [`Moe::take_load`](crate::layer::Moe::take_load) is summed over [`dp`](Self::dp).
pub struct Mesh {
    world: Arc<dyn Communicator>,
    ep: Arc<dyn Communicator>,
    dp: Arc<dyn Communicator>,
}

impl Mesh {
    /// Divides `world` into groups of `ep` ranks. All ranks call it, once for a communicator. A group of all ranks is
    /// `world` itself, with all that it can do.
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
        let group = |part, members, color| match members == size {
            true => Ok(world.clone()),
            false => {
                let key = Key::new(Op::AllGather, u64::MAX, u32::MAX).with_part(part);
                split(&world, key, color)
            }
        };
        Ok(Self {
            ep: group(0, ep, rank / ep)?,
            dp: group(1, size / ep, rank % ep)?,
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

    /// The ranks that hold the same experts as this one, of each replica of the model. This rank's number among them is
    /// that of its replica of the model.
    pub fn dp(&self) -> &Arc<dyn Communicator> {
        &self.dp
    }

    /// Global ids of the experts that live on this rank.
    ///
    /// # Errors
    ///
    /// When the ranks of a group do not divide the experts.
    pub fn local_experts(&self, num_experts: usize) -> Result<Range<usize>, ConfigError> {
        local_experts(&*self.ep, num_experts)
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
        let grads = reduce(grads, module, &self.world, key, false)?;
        reduce(grads, module, &self.dp, key, true)
    }

    /// The norm of the gradients of the whole model, as one vector (Pascanu et al., arXiv 1211.5063, algorithm 1), of
    /// which every parameter is a part once, however many ranks hold it. `grads` are
    /// [reduced](Self::reduce_gradients). All ranks get the same bits; [`clip_gradients`](super::clip_gradients) takes it.
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
        // One replica of the model has all experts, each once.
        super::gradient_norm(grads, module, &*self.ep, key)
    }
}
