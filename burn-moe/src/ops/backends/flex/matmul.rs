//! Dense matrix products on row-major slices, on one thread: the caller splits work by expert and
//! row block. See [`kernels`](super::kernels) for what their bits depend on.

use super::activation::Real;
use super::buffers::{ALIGN, Buffer};
use super::kernels::{Aside, Kernels, LINE, MOST_STREAM_ROWS, Store, Tile, fence};

/// Depth of a panel that meets few rows. Rows of weights lie in pages of their own, of which the
/// hardware follows 32 or so at a time to fetch ahead: 48 reach memory faster than 128 do, and 16 rows
/// cost more in sums that come and go.
const SHALLOW_PANEL: usize = 48;

/// Depth of a panel that meets [`MANY_ROWS`] or more: for these, sums that come and go cost more than
/// what the wait for the panel does, and than reading it from the second-level cache.
const DEEP_PANEL: usize = 256;

/// Rows from which on panels are deep.
const MANY_ROWS: usize = 48;

/// Rows of the left operand that take turns with a panel: with their outputs, they fit the second-level
/// cache.
const BLOCK_ROWS: usize = 256;

/// How many steps ahead weights are fetched that are used once.
const STEPS_AHEAD: usize = 12;

/// Depths up to this one weight gradients do not cut: they are written once.
const GRAD_DEPTH: usize = 512;

/// Steps of the depth that are packed together: of `f32`, a line of the cache, where they are packed as columns.
const STEPS_TOGETHER: usize = 16;

/// `out [m, n] = x [m, k] * w [k, n]`.
pub(super) fn matmul<T: Real>(x: &[T], w: &[T], out: &mut [T], k: usize, n: usize) {
    matmul_by(T::kernels(), x, w, out, k, n);
}

fn matmul_by<T: Real>(kernels: &Kernels<T>, x: &[T], w: &[T], out: &mut [T], k: usize, n: usize) {
    let Some(m) = out.len().checked_div(n) else {
        return;
    };
    assert_eq!([x.len(), w.len(), out.len()], [m * k, k * n, m * n]);
    if k == 0 {
        out.fill(T::zero());
    }
    let most = kernels.lanes * kernels.vectors;
    // Whole vectors of few rows have been computed already.
    let streamed = if m <= MOST_STREAM_ROWS {
        stream(kernels, x, w, out, k, n)
    } else {
        0
    };
    if streamed == n {
        return;
    }
    let panel_depth = if m < MANY_ROWS {
        SHALLOW_PANEL
    } else {
        DEEP_PANEL
    };
    let mut panel = Buffer::<T>::new(panel_depth * most);
    for first in (0..m).step_by(BLOCK_ROWS) {
        let rows = BLOCK_ROWS.min(m - first);
        // Panels side by side follow each other: one under the other they would meet in few sets of
        // the cache, where rows of weights are some KiB long, and drive each other out.
        for from in (0..k).step_by(panel_depth) {
            let depth = panel_depth.min(k - from);
            for column in (streamed..n).step_by(most) {
                let width = most.min(n - column);
                let vectors = width.div_ceil(kernels.lanes);
                let stride = vectors * kernels.lanes;
                let blocks = rows.div_ceil(kernels.rows[vectors - 1]);
                let weights = &w[from * n + column..];
                let next = match column + width < n {
                    _ if blocks == 1 => (from + STEPS_AHEAD) * n + column,
                    true => from * n + column + width,
                    false => (from + depth) * n,
                };
                let mut tile = Tile {
                    depth,
                    x: x.as_ptr(),
                    x_row: k,
                    x_step: 1,
                    w: weights.as_ptr(),
                    w_row: n,
                    out: out.as_mut_ptr(),
                    out_row: n,
                    store: if from == 0 { Store::Write } else { Store::Add },
                    ahead: w.as_ptr().wrapping_add(next),
                    ahead_row: n,
                    packed: panel.as_mut_ptr(),
                };
                if width < most {
                    pack_rows(kernels, weights, n, width, &mut panel[..depth * stride]);
                    (tile.w, tile.w_row) = (panel.as_ptr(), stride);
                }
                for block in 0..blocks {
                    let at = |block: usize| first + rows * block / blocks;
                    let (row, rows) = (at(block), at(block + 1) - at(block));
                    tile.x = &raw const x[row * k + from];
                    let aside = match block {
                        _ if width < most => Aside::Nothing,
                        _ => aside(block, blocks),
                    };
                    let out = &mut out[row * n + column..];
                    // SAFETY: `x` has `rows` rows from `row` on, of `k` elements; the panel, packed
                    // or in place, has `depth` rows with room for `width` columns.
                    unsafe { run(kernels, &mut tile, rows, width, out, n, aside) };
                    if aside == Aside::Pack {
                        (tile.w, tile.w_row) = (tile.packed, stride);
                    }
                }
            }
        }
    }
}

