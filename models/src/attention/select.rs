//! Which of a row's scores are the largest, with ties as the reference implementation breaks them.
//!
//! Exact ties are the rule for the indexer: a key that no head wants scores 0. PyTorch on a CPU takes
//! those that C++'s `nth_element` (or `partial_sort`, when few of many are wanted) leaves in front;
//! the same steps here give the same keys, so that a model computes what it was compared with.

/// Positions of the `k` largest of `scores`, in no order; all of them when there are no more than `k`.
/// Behind the scores the row has as many more as make `length`, lower than all: keys that come later.
/// They decide nothing but ties.
pub(super) fn largest(scores: &[f32], length: usize, k: usize) -> Vec<usize> {
    if scores.len() <= k {
        return (0..scores.len()).collect();
    }
    let later = (scores.len()..length).map(|_| f32::NEG_INFINITY);
    let row = scores.iter().copied().chain(later);
    let mut row: Vec<Item> = row.enumerate().map(|(i, score)| (score, i)).collect();
    if k * 64 <= row.len() {
        heap_select(&mut row, k);
    } else {
        nth_element(&mut row, k - 1);
    }
    row.truncate(k);
    row.into_iter().map(|(_, i)| i).collect()
}

type Item = (f32, usize);

/// Whether `a` comes before `b`: higher, and NaN before all numbers.
fn before(a: Item, b: Item) -> bool {
    (a.0.is_nan() && !b.0.is_nan()) || a.0 > b.0
}

/// Puts the item that would be at `nth` in sorted order there, and none behind that belongs before.
fn nth_element(row: &mut [Item], nth: usize) {
    let (mut first, mut last) = (0, row.len());
    let mut rounds = 2 * row.len().max(1).ilog2();
    while last - first > 3 {
        if rounds == 0 {
            heap_select(&mut row[first..last], nth + 1 - first);
            row.swap(first, nth);
            return;
        }
        rounds -= 1;
        let cut = first + partition(&mut row[first..last]);
        if cut <= nth {
            first = cut;
        } else {
            last = cut;
        }
    }
    let rest = &mut row[first..last];
    for i in 1..rest.len() {
        let mut at = i;
        while at > 0 && before(rest[at], rest[at - 1]) {
            rest.swap(at, at - 1);
            at -= 1;
        }
    }
}

/// Partitions around the median of three; returns where the second part begins.
fn partition(row: &mut [Item]) -> usize {
    let (a, b, c) = (1, row.len() / 2, row.len() - 1);
    let median = if before(row[a], row[b]) {
        match (before(row[b], row[c]), before(row[a], row[c])) {
            (true, _) => b,
            (false, true) => c,
            (false, false) => a,
        }
    } else {
        match (before(row[a], row[c]), before(row[b], row[c])) {
            (true, _) => a,
            (false, true) => c,
            (false, false) => b,
        }
    };
    row.swap(0, median);
    let (mut first, mut last) = (1, row.len());
    loop {
        while before(row[first], row[0]) {
            first += 1;
        }
        last -= 1;
        while before(row[0], row[last]) {
            last -= 1;
        }
        if first >= last {
            return first;
        }
        row.swap(first, last);
        first += 1;
    }
}

/// Puts the `k` that come first in front, as a heap with the last of them on top.
fn heap_select(row: &mut [Item], k: usize) {
    for parent in (0..k / 2).rev() {
        let value = row[parent];
        sink(&mut row[..k], parent, value);
    }
    for i in k..row.len() {
        if before(row[i], row[0]) {
            let value = row[i];
            row[i] = row[0];
            sink(&mut row[..k], 0, value);
        }
    }
}

/// Fills the hole at `top`: children rise along the path of the later ones down to a leaf, then
/// `value` rises from there to its place.
fn sink(heap: &mut [Item], top: usize, value: Item) {
    let len = heap.len();
    let (mut hole, mut child) = (top, top);
    while child < (len - 1) / 2 {
        child = 2 * (child + 1);
        if before(heap[child], heap[child - 1]) {
            child -= 1;
        }
        heap[hole] = heap[child];
        hole = child;
    }
    if len.is_multiple_of(2) && len >= 2 && child == (len - 2) / 2 {
        child = 2 * child + 1;
        heap[hole] = heap[child];
        hole = child;
    }
    while hole > top && before(heap[(hole - 1) / 2], value) {
        heap[hole] = heap[(hole - 1) / 2];
        hole = (hole - 1) / 2;
    }
    heap[hole] = value;
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without ties there is one right answer, whatever the length, the number wanted and the order.
    #[test]
    fn takes_the_largest_visible() {
        let mut state = 1u64;
        for case in 0..2000 {
            let mut next = || {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1);
                (state >> 33) as usize
            };
            let length = 1 + next() % 300;
            let visible = 1 + next() % length;
            let k = 1 + next()
                % if case % 2 == 0 {
                    length
                } else {
                    1 + length / 64
                };
            let scores: Vec<f32> = (0..length)
                .map(|i| (next() % 100_000) as f32 + i as f32 / 512.0)
                .collect();
            let mut got = largest(&scores[..visible], length, k);
            got.sort_unstable();
            let mut order: Vec<usize> = (0..visible).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
            order.truncate(k);
            order.sort_unstable();
            assert_eq!(got, order, "{k} of {visible} of {length}");
        }
    }
}
