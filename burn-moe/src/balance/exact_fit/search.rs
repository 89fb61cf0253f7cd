//! The search for the best threshold: how far the slowest rank is brought down.

use super::super::board::replica;
use super::super::{Placement, Plan};
use super::ExactFit;
use super::fill::{Strategy, Task};
use super::forest;

/// Tried in this order, as many as the effort allows. Chosen one after the other, each for what it adds to those before
/// it on real and synthetic loads.
const STRATEGIES: [Strategy; 6] = [
    strategy(true, 16, true),
    strategy(false, 2, false),
    strategy(false, 1, true),
    strategy(true, 1, false),
    strategy(false, 8, false),
    strategy(false, 4, true),
];

const fn strategy(small_first: bool, waste: u64, even_pairs: bool) -> Strategy {
    Strategy {
        small_first,
        waste,
        even_pairs,
    }
}

/// Thresholds to try, in thousandths of the mean above the lowest one.
const LADDER: [u64; 32] = [
    0, 1, 2, 3, 5, 7, 10, 14, 19, 26, 35, 47, 63, 84, 110, 145, 190, 250, 330, 430, 570, 750, 1000,
    1500, 2200, 3300, 5000, 7500, 11_000, 17_000, 25_000, 38_000,
];

/// What a plan costs, to compare: predicted time and price, the copies, the slowest rank's tokens.
type Score = (u128, usize, u64);

/// One search over the thresholds.
struct Search {
    /// Slots that plans may use: all, or fewer so that no rank receives too many weights.
    slots: u32,
    /// Price of one copy, in the unit of `cost`.
    price: u128,
    /// No plan can bring the slowest rank below this.
    lowest: u64,
    /// Thresholds up to here count as equal.
    flat: u64,
    best: Score,
    /// What is tried for each threshold.
    strategies: &'static [Strategy],
    /// Many ranks, or transfers to simulate: there is no time to try all strategies everywhere, so what works first is
    /// kept to.
    large: bool,
    /// Where all strategies fail, search among forests of ranks.
    forests: bool,
}

/// More ranks than this are a large case.
const LARGE: usize = 48;

/// With more ranks than this, adding up the loads takes most of the time there is.
const HUGE: usize = 256;

impl ExactFit {
    /// Leaves the best plan it finds in `self.best`.
    pub(super) fn search(&mut self, placement: &Placement, slots: usize) {
        self.best.clear();
        let max = self.board.max();
        let slots = slots.min(self.board.expert_load.len()) as u32;
        let mean = self.board.mean();
        // Resolution and price are for one slot.
        let counted = if slots > 1 { 4 } else { 1 };
        let resolution = u128::from(self.config.resolution) * counted;
        let lowest = self.lowest(placement);
        let flat = lowest + (u128::from(mean) * resolution / 1_000_000) as u64;
        let price = u128::from(self.config.copy_price) * u128::from(self.config.cost.token_ps);
        let price = price.saturating_mul(counted);
        let large = placement.ranks() > LARGE || !self.config.cost.is_free();
        let tried = match placement.ranks() {
            n if n > HUGE => 2,
            n if n > LARGE => 3,
            _ => STRATEGIES.len(),
        };
        let mut search = Search {
            slots,
            price: price.saturating_mul(u128::from(self.board.total)),
            lowest,
            flat,
            best: (u128::MAX, 0, max),
            strategies: &STRATEGIES[..tried],
            large,
            forests: false,
        };
        search.best.0 = self.cost(&search, max, 0, 0);
        if slots == 0 || !self.can_pay(&search, lowest, 1) {
            return;
        }
        self.order.clear();
        self.order.extend(0..placement.ranks() as u32);
        for domain in 0..placement.domains() {
            let rank_load = &self.board.rank_load;
            let ranks = &mut self.order[placement.ranks_of(domain)];
            ranks.sort_unstable_by_key(|&r| (rank_load[r as usize], r));
        }
        // A transfer that costs time depends on how many weights one rank receives: try with fewer slots first.
        if !self.config.cost.is_free() {
            for fewer in 1..slots.min(4) {
                search.slots = fewer;
                self.climb(placement, &mut search);
            }
        }
        search.slots = slots;
        self.climb(placement, &mut search);
    }

