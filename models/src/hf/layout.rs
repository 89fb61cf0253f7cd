use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::{Map, Value, json};

use super::error::{HfError, format_error, io};
use super::folder::{CONFIG, Folder, INDEX, SINGLE, TensorInfo};
use super::shard::Entry;

/// Files of a model folder beside the tensors, by extension: what a tokenizer and others read.
pub(super) const SMALL_FILES: [&str; 4] = ["json", "txt", "model", "jinja"];

/// Which tensor goes where in a folder that is to be saved: that of an opened [`Folder`], byte for
/// byte, or a new one.
#[derive(Debug)]
pub struct Layout<'a> {
    pub(super) source: Option<&'a Folder>,
    pub(super) parts: Vec<Part>,
    /// Small files: name and contents.
    pub(super) texts: Vec<(String, Vec<u8>)>,
    /// Small files that are copied.
    pub(super) copies: Vec<PathBuf>,
}

/// One safetensors file to write.
#[derive(Debug)]
pub(super) struct Part {
    pub file: String,
    /// Length field and header.
    pub header: Vec<u8>,
    pub entries: HashMap<String, Entry>,
    pub len: u64,
}

impl<'a> Layout<'a> {
    /// The layout of `folder`: the same files, headers, index, config and tokenizer.
    ///
    /// # Errors
    ///
    /// When the folder cannot be listed.
    pub fn of(folder: &'a Folder) -> Result<Self, HfError> {
        let parts = folder.shards.iter().map(|shard| {
            Ok(Part {
                file: file_name(&shard.path)?,
                header: shard.map[..shard.header].to_vec(),
                entries: shard.entries.clone(),
                len: shard.map.len() as u64,
            })
        });
        let parts: Result<Vec<_>, HfError> = parts.collect();
        let mut copies = Vec::new();
        for entry in std::fs::read_dir(&folder.path).map_err(io(&folder.path))? {
            let path = entry.map_err(io(&folder.path))?.path();
            if is_small_file(&path) && path.is_file() {
                copies.push(path);
            }
        }
        copies.sort();
        Ok(Self {
            source: Some(folder),
            parts: parts?,
            texts: Vec::new(),
            copies,
        })
    }

    /// A new layout with these tensors, in this order, in shards of at most `max_shard_bytes` (but
    /// at least one tensor); a single shard becomes one file without index. FP8 tensors come with
    /// their scales.
    ///
    /// # Errors
    ///
    /// [`HfError::Format`] when a name comes twice or a dtype has no whole bytes.
    pub fn new(
        config: &Value,
        tensors: impl IntoIterator<Item = (String, TensorInfo)>,
        max_shard_bytes: u64,
    ) -> Result<Self, HfError> {
        let mut shards: Vec<Vec<(String, Entry)>> = vec![Vec::new()];
        let mut filled = 0;
        let mut total = 0;
        for (name, TensorInfo { dtype, shape }) in tensors {
            let bits = dtype.bitsize() * shape.iter().product::<usize>();
            if !bits.is_multiple_of(8) {
                let message = format!("tensor {name}: {dtype:?} {shape:?} has no whole bytes");
                return Err(format_error(Path::new(INDEX), message));
            }
            let bytes = bits / 8;
            if filled > 0 && (filled + bytes) as u64 > max_shard_bytes {
                shards.push(Vec::new());
                filled = 0;
            }
            let entry = Entry {
                dtype,
                shape,
                bytes: filled..filled + bytes,
            };
            filled += bytes;
            total += bytes;
            if let Some(last) = shards.last_mut() {
                last.push((name, entry));
            }
        }
        let count = shards.len();
        let mut weight_map = BTreeMap::new();
        let mut parts = Vec::with_capacity(count);
        for (i, tensors) in shards.into_iter().enumerate() {
            let file = match count {
                1 => SINGLE.to_string(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", i + 1),
            };
            for (name, _) in &tensors {
                if weight_map.insert(name.clone(), file.clone()).is_some() {
                    let message = format!("tensor {name} comes twice");
                    return Err(format_error(Path::new(INDEX), message));
                }
            }
            parts.push(Part::new(file, tensors));
        }
        let mut texts = vec![(CONFIG.into(), pretty(config))];
        if count > 1 {
            let index = json!({"metadata": {"total_size": total}, "weight_map": weight_map});
            texts.push((INDEX.into(), pretty(&index)));
        }
        Ok(Self {
            source: None,
            parts,
            texts,
            copies: Vec::new(),
        })
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.find(name).is_some()
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names = self.parts.iter().flat_map(|part| part.entries.keys());
        let names: BTreeSet<&str> = names.map(String::as_str).collect();
        names.into_iter()
    }

    /// The part that holds the tensor, and where.
    pub(super) fn find(&self, name: &str) -> Option<(usize, &Entry)> {
        let mut parts = self.parts.iter().enumerate();
        parts.find_map(|(at, part)| Some((at, part.entries.get(name)?)))
    }
}

impl Part {
    fn new(file: String, tensors: Vec<(String, Entry)>) -> Self {
        let mut header = Map::new();
        header.insert("__metadata__".into(), json!({"format": "pt"}));
        for (name, entry) in &tensors {
            let info = json!({
                "dtype": entry.dtype,
                "shape": entry.shape,
                "data_offsets": [entry.bytes.start, entry.bytes.end],
            });
            header.insert(name.clone(), info);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let len = header.len() as u64;
        header.splice(..0, len.to_le_bytes());
        let begin = header.len();
        let entries = tensors.into_iter().map(|(name, mut entry)| {
            entry.bytes = entry.bytes.start + begin..entry.bytes.end + begin;
            (name, entry)
        });
        let entries: HashMap<_, _> = entries.collect();
        let len = entries.values().map(|entry| entry.bytes.end).max();
        Self {
            file,
            len: len.unwrap_or(begin) as u64,
            entries,
            header,
        }
    }
}

/// Whether the kind of elements can be written from numbers.
pub(super) fn is_writable(dtype: Dtype) -> bool {
    matches!(
        dtype,
        Dtype::F32 | Dtype::BF16 | Dtype::F16 | Dtype::F8_E4M3
    )
}

pub(super) fn is_small_file(path: &Path) -> bool {
    let extension = path.extension().and_then(|extension| extension.to_str());
    extension.is_some_and(|extension| SMALL_FILES.contains(&extension))
}

pub(super) fn file_name(path: &Path) -> Result<String, HfError> {
    path.file_name()
        .and_then(|name| name.to_str())
        .map(String::from)
        .ok_or_else(|| format_error(path, "no file name"))
}

fn pretty(value: &Value) -> Vec<u8> {
    format!("{value:#}\n").into_bytes()
}
