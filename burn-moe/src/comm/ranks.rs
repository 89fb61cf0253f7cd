use std::convert::Infallible;
use std::error::Error;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rayon::{ThreadPool, ThreadPoolBuilder};

use super::clock::{Monotonic, TimeSource, Timing, lock};
use super::error::Loss;
use super::local::{LocalCommunicator, World};
use super::{CommError, Communicator, RankOutcome, RanksError, RanksFailure};

/// How [`run_ranks`] runs its ranks. `RankOptions { timeout, ..Default::default() }` changes one thing.
#[derive(Clone, Debug)]
pub struct RankOptions {
    /// How long an operation waits for another rank. With [`Timing::CriticalPath`] it may wait as many times as long
    /// as there are ranks, because the others compute one after another. Default: 60 s.
    pub timeout: Duration,
    /// Threads of each rank's own rayon pool. Default: 1.
    pub threads_per_rank: usize,
    /// Bytes of stack of each of these threads. Default: 16 MiB, for debug builds of deep models.
    pub stack_size: usize,
    /// What the ranks' clocks measure. Default: [`Timing::Wall`].
    pub timing: Timing,
    /// Where the clocks take their time from; `None` is the system's monotonic clock. Timeouts are always real time.
    pub time_source: Option<Arc<dyn TimeSource>>,
}

impl Default for RankOptions {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(60),
            threads_per_rank: 1,
            stack_size: 16 << 20,
            timing: Timing::default(),
            time_source: None,
        }
    }
}

/// Runs `f` as `size` ranks of this process, one thread each, and returns what each rank returned, in rank order.
///
/// `f` may borrow from the caller. It runs inside the rank's own rayon pool, so rayon use inside stays there. To return
/// errors from `f`, use [`try_run_ranks`]: here an `Err` is a value like any other.
///
/// A rank that returns while others still wait for it counts as lost, as does one that panics; the operations of the
/// others then fail at once.
///
/// # Errors
///
/// [`RanksError::Failed`] when a rank panics. It names the first rank that failed for its own reason and lists what
/// the others were in. [`RanksError::Invalid`] when `size` or an option is 0.
///
/// # Panics
///
/// Never: panics of `f` are caught. The panic hook still prints them.
pub fn run_ranks<R: Send>(
    size: usize,
    options: RankOptions,
    f: impl Fn(Arc<dyn Communicator>) -> R + Sync,
) -> Result<Vec<R>, RanksError> {
    try_run_ranks(size, options, |comm| Ok::<R, Infallible>(f(comm)))
}

/// [`run_ranks`] for an `f` that can fail: a rank that returns `Err` counts as lost, with its error as the reason.
///
/// A [`CommError`] that says that another rank was lost is recognised as a consequence, also among the sources of
/// another error.
///
/// # Errors
///
/// Those of [`run_ranks`], and [`RanksError::Failed`] when a rank returns `Err`.
pub fn try_run_ranks<R: Send, E: Into<Box<dyn Error + Send + Sync>>>(
    size: usize,
    options: RankOptions,
    f: impl Fn(Arc<dyn Communicator>) -> Result<R, E> + Sync,
) -> Result<Vec<R>, RanksError> {
    check_options(size, &options)?;
    // All of them before any rank runs: a rank without a thread would keep the others waiting.
    let pools = (0..size)
        .map(|rank| pool(rank, &options))
        .collect::<Result<Vec<_>, _>>()?;

    let source = options
        .time_source
        .unwrap_or_else(|| Arc::new(Monotonic::default()));
    let world = World::new(size, options.timeout, options.timing, source);
    let exits = Mutex::new(Vec::with_capacity(size));
    let results: Vec<Mutex<Option<R>>> = (0..size).map(|_| Mutex::new(None)).collect();

    std::thread::scope(|scope| {
        for (rank, pool) in pools.iter().enumerate() {
            let (world, exits, results, f) = (&world, &exits, &results, &f);
            let run =
                move || pool.install(|| *lock(&results[rank]) = run_rank(world, rank, exits, f));
            let thread = std::thread::Builder::new().stack_size(WAITING_STACK);
            if let Err(error) = thread.spawn_scoped(scope, run) {
                let outcome = RankOutcome::Failed(format!("no thread: {error}"));
                leave(world, rank, outcome, None, exits);
            }
        }
    });

    let exits = exits.into_inner().unwrap_or_else(|e| e.into_inner());
    if let Some(failure) = failure(exits) {
        return Err(RanksError::Failed(Box::new(failure)));
    }
    let results = results.into_iter();
    let results = results.filter_map(|slot| slot.into_inner().unwrap_or_else(|e| e.into_inner()));
    Ok(results.collect())
}

