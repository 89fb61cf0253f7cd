use std::collections::{BTreeMap, HashSet};
use std::path::{Path, PathBuf};

use safetensors::Dtype;
use serde_json::Value;

use super::error::{HfError, format_error, io};
use super::shard::{Entry, Shard};

pub(super) const CONFIG: &str = "config.json";
pub(super) const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";

/// A model folder as Hugging Face writes it: `config.json` and either one `model.safetensors` or
/// shards with `model.safetensors.index.json`.
///
/// Opening maps the files and reads their headers, not the tensors; threads may read from one
/// `Folder` at the same time. The files must not change while it is open.
#[derive(Debug)]
pub struct Folder {
    pub(super) path: PathBuf,
    pub(super) shards: Vec<Shard>,
    /// Tensor name to its place in `shards`.
    pub(super) tensors: BTreeMap<String, usize>,
    /// Tensors of the shards that the index does not list there: their shard and name.
    unlisted: Vec<(usize, String)>,
    config: Value,
}

/// What a checkpoint says about one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct TensorInfo {
    /// Kind of its elements.
    pub dtype: Dtype,
    /// Its shape, outermost dimension first.
    pub shape: Vec<usize>,
}

impl Folder {
    /// Opens the checkpoint in `dir`.
    ///
    /// # Errors
    ///
    /// When a file is missing, truncated or malformed, when a shard's name would leave the folder,
    /// or when a shard lacks a tensor that the index promises. Names the file.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self, HfError> {
        let path = dir.as_ref().to_path_buf();
        let config = read_json(&path.join(CONFIG))?;
        if !config.is_object() {
            return Err(format_error(&path.join(CONFIG), "not a JSON object"));
        }
        let single = path.join(SINGLE);
        if single.exists() {
            let shard = Shard::open(&single)?;
            return Ok(Self {
                tensors: shard.entries.keys().map(|name| (name.clone(), 0)).collect(),
                shards: vec![shard],
                unlisted: Vec::new(),
                path,
                config,
            });
        }
        let index = path.join(INDEX);
        if !index.exists() {
            let message = format!("holds neither {SINGLE} nor {INDEX}");
            return Err(format_error(&path, message));
        }
        let (files, tensors) = read_index(&index)?;
        let shards: Result<Vec<_>, _> = files
            .iter()
            .map(|file| Shard::open(&path.join(file)))
            .collect();
        let shards = shards?;
        for (name, &at) in &tensors {
            if !shards[at].entries.contains_key(name) {
                return Err(HfError::Missing {
                    file: shards[at].path.clone(),
                    tensor: name.clone(),
                });
            }
        }
        let mut unlisted = Vec::new();
        for (at, shard) in shards.iter().enumerate() {
            let names = shard.entries.keys();
            let surplus = names.filter(|&name| tensors.get(name) != Some(&at));
            unlisted.extend(surplus.map(|name| (at, name.clone())));
        }
        unlisted.sort();
        Ok(Self {
            path,
            shards,
            tensors,
            unlisted,
            config,
        })
    }

    /// The folder.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// `config.json`, an object.
    pub fn config_json(&self) -> &Value {
        &self.config
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Whether there is a tensor of this name.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Kind of elements and shape of a tensor.
    pub fn info(&self, name: &str) -> Option<TensorInfo> {
        let entry = self.shards[*self.tensors.get(name)?].entries.get(name)?;
        Some(TensorInfo {
            dtype: entry.dtype,
            shape: entry.shape.clone(),
        })
    }

    /// Bytes of a tensor on disk, with its FP8 scales; 0 when it is not there.
    pub fn bytes_of(&self, name: &str) -> u64 {
        let bytes = |name: &str| self.find(name).map_or(0, |(_, entry)| entry.bytes.len());
        (bytes(name) + bytes(&format!("{name}{}", super::SCALE_SUFFIX))) as u64
    }

    /// Bytes of all tensors on disk.
    pub fn num_bytes(&self) -> u64 {
        let bytes = |shard: &Shard| (shard.map.len() - shard.header) as u64;
        self.shards.iter().map(bytes).sum()
    }

    /// Checks that the checkpoint has all tensors in `expected` and no others but those that
    /// `ignorable` accepts (see [`ignorable`]) and the scales of FP8 tensors.
    ///
    /// # Errors
    ///
    /// [`HfError::Missing`] or [`HfError::Surplus`] for the first such tensor by name.
    pub fn check_names<S: AsRef<str>>(
        &self,
        expected: impl IntoIterator<Item = S>,
        ignorable: impl Fn(&str) -> bool,
    ) -> Result<(), HfError> {
        let expected: Vec<S> = expected.into_iter().collect();
        let expected: HashSet<&str> = expected.iter().map(AsRef::as_ref).collect();
        let missing = expected.iter().filter(|name| !self.contains(name)).min();
        if let Some(name) = missing {
            return Err(self.missing(name));
        }
        let is_scale = |name: &str| {
            let base = name.strip_suffix(super::SCALE_SUFFIX);
            base.is_some_and(|base| {
                expected.contains(base)
                    && self
                        .info(base)
                        .is_some_and(|info| info.dtype == Dtype::F8_E4M3)
            })
        };
        for (name, &at) in &self.tensors {
            if !expected.contains(name.as_str()) && !is_scale(name) && !ignorable(name) {
                return Err(self.surplus(at, name));
            }
        }
        match self.unlisted.iter().find(|(_, name)| !ignorable(name)) {
            Some((at, name)) => Err(self.surplus(*at, name)),
            None => Ok(()),
        }
    }

    pub(super) fn find(&self, name: &str) -> Result<(&Shard, &Entry), HfError> {
        self.tensors
            .get(name)
            .map(|&at| &self.shards[at])
            .and_then(|shard| Some((shard, shard.entries.get(name)?)))
            .ok_or_else(|| self.missing(name))
    }

    pub(super) fn missing(&self, name: &str) -> HfError {
        HfError::Missing {
            file: match self.shards.as_slice() {
                [single] => single.path.clone(),
                _ => self.path.join(INDEX),
            },
            tensor: name.into(),
        }
    }

    fn surplus(&self, at: usize, name: &str) -> HfError {
        HfError::Surplus {
            file: self.shards[at].path.clone(),
            tensor: name.into(),
        }
    }
}

