use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::error::{StateError, io};
use crate::ModelConfig;

/// How far a run is, and what decided its course.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct RunState {
    /// Name of the run, the same in all its checkpoints and in no other run's.
    pub run: String,
    /// Optimizer steps done.
    pub step: u64,
    /// Sequences of the data that were consumed.
    pub position: u64,
    /// Everything beside the model's config that decides the course of the run, to be compared when
    /// it is continued.
    pub settings: BTreeMap<String, String>,
    /// One value for each step done, such as its loss.
    pub history: BTreeMap<String, Vec<f64>>,
}

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const PARTIAL_MANIFEST: &str = "manifest.json.partial";
const FORMAT: &str = "burn-moe training state 1";

/// No manifest is longer. Settings and a config are some KiB, a rank's line about 150 bytes.
const MAX_BYTES: u64 = 64 << 20;

/// What a checkpoint consists of.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Manifest {
    format: String,
    pub run: String,
    pub step: u64,
    pub position: u64,
    /// Ranks that saved it.
    pub ranks: usize,
    /// Ranks that shared the experts of one replica of the model, when there were several.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_ranks: Option<usize>,
    pub config: ModelConfig,
    pub settings: BTreeMap<String, String>,
    /// Index = rank.
    pub shards: Vec<ShardEntry>,
}

/// A rank's file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct ShardEntry {
    pub file: String,
    pub bytes: u64,
    /// 32 hexadecimal digits.
    pub xxh3: String,
}

impl Manifest {
    pub fn new(
        state: &RunState,
        config: &ModelConfig,
        expert_ranks: usize,
        shards: Vec<ShardEntry>,
    ) -> Self {
        Self {
            expert_ranks: Some(expert_ranks).filter(|ranks| *ranks < shards.len()),
            format: FORMAT.into(),
            run: state.run.clone(),
            step: state.step,
            position: state.position,
            ranks: shards.len(),
            config: config.clone(),
            settings: state.settings.clone(),
            shards,
        }
    }

    /// Reads the manifest of the checkpoint in `folder`.
    pub fn read(folder: &Path) -> Result<Self, StateError> {
        let path = folder.join(MANIFEST);
        let fault = |message: String| StateError::Manifest {
            path: path.clone(),
            message,
        };
        let bytes = fs::metadata(&path).map_err(io(&path))?.len();
        if bytes > MAX_BYTES {
            return Err(fault(format!(
                "{bytes} bytes, at most {MAX_BYTES} are allowed"
            )));
        }
        let text = fs::read(&path).map_err(io(&path))?;
        let manifest: Self = serde_json::from_slice(&text)
            .map_err(|error| fault(format!("not a manifest: {error}")))?;
        if manifest.format != FORMAT {
            let format = manifest.format;
            return Err(fault(format!("format is {format:?}, allowed: {FORMAT:?}")));
        }
        let (ranks, shards) = (manifest.ranks, manifest.shards.len());
        if ranks == 0 || shards != ranks {
            return Err(fault(format!("{shards} files of {ranks} ranks")));
        }
        if let Some(expert_ranks) = manifest.expert_ranks
            && (expert_ranks == 0 || !ranks.is_multiple_of(expert_ranks))
        {
            return Err(fault(format!(
                "expert_ranks is {expert_ranks}, allowed: the divisors of the {ranks} ranks"
            )));
        }
        for (rank, shard) in manifest.shards.iter().enumerate() {
            let expected = shard_name(rank, ranks);
            if shard.file != expected {
                let file = &shard.file;
                return Err(fault(format!(
                    "file {file:?} of rank {rank}, allowed: {expected}"
                )));
            }
        }
        Ok(manifest)
    }

    /// The text of the file.
    pub fn to_text(&self) -> Result<Vec<u8>, serde_json::Error> {
        let mut text = serde_json::to_vec_pretty(self)?;
        text.push(b'\n');
        Ok(text)
    }

    /// Checks that the checkpoint is of a model of `config`.
    pub fn check_config(&self, folder: &Path, config: &ModelConfig) -> Result<(), StateError> {
        let json = |error: serde_json::Error| StateError::Manifest {
            path: folder.join(MANIFEST),
            message: error.to_string(),
        };
        // Both have been text, so that a number that text does not keep to the last bit is equal.
        let saved = serde_json::to_value(&self.config).map_err(json)?;
        let given = serde_json::to_string(config).map_err(json)?;
        let given = serde_json::from_str(&given).map_err(json)?;
        match difference("config", &saved, &given) {
            None => Ok(()),
            Some((setting, saved, given)) => Err(StateError::Setting {
                folder: folder.into(),
                setting,
                saved: saved.to_string(),
                given: given.to_string(),
            }),
        }
    }

    /// Checks that a run with `settings` may continue the checkpoint.
    pub fn check_settings(
        &self,
        folder: &Path,
        settings: &BTreeMap<String, String>,
    ) -> Result<(), StateError> {
        let none = || "not set".to_owned();
        for setting in self.settings.keys().chain(settings.keys()) {
            let [saved, given] = [&self.settings, settings].map(|of| of.get(setting));
            if saved != given {
                return Err(StateError::Setting {
                    folder: folder.into(),
                    setting: setting.clone(),
                    saved: saved.cloned().unwrap_or_else(none),
                    given: given.cloned().unwrap_or_else(none),
                });
            }
        }
        Ok(())
    }
}

/// The name of a rank's file.
pub(super) fn shard_name(rank: usize, ranks: usize) -> String {
    format!("rank-{rank:05}-of-{ranks:05}.safetensors")
}

/// Whether [`shard_name`] gives such names.
pub(super) fn is_shard_name(name: &str) -> bool {
    name.starts_with("rank-") && name.ends_with(".safetensors")
}

/// Where two values differ first.
fn difference<'a>(
    path: &str,
    a: &'a Value,
    b: &'a Value,
) -> Option<(String, &'a Value, &'a Value)> {
    if a == b {
        return None;
    }
    if let (Value::Object(a), Value::Object(b)) = (a, b) {
        let keys = a.keys().chain(b.keys());
        return keys.into_iter().find_map(|key| {
            let [a, b] = [a, b].map(|of| of.get(key).unwrap_or(&Value::Null));
            difference(&format!("{path}.{key}"), a, b)
        });
    }
    Some((path.into(), a, b))
}
