use core::fmt;
use std::panic::resume_unwind;
use std::time::Duration;

use super::Key;

/// Why an operation between ranks failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CommError {
    /// The message did not come in time.
    #[error(
        "rank {rank} waited {after:?} for rank {waiting_for} in {key} and gave up{}",
        Unclaimed(unclaimed)
    )]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The rank whose message is missing.
        waiting_for: usize,
        /// The operation it waited in.
        key: Key,
        /// How long it waited.
        after: Duration,
        /// Some keys of messages that did come from `waiting_for` and that no one has asked for: when ranks disagree
        /// on what comes next, they say what the other rank was doing instead.
        unclaimed: Vec<Key>,
    },
    /// A rank is gone, so the operation cannot complete.
    #[error("rank {lost} was lost ({reason}) while rank {rank} was in {key}")]
    RankLost {
        /// The rank that is gone. When its loss took other ranks with it, this is the first of them, and not
        /// necessarily the one whose message was awaited.
        lost: usize,
        /// How it went: `panicked: message`, `failed: error` or `returned early`.
        reason: String,
        /// The rank that saw the loss.
        rank: usize,
        /// The operation in which it saw the loss.
        key: Key,
    },
    /// Something a rank handed over does not have the size the operation needs.
    #[error("{key}: {what} of rank {from}: expected {expected}, got {got}")]
    Mismatch {
        /// What does not fit, with its unit, for example `bytes of the chunk`.
        what: &'static str,
        /// The size the operation needs.
        expected: usize,
        /// The size it got.
        got: usize,
        /// The rank it came from.
        from: usize,
        /// The operation.
        key: Key,
    },
    /// A rank that does not exist was addressed.
    #[error("{key}: there is no rank {rank}, ranks are 0 to {}", size - 1)]
    InvalidRank {
        /// The rank that was addressed.
        rank: usize,
        /// How many ranks there are.
        size: usize,
        /// The operation.
        key: Key,
    },
    /// The root of a broadcast brought nothing to send.
    #[error("{key}: rank {root} is the root and has no payload to send")]
    RootWithoutPayload {
        /// The root.
        root: usize,
        /// The operation.
        key: Key,
    },
    /// The engine below failed (for engines such as MPI or NCCL).
    #[error("{key}: the {engine} engine failed on rank {rank}: {message}")]
    Engine {
        /// The engine's name.
        engine: &'static str,
        /// The rank on which it failed.
        rank: usize,
        /// The operation.
        key: Key,
        /// The engine's own message.
        message: String,
    },
}

/// Whether there is a rank `rank` among `size`.
pub(super) fn check_rank(rank: usize, size: usize, key: Key) -> Result<(), CommError> {
    if rank < size {
        return Ok(());
    }
    Err(CommError::InvalidRank { rank, size, key })
}

/// That a rank is gone, or took the group down.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Loss {
    pub rank: usize,
    pub reason: String,
}

impl Loss {
    /// Of a rank that has returned normally, for those who still wait for it.
    pub fn returned(rank: usize) -> Self {
        let reason = "returned early".into();
        Self { rank, reason }
    }

    /// What rank `rank` is told in the operation `key`.
    pub fn seen_by(self, rank: usize, key: Key) -> CommError {
        CommError::RankLost {
            lost: self.rank,
            reason: self.reason,
            rank,
            key,
        }
    }
}

struct Unclaimed<'a>(&'a [Key]);

impl fmt::Display for Unclaimed<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (i, key) in self.0.iter().enumerate() {
            f.write_str(if i == 0 { "; it did send " } else { ", " })?;
            write!(f, "{key}")?;
        }
        Ok(())
    }
}

/// Leaves deep tensor code with a typed error, by unwinding.
///
/// Code inside a tensor operation cannot return a `Result`. [`run_ranks`](super::run_ranks) recognises the payload and
/// tells a rank that only saw the loss of another from the rank that caused it.
///
/// # Panics
///
/// Always: unwinds with `error` as payload, without calling the panic hook, so nothing is printed.
pub fn fail(error: CommError) -> ! {
    resume_unwind(Box::new(error))
}
