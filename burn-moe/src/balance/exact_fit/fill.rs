use super::super::Placement;
use std::cmp::Reverse;

/// What stays the same while thresholds are tried.
#[derive(Debug, Clone, Copy)]
pub(super) struct Task<'a> {
    pub placement: &'a Placement,
    /// Token copies of each expert, `[experts]`.
    pub expert_load: &'a [u64],
    /// Token copies of each rank without replicas, `[ranks]`.
    pub rank_load: &'a [u64],
    pub slots: u32,
    /// The fewest tokens that a replica may have, at least 1.
    pub min_quota: u64,
}

/// A replica to be: where some tokens of an expert go.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    pub expert: u32,
    pub rank: u32,
    pub quota: u64,
}

/// One way to go about it; none is best on all loads, and each takes a microsecond or two.
#[derive(Debug, Clone, Copy)]
pub(super) struct Strategy {
    /// Serve the donor with the smallest excess first, instead of the largest.
    pub small_first: bool,
    /// One donor may waste `1 / waste` of the spare slack in order to be finished with fewer copies.
    pub waste: u64,
    /// Of the pairs of receivers that finish a donor, take the most even one instead of the one that wastes least:
    /// the smallest receivers are then left over at the end, and those are the ones that can go without a copy.
    pub even_pairs: bool,
}

/// Brings all ranks of a domain down to a threshold with few copies. Holds buffers that are reused.
///
/// Ranks above the threshold are donors, the others receivers. Think of ranks as vertices and copies as edges: a set of
/// ranks that balances within itself needs one copy less than it has ranks, so the more such sets, the fewer copies.
/// A donor is therefore finished with the receivers that fit it best: large ones are filled whole until one or two
/// remain that close the sum with little waste. When no such fit exists, the donor shares a receiver with the next one:
/// through a second slot, or by giving away more than its excess and becoming a receiver itself (as alias tables do,
/// and pairing planners after them), which needs no second slot anywhere.
#[derive(Debug, Default)]
pub(super) struct Fill {
    pub chunks: Vec<Chunk>,
    /// Slack and rank of those that can still receive, the largest slack last.
    receivers: Vec<(u64, u32)>,
    /// Sum of the receivers' slacks.
    slack: u64,
    /// Excess and rank.
    donors: Vec<(u64, u32)>,
    /// Token copies of each expert that are still at home, `[experts]`.
    left: Vec<u64>,
    /// Free slots, `[ranks]`.
    free: Vec<u32>,
}

impl Fill {
    /// Fills `chunks` so that no rank in `ranks` (ascending by load) has more than `threshold` tokens; false when this
    /// strategy finds no way, or none with at most `most` copies.
    pub fn run(
        &mut self,
        task: &Task,
        ranks: &[u32],
        threshold: u64,
        strategy: Strategy,
        most: usize,
    ) -> bool {
        self.chunks.clear();
        let mut need = self.start(task, ranks, threshold);
        if strategy.small_first {
            self.donors.reverse();
        }
        for i in 0..self.donors.len() {
            let Some(spare) = self.slack.checked_sub(need) else {
                return false;
            };
            let last = i + 1 == self.donors.len();
            let waste = if last {
                u64::MAX
            } else {
                spare / strategy.waste
            };
            let (excess, donor) = self.donors[i];
            let donor = Donor {
                rank: donor,
                waste,
                even_pairs: strategy.even_pairs,
            };
            if !self.serve(task, donor, excess, most) {
                return false;
            }
            need -= excess;
        }
        true
    }

    /// Lists donors and receivers; gives the sum of the excesses.
    fn start(&mut self, task: &Task, ranks: &[u32], threshold: u64) -> u64 {
        let load = |&rank: &u32| task.rank_load[rank as usize];
        let receivers = ranks.partition_point(|r| load(r) < threshold);
        let donors = ranks.partition_point(|r| load(r) <= threshold);
        self.receivers.clear();
        if task.slots > 0 {
            let slack = ranks[..receivers]
                .iter()
                .rev()
                .map(|r| (threshold - load(r), *r));
            self.receivers
                .extend(slack.skip_while(|s| s.0 < task.min_quota));
        }
        self.donors.clear();
        let excess = ranks[donors..]
            .iter()
            .rev()
            .map(|r| (load(r) - threshold, *r));
        self.donors.extend(excess);
        self.left.clear();
        self.left.extend_from_slice(task.expert_load);
        self.free.clear();
        self.free.resize(task.rank_load.len(), task.slots);
        let sum = |list: &[(u64, u32)]| list.iter().map(|x| x.0).sum();
        self.slack = sum(&self.receivers);
        sum(&self.donors)
    }

    /// Moves `excess` tokens off `donor`.
    fn serve(&mut self, task: &Task, donor: Donor, mut excess: u64, most: usize) -> bool {
        while excess > 0 {
            let largest = self.largest(task, donor);
            let Some(&(slack, rank)) = self.receivers.last() else {
                return false;
            };
            if largest < task.min_quota || self.chunks.len() >= most {
                return false;
            }
            let quota = excess.max(task.min_quota);
            if largest >= quota && self.close_with_one(task, donor, quota) {
                return true;
            }
            if self.close_with_two(task, donor, excess) {
                return self.chunks.len() <= most;
            }
            let last = self.receivers.len() - 1;
            if slack <= excess {
                let quota = slack.min(largest);
                self.give(task, donor, last, quota);
                excess -= quota;
            } else if self.free[rank as usize] >= 2 {
                // The next donor uses the rest of this receiver, through another slot.
                let quota = quota.min(largest);
                self.give(task, donor, last, quota);
                excess = excess.saturating_sub(quota);
            } else if largest > excess && self.free[donor.rank as usize] > 0 {
                let quota = slack.min(largest);
                self.give(task, donor, last, quota);
                self.insert(task, quota - excess, donor.rank);
                excess = 0;
            } else {
                // The donor's experts are too small for a whole receiver: take what wastes least.
                let quota = quota.min(largest);
                let fits = self.receivers.partition_point(|r| r.0 < quota);
                self.give(task, donor, fits, quota);
                excess = excess.saturating_sub(quota);
            }
        }
        true
    }

