use super::board::{Board, replica};
use super::{LoadMatrix, Placement, Plan, Planner};

/// Alias pairing, as in MoonEP: perfect balance from each receiver drawing from one home rank only.
///
/// While a rank is above the mean, the heaviest rank fills the lightest up to the mean; it may fall below the mean
/// itself and be filled later, as in Walker's and Vose's alias tables. Then, for each home rank, the expert with most
/// tokens left serves the receiver with the largest quota left. Perfect balance may need as many slots as a rank has
/// experts: [`Pairing::unlimited`] takes as many as it needs and **ignores `slots`**; [`Pairing::default`] leaves
/// tokens at home for which no slot is left.
#[derive(Debug, Default)]
pub struct Pairing {
    unlimited: bool,
    board: Board,
    /// Load minus capacity of each rank, `[ranks]`.
    balance: Vec<i128>,
    /// What one rank gives another.
    moves: Vec<Move>,
    /// Tokens of each expert that are still at home, `[experts]`.
    left: Vec<u64>,
    after: Vec<u64>,
}

#[derive(Debug, Clone, Copy)]
struct Move {
    from: usize,
    to: usize,
    tokens: u64,
    slots: usize,
}

impl Pairing {
    /// The variant that ignores the number of slots.
    pub fn unlimited() -> Self {
        Self {
            unlimited: true,
            ..Self::default()
        }
    }

    /// Pairs heavy ranks with light ones.
    fn pair(&mut self, ranks: std::ops::Range<usize>, slots: usize) {
        let size = ranks.len() as u64;
        let load: u64 = self.board.rank_load[ranks.clone()].iter().sum();
        let capacity = i128::from(load.div_ceil(size));
        for r in ranks.clone() {
            self.balance[r] = i128::from(self.board.rank_load[r]) - capacity;
        }
        loop {
            let balance = &self.balance;
            let heavy = ranks.clone().rev().max_by_key(|&r| balance[r]);
            let light = ranks.clone().min_by_key(|&r| balance[r]);
            let (Some(from), Some(to)) = (heavy, light) else {
                return;
            };
            let slack = -self.balance[to];
            if self.balance[from] <= 0 || slack <= 0 {
                return;
            }
            self.moves.push(Move {
                from,
                to,
                tokens: slack as u64,
                slots,
            });
            self.balance[from] -= slack;
            self.balance[to] = 0;
        }
    }

    /// Turns the moves of one home rank into replicas.
    fn draw(&mut self, placement: &Placement, moves: std::ops::Range<usize>, plan: &mut Plan) {
        let experts = placement.experts_of(self.moves[moves.start].from);
        loop {
            let left = &self.left;
            let expert = experts.iter().rev().max_by_key(|&&e| left[e as usize]);
            let open = self.moves[moves.clone()].iter_mut().rev();
            let to = open.filter(|m| m.slots > 0).max_by_key(|m| m.tokens);
            let (Some(&expert), Some(to)) = (expert, to) else {
                return;
            };
            let quota = to.tokens.min(self.left[expert as usize]);
            if quota == 0 {
                return;
            }
            plan.replicas.push(replica(expert, to.to, quota));
            self.left[expert as usize] -= quota;
            to.tokens -= quota;
            to.slots -= 1;
        }
    }
}

impl Planner for Pairing {
    fn name(&self) -> &'static str {
        if self.unlimited {
            "pairing-unlimited"
        } else {
            "pairing"
        }
    }

    fn ignores_slots(&self) -> bool {
        self.unlimited
    }

    fn plan(&mut self, load: &LoadMatrix, placement: &Placement, slots: usize, plan: &mut Plan) {
        if !self.board.start(load, placement, plan) {
            return;
        }
        let slots = if self.unlimited { usize::MAX } else { slots };
        self.balance.clear();
        self.balance.resize(placement.ranks(), 0);
        self.moves.clear();
        for domain in 0..placement.domains() {
            self.pair(placement.ranks_of(domain), slots);
        }
        self.moves.sort_unstable_by_key(|m| (m.from, m.to));
        self.left.clear();
        self.left.extend_from_slice(&self.board.expert_load);
        let mut start = 0;
        while let Some(first) = self.moves.get(start) {
            let (from, rest) = (first.from, &self.moves[start..]);
            let end = start + rest.partition_point(|m| m.from == from);
            self.draw(placement, start..end, plan);
            start = end;
        }
        self.board.seal(plan);
        // Without enough slots a rank that was to give away much and then receive may end above where it began.
        self.after.clear();
        self.after.extend_from_slice(&self.board.rank_load);
        plan.apply(placement, &mut self.after);
        if self.after.iter().max() >= self.board.rank_load.iter().max() {
            plan.clear();
        }
    }
}
