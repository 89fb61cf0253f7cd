//! Exchanges between ranks that are threads of one process: what is sent is a shared view of the
//! sender's tensor, so every byte is copied once, to the place where it is read.

use burn::tensor::{DType, Shape};
use burn_flex::{FlexTensor, Layout};
use bytes::Bytes;

use super::activation::Real;
use super::buffers::Buffer;
use super::{dims, of_dtype, operand, result};
use crate::comm::Op;
use crate::ops::exchange::{payload_of, split_rows};
use crate::ops::{Pass, Replication, RowExchange};

/// The bytes of a contiguous tensor, sharing its memory.
fn share(tensor: &FlexTensor) -> Bytes {
    let size = tensor.dtype().size();
    let (start, end) = tensor
        .layout()
        .contiguous_offsets()
        .expect("operand() made it contiguous");
    payload_of(tensor.data_arc()).slice(start * size..end * size)
}

pub(super) fn all_to_all_rows(x: FlexTensor, exchange: &RowExchange) -> FlexTensor {
    match x.dtype() {
        DType::F64 => all_to_all::<f64>(x, exchange),
        _ => all_to_all::<f32>(x, exchange),
    }
}

fn all_to_all<T: Real>(x: FlexTensor, exchange: &RowExchange) -> FlexTensor {
    let dtype = x.dtype();
    let [_, width] = dims(&x);
    let row_bytes = width * size_of::<T>();
    let x = operand::<T>(x);
    if exchange.send == exchange.receive && exchange.comm.size() == 1 {
        return of_dtype(x, dtype);
    }
    let parts = split_rows(&share(&x), &exchange.send, row_bytes);
    let received = exchange.exchange(parts, row_bytes);
    let rows = exchange.receive.iter().sum::<usize>();
    let mut out = Buffer::<T>::new(rows * width);
    let mut rest = &mut *out;
    for part in received {
        let part = elements::<T>(&part);
        let place;
        (place, rest) = rest.split_at_mut(part.len());
        place.copy_from_slice(&part);
    }
    result(out, [rows, width], dtype)
}

/// The numbers in a message. Another process may have sent it, at any alignment.
fn elements<T: Real>(payload: &Bytes) -> std::borrow::Cow<'_, [T]> {
    match bytemuck::try_cast_slice(payload) {
        Ok(elements) => elements.into(),
        Err(_) => bytemuck::pod_collect_to_vec(payload).into(),
    }
}

pub(super) fn fetch_experts(
    gate_up: FlexTensor,
    down: FlexTensor,
    replication: &Replication,
    pass: Pass,
) -> (FlexTensor, FlexTensor) {
    match gate_up.dtype() {
        DType::F64 => fetch::<f64>(gate_up, down, replication, pass),
        _ => fetch::<f32>(gate_up, down, replication, pass),
    }
}

fn fetch<T: Real>(
    gate_up: FlexTensor,
    down: FlexTensor,
    replication: &Replication,
    pass: Pass,
) -> (FlexTensor, FlexTensor) {
    let op = pass.replicate();
    let home = [gate_up, down].map(operand::<T>);
    let to_send = replication.to_send(pass);
    for (matrix, weights) in home.iter().enumerate() {
        let payload = share(weights);
        let size = expert_len(weights) * size_of::<T>();
        for replica in to_send {
            let start = replica.local_expert * size;
            replication.send(
                op,
                replica,
                matrix as u32,
                payload.slice(start..start + size),
            );
        }
    }
    let used = replication.incoming().len();
    let mut slots = replication
        .pool()
        .filter(|_| used > 0)
        .and_then(|pool| pool.take::<(FlexTensor, FlexTensor)>())
        .map_or([None, None], |(a, b)| [Some(a), Some(b)]);
    let [gate_up, down] = [0, 1].map(|matrix| {
        let weights = &home[matrix];
        let [_, rows, columns] = dims(weights);
        let len = rows * columns;
        let mut buffer = slot_buffer::<T>(slots[matrix].take(), [used, rows, columns]);
        for (replica, slot) in replication
            .incoming()
            .iter()
            .zip(buffer.storage_mut::<T>().chunks_exact_mut(len.max(1)))
        {
            let payload = replication.receive(op, replica, matrix as u32, len * size_of::<T>());
            slot.copy_from_slice(&elements::<T>(&payload));
        }
        buffer
    });
    if let Some(pool) = replication.pool() {
        pool.record(gate_up.bytes().len() + down.bytes().len());
    }
    (gate_up, down)
}

/// A tensor of `dims` to overwrite: `held` when it is large enough, else a new one.
fn slot_buffer<T: Real>(held: Option<FlexTensor>, dims: [usize; 3]) -> FlexTensor {
    let len = dims.iter().product::<usize>();
    match held {
        Some(held) if held.dtype() == T::dtype() && held.bytes().len() >= len * size_of::<T>() => {
            held.with_layout(Layout::contiguous(Shape::new(dims)))
        }
        _ => result(Buffer::<T>::new(len), dims, T::dtype()),
    }
}

pub(super) fn return_grads(
    home: [FlexTensor; 2],
    slots: [FlexTensor; 2],
    replication: &Replication,
) -> (FlexTensor, FlexTensor) {
    let [gate_up, down] = match home[0].dtype() {
        DType::F64 => return_grads_of::<f64>(home, slots, replication),
        _ => return_grads_of::<f32>(home, slots, replication),
    };
    (gate_up, down)
}

fn return_grads_of<T: Real>(
    home: [FlexTensor; 2],
    slots: [FlexTensor; 2],
    replication: &Replication,
) -> [FlexTensor; 2] {
    for (matrix, grads) in slots.into_iter().enumerate() {
        let grads = operand::<T>(grads);
        let size = expert_len(&grads) * size_of::<T>();
        let payload = share(&grads);
        for replica in replication.incoming() {
            let start = replica.slot * size;
            replication.send(
                Op::ReplicaGrad,
                replica,
                matrix as u32,
                payload.slice(start..start + size),
            );
        }
    }
    let mut matrix = 0;
    home.map(|home| {
        let dtype = home.dtype();
        let mut home = operand::<T>(home);
        let len = expert_len(&home);
        // `outgoing` is sorted by expert and rank: the order of the additions is fixed.
        for replica in replication.outgoing() {
            let payload =
                replication.receive(Op::ReplicaGrad, replica, matrix, len * size_of::<T>());
            let start = replica.local_expert * len;
            let sums = &mut home.storage_mut::<T>()[start..start + len];
            for (sum, grad) in sums.iter_mut().zip(&*elements::<T>(&payload)) {
                *sum = *sum + *grad;
            }
        }
        matrix += 1;
        of_dtype(home, dtype)
    })
}

/// Elements of one expert's matrix in `[experts, rows, columns]`.
fn expert_len(weights: &FlexTensor) -> usize {
    let [_, rows, columns] = dims(weights);
    rows * columns
}
