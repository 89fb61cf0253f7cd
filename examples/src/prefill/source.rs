//! Where the model comes from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use burn_moe::layer::ConfigError;
use burn_moe::parallel::ExpertParallel;
use burn_moe_models::hf::Folder;
use burn_moe_models::pretrained::LoadOptions;
use burn_moe_models::{Decoder, ModelConfig, checkpoint, pretrained};
use serde_json::Value;

use super::PrefillArgs;
use crate::cli::CliError;
use crate::data::DataError;

/// The model's weights.
pub(super) enum Source {
    /// Saved by `train`; bytes are the tokens.
    Checkpoint(PathBuf),
    /// Hugging Face's.
    Folder(Folder),
}

impl Source {
    pub fn open(args: &PrefillArgs) -> Result<Self, CliError> {
        match (&args.model, &args.checkpoint) {
            (Some(folder), _) => Ok(Self::Folder(Folder::open(folder)?)),
            (None, checkpoint) => Ok(Self::Checkpoint(checkpoint.clone().unwrap_or_default())),
        }
    }

    pub fn folder(&self) -> &Path {
        match self {
            Self::Checkpoint(folder) => folder,
            Self::Folder(folder) => folder.path(),
        }
    }

    pub fn config(&self) -> Result<ModelConfig, CliError> {
        Ok(match self {
            Self::Checkpoint(folder) => checkpoint::read_config(folder)?,
            Self::Folder(folder) => pretrained::read_config(folder)?,
        })
    }

    /// A rank's part of the model. `progress` is told how much has been read, of how much.
    pub fn load(
        &self,
        config: &ModelConfig,
        ep: &Arc<ExpertParallel>,
        device: &Device,
        progress: &(dyn Fn(u64, u64) + Sync),
    ) -> Result<Decoder, CliError> {
        let options = LoadOptions {
            progress: Some(progress),
        };
        Ok(match self {
            Self::Checkpoint(folder) => {
                let drawn = config.init(ep, 0, device)?;
                checkpoint::load_with(drawn, config, ep, folder, &options)?
            }
            Self::Folder(folder) => pretrained::load_with(config, ep, folder, device, &options)?,
        })
    }

    /// Tokens that may be written: `train` uses the first 256 of a vocabulary, however large.
    pub fn candidates(&self, config: &ModelConfig) -> usize {
        match self {
            Self::Checkpoint(_) => config.vocab_size.min(256),
            Self::Folder(_) => config.vocab_size,
        }
    }

    /// Tokens that end a text: `eos_token_id` of `generation_config.json`, or else of `config.json`.
    pub fn eos(&self) -> Result<Vec<u32>, CliError> {
        let Self::Folder(folder) = self else {
            return Ok(Vec::new());
        };
        let path = folder.path().join("generation_config.json");
        let generation: Value = match std::fs::read(&path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|error| ConfigError {
                field: "generation_config.json",
                value: path.display().to_string(),
                allowed: format!("JSON ({error})"),
            })?,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Value::Null,
            Err(source) => {
                let option = "--model";
                return Err(DataError::Io {
                    option,
                    path,
                    source,
                }
                .into());
            }
        };
        let configs = [&generation, folder.config_json()];
        let eos = configs.iter().find_map(|config| config.get("eos_token_id"));
        let ids = match eos {
            None | Some(Value::Null) => Some(Vec::new()),
            Some(Value::Array(ids)) => ids.iter().map(as_id).collect(),
            Some(id) => as_id(id).map(|id| vec![id]),
        };
        ids.ok_or_else(|| {
            CliError::Option(ConfigError {
                field: "eos_token_id",
                value: eos.unwrap_or(&Value::Null).to_string(),
                allowed: "a token id or a list of them".into(),
            })
        })
    }
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}
