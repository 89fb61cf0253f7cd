//! Rows and weights from GPU to GPU, over NCCL (feature `nccl`).
//!
//! One process has one GPU and is one rank. NCCL does not replace the [`Communicator`] that connects the processes (TCP or
//! MPI): [`connect`] puts a [`Link`] beside it. Counts, plans, routes, norms of gradients and the news that a rank is lost
//! go on over the communicator; token rows, replicas' weights and their gradients, and the gradients of parameters that
//! all ranks hold ([`reduce_gradients`](crate::parallel::reduce_gradients)), go from device memory to device memory,
//! without a copy on the host.
//!
//! ```no_run
//! use burn_moe::comm::RankOptions;
//! use burn_moe::comm::nccl::{self, NcclOptions};
//! use burn_moe::comm::tcp::{Launch, try_run_tcp};
//! use burn_moe::parallel::{ExpertParallel, ParallelOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let launch = Launch::from_env()?;
//! try_run_tcp(&launch, launch.world_size, RankOptions::default(), |comm| {
//!     let comm = nccl::connect(comm, nccl::local_device()?, NcclOptions::default())?;
//!     let ep = ExpertParallel::new(comm, ParallelOptions::default())?; // as over any communicator
//!     // ... layers made with `ep` on `Device::cuda(nccl::local_device()?)`
//!     # drop(ep);
//!     Ok::<(), Box<dyn std::error::Error + Send + Sync>>(())
//! })?;
//! # Ok(())
//! # }
//! ```
//!
//! The library is loaded at run time: `libnccl.so.2` or `libnccl.so` where the system looks for libraries
//! (`LD_LIBRARY_PATH`), or the file that `BURN_MOE_NCCL` names; 2.18 or later, the same on all ranks.
//!
//! # Order
//!
//! NCCL matches what is sent and received by order alone. So there are two NCCL communicators, each with a stream of its
//! own: one for rows; one for weights out and gradients back. Within each, all ranks do the same in the same order:
//!
//! - Rows: the exchanges of a layer depend on each other, in both passes, and layers on the ones before (see
//!   [`parallel`](crate::parallel)). Sums of gradients come after them, in rows of equal size: NCCL's own sums would have
//!   other bits.
//! - Weights: those of a layer are posted when its plan is known, before its rows, and waited for before the next layer;
//!   in the backward pass before the rows' gradients; the gradients of replicas follow when the layer's experts are done.
//!
//! What a rank sends and what it receives in one such step is one grouped call, so neither waits behind the other; and as all
//! this is begun by the rank's own thread, all ranks begin what is under way on both in one order, which NCCL asks for.
//!
//! Nothing is taken on trust: each exchange is announced to every rank it concerns, over the communicator, with its key,
//! its place in the order and its bytes, and compared before the result is used. That costs a message of 24 bytes to each
//! of these ranks, on its way while the device works.
//!
//! # Relays
//!
//! An expert with many replicas is sent to some of them, which forward it chunk by chunk as the chunks arrive: the
//! [`Schedule`](crate::balance::Schedule) of the balancer. Chunks are rounds on the stream, in an order that all
//! ranks derive from the plan alone. Gradients come back directly, as they are added in a fixed order.
//!
//! Over a link [`hierarchical`](super::hierarchical) exchanges go directly too: NCCL itself sends through the GPU next to
//! the right network card (PXN).
//!
//! # When something goes wrong
//!
//! No wait is without end: each asks NCCL for errors (`ncclCommGetAsyncError`) and the communicator for lost ranks, and
//! ends after the communicator's timeout. Then this rank's two NCCL communicators are aborted (`ncclCommAbort`), which
//! ends what is under way on the device, and the error names the rank and the collective. The others learn of it over the
//! communicator as of any other loss.
//!
//! # What is synchronised
//!
//! CubeCL gives no access to its streams, so before an exchange the host waits for the device to be done with what was
//! ordered, and after it for the exchange. With lazy execution (feature `fusion`) Burn calls the default operations,
//! which pass through host memory.

// Without the feature, for the tests of all that needs no NCCL.
#![cfg_attr(not(feature = "nccl"), allow(dead_code))]

#[cfg(feature = "nccl")]
mod connect;
#[cfg(feature = "nccl")]
mod cuda;
#[cfg(feature = "nccl")]
mod device;
mod engine;
#[cfg(feature = "nccl")]
mod error;
mod flight;
#[cfg(feature = "nccl")]
mod library;
mod link;
pub(crate) mod plan;
#[cfg(test)]
pub(crate) mod tests;

#[cfg(feature = "nccl")]
pub use connect::{NcclOptions, connect, library_version, local_device};
#[cfg(feature = "nccl")]
pub use error::NcclError;
pub(crate) use flight::Flight;
pub(crate) use link::{Lane, LinkDevice, Span};
pub use link::{Link, LinkTraffic};

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::clock::wrapper_methods;
use super::{CommError, Communicator, Key, Topology};

/// A communicator with a link beside it.
struct Linked {
    inner: Arc<dyn Communicator>,
    link: Link,
}

/// `comm`, over whose ranks' devices there is `link`.
pub(crate) fn with_link(comm: Arc<dyn Communicator>, link: Link) -> Arc<dyn Communicator> {
    Arc::new(Linked { inner: comm, link })
}

impl Communicator for Linked {
    wrapper_methods!(|own| own.inner);

    fn topology(&self) -> Topology {
        self.inner.topology()
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        self.inner.send(to, key, payload)
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.inner.recv(from, key)
    }

    fn device_link(&self) -> Option<&Link> {
        Some(&self.link)
    }

    fn all_to_all(&self, key: Key, parts: Vec<Bytes>) -> Result<Vec<Bytes>, CommError> {
        self.inner.all_to_all(key, parts)
    }

    fn all_gather(&self, key: Key, payload: Bytes) -> Result<Vec<Bytes>, CommError> {
        self.inner.all_gather(key, payload)
    }

    fn broadcast(&self, key: Key, root: usize, payload: Option<Bytes>) -> Result<Bytes, CommError> {
        self.inner.broadcast(key, root, payload)
    }

    fn all_reduce_sum_f32(&self, key: Key, data: &mut [f32]) -> Result<(), CommError> {
        self.inner.all_reduce_sum_f32(key, data)
    }

    fn all_reduce_sum_f64(&self, key: Key, data: &mut [f64]) -> Result<(), CommError> {
        self.inner.all_reduce_sum_f64(key, data)
    }

    fn barrier(&self, key: Key) -> Result<(), CommError> {
        self.inner.barrier(key)
    }
}
