//! Dense matrix products on row-major slices, through the `gemm` crate on one thread: the caller
//! splits work by expert and row block, which scales better at expert sizes.

use super::activation::Real;
use super::rows::dot;

/// `gemm` cuts the depth of products by other rules when neither side is wider than this.
const THIN: usize = 64;

/// Depths up to this one `gemm` never cuts.
const UNCUT_DEPTH: usize = 512;

/// `out [m, n] = x [m, k] * w [k, n]`.
///
/// A row of `out` has the same bits whatever `m` is. `gemm` promises that except for one row or one
/// column, which it computes in another order, and for thin outputs, whose depth it cuts in places
/// that depend on `m`. So a single row is computed beside a zero row, a single column by dot
/// products, and the depth of thin outputs is cut here.
pub(super) fn matmul<T: Real>(x: &[T], w: &[T], out: &mut [T], k: usize, n: usize) {
    if n == 0 || out.is_empty() {
        return;
    }
    let m = out.len() / n;
    if n == 1 {
        for (out, x) in out.iter_mut().zip(x.chunks_exact(k.max(1))) {
            *out = dot(x, w);
        }
    } else if m == 1 {
        let mut pair = vec![T::zero(); 2 * k];
        pair[..k].copy_from_slice(x);
        let mut both = vec![T::zero(); 2 * n];
        matmul(&pair, w, &mut both, k, n);
        out.copy_from_slice(&both[..n]);
    } else {
        let most = if n <= THIN { UNCUT_DEPTH } else { k };
        let mut from = 0;
        while from < k {
            let depth = most.min(k - from);
            let (x, w) = (&x[from..], &w[from * n..]);
            product((m, depth, n), (x, (k, 1)), (w, (n, 1)), out, from > 0);
            from += depth;
        }
    }
}

/// `out [m, k] = grad [m, n] * w^T`, with `w [k, n]`.
pub(super) fn matmul_transposed<T: Real>(grad: &[T], w: &[T], out: &mut [T], n: usize, k: usize) {
    if k == 0 || out.is_empty() {
        return;
    }
    let m = out.len() / k;
    product((m, n, k), (grad, (n, 1)), (w, (1, n)), out, false);
}

/// `out [k, n] = x^T * grad`, with `x [m, k]` and `grad [m, n]`.
pub(super) fn matmul_weight_grad<T: Real>(x: &[T], grad: &[T], out: &mut [T], k: usize, n: usize) {
    if out.is_empty() {
        return;
    }
    let m = x.len() / k;
    product((k, m, n), (x, (1, k)), (grad, (n, 1)), out, false);
}

/// `out [m, n] = left [m, k] * right [k, n]` for sizes `(m, k, n)`, added to `out` if `add`. Operands
/// come with their strides of rows and columns.
fn product<T: Real>(
    (m, k, n): (usize, usize, usize),
    (left, left_strides): (&[T], (usize, usize)),
    (right, right_strides): (&[T], (usize, usize)),
    out: &mut [T],
    add: bool,
) {
    let last = |rows: usize, columns: usize, strides: (usize, usize)| {
        rows.saturating_sub(1) * strides.0 + columns.saturating_sub(1) * strides.1
    };
    assert_eq!(out.len(), m * n, "output of [{m}, {n}]");
    assert!(
        k == 0 || out.is_empty() || last(m, k, left_strides) < left.len(),
        "left operand of [{m}, {k}]"
    );
    assert!(
        k == 0 || out.is_empty() || last(k, n, right_strides) < right.len(),
        "right operand of [{k}, {n}]"
    );
    // SAFETY: the last elements that shapes and strides reach lie in the three slices, as the
    // assertions above check, and `out` is borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            add,
            left.as_ptr(),
            left_strides.1 as isize,
            left_strides.0 as isize,
            right.as_ptr(),
            right_strides.1 as isize,
            right_strides.0 as isize,
            T::one(),
            T::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
