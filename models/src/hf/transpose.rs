//! Transposing at the speed of a copy.
//!
//! A square of elements whose side is a cache line is decoded row by row into a buffer in the
//! first-level cache, turned there, and its lines are written past the cache: the result is larger
//! than any cache, and lines that are written whole need not be fetched first. That halves the traffic
//! to memory, and with strides of powers of two, where lines of a column evict each other, it does
//! more.
//!
//! Where elements need no arithmetic and the processor has wide registers, whole squares are turned in
//! those instead (`lines`).

use std::ops::Range;

use super::element::Element;
#[cfg(target_arch = "x86_64")]
use super::lines::{self, Job};

/// Bytes of a cache line.
const LINE: usize = 64;
/// Rows and columns that are finished before the next: rows of the source long enough to be fetched
/// ahead, and several lines of a column of the result behind one another.
const BLOCK: usize = 64;

/// Rows of the source before the first one that begins a cache line of the result, when `out` is
/// where the first is written. None when lines of different columns begin at different rows.
pub(super) fn head<E: Element>(out: &[E], stride: usize) -> Option<usize> {
    let side = side::<E>();
    let bytes = out.as_ptr().addr().wrapping_neg() % LINE;
    (stride.is_multiple_of(side) && bytes.is_multiple_of(size_of::<E>()))
        .then(|| bytes / size_of::<E>())
}

const fn side<E: Element>() -> usize {
    LINE / size_of::<E>()
}

/// What is transposed. A trait and no closure, so that it is sure to be inlined: a call for each line
/// costs more than the line.
pub(super) trait Rows<E> {
    /// Writes columns `cols` of a row to `out`.
    fn piece(&self, row: usize, cols: Range<usize>, out: &mut [E]);

    /// The rows one behind the other as they are stored, when they are the elements' own bytes, or
    /// half of them: bf16 that become f32.
    fn stored(&self) -> Option<&[u8]>;
}

/// Writes a matrix `[rows, cols]` transposed to `out`: row `r` becomes column `r` of lines that lie
/// `stride` elements apart.
///
/// Fastest when `out` begins at a cache line.
pub(super) fn transpose<E: Element>(
    [rows, cols]: [usize; 2],
    from: &impl Rows<E>,
    out: &mut [E],
    stride: usize,
) {
    #[cfg(target_arch = "x86_64")]
    let [tall, wide] = in_registers([rows, cols], from, out, stride);
    #[cfg(not(target_arch = "x86_64"))]
    let [tall, wide] = [0, 0];
    let mut in_squares = |rows: Range<usize>, cols: Range<usize>| match size_of::<E>() {
        4 => in_squares::<E, 16, 4>(rows, cols, from, out, stride),
        _ => in_squares::<E, 32, 8>(rows, cols, from, out, stride),
    };
    in_squares(0..tall, wide..cols);
    in_squares(tall..rows, 0..cols);
    finish_lines();
}

/// Transposes as many of the first rows and columns as can be in vector registers; returns how many.
#[cfg(target_arch = "x86_64")]
fn in_registers<E: Element>(
    [rows, cols]: [usize; 2],
    from: &impl Rows<E>,
    out: &mut [E],
    stride: usize,
) -> [usize; 2] {
    let Some(bytes) = from.stored() else {
        return [0, 0];
    };
    if !lines::known() || head(out, stride) != Some(0) {
        return [0, 0];
    }
    let (sides, to) = ([rows, cols], bytemuck::cast_slice_mut(out));
    match (bytes.len() / (rows * cols).max(1), size_of::<E>()) {
        (4, 4) => run::<4, 4>(sides, bytes, to, stride),
        (2, 2) => run::<2, 2>(sides, bytes, to, stride),
        (2, 4) => run::<2, 4>(sides, bytes, to, stride),
        _ => [0, 0],
    }
}

