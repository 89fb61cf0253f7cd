//! Ranks for tests, whatever connects them: threads, unless this process is one of an MPI world.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use burn_moe::comm::{Communicator, Key, Op, RankOptions, run_ranks, split};
use bytes::Bytes;
use serde::Serialize;
use serde::de::DeserializeOwned;

static WORLD: OnceLock<Arc<dyn Communicator>> = OnceLock::new();

/// From now on, [`run`] uses the ranks of this world, and is called by all of them.
///
/// # Panics
///
/// When it has been called before.
pub fn use_world(comm: Arc<dyn Communicator>) {
    assert!(WORLD.set(comm).is_ok(), "there is one world a process");
}

/// Those of `sizes` that [`run`] can run.
pub fn sizes(sizes: &[usize]) -> Vec<usize> {
    let most = WORLD.get().map_or(usize::MAX, |world| world.size());
    sizes.iter().copied().filter(|size| *size <= most).collect()
}

/// What `f` returns on each of `size` ranks, in order of rank.
///
/// Over processes the ranks are the first of the world, as a group of their own, and every process gets the results of
/// all. One rank alone is always a thread, so that what tests compare with has seen no engine.
///
/// # Panics
///
/// When a rank fails.
pub fn run<R: Send + Serialize + DeserializeOwned>(
    size: usize,
    options: RankOptions,
    f: impl Fn(Arc<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    static RUNS: AtomicU64 = AtomicU64::new(0);
    let world = match WORLD.get() {
        Some(world) if size > 1 => world,
        _ => return run_ranks(size, options, f).expect("all ranks"),
    };
    assert!(size <= world.size(), "{size} ranks of {}", world.size());
    // All processes run the same tests in the same order.
    let run = RUNS.fetch_add(1, Ordering::SeqCst);
    let member = world.rank() < size;
    let key = |op| Key::new(op, run, u32::MAX);
    let group = split(world, key(Op::Custom(0)), usize::from(member)).expect("the world");
    let result = match member {
        true => postcard::to_stdvec(&f(group)).expect("results are plain data"),
        false => Vec::new(),
    };
    let all = world.all_gather(key(Op::AllGather), Bytes::from(result));
    let all = all.expect("the world").into_iter().take(size);
    all.map(|bytes| postcard::from_bytes(&bytes).expect("what the rank wrote"))
        .collect()
}
