use super::board::{Board, replica};
use super::{LoadMatrix, Placement, Plan, Planner};
use std::cmp::Reverse;

/// Least-loaded assignment, as in LLEP: experts in order of load; what their home cannot hold spills to the least
/// loaded rank.
///
/// A home keeps up to `alpha * mean` tokens, less what its experts still to come will bring. The rest of the expert goes
/// to the rank with the least load, in pieces of at least `min_chunk` tokens; what is left over stays at home. Does
/// nothing while the imbalance is below `lambda`. May need many slots: [`LeastLoaded::unlimited`] takes as many as it
/// needs and **ignores `slots`**, as LLEP does.
#[derive(Debug)]
pub struct LeastLoaded {
    /// The share of the mean load that a rank may have, in thousandths.
    pub alpha: u64,
    /// The fewest tokens to move, capped at 1/64 of the mean load of a rank (see [`Quota::min_quota`]).
    ///
    /// [`Quota::min_quota`]: super::Quota::min_quota
    pub min_chunk: u64,
    /// The imbalance from which to act, in thousandths.
    pub lambda: u64,
    unlimited: bool,
    board: Board,
    /// Experts by load, heaviest first, `[experts]`.
    order: Vec<u32>,
    /// Tokens of each rank: assigned so far, and brought by its own experts still to come, `[ranks]`.
    load: Vec<u64>,
    free: Vec<usize>,
}

impl Default for LeastLoaded {
    /// `alpha` 1, at least 1024 tokens in a chunk, `lambda` 1.3.
    fn default() -> Self {
        Self {
            alpha: 1000,
            min_chunk: 1024,
            lambda: 1300,
            unlimited: false,
            board: Board::default(),
            order: Vec::new(),
            load: Vec::new(),
            free: Vec::new(),
        }
    }
}

impl LeastLoaded {
    /// The variant that ignores the number of slots.
    pub fn unlimited() -> Self {
        Self {
            unlimited: true,
            ..Self::default()
        }
    }

    /// Moves up to `tokens` of `expert` to other ranks.
    fn spill(
        &mut self,
        placement: &Placement,
        expert: u32,
        mut tokens: u64,
        capacity: u64,
        least: u64,
        plan: &mut Plan,
    ) {
        let home = placement.home(expert as usize);
        let first = plan.replicas.len();
        while tokens >= least {
            let placed = &plan.replicas[first..];
            let targets = placement.ranks_of(placement.domain(home)).filter(|&r| {
                let there = placed.iter().any(|p| p.rank as usize == r);
                r != home && self.free[r] > 0 && !there
            });
            let Some(target) = targets.min_by_key(|&r| self.load[r]) else {
                return;
            };
            let quota = tokens.min(capacity.saturating_sub(self.load[target]));
            if quota < least {
                return;
            }
            plan.replicas.push(replica(expert, target, quota));
            self.free[target] -= 1;
            self.load[target] += quota;
            self.load[home] -= quota;
            tokens -= quota;
        }
    }
}

impl Planner for LeastLoaded {
    fn name(&self) -> &'static str {
        if self.unlimited {
            "least-loaded-unlimited"
        } else {
            "least-loaded"
        }
    }

    fn ignores_slots(&self) -> bool {
        self.unlimited
    }

    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan) {
        if !self.board.start(load, placement, plan) {
            return;
        }
        let (mean, max) = (self.board.mean(), self.board.max());
        if u128::from(max) * 1000 < u128::from(mean) * u128::from(self.lambda) {
            return;
        }
        let capacity = u128::from(mean) * u128::from(self.alpha) / 1000;
        // Above the slowest rank's load a capacity would only make things worse.
        let capacity = u64::try_from(capacity).unwrap_or(u64::MAX).min(max);
        let least = self.min_chunk.min(mean / 64).max(1);
        let slots = if self.unlimited { usize::MAX } else { slots };
        self.free.clear();
        self.free.resize(placement.ranks(), slots);
        self.load.clear();
        self.load.extend_from_slice(&self.board.rank_load);
        self.order.clear();
        self.order.extend(0..load.experts() as u32);
        let expert_load = &self.board.expert_load;
        self.order
            .sort_unstable_by_key(|&e| (Reverse(expert_load[e as usize]), e));
        for i in 0..self.order.len() {
            let expert = self.order[i];
            let tokens = self.board.expert_load[expert as usize];
            let over = self.load[placement.home(expert as usize)].saturating_sub(capacity);
            self.spill(placement, expert, over.min(tokens), capacity, least, plan);
        }
        self.board.seal(plan);
    }
}
