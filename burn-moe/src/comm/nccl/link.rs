//! Exchanges between devices: who takes part, in which order, and what becomes of them when something goes wrong.

use std::any::Any;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;

use super::engine::{Engine, Placed};
use super::flight::{Flight, Peer};
use super::plan::{Round, Way};
use crate::comm::clock::lock;
use crate::comm::{CommError, Communicator, Key};

/// A way between the devices of the ranks of a communicator, beside it. Clones share it.
///
/// Every exchange is announced to the ranks that it concerns over the communicator: what it is, the how manieth between
/// the two it is, and its bytes both ways. So ranks that disagree learn of it before anyone uses what arrived, a rank
/// that does not come is named, and one that is lost ends the wait of the others at once.
#[derive(Clone)]
pub struct Link {
    pub(super) shared: Arc<Shared>,
    /// The members as the engines number them, when this is the link of a group.
    members: Option<Arc<[usize]>>,
}

/// What a link is between.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum LinkDevice {
    /// The CUDA device of this number.
    Cuda(usize),
    /// The process's memory.
    #[cfg(test)]
    Memory,
}

/// Which of the two ways an exchange takes. Each has its own order.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Lane {
    /// Rows of tokens, and gradients to be summed.
    Rows,
    /// Weights of experts, and their gradients.
    Weights,
}

/// What this rank has sent over a link.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct LinkTraffic {
    /// Exchanges of rows, and of gradients that are summed over the ranks.
    pub row_exchanges: u64,
    /// Bytes sent in these, to itself too.
    pub row_bytes: u64,
    /// Exchanges of replicas' weights and of their gradients.
    pub weight_exchanges: u64,
    /// Bytes of weights and gradients sent.
    pub weight_bytes: u64,
}

/// Memory of the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Span {
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: usize,
}

pub(super) struct Shared {
    device: LinkDevice,
    chunk_bytes: usize,
    pub(super) lanes: [LaneState; 2],
    /// Why nothing works any more.
    broken: Mutex<Option<String>>,
}

pub(super) struct LaneState {
    pub(super) engine: Box<dyn Engine>,
    exchanges: AtomicU64,
    bytes: AtomicU64,
    /// How many exchanges there have been with each rank. Locked while one is begun.
    begun: Mutex<Vec<u64>>,
}

/// Name of the engine in errors.
const NAME: &str = "NCCL";

impl Link {
    /// A link over `engines`, of rows and of weights, which both know `ranks` ranks.
    pub(crate) fn new(
        device: LinkDevice,
        chunk_bytes: usize,
        ranks: usize,
        engines: [Box<dyn Engine>; 2],
    ) -> Self {
        let lanes = engines.map(|engine| LaneState {
            engine,
            exchanges: AtomicU64::new(0),
            bytes: AtomicU64::new(0),
            begun: Mutex::new(vec![0; ranks]),
        });
        let shared = Shared {
            device,
            chunk_bytes,
            lanes,
            broken: Mutex::default(),
        };
        Self {
            shared: Arc::new(shared),
            members: None,
        }
    }

    /// The link of a group of these ranks.
    pub(crate) fn of_group(&self, ranks: &[usize]) -> Self {
        let members = ranks.iter().map(|rank| self.global(*rank)).collect();
        Self {
            shared: self.shared.clone(),
            members: Some(members),
        }
    }

    /// This rank's device.
    pub(crate) fn device(&self) -> LinkDevice {
        self.shared.device
    }

    /// What this rank has sent so far, in all groups.
    pub fn traffic(&self) -> LinkTraffic {
        let [rows, weights] = &self.shared.lanes;
        let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
        LinkTraffic {
            row_exchanges: of(&rows.exchanges),
            row_bytes: of(&rows.bytes),
            weight_exchanges: of(&weights.exchanges),
            weight_bytes: of(&weights.bytes),
        }
    }

    /// Bytes of a chunk where relays forward weights.
    pub fn chunk_bytes(&self) -> usize {
        self.shared.chunk_bytes
    }

