//! The clocks of a world of in-process ranks, and whose turn it is to compute.

use core::fmt::Debug;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What [`Communicator::clock`](super::Communicator::clock) measures.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Timing {
    /// Wall time since the ranks started. Honest only when there is a core for each rank.
    #[default]
    Wall,
    /// The length of the critical path, for more ranks than cores.
    ///
    /// Ranks compute one at a time, alone on the machine, and hand the machine over where they wait for a message. A
    /// rank's clock counts only its own computing; a message carries its sender's clock, and receiving it moves the
    /// receiver's clock up to that. So a step with an all-to-all after each phase takes the sum over phases of the
    /// slowest rank. Messages themselves take no time.
    ///
    /// Ranks must wait for each other in their communicator only: a rank that blocks on another one by other means (a
    /// `std::sync::Barrier`, a channel) keeps the machine and waits for ever.
    CriticalPath,
}

/// Where the clocks take their time from. Tests bring one that they move by hand.
pub trait TimeSource: Debug + Send + Sync {
    /// The time since some fixed moment; never goes backwards.
    fn now(&self) -> Duration;
}

#[derive(Debug)]
pub(super) struct Monotonic(Instant);

impl Default for Monotonic {
    fn default() -> Self {
        Self(Instant::now())
    }
}

impl TimeSource for Monotonic {
    fn now(&self) -> Duration {
        self.0.elapsed()
    }
}

/// The clocks of all ranks of a world.
pub(super) struct WorldClock {
    timing: Timing,
    source: Arc<dyn TimeSource>,
    turn: Turn,
    ranks: Vec<Mutex<RankClock>>,
}

#[derive(Default)]
struct RankClock {
    /// What was counted up to the last stop.
    counted: Duration,
    /// Since when it counts, while it does.
    running_since: Option<Duration>,
    /// Whether the rank may compute: always on the wall clock, during its turn on the critical path.
    computing: bool,
    /// How many excluded sections it is in.
    excluded: usize,
    /// A rank that has left takes no more turns.
    left: bool,
}

impl WorldClock {
    pub(super) fn new(size: usize, timing: Timing, source: Arc<dyn TimeSource>) -> Self {
        let start = source.now();
        let wall = timing == Timing::Wall;
        let rank = || {
            Mutex::new(RankClock {
                running_since: wall.then_some(start),
                computing: wall,
                ..RankClock::default()
            })
        };
        Self {
            timing,
            source,
            turn: Turn::new(size),
            ranks: (0..size).map(|_| rank()).collect(),
        }
    }

    /// How many times as long as usual a rank may have to wait, because others compute before it is served.
    pub(super) fn patience(&self) -> u32 {
        match self.timing {
            Timing::Wall => 1,
            Timing::CriticalPath => u32::try_from(self.ranks.len()).unwrap_or(u32::MAX),
        }
    }

    /// The rank wants to compute. On the critical path, blocks until it is its turn.
    pub(super) fn enter(&self, rank: usize) {
        if self.timing == Timing::Wall || self.rank(rank).left {
            return;
        }
        self.turn.acquire(rank);
        let mut clock = self.rank(rank);
        if clock.left {
            // It left meanwhile, on another of its threads.
            drop(clock);
            return self.turn.release(rank);
        }
        clock.computing = true;
        clock.start(&*self.source);
    }

    /// The rank is about to wait for a message. On the critical path, another one may compute.
    pub(super) fn wait(&self, rank: usize) {
        if self.timing == Timing::Wall {
            return;
        }
        let mut clock = self.rank(rank);
        clock.stop(&*self.source);
        clock.computing = false;
        drop(clock);
        self.turn.release(rank);
    }

    /// The rank computes no more.
    pub(super) fn leave(&self, rank: usize) {
        let mut clock = self.rank(rank);
        clock.stop(&*self.source);
        clock.computing = false;
        clock.left = true;
        drop(clock);
        self.turn.release(rank);
    }

    /// The rank took a message that was sent when its sender's clock was `sent`.
    pub(super) fn received(&self, rank: usize, sent: Duration) {
        if self.timing == Timing::Wall {
            return;
        }
        let mut clock = self.rank(rank);
        if clock.excluded == 0 {
            clock.stop(&*self.source);
            clock.counted = clock.counted.max(sent);
            clock.start(&*self.source);
        }
    }

    pub(super) fn read(&self, rank: usize) -> Duration {
        let clock = self.rank(rank);
        clock.counted + clock.running(&*self.source)
    }

