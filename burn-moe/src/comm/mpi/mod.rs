//! The engine for ranks that are processes, over MPI (feature `mpi`).
//!
//! # Launching
//!
//! ```sh
//! mpirun -n 4 target/release/train --comm mpi --ranks 4
//! ```
//!
//! `mpirun` of OpenMPI 4.1 needs no option for the case that a process dies: it ends the others two seconds later, and by
//! then they have said which rank was lost and what they were in, because they watch each other by themselves (a TCP
//! connection of each process to rank 0, on the loopback interface when all are on one machine). Do not use
//! `--enable-recovery`: with it `mpirun` reports success when processes die, and leaves stopped ones alone.
//!
//! Processes that share cores want `--oversubscribe` and `--bind-to none`; root wants `--allow-run-as-root`. OpenMPI's
//! direct copy between processes of a machine is turned off (`OMPI_MCA_btl_vader_single_copy_mechanism=none`, unless
//! that variable is set), because a copy from a process that has just died would abort the survivor without a word.

mod background;
mod control;
mod engine;
mod leave;
mod requests;
mod start;

use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::clock::{Monotonic, Timing, WorldClock, clock_methods, lock};
use super::error::{Loss, check_rank};
use super::ranks::{check_options, pool};
use super::{CommError, Communicator, Key, RankOptions, RankOutcome, RanksError, Topology};
use background::Terminate;
use control::{Control, Left};
use engine::Engine;
use requests::Failure;
use start::Started;

/// Runs `f` as this process's rank of the MPI world of `size` processes, and returns what it returned here.
///
/// Every process of the world calls this once, from its main thread, before other threads run. `f` runs inside the rank's
/// own rayon pool. Messages also move while `f` computes, on a thread of the communicator. Several threads of `f` may
/// use the communicator at once.
///
/// When this returns `Ok`, all ranks have returned and every message has arrived. When it returns an error, MPI is not
/// finalised, as missing ranks would have to take part in that: report it and end the process with an exit code other
/// than 0; `mpirun` then ends what is left.
///
/// Where `f` computes for so long that it does not notice a loss within half a second, the process ends with a line on
/// the standard error that names the lost rank and this rank's last operation. So it does half a second after `SIGTERM`,
/// which `mpirun` sends before it kills.
///
/// # Errors
///
/// - [`RanksError::World`] when the world has not `size` processes, [`RanksError::Timing`] unless the clocks are to show
///   wall time, [`RanksError::Invalid`] when an option is 0, [`RanksError::Engine`] when MPI or the connections between
///   the processes fail.
/// - [`RanksError::Failed`] when this rank fails or another one is lost: it panics, returns an error, its process ends, or
///   gives no sign of life for the timeout.
///
/// # Panics
///
/// Never: panics of `f` are caught. The panic hook still prints them.
pub fn try_run_mpi<R: Send, E: Into<Box<dyn Error + Send + Sync>>>(
    size: usize,
    options: RankOptions,
    f: impl FnOnce(Arc<dyn Communicator>) -> Result<R, E> + Send,
) -> Result<R, RanksError> {
    check_options(size, &options)?;
    if options.timing != Timing::Wall {
        return Err(RanksError::Timing);
    }
    const DIRECT_COPY: &str = "OMPI_MCA_btl_vader_single_copy_mechanism";
    if std::env::var_os(DIRECT_COPY).is_none() {
        // SAFETY: as documented, no other thread runs that could read the environment at the same time.
        unsafe { std::env::set_var(DIRECT_COPY, "none") };
    }
    let engine = |message: String| RanksError::Engine {
        engine: ENGINE,
        message,
    };
    let Started {
        engine: mut mpi,
        nodes,
        host,
    } = start::start().map_err(|Failure(message)| engine(message))?;
    let (rank, found) = (mpi.rank, mpi.size);
    if found != size {
        // All ranks find the same, so all take part.
        mpi.finalize().map_err(|Failure(message)| engine(message))?;
        return Err(RanksError::World {
            expected: size,
            found,
        });
    }
    let pool = pool(rank, &options)?;
    let one_node = nodes.iter().all(|node| *node == 0);
    let control = Control::connect(rank, size, options.timeout, &host, one_node, |text| {
        let shared = mpi.broadcast::<512>(text);
        shared.map_err(|Failure(message)| message)
    })
    .map_err(engine)?;
    let source = (options.time_source).unwrap_or_else(|| Arc::new(Monotonic::default()));
    let comm = Arc::new(MpiCommunicator {
        rank,
        size,
        timeout: options.timeout,
        topology: Topology::from_domains(nodes),
        clock: WorldClock::new(1, Timing::Wall, source),
        engine: Mutex::new(mpi),
        control,
        last: Mutex::new(None),
        seen: Mutex::new(None),
        leaving: AtomicBool::new(false),
        done: AtomicBool::new(false),
    });
    let term = Terminate::watch().map_err(engine)?;
    comm.clone().run_in_background(term.told.clone())?;
    // A caught panic may leave what `f` captures in disorder, but the caller learns of the panic.
    let shared: Arc<dyn Communicator> = comm.clone();
    let result = pool.install(|| {
        catch_unwind(AssertUnwindSafe(|| {
            f(shared).map_err(|error| Box::new(RankOutcome::of_error(error.into())))
        }))
    });
    comm.leaving.store(true, Ordering::SeqCst);
    let result = match result {
        Ok(Ok(value)) => comm.returned().map(|()| value),
        Ok(Err(failed)) => Err(comm.has_failed(failed.0, failed.1)),
        Err(payload) => Err(comm.has_failed(RankOutcome::of_panic(payload), None)),
    };
    comm.done.store(true, Ordering::SeqCst);
    result
}

