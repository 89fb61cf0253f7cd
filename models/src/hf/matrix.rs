//! Reading one matrix from a mapped shard, as it is or transposed, in whatever kind of element.

use std::ops::Range;

use safetensors::Dtype;

use super::element::{
    Element, Stored, StoredBf16, StoredE4m3, StoredF16, StoredF32, size_of, ue8m0_to_f32,
};
use super::error::HfError;
use super::folder::Folder;
use super::shard::{Entry, Shard, Window};

/// Side of the square blocks that share an FP8 scale.
pub(super) const BLOCK: usize = 128;
/// Bytes of a shard that are in memory at a time for one reader.
const BAND_BYTES: usize = 4 << 20;
/// A tile that is transposed in cache: whole cache lines are read and written. Both sides divide
/// [`BLOCK`], so a tile has one FP8 scale.
const TILE_ROWS: usize = 128;
const TILE_COLS: usize = 32;
/// Columns that are decoded at a time: with a tile's rows they stay in the second-level cache.
const PANEL_COLS: usize = 512;
/// From row to row of the panel: not a power of two, so that a column's elements do not all fall on
/// the same few lines of the cache.
const PANEL_STRIDE: usize = PANEL_COLS + 32;

/// What can be read as a matrix.
const ALLOWED: &str = "F32, BF16, F16, and F8_E4M3 with scales";
const ALLOWED_PLAIN: &str = "F32, BF16 and F16";

/// A matrix `[rows, cols]` of a shard; of a tensor of three dimensions, one slice.
pub(super) struct Matrix<'a> {
    shard: &'a Shard,
    dtype: Dtype,
    /// Where it begins in the file.
    start: usize,
    rows: usize,
    cols: usize,
    /// FP8: one per block, `[ceil(rows / 128), ceil(cols / 128)]`.
    scales: Vec<f32>,
}

impl<'a> Matrix<'a> {
    /// Tensor `name`, which must have shape `[.., rows, cols]`; slice `index` of those before.
    pub fn find(
        folder: &'a Folder,
        name: &str,
        shape: &[usize],
        index: usize,
    ) -> Result<Self, HfError> {
        let (shard, entry) = folder.find(name)?;
        check_shape(shard, name, entry, shape)?;
        let (rows, cols) = match shape {
            [.., rows, cols] => (*rows, *cols),
            _ => (1, shape.iter().product()),
        };
        let fp8 = entry.dtype == Dtype::F8_E4M3;
        if fp8 && shape.len() < 2 {
            return Err(bad_dtype(shard, name, entry, ALLOWED_PLAIN));
        }
        let size = match size_of(entry.dtype) {
            Some(size) if entry.dtype != Dtype::F8_E8M0 => size,
            _ => return Err(bad_dtype(shard, name, entry, ALLOWED)),
        };
        Ok(Self {
            shard,
            dtype: entry.dtype,
            start: entry.bytes.start + index * rows * cols * size,
            rows,
            cols,
            scales: match fp8 {
                true => read_scales(folder, name, shape, index)?,
                false => Vec::new(),
            },
        })
    }

    /// Writes the matrix row by row to `out`, `[rows, cols]`.
    pub fn read_into<E: Element>(&self, out: &mut [E]) {
        debug_assert_eq!(out.len(), self.rows * self.cols);
        match self.dtype {
            Dtype::F32 => self.straight::<StoredF32, E>(out),
            Dtype::BF16 => self.straight::<StoredBf16, E>(out),
            Dtype::F16 => self.straight::<StoredF16, E>(out),
            _ => self.straight::<StoredE4m3, E>(out),
        }
    }

    /// Writes the transposed matrix to `out`, `[cols, stride]`, from `column` on: row `r` becomes
    /// column `column + r`.
    pub fn read_transposed_into<E: Element>(&self, out: &mut [E], stride: usize, column: usize) {
        debug_assert_eq!(out.len(), self.cols * stride);
        debug_assert!(column + self.rows <= stride);
        match self.dtype {
            Dtype::F32 => self.transposed::<StoredF32, E>(out, stride, column),
            Dtype::BF16 => self.transposed::<StoredBf16, E>(out, stride, column),
            Dtype::F16 => self.transposed::<StoredF16, E>(out, stride, column),
            _ => self.transposed::<StoredE4m3, E>(out, stride, column),
        }
    }

