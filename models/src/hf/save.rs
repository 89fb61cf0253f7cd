use std::collections::BTreeMap;
use std::fs::{self, File, OpenOptions};
use std::path::{Path, PathBuf};

use safetensors::Dtype;

use super::element::Element;
use super::encode::{Source, encode, encode_scale, quantize};
use super::error::{HfError, io};
use super::experts::ExpertNames;
use super::layout::{Layout, Part, is_writable};
use super::matrix::{BLOCK, Matrix, scale_shape};
use super::place::{check_target, write_at};
use crate::place::{beside, swap_into_place};

/// Writes a model folder, tensor by tensor and from as many ranks as hold parts of it, into a folder
/// beside the target, which [`finish`](Self::finish) renames into place.
///
/// With the layout of an opened folder, bytes stay as they were wherever the value given is the one
/// that was read, so that an unchanged model gives the same files to the last byte.
///
/// One rank [creates](Self::create) the files, the others [join](Self::join) it. Every tensor is
/// written by one of them; the creator [takes note](Self::add_written) of what the others wrote.
#[derive(Debug)]
pub struct Saver<'a> {
    layout: &'a Layout<'a>,
    target: PathBuf,
    partial: PathBuf,
    files: Vec<File>,
    written: BTreeMap<String, u64>,
    /// Removes the partial folder when it is dropped.
    owner: bool,
}

