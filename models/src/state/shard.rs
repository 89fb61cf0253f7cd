//! A rank's file: safetensors, with what it is in the header.

use std::collections::HashMap;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::ops::Range;
use std::path::Path;
use std::rc::Rc;

use burn::tensor::{Bytes, DType};
use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use twox_hash::XxHash3_128;

use super::disk::Disk;
use super::error::{StateError, io};
use super::manifest::{Manifest, RunState, ShardEntry, shard_name};

/// A tensor to be written: some of the bytes of one that is held.
pub(super) struct Entry {
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub data: Rc<Bytes>,
    pub range: Range<usize>,
}

/// Bytes between two notes of progress.
const CHUNK: usize = 1 << 20;

/// Which file it is. Written into the header of each file and compared with what the manifest says,
/// because a file may have the right form and be another one.
struct Identity([(&'static str, String); 5]);

impl Identity {
    fn new(run: &str, step: u64, position: u64, rank: usize, ranks: usize) -> Self {
        Self([
            ("run", run.into()),
            ("step", step.to_string()),
            ("position", position.to_string()),
            ("ranks", ranks.to_string()),
            ("rank", rank.to_string()),
        ])
    }
}

/// Writes the file of `rank` and waits until it is on disk. `progress` is told the bytes written and
/// those in all.
pub(super) fn write(
    disk: &dyn Disk,
    folder: &Path,
    state: &RunState,
    [rank, ranks]: [usize; 2],
    mut entries: Vec<Entry>,
    progress: &dyn Fn(u64, u64),
) -> Result<ShardEntry, StateError> {
    let file = shard_name(rank, ranks);
    let path = folder.join(&file);
    // Wide types first, so that all values are aligned.
    entries.sort_by_key(|entry| std::cmp::Reverse(entry.dtype.bitsize()));
    let Identity(identity) = Identity::new(&state.run, state.step, state.position, rank, ranks);
    let header = header(&entries, &identity).map_err(|message| StateError::Shard {
        path: path.clone(),
        message,
    })?;
    let total = header.len() + entries.iter().map(|entry| entry.range.len()).sum::<usize>();

    let mut hash = XxHash3_128::new();
    let mut done = 0;
    let mut out = BufWriter::with_capacity(CHUNK, disk.create(&path).map_err(io(&path))?);
    let parts = entries.iter().map(|entry| &entry.data[entry.range.clone()]);
    for part in std::iter::once(header.as_slice()).chain(parts) {
        for chunk in part.chunks(CHUNK) {
            hash.write(chunk);
            out.write_all(chunk).map_err(io(&path))?;
            done += chunk.len();
            progress(done as u64, total as u64);
        }
    }
    let file_on_disk = out.into_inner().map_err(|error| error.into_error());
    let mut file_on_disk = file_on_disk.map_err(io(&path))?;
    file_on_disk.sync().map_err(io(&path))?;
    Ok(ShardEntry {
        file,
        bytes: total as u64,
        xxh3: format!("{:032x}", hash.finish_128()),
    })
}

/// Length field and header.
fn header(entries: &[Entry], identity: &[(&str, String)]) -> Result<Vec<u8>, String> {
    let mut begin = 0;
    let infos = entries.iter().map(|entry| {
        let end = begin + entry.range.len();
        let info = TensorInfo {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
            data_offsets: (begin, end),
        };
        begin = end;
        (entry.name.clone(), info)
    });
    let own = identity
        .iter()
        .map(|(key, value)| (key.to_string(), value.clone()));
    let own: HashMap<String, String> = own.collect();
    let metadata = Metadata::new(Some(own), infos.collect());
    let metadata = metadata.map_err(|error| error.to_string())?;
    let mut text = serde_json::to_vec(&metadata).map_err(|error| error.to_string())?;
    text.resize(text.len().next_multiple_of(8), b' ');
    let len = text.len() as u64;
    text.splice(..0, len.to_le_bytes());
    Ok(text)
}

/// A file of a checkpoint, mapped.
pub(super) struct Shard {
    map: Mmap,
}

impl Shard {
    /// Opens the file of `rank` and checks what can be checked without reading it: that it is the
    /// file that the manifest means, and complete.
    pub fn open(folder: &Path, manifest: &Manifest, rank: usize) -> Result<Self, StateError> {
        let entry = &manifest.shards[rank];
        let path = folder.join(&entry.file);
        let file = File::open(&path).map_err(io(&path))?;
        let bytes = file.metadata().map_err(io(&path))?.len();
        let truncated = || {
            let expected = entry.bytes;
            fault(
                &path,
                format!("{bytes} bytes, it was saved with {expected}"),
            )
        };
        if bytes == 0 {
            return Err(truncated());
        }
        // SAFETY: the map is only read. Another process that truncates the file meanwhile could end
        // this one by a signal; checkpoints are never written to once they are complete.
        let map = unsafe { Mmap::map(&file) }.map_err(io(&path))?;
        if let Ok((_, metadata)) = SafeTensors::read_metadata(&map) {
            let Manifest {
                run,
                step,
                position,
                ranks,
                ..
            } = manifest;
            let Identity(identity) = Identity::new(run, *step, *position, rank, *ranks);
            for (key, expected) in identity {
                let found = metadata.metadata().as_ref().and_then(|own| own.get(key));
                if found != Some(&expected) {
                    let found = found.map_or("none", String::as_str);
                    let message =
                        format!("another file: {key} {found} where {key} {expected} belongs");
                    return Err(fault(&path, message));
                }
            }
        }
        if bytes != entry.bytes {
            return Err(truncated());
        }
        Ok(Self { map })
    }

    /// Reads the whole file and compares its checksum.
    pub fn verify(
        &self,
        folder: &Path,
        entry: &ShardEntry,
        progress: &mut dyn FnMut(u64),
    ) -> Result<(), StateError> {
        let mut hash = XxHash3_128::new();
        for chunk in self.map.chunks(CHUNK) {
            hash.write(chunk);
            progress(chunk.len() as u64);
        }
        let found = format!("{:032x}", hash.finish_128());
        if found != entry.xxh3 {
            let expected = &entry.xxh3;
            let message = format!("damaged: checksum {found}, it was saved with {expected}");
            return Err(fault(&folder.join(&entry.file), message));
        }
        Ok(())
    }

    /// What it holds.
    pub fn tensors(&self, path: &Path) -> Result<SafeTensors<'_>, StateError> {
        SafeTensors::deserialize(&self.map)
            .map_err(|error| fault(path, format!("not a safetensors file: {error}")))
    }
}

fn fault(path: &Path, message: String) -> StateError {
    StateError::Shard {
        path: path.into(),
        message,
    }
}

/// Types of tensors, as Burn and safetensors call them.
const TYPES: [(DType, Dtype); 4] = [
    (DType::F64, Dtype::F64),
    (DType::F32, Dtype::F32),
    (DType::BF16, Dtype::BF16),
    (DType::F16, Dtype::F16),
];

pub(super) fn stored_type(dtype: DType) -> Option<Dtype> {
    let pair = TYPES.iter().find(|(burn, _)| *burn == dtype);
    pair.map(|(_, stored)| *stored)
}

pub(super) fn burn_type(dtype: Dtype) -> Option<DType> {
    let pair = TYPES.iter().find(|(_, stored)| *stored == dtype);
    pair.map(|(burn, _)| *burn)
}