/// The columns of `out` that make whole vectors, for few rows; how many these are.
fn stream<T: Real>(
    kernels: &Kernels<T>,
    x: &[T],
    w: &[T],
    out: &mut [T],
    k: usize,
    n: usize,
) -> usize {
    let rows = out.len() / n;
    let vectors = n / kernels.lanes;
    if rows == 0 {
        return n;
    }
    let tile = Tile {
        depth: k,
        x: x.as_ptr(),
        x_row: k,
        x_step: 1,
        w: w.as_ptr(),
        w_row: n,
        out: out.as_mut_ptr(),
        out_row: n,
        store: Store::Write,
        ahead: w.as_ptr(),
        ahead_row: 0,
        packed: std::ptr::null_mut(),
    };
    // SAFETY: `x` is `rows` rows of `k`, `w` is `k` rows of `n` and `out` is `rows` rows of `n`
    // elements, as the caller asserts; `T::kernels` has made sure of the instructions.
    unsafe { kernels.stream(&tile, rows, vectors) };
    vectors * kernels.lanes
}

/// What to do while a panel meets a block of rows: the first of many packs it, where it is then read
/// by the others; they fetch the next one, evenly in time, since a tile that asks memory for more
/// than it can give waits for it. A single block fetches its own panel, a little ahead.
fn aside(block: usize, blocks: usize) -> Aside {
    let eighth = |block: usize| (block - 1) * 8 / (blocks - 1);
    match (block, blocks) {
        (0, 1) => Aside::Fetch,
        (0, 2..=4) => Aside::FetchHalf(0),
        (1, 2 | 3) | (2, 4) => Aside::FetchHalf(1),
        (_, ..=4) => Aside::Nothing,
        (0, _) => Aside::Pack,
        (1..=4, 5..=8) => Aside::FetchLine(block - 1),
        (_, 5..=8) => Aside::Nothing,
        (1, _) => Aside::FetchEighth(0),
        _ if eighth(block) > eighth(block - 1) => Aside::FetchEighth(eighth(block)),
        _ => Aside::Nothing,
    }
}

/// `out [m, k] = grad [m, n] * w^T`, with `w [k, n]`.
pub(super) fn matmul_transposed<T: Real>(grad: &[T], w: &[T], out: &mut [T], n: usize, k: usize) {
    transposed_by(T::kernels(), grad, w, out, n, k);
}

