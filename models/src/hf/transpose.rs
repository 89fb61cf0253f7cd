//! Transposing at the speed of a copy.
//!
//! A square of elements whose side is a cache line is decoded row by row into a buffer in the
//! first-level cache, turned there, and its lines are written past the cache: the result is larger
//! than any cache, and lines that are written whole need not be fetched first. That halves the traffic
//! to memory, and with strides of powers of two, where lines of a column evict each other, it does
//! more.

use std::ops::Range;

use super::element::Element;

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
}

/// Writes a matrix `[rows, cols]` transposed to `out`: row `r` becomes column `r` of lines that lie
/// `stride` elements apart.
///
/// Fastest when `out` begins at a cache line.
pub(super) fn transpose<E: Element>(
    sides: [usize; 2],
    from: &impl Rows<E>,
    out: &mut [E],
    stride: usize,
) {
    match size_of::<E>() {
        4 => in_squares::<E, 16, 4>(sides, from, out, stride),
        _ => in_squares::<E, 32, 8>(sides, from, out, stride),
    }
    finish_lines();
}

/// `SIDE` elements are a cache line, squares of `N` fit into vector registers.
#[inline(always)]
fn in_squares<E: Element, const SIDE: usize, const N: usize>(
    [rows, cols]: [usize; 2],
    from: &impl Rows<E>,
    out: &mut [E],
    stride: usize,
) {
    let mut square = Line([[E::zeroed(); SIDE]; SIDE]);
    let mut turned = Line([[E::zeroed(); SIDE]; SIDE]);
    for row_block in (0..rows).step_by(BLOCK) {
        for col_block in (0..cols).step_by(BLOCK) {
            for col in (col_block..cols.min(col_block + BLOCK)).step_by(SIDE) {
                for row in (row_block..rows.min(row_block + BLOCK)).step_by(SIDE) {
                    let (height, width) = (SIDE.min(rows - row), SIDE.min(cols - col));
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

    impl<E, F: Fn(usize, Range<usize>, &mut [E])> Rows<E> for F {
        fn piece(&self, row: usize, cols: Range<usize>, out: &mut [E]) {
            self(row, cols, out);
        }
    }

    /// Against a loop, for all shapes and alignments around the sides of squares and blocks.
    fn check<E: Element>(value: impl Fn(usize) -> E) {
        for rows in [1, 3, 15, 16, 17, 32, 33, 64, 65, 131] {
            for cols in [1, 7, 16, 31, 32, 65, 128] {
                for (shift, more) in [(0, 0), (1, 0), (4, 3), (9, 64), (17, 1)] {
                    let stride = rows + more;
                    let mut out = vec![E::zeroed(); shift + cols * stride];
                    transpose(
                        [rows, cols],
                        &|row: usize, of: Range<usize>, out: &mut [E]| {
                            for (col, out) in of.zip(out) {
                                *out = value(row * cols + col + 1);
                            }
                        },
                        &mut out[shift..],
                        stride,
                    );
                    for (i, got) in out[shift..].iter().enumerate() {
                        let (col, row) = (i / stride, i % stride);
                        let expected = match row < rows {
                            true => value(row * cols + col + 1),
                            false => E::zeroed(),
                        };
                        assert_eq!(
                            bytemuck::bytes_of(got),
                            bytemuck::bytes_of(&expected),
                            "{rows} x {cols}, {shift} shifted, stride {stride}: {row}, {col}"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn equals_a_loop() {
        check(|i| i as f32);
        check(|i| bf16::from_bits(i as u16));
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