#[cfg(target_arch = "x86_64")]
fn run<const STORED: usize, const SIZE: usize>(
    [rows, cols]: [usize; 2],
    from: &[u8],
    to: &mut [u8],
    stride: usize,
) -> [usize; 2] {
    let tall = rows - rows % Job::<STORED, SIZE>::ROWS;
    let wide = cols - cols % Job::<STORED, SIZE>::COLS;
    if tall == 0 || wide == 0 {
        return [0, 0];
    }
    // What the pointers rely on.
    assert!(from.len() >= rows * cols * STORED);
    assert!(tall <= stride && to.len() >= ((wide - 1) * stride + tall) * SIZE);
    assert!(to.as_ptr().addr().is_multiple_of(LINE) && (stride * SIZE).is_multiple_of(LINE));
    let job = Job::<STORED, SIZE> {
        from: from.as_ptr(),
        row_bytes: cols * STORED,
        to: to.as_mut_ptr(),
        column_bytes: stride * SIZE,
        rows: tall,
        cols: wide,
    };
    assert!(lines::known());
    // SAFETY: all rows lie in `from`, all columns in `to` and begin at cache lines, and the processor
    // has the registers.
    unsafe { job.run() };
    [tall, wide]
}

/// `SIDE` elements are a cache line, squares of `N` fit into vector registers.
#[inline(always)]
fn in_squares<E: Element, const SIDE: usize, const N: usize>(
    rows: Range<usize>,
    cols: Range<usize>,
    from: &impl Rows<E>,
    out: &mut [E],
    stride: usize,
) {
    let mut square = Line([[E::zeroed(); SIDE]; SIDE]);
    let mut turned = Line([[E::zeroed(); SIDE]; SIDE]);
    for row_block in rows.clone().step_by(BLOCK) {
        for col_block in cols.clone().step_by(BLOCK) {
            for col in (col_block..cols.end.min(col_block + BLOCK)).step_by(SIDE) {
                for row in (row_block..rows.end.min(row_block + BLOCK)).step_by(SIDE) {
                    let (height, width) = (SIDE.min(rows.end - row), SIDE.min(cols.end - col));
                    // Whole squares apart, so that the compiler knows their lengths.
                    if height == SIDE && width == SIDE {
                        for (r, piece) in square.0.iter_mut().enumerate() {
                            from.piece(row + r, col..col + SIDE, piece);
                        }
                        turn::<E, SIDE, N>(&square.0, &mut turned.0);
                        for (c, line) in turned.0.iter().enumerate() {
                            let at = (col + c) * stride + row;
                            write_line(&mut out[at..at + SIDE], line);
                        }
                    } else {
                        for (r, piece) in square.0.iter_mut().take(height).enumerate() {
                            from.piece(row + r, col..col + width, &mut piece[..width]);
                        }
                        turn::<E, SIDE, N>(&square.0, &mut turned.0);
                        for (c, line) in turned.0.iter().take(width).enumerate() {
                            let at = (col + c) * stride + row;
                            out[at..at + height].copy_from_slice(&line[..height]);
                        }
                    }
                }
            }
        }
    }
}

/// Begins at a cache line.
#[repr(align(64))]
struct Line<T>(T);

/// Transposes in squares of `N`.
#[inline(always)]
fn turn<E: Element, const SIDE: usize, const N: usize>(
    rows: &[[E; SIDE]; SIDE],
    columns: &mut [[E; SIDE]; SIDE],
) {
    for c in (0..SIDE).step_by(N) {
        for r in (0..SIDE).step_by(N) {
            let mut from = [[E::zeroed(); N]; N];
            for (i, from) in from.iter_mut().enumerate() {
                from.copy_from_slice(&rows[r + i][c..c + N]);
            }
            for j in 0..N {
                let column: [E; N] = std::array::from_fn(|i| from[i][j]);
                columns[c + j][r..r + N].copy_from_slice(&column);
            }
        }
    }
}

/// Writes a line; a whole one past the cache.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn write_line<E: Element>(out: &mut [E], line: &[E]) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    let to = out.as_mut_ptr().cast::<__m128i>();
    if size_of_val(out) == LINE && size_of_val(line) == LINE && to.addr().is_multiple_of(LINE) {
        let from = line.as_ptr().cast::<__m128i>();
        for i in 0..LINE / size_of::<__m128i>() {
            // SAFETY: both slices have the bytes of a line, the result begins at a multiple of one,
            // and SSE2 belongs to every x86-64. `finish_lines` follows before anyone reads.
            unsafe { _mm_stream_si128(to.add(i), _mm_loadu_si128(from.add(i))) };
        }
    } else {
        out.copy_from_slice(line);
    }
}

#[cfg(not(target_arch = "x86_64"))]
#[inline(always)]
fn write_line<E: Element>(out: &mut [E], line: &[E]) {
    out.copy_from_slice(line);
}