/// Whether a model of `num_layers` layers may leave the tensor aside: the multi-token-prediction
/// layers of DeepSeek and GLM (`model.layers.N.*` with `N` from `num_layers` on) and tables of
/// rotary frequencies, which follow from the config.
pub fn ignorable(name: &str, num_layers: usize) -> bool {
    if name.ends_with("rotary_emb.inv_freq") {
        return true;
    }
    name.strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
        .and_then(|(layer, _)| layer.parse::<usize>().ok())
        .is_some_and(|layer| layer >= num_layers)
}

/// Reads a JSON file.
pub(super) fn read_json(path: &Path) -> Result<Value, HfError> {
    let text = std::fs::read(path).map_err(io(path))?;
    serde_json::from_slice(&text).map_err(|error| format_error(path, format!("bad JSON: {error}")))
}

/// The shards of an index, sorted, and for each tensor which of them holds it.
pub(super) fn read_index(path: &Path) -> Result<(Vec<String>, BTreeMap<String, usize>), HfError> {
    let json = read_json(path)?;
    let map = json
        .get("weight_map")
        .and_then(Value::as_object)
        .ok_or_else(|| format_error(path, "has no object weight_map"))?;
    let mut listed = BTreeMap::new();
    for (tensor, shard) in map {
        let shard = shard
            .as_str()
            .ok_or_else(|| format_error(path, format!("weight_map: {tensor}: {shard}: no name")))?;
        if !is_plain(shard) {
            return Err(HfError::ShardName {
                file: path.into(),
                tensor: tensor.clone(),
                shard: shard.into(),
            });
        }
        listed.insert(tensor.clone(), shard);
    }
    let mut files: Vec<String> = listed.values().map(|file| (*file).into()).collect();
    files.sort();
    files.dedup();
    let tensors = listed.into_iter().filter_map(|(tensor, file)| {
        let at = files.binary_search_by(|f| f.as_str().cmp(file)).ok()?;
        Some((tensor, at))
    });
    let tensors = tensors.collect();
    Ok((files, tensors))
}

/// Names of files in the folder itself, on every system.
fn is_plain(shard: &str) -> bool {
    shard.ends_with(".safetensors")
        && !shard.contains("..")
        && !shard.contains(['/', '\\', ':', '\0'])
}