    /// Finishes a donor with the smallest receiver that takes `quota`, if that wastes little enough.
    fn close_with_one(&mut self, task: &Task, donor: Donor, quota: u64) -> bool {
        let fits = self.receivers.partition_point(|r| r.0 < quota);
        let wasted = self.receivers.get(fits).map(|r| r.0 - quota);
        if wasted.is_none_or(|w| w > donor.waste) {
            return false;
        }
        self.give(task, donor, fits, quota);
        true
    }

    /// Finishes a donor with two receivers whose slacks sum to a little more than its excess.
    fn close_with_two(&mut self, task: &Task, donor: Donor, excess: u64) -> bool {
        let pair = match *self.receivers.as_slice() {
            [.., (a, _), (b, _)] if a.saturating_add(b) < excess => None,
            _ if donor.even_pairs => self.even_pair(donor, excess),
            _ => self.least_pair(donor, excess),
        };
        let Some((small, large)) = pair else {
            return false;
        };
        let first = self.receivers[large].0;
        let second = (excess - first).max(task.min_quota);
        if second > self.receivers[small].0 {
            return false;
        }
        let Some(expert) = self.fitting(task, donor, first) else {
            return false;
        };
        // Whether the second part finds an expert depends on what the first leaves.
        self.left[expert as usize] -= first;
        let other = self.fitting(task, donor, second);
        self.left[expert as usize] += first;
        let Some(other) = other else {
            return false;
        };
        // The later position first, so that the earlier one still holds: the larger receiver is filled whole.
        self.take(task, large, expert, first);
        self.take(task, small, other, second);
        true
    }

    /// Positions of the two receivers, each smaller than `excess`, that waste least in finishing the donor.
    fn least_pair(&self, donor: Donor, excess: u64) -> Option<(usize, usize)> {
        let slack = |i: usize| self.receivers[i].0;
        let mut large = self.receivers.partition_point(|r| r.0 < excess);
        let (mut small, mut least, mut pair) = (0, donor.waste, None);
        while small + 1 < large {
            match (slack(small) + slack(large - 1)).checked_sub(excess) {
                Some(over) => {
                    if over <= least {
                        (least, pair) = (over, Some((small, large - 1)));
                    }
                    large -= 1;
                }
                None => small += 1,
            }
        }
        pair
    }

    /// Positions of two receivers, each smaller than `excess`, that finish the donor and are as even as possible.
    fn even_pair(&self, donor: Donor, excess: u64) -> Option<(usize, usize)> {
        let slack = |i: usize| self.receivers[i].0;
        let end = self.receivers.partition_point(|r| r.0 < excess);
        let half = self.receivers.partition_point(|r| r.0 < excess.div_ceil(2));
        if half + 1 < end && slack(half) + slack(half + 1) - excess <= donor.waste {
            return Some((half, half + 1));
        }
        let (mut small, mut large) = (half.checked_sub(1)?, half);
        while large < end {
            match (slack(small) + slack(large)).checked_sub(excess) {
                Some(over) if over <= donor.waste => return Some((small, large)),
                Some(_) => small = small.checked_sub(1)?,
                None => large += 1,
            }
        }
        None
    }

    /// Gives `quota` tokens of a donor to the receiver at `at`, from the expert that fits best.
    fn give(&mut self, task: &Task, donor: Donor, at: usize, quota: u64) {
        if let Some(expert) = self.fitting(task, donor, quota) {
            self.take(task, at, expert, quota);
        }
    }

    fn take(&mut self, task: &Task, at: usize, expert: u32, quota: u64) {
        let (slack, rank) = self.receivers.remove(at);
        self.slack -= slack;
        self.chunks.push(Chunk {
            expert,
            rank,
            quota,
        });
        self.left[expert as usize] -= quota;
        self.free[rank as usize] -= 1;
        self.insert(task, slack - quota, rank);
    }

    fn insert(&mut self, task: &Task, slack: u64, rank: u32) {
        if slack >= task.min_quota && self.free[rank as usize] > 0 {
            let key = (slack, Reverse(rank));
            let at = self
                .receivers
                .partition_point(|r| (r.0, Reverse(r.1)) < key);
            self.receivers.insert(at, (slack, rank));
            self.slack += slack;
        }
    }

    /// Tokens of the donor's largest expert that are still at home.
    fn largest(&self, task: &Task, donor: Donor) -> u64 {
        let experts = task.placement.experts_of(donor.rank as usize).iter();
        experts.map(|&e| self.left[e as usize]).max().unwrap_or(0)
    }

    /// The donor's expert with the fewest tokens that still has `quota`: larger ones are kept for larger needs.
    fn fitting(&self, task: &Task, donor: Donor, quota: u64) -> Option<u32> {
        let experts = task
            .placement
            .experts_of(donor.rank as usize)
            .iter()
            .copied();
        let enough = experts.filter(|&e| self.left[e as usize] >= quota);
        enough.min_by_key(|&e| self.left[e as usize])
    }
}

/// The donor that is served.
#[derive(Debug, Clone, Copy)]
struct Donor {
    rank: u32,
    /// The slack that may be lost to finish it with fewer copies.
    waste: u64,
    even_pairs: bool,
}
