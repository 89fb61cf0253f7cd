//! The in-process engine: ranks are threads, a message is a hand-over of a reference.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::clock::{Monotonic, TimeSource, Timing, WorldClock, clock_methods, lock};
use super::error::{Loss, check_rank};
use super::{CommError, Communicator, Key};

/// A group of one: what a layer uses when there is no expert parallelism.
///
/// Its clock is wall time from this call on. Waiting for a message that it has not sent to itself ends in
/// [`CommError::Timeout`] at once.
pub fn solo() -> Arc<dyn Communicator> {
    let source = Arc::new(Monotonic::default());
    let world = World::new(1, Duration::ZERO, Timing::Wall, source);
    Arc::new(LocalCommunicator { world, rank: 0 })
}

/// One rank's end of a [`World`].
pub(super) struct LocalCommunicator {
    world: Arc<World>,
    rank: usize,
}

impl LocalCommunicator {
    pub(super) fn new(world: Arc<World>, rank: usize) -> Self {
        Self { world, rank }
    }

    fn check(&self, peer: usize, key: Key) -> Result<&Mailbox, CommError> {
        check_rank(peer, self.size(), key)?;
        Ok(&self.world.mailboxes[peer])
    }

    fn lost(&self, loss: Loss, key: Key) -> CommError {
        let error = loss.seen_by(self.rank, key);
        *lock(&self.world.seen[self.rank]) = Some(error.clone());
        error
    }

    /// Waits without the machine, which the caller has given away.
    fn wait(&self, from: usize, key: Key) -> Result<Message, CommError> {
        let limit = (self.world.timeout).saturating_mul(self.world.clock.patience());
        let deadline = Instant::now().checked_add(limit);
        let mailbox = &self.world.mailboxes[self.rank];
        let mut state = lock(&mailbox.state);
        state.awaited.push((from, key));
        let result = loop {
            if let Some(message) = state.take(from, key) {
                break Ok(message);
            }
            if let Some(loss) = state.loss(from) {
                break Err(self.lost(loss, key));
            }
            state = match deadline {
                // Too far away for the clock to tell.
                None => mailbox
                    .changed
                    .wait(state)
                    .unwrap_or_else(PoisonError::into_inner),
                Some(deadline) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        break Err(CommError::Timeout {
                            rank: self.rank,
                            waiting_for: from,
                            key,
                            after: limit,
                            unclaimed: state.unclaimed(from),
                        });
                    }
                    let woken = mailbox.changed.wait_timeout(state, left);
                    woken.unwrap_or_else(PoisonError::into_inner).0
                }
            };
        };
        if let Some(at) = state.awaited.iter().position(|it| *it == (from, key)) {
            state.awaited.swap_remove(at);
        }
        result
    }
}

impl Communicator for LocalCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.world.mailboxes.len()
    }

    fn timeout(&self) -> Duration {
        self.world.timeout
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        let mailbox = self.check(to, key)?;
        let sent = self.world.clock.read(self.rank);
        let mut state = lock(&mailbox.state);
        if let Some(loss) = state.failed.clone() {
            drop(state);
            return Err(self.lost(loss, key));
        }
        if state.returned[to] {
            return Ok(());
        }
        let message = Message { payload, sent };
        let queue = state.queues.entry((self.rank, key)).or_default();
        queue.push_back(message);
        // Waking a rank for what it does not wait for would only disturb the ranks that compute.
        if state.awaited.contains(&(self.rank, key)) {
            mailbox.changed.notify_all();
        }
        Ok(())
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.check(from, key)?;
        let clock = &self.world.clock;
        let arrived = lock(&self.world.mailboxes[self.rank].state).take(from, key);
        let message = match arrived {
            Some(message) => message,
            None => {
                clock.wait(self.rank);
                // After an error the rank goes on without the machine: it must report at once and not after whoever
                // computes now, and its clock means nothing any more.
                let message = self.wait(from, key)?;
                clock.enter(self.rank);
                message
            }
        };
        clock.received(self.rank, message.sent);
        Ok(message.payload)
    }

    clock_methods!(|own| own.world.clock.of(own.rank));
}

