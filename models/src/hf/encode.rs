//! Numbers to the bytes of a tensor, keeping those that did not change.

use half::{bf16, f16};
use safetensors::Dtype;

use super::element::{
    E4M3_MAX, Element, Stored, StoredBf16, StoredE4m3, StoredF16, StoredF32, f32_to_e4m3,
    ue8m0_to_f32,
};
use super::matrix::BLOCK;
use super::read::zeros;

/// Numbers that are written as a matrix `[rows, cols]`.
pub(super) struct Source<'v, E> {
    values: &'v [E],
    /// Elements from one row of the values to the next.
    stride: usize,
    /// When transposed: row `r` of the matrix is column `first + r` of the values.
    first: usize,
    transposed: bool,
}

impl<'v, E: Element> Source<'v, E> {
    pub fn straight(values: &'v [E], cols: usize) -> Self {
        Self {
            values,
            stride: cols,
            first: 0,
            transposed: false,
        }
    }

    pub fn transposed(values: &'v [E], stride: usize, first: usize) -> Self {
        Self {
            values,
            stride,
            first,
            transposed: true,
        }
    }

    /// Rows of the matrix.
    pub fn rows(&self, rows: std::ops::Range<usize>, cols: usize) -> Vec<E> {
        if !self.transposed {
            return self.values[rows.start * cols..rows.end * cols].to_vec();
        }
        let mut out: Vec<E> = zeros(rows.len() * cols);
        for col in 0..cols {
            let from = &self.values[col * self.stride + self.first..];
            for (r, &value) in from[rows.clone()].iter().enumerate() {
                out[r * cols + col] = value;
            }
        }
        out
    }
}

/// Appends `values` as elements of `dtype` (not FP8). Where `old`, the bytes that were read, would be
/// read as the same value again, they stay: nothing is lost when the model holds fewer bits.
pub(super) fn encode<E: Element>(
    dtype: Dtype,
    values: &[E],
    old: Option<&[u8]>,
    out: &mut Vec<u8>,
) {
    match dtype {
        Dtype::F32 => encode_as::<StoredF32, E, 4>(values, old, out, f32::to_le_bytes),
        Dtype::BF16 => encode_as::<StoredBf16, E, 2>(values, old, out, |value| {
            bf16::from_f32(value).to_le_bytes()
        }),
        _ => encode_as::<StoredF16, E, 2>(values, old, out, |value| {
            f16::from_f32(value).to_le_bytes()
        }),
    }
}

fn encode_as<D: Stored, E: Element, const N: usize>(
    values: &[E],
    old: Option<&[u8]>,
    out: &mut Vec<u8>,
    to_bytes: impl Fn(f32) -> [u8; N],
) {
    let Some(old) = old else {
        out.extend(values.iter().flat_map(|value| to_bytes(value.to_f32())));
        return;
    };
    for (&value, old) in values.iter().zip(old.chunks_exact(N)) {
        if same(value, E::from_f32(D::decode(old))) {
            out.extend_from_slice(old);
        } else {
            out.extend(to_bytes(value.to_f32()));
        }
    }
}

fn same<E: Element>(a: E, b: E) -> bool {
    bytemuck::bytes_of(&a) == bytemuck::bytes_of(&b) || (a.to_f32().is_nan() && b.to_f32().is_nan())
}

/// The FP8 bytes of at most 128 rows of a matrix, and the scales of their blocks.
///
/// `old` are the bytes and decoded scales that were read: a block that would be read as the same
/// values keeps both (its scale is then `None`). Others get the scale that maps their largest
/// magnitude to 448, rounded up to a power of two when `ue8m0`.
pub(super) fn quantize<E: Element>(
    values: &[E],
    cols: usize,
    old: Option<(&[u8], &[f32])>,
    ue8m0: bool,
) -> (Vec<u8>, Vec<Option<f32>>) {
    let mut bytes = vec![0; values.len()];
    let mut scales = Vec::with_capacity(cols.div_ceil(BLOCK));
    let rows = values.len() / cols.max(1);
    for (b, col) in (0..cols).step_by(BLOCK).enumerate() {
        let width = BLOCK.min(cols - col);
        let block = || (0..rows).flat_map(|r| r * cols + col..r * cols + col + width);
        if let Some((old, old_scales)) = old {
            let read = |at: usize| E::from_f32(StoredE4m3::decode(&old[at..=at]) * old_scales[b]);
            if block().all(|at| same(values[at], read(at))) {
                block().for_each(|at| bytes[at] = old[at]);
                scales.push(None);
                continue;
            }
        }
        let largest = block().map(|at| values[at].to_f32().abs());
        let scale = scale_for(largest.fold(0.0, f32::max), ue8m0);
        block().for_each(|at| bytes[at] = f32_to_e4m3(values[at].to_f32() / scale));
        scales.push(Some(scale));
    }
    (bytes, scales)
}

fn scale_for(largest: f32, ue8m0: bool) -> f32 {
    let scale = (largest / E4M3_MAX).min(f32::MAX);
    if scale < f32::MIN_POSITIVE {
        return 1.0;
    }
    if !ue8m0 {
        return scale;
    }
    let exponent = (scale.to_bits() >> 23) as u8;
    let whole = scale.to_bits() & 0x7f_ffff == 0;
    ue8m0_to_f32(if whole { exponent } else { exponent + 1 }.min(254))
}

/// The bytes of a scale.
pub(super) fn encode_scale(dtype: Dtype, scale: f32) -> Vec<u8> {
    match dtype {
        Dtype::F32 => scale.to_le_bytes().to_vec(),
        Dtype::BF16 => bf16::from_f32(scale).to_le_bytes().to_vec(),
        _ => vec![(scale.to_bits() >> 23) as u8],
    }
}