const ENGINE: &str = "MPI";

/// One rank's end of the world of processes.
struct MpiCommunicator {
    rank: usize,
    size: usize,
    timeout: Duration,
    topology: Topology,
    clock: WorldClock,
    engine: Mutex<Engine>,
    control: Arc<Control>,
    /// What this rank was in last, for whoever must report without it.
    last: Mutex<Option<Key>>,
    /// The last loss that an operation reported: tells a rank that fails because of it from one that fails on its own.
    seen: Mutex<Option<CommError>>,
    /// `f` has returned or failed.
    leaving: AtomicBool,
    /// Nothing more happens here.
    done: AtomicBool,
}

impl Communicator for MpiCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn topology(&self) -> Topology {
        self.topology.clone()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        self.enter(to, key)?;
        if let Some(loss) = self.control.failed() {
            return Err(self.lost(loss, key));
        }
        if let Some(Left::Returned { .. }) = self.control.left(to) {
            return Ok(());
        }
        let mut engine = lock(&self.engine);
        engine
            .send(to, key, payload)
            .and_then(|()| engine.progress())
            .map_err(|failure| self.engine_failed(failure, key))?;
        Ok(())
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.enter(from, key)?;
        let deadline = Instant::now().checked_add(self.timeout);
        let mut pause = Pause::default();
        // When the last message arrived after a loss had been noticed.
        let mut quiet_since = None;
        loop {
            let mut engine = lock(&self.engine);
            let mut payload = engine.take(from, key);
            let mut moved = false;
            if payload.is_none() {
                moved = engine
                    .progress()
                    .map_err(|failure| self.engine_failed(failure, key))?;
                payload = engine.take(from, key);
            }
            let received = engine.received[from];
            drop(engine);
            if let Some(payload) = payload {
                return Ok(payload);
            }
            let now = Instant::now();
            if let Some((loss, on_the_way)) = self.loss(from) {
                // What was sent before is still delivered.
                let quiet = now - *quiet_since.get_or_insert(now);
                if moved {
                    quiet_since = Some(now);
                }
                let (sent, patience) = match on_the_way {
                    OnTheWay::Unknown => (None, UNANNOUNCED),
                    OnTheWay::OfFailed { sent } => (Some(sent), ANNOUNCED),
                    OnTheWay::OfReturned { sent } => (Some(sent), self.timeout),
                };
                let arrived = sent.is_some_and(|sent| received >= sent);
                if arrived || quiet >= patience.min(self.timeout) {
                    return Err(self.lost(loss, key));
                }
            } else if deadline.is_some_and(|deadline| now >= deadline) {
                if let Some(loss) = self.control.suspect() {
                    return Err(self.lost(loss, key));
                }
                return Err(CommError::Timeout {
                    rank: self.rank,
                    waiting_for: from,
                    key,
                    after: self.timeout,
                    unclaimed: lock(&self.engine).unclaimed(from),
                });
            }
            pause.wait(moved);
        }
    }

    clock_methods!(|own| own.clock.of(0));
}

