use std::path::{Path, PathBuf};

use burn_moe::comm::CommError;

use crate::ModelError;

/// What can go wrong with a checkpoint.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// A file cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// A file has not the form it should have.
    #[error("{}: {message}", path.display())]
    Format {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A tensor is missing, superfluous, or of another shape than the config says.
    #[error("{}: tensor {tensor}: {message}", path.display())]
    Tensor {
        /// The checkpoint.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        message: String,
    },
    /// The folder holds something that saving would destroy.
    #[error("{}: {message}; nothing was written", path.display())]
    Occupied {
        /// The folder.
        path: PathBuf,
        /// What it holds.
        message: String,
    },
    /// The config is not usable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A rank was lost or too late while saving.
    #[error(transparent)]
    Comm(#[from] CommError),
}

pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CheckpointError {
    move |source| CheckpointError::Io {
        path: path.into(),
        source,
    }
}

pub(super) fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> CheckpointError {
    move |error| CheckpointError::Format {
        path: path.into(),
        message: error.to_string(),
    }
}
