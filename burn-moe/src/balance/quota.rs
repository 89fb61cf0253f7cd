use super::board::{Board, replica};
use super::{LoadMatrix, Placement, Plan, Planner};
use std::cmp::Reverse;

/// The quota planner of UltraEP (arXiv 2606.04101): exact load, homes never move.
///
/// Looks for the smallest threshold `T` such that all ranks can be brought down to `T` tokens: first `1.01 * mean` and
/// two more steps of 1 % of the slowest rank, where a replica must take at least `ceil(excess / candidate targets)`
/// tokens; then by bisection with a fixed minimum quota. A threshold is tried greedily: heaviest rank first, its
/// heaviest expert first, to the rank with the largest slack.
#[derive(Debug)]
pub struct Quota {
    /// The fewest tokens worth a replica during bisection, capped at 1/64 of the mean load of a rank: the share that
    /// UltraEP's 1024 tokens are of its own 64 Ki token copies a rank. Without the cap small micro-batches could not
    /// be balanced at all.
    pub min_quota: u64,
    board: Board,
    /// Ranks by load, heaviest first.
    sources: Vec<u32>,
    /// The experts of one rank by load, heaviest first.
    experts: Vec<u32>,
    slack: Vec<u64>,
    free: Vec<u32>,
    best: Plan,
}

/// The fewest tokens that a replica must take.
#[derive(Debug, Clone, Copy)]
enum MinQuota {
    /// The rank's excess split over all ranks that could take some.
    Dynamic,
    Fixed(u64),
}

impl Default for Quota {
    fn default() -> Self {
        Self::new(1024)
    }
}

impl Quota {
    /// A planner with this fixed minimum quota, in tokens, for the bisection.
    pub fn new(min_quota: u64) -> Self {
        Self {
            min_quota,
            board: Board::default(),
            sources: Vec::new(),
            experts: Vec::new(),
            slack: Vec::new(),
            free: Vec::new(),
            best: Plan::default(),
        }
    }

    /// Fills `plan` so that no rank has more than `threshold` tokens; false when the greedy rule finds no way.
    fn feasible(
        &mut self,
        placement: &Placement,
        slots: u32,
        threshold: u64,
        min_quota: MinQuota,
        plan: &mut Plan,
    ) -> bool {
        plan.clear();
        self.slack.clear();
        let loads = self.board.rank_load.iter();
        self.slack
            .extend(loads.map(|&l| threshold.saturating_sub(l)));
        self.free.clear();
        self.free.resize(placement.ranks(), slots);
        for i in 0..self.sources.len() {
            let source = self.sources[i] as usize;
            let mut excess = self.board.rank_load[source].saturating_sub(threshold);
            if excess == 0 {
                break;
            }
            let expert_load = &self.board.expert_load;
            self.experts.clear();
            self.experts.extend_from_slice(placement.experts_of(source));
            self.experts
                .sort_unstable_by_key(|&e| (Reverse(expert_load[e as usize]), e));
            for &expert in &self.experts {
                // The home instance keeps a token.
                let mut available = expert_load[expert as usize].saturating_sub(1);
                while excess > 0 && available > 0 {
                    let domain = placement.ranks_of(placement.domain(source));
                    let targets = domain.filter(|&r| self.slack[r] > 0 && self.free[r] > 0);
                    let (mut candidates, mut target) = (0, None);
                    for r in targets {
                        candidates += 1;
                        if target.is_none_or(|t: usize| self.slack[r] > self.slack[t]) {
                            target = Some(r);
                        }
                    }
                    let Some(target) = target else {
                        return false;
                    };
                    let quota = excess.min(self.slack[target]).min(available);
                    let least = match min_quota {
                        MinQuota::Dynamic => excess.div_ceil(candidates),
                        MinQuota::Fixed(tokens) => tokens,
                    };
                    if quota < least {
                        break;
                    }
                    plan.replicas.push(replica(expert, target, quota));
                    excess -= quota;
                    available -= quota;
                    self.slack[target] -= quota;
                    self.free[target] -= 1;
                }
            }
            if excess > 0 {
                return false;
            }
        }
        true
    }

    fn search(&mut self, placement: &Placement, slots: u32, plan: &mut Plan) {
        let (mean, max) = (self.board.mean(), self.board.max());
        let first = mean + mean.div_ceil(100);
        let step = max.div_ceil(100);
        for threshold in [first, first + step, first + 2 * step] {
            if threshold >= max {
                // Balanced within the tolerance: moving weights cannot pay.
                plan.clear();
                return;
            }
            if self.feasible(placement, slots, threshold, MinQuota::Dynamic, plan) {
                return;
            }
        }
        let least = MinQuota::Fixed(self.min_quota.min(mean / 64).max(1));
        // `high` is always feasible: at the load of the slowest rank, by the empty plan.
        let (mut low, mut high) = (mean, max);
        self.best.clear();
        while low < high {
            let threshold = low + (high - low) / 2;
            if self.feasible(placement, slots, threshold, least, plan) {
                std::mem::swap(&mut plan.replicas, &mut self.best.replicas);
                high = threshold;
            } else {
                low = threshold + 1;
            }
        }
        std::mem::swap(&mut plan.replicas, &mut self.best.replicas);
    }
}

impl Planner for Quota {
    fn name(&self) -> &'static str {
        "quota"
    }

    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan) {
        if !self.board.start(load, placement, plan) || slots == 0 {
            return;
        }
        let board = &self.board;
        self.sources.clear();
        self.sources.extend(0..placement.ranks() as u32);
        self.sources
            .sort_unstable_by_key(|&r| (Reverse(board.rank_load[r as usize]), r));
        let slots = u32::try_from(slots).unwrap_or(u32::MAX);
        self.search(placement, slots, plan);
        self.board.seal(plan);
    }
}