/// Computes the transpose, `w * grad^T`: so the weights are read as they lie, once for as many rows
/// of `grad` as a tile is wide.
fn transposed_by<T: Real>(
    kernels: &Kernels<T>,
    grad: &[T],
    w: &[T],
    out: &mut [T],
    n: usize,
    k: usize,
) {
    /// Tiles below each other that are turned together.
    const TURNED: usize = 8;
    let Some(m) = out.len().checked_div(k) else {
        return;
    };
    assert_eq!([grad.len(), w.len(), out.len()], [m * n, k * n, m * k]);
    let most = kernels.lanes * kernels.vectors;
    let stride_of = |rows: usize| rows.div_ceil(kernels.lanes) * kernels.lanes;
    let mut turned_grad = Buffer::<T>::new(n * stride_of(most.min(m)));
    let mut turned = Buffer::<T>::new(TURNED * kernels.rows[0] * most);
    for first in (0..m).step_by(most) {
        let width = most.min(m - first);
        let stride = stride_of(width);
        let grad = &grad[first * n..(first + width) * n];
        transpose(grad, n, &mut turned_grad, stride);
        let vectors = stride / kernels.lanes;
        let best = kernels.rows[vectors - 1];
        for from in (0..k).step_by(TURNED * best) {
            let rows = (TURNED * best).min(k - from);
            let blocks = rows.div_ceil(best);
            for block in 0..blocks {
                let at = |block: usize| rows * block / blocks;
                let (row, rows) = (at(block), at(block + 1) - at(block));
                let mut tile = Tile {
                    depth: n,
                    x: w[(from + row) * n..].as_ptr(),
                    x_row: n,
                    x_step: 1,
                    w: turned_grad.as_ptr(),
                    w_row: stride,
                    out: turned.as_mut_ptr(),
                    out_row: stride,
                    store: Store::Write,
                    ahead: w.as_ptr(),
                    ahead_row: 0,
                    packed: std::ptr::null_mut(),
                };
                let out = &mut turned[row * stride..];
                // SAFETY: `w` has `rows` rows from `from + row` on, of `n` elements; the turned
                // gradient has `n` rows of `stride` elements.
                unsafe {
                    run(
                        kernels,
                        &mut tile,
                        rows,
                        stride,
                        out,
                        stride,
                        Aside::Nothing,
                    )
                };
            }
            for (i, out) in out.chunks_exact_mut(k).skip(first).take(width).enumerate() {
                for (row, out) in out[from..from + rows].iter_mut().enumerate() {
                    *out = turned[row * stride + i];
                }
            }
        }
    }
}

/// The first `rows * columns` elements of `from [rows, columns]` as `to [columns, stride]`, where
/// the rest of each row becomes zero.
fn transpose<T: Real>(from: &[T], columns: usize, to: &mut [T], stride: usize) {
    let rows = from.len().checked_div(columns).unwrap_or(0);
    let together = (0..columns).step_by(STEPS_TOGETHER);
    for (first, to) in together.zip(to.chunks_mut(STEPS_TOGETHER * stride)) {
        let width = STEPS_TOGETHER.min(columns - first);
        for (row, from) in from.chunks_exact(columns).enumerate() {
            let to = to[row..].iter_mut().step_by(stride);
            for (to, from) in to.zip(&from[first..first + width]) {
                *to = *from;
            }
        }
        for to in to.chunks_exact_mut(stride).take(width) {
            to[rows..].fill(T::zero());
        }
    }
}

/// Copies up to as many elements as a tile has rows: by two copies of a fixed size where that will do.
#[inline(always)]
fn copy_few<T: Copy>(from: &[T], to: &mut [T]) {
    const FIXED: usize = 4;
    let len = to.len();
    assert!(from.len() == len && len <= 2 * FIXED);
    if len < FIXED {
        for (to, from) in to.iter_mut().zip(from) {
            *to = *from;
        }
    } else {
        to[..FIXED].copy_from_slice(&from[..FIXED]);
        to[len - FIXED..].copy_from_slice(&from[len - FIXED..]);
    }
}

/// Rows `rows` of `x^T * grad`, `out [rows, n]`, with `x [m, k]` and `grad [m, n]`.
pub(super) fn matmul_weight_grad<T: Real>(
    x: &[T],
    grad: &[T],
    out: &mut [T],
    (k, n): (usize, usize),
    from: usize,
) {
    weight_grad_by(T::kernels(), x, grad, out, (k, n), from);
}

