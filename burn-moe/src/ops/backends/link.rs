//! Tensors from device to device: what the operations that talk to other ranks do where their
//! communicator has a link, on the rank's own thread.

#[cfg(all(test, feature = "autodiff", feature = "cpu"))]
mod tests;

use std::any::Any;
use std::sync::Arc;

use burn::tensor::Shape;
use burn_cubecl::cubecl::server::{Handle, ServerError};
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use burn_std::reader::read_sync;
use cubecl_runtime::client::Client;
#[cfg(any(feature = "nccl", all(test, feature = "cpu")))]
use cubecl_runtime::runtime::Runtime;

use crate::comm::nccl::plan::{self, GradientHop, Round, Way};
use crate::comm::nccl::{Flight, Lane, Link, LinkDevice, Span};
use crate::comm::{CommError, Communicator, Key, Op, fail};
use crate::ops::exchange::{add_to_expert, expert_of};
use crate::ops::{Pass, Replication, RowExchange};

/// The link of `comm`, when it is one between devices of which `tensor`'s is one.
pub(super) fn of(comm: &Arc<dyn Communicator>, tensor: &CubeTensor) -> Option<Link> {
    let link = comm.device_link()?;
    let here = match (link.device(), &tensor.device) {
        (LinkDevice::Cuda(number), CubeDevice::Cuda(device)) => device.index == number,
        #[cfg(test)]
        (LinkDevice::Memory, CubeDevice::Cpu(_)) => true,
        _ => false,
    };
    here.then(|| link.clone())
}

/// The link over which the weights of replicas travel.
pub(super) fn of_replicas(replication: &Replication, weights: &CubeTensor) -> Option<Link> {
    of(replication.comm()?, weights)
}

pub(super) fn all_to_all_rows(x: CubeTensor, exchange: &RowExchange, link: &Link) -> CubeTensor {
    let x = into_contiguous(x);
    let width = x.meta.shape()[1];
    let row_bytes = width * x.dtype.size();
    let rows = exchange.receive.iter().sum::<usize>();
    let out = empty_like(&x, [rows, width]);
    let round = plan::all_to_all(&exchange.send, &exchange.receive, row_bytes);
    let comm = &*exchange.comm;
    let flight = begin(link, Lane::Rows, comm, exchange.key, &[round], &[&x, &out]);
    flight
        .and_then(|flight| flight.wait(comm))
        .unwrap_or_else(|error| fail(error));
    out
}

/// Weights under way to the slots.
struct Replicating {
    flight: Option<Flight>,
    comm: Arc<dyn Communicator>,
    slots: [CubeTensor; 2],
}

impl Replicating {
    fn begin(home: [CubeTensor; 2], replication: &Replication, pass: Pass, link: &Link) -> Self {
        let (Some(comm), Some(key)) = (replication.comm(), replication.key(pass.replicate()))
        else {
            unreachable!("a link is one of a communicator's")
        };
        let used = replication.incoming().len();
        let home = home.map(into_contiguous);
        let pool = replication.pool().filter(|_| used > 0);
        let held = pool.and_then(|pool| pool.take::<(CubeTensor, CubeTensor)>());
        let (first, second) = held.map_or((None, None), |(a, b)| (Some(a), Some(b)));
        let slots_of = |home: &CubeTensor, held: Option<CubeTensor>| {
            let shape = [used, home.meta.shape()[1], home.meta.shape()[2]];
            let fits =
                |slots: &CubeTensor| slots.meta.shape()[..] == shape && slots.dtype == home.dtype;
            held.filter(fits).unwrap_or_else(|| empty_like(home, shape))
        };
        let slots = [slots_of(&home[0], first), slots_of(&home[1], second)];
        if let Some(pool) = replication.pool() {
            pool.record(slots.iter().map(bytes_of).sum());
        }
        let bytes = [0, 1].map(|matrix| bytes_of_one(&home[matrix]));
        let rounds = plan::replication(&replication.hops(), bytes, link.chunk_bytes());
        let [gate_up, down] = &home;
        let [slot_gate_up, slot_down] = &slots;
        // In the order of `plan::HOME` and `plan::SLOTS`.
        let buffers = [gate_up, down, slot_gate_up, slot_down];
        let flight = begin(link, Lane::Weights, &**comm, key, &rounds, &buffers);
        Self {
            flight: Some(flight.unwrap_or_else(|error| fail(error))),
            comm: comm.clone(),
            slots,
        }
    }

    fn wait(mut self) -> (CubeTensor, CubeTensor) {
        if let Some(flight) = self.flight.take() {
            flight.wait(&*self.comm).unwrap_or_else(|error| fail(error));
        }
        let [gate_up, down] = &self.slots;
        (gate_up.clone(), down.clone())
    }
}

impl Drop for Replicating {
    fn drop(&mut self) {
        // Nobody wants the weights, as when experts are frozen; but they are on their way, and the others count on it.
        // An error here is one that the next exchange reports.
        if let Some(flight) = self.flight.take()
            && !std::thread::panicking()
        {
            let _ = flight.wait(&*self.comm);
        }
    }
}

pub(super) fn fetch_experts(
    home: [CubeTensor; 2],
    replication: &Replication,
    pass: Pass,
    link: &Link,
) -> (CubeTensor, CubeTensor) {
    if let Some(whole) = replication.begins() {
        let none = |weights: &CubeTensor| {
            let shape = weights.meta.shape();
            empty_like(weights, [0, shape[1], shape[2]])
        };
        let none = (none(&home[0]), none(&home[1]));
        whole.put_in_flight(pass, Replicating::begin(home, whole, pass, link));
        return none;
    }
    let begun = replication.take_in_flight::<Replicating>(pass);
    begun
        .unwrap_or_else(|| Replicating::begin(home, replication, pass, link))
        .wait()
}

