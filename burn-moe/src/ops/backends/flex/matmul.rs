//! Dense matrix products on row-major slices, through the `gemm` crate on one thread: the caller
//! splits work by expert and row block, which scales better at expert sizes.

use super::activation::Real;

/// `out [m, n] = x [m, k] * w [k, n]`.
///
/// A row of `out` has the same bits whatever `m` is. `gemm` promises that for every `m` but one
/// row, which it computes in another order; a single row is therefore computed beside a zero row.
pub(super) fn matmul<T: Real>(x: &[T], w: &[T], out: &mut [T], k: usize, n: usize) {
    if n == 0 || out.is_empty() {
        return;
    }
    let m = out.len() / n;
    if m == 1 {
        let mut pair = vec![T::zero(); 2 * k];
        pair[..k].copy_from_slice(x);
        let mut both = vec![T::zero(); 2 * n];
        gemm_rows(&pair, w, &mut both, 2, k, n, Layout::Plain);
        out.copy_from_slice(&both[..n]);
    } else {
        gemm_rows(x, w, out, m, k, n, Layout::Plain);
    }
}

/// `out [m, k] = grad [m, n] * w^T`, with `w [k, n]`.
pub(super) fn matmul_transposed<T: Real>(grad: &[T], w: &[T], out: &mut [T], n: usize, k: usize) {
    if k == 0 || out.is_empty() {
        return;
    }
    let m = out.len() / k;
    gemm_rows(grad, w, out, m, n, k, Layout::RightTransposed);
}

/// `out [k, n] = x^T * grad`, with `x [m, k]` and `grad [m, n]`.
pub(super) fn matmul_weight_grad<T: Real>(x: &[T], grad: &[T], out: &mut [T], k: usize, n: usize) {
    if out.is_empty() {
        return;
    }
    let m = x.len() / k;
    gemm_rows(x, grad, out, k, m, n, Layout::LeftTransposed);
}

enum Layout {
    Plain,
    LeftTransposed,
    RightTransposed,
}

/// `out [m, n] = left [m, k] * right [k, n]`, where `layout` says which one is stored transposed.
fn gemm_rows<T: Real>(
    left: &[T],
    right: &[T],
    out: &mut [T],
    m: usize,
    k: usize,
    n: usize,
    layout: Layout,
) {
    assert_eq!(left.len(), m * k, "left operand of [{m}, {k}]");
    assert_eq!(right.len(), k * n, "right operand of [{k}, {n}]");
    assert_eq!(out.len(), m * n, "output of [{m}, {n}]");
    let (left_strides, right_strides) = match layout {
        Layout::Plain => ((k, 1), (n, 1)),
        Layout::LeftTransposed => ((1, m), (n, 1)),
        Layout::RightTransposed => ((k, 1), (1, k)),
    };
    // SAFETY: the three slices hold exactly the elements that shapes and strides span, as the
    // assertions above check, and `out` is borrowed mutably, so it overlaps neither operand.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            left.as_ptr(),
            left_strides.1 as isize,
            left_strides.0 as isize,
            right.as_ptr(),
            right_strides.1 as isize,
            right_strides.0 as isize,
            T::zero(),
            T::one(),
            false,
            false,
            false,
            gemm::Parallelism::None,
        );
    }
}