fn weight_grad_by<T: Real>(
    kernels: &Kernels<T>,
    x: &[T],
    grad: &[T],
    out: &mut [T],
    (k, n): (usize, usize),
    from: usize,
) {
    let Some(rows) = out.len().checked_div(n) else {
        return;
    };
    let m = grad.len() / n;
    assert!(from + rows <= k, "rows {from}..{} of {k}", from + rows);
    assert_eq!([x.len(), grad.len(), out.len()], [m * k, m * n, rows * n]);
    if m == 0 {
        out.fill(T::zero());
    }
    let most = kernels.lanes * kernels.vectors;
    let aligned = out.as_ptr().addr().is_multiple_of(ALIGN)
        && (n * size_of::<T>()).is_multiple_of(ALIGN)
        && m <= GRAD_DEPTH;
    let mut panel = Buffer::<T>::new(GRAD_DEPTH.min(m) * most);
    let mut left = Buffer::<T>::new(GRAD_DEPTH.min(m) * rows);
    for step in (0..m).step_by(GRAD_DEPTH) {
        let depth = GRAD_DEPTH.min(m - step);
        let best = kernels.rows[kernels.vectors.min(n.div_ceil(kernels.lanes)) - 1];
        let blocks = rows.div_ceil(best);
        let at = |block: usize| rows * block / blocks;
        // The left operand: what each block of rows takes at a step of the depth, side by side. A few
        // steps at a time, so that neither where they come from nor where they go to strides far.
        for some in (0..depth).step_by(STEPS_TOGETHER) {
            let steps = STEPS_TOGETHER.min(depth - some);
            for block in 0..blocks {
                let (first, end) = (at(block), at(block + 1));
                let width = end - first;
                let left = &mut left[first * depth + some * width..][..steps * width];
                let x = x[(step + some) * k..].chunks_exact(k);
                for (left, x) in left.chunks_exact_mut(width).zip(x) {
                    copy_few(&x[from + first..from + end], left);
                }
            }
        }
        for column in (0..n).step_by(most) {
            let width = most.min(n - column);
            let vectors = width.div_ceil(kernels.lanes);
            let stride = vectors * kernels.lanes;
            let panel = &mut panel[..depth * stride];
            pack_rows(kernels, &grad[step * n + column..], n, width, panel);
            for block in 0..blocks {
                let (first, end) = (at(block), at(block + 1));
                let mut tile = Tile {
                    depth,
                    x: left[first * depth..].as_ptr(),
                    x_row: 1,
                    x_step: end - first,
                    w: panel.as_ptr(),
                    w_row: stride,
                    out: out.as_mut_ptr(),
                    out_row: n,
                    store: match step {
                        0 if aligned => Store::Stream,
                        0 => Store::Write,
                        _ => Store::Add,
                    },
                    ahead: panel.as_ptr(),
                    ahead_row: 0,
                    packed: std::ptr::null_mut(),
                };
                let out = &mut out[first * n + column..];
                // SAFETY: the left operand has blocks up to `end`, of `depth` steps, the panel
                // `depth` rows of `stride`; for streaming, rows and columns of `out` begin at
                // multiples of `ALIGN` bytes.
                unsafe {
                    run(
                        kernels,
                        &mut tile,
                        end - first,
                        width,
                        out,
                        n,
                        Aside::Nothing,
                    )
                };
            }
        }
    }
    if aligned {
        fence();
    }
}