pub(super) fn return_expert_grads(
    mut home: [CubeTensor; 2],
    slots: [CubeTensor; 2],
    replication: &Replication,
    link: &Link,
) -> (CubeTensor, CubeTensor) {
    let (Some(comm), Some(key)) = (replication.comm(), replication.key(Op::ReplicaGrad)) else {
        unreachable!("a link is one of a communicator's")
    };
    let slots = slots.map(into_contiguous);
    let outgoing = replication.outgoing();
    let received = [0, 1].map(|matrix: usize| {
        let shape = home[matrix].meta.shape();
        empty_like(&slots[matrix], [outgoing.len(), shape[1], shape[2]])
    });
    let hop = |way, local_expert, peer, position| GradientHop {
        local_expert,
        peer,
        way,
        position,
    };
    let sent = replication.incoming().iter();
    let sent = sent.map(|it| hop(Way::Send, it.local_expert, it.peer, it.slot));
    let arriving = outgoing.iter().enumerate();
    let arriving = arriving.map(|(i, it)| hop(Way::Receive, it.local_expert, it.peer, i));
    let hops: Vec<GradientHop> = sent.chain(arriving).collect();
    let bytes = [0, 1].map(|matrix| bytes_of_one(&slots[matrix]));
    let round = plan::gradients(&hops, bytes);
    // In the order of `plan::SLOT_GRADIENTS` and `plan::HOSTED_GRADIENTS`.
    let buffers = [&slots[0], &slots[1], &received[0], &received[1]];
    begin(link, Lane::Weights, &**comm, key, &[round], &buffers)
        .and_then(|flight| flight.wait(&**comm))
        .unwrap_or_else(|error| fail(error));
    // `outgoing` is sorted by expert and rank: the order of the additions is fixed.
    for (i, replica) in outgoing.iter().enumerate() {
        for (home, received) in home.iter_mut().zip(&received) {
            let part = expert_of::<CubeBackend>(received, i);
            add_to_expert::<CubeBackend>(home, replica.local_expert, part);
        }
    }
    let [gate_up, down] = home;
    (gate_up, down)
}

/// Begins an exchange between tensors, all contiguous and on one device.
fn begin(
    link: &Link,
    lane: Lane,
    comm: &dyn Communicator,
    key: Key,
    rounds: &[Round],
    buffers: &[&CubeTensor],
) -> Result<Flight, CommError> {
    let mut spans = Vec::with_capacity(buffers.len());
    let mut keep: Vec<Box<dyn Any + Send>> = Vec::with_capacity(2 * buffers.len());
    let refused = |message: String| CommError::Engine {
        engine: "CUDA",
        rank: comm.rank(),
        key,
        message,
    };
    for tensor in buffers {
        let bytes = bytes_of(tensor);
        if bytes == 0 {
            // There may be no memory behind it.
            spans.push(Span {
                address: 0,
                bytes: 0,
            });
            continue;
        }
        let (address, memory) = memory_of(tensor).map_err(|error| refused(error.to_string()))?;
        spans.push(Span { address, bytes });
        keep.push(memory);
        // The handle too: as long as it is here, nobody takes the tensor for its own and writes into it.
        keep.push(Box::new(tensor.handle.clone()));
    }
    // What writes the tensors that are sent, and what last used the memory of those that are received: the buffers' own
    // streams have been lined up behind this thread's by `get_resource`.
    if let Some(tensor) = buffers.first() {
        let synced = read_sync(tensor.client.sync());
        synced.map_err(|error| refused(error.to_string()))?;
    }
    // SAFETY: `keep` holds the memory. All work on it has just been waited for, and callers look at what is received only
    // after the flight; what is sent is held by more than one handle, so Burn does not write into it.
    unsafe { link.start(lane, comm, key, rounds, &spans, keep) }
}

/// Where a tensor begins, and what keeps its memory there.
fn memory_of(tensor: &CubeTensor) -> Result<(u64, Box<dyn Any + Send>), ServerError> {
    match &tensor.device {
        #[cfg(feature = "nccl")]
        CubeDevice::Cuda(_) => {
            type Server = <burn_cubecl::cubecl::cuda::CudaRuntime as Runtime>::Server;
            let memory = tensor
                .client
                .get_resource::<Server>(tensor.handle.clone())?;
            Ok((memory.resource().ptr, Box::new(memory)))
        }
        #[cfg(all(test, feature = "cpu"))]
        CubeDevice::Cpu(_) => {
            type Server = <burn_cubecl::cubecl::cpu::CpuRuntime as Runtime>::Server;
            let memory = tensor
                .client
                .get_resource::<Server>(tensor.handle.clone())?;
            let (address, _) = memory.resource().get_write_ptr_and_length();
            Ok((address as u64, Box::new(memory)))
        }
        device => unreachable!("there is no link between devices such as {device:?}"),
    }
}

/// A tensor to be overwritten, of the type and on the device of another.
fn empty_like<const D: usize>(like: &CubeTensor, shape: [usize; D]) -> CubeTensor {
    let client: &Client = &like.client;
    let shape = Shape::new(shape);
    let handle: Handle = client.empty(shape.num_elements() * like.dtype.size());
    CubeTensor::new_contiguous(
        client.clone(),
        like.device.clone(),
        shape,
        handle,
        like.dtype,
    )
}

fn bytes_of(tensor: &CubeTensor) -> usize {
    tensor.meta.shape().num_elements() * tensor.dtype.size()
}

/// Bytes of one expert's matrix in `[experts, rows, columns]`.
fn bytes_of_one(weights: &CubeTensor) -> usize {
    let shape = weights.meta.shape();
    shape[1] * shape[2] * weights.dtype.size()
}
