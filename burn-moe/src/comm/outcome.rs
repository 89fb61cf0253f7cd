use core::fmt;
use std::any::Any;
use std::error::Error;

use super::CommError;

/// Why a group of ranks did not complete.
#[derive(Clone, Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RanksError {
    /// An argument or option is out of range; nothing has run.
    #[error("{field} is {value}, allowed is {allowed}")]
    Invalid {
        /// The argument or option.
        field: &'static str,
        /// Its value.
        value: usize,
        /// What is allowed.
        allowed: &'static str,
    },
    /// The operating system gave no thread for a rank; nothing has run.
    #[error("no thread for rank {rank}: {message}")]
    Spawn {
        /// The rank.
        rank: usize,
        /// The system's message.
        message: String,
    },
    /// There are not as many processes as there should be ranks; nothing has run.
    #[error("{found} process(es) were started, needed is one for each of the {expected} ranks")]
    World {
        /// The ranks asked for.
        expected: usize,
        /// The processes found.
        found: usize,
    },
    /// Only ranks that are threads of one process can compute in turns; nothing has run.
    #[error("ranks that are processes have no critical-path timing, allowed is wall")]
    Timing,
    /// The engine that connects the ranks failed outside of any operation.
    #[error("the {engine} engine failed: {message}")]
    Engine {
        /// The engine's name.
        engine: &'static str,
        /// What it said.
        message: String,
    },
    /// A rank failed.
    #[error(transparent)]
    Failed(Box<RanksFailure>),
}

/// Which rank failed first, why, and what became of the others.
#[derive(Clone, Debug)]
pub struct RanksFailure {
    /// The first rank that failed for its own reason, and not because another one did.
    pub rank: usize,
    /// Its reason. [`RankOutcome::Returned`] when it returned while others still waited for it.
    pub cause: RankOutcome,
    /// What became of the other ranks, in rank order. [`CommError::RankLost`] says what a rank waited in.
    pub others: Vec<(usize, RankOutcome)>,
}

/// How a rank ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RankOutcome {
    /// It returned normally.
    Returned,
    /// It panicked with this message.
    Panicked(String),
    /// It returned this error, with its sources.
    Failed(String),
    /// It left with an error of the communicator, returned or thrown by [`fail`](super::fail).
    Comm(CommError),
    /// It was in another process, which told this or did not live to tell: `died: ...`, `gave no sign of life ...`.
    Lost(String),
}

impl fmt::Display for RankOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            RankOutcome::Returned => f.write_str("returned early"),
            RankOutcome::Panicked(message) => write!(f, "panicked: {message}"),
            RankOutcome::Failed(message) => write!(f, "failed: {message}"),
            RankOutcome::Comm(error) => write!(f, "failed: {error}"),
            RankOutcome::Lost(reason) => f.write_str(reason),
        }
    }
}

/// How many of the other ranks a message lists.
const LISTED: usize = 8;

impl fmt::Display for RanksFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "rank {} {}", self.rank, self.cause)?;
        // The others that returned normally have nothing to say.
        let told = (self.others.iter()).filter(|(_, outcome)| *outcome != RankOutcome::Returned);
        for (i, (rank, outcome)) in told.clone().take(LISTED).enumerate() {
            f.write_str(if i == 0 { "; meanwhile " } else { ", " })?;
            match outcome {
                RankOutcome::Comm(CommError::RankLost { key, .. }) => {
                    write!(f, "rank {rank} was in {key}")?
                }
                RankOutcome::Comm(CommError::Timeout {
                    key, waiting_for, ..
                }) => write!(f, "rank {rank} gave up on rank {waiting_for} in {key}")?,
                outcome => write!(f, "rank {rank} {outcome}")?,
            }
        }
        match told.count().saturating_sub(LISTED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

impl Error for RanksFailure {
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match &self.cause {
            RankOutcome::Comm(error) => Some(error),
            _ => None,
        }
    }
}

#[cfg(any(feature = "mpi", feature = "tcp"))]
impl RanksFailure {
    /// What one process knows: rank `rank` has failed with `outcome`, with `below` among its sources, after it was told
    /// of `seen`.
    pub(super) fn seen_by(
        rank: usize,
        outcome: RankOutcome,
        below: Option<CommError>,
        seen: Option<CommError>,
    ) -> Self {
        let below = match &outcome {
            RankOutcome::Comm(error) => Some(error.clone()),
            _ => below,
        };
        // A rank may also turn the error into a panic message (`unwrap`): then what the operation reported decides.
        let consequence = below
            .filter(|error| matches!(error, CommError::RankLost { .. }))
            .or(seen);
        let Some(CommError::RankLost { lost, reason, .. }) = consequence.clone() else {
            return Self {
                rank,
                cause: outcome,
                others: Vec::new(),
            };
        };
        let outcome = match (outcome, consequence) {
            // An unwrapped loss says more as what it was.
            (RankOutcome::Panicked(message), Some(error)) if message.contains("RankLost {") => {
                RankOutcome::Comm(error)
            }
            (outcome, _) => outcome,
        };
        Self {
            rank: lost,
            cause: RankOutcome::Lost(reason),
            others: vec![(rank, outcome)],
        }
    }
}

impl RankOutcome {
    pub(super) fn of_panic(payload: Box<dyn Any + Send>) -> Self {
        let payload = match payload.downcast::<CommError>() {
            Ok(error) => return RankOutcome::Comm(*error),
            Err(payload) => payload,
        };
        RankOutcome::Panicked(match payload.downcast::<String>() {
            Ok(message) => *message,
            Err(payload) => match payload.downcast::<&'static str>() {
                Ok(message) => (*message).to_owned(),
                Err(_) => "(the payload is not a text)".to_owned(),
            },
        })
    }

    /// The outcome, and the communicator's error somewhere below it.
    pub(super) fn of_error(error: Box<dyn Error + Send + Sync>) -> (Self, Option<CommError>) {
        let error = match error.downcast::<CommError>() {
            Ok(error) => return (RankOutcome::Comm((*error).clone()), Some(*error)),
            Err(error) => error,
        };
        let mut message = error.to_string();
        let mut below = None;
        let mut source = error.source();
        while let Some(error) = source {
            let text = error.to_string();
            // Many errors already print their source.
            if !message.contains(&text) {
                message = format!("{message}: {text}");
            }
            below = below.or_else(|| error.downcast_ref::<CommError>().cloned());
            source = error.source();
        }
        (RankOutcome::Failed(message), below)
    }
}