pub(super) fn check_options(size: usize, options: &RankOptions) -> Result<(), RanksError> {
    for (field, value) in [
        ("the number of ranks", size),
        ("threads_per_rank", options.threads_per_rank),
        ("stack_size", options.stack_size),
    ] {
        if value == 0 {
            return Err(RanksError::Invalid {
                field,
                value,
                allowed: "1 or more",
            });
        }
    }
    Ok(())
}

/// For the threads that only wait for a rank's pool; what is computed runs in the pool.
const WAITING_STACK: usize = 256 << 10;

pub(super) fn pool(rank: usize, options: &RankOptions) -> Result<ThreadPool, RanksError> {
    ThreadPoolBuilder::new()
        .num_threads(options.threads_per_rank)
        .stack_size(options.stack_size)
        .thread_name(move |thread| match thread {
            0 => format!("rank {rank}"),
            _ => format!("rank {rank} thread {thread}"),
        })
        .build()
        .map_err(|error| RanksError::Spawn {
            rank,
            message: error.to_string(),
        })
}

/// How a rank ended, and the loss of another rank that it was told of before.
struct Exit {
    rank: usize,
    outcome: RankOutcome,
    consequence_of: Option<CommError>,
}

fn run_rank<R, E: Into<Box<dyn Error + Send + Sync>>>(
    world: &Arc<World>,
    rank: usize,
    exits: &Mutex<Vec<Exit>>,
    f: &(impl Fn(Arc<dyn Communicator>) -> Result<R, E> + Sync),
) -> Option<R> {
    let comm = Arc::new(LocalCommunicator::new(world.clone(), rank));
    // A caught panic may leave what `f` captures in disorder, but the caller learns of the panic.
    let result = catch_unwind(AssertUnwindSafe(|| {
        world.clock.enter(rank);
        f(comm).map_err(|error| Box::new(RankOutcome::of_error(error.into())))
    }));
    let (value, outcome, below) = match result {
        Ok(Ok(value)) => (Some(value), RankOutcome::Returned, None),
        Ok(Err(failed)) => (None, failed.0, failed.1),
        Err(payload) => (None, RankOutcome::of_panic(payload), None),
    };
    leave(world, rank, outcome, below, exits);
    value
}

fn leave(
    world: &World,
    rank: usize,
    outcome: RankOutcome,
    below: Option<CommError>,
    exits: &Mutex<Vec<Exit>>,
) {
    let below = match &outcome {
        RankOutcome::Comm(error) => Some(error.clone()),
        _ => below,
    };
    // A rank may also turn the error into a panic message (`unwrap`): then what the world told it decides.
    let consequence_of = below
        .filter(|error| matches!(error, CommError::RankLost { .. }))
        .or_else(|| world.seen(rank));
    let loss = match (&outcome, &consequence_of) {
        (RankOutcome::Returned, _) => None,
        // The others should hear of the cause.
        (_, Some(CommError::RankLost { lost, reason, .. })) => Some(Loss {
            rank: *lost,
            reason: reason.clone(),
        }),
        _ => Some(Loss {
            rank,
            reason: outcome.to_string(),
        }),
    };
    let exit = Exit {
        rank,
        outcome,
        consequence_of,
    };
    world.leave(rank, loss, || lock(exits).push(exit));
}

/// The cause among `exits`, which are in the order in which the ranks left.
///
/// A rank learns of a loss only after it has been recorded. So the first failure is either a cause itself, or the
/// consequence of a rank that had returned.
fn failure(mut exits: Vec<Exit>) -> Option<RanksFailure> {
    let first = exits
        .iter()
        .find(|exit| exit.outcome != RankOutcome::Returned)?;
    let rank = match first.consequence_of {
        Some(CommError::RankLost { lost, .. }) if exits.iter().any(|exit| exit.rank == lost) => {
            lost
        }
        _ => first.rank,
    };
    exits.sort_by_key(|exit| exit.rank);
    let mut others = Vec::with_capacity(exits.len());
    let mut cause = None;
    for exit in exits {
        // An unwrapped loss says more as what it was.
        let outcome = match (exit.outcome, exit.consequence_of) {
            (RankOutcome::Panicked(message), Some(error)) if message.contains("RankLost {") => {
                RankOutcome::Comm(error)
            }
            (outcome, _) => outcome,
        };
        match exit.rank == rank {
            true => cause = Some(outcome),
            false => others.push((exit.rank, outcome)),
        }
    }
    Some(RanksFailure {
        rank,
        cause: cause?,
        others,
    })
}
