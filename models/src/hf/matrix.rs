//! Reading one matrix from a mapped shard, as it is or transposed, in whatever kind of element.

use std::marker::PhantomData;
use std::ops::Range;

use rayon::prelude::*;
use safetensors::Dtype;

use super::element::{
    Element, Stored, StoredBf16, StoredE4m3, StoredF16, StoredF32, size_of, ue8m0_to_f32,
};
use super::error::HfError;
use super::folder::Folder;
use super::read::map_pages;
use super::shard::{Entry, Shard, Window};
use super::transpose::{self, Rows};

/// Side of the square blocks that share an FP8 scale.
pub(super) const BLOCK: usize = 128;
/// Bytes of a shard that are in memory at a time for one reader.
const BAND_BYTES: usize = 4 << 20;
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

    /// Writes the matrix row by row to `out`, `[rows, cols]`, whose pages need not be mapped yet; on all
    /// threads of the current rayon pool.
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

    /// Rows that are in memory at a time.
    fn band_rows<D: Stored>(&self) -> usize {
        let row_bytes = (self.cols * D::SIZE).max(1);
        (BAND_BYTES / row_bytes / BLOCK).max(1) * BLOCK
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
        let (cols, band) = (self.cols.max(1), self.band_rows::<D>());
        let bands = out.par_chunks_mut(band * cols).enumerate();
        bands.for_each(|(i, out)| {
            map_pages(out);
            let first = i * band;
            let window = self.stored_rows(first..first + out.len() / cols);
            let rows = window.bytes().chunks_exact(cols * D::SIZE);
            for (r, (bytes, out)) in rows.zip(out.chunks_exact_mut(cols)).enumerate() {
                self.decode::<D, E>(first + r, 0, bytes, out);
            }
        });
    }

    fn transposed<D: Stored, E: Element>(&self, out: &mut [E], stride: usize, column: usize) {
        if self.cols == 0 {
            return;
        }
        // The others begin at a cache line of the result.
        let head = transpose::head(&out[column..], stride).unwrap_or(0);
        let mut first = 0;
        while first < self.rows {
            let rows = match (first, head) {
                (0, 1..) => head,
                _ => self.band_rows::<D>(),
            };
            let last = self.rows.min(first + rows);
            let window = self.stored_rows(first..last);
            let band = Band {
                matrix: self,
                first,
                bytes: window.bytes(),
                stored: PhantomData::<D>,
            };
            let out = &mut out[column + first..];
            transpose::transpose([last - first, self.cols], &band, out, stride);
            first = last;
        }
    }

    /// The elements of a row from `col` on.
    #[inline(always)]
    fn decode<D: Stored, E: Element>(&self, row: usize, col: usize, bytes: &[u8], out: &mut [E]) {
        if self.scales.is_empty() {
            return decode::<D, E>(bytes, out);
        }
        let (mut bytes, mut out, mut col) = (bytes, out, col);
        while !out.is_empty() {
            // Up to where the next block begins.
            let len = out.len().min(BLOCK - col % BLOCK);
            let scale = self.scale(row, col);
            let (now, later) = out.split_at_mut(len);
            for (out, bytes) in now.iter_mut().zip(bytes.chunks_exact(D::SIZE)) {
                *out = E::from_f32(D::decode(bytes) * scale);
            }
            (bytes, out, col) = (&bytes[len * D::SIZE..], later, col + len);
        }
    }
}

/// Some rows of a matrix in memory.
struct Band<'a, D> {
    matrix: &'a Matrix<'a>,
    first: usize,
    bytes: &'a [u8],
    stored: PhantomData<D>,
}

impl<D: Stored, E: Element> Rows<E> for Band<'_, D> {
    #[inline(always)]
    fn piece(&self, row: usize, cols: Range<usize>, out: &mut [E]) {
        let begin = (row * self.matrix.cols + cols.start) * D::SIZE;
        let bytes = &self.bytes[begin..begin + out.len() * D::SIZE];
        self.matrix
            .decode::<D, E>(self.first + row, cols.start, bytes, out);
    }

    fn stored(&self) -> Option<&[u8]> {
        let widened = (D::DTYPE, E::DTYPE) == (Dtype::BF16, Dtype::F32);
        let plain = cfg!(target_endian = "little") && (D::DTYPE == E::DTYPE || widened);
        plain.then_some(self.bytes)
    }
}

#[inline(always)]
fn decode<D: Stored, E: Element>(bytes: &[u8], out: &mut [E]) {
    if cfg!(target_endian = "little") && D::DTYPE == E::DTYPE {
        bytemuck::cast_slice_mut(out).copy_from_slice(bytes);
        return;
    }
    for (out, bytes) in out.iter_mut().zip(bytes.chunks_exact(D::SIZE)) {
        *out = E::from_f32(D::decode(bytes));
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
