//! What the operations that talk to other ranks need to know, and their bodies for backends
//! whose tensors are only reachable through host memory.

use std::any::Any;
use std::fmt;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice, TensorData};
use burn_std::reader::read_sync;
use bytes::Bytes;

use crate::comm::{Communicator, Key, Op, fail};

/// The direction of a pass through the network: the two passes exchange under different keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pass {
    /// From input to loss.
    Forward,
    /// From loss to gradients.
    Backward,
}

/// An all-to-all of rows with uneven counts, known to sender and receiver beforehand.
#[derive(Clone)]
pub struct RowExchange {
    /// The ranks that take part.
    pub comm: Arc<dyn Communicator>,
    /// Key of the forward exchange.
    pub key: Key,
    /// Key of the exchange of gradients in the backward pass.
    pub backward_key: Key,
    /// Rows for each rank, in order of rank.
    pub send: Arc<[usize]>,
    /// Rows from each rank, in order of rank.
    pub receive: Arc<[usize]>,
    /// What to do before the exchange of gradients.
    pub before_backward: Option<Arc<dyn Fn() + Send + Sync>>,
}

impl RowExchange {
    /// The exchange that takes gradients back along the same ways.
    pub fn reversed(&self) -> Self {
        Self {
            comm: self.comm.clone(),
            key: self.backward_key,
            backward_key: self.key,
            send: self.receive.clone(),
            receive: self.send.clone(),
            before_backward: None,
        }
    }

    /// The same exchange, which does something before gradients travel back, such as sending what will be needed next.
    pub fn with_before_backward(self, f: impl Fn() + Send + Sync + 'static) -> Self {
        Self {
            before_backward: Some(Arc::new(f)),
            ..self
        }
    }

    /// Exchanges one part a rank, and checks that every part has the announced size.
    ///
    /// # Panics
    ///
    /// Unwinds with the [`CommError`](crate::comm::CommError) when a rank is lost or too late.
    pub(crate) fn exchange(&self, parts: Vec<Bytes>, row_bytes: usize) -> Vec<Bytes> {
        let received = self
            .comm
            .all_to_all(self.key, parts)
            .unwrap_or_else(|error| fail(error));
        for (rank, (part, rows)) in received.iter().zip(self.receive.iter()).enumerate() {
            assert_eq!(
                part.len(),
                rows * row_bytes,
                "{}: rank {rank} sent {} bytes where {rows} rows of {row_bytes} were announced",
                self.key,
                part.len()
            );
        }
        received
    }
}

