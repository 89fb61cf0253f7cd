//! Reading tensors of a [`Folder`].

use rayon::prelude::*;

use super::element::Element;
use super::error::HfError;
use super::folder::Folder;
use super::matrix::{Matrix, check_finite};

/// Elements whose pages one thread maps at a time.
const MAP_AT_A_TIME: usize = 2 << 20;

/// All methods read F32, BF16 and F16, and F8_E4M3 matrices with their scales (`NAME_scale_inv`, one
/// per block of 128 x 128, F32 or powers of two), straight from the mapped file into the result. Large
/// tensors are read on all threads of the current rayon pool.
///
/// Errors of all: [`HfError::Missing`], [`HfError::Shape`] when the shape is not the expected one,
/// [`HfError::Dtype`], [`HfError::NotFinite`] for FP8 scales.
impl Folder {
    /// A tensor as `f32`, in row-major order.
    ///
    /// # Errors
    ///
    /// See [the list](#impl-Folder-1).
    pub fn read_f32(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, HfError> {
        self.read(name, expected)
    }

    /// A tensor in row-major order.
    ///
    /// # Errors
    ///
    /// See [the list](#impl-Folder-1).
    pub fn read<E: Element>(&self, name: &str, expected: &[usize]) -> Result<Vec<E>, HfError> {
        let mut slices = self.slices(name, expected)?.into_iter();
        // Nothing is allocated for a tensor that is not what it should be.
        let mut out = zeros(expected.iter().product());
        let len = slices.len().max(1);
        let len = out.len() / len;
        for out in out.chunks_exact_mut(len.max(1)) {
            if let Some(slice) = slices.next() {
                slice.read_into(out);
            }
        }
        Ok(out)
    }

    /// A tensor as `f32` that must be finite: the weights, biases and scores of routers, where one
    /// bad value sends every token astray.
    ///
    /// # Errors
    ///
    /// See [the list](#impl-Folder-1); [`HfError::NotFinite`] for the tensor's own values too.
    pub fn read_finite_f32(&self, name: &str, expected: &[usize]) -> Result<Vec<f32>, HfError> {
        let values = self.read_f32(name, expected)?;
        check_finite(self.find(name)?.0, name, &values)?;
        Ok(values)
    }

    /// A matrix stored as `[outputs, inputs]`, transposed: `[inputs, outputs]`, as linear layers of
    /// Burn have it.
    ///
    /// # Errors
    ///
    /// See [the list](#impl-Folder-1).
    pub fn read_transposed<E: Element>(
        &self,
        name: &str,
        stored: [usize; 2],
    ) -> Result<Vec<E>, HfError> {
        self.read_side_by_side(&[name], stored)
    }

    /// Matrices stored as `[outputs, inputs]` each, transposed and side by side:
    /// `[inputs, count x outputs]`. Gate and up of a feed-forward give its `gate_up`.
    ///
    /// # Errors
    ///
    /// See [the list](#impl-Folder-1).
    pub fn read_side_by_side<E: Element>(
        &self,
        names: &[&str],
        stored: [usize; 2],
    ) -> Result<Vec<E>, HfError> {
        let matrices: Result<Vec<_>, _> = names
            .iter()
            .map(|name| Matrix::find(self, name, &stored, 0))
            .collect();
        let matrices = matrices?;
        let stride = matrices.len() * stored[0];
        let mut out = zeros(stride * stored[1]);
        out.par_chunks(MAP_AT_A_TIME).for_each(map_pages);
        for (i, matrix) in matrices.iter().enumerate() {
            matrix.read_transposed_into(&mut out, stride, i * stored[0]);
        }
        Ok(out)
    }

    /// The matrices that a tensor consists of.
    fn slices(&self, name: &str, shape: &[usize]) -> Result<Vec<Matrix<'_>>, HfError> {
        let count = match shape.len() {
            0..=2 => 1,
            dims => shape[..dims - 2].iter().product(),
        };
        if count == 0 {
            Matrix::find(self, name, shape, 0)?;
        }
        (0..count)
            .map(|index| Matrix::find(self, name, shape, index))
            .collect()
    }
}

/// Zeros for a result that will be written from end to end. Pages of a large one are not there yet:
/// see [`map_pages`].
pub(super) fn zeros<E: Element>(len: usize) -> Vec<E> {
    bytemuck::allocation::zeroed_vec(len)
}

/// Maps the pages of a large buffer in one go: one at a time, as they are first written, they cost
/// more than reading the file.
///
/// Huge pages would make it cheaper still where memory is at hand. But a virtual machine gives just
/// those back to its host while they are free, and the host is slow to return them: there the whole
/// load was seen to take several times as long.
#[cfg(target_os = "linux")]
pub(super) fn map_pages<E>(buffer: &[E]) {
    const PAGE: usize = 4096;
    let bytes = buffer.as_ptr_range();
    let start = (bytes.start as usize).next_multiple_of(PAGE);
    let end = bytes.end as usize / PAGE * PAGE;
    if end.saturating_sub(start) >= 64 * PAGE {
        // SAFETY: the range lies inside the buffer, and the advice does not change its contents.
        // A kernel that does not know it maps the pages one by one.
        let _ = unsafe { libc::madvise(start as *mut _, end - start, libc::MADV_POPULATE_WRITE) };
    }
}

#[cfg(not(target_os = "linux"))]
pub(super) fn map_pages<E>(_buffer: &[E]) {}
