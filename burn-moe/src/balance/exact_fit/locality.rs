//! The last criterion: fewer token copies that cross ranks, at no other cost.

use super::super::{LoadMatrix, Placement};
use super::ExactFit;
use super::fill::Chunk;

impl ExactFit {
    /// Lets each replica be of that expert of its donor that has most tokens on the replica's rank already, when another
    /// expert of the donor can give the same quota. Loads of ranks stay as they are.
    pub(super) fn localise(&mut self, load: &LoadMatrix, placement: &Placement) {
        if self.best.is_empty() {
            return;
        }
        let left = &mut self.left;
        left.clear();
        left.extend_from_slice(&self.board.expert_load);
        for chunk in &self.best {
            left[chunk.expert as usize] -= chunk.quota;
        }
        for i in 0..self.best.len() {
            let chunk = self.best[i];
            let (rank, quota) = (chunk.rank as usize, chunk.quota);
            let home = placement.home(chunk.expert as usize);
            // Copies that stay on their rank when the expert keeps `at_home` tokens there, and gives `away` to the rank.
            let stay = |expert: u32, at_home: u64, away: u64| {
                let row = |rank| u64::from(load.get(rank, expert as usize));
                row(home).min(at_home) + row(rank).min(away)
            };
            let loss = |left: &[u64], expert: u32| {
                let now = left[expert as usize];
                (stay(expert, now, quota), stay(expert, now + quota, 0))
            };
            let (with, without) = loss(left, chunk.expert);
            let mut best = (0, chunk.expert);
            for &other in placement.experts_of(home) {
                let there = |c: &Chunk| (c.expert, c.rank) == (other, chunk.rank);
                if left[other as usize] < quota || other == chunk.expert {
                    continue;
                }
                let now = left[other as usize];
                let gain = stay(other, now - quota, quota) + without;
                let gain = gain.saturating_sub(stay(other, now, 0) + with);
                if gain > best.0 && !self.best.iter().any(there) {
                    best = (gain, other);
                }
            }
            left[chunk.expert as usize] += quota;
            left[best.1 as usize] -= quota;
            self.best[i].expert = best.1;
        }
    }
}
