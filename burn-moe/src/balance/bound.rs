use super::board::Board;
use super::{LoadMatrix, Placement, Plan};

/// Token copies of the slowest rank below which no plan can get: a cheap lower bound, not always reached.
///
/// The largest of two bounds over all domains: the mean of the domain, and the threshold at which the excess of the
/// ranks above it equals what the others can take, when each of the `slots` of a rank holds one of the domain's largest
/// experts. Gives 0 when the shapes of load and placement differ. Takes `O(ranks * (experts + log load))` time.
pub fn lower_bound(load: &LoadMatrix, placement: &Placement, slots: usize) -> u64 {
    let mut board = Board::default();
    if !board.start(load, placement, &mut Plan::default()) {
        return 0;
    }
    let bounds = (0..placement.domains()).map(|d| domain_bound(&board, placement, d, slots));
    bounds.max().unwrap_or(0)
}

fn domain_bound(board: &Board, placement: &Placement, domain: usize, slots: usize) -> u64 {
    let ranks = placement.ranks_of(domain);
    let loads = &board.rank_load[ranks.clone()];
    let max = loads.iter().copied().max().unwrap_or(0);
    let mean = loads.iter().sum::<u64>().div_ceil(ranks.len() as u64);
    let experts = ranks.flat_map(|r| placement.experts_of(r));
    let mut largest: Vec<u64> = experts.map(|&e| board.expert_load[e as usize]).collect();
    largest.sort_unstable_by(|a, b| b.cmp(a));
    let room: u64 = largest.iter().take(slots).sum();
    let feasible = |threshold: u64| {
        let excess: u64 = loads.iter().map(|l| l.saturating_sub(threshold)).sum();
        let slack = loads.iter().map(|l| threshold.saturating_sub(*l).min(room));
        excess <= slack.sum::<u64>()
    };
    let (mut low, mut high) = (mean, max);
    while low < high {
        let threshold = low + (high - low) / 2;
        if feasible(threshold) {
            high = threshold;
        } else {
            low = threshold + 1;
        }
    }
    low
}
