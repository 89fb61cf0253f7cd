//! What moving replicas' weights takes: the cost model, the relay schedule and the simulator behind it.

use super::{Placement, Plan};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// What tokens and weights cost, in integers, so that all ranks decide alike. The default is free transfer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CostModel {
    /// Time that a rank takes for one token copy through one expert, in picoseconds.
    pub token_ps: u64,
    /// Size of one expert's weights, in bytes. Zero makes transfer free.
    pub expert_bytes: u64,
    /// Bytes a second that a rank can send, and at the same time receive. Zero means that weights cannot move: no
    /// replica is ever made, unless transfer is free.
    pub bandwidth: u64,
    /// Time from the end of sending a chunk until the receiver can use it, in picoseconds.
    pub latency_ps: u64,
    /// Weights travel in chunks of this many bytes, so that relays can forward what they have; 0 means in one piece.
    pub chunk_bytes: u64,
}

impl Default for CostModel {
    fn default() -> Self {
        Self::free()
    }
}

impl CostModel {
    /// Moving weights takes no time; a token takes one unit of time.
    pub const fn free() -> Self {
        Self {
            token_ps: 1,
            expert_bytes: 0,
            bandwidth: u64::MAX,
            latency_ps: 0,
            chunk_bytes: 0,
        }
    }

    /// Whether moving weights takes no time.
    pub fn is_free(&self) -> bool {
        self.expert_bytes == 0
    }

    /// Time to send `bytes`, in picoseconds, without latency; `None` when the bandwidth is zero.
    fn wire_ps(&self, bytes: u64) -> Option<u64> {
        let ps = u128::from(bytes) * 1_000_000_000_000;
        let ps = ps.checked_div(u128::from(self.bandwidth))?;
        Some(u64::try_from(ps).unwrap_or(u64::MAX))
    }

    /// The least time that any replica takes to arrive, in picoseconds; `u64::MAX` when weights cannot move.
    pub fn one_transfer_ps(&self) -> u64 {
        if self.is_free() {
            return 0;
        }
        match self.wire_ps(self.expert_bytes) {
            Some(wire) => wire.saturating_add(self.latency_ps),
            None => u64::MAX,
        }
    }

    /// Predicted time of a layer's expert computation, in picoseconds: the slowest rank's tokens, and the transfer.
    pub fn step_ps(&self, slowest_rank_tokens: u64, transfer_ps: u64) -> u64 {
        let compute = slowest_rank_tokens.saturating_mul(self.token_ps);
        compute.saturating_add(transfer_ps)
    }

    /// The same with few chunks: nearly the same prediction, several times as fast.
    pub(crate) fn coarse(&self) -> Self {
        let chunk_bytes = match self.chunk_bytes {
            0 => 0,
            size => size.max(self.expert_bytes.div_ceil(4)),
        };
        Self {
            chunk_bytes,
            ..*self
        }
    }

    fn chunks(&self) -> u64 {
        // More chunks than this make no difference to the prediction, only to the time it takes.
        const MOST: u64 = 16;
        match self.chunk_bytes {
            0 => 1,
            size => self.expert_bytes.div_ceil(size).clamp(1, MOST),
        }
    }
}

/// One copy of an expert's weights from a rank that has them to one that needs them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Hop {
    /// The expert whose weights move.
    pub expert: u32,
    /// The sending rank: the expert's home, or a relay that receives the expert itself.
    pub from: u32,
    /// The receiving rank.
    pub to: u32,
}

/// Who sends which replica's weights to whom. Hops of a rank run in the order in which they stand here, those of its
/// own experts before those that it relays, chunk by chunk.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Schedule {
    /// The hops: first those from home ranks, by expert, then those from relays.
    pub hops: Vec<Hop>,
    /// Whether some rank relays.
    pub relayed: bool,
}

/// Fewest replicas of one expert for which relays are worth a second hop.
const RELAY_FROM: usize = 4;

impl Schedule {
    /// Every home rank sends to all its replicas.
    pub fn direct(&mut self, placement: &Placement, plan: &Plan) {
        self.hops.clear();
        self.relayed = false;
        self.hops.extend(plan.replicas.iter().map(|r| Hop {
            expert: r.expert,
            from: placement.home(r.expert as usize) as u32,
            to: r.rank,
        }));
    }

