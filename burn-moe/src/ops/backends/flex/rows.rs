//! Copies and sums of rows: permute, unpermute and their adjoints.

use super::activation::Real;
use super::buffers::Buffer;
use rayon::prelude::*;

/// Elements that one task handles: enough to be worth the hand-over.
const ELEMENTS_PER_TASK: usize = 1 << 16;

fn rows_per_task(width: usize) -> usize {
    (ELEMENTS_PER_TASK / width.max(1)).max(1)
}

/// `out[i] = x[index[i]]`, rows of `width`.
pub(super) fn gather<T: Real>(x: &[T], width: usize, index: &[i32]) -> Buffer<T> {
    let mut out = Buffer::new(index.len() * width);
    if out.is_empty() {
        return out;
    }
    let rows = rows_per_task(width);
    out.par_chunks_mut(rows * width)
        .zip(index.par_chunks(rows))
        .for_each(|(out, index)| {
            for (out, row) in out.chunks_exact_mut(width).zip(index) {
                out.copy_from_slice(row_of(x, width, *row));
            }
        });
    out
}

/// `out[index[i]] += grad[i]` in order of `i`.
pub(super) fn scatter_add<T: Real>(
    grad: &[T],
    width: usize,
    index: &[i32],
    rows: usize,
) -> Buffer<T> {
    let mut out = Buffer::new(rows * width);
    if out.is_empty() {
        return out;
    }
    // What goes to each row, in order of `i`: sorted by counting.
    let mut ends = vec![0u32; rows + 1];
    for &row in index {
        ends[row as usize + 1] += 1;
    }
    for row in 0..rows {
        ends[row + 1] += ends[row];
    }
    let mut sources = vec![0i32; index.len()];
    for (i, &row) in index.iter().enumerate() {
        let end = &mut ends[row as usize];
        sources[*end as usize] = i as i32;
        *end += 1;
    }
    let per_task = rows_per_task(width);
    out.par_chunks_mut(per_task * width)
        .enumerate()
        .for_each(|(task, out)| {
            for (row, out) in (task * per_task..).zip(out.chunks_exact_mut(width)) {
                // `ends` has moved by one row.
                let start = row.checked_sub(1).map_or(0, |before| ends[before]);
                let mut sources = sources[start as usize..ends[row] as usize].iter();
                match sources.next() {
                    Some(first) => {
                        T::scale(row_of(grad, width, *first), T::one(), out);
                    }
                    None => out.fill(T::zero()),
                }
                for source in sources {
                    T::add_scaled(row_of(grad, width, *source), T::one(), out);
                }
            }
        });
    out
}

/// `out[t] = sum over k of weights[t, k] * y[index[t, k]]`, in order of `k`; -1 names no row.
pub(super) fn weighted_sum<T: Real>(
    y: &[T],
    width: usize,
    index: &[i32],
    weights: &[T],
    k: usize,
) -> Buffer<T> {
    let tokens = index.len().checked_div(k).unwrap_or(0);
    let mut out = Buffer::new(tokens * width);
    if out.is_empty() {
        return out;
    }
    let per_task = rows_per_task(width * k);
    out.par_chunks_mut(per_task * width)
        .zip(index.par_chunks(per_task * k))
        .zip(weights.par_chunks(per_task * k))
        .for_each(|((out, index), weights)| {
            let copies = index.chunks_exact(k).zip(weights.chunks_exact(k));
            for (out, (index, weights)) in out.chunks_exact_mut(width).zip(copies) {
                let mut copies = index.iter().zip(weights).filter(|(row, _)| **row >= 0);
                match copies.next() {
                    Some((row, weight)) => T::scale(row_of(y, width, *row), *weight, out),
                    None => out.fill(T::zero()),
                }
                for (row, weight) in copies {
                    T::add_scaled(row_of(y, width, *row), *weight, out);
                }
            }
        });
    out
}

/// Gradients of [`weighted_sum`] for `y` and `weights`.
pub(super) fn weighted_sum_backward<T: Real>(
    grad: &[T],
    y: &[T],
    width: usize,
    index: &[i32],
    weights: &[T],
    k: usize,
) -> (Buffer<T>, Buffer<T>) {
    let mut dy = Buffer::new(y.len());
    let mut dw = Buffer::new(weights.len());
    dw.fill(T::zero());
    let Some(rows) = y.len().checked_div(width) else {
        return (dy, dw);
    };
    // The copy that each row of `y` is, -1 for none.
    let mut copies = vec![-1i32; rows];
    for (copy, &row) in index.iter().enumerate() {
        if row >= 0 {
            copies[row as usize] = copy as i32;
        }
    }
    let mut dots = vec![T::zero(); rows];
    let per_task = rows_per_task(width);
    dy.par_chunks_mut((per_task * width).max(1))
        .zip(y.par_chunks((per_task * width).max(1)))
        .zip(copies.par_chunks(per_task))
        .zip(dots.par_chunks_mut(per_task))
        .for_each(|(((dy, y), copies), dots)| {
            let rows = dy.chunks_exact_mut(width).zip(y.chunks_exact(width));
            for ((dy, y), (&copy, row_dot)) in rows.zip(copies.iter().zip(dots)) {
                if copy < 0 {
                    dy.fill(T::zero());
                    continue;
                }
                let copy = copy as usize;
                let grad = row_of(grad, width, (copy / k) as i32);
                T::scale(grad, weights[copy], dy);
                *row_dot = T::dot(grad, y);
            }
        });
    for (copy, row_dot) in copies.into_iter().zip(dots) {
        if copy >= 0 {
            dw[copy as usize] = row_dot;
        }
    }
    (dy, dw)
}

fn row_of<T>(x: &[T], width: usize, row: i32) -> &[T] {
    let start = row as usize * width;
    &x[start..start + width]
}
