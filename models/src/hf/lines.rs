//! Transposing in vector registers, for x86-64.
//!
//! A cache line of as many rows as fill a cache line of the result is loaded, the square of 32-bit
//! lanes is turned, and the lines are written past the cache. Two rows of 16-bit elements share a row
//! of lanes: their elements lie one behind the other in the result.

use std::arch::x86_64::*;

/// Bytes of a cache line.
const LINE: usize = 64;
/// Lines of a column of the result that are written one behind the other.
const LINES: usize = 2;
/// Bytes of a row of the source that are read before the next rows are, and as far ahead rows are
/// fetched.
const AHEAD: usize = 256;

/// Whether this processor has the registers: AVX2. Those of AVX-512 are no faster here, where memory
/// is what takes the time.
pub(super) fn known() -> bool {
    is_x86_feature_detected!("avx2")
}

/// A matrix in memory and where it goes.
///
/// Elements of `STORED` bytes become elements of `SIZE` bytes: the same ones, or for 2 and 4 those with
/// two bytes of zeros below them (bf16 as f32).
#[derive(Debug, Clone, Copy)]
pub(super) struct Job<const STORED: usize, const SIZE: usize> {
    /// The first row.
    pub from: *const u8,
    /// From one row to the next.
    pub row_bytes: usize,
    /// Where the first element of the first row goes, a multiple of [`LINE`].
    pub to: *mut u8,
    /// From one column to the next in the result, a multiple of [`LINE`].
    pub column_bytes: usize,
    /// Rows, a multiple of [`ROWS`](Self::ROWS).
    pub rows: usize,
    /// Columns, a multiple of [`COLS`](Self::COLS).
    pub cols: usize,
}

impl<const STORED: usize, const SIZE: usize> Job<STORED, SIZE> {
    /// Rows whose elements fill a line of the result.
    pub const ROWS: usize = LINE / SIZE;
    /// Columns whose elements fill a line of the source.
    pub const COLS: usize = LINE / STORED;

    /// Transposes.
    ///
    /// # Safety
    ///
    /// The registers are [`known`], the fields are as they say, all rows may be read and all columns may
    /// be written.
    #[target_feature(enable = "avx2")]
    pub unsafe fn run(&self) {
        debug_assert!(self.to.addr().is_multiple_of(LINE));
        debug_assert!(self.column_bytes.is_multiple_of(LINE));
        debug_assert!(self.rows.is_multiple_of(Self::ROWS) && self.cols.is_multiple_of(Self::COLS));
        self.squares(|from, to| {
            let zero = _mm256_setzero_si256();
            for half in 0..2 {
                // Lines of the result, each in two registers. They are written whole: two streams to
                // one line that are not neighbours are two writes to memory.
                let mut lines = [[zero; 2]; 16];
                let count = Self::COLS / 2;
                // SAFETY: the rows and columns of a square lie inside the matrices.
                unsafe {
                    let from = from.add(half * LINE / 2);
                    for part in [0, 1] {
                        let (mut low, mut high) = ([zero; 8], [zero; 8]);
                        let from = from.add(part * Self::ROWS / 2 * self.row_bytes);
                        let row =
                            |i: usize| _mm256_loadu_si256(from.add(i * self.row_bytes).cast());
                        for i in 0..8 {
                            let (a, b) = match (STORED, SIZE) {
                                (4, _) => {
                                    low[i] = row(i);
                                    continue;
                                }
                                (_, 4) => (zero, row(i)),
                                _ => (row(2 * i), row(2 * i + 1)),
                            };
                            low[i] = _mm256_unpacklo_epi16(a, b);
                            high[i] = _mm256_unpackhi_epi16(a, b);
                        }
                        for (i, lanes) in turn8(low).into_iter().enumerate() {
                            lines[Self::column(i)][part] = lanes;
                        }
                        if STORED == 2 {
                            for (i, lanes) in turn8(high).into_iter().enumerate() {
                                lines[Self::column(i) + 4][part] = lanes;
                            }
                        }
                    }
                    let to = to.add(half * count * self.column_bytes);
                    for (i, line) in lines[..count].iter().enumerate() {
                        let to: *mut __m256i = to.add(i * self.column_bytes).cast();
                        _mm256_stream_si256(to, line[0]);
                        _mm256_stream_si256(to.add(1), line[1]);
                    }
                }
            }
        });
        _mm_sfence();
    }

    /// The column of a square that comes out at `i`. 16-bit elements are interleaved with those of
    /// another row, or with zeros, by eights: the lower four first.
    #[inline(always)]
    fn column(i: usize) -> usize {
        if STORED == 4 { i } else { i / 4 * 8 + i % 4 }
    }

    /// Calls `each` with source and result of every square, in the order of the memory as far as both
    /// allow, and fetches rows ahead.
    #[inline(always)]
    fn squares(&self, mut each: impl FnMut(*const u8, *mut u8)) {
        let (tall, wide) = (LINES * Self::ROWS, AHEAD / STORED);
        for row_block in (0..self.rows).step_by(tall) {
            for col_block in (0..self.cols).step_by(wide) {
                for col in (col_block..self.cols.min(col_block + wide)).step_by(Self::COLS) {
                    for row in (row_block..self.rows.min(row_block + tall)).step_by(Self::ROWS) {
                        let from = self.row_bytes * row + STORED * col;
                        for i in 0..Self::ROWS {
                            let ahead = from + i * self.row_bytes + AHEAD;
                            let ahead = self.from.wrapping_add(ahead).cast();
                            // SAFETY: a prefetch may go anywhere, SSE belongs to every x86-64.
                            unsafe { _mm_prefetch::<_MM_HINT_T0>(ahead) };
                        }
                        let to = self.column_bytes * col + SIZE * row;
                        each(self.from.wrapping_add(from), self.to.wrapping_add(to));
                    }
                }
            }
        }
    }
}

/// Transposes 8 x 8 lanes: in pairs and fours of rows inside the halves of registers, then the halves.
#[inline]
#[target_feature(enable = "avx2")]
fn turn8(rows: [__m256i; 8]) -> [__m256i; 8] {
    let mut fours = rows;
    for (four, rows) in fours.chunks_exact_mut(4).zip(rows.chunks_exact(4)) {
        let [low01, low23] = [0, 2].map(|i| _mm256_unpacklo_epi32(rows[i], rows[i + 1]));
        let [high01, high23] = [0, 2].map(|i| _mm256_unpackhi_epi32(rows[i], rows[i + 1]));
        four[0] = _mm256_unpacklo_epi64(low01, low23);
        four[1] = _mm256_unpackhi_epi64(low01, low23);
        four[2] = _mm256_unpacklo_epi64(high01, high23);
        four[3] = _mm256_unpackhi_epi64(high01, high23);
    }
    let mut columns = rows;
    for c in 0..4 {
        columns[c] = _mm256_permute2x128_si256::<0x20>(fours[c], fours[4 + c]);
        columns[4 + c] = _mm256_permute2x128_si256::<0x31>(fours[c], fours[4 + c]);
    }
    columns
}