impl<'a> Saver<'a> {
    /// Makes the files, without tensors.
    ///
    /// # Errors
    ///
    /// [`HfError::Occupied`] when `target` holds anything but a model folder; a file cannot be
    /// written.
    pub fn create(layout: &'a Layout<'a>, target: impl AsRef<Path>) -> Result<Self, HfError> {
        let target = target.as_ref();
        check_target(target)?;
        let partial = beside(target, "partial");
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(io(&partial))?;
        }
        fs::create_dir_all(&partial).map_err(io(&partial))?;
        let mut saver = Self {
            layout,
            target: target.into(),
            partial,
            files: Vec::new(),
            written: BTreeMap::new(),
            owner: true,
        };
        for part in &layout.parts {
            let path = saver.partial.join(&part.file);
            let file = File::create(&path).map_err(io(&path))?;
            file.set_len(part.len).map_err(io(&path))?;
            write_at(&file, &part.header, 0).map_err(io(&path))?;
            saver.files.push(file);
        }
        for (name, text) in &layout.texts {
            let path = saver.partial.join(name);
            fs::write(&path, text).map_err(io(&path))?;
        }
        for from in &layout.copies {
            let to = saver.partial.join(from.file_name().unwrap_or_default());
            fs::copy(from, to).map_err(io(from))?;
        }
        Ok(saver)
    }

    /// Opens the files that another rank created with the same arguments.
    ///
    /// # Errors
    ///
    /// A file cannot be opened.
    pub fn join(layout: &'a Layout<'a>, target: impl AsRef<Path>) -> Result<Self, HfError> {
        let target = target.as_ref();
        let partial = beside(target, "partial");
        let open = |part: &Part| {
            let path = partial.join(&part.file);
            let file = OpenOptions::new().write(true).open(&path);
            file.map_err(io(&path))
        };
        let files: Result<Vec<_>, _> = layout.parts.iter().map(open).collect();
        Ok(Self {
            layout,
            target: target.into(),
            files: files?,
            partial,
            written: BTreeMap::new(),
            owner: false,
        })
    }

    /// Writes a tensor, given in row-major order.
    ///
    /// # Errors
    ///
    /// [`HfError::Missing`] when the layout has no such tensor, [`HfError::Shape`] when its shape is
    /// another, [`HfError::Dtype`] when it is not of floating point; the file cannot be written.
    pub fn write<E: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &[E],
    ) -> Result<(), HfError> {
        let len: usize = shape.iter().product();
        assert_eq!(values.len(), len, "values of {name}");
        let (rows, cols) = matrix_sides(shape);
        let slices = values.chunks_exact((rows * cols).max(1)).enumerate();
        for (index, values) in slices {
            self.put(name, shape, index, &Source::straight(values, cols))?;
        }
        Ok(())
    }

    /// Writes matrices of shape `stored` each, given transposed and side by side: the reverse of
    /// [`Folder::read_side_by_side`](super::Folder::read_side_by_side).
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn write_side_by_side<E: Element>(
        &mut self,
        names: &[&str],
        stored: [usize; 2],
        values: &[E],
    ) -> Result<(), HfError> {
        let stride = names.len() * stored[0];
        assert_eq!(values.len(), stride * stored[1], "values of {names:?}");
        for (i, name) in names.iter().enumerate() {
            let source = Source::transposed(values, stride, i * stored[0]);
            self.put(name, &stored, 0, &source)?;
        }
        Ok(())
    }

    /// Writes a matrix given transposed: the reverse of
    /// [`Folder::read_transposed`](super::Folder::read_transposed).
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn write_transposed<E: Element>(
        &mut self,
        name: &str,
        stored: [usize; 2],
        values: &[E],
    ) -> Result<(), HfError> {
        self.write_side_by_side(&[name], stored, values)
    }

    /// Writes one expert of a layer (such as `model.layers.3`) of `num_experts`, given as
    /// `gate_up [d_model, 2 * d_hidden]` and `down [d_hidden, d_model]`.
    ///
    /// # Errors
    ///
    /// As [`write`](Self::write).
    pub fn write_expert<E: Element>(
        &mut self,
        layer: &str,
        num_experts: usize,
        expert: usize,
        [d_model, d_hidden]: [usize; 2],
        gate_up: &[E],
        down: &[E],
    ) -> Result<(), HfError> {
        let names = ExpertNames::find(layer, |name| self.layout.contains(name))
            .map_err(|name| self.missing(&name))?;
        match names.fused() {
            Some([gate_up_name, down_name]) => {
                let (d, f) = (d_model, d_hidden);
                let wide = Source::transposed(gate_up, 2 * f, 0);
                self.put(&gate_up_name, &[num_experts, 2 * f, d], expert, &wide)?;
                let down = Source::transposed(down, d, 0);
                self.put(&down_name, &[num_experts, d, f], expert, &down)
            }
            None => {
                let [gate, up, down_name] = names.of(expert);
                self.write_side_by_side(&[&gate, &up], [d_hidden, d_model], gate_up)?;
                self.write_transposed(&down_name, [d_model, d_hidden], down)
            }
        }
    }

    /// Copies a tensor that the model left aside from the folder whose layout this is.
    ///
    /// # Errors
    ///
    /// [`HfError::Missing`] when it is not there; the file cannot be written.
    pub fn keep(&mut self, name: &str) -> Result<(), HfError> {
        let Some(source) = self.layout.source else {
            return Err(self.missing(name));
        };
        let shards = source.shards.iter().enumerate();
        let found: Vec<_> = shards
            .filter_map(|(at, shard)| Some((at, shard, shard.entries.get(name)?)))
            .collect();
        if found.is_empty() {
            return Err(self.missing(name));
        }
        for (at, shard, entry) in found {
            let window = shard.window(entry.bytes.clone());
            self.store(at, name, window.bytes(), entry.bytes.start)?;
        }
        Ok(())
    }

    /// Bytes written here, by tensor.
    pub fn written(&self) -> &BTreeMap<String, u64> {
        &self.written
    }

    /// Takes note of what another rank [wrote](Self::written).
    pub fn add_written(&mut self, other: &BTreeMap<String, u64>) {
        for (name, bytes) in other {
            *self.written.entry(name.clone()).or_default() += bytes;
        }
    }

    /// Makes sure that everything is written and on disk. Ranks that joined call it before the
    /// creator does.
    ///
    /// # Errors
    ///
    /// A file cannot be written.
    pub fn flush(&self) -> Result<(), HfError> {
        for (file, part) in self.files.iter().zip(&self.layout.parts) {
            file.sync_all()
                .map_err(io(&self.partial.join(&part.file)))?;
        }
        Ok(())
    }

    /// Renames the folder into place, instead of a model folder that is there.
    ///
    /// # Errors
    ///
    /// [`HfError::Unwritten`] when a tensor was not written, or not once; the folder cannot be
    /// renamed. What was there stays.
    pub fn finish(mut self) -> Result<(), HfError> {
        for part in &self.layout.parts {
            let mut names: Vec<_> = part.entries.iter().collect();
            names.sort_by_key(|(name, _)| *name);
            for (name, entry) in names {
                let holders = self.layout.parts.iter();
                let copies = holders.filter_map(|part| part.entries.get(name));
                let expected = copies.map(|entry| entry.bytes.len() as u64).sum();
                let written = self.written.get(name).copied().unwrap_or(0);
                if written != expected && !entry.bytes.is_empty() {
                    return Err(HfError::Unwritten {
                        file: self.target.join(&part.file),
                        tensor: name.clone(),
                        written,
                        expected,
                    });
                }
            }
        }
        self.flush()?;
        swap_into_place(&self.partial, &self.target, |path, error| io(path)(error))?;
        self.owner = false;
        Ok(())
    }

    /// Writes slice `index` of a tensor, 128 rows at a time.
    fn put<E: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        index: usize,
        from: &Source<E>,
    ) -> Result<(), HfError> {
        let layout = self.layout;
        let (at, entry) = layout.find(name).ok_or_else(|| self.missing(name))?;
        let file = || self.target.join(&layout.parts[at].file);
        if entry.shape != shape {
            return Err(HfError::Shape {
                file: file(),
                tensor: name.into(),
                expected: shape.into(),
                found: entry.shape.clone(),
            });
        }
        if !is_writable(entry.dtype) {
            return Err(HfError::Dtype {
                file: file(),
                tensor: name.into(),
                dtype: format!("{:?}", entry.dtype),
                allowed: "F32, BF16, F16 and F8_E4M3",
            });
        }
        let (rows, cols) = matrix_sides(shape);
        let old = match layout.source {
            Some(folder) => Some(Matrix::find(folder, name, shape, index)?),
            None => None,
        };
        let size = entry.dtype.bitsize() / 8;
        let start = entry.bytes.start + index * rows * cols * size;
        for first in (0..rows).step_by(BLOCK) {
            let band = first..rows.min(first + BLOCK);
            let values = from.rows(band.clone(), cols);
            let window = old.as_ref().map(|old| old.stored_rows(band.clone()));
            let old_bytes = window.as_ref().map(|window| window.bytes());
            let mut bytes = Vec::with_capacity(values.len() * size);
            if entry.dtype == Dtype::F8_E4M3 {
                let old = old.as_ref().map(|old| old.block_scales(first / BLOCK));
                let old = old_bytes.zip(old);
                bytes = self.put_fp8(name, shape, index, first / BLOCK, &values, old)?;
            } else {
                encode(entry.dtype, &values, old_bytes, &mut bytes);
            }
            self.store(at, name, &bytes, start + first * cols * size)?;
        }
        Ok(())
    }

    /// The bytes of a row of blocks; writes their scales.
    fn put_fp8<E: Element>(
        &mut self,
        name: &str,
        shape: &[usize],
        index: usize,
        block_row: usize,
        values: &[E],
        old: Option<(&[u8], &[f32])>,
    ) -> Result<Vec<u8>, HfError> {
        let layout = self.layout;
        let scale_name = format!("{name}{}", super::SCALE_SUFFIX);
        let found = layout.find(&scale_name);
        let (at, entry) = found.ok_or_else(|| self.missing(&scale_name))?;
        let (block_rows, blocks) = matrix_sides(&scale_shape(shape));
        let ue8m0 = entry.dtype.bitsize() == 8;
        let (_, cols) = matrix_sides(shape);
        let (bytes, scales) = quantize(values, cols, old, ue8m0);
        let mut scale_bytes = Vec::new();
        for (b, scale) in scales.iter().enumerate() {
            let kept = old.map_or(1.0, |(_, scales)| scales[b]);
            scale_bytes.extend(encode_scale(entry.dtype, scale.unwrap_or(kept)));
        }
        let first = (index * block_rows + block_row) * blocks;
        let start = entry.bytes.start + first * entry.dtype.bitsize() / 8;
        self.store(at, &scale_name, &scale_bytes, start)?;
        Ok(bytes)
    }

    fn store(&mut self, at: usize, name: &str, bytes: &[u8], start: usize) -> Result<(), HfError> {
        let path = self.partial.join(&self.layout.parts[at].file);
        write_at(&self.files[at], bytes, start as u64).map_err(io(&path))?;
        *self.written.entry(name.into()).or_default() += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn missing(&self, name: &str) -> HfError {
        HfError::Missing {
            file: self.target.clone(),
            tensor: name.into(),
        }
    }
}

impl Drop for Saver<'_> {
    fn drop(&mut self) {
        if self.owner {
            // What is left behind does no harm: the next save removes it.
            let _ = fs::remove_dir_all(&self.partial);
        }
    }
}

fn matrix_sides(shape: &[usize]) -> (usize, usize) {
    match shape {
        [.., rows, cols] => (*rows, *cols),
        _ => (1, shape.iter().product()),
    }
}
