//! Copies and sums of rows: permute, unpermute and their adjoints.

use super::activation::Real;
use rayon::prelude::*;

/// Rows that one task handles: enough to be worth the hand-over.
const ROWS_PER_TASK: usize = 256;

/// `out[i] = x[index[i]]`, rows of `width`.
pub(super) fn gather<T: Real>(x: &[T], width: usize, index: &[i32]) -> Vec<T> {
    let mut out = Vec::with_capacity(index.len() * width);
    for &row in index {
        out.extend_from_slice(row_of(x, width, row));
    }
    out
}

/// `out[index[i]] += grad[i]` in order of `i`.
pub(super) fn scatter_add<T: Real>(grad: &[T], width: usize, index: &[i32], rows: usize) -> Vec<T> {
    let mut out = vec![T::zero(); rows * width];
    if width == 0 {
        return out;
    }
    for (&row, grad) in index.iter().zip(grad.chunks_exact(width)) {
        let start = row as usize * width;
        for (sum, grad) in out[start..start + width].iter_mut().zip(grad) {
            *sum = *sum + *grad;
        }
    }
    out
}

/// `out[t] = sum over k of weights[t, k] * y[index[t, k]]`, in order of `k`; -1 names no row.
pub(super) fn weighted_sum<T: Real>(
    y: &[T],
    width: usize,
    index: &[i32],
    weights: &[T],
    k: usize,
) -> Vec<T> {
    let tokens = index.len().checked_div(k).unwrap_or(0);
    let mut out = vec![T::zero(); tokens * width];
    if out.is_empty() {
        return out;
    }
    out.par_chunks_mut(ROWS_PER_TASK * width)
        .zip(index.par_chunks(ROWS_PER_TASK * k))
        .zip(weights.par_chunks(ROWS_PER_TASK * k))
        .for_each(|((out, index), weights)| {
            let copies = index.chunks_exact(k).zip(weights.chunks_exact(k));
            for (out, (index, weights)) in out.chunks_exact_mut(width).zip(copies) {
                for (&row, &weight) in index.iter().zip(weights) {
                    if row >= 0 {
                        for (sum, value) in out.iter_mut().zip(row_of(y, width, row)) {
                            *sum = *sum + weight * *value;
                        }
                    }
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
) -> (Vec<T>, Vec<T>) {
    let mut dy = vec![T::zero(); y.len()];
    let mut dw = vec![T::zero(); weights.len()];
    if width == 0 || k == 0 {
        return (dy, dw);
    }
    let copies = index.chunks_exact(k).zip(weights.chunks_exact(k));
    for ((grad, (index, weights)), dw) in grad
        .chunks_exact(width)
        .zip(copies)
        .zip(dw.chunks_exact_mut(k))
    {
        for ((&row, &weight), dw) in index.iter().zip(weights).zip(dw) {
            if row >= 0 {
                let start = row as usize * width;
                let dy = &mut dy[start..start + width];
                for (dy, grad) in dy.iter_mut().zip(grad) {
                    *dy = weight * *grad;
                }
                *dw = dot(grad, row_of(y, width, row));
            }
        }
    }
    (dy, dw)
}

/// Sums in eight lanes, so that the compiler can use vector registers.
pub(super) fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    let mut lanes = [T::zero(); 8];
    let (a_chunks, b_chunks) = (a.chunks_exact(8), b.chunks_exact(8));
    let rest = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .fold(T::zero(), |sum, (a, b)| sum + *a * *b);
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..8 {
            lanes[lane] = lanes[lane] + a[lane] * b[lane];
        }
    }
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

fn row_of<T>(x: &[T], width: usize, row: i32) -> &[T] {
    let start = row as usize * width;
    &x[start..start + width]
}
