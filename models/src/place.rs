//! Putting a finished folder in its place.

use std::fs;
use std::io::Error;
use std::path::{Path, PathBuf};

/// Renames `partial` to `target`, taking what is there out of the way first. `failed` gets
/// the path that could not be changed.
pub(crate) fn swap_into_place<E>(
    partial: &Path,
    target: &Path,
    failed: impl Fn(&Path, Error) -> E,
) -> Result<(), E> {
    let old = beside(target, "old");
    if old.exists() {
        fs::remove_dir_all(&old).map_err(|error| failed(&old, error))?;
    }
    let replaces = target.exists();
    if replaces {
        fs::rename(target, &old).map_err(|error| failed(target, error))?;
    }
    if let Err(error) = fs::rename(partial, target) {
        if replaces {
            // Nothing more can be done when this fails as well.
            let _ = fs::rename(&old, target);
        }
        return Err(failed(target, error));
    }
    if replaces {
        fs::remove_dir_all(&old).map_err(|error| failed(&old, error))?;
    }
    Ok(())
}

/// `folder.suffix`, beside the folder so that renaming stays within one file system.
pub(crate) fn beside(folder: &Path, suffix: &str) -> PathBuf {
    // Without a slash at the end, which would put it inside.
    let plain: PathBuf = folder.components().collect();
    let mut name = plain.into_os_string();
    name.push(".");
    name.push(suffix);
    name.into()
}
