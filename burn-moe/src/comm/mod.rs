//! Communication between ranks: the [`Communicator`] trait, its in-process engine, and [`run_ranks`].
//!
//! A *rank* is one participant of an expert-parallel group, with its own copy of the model. Ranks exchange reference
//! counted byte buffers, addressed by [`Key`]: the meaning of a message (micro-batch, layer, operation, part) and not
//! its place in a sequence, because the order in which a backward pass visits its branches differs between ranks.
//!
//! Nothing here knows a tensor. With the feature `nccl` a communicator may have a link between the ranks' GPUs beside it.
//! Engines need only [`Communicator::send`] and [`Communicator::recv`]; every collective
//! is a provided method built on those two, which an engine with native collectives overrides.
//!
//! No operation waits for ever: a rank that panics, fails or returns early makes the operations of the others fail at
//! once with [`CommError::RankLost`], and a rank that stays silent makes them fail after the timeout with
//! [`CommError::Timeout`].

mod clock;
mod collectives;
mod communicator;
mod error;
mod group;
mod hierarchical;
mod key;
mod local;
mod meter;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(any(test, feature = "link"))]
pub mod nccl;
mod outcome;
mod ranks;
#[cfg(feature = "tcp")]
pub mod tcp;
mod topology;
#[cfg(any(feature = "mpi", feature = "tcp"))]
mod wire;

#[cfg(test)]
mod tests;

pub use clock::{TimeSource, Timing};
pub use communicator::Communicator;
pub use error::{CommError, fail};
pub use group::split;
pub use hierarchical::{hierarchical, with_topology};
pub use key::{Key, Op};
pub use local::solo;
pub use meter::{Meter, Traffic};
pub use outcome::{RankOutcome, RanksError, RanksFailure};
pub use ranks::{RankOptions, run_ranks, try_run_ranks};
pub use topology::{Topology, TopologyError};
