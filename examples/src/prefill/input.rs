//! Where the model and the prompts come from.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::tensor::Device;
use burn_moe::parallel::ExpertParallel;
use burn_moe_models::hf::Folder;
use burn_moe_models::{Decoder, ModelConfig, checkpoint, pretrained};

use super::PrefillArgs;
use crate::cli::{CliError, check};
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

    /// A rank's part of the model.
    pub fn load(
        &self,
        config: &ModelConfig,
        ep: &Arc<ExpertParallel>,
        device: &Device,
    ) -> Result<Decoder, CliError> {
        Ok(match self {
            Self::Checkpoint(folder) => {
                let drawn = config.init(ep, 0, device)?;
                checkpoint::load(drawn, config, ep, folder)?
            }
            Self::Folder(folder) => pretrained::load(config, ep, folder, device)?,
        })
    }

    /// Tokens that may be written: `train` uses the first 256 of a vocabulary, however large.
    pub fn candidates(&self, config: &ModelConfig) -> usize {
        match self {
            Self::Checkpoint(_) => config.vocab_size.min(256),
            Self::Folder(_) => config.vocab_size,
        }
    }
}

/// The prompts of `--prompt` or `--ids`, at least one and none empty.
pub(super) fn prompts(args: &PrefillArgs, model: &ModelConfig) -> Result<Vec<Vec<u32>>, CliError> {
    let (option, path) = match (&args.ids, &args.prompt) {
        (Some(path), _) => ("--ids", path.clone()),
        (None, path) => ("--prompt", path.clone().unwrap_or_default()),
    };
    let bytes = std::fs::read(&path).map_err(|source| DataError::Io {
        option,
        path: path.clone(),
        source,
    })?;
    if args.ids.is_none() {
        let prompts: Vec<Vec<u32>> = bytes
            .split(|byte| *byte == b'\n')
            .map(|line| line.strip_suffix(b"\r").unwrap_or(line))
            .filter(|line| !line.is_empty())
            .map(|line| line.iter().map(|byte| u32::from(*byte)).collect())
            .collect();
        check(!prompts.is_empty(), option, path.display(), || {
            "a file with at least one line that is not empty".into()
        })?;
        return Ok(prompts);
    }
    let parsed = serde_json::from_slice::<Vec<Vec<u32>>>(&bytes);
    let (prompts, fault) = match parsed {
        Ok(prompts) => (prompts, None),
        Err(error) => (Vec::new(), Some(error.to_string())),
    };
    let usable = !prompts.is_empty() && prompts.iter().all(|prompt| !prompt.is_empty());
    check(usable, option, path.display(), || {
        let fault = fault.map_or(String::new(), |fault| format!(" ({fault})"));
        format!("a JSON list of lists of token ids, none of them empty{fault}")
    })?;
    let highest = prompts.iter().flatten().max().copied().unwrap_or(0);
    check(
        (highest as usize) < model.vocab_size,
        option,
        highest,
        || format!("ids below the model's vocab_size ({})", model.vocab_size),
    )?;
    Ok(prompts)
}

/// Tokens as they are shown: text when they are bytes, ids otherwise.
pub(super) fn text(ids: &[u32], args: &PrefillArgs) -> String {
    if args.ids.is_some() {
        return format!("{ids:?}");
    }
    let bytes: Vec<u8> = ids.iter().map(|id| *id as u8).collect();
    String::from_utf8_lossy(&bytes).into_owned()
}