    /// Spreads experts with many replicas over a tree of two levels: the home rank sends to about `sqrt(n)` of the `n`
    /// replicas, and each of these forwards to its share of the others. Ranks that send least become relays first.
    pub fn relayed(&mut self, placement: &Placement, plan: &Plan, sending: &mut Vec<u32>) {
        self.direct(placement, plan);
        sending.clear();
        sending.resize(placement.ranks(), 0);
        for send in &self.hops {
            sending[send.from as usize] += 1;
        }
        for of_expert in self.hops.chunk_by_mut(|a, b| a.expert == b.expert) {
            let n = of_expert.len();
            if n < RELAY_FROM {
                continue;
            }
            self.relayed = true;
            let home = of_expert[0].from;
            let relays = n.isqrt();
            of_expert.sort_unstable_by_key(|s| (sending[s.to as usize], s.to));
            let (relays, leaves) = of_expert.split_at_mut(relays);
            sending[home as usize] -= leaves.len() as u32;
            for (i, leaf) in leaves.iter_mut().enumerate() {
                leaf.from = relays[i % relays.len()].to;
                sending[leaf.from as usize] += 1;
            }
        }
        if self.relayed {
            // Home sends first: a relay waits only for ranks that never wait, so nothing can hang.
            let home = |s: &Hop| placement.home(s.expert as usize) as u32;
            self.hops
                .sort_unstable_by_key(|s| (s.from != home(s), s.expert, s.to));
        }
    }
}

/// Predicts how long a schedule takes: each rank sends one chunk at a time and receives one chunk at a time, each at the
/// model's bandwidth, and a relay forwards a chunk once it has it. Buffers are reused.
#[derive(Debug, Default)]
pub struct TransferSimulator {
    schedule: Schedule,
    /// What each rank has to send (and, for the bound, to receive).
    sending: Vec<u32>,
    /// Positions in `schedule.hops` grouped by sender, and where each sender's group starts, `[ranks + 1]`.
    by_sender: Vec<u32>,
    starts: Vec<usize>,
    senders: Vec<Sender>,
    receiver_free: Vec<u64>,
    /// When each chunk of each send has arrived, `[sends, chunks]`; `u64::MAX` before.
    arrived: Vec<u64>,
    /// For a relayed send the position of the send that brings the weights to the relay.
    source: Vec<Option<u32>>,
    /// Senders by the time at which they could send next.
    ready: BinaryHeap<Reverse<(u64, u32)>>,
    /// Senders that wait for a chunk: the send that brings it, and the sender.
    waiting: Vec<(u32, u32)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Sender {
    free: u64,
    /// Sends done so far: its own experts chunk by chunk, then what it relays.
    done: u64,
}

impl TransferSimulator {
    /// Time until all replicas of `plan` have their weights, in picoseconds: the better of sending directly and through
    /// relays. Zero for the empty plan; `u64::MAX` when weights cannot move.
    pub fn transfer_ps(&mut self, model: &CostModel, placement: &Placement, plan: &Plan) -> u64 {
        if plan.is_empty() || model.is_free() {
            return 0;
        }
        let mut schedule = std::mem::take(&mut self.schedule);
        schedule.direct(placement, plan);
        // Without relays nobody waits for a first chunk, so whole experts do, and are quicker to simulate.
        let whole = CostModel {
            chunk_bytes: 0,
            ..*model
        };
        let mut time = self.simulate(&whole, placement, &schedule);
        if time > self.at_least_ps(model, placement, plan) {
            schedule.relayed(placement, plan, &mut self.sending);
            if schedule.relayed {
                time = time.min(self.simulate(model, placement, &schedule));
            }
        }
        self.schedule = schedule;
        time
    }

    /// A quick lower bound of [`transfer_ps`](Self::transfer_ps): what the busiest rank receives, and what the busiest
    /// home has to send even when relays do the rest.
    pub fn at_least_ps(&mut self, model: &CostModel, placement: &Placement, plan: &Plan) -> u64 {
        if plan.is_empty() || model.is_free() {
            return 0;
        }
        self.sending.clear();
        self.sending.resize(placement.ranks() * 2, 0);
        let (sent, received) = self.sending.split_at_mut(placement.ranks());
        for of_expert in plan.replicas.chunk_by(|a, b| a.expert == b.expert) {
            sent[placement.home(of_expert[0].expert as usize)] += 1;
            for replica in of_expert {
                received[replica.rank as usize] += 1;
            }
        }
        let busiest = self.sending.iter().copied().max().unwrap_or(0);
        match model.wire_ps(model.expert_bytes) {
            Some(wire) => wire
                .saturating_mul(u64::from(busiest))
                .saturating_add(model.latency_ps),
            None => u64::MAX,
        }
    }

