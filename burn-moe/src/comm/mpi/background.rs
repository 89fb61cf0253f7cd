//! What runs beside a rank: signs of life, messages that move while it computes, and its end on `SIGTERM`.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use signal_hook::consts::SIGTERM;

use super::control;
use super::{ENGINE, FAREWELL, MpiCommunicator, say};
use crate::comm::RanksError;
use crate::comm::clock::lock;
use crate::comm::error::Loss;

impl MpiCommunicator {
    /// Starts what runs beside the rank: signs of life, messages that move while it computes, the end on `SIGTERM`.
    pub(super) fn run_in_background(
        self: Arc<Self>,
        terminate: Arc<AtomicBool>,
    ) -> Result<(), RanksError> {
        let engine = |message| RanksError::Engine {
            engine: ENGINE,
            message,
        };
        let comm = self.clone();
        let beats = move || {
            while !comm.done.load(Ordering::SeqCst) {
                comm.control.beat();
                std::thread::sleep(comm.control.interval());
            }
        };
        control::spawn("signs of life".into(), beats).map_err(engine)?;
        let comm = self.clone();
        let ends = move || {
            let mut since: Option<Instant> = None;
            while !comm.done.load(Ordering::SeqCst) {
                let told = terminate.load(Ordering::SeqCst);
                if !told && !comm.unaware_of_loss() {
                    since = None;
                } else if since.get_or_insert_with(Instant::now).elapsed() > FAREWELL {
                    comm.end_now();
                }
                std::thread::sleep(Duration::from_millis(20));
            }
        };
        control::spawn("terminate".into(), ends).map_err(engine)?;
        let comm = self;
        let moves = move || {
            while !comm.done.load(Ordering::SeqCst) {
                let mut engine = lock(&comm.engine);
                // An error is met again, and reported, by the rank's next operation.
                let moved = engine.progress().unwrap_or(false);
                let busy = engine.busy();
                drop(engine);
                std::thread::sleep(match (moved, busy) {
                    (true, _) => Duration::from_micros(20),
                    (_, true) => Duration::from_micros(100),
                    _ => Duration::from_millis(1),
                });
            }
        };
        control::spawn("messages".into(), moves).map_err(engine)
    }

    /// Whether a rank is lost, and this one computes and does not know.
    fn unaware_of_loss(&self) -> bool {
        self.control.failed().is_some()
            && lock(&self.seen).is_none()
            && !self.leaving.load(Ordering::SeqCst)
    }

    /// Ends the process where the rank itself is too busy to.
    fn end_now(&self) {
        let last = lock(&self.last).map_or("no operation yet".into(), |key| key.to_string());
        let rank = self.rank;
        let (code, what) = match self.control.failed() {
            Some(Loss { rank: lost, reason }) => (
                1,
                format!("rank {lost} {reason}; meanwhile rank {rank} was in {last}"),
            ),
            None => (
                128 + SIGTERM,
                format!("rank {rank} was told to end (SIGTERM); it was in {last}"),
            ),
        };
        say(&what);
        signal_hook::low_level::exit(code);
    }
}

/// Notes `SIGTERM` as long as it lives; after that the signal ends the process as it usually does.
pub(super) struct Terminate {
    pub told: Arc<AtomicBool>,
    over: Arc<AtomicBool>,
}

impl Terminate {
    pub fn watch() -> Result<Self, String> {
        let (told, over) = (Arc::default(), Arc::default());
        let failed = |error: std::io::Error| format!("cannot watch for SIGTERM: {error}");
        signal_hook::flag::register_conditional_default(SIGTERM, Arc::clone(&over))
            .map_err(failed)?;
        signal_hook::flag::register(SIGTERM, Arc::clone(&told)).map_err(failed)?;
        Ok(Self { told, over })
    }
}

impl Drop for Terminate {
    fn drop(&mut self) {
        self.over.store(true, Ordering::SeqCst);
    }
}
