use std::path::{Path, PathBuf};

use burn_moe::comm::CommError;

use crate::ModelError;

/// What can go wrong with the checkpoints of a run.
#[derive(Debug, thiserror::Error)]
pub enum StateError {
    /// A file or folder cannot be read or written.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file or folder.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// There is no complete checkpoint.
    #[error("{}: {message}", folder.display())]
    Missing {
        /// Where it was looked for.
        folder: PathBuf,
        /// What is missing.
        message: String,
    },
    /// A manifest is not what it should be.
    #[error("{}: {message}", path.display())]
    Manifest {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A rank's file is damaged, or is not the one that the manifest means.
    #[error("{}: {message}", path.display())]
    Shard {
        /// The file.
        path: PathBuf,
        /// What is wrong.
        message: String,
    },
    /// A tensor is missing, superfluous, or not what the model has.
    #[error("{}: tensor {tensor}: {message}", path.display())]
    Tensor {
        /// The checkpoint, or the file.
        path: PathBuf,
        /// The tensor's name.
        tensor: String,
        /// What is wrong.
        message: String,
    },
    /// The run is not the one that was saved.
    #[error("{}: {setting} is {given}, allowed: {saved}, as when it was saved", folder.display())]
    Setting {
        /// The checkpoint.
        folder: PathBuf,
        /// The setting.
        setting: String,
        /// Its value in the checkpoint.
        saved: String,
        /// Its value now.
        given: String,
    },
    /// The folder holds something that saving would destroy or mix with this run's.
    #[error("{}: {message}; nothing was written", folder.display())]
    Occupied {
        /// The folder.
        folder: PathBuf,
        /// What it holds.
        message: String,
    },
    /// The state has a form that cannot be saved.
    #[error("{what}: {message}")]
    Unsupported {
        /// The parameter.
        what: String,
        /// Why not.
        message: String,
    },
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A rank was lost or too late.
    #[error(transparent)]
    Comm(#[from] CommError),
}

pub(super) fn io(path: &Path) -> impl FnOnce(std::io::Error) -> StateError {
    move |source| StateError::Io {
        path: path.into(),
        source,
    }
}