    /// Tries thresholds upwards for as long as a higher one can pay, then looks closer around the best.
    fn climb(&mut self, placement: &Placement, search: &mut Search) {
        let (mean, max) = (self.board.mean(), self.board.max());
        // Differences too small to matter, unless the lowest imbalance is asked for.
        let grain = match (self.strict, search.large) {
            (true, _) => 0,
            (false, true) => mean / 1000,
            (false, false) => mean / 2000,
        };
        let (mut infeasible, mut feasible) = (None, None);
        let free = self.config.cost.is_free();
        let (mut tried, mut failures) = (0, 0);
        for step in LADDER {
            let above = u128::from(mean) * u128::from(step) / 1000;
            let threshold = search.flat.saturating_add(above as u64);
            if threshold >= max || (step > 0 && !self.can_pay(search, threshold, 1)) {
                break;
            }
            if step > 0 && threshold == tried {
                continue;
            }
            tried = threshold;
            let fewest = self.fewest_copies(placement, threshold);
            if !self.can_pay(search, threshold, fewest) {
                continue;
            }
            if self.attempt(placement, search, threshold) {
                feasible.get_or_insert(threshold);
                failures = 0;
            } else if feasible.is_none() {
                infeasible = Some(threshold);
            } else {
                failures += 1;
                if search.large && free && failures == 2 {
                    break;
                }
            }
        }
        if let Some(low) = infeasible {
            // Between the last threshold without a plan and the first with one.
            let (mut low, mut high) = (low, feasible.unwrap_or(max));
            while high - low > 1 + grain {
                let threshold = low + (high - low) / 2;
                if self.attempt(placement, search, threshold) {
                    high = threshold;
                } else {
                    low = threshold;
                }
            }
        }
        // The same number of copies may reach a lower threshold.
        self.descend(placement, search, search.lowest, grain);
        let largest = (0..placement.domains())
            .map(|d| placement.ranks_of(d).len())
            .max();
        if search.slots == 1 && !search.large && largest.is_some_and(|n| n <= forest::MAX_RANKS) {
            search.forests = true;
            self.descend(placement, search, search.flat, grain);
            search.forests = false;
        }
    }

    /// Halves the thresholds between `low` and the best until they are `grain` apart.
    fn descend(&mut self, placement: &Placement, search: &mut Search, mut low: u64, grain: u64) {
        let mut high = search.best.2;
        while high > low && high - low > grain {
            let threshold = low + (high - low) / 2;
            if self.attempt(placement, search, threshold) {
                high = search.best.2.min(threshold);
            } else {
                low = threshold + 1;
            }
        }
    }

    /// Looks for a plan at this threshold that beats the best; keeps it and says true when there is one.
    fn attempt(&mut self, placement: &Placement, search: &mut Search, threshold: u64) -> bool {
        let most = self.most_copies(search, threshold);
        let task = Task {
            placement,
            expert_load: &self.board.expert_load,
            rank_load: &self.board.rank_load,
            slots: search.slots,
            min_quota: self.config.min_quota,
        };
        self.candidate.clear();
        let mut winner = 0;
        for domain in 0..placement.domains() {
            let ranks = &self.order[placement.ranks_of(domain)];
            let start = self.candidate.len();
            let mut found = false;
            for (i, &strategy) in search.strategies.iter().enumerate() {
                let most = if found {
                    (self.candidate.len() - start).saturating_sub(1)
                } else {
                    most.saturating_sub(start)
                };
                if self.fill.run(&task, ranks, threshold, strategy, most) {
                    found = true;
                    winner = i;
                    self.candidate.truncate(start);
                    self.candidate.extend_from_slice(&self.fill.chunks);
                }
                if found && self.candidate.len() == start {
                    break;
                }
            }
            if !found && search.forests {
                let most = most.saturating_sub(start);
                let (best, candidate) = (&self.best, &mut self.candidate);
                found = self
                    .forest
                    .run(&task, ranks, threshold, best, most, candidate);
            }
            if !found {
                return false;
            }
        }
        let copies = self.candidate.len();
        let Some(transfer) = self.transfer(placement, search, threshold) else {
            return false;
        };
        let score = (
            self.cost(search, threshold, copies, transfer),
            copies,
            threshold,
        );
        if score >= search.best {
            return false;
        }
        search.best = score;
        if search.large {
            search.strategies = &search.strategies[winner..=winner];
        }
        std::mem::swap(&mut self.best, &mut self.candidate);
        true
    }

