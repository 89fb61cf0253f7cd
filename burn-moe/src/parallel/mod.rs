//! Expert parallelism: the experts of a layer live on many ranks, and tokens travel to them.
//!
//! [`ExpertParallel`] is a rank's side of it for one model; layers made with
//! [`MoeConfig::init_parallel`](crate::layer::MoeConfig::init_parallel) share it. A forward pass of
//! a layer counts, plans, replicates, reroutes, dispatches, computes and combines; the backward pass
//! of these operations mirrors it by itself.
//!
//! Every rank must call the layers in the same order, as often as all others, even with no tokens.
//! The order of exchanges is then the same on all ranks, backward too: within a layer each exchange
//! depends on the one before, except that router weights and rows both go out from the layer's
//! input. The weights have passed the router, so they are deeper in the graph and Burn visits them
//! first on every rank.

#[cfg(feature = "autodiff")]
mod clip;
#[cfg(feature = "autodiff")]
mod device_sum;
mod dispatch;
mod forward;
mod gradients;
#[cfg(any(test, feature = "link"))]
pub(crate) mod hops;
#[cfg(feature = "autodiff")]
mod mesh;

use std::fmt;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

#[cfg(feature = "autodiff")]
pub use clip::{clip_gradients, gradient_norm};
pub use forward::LayerStats;
pub(crate) use forward::{ParallelLayer, forward};
#[cfg(feature = "autodiff")]
pub use gradients::reduce_gradients;
#[cfg(feature = "autodiff")]
pub use mesh::Mesh;

use crate::balance::{BalanceError, Placement, planner};
use crate::comm::{CommError, Communicator, Topology, hierarchical, solo};
use crate::layer::ConfigError;
use crate::ops::ReplicaPool;

/// What is done about uneven expert load.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Balance {
    /// Nothing: every token copy goes to its expert's home.
    None,
    /// Replicas by a plan made from the exact load of this micro-batch and layer.
    Exact,
    /// Force-balanced routing (round robin): what a perfect balancer at no cost would reach, for
    /// comparison. Changes what the model computes.
    Ideal,
}

/// The order in which the outputs of a token's experts are added.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum CombineOrder {
    /// Each rank adds the outputs of its experts, the source adds the ranks' sums in rank order:
    /// one row a token and rank travels back.
    #[default]
    Rank,
    /// The source adds the outputs in top-k order: one row a copy travels back, and the result has
    /// the same bits whatever the plan and however many ranks.
    Exact,
}

/// Settings of [`ExpertParallel`].
#[derive(Debug, Clone)]
pub struct ParallelOptions {
    /// What is done about uneven load.
    pub balance: Balance,
    /// Planner of [`Balance::Exact`], one of [`PLANNERS`](crate::balance::PLANNERS).
    pub planner: String,
    /// Replica slots of each rank, shared by all layers.
    pub slots: usize,
    /// Order of additions in combine.
    pub combine: CombineOrder,
    /// Which ranks share a fast domain, if not as the communicator says. Replicas stay inside the domain of their
    /// expert's home, provided that domains are equally many consecutive ranks; otherwise they go anywhere.
    pub topology: Option<Topology>,
    /// Rows between domains travel in one message for each pair of domains and index: first to the rank of the same
    /// index in the target domain, which hands them on inside. Fewer and larger messages on the slow links, the same bits.
    /// Between GPUs that NCCL links, this is left to NCCL.
    pub hierarchical: bool,
    /// Sends the weights of replicas before the tokens they are for, in both passes, so that they are on their way while
    /// tokens travel and home experts compute. Off, they are sent when they are waited for; for comparison.
    pub overlap: bool,
    /// Several models may share a communicator: this one is number `lane` of `lanes`.
    pub lane: u64,
    /// How many models share the communicator.
    pub lanes: u64,
}

impl Default for ParallelOptions {
    fn default() -> Self {
        Self {
            balance: Balance::Exact,
            planner: "exact-fit".into(),
            slots: 2,
            combine: CombineOrder::default(),
            topology: None,
            hierarchical: false,
            overlap: true,
            lane: 0,
            lanes: 1,
        }
    }
}