    pub(super) fn pause(&self, rank: usize) {
        let mut clock = self.rank(rank);
        clock.stop(&*self.source);
        clock.excluded += 1;
    }

    pub(super) fn resume(&self, rank: usize) {
        let mut clock = self.rank(rank);
        if clock.excluded > 0 {
            clock.excluded -= 1;
            clock.start(&*self.source);
        }
    }

    /// What a rank's end of a communicator needs of it.
    pub(super) fn of(&self, rank: usize) -> ClockOf<'_> {
        ClockOf { world: self, rank }
    }

    fn rank(&self, rank: usize) -> MutexGuard<'_, RankClock> {
        lock(&self.ranks[rank])
    }
}

/// The clock of one rank, with the methods that a [`Communicator`](super::Communicator) has for it.
pub(super) struct ClockOf<'a> {
    world: &'a WorldClock,
    rank: usize,
}

impl ClockOf<'_> {
    pub(super) fn clock(&self) -> Duration {
        self.world.read(self.rank)
    }

    pub(super) fn pause_clock(&self) {
        self.world.pause(self.rank);
    }

    pub(super) fn resume_clock(&self) {
        self.world.resume(self.rank);
    }
}

/// The clock methods of a communicator that has a [`ClockOf`], or another communicator, to ask.
macro_rules! clock_methods {
    (|$own:ident| $asked:expr) => {
        fn clock(&self) -> Duration {
            let $own = self;
            $asked.clock()
        }

        fn pause_clock(&self) {
            let $own = self;
            $asked.pause_clock();
        }

        fn resume_clock(&self) {
            let $own = self;
            $asked.resume_clock();
        }
    };
}
pub(super) use clock_methods;

/// What a communicator around another one leaves to it: who the ranks are, how long they wait, and clocks.
macro_rules! wrapper_methods {
    (|$own:ident| $asked:expr) => {
        fn rank(&self) -> usize {
            let $own = self;
            $asked.rank()
        }

        fn size(&self) -> usize {
            let $own = self;
            $asked.size()
        }

        fn timeout(&self) -> Duration {
            let $own = self;
            $asked.timeout()
        }

        fn check(&self, key: Key) -> Result<(), CommError> {
            let $own = self;
            $asked.check(key)
        }

        $crate::comm::clock::clock_methods!(|$own| $asked);
    };
}
pub(super) use wrapper_methods;

impl RankClock {
    fn running(&self, source: &dyn TimeSource) -> Duration {
        self.running_since
            .map_or(Duration::ZERO, |since| source.now().saturating_sub(since))
    }

    fn stop(&mut self, source: &dyn TimeSource) {
        self.counted += self.running(source);
        self.running_since = None;
    }

    /// Counts from now on, unless there is a reason not to.
    fn start(&mut self, source: &dyn TimeSource) {
        if self.computing && self.excluded == 0 && self.running_since.is_none() {
            self.running_since = Some(source.now());
        }
    }
}

/// Who may compute. Held by a rank, not by a thread: a rank's threads share its turn.
struct Turn {
    state: Mutex<TurnState>,
    /// One a rank, so that handing over wakes one rank and not all: the others would disturb what it measures.
    granted: Vec<Condvar>,
}

struct TurnState {
    holder: Option<usize>,
    queued: Vec<bool>,
}

impl Turn {
    fn new(size: usize) -> Self {
        Self {
            state: Mutex::new(TurnState {
                holder: None,
                queued: vec![false; size],
            }),
            granted: (0..size).map(|_| Condvar::new()).collect(),
        }
    }

    fn acquire(&self, rank: usize) {
        let mut state = lock(&self.state);
        loop {
            match state.holder {
                Some(holder) if holder == rank => return,
                None => {
                    state.holder = Some(rank);
                    return;
                }
                // Asked again after each wake-up: another thread of the rank may have used up the turn.
                Some(_) => state.queued[rank] = true,
            }
            state = self.granted[rank]
                .wait(state)
                .unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Hands the turn to the next rank in cyclic order that wants it: no rank is passed over more than once a round.
    fn release(&self, rank: usize) {
        let mut state = lock(&self.state);
        if state.holder != Some(rank) {
            return;
        }
        let size = state.queued.len();
        state.holder = (1..=size)
            .map(|distance| (rank + distance) % size)
            .find(|&next| state.queued[next]);
        if let Some(next) = state.holder {
            state.queued[next] = false;
            self.granted[next].notify_all();
        }
    }
}

/// Locks whether or not a holder panicked: every critical section here leaves its data consistent.
pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
