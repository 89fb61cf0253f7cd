//! An exchange that is under way, and the waits it takes.

use std::any::Any;
use std::time::{Duration, Instant};

use super::engine::Engine;
use super::link::{Lane, LaneState, Link};
use crate::comm::{CommError, Communicator, Key};

/// How long to wait for the reason of a failure that the device reports: that a rank is lost.
const GRACE: Duration = Duration::from_secs(1);

/// How long an exchange may take to reach the device before it is time to see whether the others have come.
const PATIENCE: Duration = Duration::from_millis(5);

/// An exchange that is under way. Dropping it without waiting aborts the link.
#[must_use]
pub(crate) struct Flight {
    link: Link,
    lane: Lane,
    key: Key,
    /// The other ranks that take part.
    peers: Vec<Peer>,
    /// Whether they have all come.
    heard: bool,
    mark: Option<u64>,
    keep: Option<Box<dyn Any + Send>>,
}

pub(super) struct Peer {
    pub rank: usize,
    /// What it must announce: number, bytes to this rank, bytes from this rank.
    pub expected: [u64; 3],
}

impl Flight {
    pub(super) fn new(
        link: Link,
        lane: Lane,
        key: Key,
        peers: Vec<Peer>,
        keep: impl Any + Send,
    ) -> Self {
        Self {
            link,
            lane,
            key,
            peers,
            heard: false,
            mark: None,
            keep: Some(Box::new(keep)),
        }
    }

    /// All has been started; it is done when `mark` is passed.
    pub(super) fn marked(mut self, mark: u64) -> Self {
        self.mark = Some(mark);
        self
    }

    /// Waits until all has arrived, here and at the others.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late, or the engine fails. The link then works no more.
    pub fn wait(mut self, comm: &dyn Communicator) -> Result<(), CommError> {
        self.hear(comm)?;
        if let Some(mark) = self.mark {
            self.poll(comm, |engine| engine.passed(mark))?;
        }
        self.keep = None;
        Ok(())
    }

    /// Waits until what was started is with the device, which it may not be before the other ranks have come.
    pub(super) fn settle(&mut self, comm: &dyn Communicator) -> Result<(), CommError> {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            match self.lane().engine.settled() {
                Ok(true) => return Ok(()),
                Ok(false) => std::thread::yield_now(),
                Err(failure) => return Err(self.failed(comm, failure)),
            }
        }
        self.hear(comm)?;
        self.poll(comm, |engine| engine.settled())
    }

    /// Waits until the other ranks have begun this exchange too.
    fn hear(&mut self, comm: &dyn Communicator) -> Result<(), CommError> {
        if std::mem::replace(&mut self.heard, true) {
            return Ok(());
        }
        let check = |peer: &Peer| {
            let payload = comm.recv(peer.rank, self.key.about())?;
            let told: Vec<u64> = bytemuck::pod_collect_to_vec::<u8, [u8; 8]>(&payload)
                .into_iter()
                .map(u64::from_le_bytes)
                .collect();
            let wrong = |what, expected: u64, got: u64| CommError::Mismatch {
                what,
                expected: expected as usize,
                got: got as usize,
                from: peer.rank,
                key: self.key,
            };
            let [number, to_us, from_us] = told[..] else {
                return Err(wrong("bytes of the announcement", 24, payload.len() as u64));
            };
            for (what, expected, got) in [
                ("place in the order of exchanges", peer.expected[0], number),
                ("bytes to send", peer.expected[1], to_us),
                ("bytes to receive", peer.expected[2], from_us),
            ] {
                if expected != got {
                    return Err(wrong(what, expected, got));
                }
            }
            Ok(())
        };
        let result = self.peers.iter().try_for_each(check);
        result.inspect_err(|error| self.link.break_off(error.to_string()))
    }

    /// Polls the engine, and the communicator for losses, until `done`.
    fn poll(
        &self,
        comm: &dyn Communicator,
        done: impl Fn(&dyn Engine) -> Result<bool, String>,
    ) -> Result<(), CommError> {
        let start = Instant::now();
        let mut checked = start;
        loop {
            match done(&*self.lane().engine) {
                Ok(true) => return Ok(()),
                Ok(false) => {}
                Err(failure) => return Err(self.failed(comm, failure)),
            }
            let now = Instant::now();
            if now - checked > Duration::from_millis(1) {
                checked = now;
                if let Err(error) = comm.check(self.key) {
                    self.link.break_off(error.to_string());
                    return Err(error);
                }
            }
            if now - start > comm.timeout() {
                let ranks = self.peers.iter().map(|peer| self.link.global(peer.rank));
                let ranks: Vec<_> = ranks.collect();
                let message = format!(
                    "not done after {:?}, though ranks {ranks:?} have begun it too",
                    comm.timeout()
                );
                self.link.break_off(message.clone());
                return Err(self.link.engine_error(comm, self.key, message));
            }
            match now - start < Duration::from_micros(200) {
                true => std::thread::yield_now(),
                false => std::thread::sleep(Duration::from_micros(20)),
            }
        }
    }

    /// What to say of a failure of the engine: that a rank was lost when that is why.
    pub(super) fn failed(&self, comm: &dyn Communicator, failure: String) -> CommError {
        self.link.break_off(failure.clone());
        let deadline = Instant::now() + GRACE.min(comm.timeout());
        while Instant::now() < deadline {
            if let Err(error) = comm.check(self.key) {
                return error;
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        self.link.engine_error(comm, self.key, failure)
    }

    fn lane(&self) -> &LaneState {
        &self.link.shared.lanes[self.lane as usize]
    }
}

impl Drop for Flight {
    fn drop(&mut self) {
        if self.keep.is_some() {
            // The device may still read and write the buffers. After an error this has been done already.
            let key = self.key;
            self.link.break_off(format!("{key} was given up"));
        }
    }
}