    /// Predicted time of the candidate's weight transfer; none when even the least that it can take is too long to
    /// beat the best.
    fn transfer(&mut self, placement: &Placement, search: &Search, threshold: u64) -> Option<u64> {
        let model = self.config.cost.coarse();
        if model.is_free() {
            return Some(0);
        }
        let copies = self.candidate.len();
        let mut trial = std::mem::take(&mut self.trial);
        std::mem::swap(&mut self.best, &mut self.candidate);
        self.write(&mut trial);
        std::mem::swap(&mut self.best, &mut self.candidate);
        let least = self.simulator.at_least_ps(&model, placement, &trial);
        let hopeful = (
            self.cost(search, threshold, copies, least),
            copies,
            threshold,
        ) < search.best;
        let time = hopeful.then(|| self.simulator.transfer_ps(&model, placement, &trial));
        self.trial = trial;
        time
    }

    /// Writes the best plan out.
    pub(super) fn write(&mut self, plan: &mut Plan) {
        plan.clear();
        let chunks = self.best.iter();
        plan.replicas
            .extend(chunks.map(|c| replica(c.expert, c.rank as usize, c.quota)));
        self.board.seal(plan);
    }

    /// Predicted time plus the copies' price, times `1e6 * ranks^2` so that it stays an integer.
    fn cost(&self, search: &Search, threshold: u64, copies: usize, transfer: u64) -> u128 {
        let ranks = self.board.rank_load.len() as u128;
        let step = self
            .config
            .cost
            .step_ps(threshold.max(search.flat), transfer);
        let scaled = u128::from(step).saturating_mul(1_000_000 * ranks * ranks);
        scaled.saturating_add(search.price.saturating_mul(copies as u128))
    }

    /// Whether a plan with this many copies could beat the best.
    fn can_pay(&self, search: &Search, threshold: u64, copies: usize) -> bool {
        let transfer = self.config.cost.one_transfer_ps();
        let cost = self.cost(search, threshold, copies, transfer);
        transfer < u64::MAX && (cost, copies, threshold) < search.best
    }

    /// The most copies with which a plan at this threshold could beat the best.
    fn most_copies(&self, search: &Search, threshold: u64) -> usize {
        let none = self.cost(search, threshold, 0, self.config.cost.one_transfer_ps());
        let (best, best_copies, best_threshold) = search.best;
        let Some(left) = best.checked_sub(none) else {
            return 0;
        };
        let Some(most) = left.checked_div(search.price) else {
            // Copies cost nothing, so only a tie in time limits them.
            let fewer = best_copies - usize::from(best_copies > 0 && threshold >= best_threshold);
            return if left == 0 { fewer } else { usize::MAX };
        };
        usize::try_from(most).unwrap_or(usize::MAX)
    }

    /// A lower bound on the copies that a threshold needs: the largest slacks that together take the excess.
    fn fewest_copies(&self, placement: &Placement, threshold: u64) -> usize {
        let mut copies = 0;
        for domain in 0..placement.domains() {
            let ranks = self.order[placement.ranks_of(domain)].iter();
            let loads = ranks.map(|&r| self.board.rank_load[r as usize]);
            let mut excess: u64 = loads.clone().map(|l| l.saturating_sub(threshold)).sum();
            for load in loads {
                let slack = threshold.saturating_sub(load);
                if excess == 0 || slack == 0 {
                    break;
                }
                excess = excess.saturating_sub(slack);
                copies += 1;
            }
        }
        copies
    }

    /// No plan can bring the slowest rank below the mean of its domain.
    fn lowest(&self, placement: &Placement) -> u64 {
        let mean = |domain| {
            let ranks = placement.ranks_of(domain);
            let size = ranks.len() as u64;
            self.board.rank_load[ranks]
                .iter()
                .sum::<u64>()
                .div_ceil(size)
        };
        (0..placement.domains()).map(mean).max().unwrap_or(0)
    }
}
