//! One MoE layer over all ranks, from routed tokens to combined outputs.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::{Device, Int, Tensor, TensorData};
use bytes::Bytes;

use super::dispatch::{DROPPED, Inbound, Outbound, instances_on};
use super::{Balance, CombineOrder, ExpertParallel};
use crate::balance::{
    self, LoadMatrix, Placement, Plan, Planner, Reroute, check, imbalance, planner,
};
use crate::comm::{Key, Op, fail};
use crate::layer::GroupedExperts;
use crate::ops::{
    Pass, Replica, Replication, RowExchange, all_to_all_rows, gather_rows, send_experts, sum_rows,
};

/// What one forward pass of one layer did, as one rank saw it.
#[derive(Debug, Clone, serde::Serialize, serde::Deserialize)]
pub struct LayerStats {
    /// The layer, as numbered by the model.
    pub layer: u32,
    /// Max over mean of token copies per rank, had every copy gone home.
    pub imbalance_before: f64,
    /// Max over mean of token copies per rank, as computed.
    pub imbalance_after: f64,
    /// The replicas of the plan.
    pub replicas: Vec<balance::Replica>,
    /// Time that planning took, rerouting not included.
    pub planning: Duration,
    /// Bytes of token rows this rank sent to others, both ways of the forward pass.
    pub dispatched_bytes: usize,
    /// Bytes of expert weights this rank sent to others in the forward pass.
    pub replicated_bytes: usize,
    /// Token copies each rank computed.
    pub rank_load: Vec<u64>,
    /// Token copies of each expert, over all ranks.
    pub expert_load: Vec<u64>,
}

/// A layer's place in the model, with what it keeps between micro-batches. Clones share it.
#[derive(Clone)]
pub(crate) struct ParallelLayer {
    pub ep: Arc<ExpertParallel>,
    layer: u32,
    placement: Arc<Placement>,
    state: Arc<Mutex<State>>,
}

struct State {
    planner: Box<dyn Planner>,
    load: LoadMatrix,
    plan: Plan,
    reroute: Reroute,
    micro_batch: u64,
}

impl ParallelLayer {
    pub fn new(ep: Arc<ExpertParallel>, layer: u32, num_experts: usize) -> Self {
        let placement = ep.placement(num_experts);
        let name = match ep.options().balance {
            Balance::Exact => ep.options().planner.as_str(),
            Balance::None | Balance::Ideal => "none",
        };
        let state = State {
            planner: planner(name).expect("ExpertParallel::new has made a planner of this name"),
            load: LoadMatrix::new(placement.ranks(), num_experts),
            plan: Plan::default(),
            reroute: Reroute::default(),
            micro_batch: 0,
        };
        Self {
            ep,
            layer,
            placement: Arc::new(placement),
            state: Arc::new(Mutex::new(state)),
        }
    }
}

impl fmt::Debug for ParallelLayer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ParallelLayer")
            .field("layer", &self.layer)
            .field("ep", &self.ep)
            .finish()
    }
}

