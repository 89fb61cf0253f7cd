//! How a rank leaves: it has returned and waits for the others, or it has failed and says why.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use super::control::{self, Left};
use super::requests::Failure;
use super::{ENGINE, FAREWELL, MpiCommunicator, Pause, say};
use crate::comm::clock::lock;
use crate::comm::{CommError, RankOutcome, RanksError, RanksFailure};

impl MpiCommunicator {
    /// This rank has returned: waits for the others, then for all messages.
    pub(super) fn returned(&self) -> Result<(), RanksError> {
        let sent = lock(&self.engine).sent.clone();
        self.control.leave(Left::Returned { sent });
        let mut pause = Pause::default();
        // Others may still compute, as long as they give signs of life.
        while !self.control.all_left() {
            pause.wait(self.flush()?);
            self.check_others()?;
        }
        let deadline = Instant::now().checked_add(self.timeout);
        loop {
            let moved = self.flush()?;
            self.check_others()?;
            let engine = lock(&self.engine);
            let missing = (0..self.size).find(|from| match self.control.left(*from) {
                Some(Left::Returned { sent }) if *from != self.rank => {
                    engine.received[*from] < sent[self.rank]
                }
                _ => false,
            });
            if missing.is_none() && !engine.sending() {
                break;
            }
            drop(engine);
            if deadline.is_some_and(|deadline| Instant::now() >= deadline) {
                let what = missing.map_or("messages to other ranks".into(), |from| {
                    format!("messages of rank {from}")
                });
                return Err(RanksError::Engine {
                    engine: ENGINE,
                    message: format!("{what} were still on their way after {:?}", self.timeout),
                });
            }
            pause.wait(moved);
        }
        self.finalize()
    }

    /// Lets messages move, and drops what nobody will ask for.
    fn flush(&self) -> Result<bool, RanksError> {
        let mut engine = lock(&self.engine);
        let moved = engine.progress();
        engine.discard();
        moved.map_err(|Failure(message)| RanksError::Engine {
            engine: ENGINE,
            message,
        })
    }

    fn check_others(&self) -> Result<(), RanksError> {
        match self.control.failed() {
            None => Ok(()),
            Some(loss) => {
                self.farewell();
                linger_at_exit();
                let others = match loss.rank == self.rank {
                    true => Vec::new(),
                    false => vec![(self.rank, RankOutcome::Returned)],
                };
                Err(RanksError::Failed(Box::new(RanksFailure {
                    rank: loss.rank,
                    cause: RankOutcome::Lost(loss.reason),
                    others,
                })))
            }
        }
    }

    /// MPI's own end, in which all ranks take part; if one does not, this process ends after the timeout.
    fn finalize(&self) -> Result<(), RanksError> {
        let (finished, waiting) = std::sync::mpsc::channel::<()>();
        let (rank, timeout) = (self.rank, self.timeout);
        let guard = move || {
            if waiting.recv_timeout(timeout) == Err(std::sync::mpsc::RecvTimeoutError::Timeout) {
                say(&format!(
                    "rank {rank} waited {timeout:?} for MPI to end and gave up"
                ));
                signal_hook::low_level::exit(1);
            }
        };
        let engine = |message| RanksError::Engine {
            engine: ENGINE,
            message,
        };
        control::spawn("finalize".into(), guard).map_err(engine)?;
        // From here on a rank that ends has left in order.
        self.done.store(true, Ordering::SeqCst);
        let result = lock(&self.engine).finalize();
        drop(finished);
        self.control.close();
        result.map_err(|Failure(message)| engine(message))
    }

    /// This rank has failed with `outcome`; `below` is a communicator's error among its sources.
    pub(super) fn has_failed(&self, outcome: RankOutcome, below: Option<CommError>) -> RanksError {
        let failure = RanksFailure::seen_by(self.rank, outcome, below, lock(&self.seen).clone());
        let reason = match &failure.cause {
            RankOutcome::Lost(reason) => reason.clone(),
            cause => cause.to_string(),
        };
        let sent = lock(&self.engine).sent.clone();
        self.control.leave(Left::Failed {
            lost: failure.rank,
            reason,
            sent,
        });
        self.farewell();
        linger_at_exit();
        RanksError::Failed(Box::new(failure))
    }

    /// Stays until the others have left too, but not long.
    fn farewell(&self) {
        let deadline = Instant::now() + FAREWELL.min(self.timeout);
        while !self.control.all_left() && Instant::now() < deadline {
            // What goes wrong now is of no interest any more.
            let _ = lock(&self.engine).progress();
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

/// Keeps this process a moment longer when it ends: `mpirun` sleeps a second before it kills the others, but each
/// process that ends cuts its sleep short, and a rank that has not yet said what it knows would never do.
fn linger_at_exit() {
    extern "C" fn linger() {
        std::thread::sleep(FAREWELL);
    }
    // SAFETY: the handler touches nothing. Where it cannot be registered, the process just ends sooner.
    unsafe { libc::atexit(linger) };
}