    /// Calls `each(first row, bytes of the rows)` for the matrix in bands of rows.
    fn bands<D: Stored>(&self, mut each: impl FnMut(usize, &[u8])) {
        let row_bytes = self.cols * D::SIZE;
        if row_bytes == 0 {
            return;
        }
        let band = (BAND_BYTES / row_bytes / BLOCK).max(1) * BLOCK;
        for first in (0..self.rows).step_by(band) {
            let last = self.rows.min(first + band);
            let range = self.start + first * row_bytes..self.start + last * row_bytes;
            each(first, self.shard.window(range).bytes());
        }
    }

    /// The bytes of some rows as they are stored.
    pub fn stored_rows(&self, rows: Range<usize>) -> Window<'a> {
        let row_bytes = self.cols * size_of(self.dtype).unwrap_or(1);
        let range = self.start + rows.start * row_bytes..self.start + rows.end * row_bytes;
        self.shard.window(range)
    }

    /// FP8: the scales of a row of blocks.
    pub fn block_scales(&self, block_row: usize) -> &[f32] {
        let blocks = self.cols.div_ceil(BLOCK);
        &self.scales[block_row * blocks..][..blocks]
    }

    fn scale(&self, row: usize, col: usize) -> f32 {
        self.scales[row / BLOCK * self.cols.div_ceil(BLOCK) + col / BLOCK]
    }

    fn straight<D: Stored, E: Element>(&self, out: &mut [E]) {
        self.bands::<D>(|first, bytes| {
            let out = &mut out[first * self.cols..][..bytes.len() / D::SIZE];
            if self.scales.is_empty() {
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(D::SIZE)) {
                    *out = E::from_f32(D::decode(bytes));
                }
                return;
            }
            let rows = bytes.chunks_exact(self.cols * D::SIZE);
            for (r, (out, bytes)) in out.chunks_exact_mut(self.cols).zip(rows).enumerate() {
                let blocks = bytes.chunks(BLOCK * D::SIZE);
                for (b, (out, bytes)) in out.chunks_mut(BLOCK).zip(blocks).enumerate() {
                    let scale = self.scale(first + r, b * BLOCK);
                    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(D::SIZE)) {
                        *out = E::from_f32(D::decode(bytes) * scale);
                    }
                }
            }
        });
    }

    fn transposed<D: Stored, E: Element>(&self, out: &mut [E], stride: usize, column: usize) {
        let mut panel = vec![E::zeroed(); TILE_ROWS * PANEL_STRIDE];
        let mut tile = [[E::zeroed(); TILE_ROWS]; TILE_COLS];
        self.bands::<D>(|first, bytes| {
            let blocks = bytes.chunks(TILE_ROWS * self.cols * D::SIZE).enumerate();
            for (block, bytes) in blocks {
                let row = first + block * TILE_ROWS;
                let rows = bytes.len() / (self.cols * D::SIZE);
                for col in (0..self.cols).step_by(PANEL_COLS) {
                    let cols = PANEL_COLS.min(self.cols - col);
                    self.fill_panel::<D, E>(bytes, row, col..col + cols, &mut panel);
                    for tile_col in (0..cols).step_by(TILE_COLS) {
                        transpose_tile(&panel[tile_col..], rows, &mut tile);
                        let lines = tile.iter().take(cols - tile_col).enumerate();
                        for (c, line) in lines {
                            let to = (col + tile_col + c) * stride + column + row;
                            out[to..to + rows].copy_from_slice(&line[..rows]);
                        }
                    }
                }
            }
        });
    }

    /// Decodes some columns of a block of rows to the panel.
    fn fill_panel<D: Stored, E: Element>(
        &self,
        bytes: &[u8],
        row: usize,
        cols: Range<usize>,
        panel: &mut [E],
    ) {
        let stored = bytes.chunks_exact(self.cols * D::SIZE);
        for (out, bytes) in panel.chunks_exact_mut(PANEL_STRIDE).zip(stored) {
            let bytes = &bytes[cols.start * D::SIZE..cols.end * D::SIZE];
            let blocks = bytes.chunks(BLOCK * D::SIZE);
            for (b, (out, bytes)) in out.chunks_mut(BLOCK).zip(blocks).enumerate() {
                let scale = match self.scales.is_empty() {
                    true => 1.0,
                    false => self.scale(row, cols.start + b * BLOCK),
                };
                for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(D::SIZE)) {
                    *out = E::from_f32(D::decode(bytes) * scale);
                }
            }
        }
    }
}