/// Routed tokens through the experts of all ranks. Returns the outputs `[T, D]` and the load of
/// every expert over all ranks.
///
/// `ids` is `[T, K]` on the host, `weights [T, K]`; `capacity` is the most copies an expert takes.
pub(crate) fn forward(
    layer: &ParallelLayer,
    experts: &GroupedExperts,
    x: Tensor<2>,
    ids: &[u32],
    weights: Tensor<2>,
    capacity: Option<f64>,
) -> (Tensor<2>, Vec<u64>) {
    let mut state = layer.state.lock().unwrap_or_else(PoisonError::into_inner);
    let state = &mut *state;
    let (ep, comm) = (&layer.ep, layer.ep.comm());
    let options = ep.options();
    let [tokens, d_model] = x.dims();
    let [_, k] = weights.dims();
    let (device, rank, ranks) = (x.device(), comm.rank(), comm.size());
    let step = state.micro_batch * options.lanes + options.lane;
    state.micro_batch += 1;
    let key = |op| Key::new(op, step, layer.layer);

    // Count.
    gather_load(layer, &mut state.load, ids, key(Op::Count));
    let mut expert_load = Vec::new();
    state.load.expert_loads(&mut expert_load);
    let kept = capacity.map(|factor| {
        let copies: u64 = expert_load.iter().sum();
        let capacity = (copies as f64 * factor / expert_load.len() as f64).ceil() as u32;
        drop_beyond(capacity, &mut state.load, rank, ids)
    });

    // Plan.
    let start = Instant::now();
    state.planner.plan(
        &state.load,
        &layer.placement,
        options.slots,
        &mut state.plan,
    );
    let planning = start.elapsed();
    debug_assert_eq!(
        check(&state.load, &layer.placement, options.slots, &state.plan),
        Ok(())
    );
    let replication = replication(layer, &state.plan, step);
    // Outside of the graph, as they are used inside of its backward pass.
    let of_experts = [&experts.gate_up, &experts.down].map(|weights| weights.val().inner());
    let send_weights = move |replication: &Replication, pass| {
        let [gate_up, down] = of_experts.clone();
        send_experts(gate_up, down, replication, pass);
    };
    if options.overlap {
        send_weights(&replication, Pass::Forward);
    }

    // Reroute.
    state
        .reroute
        .build(&state.load, &layer.placement, &state.plan);
    let destinations = destinations(&state.reroute, rank, ids, kept.as_deref());
    let outbound = Outbound::new(ids, &destinations, k, ranks);
    let routes = comm
        .all_to_all(key(Op::DispatchIds), outbound.messages())
        .unwrap_or_else(|error| fail(error));
    let (instance_of, instances) = instances_on(rank, &layer.placement, &state.plan);
    let inbound = Inbound::new(&routes, &instance_of, instances, key(Op::DispatchIds))
        .unwrap_or_else(|error| fail(error));

    // Dispatch, experts, combine.
    let exchange = |op, backward, send: &[usize], receive: &[usize]| RowExchange {
        comm: ep.rows().clone(),
        key: key(op),
        backward_key: key(backward),
        send: send.into(),
        receive: receive.into(),
        before_backward: None,
    };
    // Outputs come back last, so their gradients are what the backward pass sends first.
    let combining = |send: &[usize], receive: &[usize]| {
        let exchange = exchange(Op::Combine, Op::CombineBackward, send, receive);
        if !options.overlap || replication.is_none() {
            return exchange;
        }
        let (send_weights, replication) = (send_weights.clone(), replication.clone());
        exchange.with_before_backward(move || send_weights(&replication, Pass::Backward))
    };
    let rows = gather_rows(x, indices(outbound.token_of_row, &device));
    let received = all_to_all_rows(
        rows,
        exchange(
            Op::Dispatch,
            Op::DispatchBackward,
            &outbound.rows,
            &inbound.rows,
        ),
    );
    let sorted = gather_rows(received, indices(inbound.row_of_copy, &device));
    let outputs = experts.forward(
        sorted,
        indices(inbound.offsets, &device),
        replication.clone(),
    );
    let sent_back;
    let output = match options.combine {
        CombineOrder::Exact => {
            sent_back = outbound.copies.iter();
            let arrived = gather_rows(outputs, indices(inbound.sorted_place, &device));
            let returned = all_to_all_rows(arrived, combining(&inbound.copies, &outbound.copies));
            let index = matrix(outbound.copy_index, [tokens, k], &device);
            sum_rows(returned, index, weights)
        }
        CombineOrder::Rank => {
            sent_back = outbound.rows.iter();
            let flat = weights.cast(outputs.dtype()).reshape([tokens * k, 1]);
            let sent = gather_rows(flat, indices(outbound.place_of_copy, &device));
            let weights = all_to_all_rows(
                sent,
                exchange(
                    Op::DispatchWeights,
                    Op::DispatchWeightsBackward,
                    &outbound.copies,
                    &inbound.copies,
                ),
            );
            let shape = [inbound.rows.iter().sum(), inbound.width];
            let weights =
                gather_rows(weights, indices(inbound.arrivals_of_row, &device)).reshape(shape);
            let index = matrix(inbound.copies_of_row, shape, &device);
            let summed = sum_rows(outputs, index, weights);
            let returned = all_to_all_rows(summed, combining(&inbound.rows, &outbound.rows));
            let shape = [tokens, outbound.row_index_width];
            let index = matrix(outbound.row_index, shape, &device);
            let ones = Tensor::ones(shape, (&returned.device(), returned.dtype()));
            sum_rows(returned, index, ones)
        }
    };

    // Telemetry.
    let row_bytes = d_model * output.dtype().size();
    let remote = |counts: &[usize]| counts.iter().sum::<usize>() - counts[rank];
    let back = sent_back.copied().collect::<Vec<_>>();
    let mut rank_load = Vec::new();
    Plan::default().rank_load(&state.load, &layer.placement, &mut rank_load);
    let imbalance_before = imbalance(&rank_load);
    state
        .plan
        .rank_load(&state.load, &layer.placement, &mut rank_load);
    let d_hidden = experts.down.lazy_shape()[1];
    let expert_bytes = 3 * d_model * d_hidden * experts.down.val().dtype().size();
    ep.record(LayerStats {
        layer: layer.layer,
        imbalance_before,
        imbalance_after: imbalance(&rank_load),
        replicas: state.plan.replicas.clone(),
        planning,
        dispatched_bytes: (remote(&outbound.rows) + remote(&back)) * row_bytes,
        replicated_bytes: replication.outgoing().len() * expert_bytes,
        rank_load,
        expert_load: expert_load.clone(),
    });
    (output, expert_load)
}

