//! One safetensors file, mapped.

use std::collections::HashMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors};

use super::error::{HfError, format_error, io};

const LEN_BYTES: usize = 8;

/// Where a tensor lies in its shard.
#[derive(Debug, Clone)]
pub(super) struct Entry {
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    /// In the file, header included.
    pub bytes: Range<usize>,
}

#[derive(Debug)]
pub(super) struct Shard {
    pub path: PathBuf,
    pub map: Mmap,
    /// Length of the header with its length field: tensors begin here.
    pub header: usize,
    pub entries: HashMap<String, Entry>,
}

impl Shard {
    pub fn open(path: &Path) -> Result<Self, HfError> {
        let file = File::open(path).map_err(io(path))?;
        let meta = file.metadata().map_err(io(path))?;
        if !meta.is_file() {
            return Err(format_error(path, "not a file"));
        }
        if meta.len() < LEN_BYTES as u64 {
            return Err(truncated(path, None, LEN_BYTES as u64, meta.len()));
        }
        // SAFETY: the map is read-only. Like every reader of mapped files this one relies on nobody
        // shortening or rewriting a shard while it is being loaded.
        let map = unsafe { Mmap::map(&file) }.map_err(io(path))?;
        let (header, metadata) = match SafeTensors::read_metadata(&map) {
            Ok((n, metadata)) => (LEN_BYTES + n, metadata),
            Err(error) => return Err(explain(path, &map, error)),
        };
        let entries = metadata.tensors().into_iter().map(|(name, info)| {
            let (start, end) = info.data_offsets;
            let entry = Entry {
                dtype: info.dtype,
                shape: info.shape.clone(),
                bytes: header + start..header + end,
            };
            (name, entry)
        });
        Ok(Self {
            path: path.into(),
            entries: entries.collect(),
            map,
            header,
        })
    }

    /// Bytes of the file that are about to be read: their pages are mapped in one go.
    pub fn window(&self, range: Range<usize>) -> Window<'_> {
        #[cfg(target_os = "linux")]
        {
            // An older kernel does not know the advice; the pages then come one by one.
            let _ = self
                .map
                .advise_range(memmap2::Advice::PopulateRead, range.start, range.len());
        }
        Window { shard: self, range }
    }
}

/// A part of a shard in use. When it is dropped its pages leave this process (the system's page
/// cache keeps them), so that a loaded model does not count twice in resident memory.
pub(super) struct Window<'a> {
    shard: &'a Shard,
    range: Range<usize>,
}

impl Window<'_> {
    pub fn bytes(&self) -> &[u8] {
        &self.shard.map[self.range.clone()]
    }
}

impl Drop for Window<'_> {
    fn drop(&mut self) {
        #[cfg(unix)]
        {
            // SAFETY: the map is shared, read-only and backed by a file: pages that are dropped are
            // read again from the file, with the same bytes, by whoever touches them next.
            let _ = unsafe {
                self.shard.map.unchecked_advise_range(
                    memmap2::UncheckedAdvice::DontNeed,
                    self.range.start,
                    self.range.len(),
                )
            };
        }
    }
}

fn truncated(path: &Path, tensor: Option<String>, expected: u64, found: u64) -> HfError {
    HfError::Truncated {
        file: path.into(),
        tensor,
        expected,
        found,
    }
}

/// Finds out what about a header `safetensors` did not like.
fn explain(path: &Path, map: &[u8], error: safetensors::SafeTensorError) -> HfError {
    let found = map.len() as u64;
    let mut len = [0; LEN_BYTES];
    len.copy_from_slice(&map[..LEN_BYTES]);
    let header = u64::from_le_bytes(len).saturating_add(LEN_BYTES as u64);
    let plain = |message: String| format_error(path, format!("not a safetensors file: {message}"));
    if matches!(error, safetensors::SafeTensorError::InvalidHeaderLength) {
        return truncated(path, None, header, found);
    }
    let text = usize::try_from(header).ok().and_then(|end| map.get(8..end));
    let json: Option<serde_json::Map<String, serde_json::Value>> =
        text.and_then(|text| serde_json::from_slice(text).ok());
    let Some(json) = json else {
        return plain(error.to_string());
    };
    if matches!(
        error,
        safetensors::SafeTensorError::MetadataIncompleteBuffer
    ) {
        let ends = json.iter().filter_map(|(name, info)| {
            let end = info.get("data_offsets")?.get(1)?.as_u64()?;
            Some((header.saturating_add(end), name))
        });
        let mut ends: Vec<_> = ends.collect();
        ends.sort();
        let expected = ends.last().map_or(header, |(end, _)| *end);
        if expected > found {
            let first = ends.iter().find(|(end, _)| *end > found);
            return truncated(
                path,
                first.map(|(_, name)| (*name).clone()),
                expected,
                found,
            );
        }
        return plain(format!("{found} bytes, its header describes {expected}"));
    }
    // An element kind that the crate does not know makes the whole header unreadable.
    for (name, info) in &json {
        let dtype = info.get("dtype").and_then(|dtype| dtype.as_str());
        if let Some(dtype) = dtype
            && serde_json::from_value::<Dtype>(dtype.into()).is_err()
        {
            return HfError::Dtype {
                file: path.into(),
                tensor: name.clone(),
                dtype: dtype.into(),
                allowed: "those of the safetensors format",
            };
        }
    }
    plain(error.to_string())
}
