//! Without a device: the lists of all ranks run over memory that is as strict as NCCL, and what arrives is compared with
//! what the host's own collectives deliver, or with what was there.

mod faults;
pub(crate) mod memory;
#[cfg(all(feature = "nccl", target_os = "linux"))]
mod standin;

use std::collections::HashMap;
use std::sync::Arc;

use bytes::Bytes;
use proptest::prelude::*;

use super::plan::{self, GradientHop, Round, Transfer, Way};
use super::{Flight, Lane, Link, Span};
use crate::balance::{Placement, Plan, Replica};
use crate::comm::{CommError, Communicator, Key, Op, RankOptions, split};
use crate::parallel::hops::weight_hops;
use memory::run_linked;

const KEY: Key = Key::new(Op::Dispatch, 3, 2);

fn link(comm: &Arc<dyn Communicator>) -> Link {
    comm.device_link().cloned().expect("a link")
}

fn span(buffer: &mut [u8]) -> Span {
    Span {
        address: buffer.as_mut_ptr() as u64,
        bytes: buffer.len(),
    }
}

/// Begins an exchange between `buffers`, which stay where they are until the flight is waited for.
fn start(
    comm: &Arc<dyn Communicator>,
    lane: Lane,
    key: Key,
    rounds: &[Round],
    buffers: &mut [Vec<u8>],
) -> Result<Flight, CommError> {
    let spans: Vec<Span> = buffers.iter_mut().map(|buffer| span(buffer)).collect();
    // SAFETY: the callers keep the buffers, and look at them only after waiting.
    unsafe { link(comm).start(lane, &**comm, key, rounds, &spans, ()) }
}

fn exchange(
    comm: &Arc<dyn Communicator>,
    lane: Lane,
    key: Key,
    rounds: &[Round],
    buffers: &mut [Vec<u8>],
) -> Result<(), CommError> {
    start(comm, lane, key, rounds, buffers)?.wait(&**comm)
}

/// Rows of `counts[from][to]`, each byte of its own.
fn rows(counts: &[Vec<usize>], from: usize, row_bytes: usize) -> Vec<u8> {
    let bytes = counts[from].iter().sum::<usize>() * row_bytes;
    (0..bytes).map(|at| (at * 7 + from * 31) as u8).collect()
}

fn parts(rows: &[u8], counts: &[usize], row_bytes: usize) -> Vec<Bytes> {
    let mut rest = rows;
    let mut part = |count: &usize| {
        let own;
        (own, rest) = rest.split_at(count * row_bytes);
        Bytes::copy_from_slice(own)
    };
    counts.iter().map(&mut part).collect()
}

/// Rows over the link against rows over the communicator.
fn rows_arrive(comm: &Arc<dyn Communicator>, counts: &[Vec<usize>], row_bytes: usize, key: Key) {
    let rank = comm.rank();
    let receive: Vec<usize> = counts.iter().map(|of_rank| of_rank[rank]).collect();
    let own = rows(counts, rank, row_bytes);
    let size = receive.iter().sum::<usize>() * row_bytes;
    let mut buffers = [own.clone(), vec![0xee; size]];
    let round = plan::all_to_all(&counts[rank], &receive, row_bytes);
    exchange(comm, Lane::Rows, key, &[round], &mut buffers).unwrap();
    let expected = comm
        .all_to_all(key, parts(&own, &counts[rank], row_bytes))
        .unwrap();
    assert_eq!(buffers[plan::ROWS_RECEIVED], expected.concat());
}

/// Any plan: some experts on some ranks that are not their home, at most `slots` a rank.
fn plan_of(placement: &Placement, wishes: &[(usize, usize)], slots: usize) -> Plan {
    let mut plan = Plan::default();
    let mut used = vec![0; placement.ranks()];
    for (expert, rank) in wishes {
        let (expert, rank) = (expert % placement.experts(), rank % placement.ranks());
        let taken = (plan.replicas.iter())
            .any(|it| it.expert as usize == expert && it.rank as usize == rank);
        if !taken && placement.home(expert) != rank && used[rank] < slots {
            used[rank] += 1;
            plan.replicas.push(Replica {
                expert: expert as u32,
                rank: rank as u32,
                slot: 0,
                quota: 1,
            });
        }
    }
    plan.seal(placement.ranks(), &mut Vec::new());
    plan
}

/// The byte at a place of an expert's matrix.
fn weight(expert: usize, matrix: usize, at: usize) -> u8 {
    (expert * 53 + matrix * 101 + at * 3) as u8
}

fn experts(ids: impl Iterator<Item = usize>, matrix: usize, bytes: usize) -> Vec<u8> {
    ids.flat_map(|id| (0..bytes).map(move |at| weight(id, matrix, at)))
        .collect()
}

