use std::time::Duration;

use bytes::Bytes;

use super::{CommError, Key, Topology, collectives};

/// What a rank uses to talk to the other ranks of its group.
///
/// Engines implement [`send`](Self::send) and [`recv`](Self::recv) and the few methods about themselves. The
/// collectives are provided methods built on those two; every rank of the group must call the same collective with the
/// same key.
///
/// Messages may be received in any order, whatever the order they were sent in. Collectives block, so keys do not make
/// their order free: when one rank calls `a` then `b` and another one `b` then `a`, each waits for the other and both
/// time out. Operations whose order differs between ranks must all be sent before any of them is waited for, with
/// [`send`](Self::send) and [`recv`](Self::recv).
///
/// # Errors
///
/// Every operation fails with [`CommError::RankLost`] when a rank is gone, and with [`CommError::InvalidRank`] when a
/// rank that does not exist is addressed. Operations that wait fail with [`CommError::Timeout`] when a rank stays silent.
pub trait Communicator: Send + Sync {
    /// This rank, from 0 to `size() - 1`.
    fn rank(&self) -> usize;

    /// How many ranks there are.
    fn size(&self) -> usize;

    /// Which ranks share a fast domain, such as a node. Unless the engine knows better, all do.
    fn topology(&self) -> Topology {
        Topology::flat(self.size())
    }

    /// How long an operation waits for another rank before it gives up.
    fn timeout(&self) -> Duration;

    /// Hands `payload` over to rank `to`. Does not block.
    ///
    /// The bytes are never copied inside a process; [`Bytes::from_owner`] shares the memory of a tensor. Messages with
    /// the same receiver and key are delivered in the order in which they were sent. A rank may send to itself.
    /// A message to a rank that has already returned normally is dropped.
    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError>;

    /// Waits for the message `key` of rank `from`.
    ///
    /// What a rank sent before it was lost is still delivered.
    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError>;

    /// Fails when a rank is known to be lost. Waits for nobody; `key` is the operation that the error names.
    fn check(&self, key: Key) -> Result<(), CommError> {
        collectives::check_ranks(self, key)
    }

    /// A way between the devices of the ranks beside this communicator, where there is one.
    #[cfg(any(test, feature = "link"))]
    fn device_link(&self) -> Option<&super::nccl::Link> {
        None
    }

    /// Sends `parts[r]` to each rank `r` and returns what each rank sent here, index = rank.
    ///
    /// Parts may differ in size and be empty. The rank's own part passes through without a copy.
    ///
    /// # Errors
    ///
    /// [`CommError::Mismatch`] when there is not one part for each rank; then nothing has been sent.
    fn all_to_all(&self, key: Key, parts: Vec<Bytes>) -> Result<Vec<Bytes>, CommError> {
        collectives::all_to_all(self, key, parts)
    }

    /// Sends `payload` to every rank and returns the payloads of all, index = rank. Sizes may differ.
    fn all_gather(&self, key: Key, payload: Bytes) -> Result<Vec<Bytes>, CommError> {
        collectives::all_gather(self, key, payload)
    }

    /// Returns the payload of rank `root` on every rank. What other ranks bring is ignored.
    ///
    /// # Errors
    ///
    /// [`CommError::RootWithoutPayload`] on the root when it brings `None`.
    fn broadcast(&self, key: Key, root: usize, payload: Option<Bytes>) -> Result<Bytes, CommError> {
        collectives::broadcast(self, key, root, payload)
    }

    /// Replaces each element of `data` by its sum over all ranks.
    ///
    /// Every element is summed in rank order (`((x0 + x1) + x2) + ...`), so the bits are the same on all ranks and in
    /// all runs. Each rank does `1 / size()` of the additions.
    ///
    /// # Errors
    ///
    /// [`CommError::Mismatch`] when the lengths differ between ranks. `data` is unchanged after any error.
    fn all_reduce_sum_f32(&self, key: Key, data: &mut [f32]) -> Result<(), CommError> {
        collectives::all_reduce_sum(self, key, data)
    }

    /// [`all_reduce_sum_f32`](Self::all_reduce_sum_f32) in double precision.
    fn all_reduce_sum_f64(&self, key: Key, data: &mut [f64]) -> Result<(), CommError> {
        collectives::all_reduce_sum(self, key, data)
    }

    /// Returns when every rank has entered the barrier.
    fn barrier(&self, key: Key) -> Result<(), CommError> {
        collectives::barrier(self, key)
    }

    /// The time of this rank since the group started, without excluded sections: wall time, or the length of the
    /// critical path, as [`Timing`](super::Timing) says.
    fn clock(&self) -> Duration;

    /// Stops this rank's clock until [`resume_clock`](Self::resume_clock). Calls nest.
    ///
    /// Prefer [`exclude`](#method.exclude), which cannot forget to resume.
    fn pause_clock(&self);

    /// Undoes one [`pause_clock`](Self::pause_clock). Without one it does nothing.
    fn resume_clock(&self);
}

impl dyn Communicator + '_ {
    /// Runs `f` without counting its time on this rank's clock: logging, reports, progress bars.
    ///
    /// Messages received inside `f` do not advance the clock either, so ranks can exchange reports. On the critical
    /// path, `f` still runs alone on the machine: it must not disturb what another rank measures.
    pub fn exclude<R>(&self, f: impl FnOnce() -> R) -> R {
        struct Resume<'a>(&'a (dyn Communicator + 'a));
        impl Drop for Resume<'_> {
            fn drop(&mut self) {
                self.0.resume_clock();
            }
        }
        self.pause_clock();
        let _resume = Resume(self);
        f()
    }
}