/// What may still come from a rank when one has left.
enum OnTheWay {
    /// It has not said.
    Unknown,
    /// So many messages in all, from a rank that has failed, or left when another had: its process does not stay for long.
    OfFailed { sent: u64 },
    /// So many messages in all, from a rank that has returned: its process stays until they have arrived, which takes long
    /// when they are large.
    OfReturned { sent: u64 },
}

/// How long messages of a rank that has failed may be on their way: that it announced, and that it did not live to announce.
const ANNOUNCED: Duration = Duration::from_secs(1);
const UNANNOUNCED: Duration = Duration::from_millis(30);

/// How long a rank that failed stays, for its messages and its reason to reach the others.
const FAREWELL: Duration = Duration::from_millis(500);

impl MpiCommunicator {
    fn enter(&self, peer: usize, key: Key) -> Result<(), CommError> {
        check_rank(peer, self.size, key)?;
        *lock(&self.last) = Some(key);
        Ok(())
    }

    /// Why a message of rank `from` may not come, unless it is on its way.
    fn loss(&self, from: usize) -> Option<(Loss, OnTheWay)> {
        let left = self.control.left(from);
        let sent = left.as_ref().and_then(|left| match left {
            Left::Returned { sent } | Left::Failed { sent, .. } => sent.get(self.rank).copied(),
        });
        if let Some(loss) = self.control.failed() {
            let on_the_way = sent.map_or(OnTheWay::Unknown, |sent| OnTheWay::OfFailed { sent });
            return Some((loss, on_the_way));
        }
        match left {
            Some(Left::Returned { .. }) => {
                let on_the_way =
                    sent.map_or(OnTheWay::Unknown, |sent| OnTheWay::OfReturned { sent });
                Some((Loss::returned(from), on_the_way))
            }
            _ => None,
        }
    }

    fn lost(&self, loss: Loss, key: Key) -> CommError {
        let error = loss.seen_by(self.rank, key);
        *lock(&self.seen) = Some(error.clone());
        error
    }

    fn engine_failed(&self, Failure(message): Failure, key: Key) -> CommError {
        CommError::Engine {
            engine: ENGINE,
            rank: self.rank,
            key,
            message,
        }
    }
}

/// A line on the standard error, in one piece: all processes share it.
fn say(error: &str) {
    use std::io::Write;
    // Where nobody listens, the exit code has to do.
    let _ = std::io::stderr().write_all(format!("error: {error}\n").as_bytes());
}

/// Waits between two looks: hardly when something has just moved, longer the longer nothing does.
#[derive(Default)]
struct Pause {
    idle: u32,
}

impl Pause {
    fn wait(&mut self, moved: bool) {
        self.idle = if moved {
            0
        } else {
            self.idle.saturating_add(1)
        };
        match self.idle {
            0..100 => std::thread::yield_now(),
            // 20 us, doubling every 16 looks up to 640 us.
            idle => {
                let doubled = ((idle - 100) / 16).min(5);
                std::thread::sleep(Duration::from_micros(20 << doubled));
            }
        }
    }
}
