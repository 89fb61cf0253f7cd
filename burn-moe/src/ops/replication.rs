//! Replicas of experts as one rank sees them: what it sends, what it hosts, and where.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;

#[cfg(feature = "link")]
use crate::comm::nccl::plan::{Place, Way, WeightHop, WeightHops};
use crate::comm::{Communicator, Key, Op, fail};

/// The direction of a pass through the network: the two passes exchange under different keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// From input to loss.
    Forward,
    /// From loss to gradients.
    Backward,
}

/// One replica as seen by its home rank or by the rank that hosts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Replica {
    /// Position of the expert among its home rank's experts.
    pub local_expert: usize,
    /// The rank at the other end: the host where this rank is home, the home where it is host.
    pub peer: usize,
    /// Slot of the hosting rank, `0..R`.
    pub slot: usize,
}

/// The replicas of one layer and micro-batch that concern this rank.
#[derive(Clone)]
pub struct Replication(Option<Arc<Active>>);

struct Active {
    comm: Arc<dyn Communicator>,
    step: u64,
    layer: u32,
    outgoing: Vec<Replica>,
    incoming: Vec<Replica>,
    pool: Arc<ReplicaPool>,
    /// Whether the weights have been sent, forward and backward.
    sent: [AtomicBool; 2],
    #[cfg(feature = "link")]
    device: DeviceSide,
}

/// What goes over a link between devices, where rows and weights never see the host.
#[cfg(feature = "link")]
#[derive(Default)]
struct DeviceSide {
    hops: WeightHops,
    /// Weights under way, by pass: what receives them takes them from here.
    in_flight: [Mutex<Option<Box<dyn Any + Send>>>; 2],
    /// What this one is the beginning of.
    begins: Option<Replication>,
}

impl Replication {
    /// No replica anywhere: nothing is sent.
    pub fn none() -> Self {
        Self(None)
    }

    /// The replicas that this rank serves (`outgoing`) and hosts (`incoming`, by slot).
    ///
    /// # Panics
    ///
    /// Panics when the slots of `incoming` are not `0, 1, 2, ...`.
    pub fn new(
        comm: Arc<dyn Communicator>,
        step: u64,
        layer: u32,
        outgoing: Vec<Replica>,
        incoming: Vec<Replica>,
        pool: Arc<ReplicaPool>,
    ) -> Self {
        assert!(
            incoming.iter().enumerate().all(|(i, r)| r.slot == i),
            "the slots of incoming replicas must be 0, 1, 2, ...: {incoming:?}"
        );
        if outgoing.is_empty() && incoming.is_empty() {
            return Self::none();
        }
        Self(Some(Arc::new(Active {
            comm,
            step,
            layer,
            outgoing,
            incoming,
            pool,
            sent: Default::default(),
            #[cfg(feature = "link")]
            device: DeviceSide::default(),
        })))
    }

    /// The same, whose weights take these ways where there is a link between devices; otherwise they go directly.
    #[cfg(feature = "link")]
    pub(crate) fn with_hops(mut self, hops: WeightHops) -> Self {
        if let Some(active) = self.0.as_mut().and_then(Arc::get_mut) {
            active.device.hops = hops;
        }
        self
    }

    /// Whether nothing is sent or received.
    pub(crate) fn is_none(&self) -> bool {
        self.0.is_none()
    }

    /// The replicas whose weights are still to be sent in this pass; from now on they count as sent.
    pub(crate) fn to_send(&self, pass: Pass) -> &[Replica] {
        match &self.0 {
            Some(active) if !active.sent[pass as usize].swap(true, Ordering::Relaxed) => {
                &active.outgoing
            }
            _ => &[],
        }
    }

    /// What can be begun in this pass before anyone waits for it, alone; from now on it counts as sent here. `None` when
    /// there is nothing.
    pub(crate) fn outgoing_only(&self, pass: Pass) -> Option<Self> {
        let active = self.0.as_ref()?;
        let outgoing = match active.sent[pass as usize].swap(true, Ordering::Relaxed) {
            true => return None,
            false => active.outgoing.clone(),
        };
        // Over a link, what is received is begun together with what is sent.
        #[cfg(feature = "link")]
        let receives_too = active.comm.device_link().is_some();
        #[cfg(not(feature = "link"))]
        let receives_too = false;
        if outgoing.is_empty() && !receives_too {
            return None;
        }
        Some(Self(Some(Arc::new(Active {
            comm: active.comm.clone(),
            step: active.step,
            layer: active.layer,
            outgoing,
            incoming: Vec::new(),
            pool: active.pool.clone(),
            sent: Default::default(),
            #[cfg(feature = "link")]
            device: DeviceSide {
                begins: Some(self.clone()),
                ..DeviceSide::default()
            },
        }))))
    }

    /// Replicas of this rank's experts on other ranks.
    pub fn outgoing(&self) -> &[Replica] {
        self.0.as_ref().map_or(&[], |active| &active.outgoing)
    }

    /// Replicas of other ranks' experts on this rank, by slot.
    pub fn incoming(&self) -> &[Replica] {
        self.0.as_ref().map_or(&[], |active| &active.incoming)
    }

    /// Keeps the slots for the next layer that needs some.
    pub(crate) fn release<T: Any + Send>(&self, slots: T) {
        if let Some(active) = &self.0
            && !active.incoming.is_empty()
        {
            active.pool.put(slots);
        }
    }