/// What the ranks of one group share.
pub(super) struct World {
    mailboxes: Vec<Mailbox>,
    pub(super) clock: WorldClock,
    timeout: Duration,
    /// The last loss each rank was told of: tells a rank that fails because of it from one that fails on its own.
    seen: Vec<Mutex<Option<CommError>>>,
}

impl World {
    pub(super) fn new(
        size: usize,
        timeout: Duration,
        timing: Timing,
        source: Arc<dyn TimeSource>,
    ) -> Arc<Self> {
        Arc::new(Self {
            mailboxes: (0..size).map(|_| Mailbox::new(size)).collect(),
            clock: WorldClock::new(size, timing, source),
            timeout,
            seen: (0..size).map(|_| Mutex::new(None)).collect(),
        })
    }

    pub(super) fn seen(&self, rank: usize) -> Option<CommError> {
        lock(&self.seen[rank]).clone()
    }

    /// Rank `rank` is gone; `failed` says why, when it did not return normally. Calls `record` in the order in which
    /// ranks leave, before any other rank can see it.
    pub(super) fn leave(&self, rank: usize, failed: Option<Loss>, record: impl FnOnce()) {
        // All mailboxes at once: no operation may succeed after another one has seen the loss. In order of rank, and
        // nobody else holds two, so this cannot deadlock.
        let mut states: Vec<_> = self.mailboxes.iter().map(|it| lock(&it.state)).collect();
        record();
        for state in &mut states {
            match &failed {
                // Only the first failure is a cause, later ones may be consequences.
                Some(loss) => drop(state.failed.get_or_insert_with(|| loss.clone())),
                None => state.returned[rank] = true,
            }
        }
        // No one reads them any more; they may hold large tensors.
        let unread = core::mem::take(&mut states[rank].queues);
        drop(states);
        drop(unread);
        for mailbox in &self.mailboxes {
            mailbox.changed.notify_all();
        }
        self.clock.leave(rank);
    }
}

/// What has been sent to one rank, and what it knows of the others.
struct Mailbox {
    state: Mutex<MailboxState>,
    changed: Condvar,
}

struct MailboxState {
    /// By sender and key. No queue is ever empty, so the map holds only what is in flight.
    queues: HashMap<(usize, Key), VecDeque<Message>>,
    /// What the owner is blocked on, one entry a thread.
    awaited: Vec<(usize, Key)>,
    /// Which ranks have returned normally.
    returned: Vec<bool>,
    /// The first rank that failed.
    failed: Option<Loss>,
}

struct Message {
    payload: Bytes,
    /// The sender's clock.
    sent: Duration,
}

impl Mailbox {
    fn new(size: usize) -> Self {
        Self {
            state: Mutex::new(MailboxState {
                queues: HashMap::new(),
                awaited: Vec::new(),
                returned: vec![false; size],
                failed: None,
            }),
            changed: Condvar::new(),
        }
    }
}

impl MailboxState {
    fn take(&mut self, from: usize, key: Key) -> Option<Message> {
        let queue = self.queues.get_mut(&(from, key))?;
        let message = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&(from, key));
        }
        message
    }

    /// Why a message of rank `from` that is not here will not come: any failure takes the group down, a normal return
    /// matters only to those who wait for that rank.
    fn loss(&self, from: usize) -> Option<Loss> {
        self.failed
            .clone()
            .or_else(|| self.returned[from].then(|| Loss::returned(from)))
    }

    /// A few of the messages of rank `from` that no one has asked for.
    fn unclaimed(&self, from: usize) -> Vec<Key> {
        let keys = self.queues.keys().filter(|(sender, _)| *sender == from);
        let mut keys: Vec<Key> = keys.map(|(_, key)| *key).collect();
        // A map has no order; errors should.
        keys.sort_unstable();
        keys.truncate(4);
        keys
    }
}