/// Orders the lines before everything that this thread writes from here on.
#[inline(always)]
fn finish_lines() {
    // SAFETY: SSE belongs to every x86-64.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::x86_64::_mm_sfence()
    };
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// A matrix whose elements are given by their indices.
    struct Source<F> {
        cols: usize,
        value: F,
        stored: Option<Vec<u8>>,
    }

    impl<E, F: Fn(usize) -> E> Rows<E> for Source<F> {
        fn piece(&self, row: usize, cols: Range<usize>, out: &mut [E]) {
            for (col, out) in cols.zip(out) {
                *out = (self.value)(row * self.cols + col);
            }
        }

        fn stored(&self) -> Option<&[u8]> {
            self.stored.as_deref()
        }
    }

    /// Calls `each(rows, cols, shift, stride)` around the sides of squares and blocks.
    fn shapes(mut each: impl FnMut(usize, usize, usize, usize)) {
        for rows in [1, 3, 15, 16, 17, 32, 33, 64, 65, 131] {
            for cols in [1, 7, 16, 31, 32, 65, 128, 275] {
                for (shift, more) in [(0, 0), (1, 0), (4, 3), (9, 64), (17, 1)] {
                    each(rows, cols, shift, rows + more);
                }
                each(rows, cols, 0, rows.next_multiple_of(32));
                each(rows, cols, 5, rows.next_multiple_of(32) + 32);
            }
        }
    }

    /// Against a loop: what lies in the first `rows` and `cols` of the source's, zero elsewhere.
    fn assert_turned<E: Element>(
        out: &[E],
        stride: usize,
        [rows, cols]: [usize; 2],
        source: &Source<impl Fn(usize) -> E>,
        what: &str,
    ) {
        for (i, got) in out.iter().enumerate() {
            let (col, row) = (i / stride, i % stride);
            let expected = match row < rows && col < cols {
                true => (source.value)(row * source.cols + col),
                false => E::zeroed(),
            };
            assert_eq!(
                bytemuck::bytes_of(got),
                bytemuck::bytes_of(&expected),
                "{what}: {row}, {col} of {rows} x {cols}, stride {stride}"
            );
        }
    }

    fn check<S: Element, E: Element>(stored: impl Fn(usize) -> S, value: impl Fn(usize) -> E) {
        shapes(|rows, cols, shift, stride| {
            let bits: Vec<S> = (0..rows * cols).map(&stored).collect();
            let bytes: Vec<u8> = bytemuck::cast_slice(&bits).into();
            for stored in [None, Some(bytes)] {
                let source = Source {
                    cols,
                    value: &value,
                    stored,
                };
                let mut buffer = vec![E::zeroed(); LINE + shift + cols * stride];
                let first = buffer.as_ptr().align_offset(LINE) + shift;
                let out = &mut buffer[first..][..cols * stride];
                transpose([rows, cols], &source, out, stride);
                assert_turned(out, stride, [rows, cols], &source, "all");
                #[cfg(target_arch = "x86_64")]
                if lines::known() {
                    out.fill(E::zeroed());
                    let done = in_registers([rows, cols], &source, out, stride);
                    let ready = head(out, stride) == Some(0) && source.stored.is_some();
                    let whole = [
                        rows / side::<E>() * side::<E>(),
                        cols / side::<S>() * side::<S>(),
                    ];
                    let some = ready && !whole.contains(&0);
                    assert_eq!(done, if some { whole } else { [0, 0] });
                    assert_turned(out, stride, done, &source, "in registers");
                }
            }
        });
    }

    #[test]
    fn equals_a_loop() {
        let f32_of = |i: usize| f32::from_bits((i as u32 + 1).wrapping_mul(0x9e37_79b1));
        let bf16_of = |i: usize| bf16::from_bits((i as u16).wrapping_mul(40503).wrapping_add(1));
        let widened = |i: usize| f32::from_bits(u32::from(bf16_of(i).to_bits()) << 16);
        check(f32_of, f32_of);
        check(bf16_of, bf16_of);
        check(bf16_of, widened);
    }

    #[test]
    fn head_ends_at_a_cache_line() {
        let buffer = vec![0f32; 64];
        for shift in 0..32 {
            let head = head(&buffer[shift..], 32).unwrap();
            assert!(head < 16);
            assert!(buffer[shift + head..].as_ptr().addr().is_multiple_of(LINE));
        }
        assert_eq!(head(&buffer, 33), None);
    }
}