/// Buffers of a replication before it: weights at home, slots with other things in them.
fn weight_buffers(
    rank: usize,
    placement: &Placement,
    plan: &Plan,
    bytes: [usize; 2],
) -> Vec<Vec<u8>> {
    let own = || placement.experts_of(rank).iter().map(|id| *id as usize);
    let home = [0, 1].map(|matrix| experts(own(), matrix, bytes[matrix]));
    let slots = plan.hosted(rank).count();
    let empty = bytes.map(|bytes| vec![0xee; slots * bytes]);
    home.into_iter().chain(empty).collect()
}

/// The slots hold what home has.
fn replicas_are_there(rank: usize, plan: &Plan, bytes: [usize; 2], buffers: &[Vec<u8>]) {
    let mut hosted: Vec<&Replica> = plan.hosted(rank).collect();
    hosted.sort_by_key(|it| it.slot);
    for matrix in [0, 1] {
        let ids = hosted.iter().map(|it| it.expert as usize);
        let expected = experts(ids, matrix, bytes[matrix]);
        assert_eq!(buffers[plan::SLOTS[matrix]], expected, "matrix {matrix}");
    }
}

/// What `rank` sends and receives of gradients: each host's slots to the experts' homes.
fn gradient_hops(rank: usize, placement: &Placement, plan: &Plan) -> Vec<GradientHop> {
    let local = |it: &Replica| {
        let own = placement.experts_of(placement.home(it.expert as usize));
        own.binary_search(&it.expert).unwrap()
    };
    let sent = plan.hosted(rank).map(|it| GradientHop {
        local_expert: local(it),
        peer: placement.home(it.expert as usize),
        way: Way::Send,
        position: it.slot as usize,
    });
    let home = |it: &&Replica| placement.home(it.expert as usize) == rank;
    let received = plan.replicas.iter().filter(home).enumerate();
    let received = received.map(|(position, it)| GradientHop {
        local_expert: local(it),
        peer: it.rank as usize,
        way: Way::Receive,
        position,
    });
    sent.chain(received).collect()
}

/// A gradient that says where it is from.
fn gradients_arrive(
    comm: &Arc<dyn Communicator>,
    placement: &Placement,
    plan: &Plan,
    bytes: [usize; 2],
    key: Key,
) {
    let rank = comm.rank();
    let byte = |it: &Replica, matrix: usize, at: usize| {
        weight(it.expert as usize, matrix, at).wrapping_add(it.rank as u8 * 17)
    };
    let of = |replicas: Vec<&Replica>, matrix: usize| -> Vec<u8> {
        let of_replica = |it| (0..bytes[matrix]).map(move |at| byte(it, matrix, at));
        replicas.into_iter().flat_map(of_replica).collect()
    };
    let mut hosted: Vec<&Replica> = plan.hosted(rank).collect();
    hosted.sort_by_key(|it| it.slot);
    let home = |it: &&Replica| placement.home(it.expert as usize) == rank;
    let ours: Vec<&Replica> = plan.replicas.iter().filter(home).collect();
    let mut buffers: Vec<Vec<u8>> = [0, 1].map(|m| of(hosted.clone(), m)).into();
    buffers.extend(bytes.map(|bytes| vec![0xee; ours.len() * bytes]));
    let round = plan::gradients(&gradient_hops(rank, placement, plan), bytes);
    exchange(comm, Lane::Weights, key, &[round], &mut buffers).unwrap();
    for matrix in [0, 1] {
        let arrived = &buffers[plan::HOSTED_GRADIENTS[matrix]];
        assert_eq!(*arrived, of(ours.clone(), matrix), "matrix {matrix}");
    }
}