/// Writes column `c` of the panel to line `c` of the tile, in squares that fit into registers.
fn transpose_tile<E: Element>(panel: &[E], rows: usize, tile: &mut [[E; TILE_ROWS]; TILE_COLS]) {
    let mut blocks = panel.chunks(4 * PANEL_STRIDE);
    for r in (0..rows).step_by(4) {
        let Some(block) = blocks.next() else { return };
        for (j, lines) in tile.as_chunks_mut::<4>().0.iter_mut().enumerate() {
            let row = |i: usize| block[i * PANEL_STRIDE + 4 * j..].first_chunk::<4>();
            let (Some(a), Some(b), Some(c), Some(d)) = (row(0), row(1), row(2), row(3)) else {
                return;
            };
            let (a, b, c, d) = (*a, *b, *c, *d);
            let columns = [
                [a[0], b[0], c[0], d[0]],
                [a[1], b[1], c[1], d[1]],
                [a[2], b[2], c[2], d[2]],
                [a[3], b[3], c[3], d[3]],
            ];
            for (line, column) in lines.iter_mut().zip(columns) {
                line[r..r + 4].copy_from_slice(&column);
            }
        }
    }
}

/// Checks a tensor's shape.
pub(super) fn check_shape(
    shard: &Shard,
    name: &str,
    entry: &Entry,
    expected: &[usize],
) -> Result<(), HfError> {
    if entry.shape == expected {
        return Ok(());
    }
    Err(HfError::Shape {
        file: shard.path.clone(),
        tensor: name.into(),
        expected: expected.into(),
        found: entry.shape.clone(),
    })
}

fn bad_dtype(shard: &Shard, name: &str, entry: &Entry, allowed: &'static str) -> HfError {
    HfError::Dtype {
        file: shard.path.clone(),
        tensor: name.into(),
        dtype: format!("{:?}", entry.dtype),
        allowed,
    }
}

/// The shape of the scales of an FP8 tensor.
pub(super) fn scale_shape(shape: &[usize]) -> Vec<usize> {
    let mut blocks = shape.to_vec();
    let matrix = blocks.len().saturating_sub(2);
    for side in &mut blocks[matrix..] {
        *side = side.div_ceil(BLOCK);
    }
    blocks
}

/// The scales of slice `index` of FP8 tensor `name`.
fn read_scales(
    folder: &Folder,
    name: &str,
    shape: &[usize],
    index: usize,
) -> Result<Vec<f32>, HfError> {
    let name = format!("{name}{}", super::SCALE_SUFFIX);
    let (shard, entry) = folder.find(&name)?;
    let blocks = scale_shape(shape);
    check_shape(shard, &name, entry, &blocks)?;
    let count = blocks[blocks.len() - 2] * blocks[blocks.len() - 1];
    let decode: fn(&[u8]) -> f32 = match entry.dtype {
        Dtype::F32 => StoredF32::decode,
        Dtype::BF16 => StoredBf16::decode,
        Dtype::F8_E8M0 | Dtype::U8 => |bytes| ue8m0_to_f32(bytes[0]),
        _ => return Err(bad_dtype(shard, &name, entry, "F32, BF16 and F8_E8M0")),
    };
    let size = entry.dtype.bitsize() / 8;
    let start = entry.bytes.start + index * count * size;
    let window = shard.window(start..start + count * size);
    let scales: Vec<f32> = window.bytes().chunks_exact(size).map(decode).collect();
    check_finite(shard, &name, &scales)?;
    Ok(scales)
}

/// Refuses values that are not finite.
pub(super) fn check_finite(shard: &Shard, name: &str, values: &[f32]) -> Result<(), HfError> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(index) => Err(HfError::NotFinite {
            file: shard.path.clone(),
            tensor: name.into(),
            index,
            value: values[index],
        }),
    }
}
