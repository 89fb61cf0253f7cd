//! The planner of this crate: see [`ExactFit`].

mod fill;
mod forest;
mod locality;
mod search;

use super::board::Board;
use super::transfer::{CostModel, TransferSimulator};
use super::{LoadMatrix, Placement, Plan, Planner};
use fill::{Chunk, Fill};
use forest::Forest;

/// What [`ExactFit`] trades: limits that hold in any case, and prices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExactFitConfig {
    /// The fewest tokens that a replica may have: one row block of the grouped matmul, since fewer rows cost as much.
    pub min_quota: u64,
    /// What tokens and the transfer of weights cost.
    pub cost: CostModel,
    /// Balance finer than this makes no step faster: slowest ranks up to this much above the lowest possible load count
    /// as equal. In millionths of the mean load of a rank, for one slot a rank; four times as much for more slots.
    pub resolution: u32,
    /// What a copy has to gain even if its transfer is free, since it keeps links and memory busy: as many copies as
    /// there are ranks are worth this much of the mean load of a rank. In millionths, for one slot a rank; four times as
    /// much for more slots.
    pub copy_price: u32,
}

impl Default for ExactFitConfig {
    /// Free transfer, a resolution of 0.095 % and a price of 1 % for a copy on every rank (with more slots than one:
    /// 0.38 % and 4 %).
    ///
    /// With one slot a rank, balance is scarce and copies are bounded anyway. With more, near-perfect balance is easy,
    /// and what is left to gain is copies: each filled slot adds a group to the rank's grouped matmul, whose padding and
    /// launch blur the balance, and a transfer to wait for.
    fn default() -> Self {
        Self {
            min_quota: 1,
            cost: CostModel::free(),
            resolution: 950,
            copy_price: 10_000,
        }
    }
}

impl ExactFitConfig {
    /// Free transfer and no resolution or price: the lowest imbalance that the slots allow, whatever copies it takes;
    /// among plans of that imbalance the fewest copies.
    pub fn strict() -> Self {
        Self {
            resolution: 0,
            copy_price: 0,
            ..Self::default()
        }
    }
}

/// The planner that states its trade-off: it minimises
///
/// ```text
/// predicted step time = slowest rank's tokens * time per token + slowest rank's weight transfer
/// ```
///
/// under hard limits: slots, domains, and a minimum quota. The time and the transfer come from a [`CostModel`], the
/// transfer by simulating the relay schedule. With free transfer it gives the lowest imbalance that the slots allow, to
/// the configured resolution, then the fewest copies (a copy has a small price, see [`ExactFitConfig`]), then the fewest
/// token copies that cross ranks.
///
/// For one threshold on the slowest rank's load a constructive heuristic finds a plan with few copies in a microsecond
/// or two: donors are matched to the receivers that fit their excess exactly (alias pairing, as in MoonEP, under a slot
/// cap, and with the freedom to close early). A short search over thresholds and a portfolio of strategies finds the
/// best trade. With one slot a rank and few ranks, where single experts may be too small for the receivers, a local search
/// among forests of ranks goes on from there; that is the slow case, some hundred microseconds.
#[derive(Debug, Default)]
pub struct ExactFit {
    config: ExactFitConfig,
    strict: bool,
    board: Board,
    /// Ranks by load, ascending, within each domain, `[ranks]`.
    order: Vec<u32>,
    fill: Fill,
    forest: Forest,
    /// What the search has found best so far, and what it looks at now.
    best: Vec<Chunk>,
    candidate: Vec<Chunk>,
    trial: Plan,
    simulator: TransferSimulator,
    /// Token copies of each expert that stay at home, `[experts]`.
    left: Vec<u64>,
}

impl ExactFit {
    /// A planner with this configuration.
    pub fn new(config: ExactFitConfig) -> Self {
        Self {
            strict: config.resolution == 0 && config.copy_price == 0,
            config: ExactFitConfig {
                min_quota: config.min_quota.max(1),
                ..config
            },
            ..Self::default()
        }
    }

    /// The configuration.
    pub fn config(&self) -> &ExactFitConfig {
        &self.config
    }
}

impl Planner for ExactFit {
    fn name(&self) -> &'static str {
        if self.strict {
            "exact-fit-strict"
        } else {
            "exact-fit"
        }
    }

    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan) {
        if !self.board.start(load, placement, plan) {
            return;
        }
        self.search(placement, slots);
        self.localise(load, placement);
        self.write(plan);
    }
}
