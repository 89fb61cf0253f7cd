//! What has been sent to this rank, and what it knows of the others.

use std::collections::{HashMap, VecDeque};
use std::sync::{Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::super::Key;
use super::super::clock::lock;
use super::super::error::Loss;

pub(super) struct Inbox {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    /// By sender and key. No queue is ever empty.
    queues: HashMap<(usize, Key), VecDeque<Bytes>>,
    /// Which ranks have returned normally.
    returned: Vec<bool>,
    /// The first loss.
    failed: Option<Loss>,
}

impl Inbox {
    pub fn new(size: usize) -> Self {
        Self {
            state: Mutex::new(State {
                queues: HashMap::new(),
                returned: vec![false; size],
                failed: None,
            }),
            changed: Condvar::new(),
        }
    }

    pub fn deliver(&self, from: usize, key: Key, payload: Bytes) {
        let mut state = lock(&self.state);
        state
            .queues
            .entry((from, key))
            .or_default()
            .push_back(payload);
        self.changed.notify_all();
    }

    pub fn returned(&self, rank: usize) {
        lock(&self.state).returned[rank] = true;
        self.changed.notify_all();
    }

    pub fn has_returned(&self, rank: usize) -> bool {
        lock(&self.state).returned[rank]
    }

    /// Only the first failure is a cause; later ones may be consequences.
    pub fn fail(&self, loss: Loss) {
        lock(&self.state).failed.get_or_insert(loss);
        self.changed.notify_all();
    }

    pub fn failed(&self) -> Option<Loss> {
        lock(&self.state).failed.clone()
    }

    /// The next message `key` of rank `from`; what was sent before a loss is still delivered. Fails with the loss, or
    /// with nothing after `limit`.
    pub fn wait(&self, from: usize, key: Key, limit: Duration) -> Result<Bytes, Option<Loss>> {
        let deadline = Instant::now().checked_add(limit);
        let mut state = lock(&self.state);
        loop {
            if let Some(message) = state.take(from, key) {
                return Ok(message);
            }
            if let Some(loss) = &state.failed {
                return Err(Some(loss.clone()));
            }
            if state.returned[from] {
                return Err(Some(Loss::returned(from)));
            }
            // A deadline too far away for the clock to tell never comes.
            let left = deadline.map_or(Duration::MAX, |deadline| {
                deadline.saturating_duration_since(Instant::now())
            });
            if left.is_zero() {
                return Err(None);
            }
            let woken = self.changed.wait_timeout(state, left);
            state = woken.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// A few of the messages of rank `from` that no one has asked for.
    pub fn unclaimed(&self, from: usize) -> Vec<Key> {
        let state = lock(&self.state);
        let keys = state.queues.keys().filter(|(sender, _)| *sender == from);
        let mut keys: Vec<Key> = keys.map(|(_, key)| *key).collect();
        keys.sort_unstable();
        keys.truncate(4);
        keys
    }
}

impl State {
    fn take(&mut self, from: usize, key: Key) -> Option<Bytes> {
        let queue = self.queues.get_mut(&(from, key))?;
        let message = queue.pop_front();
        if queue.is_empty() {
            self.queues.remove(&(from, key));
        }
        message
    }
}
