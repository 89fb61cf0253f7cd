//! What a folder to save to may hold, and writing into its files.

use std::collections::HashSet;
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::error::{HfError, io};
use super::folder::{INDEX, SINGLE, read_index};
use super::layout::is_small_file;

/// Checks that a model may be saved to `target`: it does not exist, is empty, or holds nothing but a
/// model folder.
///
/// # Errors
///
/// [`HfError::Occupied`] when it holds anything else; it cannot be listed.
pub fn check_target(target: &Path) -> Result<(), HfError> {
    let occupied = |message: String| {
        Err(HfError::Occupied {
            folder: target.into(),
            message,
        })
    };
    let entries = match fs::read_dir(target) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(source) => return Err(io(target)(source)),
        Ok(entries) => entries,
    };
    let index = target.join(INDEX);
    let mut ours: HashSet<PathBuf> = [target.join(SINGLE)].into();
    if index.exists() {
        match read_index(&index) {
            Ok((files, _)) => ours.extend(files.into_iter().map(|file| target.join(file))),
            Err(error) => return occupied(format!("its index is damaged ({error})")),
        }
    }
    let mut any = false;
    for entry in entries {
        let path = entry.map_err(io(target))?.path();
        any = true;
        if !path.is_file() || !(ours.contains(&path) || is_small_file(&path)) {
            return occupied(format!("{} is not part of a model", path.display()));
        }
    }
    if any && !index.exists() && !target.join(SINGLE).exists() {
        return occupied("the folder is not empty and holds no model".into());
    }
    Ok(())
}

#[cfg(unix)]
pub(super) fn write_at(file: &File, bytes: &[u8], at: u64) -> std::io::Result<()> {
    std::os::unix::fs::FileExt::write_all_at(file, bytes, at)
}

#[cfg(not(unix))]
pub(super) fn write_at(file: &File, bytes: &[u8], at: u64) -> std::io::Result<()> {
    use std::io::{Seek, SeekFrom, Write};
    let mut file = file;
    file.seek(SeekFrom::Start(at))?;
    file.write_all(bytes)
}