/// Runs a tile of `rows` rows and `width` columns that goes to the beginning of `out`.
///
/// # Safety
///
/// The elements of `tile.x` and `tile.w` must be valid, those of `tile.w` up to whole vectors, and
/// the rows of `out` aligned to vectors where `tile` streams.
unsafe fn run<T: Real>(
    kernels: &Kernels<T>,
    tile: &mut Tile<T>,
    rows: usize,
    width: usize,
    out: &mut [T],
    out_row: usize,
    aside: Aside,
) {
    let vectors = width.div_ceil(kernels.lanes);
    assert!(
        (rows - 1) * out_row + width <= out.len(),
        "tile beyond output"
    );
    let ahead = tile.ahead;
    tile.ahead = match aside {
        Aside::FetchEighth(eighth) => ahead.wrapping_add(tile.depth / 8 * eighth * tile.ahead_row),
        Aside::FetchHalf(half) => ahead.wrapping_byte_add(half * 2 * LINE),
        Aside::FetchLine(line) => ahead.wrapping_byte_add(line * LINE),
        Aside::Nothing | Aside::Fetch | Aside::Pack => ahead,
    };
    if width == vectors * kernels.lanes {
        (tile.out, tile.out_row) = (out.as_mut_ptr(), out_row);
        // SAFETY: the output is as large as just asserted; the operands are the caller's promise;
        // `T::kernels` has made sure of the instructions.
        unsafe { kernels.run(tile, rows, vectors, aside) };
        tile.ahead = ahead;
        return;
    }
    // The last vector reaches beyond the output: it goes to a copy.
    let mut copy = [T::zero(); super::kernels::MOST_TILE];
    let stride = vectors * kernels.lanes;
    let store = tile.store;
    if store == Store::Add {
        let out = out.chunks(out_row).take(rows);
        for (copy, out) in copy.chunks_exact_mut(stride).zip(out) {
            copy[..width].copy_from_slice(&out[..width]);
        }
    } else {
        tile.store = Store::Write;
    }
    (tile.out, tile.out_row) = (copy.as_mut_ptr(), stride);
    // SAFETY: as above; the copy has room for the largest tile.
    unsafe { kernels.run(tile, rows, vectors, aside) };
    tile.store = store;
    let out = out.chunks_mut(out_row).take(rows);
    for (copy, out) in copy.chunks_exact(stride).zip(out) {
        out[..width].copy_from_slice(&copy[..width]);
    }
}

/// Copies the first `width` columns of the rows of `w`, `w_row` apart, to the rows of `panel`, whole
/// vectors wide, with zeros behind them.
fn pack_rows<T: Real>(kernels: &Kernels<T>, w: &[T], w_row: usize, width: usize, panel: &mut [T]) {
    let vectors = width.div_ceil(kernels.lanes);
    let stride = vectors * kernels.lanes;
    let rows = panel.len() / stride;
    if width == stride {
        assert!(rows == 0 || (rows - 1) * w_row + width <= w.len());
        // SAFETY: `w` has as many elements as just asserted, `panel` is `rows` rows of `stride`;
        // `T::kernels` has made sure of the instructions.
        unsafe { kernels.packs[vectors - 1](rows, w.as_ptr(), w_row, panel.as_mut_ptr()) };
        return;
    }
    for (panel, w) in panel.chunks_exact_mut(stride).zip(w.chunks(w_row)) {
        let (panel, rest) = panel.split_at_mut(width);
        panel.copy_from_slice(&w[..width]);
        rest.fill(T::zero());
    }
}

#[cfg(test)]
mod tests {
    use super::super::kernels::all_f32_kernels;
    use super::*;
    use proptest::prelude::*;