impl fmt::Debug for RowExchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("RowExchange")
            .field("rank", &self.comm.rank())
            .field("key", &self.key)
            .field("send", &self.send)
            .field("receive", &self.receive)
            .finish()
    }
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
        })))
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

    /// What is still to be sent in this pass, alone; from now on it counts as sent here. `None` when there is nothing.
    pub(crate) fn outgoing_only(&self, pass: Pass) -> Option<Self> {
        let (active, outgoing) = (self.0.as_ref()?, self.to_send(pass));
        if outgoing.is_empty() {
            return None;
        }
        Some(Self::new(
            active.comm.clone(),
            active.step,
            active.layer,
            outgoing.to_vec(),
            Vec::new(),
            active.pool.clone(),
        ))
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
    #[cfg(feature = "flex")] // the others pass through host memory and keep nothing
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

/// Burn's bytes as the payload of a message, sharing their memory.
pub(crate) fn payload_of(bytes: impl Into<Arc<burn_std::Bytes>>) -> Bytes {
    struct Owner(Arc<burn_std::Bytes>);

    impl AsRef<[u8]> for Owner {
        fn as_ref(&self) -> &[u8] {
            &self.0
        }
    }

    Bytes::from_owner(Owner(bytes.into()))
}

/// [`MoeOps::all_to_all_rows`](super::MoeOps::all_to_all_rows) for any backend.
pub(crate) fn all_to_all_through_host<B: Backend>(
    x: FloatTensor<B>,
    exchange: RowExchange,
) -> FloatTensor<B> {
    let (device, dtype, width) = (x.device(), x.dtype(), x.shape()[1]);
    let row_bytes = width * dtype.size();
    let payload = payload_of(host_data::<B>(x).into_bytes());
    let received = exchange.exchange(split_rows(&payload, &exchange.send, row_bytes), row_bytes);
    let rows = exchange.receive.iter().sum::<usize>();
    let data = TensorData::from_bytes_vec(received.concat(), Shape::new([rows, width]), dtype);
    B::float_from_data(data, &device)
}

/// Cuts `payload` into the parts of `counts` rows, sharing its memory.
pub(crate) fn split_rows(payload: &Bytes, counts: &[usize], row_bytes: usize) -> Vec<Bytes> {
    let mut start = 0;
    counts
        .iter()
        .map(|rows| {
            let end = start + rows * row_bytes;
            let part = payload.slice(start..end);
            start = end;
            part
        })
        .collect()
}

/// [`MoeOps::fetch_experts`](super::MoeOps::fetch_experts) for any backend.
pub(crate) fn fetch_experts_through_host<B: Backend>(
    gate_up: FloatTensor<B>,
    down: FloatTensor<B>,
    replication: &Replication,
    pass: Pass,
) -> (FloatTensor<B>, FloatTensor<B>) {
    let op = pass.replicate();
    for replica in replication.to_send(pass) {
        for (matrix, weights) in [&gate_up, &down].into_iter().enumerate() {
            let expert = expert_of::<B>(weights, replica.local_expert);
            let payload = payload_of(host_data::<B>(expert).into_bytes());
            replication.send(op, replica, matrix as u32, payload);
        }
    }
    let [gate_up, down] = [gate_up, down].map(|weights| (weights.device(), weights));
    let mut held = 0;
    let mut slots = [gate_up, down]
        .into_iter()
        .enumerate()
        .map(|(matrix, (device, weights))| {
            let mut shape = weights.shape();
            let dtype = weights.dtype();
            let bytes = shape[1] * shape[2] * dtype.size();
            let received: Vec<Bytes> = replication
                .incoming()
                .iter()
                .map(|replica| replication.receive(op, replica, matrix as u32, bytes))
                .collect();
            shape[0] = received.len();
            held += received.len() * bytes;
            let data = TensorData::from_bytes_vec(received.concat(), shape, dtype);
            B::float_from_data(data, &device)
        });
    let (Some(slot_gate_up), Some(slot_down)) = (slots.next(), slots.next()) else {
        unreachable!("two matrices went in")
    };
    drop(slots);
    if let Some(pool) = replication.pool() {
        pool.record(held);
    }
    (slot_gate_up, slot_down)
}

/// [`MoeOps::return_expert_grads`](super::MoeOps::return_expert_grads) for any backend.
pub(crate) fn return_grads_through_host<B: Backend>(
    gate_up: FloatTensor<B>,
    down: FloatTensor<B>,
    slot_gate_up: FloatTensor<B>,
    slot_down: FloatTensor<B>,
    replication: &Replication,
) -> (FloatTensor<B>, FloatTensor<B>) {
    for replica in replication.incoming() {
        for (matrix, grads) in [&slot_gate_up, &slot_down].into_iter().enumerate() {
            let grad = expert_of::<B>(grads, replica.slot);
            let payload = payload_of(host_data::<B>(grad).into_bytes());
            replication.send(Op::ReplicaGrad, replica, matrix as u32, payload);
        }
    }
    let mut grads = [gate_up, down];
    // `outgoing` is sorted by expert and rank: the order of the additions is fixed.
    for replica in replication.outgoing() {
        for (matrix, home) in grads.iter_mut().enumerate() {
            let mut shape = home.shape();
            shape[0] = 1;
            let bytes = shape.num_elements() * home.dtype().size();
            let payload = replication.receive(Op::ReplicaGrad, replica, matrix as u32, bytes);
            let data = TensorData::from_bytes_vec(payload.to_vec(), shape, home.dtype());
            let part = B::float_from_data(data, &home.device());
            let sum = B::float_add(expert_of::<B>(home, replica.local_expert), part);
            let slices = expert_slices(&home.shape(), replica.local_expert);
            *home = B::float_slice_assign(home.clone(), &slices, sum);
        }
    }
    let [gate_up, down] = grads;
    (gate_up, down)
}

fn expert_of<B: Backend>(weights: &FloatTensor<B>, expert: usize) -> FloatTensor<B> {
    B::float_slice(weights.clone(), &expert_slices(&weights.shape(), expert))
}

fn expert_slices(shape: &Shape, expert: usize) -> [Slice; 3] {
    [
        Slice::from(expert..expert + 1),
        Slice::from(0..shape[1]),
        Slice::from(0..shape[2]),
    ]
}

fn host_data<B: Backend>(tensor: FloatTensor<B>) -> TensorData {
    read_sync(B::float_into_data(tensor)).expect("the device delivers a tensor that it holds")
}