    /// The pool that slots come from; `None` where this replication has none.
    pub(crate) fn pool(&self) -> Option<&ReplicaPool> {
        self.0.as_ref().map(|active| active.pool.as_ref())
    }

    /// Sends `payload` (matrix 0: gate and up, 1: down) for a replica; does not wait.
    pub(crate) fn send(&self, op: Op, replica: &Replica, matrix: u32, payload: Bytes) {
        let Some(active) = &self.0 else { return };
        active
            .comm
            .send(replica.peer, active.key(op, replica, matrix), payload)
            .unwrap_or_else(|error| fail(error));
    }

    /// Receives what the peer of `replica` sent, checking its size in bytes.
    pub(crate) fn receive(&self, op: Op, replica: &Replica, matrix: u32, bytes: usize) -> Bytes {
        let Some(active) = &self.0 else {
            return Bytes::new();
        };
        let key = active.key(op, replica, matrix);
        let payload = active
            .comm
            .recv(replica.peer, key)
            .unwrap_or_else(|error| fail(error));
        assert_eq!(
            payload.len(),
            bytes,
            "{key}: rank {} sent an expert of another size",
            replica.peer
        );
        payload
    }
}

#[cfg(feature = "link")]
impl Replication {
    /// The communicator, where there is anything to send or receive.
    pub(crate) fn comm(&self) -> Option<&Arc<dyn Communicator>> {
        self.0.as_ref().map(|active| &active.comm)
    }

    /// The key of `op` of this layer and micro-batch.
    pub(crate) fn key(&self, op: Op) -> Option<Key> {
        let active = self.0.as_ref()?;
        Some(Key::new(op, active.step, active.layer))
    }

    /// The ways that the weights take between devices.
    pub(crate) fn hops(&self) -> WeightHops {
        let Some(active) = &self.0 else {
            return WeightHops::default();
        };
        if !active.device.hops.hops.is_empty() {
            return active.device.hops.clone();
        }
        // Directly. What two ranks send each other they number alike: by position at home.
        let hop = |way| {
            move |replica: &Replica| WeightHop {
                expert: replica.local_expert,
                peer: replica.peer,
                way,
                place: match way {
                    Way::Send => Place::Home(replica.local_expert),
                    Way::Receive => Place::Slot(replica.slot),
                },
                depth: 0,
            }
        };
        let sent = active.outgoing.iter().map(hop(Way::Send));
        let received = active.incoming.iter().map(hop(Way::Receive));
        WeightHops {
            hops: sent.chain(received).collect(),
            relayed: false,
        }
    }

    /// What this one is the beginning of, when it is no more than that.
    pub(crate) fn begins(&self) -> Option<&Replication> {
        self.0.as_ref()?.device.begins.as_ref()
    }

    /// Keeps what is under way in `pass` for whoever will wait for it.
    pub(crate) fn put_in_flight<T: Any + Send>(&self, pass: Pass, flight: T) {
        if let Some(active) = &self.0 {
            let place = &active.device.in_flight[pass as usize];
            *place.lock().unwrap_or_else(PoisonError::into_inner) = Some(Box::new(flight));
        }
    }

    /// What is under way in `pass`.
    pub(crate) fn take_in_flight<T: Any + Send>(&self, pass: Pass) -> Option<T> {
        let place = &self.0.as_ref()?.device.in_flight[pass as usize];
        let flight = place
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()?;
        flight.downcast::<T>().ok().map(|flight| *flight)
    }
}

impl Active {
    fn key(&self, op: Op, replica: &Replica, matrix: u32) -> Key {
        Key::new(op, self.step, self.layer).with_part(2 * replica.slot as u32 + matrix)
    }
}

impl fmt::Debug for Replication {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Replication")
            .field("outgoing", &self.outgoing())
            .field("incoming", &self.incoming())
            .finish()
    }
}

impl Pass {
    pub(crate) fn replicate(self) -> Op {
        match self {
            Pass::Forward => Op::Replicate,
            Pass::Backward => Op::ReplicateBackward,
        }
    }
}

/// The replica slots of one rank: one set of buffers that all layers take turns to use, so that
/// replica memory does not grow with the number of layers.
#[derive(Default)]
pub struct ReplicaPool {
    slots: Mutex<Option<Box<dyn Any + Send>>>,
    peak_bytes: AtomicUsize,
}

impl ReplicaPool {
    /// Takes the buffers if they are here and of type `T`.
    #[cfg(any(feature = "flex", feature = "link"))] // the others pass through host memory and keep nothing
    pub(crate) fn take<T: Any + Send>(&self) -> Option<T> {
        let slots = self.lock().take()?;
        slots.downcast::<T>().ok().map(|slots| *slots)
    }

    fn put<T: Any + Send>(&self, slots: T) {
        *self.lock() = Some(Box::new(slots));
    }

    /// Notes that `bytes` of replica weights were held at once.
    pub(crate) fn record(&self, bytes: usize) {
        self.peak_bytes.fetch_max(bytes, Ordering::Relaxed);
    }

    /// Most bytes of replica weights held at once on this rank.
    pub fn peak_bytes(&self) -> usize {
        self.peak_bytes.load(Ordering::Relaxed)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Option<Box<dyn Any + Send>>> {
        self.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl fmt::Debug for ReplicaPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ReplicaPool")
            .field("peak_bytes", &self.peak_bytes())
            .finish()
    }
}
