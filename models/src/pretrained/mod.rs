//! Models from folders of Hugging Face's, `config.json` and safetensors, and back into them.

mod load;
mod save;
mod stored;

use std::path::PathBuf;

use burn_moe::comm::CommError;
use burn_moe::layer::ConfigError;

use crate::hf::{Experts, Folder, HfError};
use crate::module_path::ModulePath;
use crate::{ModelConfig, ModelError};
use stored::Stored;

pub use load::{LoadOptions, load, load_with};
pub use save::save;

/// What can go wrong with a model folder.
#[derive(Debug, thiserror::Error)]
pub enum PretrainedError {
    /// A file or tensor is not what it should be.
    #[error(transparent)]
    Folder(#[from] HfError),
    /// `config.json` describes no model that is known here.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Which field, and what is allowed.
        source: ConfigError,
    },
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A rank was lost or too late while saving.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// The model that the folder's `config.json` describes.
///
/// # Errors
///
/// Names the first field whose value is not allowed.
pub fn read_config(folder: &Folder) -> Result<ModelConfig, PretrainedError> {
    ModelConfig::from_hugging_face(folder.config_json()).map_err(|source| PretrainedError::Config {
        path: folder.path().join("config.json"),
        source,
    })
}

/// Where the parameter at `path` is stored; one that has no place there is missing under its own name.
fn stored(path: &ModulePath, folder: &Folder) -> Result<Stored, HfError> {
    let stored = Stored::of(&path.parts(), |name| folder.contains(name));
    stored.ok_or_else(|| load::missing(folder, path))
}

fn find_experts<'a>(
    folder: &'a Folder,
    layer: &str,
    config: &ModelConfig,
) -> Result<Experts<'a>, HfError> {
    let (width, hidden) = (config.d_model, config.d_hidden_expert);
    Experts::find(folder, layer, config.num_experts, width, hidden)
}