/// One rank's side of expert parallelism for one model.
pub struct ExpertParallel {
    comm: Arc<dyn Communicator>,
    /// What rows travel over: `comm`, or a way over it that respects the domains.
    rows: Arc<dyn Communicator>,
    options: ParallelOptions,
    /// Ranks of each domain.
    ranks_per_domain: usize,
    pool: Arc<ReplicaPool>,
    stats: Mutex<Vec<LayerStats>>,
}

impl ExpertParallel {
    /// # Errors
    ///
    /// When the planner is unknown, the lane is not below the number of lanes, or the topology is of another number of
    /// ranks.
    pub fn new(
        comm: Arc<dyn Communicator>,
        options: ParallelOptions,
    ) -> Result<Arc<Self>, ParallelError> {
        planner(&options.planner)?;
        ConfigError::check(
            options.lane < options.lanes,
            "lane",
            options.lane,
            format!("less than lanes ({})", options.lanes),
        )?;
        let topology = (options.topology.clone()).unwrap_or_else(|| comm.topology());
        ConfigError::check(
            topology.ranks() == comm.size(),
            "topology",
            format!("one of {} ranks", topology.ranks()),
            format!("one of the communicator's {} ranks", comm.size()),
        )?;
        let rows = match options.hierarchical && topology.domains() > 1 {
            true => hierarchical(comm.clone(), topology.clone()),
            false => comm.clone(),
        };
        Ok(Arc::new(Self {
            ranks_per_domain: topology.ranks_per_domain().unwrap_or(comm.size()),
            comm,
            rows,
            options,
            pool: Arc::default(),
            stats: Mutex::default(),
        }))
    }

    /// A single rank that holds all experts.
    pub fn solo(options: ParallelOptions) -> Result<Arc<Self>, ParallelError> {
        Self::new(solo(), options)
    }

    /// The communicator of this rank.
    pub fn comm(&self) -> &Arc<dyn Communicator> {
        &self.comm
    }

    /// What rows of tokens travel over.
    pub(crate) fn rows(&self) -> &Arc<dyn Communicator> {
        &self.rows
    }

    /// The settings.
    pub fn options(&self) -> &ParallelOptions {
        &self.options
    }

    /// Global ids of the experts that live on this rank.
    ///
    /// # Errors
    ///
    /// When the ranks do not divide the experts.
    pub fn local_experts(&self, num_experts: usize) -> Result<Range<usize>, ConfigError> {
        local_experts(&*self.comm, num_experts)
    }

    /// Most bytes of replica weights that this rank held at once.
    pub fn replica_bytes(&self) -> usize {
        self.pool.peak_bytes()
    }

    /// What the layers did since the last call, in order.
    pub fn take_stats(&self) -> Vec<LayerStats> {
        std::mem::take(&mut self.stats.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn record(&self, stats: LayerStats) {
        self.stats
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push(stats);
    }

    fn placement(&self, num_experts: usize) -> Placement {
        Placement::contiguous(num_experts, self.comm.size())
            .with_domains(self.ranks_per_domain)
            .expect("a domain has at least one rank")
    }
}

/// The experts of this rank when the ranks of `comm` share all.
fn local_experts(comm: &dyn Communicator, num_experts: usize) -> Result<Range<usize>, ConfigError> {
    let (rank, ranks) = (comm.rank(), comm.size());
    ConfigError::check(
        num_experts.is_multiple_of(ranks),
        "ranks",
        ranks,
        format!("a divisor of num_experts ({num_experts})"),
    )?;
    let local = num_experts / ranks;
    Ok(rank * local..(rank + 1) * local)
}

impl fmt::Debug for ExpertParallel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExpertParallel")
            .field("rank", &self.comm.rank())
            .field("size", &self.comm.size())
            .field("options", &self.options)
            .finish()
    }
}

/// Settings of expert parallelism that cannot work.
#[derive(Debug, thiserror::Error)]
pub enum ParallelError {
    /// A field has a value that is not allowed.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The balancer refuses its settings.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// A rank was lost or too late while the groups were formed.
    #[error(transparent)]
    Comm(#[from] CommError),
}