    /// Time that `schedule` takes, in picoseconds; `u64::MAX` when weights cannot move.
    pub fn simulate(
        &mut self,
        model: &CostModel,
        placement: &Placement,
        schedule: &Schedule,
    ) -> u64 {
        if schedule.hops.is_empty() || model.is_free() {
            return 0;
        }
        let chunks = model.chunks();
        let Some(wire) = model.wire_ps(model.expert_bytes.div_ceil(chunks)) else {
            return u64::MAX;
        };
        self.start(placement, schedule, chunks);
        let mut end = 0;
        while let Some(Reverse((ready, sender))) = self.ready.pop() {
            let (at, chunk) = self.next(sender, schedule, placement, chunks);
            let to = schedule.hops[at as usize].to as usize;
            let start = ready.max(self.receiver_free[to]);
            if start > ready {
                self.ready.push(Reverse((start, sender)));
                continue;
            }
            let sent = start.saturating_add(wire);
            let arrived = sent.saturating_add(model.latency_ps);
            self.receiver_free[to] = sent;
            self.arrived[(u64::from(at) * chunks + chunk) as usize] = arrived;
            end = end.max(arrived);
            let state = &mut self.senders[sender as usize];
            state.free = sent;
            state.done += 1;
            self.line_up(sender, schedule, placement, chunks);
            // Relays that waited for this send look again.
            for i in (0..self.waiting.len()).rev() {
                if self.waiting[i].0 == at {
                    let (_, relay) = self.waiting.swap_remove(i);
                    self.line_up(relay, schedule, placement, chunks);
                }
            }
        }
        end
    }

    fn start(&mut self, placement: &Placement, schedule: &Schedule, chunks: u64) {
        let (ranks, sends) = (placement.ranks(), &schedule.hops);
        self.starts.clear();
        self.starts.resize(ranks + 1, 0);
        for send in sends {
            self.starts[send.from as usize + 1] += 1;
        }
        for rank in 0..ranks {
            self.starts[rank + 1] += self.starts[rank];
        }
        self.by_sender.clear();
        self.by_sender.extend(0..sends.len() as u32);
        self.by_sender
            .sort_unstable_by_key(|&i| (sends[i as usize].from, i));
        self.senders.clear();
        self.senders.resize(ranks, Sender::default());
        self.receiver_free.clear();
        self.receiver_free.resize(ranks, 0);
        self.arrived.clear();
        self.arrived.resize(sends.len() * chunks as usize, u64::MAX);
        let is_home = |s: &Hop| placement.home(s.expert as usize) == s.from as usize;
        let from_home = &sends[..sends.partition_point(is_home)];
        self.source.clear();
        self.source.extend(sends.iter().map(|send| {
            if is_home(send) {
                return None;
            }
            let first = from_home.partition_point(|s| s.expert < send.expert);
            let brings = |s: &Hop| s.expert == send.expert && s.to == send.from;
            let relay = from_home[first..].iter().position(brings)?;
            Some((first + relay) as u32)
        }));
        self.ready.clear();
        self.waiting.clear();
        for sender in 0..ranks as u32 {
            self.line_up(sender, schedule, placement, chunks);
        }
    }

    /// The position and chunk of what `sender` sends next: chunk by chunk over its own experts' sends, then over those
    /// that it relays.
    fn next(
        &self,
        sender: u32,
        schedule: &Schedule,
        placement: &Placement,
        chunks: u64,
    ) -> (u32, u64) {
        let range = self.starts[sender as usize]..self.starts[sender as usize + 1];
        let sends = &self.by_sender[range];
        let own = sends.partition_point(|&i| {
            let expert = schedule.hops[i as usize].expert;
            placement.home(expert as usize) == sender as usize
        });
        let done = self.senders[sender as usize].done;
        let own_chunks = own as u64 * chunks;
        let (sends, done) = if done < own_chunks {
            (&sends[..own], done)
        } else {
            (&sends[own..], done - own_chunks)
        };
        let width = sends.len() as u64;
        (sends[(done % width) as usize], done / width)
    }

    /// Puts a sender with something left to send in line, or lets it wait for a chunk to arrive.
    fn line_up(&mut self, sender: u32, schedule: &Schedule, placement: &Placement, chunks: u64) {
        let rank = sender as usize;
        let all = (self.starts[rank + 1] - self.starts[rank]) as u64 * chunks;
        if self.senders[rank].done >= all {
            return;
        }
        let (at, chunk) = self.next(sender, schedule, placement, chunks);
        let free = self.senders[rank].free;
        match self.source[at as usize] {
            None => self.ready.push(Reverse((free, sender))),
            Some(source) => match self.arrived[(u64::from(source) * chunks + chunk) as usize] {
                u64::MAX => self.waiting.push((source, sender)),
                arrived => self.ready.push(Reverse((free.max(arrived), sender))),
            },
        }
    }
}
