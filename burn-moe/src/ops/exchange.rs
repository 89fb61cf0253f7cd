//! Rows that travel between ranks, and the bodies of the operations that talk to other ranks for
//! backends whose tensors are only reachable through host memory.

use std::fmt;
use std::sync::Arc;

use burn::backend::{Backend, TensorMetadata, tensor::FloatTensor};
use burn::tensor::{Shape, Slice, TensorData};
use burn_std::reader::read_sync;
use bytes::Bytes;

use super::{Pass, Replication};
use crate::comm::{Communicator, Key, Op, fail};

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
            add_to_expert::<B>(home, replica.local_expert, part);
        }
    }
    let [gate_up, down] = grads;
    (gate_up, down)
}

/// Adds `part [1, ...]` to one of the experts of `home`.
pub(crate) fn add_to_expert<B: Backend>(
    home: &mut FloatTensor<B>,
    expert: usize,
    part: FloatTensor<B>,
) {
    let sum = B::float_add(expert_of::<B>(home, expert), part);
    let slices = expert_slices(&home.shape(), expert);
    *home = B::float_slice_assign(home.clone(), &slices, sum);
}

pub(crate) fn expert_of<B: Backend>(weights: &FloatTensor<B>, expert: usize) -> FloatTensor<B> {
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
