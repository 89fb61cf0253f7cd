//! Group-limited top-k selection.

use super::activation::Real;
use crate::ops::TopK;

/// Scores are compared in blocks of as many: enough for the vectors of any processor.
const LANES: usize = 16;

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
    let mut group_scores = Candidates::new(groups);
    let mut kept: Vec<usize> = (0..groups).collect();
    let mut candidates = Candidates::new(kept_groups * group_size);
    for row in scores.chunks_exact(experts) {
        for ((choice, score), bias) in choice.iter_mut().zip(row).zip(bias) {
            let biased = *score + *bias;
            *choice = if biased.is_nan() {
                T::neg_infinity()
            } else {
                biased
            };
        }
        if kept_groups < groups {
            let groups = choice.chunks_exact(group_size);
            for (score, group) in group_scores.scores().iter_mut().zip(groups) {
                *score = sum_of_two_best(group);
            }
            kept.clear();
            kept.extend((0..kept_groups).map(|_| group_scores.take_best()));
            // Experts are compared in the order of their ids, so that ties go to the lowest.
            kept.sort_unstable();
        }
        let places = candidates.scores().chunks_exact_mut(group_size);
        for (place, group) in places.zip(&kept) {
            place.copy_from_slice(&choice[group * group_size..][..group_size]);
        }
        ids.extend((0..k).map(|_| {
            let best = candidates.take_best();
            (kept[best / group_size] * group_size + best % group_size) as i32
        }));
    }
    ids
}

/// Compiles to one instruction where both are numbers, as they are here; `b` if `a` is none.
fn greater<T: Real>(a: T, b: T) -> T {
    if a > b { a } else { b }
}

fn sum_of_two_best<T: Real>(group: &[T]) -> T {
    let (mut first, mut second) = (T::neg_infinity(), T::neg_infinity());
    // Without branches: which score is the greater one is nothing that a processor could guess.
    for &score in group {
        let lesser = if score > first { first } else { score };
        second = greater(lesser, second);
        first = greater(score, first);
    }
    if group.len() == 1 {
        first
    } else {
        first + second
    }
}

/// Scores of which the best are taken, one after the other. What is taken, and what fills the last block, is no number
/// and so never the best, not even among scores that are all minus infinity.
struct Candidates<T>(Vec<[T; LANES]>);

impl<T: Real> Candidates<T> {
    fn new(len: usize) -> Self {
        Self(vec![[T::nan(); LANES]; len.div_ceil(LANES)])
    }

    /// The candidates, to be set again, all of them and none to NaN.
    fn scores(&mut self) -> &mut [T] {
        self.0.as_flattened_mut()
    }

    /// The index of the greatest score that has not been taken, the first of equal ones.
    ///
    /// # Panics
    ///
    /// Panics when all have been taken.
    fn take_best(&mut self) -> usize {
        let mut bests = [T::neg_infinity(); LANES];
        for block in &self.0 {
            for (best, score) in bests.iter_mut().zip(block) {
                *best = greater(*score, *best);
            }
        }
        let mut width = LANES;
        while width > 1 {
            width /= 2;
            for lane in 0..width {
                bests[lane] = greater(bests[lane + width], bests[lane]);
            }
        }
        let best = bests[0];
        let places = self.0.iter().enumerate().find_map(|(i, block)| {
            let mut equal = 0u32;
            for (lane, score) in block.iter().enumerate() {
                equal |= u32::from(*score == best) << lane;
            }
            (equal != 0).then(|| i * LANES + equal.trailing_zeros() as usize)
        });
        let first = places.expect("there are more candidates than are taken");
        self.scores()[first] = T::nan();
        first
    }
}
