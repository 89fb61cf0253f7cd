use super::{LoadMatrix, Placement};
use serde::{Deserialize, Serialize};

/// One extra instance of an expert.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Replica {
    /// The expert whose weights are copied.
    pub expert: u32,
    /// The rank that hosts the copy; never the expert's home.
    pub rank: u32,
    /// Which of the rank's replica slots holds it, below the number of slots.
    pub slot: u32,
    /// Token copies of this micro-batch that it computes, at least 1.
    pub quota: u64,
}

/// What a planner decides: the replicas of one micro-batch and layer, sorted by (expert, rank).
///
/// The home instance of an expert computes the expert's load minus its replicas' quotas.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize)]
pub struct Plan {
    /// The replicas, sorted by (expert, rank).
    pub replicas: Vec<Replica>,
}

impl Plan {
    /// Whether there is no replica: every token copy is computed at home.
    pub fn is_empty(&self) -> bool {
        self.replicas.is_empty()
    }

    /// Removes all replicas, keeping the memory.
    pub fn clear(&mut self) {
        self.replicas.clear();
    }

    /// The replicas on `rank`, in ascending order of expert.
    pub fn hosted(&self, rank: usize) -> impl Iterator<Item = &Replica> {
        self.replicas
            .iter()
            .filter(move |r| r.rank as usize == rank)
    }

    /// The replicas of `expert`, in ascending order of rank.
    pub fn replicas_of(&self, expert: usize) -> &[Replica] {
        let start = self
            .replicas
            .partition_point(|r| (r.expert as usize) < expert);
        let rest = &self.replicas[start..];
        &rest[..rest.partition_point(|r| r.expert as usize == expert)]
    }

    /// The number of slots a rank needs for this plan: the highest slot plus one, or 0 when empty.
    pub fn slots_used(&self) -> usize {
        let used = self.replicas.iter().map(|r| r.slot as usize + 1);
        used.max().unwrap_or(0)
    }

    /// Token copies that each rank computes under this plan, written to `out` as `[ranks]`.
    ///
    /// # Panics
    ///
    /// When the plan does not pass [`check`](super::check) for this load and placement.
    pub fn rank_load(&self, load: &LoadMatrix, placement: &Placement, out: &mut Vec<u64>) {
        out.clear();
        out.resize(placement.ranks(), 0);
        for source in 0..load.ranks() {
            for (&count, &home) in load.row(source).iter().zip(placement.homes()) {
                out[home as usize] += u64::from(count);
            }
        }
        self.apply(placement, out);
    }

    /// Moves the replicas' quotas from home to where they are computed.
    pub(crate) fn apply(&self, placement: &Placement, rank_load: &mut [u64]) {
        for replica in &self.replicas {
            rank_load[placement.home(replica.expert as usize)] -= replica.quota;
            rank_load[replica.rank as usize] += replica.quota;
        }
    }

    /// Sorts the replicas and numbers the slots of each rank in ascending order of expert.
    pub(crate) fn seal(&mut self, ranks: usize, next_slot: &mut Vec<u32>) {
        self.replicas.sort_unstable_by_key(|r| (r.expert, r.rank));
        next_slot.clear();
        next_slot.resize(ranks, 0);
        for replica in &mut self.replicas {
            let next = &mut next_slot[replica.rank as usize];
            replica.slot = *next;
            *next += 1;
        }
    }
}

/// Load imbalance: the slowest rank's token copies over the mean; 1.0 when there is no load.
pub fn imbalance(rank_load: &[u64]) -> f64 {
    let total: u128 = rank_load.iter().map(|&l| u128::from(l)).sum();
    match rank_load.iter().max() {
        Some(&max) if total > 0 => max as f64 * rank_load.len() as f64 / total as f64,
        _ => 1.0,
    }
}