/// Fills `load` with the counts of all ranks.
fn gather_load(layer: &ParallelLayer, load: &mut LoadMatrix, ids: &[u32], key: Key) {
    let mut counts = vec![0u32; layer.placement.experts()];
    for id in ids {
        counts[*id as usize] += 1;
    }
    let row = Bytes::copy_from_slice(bytemuck::cast_slice(&counts));
    let gathered = layer
        .ep
        .comm()
        .all_gather(key, row)
        .unwrap_or_else(|error| fail(error));
    let counts: Vec<u32> = gathered
        .iter()
        .flat_map(|row| bytemuck::pod_collect_to_vec::<u8, u32>(row))
        .collect();
    load.set_from(&counts)
        .expect("every rank has the same number of experts");
}

/// Limits every expert to `capacity` copies, those of lower ranks and earlier tokens first. Returns
/// which of this rank's copies stay.
fn drop_beyond(capacity: u32, load: &mut LoadMatrix, rank: usize, ids: &[u32]) -> Vec<bool> {
    let mut room = vec![capacity; load.experts()];
    for source in 0..load.ranks() {
        for (count, room) in load.row_mut(source).iter_mut().zip(&mut room) {
            *count = (*count).min(*room);
            *room -= *count;
        }
    }
    let mut left = load.row(rank).to_vec();
    ids.iter()
        .map(|id| {
            let left = &mut left[*id as usize];
            let stays = *left > 0;
            *left = left.saturating_sub(1);
            stays
        })
        .collect()
}

/// Destination rank of every copy of this rank's tokens.
fn destinations(reroute: &Reroute, rank: usize, ids: &[u32], kept: Option<&[bool]>) -> Vec<u32> {
    let mut destinations = Vec::with_capacity(ids.len());
    let Some(kept) = kept else {
        reroute.assign(rank, ids, &mut destinations);
        return destinations;
    };
    let staying: Vec<u32> = ids
        .iter()
        .zip(kept)
        .filter_map(|(id, kept)| kept.then_some(*id))
        .collect();
    reroute.assign(rank, &staying, &mut destinations);
    let mut assigned = destinations.into_iter();
    kept.iter()
        .map(|kept| kept.then(|| assigned.next()).flatten().unwrap_or(DROPPED))
        .collect()
}

/// The plan's replicas as this rank serves and hosts them.
fn replication(layer: &ParallelLayer, plan: &Plan, step: u64) -> Replication {
    let (comm, placement) = (layer.ep.comm(), &layer.placement);
    let rank = comm.rank();
    let local = |expert: u32| {
        let home = placement.experts_of(placement.home(expert as usize));
        home.partition_point(|e| *e < expert)
    };
    let mut outgoing = Vec::new();
    let mut incoming = Vec::new();
    for replica in &plan.replicas {
        let home = placement.home(replica.expert as usize);
        let seen_from = |peer| Replica {
            local_expert: local(replica.expert),
            peer,
            slot: replica.slot as usize,
        };
        if home == rank {
            outgoing.push(seen_from(replica.rank as usize));
        }
        if replica.rank as usize == rank {
            incoming.push(seen_from(home));
        }
    }
    incoming.sort_by_key(|replica| replica.slot);
    let replication = Replication::new(
        comm.clone(),
        step,
        layer.layer,
        outgoing,
        incoming,
        layer.ep.pool.clone(),
    );
    #[cfg(feature = "link")]
    if !replication.is_none() && comm.device_link().is_some() {
        return replication.with_hops(super::hops::weight_hops(rank, placement, plan));
    }
    replication
}

fn indices(values: Vec<i32>, device: &Device) -> Tensor<1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), device)
}

fn matrix(values: Vec<i32>, shape: [usize; 2], device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
