//! Group-limited top-k selection.

use super::activation::Real;
use crate::ops::TopK;

/// Ids `[T, K]`, best first, of `scores [T, E] + bias [E]`; ties to the lowest id.
///
/// Experts of groups that are not kept are left out of the comparison rather than given a low
/// score, so no bias can bring them back and none is picked twice.
pub(super) fn select_experts<T: Real>(
    scores: &[T],
    bias: &[T],
    experts: usize,
    top_k: TopK,
) -> Vec<i32> {
    let TopK {
        k,
        groups,
        kept_groups,
    } = top_k;
    let group_size = experts / groups;
    let tokens = scores.len().checked_div(experts).unwrap_or(0);
    let mut ids = Vec::with_capacity(tokens * k);
    let mut choice = vec![T::zero(); experts];
    let mut group_scores = vec![T::zero(); groups];
    let mut best = Best::default();
    let mut kept = Best::default();
    for row in scores.chunks_exact(experts) {
        for ((choice, score), bias) in choice.iter_mut().zip(row).zip(bias) {
            let biased = *score + *bias;
            *choice = if biased.is_nan() {
                T::neg_infinity()
            } else {
                biased
            };
        }
        best.clear();
        if kept_groups < groups {
            for (score, group) in group_scores.iter_mut().zip(choice.chunks_exact(group_size)) {
                *score = sum_of_two_best(group);
            }
            kept.clear();
            for (group, score) in group_scores.iter().enumerate() {
                kept.offer(*score, group, kept_groups);
            }
            // Experts are offered in the order of their ids, so that ties go to the lowest.
            kept.ids.sort_unstable();
            for group in &kept.ids {
                let first = group * group_size;
                for (i, score) in choice[first..first + group_size].iter().enumerate() {
                    best.offer(*score, first + i, k);
                }
            }
        } else {
            for (expert, score) in choice.iter().enumerate() {
                best.offer(*score, expert, k);
            }
        }
        ids.extend(best.ids.iter().map(|id| *id as i32));
    }
    ids
}

fn sum_of_two_best<T: Real>(group: &[T]) -> T {
    let (mut first, mut second) = (T::neg_infinity(), T::neg_infinity());
    for &score in group {
        if score > first {
            (first, second) = (score, first);
        } else if score > second {
            second = score;
        }
    }
    if group.len() == 1 {
        first
    } else {
        first + second
    }
}

/// The best few of the candidates offered so far, best first.
struct Best<T> {
    scores: Vec<T>,
    ids: Vec<usize>,
}

impl<T> Default for Best<T> {
    fn default() -> Self {
        Self {
            scores: Vec::new(),
            ids: Vec::new(),
        }
    }
}

impl<T: Real> Best<T> {
    fn clear(&mut self) {
        self.scores.clear();
        self.ids.clear();
    }

    /// Inserts behind every candidate that is at least as good; `limit` candidates stay.
    fn offer(&mut self, score: T, id: usize, limit: usize) {
        if self.ids.len() == limit && self.scores.last().is_none_or(|worst| score <= *worst) {
            return;
        }
        let at = self.scores.partition_point(|s| *s >= score);
        self.scores.insert(at, score);
        self.ids.insert(at, id);
        self.scores.truncate(limit);
        self.ids.truncate(limit);
    }
}