fn counts(ranks: usize) -> impl Strategy<Value = Vec<Vec<usize>>> {
    let row = prop::collection::vec(prop_oneof![Just(0usize), 0..5usize], ranks);
    prop::collection::vec(row, ranks)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]

    #[test]
    fn rows_are_those_of_the_host(
        counts in (1..5usize).prop_flat_map(counts),
        row_bytes in 1..9usize,
    ) {
        run_linked(counts.len(), RankOptions::default(), 1, |_| None, |comm| {
            rows_arrive(&comm, &counts, row_bytes, KEY);
        }).unwrap();
    }

    /// Weights under way while rows travel, gradients back, layer after layer.
    #[test]
    fn replicas_and_gradients_arrive(
        (ranks, each) in (1..7usize, 1..4usize),
        wishes in prop::collection::vec((0..100usize, 0..100usize), 0..30),
        hot in prop::collection::vec(0..100usize, 0..2),
        bytes in [1..40usize, 0..20usize],
        chunk in 1..30usize,
    ) {
        let placement = Placement::contiguous(ranks * each, ranks);
        // A hot expert wants to be everywhere, so that there are relays.
        let everywhere = hot.iter().flat_map(|expert| (0..ranks).map(move |rank| (*expert, rank)));
        let wishes: Vec<_> = everywhere.chain(wishes).collect();
        run_linked(ranks, RankOptions::default(), chunk, |_| None, |comm| {
            let rank = comm.rank();
            for layer in 0..3 {
                let key = |op| Key::new(op, 0, layer);
                let plan = plan_of(&placement, &wishes[..wishes.len() * layer as usize / 2], 2);
                let hops = weight_hops(rank, &placement, &plan);
                let rounds = plan::replication(&hops, bytes, link(&comm).chunk_bytes());
                let mut buffers = weight_buffers(rank, &placement, &plan, bytes);
                let flight = start(&comm, Lane::Weights, key(Op::Replicate), &rounds, &mut buffers);
                rows_arrive(&comm, &vec![vec![1; ranks]; ranks], 3, key(Op::Dispatch));
                flight.unwrap().wait(&*comm).unwrap();
                replicas_are_there(rank, &plan, bytes, &buffers);
                gradients_arrive(&comm, &placement, &plan, bytes, key(Op::ReplicaGrad));
            }
        }).unwrap();
    }

    /// The lists alone: every byte of every slot comes once, in chunks in order, and a relay has a chunk before the round
    /// in which it forwards it; both ends of a hop agree on size and order.
    #[test]
    fn every_byte_comes_once_and_before_it_is_forwarded(
        (ranks, each) in (2..9usize, 1..4usize),
        wishes in prop::collection::vec((0..100usize, 0..100usize), 0..40),
        hot in 0..100usize,
        bytes in [1..40usize, 0..20usize],
        chunk in 1..30usize,
    ) {
        let placement = Placement::contiguous(ranks * each, ranks);
        let wishes: Vec<_> = (0..ranks).map(|rank| (hot, rank)).chain(wishes).collect();
        let plan = plan_of(&placement, &wishes, 3);
        let hops: Vec<_> = (0..ranks).map(|rank| weight_hops(rank, &placement, &plan)).collect();
        // The hot expert has at least four replicas from five ranks on.
        prop_assert!(hops.iter().all(|of_rank| of_rank.relayed == hops[0].relayed));
        prop_assert!(ranks < 5 || hops[0].relayed);
        let rounds: Vec<_> = hops.iter().map(|of_rank| plan::replication(of_rank, bytes, chunk)).collect();
        let longest = rounds.iter().map(Vec::len).max().unwrap();
        for round in 0..longest {
            let mut ways: HashMap<(usize, usize), [Vec<usize>; 2]> = HashMap::new();
            for (rank, rounds) in rounds.iter().enumerate() {
                for it in rounds.get(round).into_iter().flatten() {
                    let (way, end) = match it.way {
                        Way::Send => ((rank, it.peer), 0),
                        Way::Receive => ((it.peer, rank), 1),
                    };
                    ways.entry(way).or_default()[end].push(it.bytes);
                }
            }
            for (way, [sent, received]) in ways {
                prop_assert_eq!(sent, received, "{:?} in round {}", way, round);
            }
        }
        for (rank, rounds) in rounds.iter().enumerate() {
            let slots = plan.hosted(rank).count();
            let mut known = bytes.map(|bytes| vec![usize::MAX; bytes * slots]);
            let mut last = HashMap::new();
            for (number, round) in rounds.iter().enumerate() {
                for it in round {
                    let Transfer { buffer, offset, bytes: size, .. } = *it;
                    prop_assert!(!hops[0].relayed || size <= chunk);
                    let Some(matrix) = plan::SLOTS.iter().position(|it| *it == buffer) else { continue };
                    let range = &mut known[matrix][offset..offset + size];
                    match it.way {
                        Way::Send => prop_assert!(range.iter().all(|round| *round < number)),
                        Way::Receive => {
                            prop_assert!(range.iter().all(|round| *round == usize::MAX));
                            range.fill(number);
                            let slot = (matrix, offset / bytes[matrix]);
                            let before = last.insert(slot, offset);
                            prop_assert!(before.is_none_or(|before| before < offset));
                        }
                    }
                }
            }
            prop_assert!(known.iter().flatten().all(|round| *round != usize::MAX));
        }
    }
}

#[test]
fn groups_have_links_of_their_own() {
    run_linked(
        4,
        RankOptions::default(),
        1,
        |_| None,
        |comm| {
            let color = comm.rank() % 2;
            let group = split(&comm, Key::new(Op::AllGather, 0, 0), color).unwrap();
            let counts = vec![vec![1, 2], vec![3, 0]];
            rows_arrive(&group, &counts, 5, KEY);
            // The other way round, within the group, and then all together.
            let pair = split(&group, Key::new(Op::AllGather, 1, 0), group.rank()).unwrap();
            rows_arrive(&pair, &[vec![4]], 2, KEY);
            rows_arrive(&comm, &vec![vec![2; 4]; 4], 1, KEY);
        },
    )
    .unwrap();
}
