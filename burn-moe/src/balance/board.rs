use super::{LoadMatrix, Placement, Plan, Replica};

/// What planners share: the loads to work on, and where a plan is put together. Reused from plan to plan.
#[derive(Debug, Default)]
pub(crate) struct Board {
    /// Token copies of each expert, `[experts]`.
    pub expert_load: Vec<u64>,
    /// Token copies of each rank when every expert is computed at home, `[ranks]`.
    pub rank_load: Vec<u64>,
    /// Token copies of the micro-batch.
    pub total: u64,
    next_slot: Vec<u32>,
}

impl Board {
    /// Takes the loads of one micro-batch and empties `plan`. False when the shapes of load and placement differ.
    pub fn start(&mut self, load: &LoadMatrix, placement: &Placement, plan: &mut Plan) -> bool {
        plan.clear();
        if load.ranks() != placement.ranks() || load.experts() != placement.experts() {
            return false;
        }
        load.expert_loads(&mut self.expert_load);
        self.rank_load.clear();
        self.rank_load.resize(placement.ranks(), 0);
        for (&tokens, &home) in self.expert_load.iter().zip(placement.homes()) {
            self.rank_load[home as usize] += tokens;
        }
        self.total = self.rank_load.iter().sum();
        true
    }

    /// Token copies of the slowest rank without replicas.
    pub fn max(&self) -> u64 {
        self.rank_load.iter().copied().max().unwrap_or(0)
    }

    /// The mean load of a rank, rounded up: no plan can make the slowest rank faster than this.
    pub fn mean(&self) -> u64 {
        self.total.div_ceil(self.rank_load.len() as u64)
    }

    /// Brings the plan into its final form once all replicas are pushed.
    pub fn seal(&mut self, plan: &mut Plan) {
        plan.seal(self.rank_load.len(), &mut self.next_slot);
    }
}

/// A replica whose slot [`Board::seal`] will number.
pub(crate) fn replica(expert: u32, rank: usize, quota: u64) -> Replica {
    Replica {
        expert,
        rank: rank as u32,
        slot: 0,
        quota,
    }
}