    fn values(len: usize, seed: usize) -> Vec<f32> {
        let mut state = seed as u32 ^ 0x9e37_79b9;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / (1 << 23) as f32 - 1.0
        };
        (0..len).map(|_| next()).collect()
    }

    /// `[m, n]` with the element at `(i, j)` the sum of `of(i, j, depth)`, and the sum of sizes.
    fn exact(
        (m, k, n): (usize, usize, usize),
        of: impl Fn(usize, usize, usize) -> f64,
    ) -> Vec<(f64, f64)> {
        (0..m * n)
            .map(|at| {
                let products = (0..k).map(|depth| of(at / n, at % n, depth));
                products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()))
            })
            .collect()
    }

    fn assert_close(out: &[f32], exact: &[(f64, f64)]) {
        assert_eq!(out.len(), exact.len());
        for (i, (out, (sum, size))) in out.iter().zip(exact).enumerate() {
            let error = (f64::from(*out) - sum).abs();
            assert!(error <= 1e-5 * size + 1e-30, "{i}: {out}, exactly {sum}");
        }
    }

    /// All products of `x [m, k]`, `w [k, n]` and `grad [m, n]`, into memory full of NaN.
    fn products(
        kernels: &Kernels<f32>,
        (m, k, n): (usize, usize, usize),
        [x, w, grad]: [&[f32]; 3],
    ) -> [Vec<f32>; 3] {
        let [mut out, mut dx, mut dw] = [m * n, m * k, k * n].map(|len| vec![f32::NAN; len]);
        matmul_by(kernels, x, w, &mut out, k, n);
        transposed_by(kernels, grad, w, &mut dx, n, k);
        // In two parts.
        let (first, second) = dw.split_at_mut(k / 3 * n);
        weight_grad_by(kernels, x, grad, first, (k, n), 0);
        weight_grad_by(kernels, x, grad, second, (k, n), k / 3);
        [out, dx, dw]
    }

    fn check(m: usize, k: usize, n: usize) {
        let (x, w, grad) = (values(m * k, 1), values(k * n, 2), values(m * n, 3));
        let at = |v: &[f32], i: usize| f64::from(v[i]);
        for kernels in all_f32_kernels() {
            let [out, dx, dw] = products(kernels, (m, k, n), [&x, &w, &grad]);
            assert_close(
                &out,
                &exact((m, k, n), |i, j, l| at(&x, i * k + l) * at(&w, l * n + j)),
            );
            assert_close(
                &dx,
                &exact((m, n, k), |i, j, l| {
                    at(&grad, i * n + l) * at(&w, j * n + l)
                }),
            );
            assert_close(
                &dw,
                &exact((k, m, n), |i, j, l| {
                    at(&x, l * k + i) * at(&grad, l * n + j)
                }),
            );
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig {
            failure_persistence: None,
            ..ProptestConfig::with_cases(24)
        })]

        #[test]
        fn products_are_those_of_f64(m in 1usize..80, k in 1usize..280, n in 1usize..140) {
            check(m, k, n);
        }
    }

    #[test]
    fn products_of_edge_sizes_are_those_of_f64() {
        for (m, k, n) in [
            (0, 3, 5),
            (3, 0, 5),
            (3, 5, 0),
            (1, 1, 1),
            (1, 129, 64),
            (257, 128, 65),
            (515, 7, 16),
            (1030, 9, 33),
        ] {
            check(m, k, n);
        }
    }

    /// A row of a product has the same bits whatever other rows there are, and on every machine with
    /// fused multiply-add.
    #[test]
    fn bits_of_a_row_depend_on_nothing_else() {
        for (k, n) in [(140, 130), (600, 64), (64, 1), (5, 33), (1, 16)] {
            let most = 130;
            let (x, w, grad) = (values(most * k, 4), values(k * n, 5), values(most * n, 6));
            let mut of_machines = Vec::new();
            for kernels in all_f32_kernels() {
                let [out, dx, _] = products(kernels, (most, k, n), [&x, &w, &grad]);
                for (first, m) in [1, 2, 3, 5, 6, 7, 16, 17, 33, 64, 65, 129]
                    .into_iter()
                    .flat_map(|m| [(0, m), (most - m, m)])
                {
                    let rows = first..first + m;
                    let x = &x[rows.start * k..rows.end * k];
                    let grad = &grad[rows.start * n..rows.end * n];
                    let [few, few_dx, _] = products(kernels, (m, k, n), [x, &w, grad]);
                    assert!(
                        few == out[rows.start * n..rows.end * n],
                        "{m} rows, [{k}, {n}]"
                    );
                    assert!(
                        few_dx == dx[rows.start * k..rows.end * k],
                        "{m} rows, [{k}, {n}]"
                    );
                }
                of_machines.push((out, dx));
            }
            // The first is portable, and fuses only where that is all there is.
            assert!(of_machines.iter().skip(1).all(|of| *of == of_machines[1]));
        }
    }
}
