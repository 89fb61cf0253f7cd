use super::board::{Board, replica};
use super::{LoadMatrix, Placement, Plan, Planner};
use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// History-based balancing after DeepSeek's EPLB (<https://github.com/deepseek-ai/EPLB>): the loads of the last
/// micro-batches decide where replicas go, and each expert's tokens are split equally over its instances.
///
/// Replicates the expert with the highest load per instance until all slots are taken, then packs: largest item first,
/// to the least loaded rank with a free slot that has no instance of the expert yet. Unlike the original, homes do not
/// move, no rank holds an expert twice, and any topology works. Without history the plan is empty. Replicas that the
/// present micro-batch gives no token are left out of the plan.
///
/// The imbalance may be higher than without replicas when the load changes faster than the history.
#[derive(Debug)]
pub struct Eplb {
    window: usize,
    hierarchical: bool,
    /// Expert loads of the last micro-batches, a ring, `[up to window, experts]`.
    history: Vec<u64>,
    oldest: usize,
    /// Their sum, `[experts]`.
    sum: Vec<u64>,
    board: Board,
    /// Experts by load per instance.
    queue: BinaryHeap<(u128, Reverse<u32>)>,
    /// Instances of each expert, `[experts]`.
    copies: Vec<u32>,
    /// Slots that are still to be given to an expert, `[domains]`, and free ones, `[ranks]`.
    budget: Vec<u64>,
    free: Vec<usize>,
    /// Predicted load of each rank, `[ranks]`, scaled like `share`.
    predicted: Vec<u128>,
    /// Replicas to place: share of load and expert, largest first.
    items: Vec<(u128, u32)>,
}

impl Eplb {
    /// Plans from the sum of the last `window` micro-batches, at least 1. Without `hierarchical` the slots of all
    /// domains are given out by one ranking of all experts, as far as each domain has some left; with it each domain
    /// ranks its own experts, and all of its slots are used.
    pub fn new(window: usize, hierarchical: bool) -> Self {
        Self {
            window: window.max(1),
            hierarchical,
            history: Vec::new(),
            oldest: 0,
            sum: Vec::new(),
            board: Board::default(),
            queue: BinaryHeap::new(),
            copies: Vec::new(),
            budget: Vec::new(),
            free: Vec::new(),
            predicted: Vec::new(),
            items: Vec::new(),
        }
    }

    /// Adds the present loads to the history, in place of the oldest.
    fn remember(&mut self) {
        let present = &self.board.expert_load;
        let experts = present.len();
        if self.sum.len() != experts {
            self.history.clear();
            self.oldest = 0;
            self.sum.clear();
            self.sum.resize(experts, 0);
        }
        if experts == 0 {
            return;
        }
        if self.history.len() < self.window * experts {
            self.history.extend_from_slice(present);
        } else {
            let start = self.oldest * experts;
            let oldest = &mut self.history[start..start + experts];
            for ((sum, old), &new) in self.sum.iter_mut().zip(oldest).zip(present) {
                *sum -= *old;
                *old = new;
            }
            self.oldest = (self.oldest + 1) % self.window;
        }
        for (sum, &new) in self.sum.iter_mut().zip(present) {
            *sum += new;
        }
    }

    /// Gives the slots of the domains in `domains` to experts.
    fn replicate(&mut self, placement: &Placement, domains: std::ops::Range<usize>) {
        self.queue.clear();
        for domain in domains {
            for rank in placement.ranks_of(domain) {
                let experts = placement.experts_of(rank).iter();
                let loaded = experts.filter(|&&e| self.sum[e as usize] > 0);
                let sum = &self.sum;
                self.queue
                    .extend(loaded.map(|&e| (share(sum[e as usize], 1), Reverse(e))));
            }
        }
        while let Some((_, Reverse(expert))) = self.queue.pop() {
            let e = expert as usize;
            let domain = placement.domain(placement.home(e));
            let ranks = placement.ranks_of(domain).len() as u32;
            if self.budget[domain] == 0 || self.copies[e] >= ranks {
                continue;
            }
            self.budget[domain] -= 1;
            self.copies[e] += 1;
            self.queue
                .push((share(self.sum[e], self.copies[e]), Reverse(expert)));
        }
    }

    /// Finds ranks for the replicas, largest first.
    fn pack(&mut self, placement: &Placement, plan: &mut Plan) {
        self.predicted.clear();
        self.predicted.resize(placement.ranks(), 0);
        self.items.clear();
        for (e, &copies) in self.copies.iter().enumerate() {
            let item = share(self.sum[e], copies);
            self.predicted[placement.home(e)] += item;
            self.items.extend((1..copies).map(|_| (item, e as u32)));
        }
        self.items
            .sort_unstable_by_key(|&(item, e)| (Reverse(item), e));
        // Items of one expert stand together, so the replicas pushed last are the ones to look at for a second copy.
        let (mut start, mut previous) = (0, None);
        for &(item, expert) in &self.items {
            if previous != Some(expert) {
                (start, previous) = (plan.replicas.len(), Some(expert));
            }
            let e = expert as usize;
            let home = placement.home(e);
            let placed = &plan.replicas[start..];
            let targets = placement.ranks_of(placement.domain(home)).filter(|&r| {
                let there = placed.iter().any(|p| p.rank as usize == r);
                r != home && self.free[r] > 0 && !there
            });
            if let Some(target) = targets.min_by_key(|&r| self.predicted[r]) {
                self.free[target] -= 1;
                self.predicted[target] += item;
                plan.replicas.push(replica(expert, target, 0));
            }
        }
    }
}

/// Load per instance, as a fixed-point number.
fn share(load: u64, copies: u32) -> u128 {
    (u128::from(load) << 32) / u128::from(copies)
}

impl Default for Eplb {
    /// Global, over the last 8 micro-batches.
    fn default() -> Self {
        Self::new(8, false)
    }
}

impl Planner for Eplb {
    fn name(&self) -> &'static str {
        if self.hierarchical {
            "eplb-hierarchical"
        } else {
            "eplb"
        }
    }

    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan) {
        if !self.board.start(load, placement, plan) {
            return;
        }
        if self.sum.len() == load.experts() && slots > 0 {
            let slots = slots.min(load.experts());
            self.copies.clear();
            self.copies.resize(load.experts(), 1);
            self.free.clear();
            self.free.resize(placement.ranks(), slots);
            self.budget.clear();
            let ranks = (0..placement.domains()).map(|d| placement.ranks_of(d).len());
            self.budget
                .extend(ranks.map(|ranks| (ranks * slots) as u64));
            if self.hierarchical {
                for domain in 0..placement.domains() {
                    self.replicate(placement, domain..domain + 1);
                }
            } else {
                self.replicate(placement, 0..placement.domains());
            }
            self.pack(placement, plan);
            self.board.seal(plan);
            let expert_load = &self.board.expert_load;
            for of_expert in plan.replicas.chunk_by_mut(|a, b| a.expert == b.expert) {
                let instances = of_expert.len() as u64 + 1;
                let quota = expert_load[of_expert[0].expert as usize] / instances;
                of_expert.iter_mut().for_each(|r| r.quota = quota);
            }
            plan.replicas.retain(|r| r.quota > 0);
        }
        self.remember();
    }
}
