//! An engine over the memory of one process that is as strict as NCCL may be: a rank's groups run one after the other, what
//! is sent waits for its receiver, and messages are told apart by nothing but their order between two ranks.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use crate::comm::clock::lock;
use crate::comm::nccl::engine::{Engine, Placed};
use crate::comm::nccl::plan::Way;
use crate::comm::nccl::{Link, LinkDevice, with_link};
use crate::comm::{Communicator, RankOptions, RanksError, try_run_ranks};

/// What the engines of one lane share.
#[derive(Default)]
pub struct Fabric {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    /// What waits to be taken, by sender and receiver.
    offers: HashMap<(usize, usize), VecDeque<Offer>>,
    ranks: HashMap<usize, RankState>,
}

struct Offer {
    address: u64,
    bytes: usize,
}

#[derive(Default)]
struct RankState {
    started: u64,
    finished: u64,
    /// Sends of the running group that have not been taken.
    waiting_sends: usize,
    failure: Option<String>,
    aborted: bool,
    queue: VecDeque<Vec<Placed>>,
    /// How often `settled` has said no since the last start.
    asked: usize,
}

/// How an engine misbehaves.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Reports an error when something is asked of it after so many groups.
    FailsAfter(u64),
    /// Never does anything.
    Stuck,
}

pub struct MemoryEngine {
    fabric: Arc<Fabric>,
    rank: usize,
    fault: Option<Fault>,
    worker: Mutex<Option<JoinHandle<()>>>,
}

impl MemoryEngine {
    pub fn new(fabric: &Arc<Fabric>, rank: usize, fault: Option<Fault>) -> Self {
        lock(&fabric.state).ranks.insert(rank, RankState::default());
        let shared = fabric.clone();
        let worker = (fault != Some(Fault::Stuck))
            .then(|| std::thread::spawn(move || while shared.run_group(rank) {}));
        Self {
            fabric: fabric.clone(),
            rank,
            fault,
            worker: Mutex::new(worker),
        }
    }

    fn failure(&self, state: &RankState) -> Result<(), String> {
        match (&state.failure, self.fault) {
            (Some(failure), _) => Err(failure.clone()),
            (_, Some(Fault::FailsAfter(groups))) if state.started > groups => {
                Err("the cable is cut".into())
            }
            _ => Ok(()),
        }
    }
}

impl Fabric {
    /// Runs the next group of `rank`; false when it was aborted.
    fn run_group(&self, rank: usize) -> bool {
        let mut state = lock(&self.state);
        let group = loop {
            let own = state.ranks.get_mut(&rank).unwrap();
            if own.aborted {
                return false;
            }
            match own.queue.pop_front() {
                Some(group) => break group,
                None => state = self.changed.wait(state).unwrap(),
            }
        };
        let mut receives: VecDeque<Placed> = VecDeque::new();
        for transfer in group {
            match transfer.way {
                Way::Receive => receives.push_back(transfer),
                Way::Send => {
                    let offer = Offer {
                        address: transfer.address,
                        bytes: transfer.bytes,
                    };
                    let queue = state.offers.entry((rank, transfer.peer)).or_default();
                    queue.push_back(offer);
                    state.ranks.get_mut(&rank).unwrap().waiting_sends += 1;
                }
            }
        }
        self.changed.notify_all();
        loop {
            if state.ranks[&rank].aborted {
                return false;
            }
            receives.retain(|receive| !take(&mut state, rank, receive));
            if receives.is_empty() && state.ranks[&rank].waiting_sends == 0 {
                state.ranks.get_mut(&rank).unwrap().finished += 1;
                self.changed.notify_all();
                return true;
            }
            self.changed.notify_all();
            // What was taken may have been all that another rank waited for; what is offered comes with a wake-up.
            state = self.changed.wait(state).unwrap();
        }
    }
}

/// Takes what is first in line for `receive`.
fn take(state: &mut State, rank: usize, receive: &Placed) -> bool {
    let Some(offer) = state
        .offers
        .get_mut(&(receive.peer, rank))
        .and_then(VecDeque::pop_front)
    else {
        return false;
    };
    if offer.bytes != receive.bytes {
        let text = format!("{} bytes came for {}", offer.bytes, receive.bytes);
        state.ranks.get_mut(&rank).unwrap().failure = Some(text);
    }
    let bytes = offer.bytes.min(receive.bytes);
    // SAFETY: both ranks keep their memory until their groups are done or aborted, for which they need the lock that is
    // held here.
    unsafe {
        std::ptr::copy(
            offer.address as *const u8,
            receive.address as *mut u8,
            bytes,
        );
    }
    state.ranks.get_mut(&receive.peer).unwrap().waiting_sends -= 1;
    true
}

impl Engine for MemoryEngine {
    unsafe fn start(&self, transfers: &[Placed]) -> Result<(), String> {
        let mut state = lock(&self.fabric.state);
        let own = state.ranks.get_mut(&self.rank).unwrap();
        self.failure(own)?;
        own.started += 1;
        own.asked = 0;
        own.queue.push_back(transfers.to_vec());
        self.fabric.changed.notify_all();
        Ok(())
    }

    fn settled(&self) -> Result<bool, String> {
        let mut state = lock(&self.fabric.state);
        let own = state.ranks.get_mut(&self.rank).unwrap();
        self.failure(own)?;
        own.asked += 1;
        Ok(own.asked > 2)
    }

    fn mark(&self) -> Result<u64, String> {
        Ok(lock(&self.fabric.state).ranks[&self.rank].started)
    }

    fn passed(&self, mark: u64) -> Result<bool, String> {
        let state = lock(&self.fabric.state);
        let own = &state.ranks[&self.rank];
        self.failure(own)?;
        Ok(own.finished >= mark)
    }

    fn abort(&self) {
        let mut state = lock(&self.fabric.state);
        state.ranks.get_mut(&self.rank).unwrap().aborted = true;
        for ((from, _), offers) in &mut state.offers {
            if *from == self.rank {
                offers.clear();
            }
        }
        self.fabric.changed.notify_all();
        drop(state);
        if let Some(worker) = lock(&self.worker).take() {
            worker.join().unwrap();
        }
    }

    fn close(&self) {
        let idle = {
            let state = lock(&self.fabric.state);
            let own = &state.ranks[&self.rank];
            own.aborted || own.finished == own.started
        };
        self.abort();
        assert!(idle, "closed while something was under way");
    }
}

/// Runs ranks over whose "devices", which are the process's memory, there is a link.
pub fn run_linked<R: Send>(
    size: usize,
    options: RankOptions,
    chunk_bytes: usize,
    fault: impl Fn(usize) -> Option<Fault> + Sync,
    f: impl Fn(std::sync::Arc<dyn Communicator>) -> R + Sync,
) -> Result<Vec<R>, RanksError> {
    let fabrics: [Arc<Fabric>; 2] = Default::default();
    // All ranks are known before any sends.
    let engines: Vec<_> = (0..size)
        .map(|rank| {
            let engine = |fabric| -> Box<dyn Engine> {
                Box::new(MemoryEngine::new(fabric, rank, fault(rank)))
            };
            Mutex::new(Some([engine(&fabrics[0]), engine(&fabrics[1])]))
        })
        .collect();
    try_run_ranks(size, options, |comm| {
        let engines = lock(&engines[comm.rank()]).take().unwrap();
        let link = Link::new(LinkDevice::Memory, chunk_bytes, size, engines);
        Ok::<R, std::convert::Infallible>(f(with_link(comm, link)))
    })
}
