//! The files of a checkpoint.

use std::fs::{self, File};
use std::path::Path;

use memmap2::Mmap;
use serde::Serialize;

use super::error::{io, json};
use super::{CheckpointError, INDEX, read_config};
use crate::ModelConfig;

/// Checks that a checkpoint of `config` may be written to `folder`: it does not exist, is empty, or
/// holds a checkpoint of the same config.
///
/// # Errors
///
/// [`CheckpointError::Occupied`] when it holds anything else.
pub fn check_target(folder: &Path, config: &ModelConfig) -> Result<(), CheckpointError> {
    let occupied = |message: &str| {
        Err(CheckpointError::Occupied {
            path: folder.into(),
            message: message.into(),
        })
    };
    match fs::read_dir(folder) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => {
            return Err(CheckpointError::Io {
                path: folder.into(),
                source,
            });
        }
        Ok(mut entries) => {
            if entries.next().is_none() {
                return Ok(());
            }
        }
    }
    if !folder.join(INDEX).is_file() {
        return occupied("the folder is not empty and holds no checkpoint");
    }
    match read_config(folder) {
        Ok(held) if held == *config => Ok(()),
        Ok(_) => occupied("the folder holds a checkpoint of another config"),
        Err(error) => occupied(&format!("the folder holds a damaged checkpoint ({error})")),
    }
}

pub(super) fn map_file(folder: &Path, name: &str) -> Result<Mmap, CheckpointError> {
    let path = folder.join(name);
    if name.contains(['/', '\\']) || name.contains("..") {
        return Err(CheckpointError::Format {
            path: folder.join(INDEX),
            message: format!("file name {name:?} leaves the folder"),
        });
    }
    let file = File::open(&path).map_err(io(&path))?;
    // SAFETY: the map is only read. Another process that truncates the file meanwhile could end
    // this one by a signal; checkpoints are replaced by renaming, never written in place.
    unsafe { Mmap::map(&file) }.map_err(io(&path))
}

pub(super) fn write_json(path: &Path, value: &impl Serialize) -> Result<(), CheckpointError> {
    let text = serde_json::to_string_pretty(value).map_err(json(path))?;
    fs::write(path, text + "\n").map_err(io(path))
}