    /// Begins an exchange; `comm` is the communicator that this link is of. `spans` are the buffers that the transfers
    /// of `rounds` name. `keep` is held until all is done.
    ///
    /// # Errors
    ///
    /// When a rank is lost or too late, or the engine fails. The link then works no more.
    ///
    /// # Panics
    ///
    /// When a transfer leaves its buffer.
    ///
    /// # Safety
    ///
    /// While `keep` lives the spans are memory of the link's device. Work on them that was ordered before this call is
    /// done; until the flight has been waited for, or dropped, nobody writes what is sent or touches what is received.
    pub(crate) unsafe fn start(
        &self,
        lane: Lane,
        comm: &dyn Communicator,
        key: Key,
        rounds: &[Round],
        spans: &[Span],
        keep: impl Any + Send,
    ) -> Result<Flight, CommError> {
        let state = &self.shared.lanes[lane as usize];
        if let Some(reason) = &*lock(&self.shared.broken) {
            return Err(self.engine_error(comm, key, reason.clone()));
        }
        let sent = rounds.iter().flatten().filter(|it| it.way == Way::Send);
        let sent = sent.map(|transfer| transfer.bytes as u64).sum();
        state.exchanges.fetch_add(1, Ordering::Relaxed);
        state.bytes.fetch_add(sent, Ordering::Relaxed);
        let mut placed = Vec::with_capacity(rounds.len());
        for round in rounds.iter().filter(|round| !round.is_empty()) {
            placed.push(self.place(round, spans));
        }
        // Held until all has begun: exchanges begin in the order in which they are announced.
        let mut begun = lock(&state.begun);
        let peers = self.announce(comm, key, rounds, &mut begun)?;
        let mut flight = Flight::new(self.clone(), lane, key, peers, keep);
        for round in &placed {
            // SAFETY: the caller's promises are those that the engine asks for, and the flight keeps `keep` until its
            // mark is passed or the engine has aborted.
            unsafe { state.engine.start(round) }.map_err(|failure| flight.failed(comm, failure))?;
            flight.settle(comm)?;
        }
        let mark = state.engine.mark();
        let mark = mark.map_err(|failure| flight.failed(comm, failure))?;
        Ok(flight.marked(mark))
    }

    /// Gives up: nothing works any more, here or, once they learn of it, elsewhere.
    pub(super) fn break_off(&self, reason: String) {
        lock(&self.shared.broken).get_or_insert(reason);
        for lane in &self.shared.lanes {
            lane.engine.abort();
        }
    }

    fn place(&self, round: &Round, spans: &[Span]) -> Vec<Placed> {
        let place = |transfer: &super::plan::Transfer| {
            let span = spans[transfer.buffer];
            assert!(
                transfer.offset + transfer.bytes <= span.bytes,
                "{transfer:?} leaves its buffer of {} bytes",
                span.bytes
            );
            Placed {
                peer: self.global(transfer.peer),
                way: transfer.way,
                address: span.address + transfer.offset as u64,
                bytes: transfer.bytes,
            }
        };
        round.iter().map(place).collect()
    }

    /// Tells the other ranks of the exchange what is coming.
    fn announce(
        &self,
        comm: &dyn Communicator,
        key: Key,
        rounds: &[Round],
        begun: &mut [u64],
    ) -> Result<Vec<Peer>, CommError> {
        let mut bytes = vec![[0u64; 2]; comm.size()];
        for transfer in rounds.iter().flatten() {
            bytes[transfer.peer][usize::from(transfer.way == Way::Receive)] +=
                transfer.bytes as u64;
        }
        let mut peers = Vec::new();
        for (rank, [sent, received]) in bytes.into_iter().enumerate() {
            if rank == comm.rank() || sent + received == 0 {
                continue;
            }
            let number = &mut begun[self.global(rank)];
            let announcement = [*number, sent, received];
            let payload = announcement.map(u64::to_le_bytes).concat();
            comm.send(rank, key.about(), Bytes::from(payload))?;
            peers.push(Peer {
                rank,
                expected: [*number, received, sent],
            });
            *number += 1;
        }
        Ok(peers)
    }

    pub(super) fn global(&self, rank: usize) -> usize {
        self.members.as_ref().map_or(rank, |members| members[rank])
    }

    pub(super) fn engine_error(
        &self,
        comm: &dyn Communicator,
        key: Key,
        message: String,
    ) -> CommError {
        CommError::Engine {
            engine: NAME,
            rank: self.global(comm.rank()),
            key,
            message,
        }
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        for lane in &self.lanes {
            match std::thread::panicking() {
                true => lane.engine.abort(),
                false => lane.engine.close(),
            }
        }
    }
}
