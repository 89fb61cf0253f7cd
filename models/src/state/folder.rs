use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::disk::{Disk, FileSystem};
use super::error::{StateError, io};
use super::manifest::{MANIFEST, Manifest, PARTIAL_MANIFEST, is_shard_name};

/// The folder of a run's checkpoints.
#[derive(Clone)]
pub struct StateFolder {
    pub(super) path: PathBuf,
    keep: usize,
    pub(super) disk: Arc<dyn Disk>,
}

/// A checkpoint's folder begins with this, then comes the step, in eight digits or more.
const PREFIX: &str = "step-";

impl StateFolder {
    /// The folder at `path`, which need not exist.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            keep: usize::MAX,
            disk: Arc::new(FileSystem),
        }
    }

    /// Keeps the newest `keep` checkpoints, at least one, and removes older ones after a save.
    pub fn with_keep(mut self, keep: usize) -> Self {
        self.keep = keep.max(1);
        self
    }

    /// Writes through `disk`.
    pub fn with_disk(mut self, disk: Arc<dyn Disk>) -> Self {
        self.disk = disk;
        self
    }

    /// The folder of the newest complete checkpoint. One that is complete and damaged counts: it is
    /// refused when it is loaded, rather than passed over.
    ///
    /// # Errors
    ///
    /// When the folder cannot be read.
    pub fn newest(&self) -> Result<Option<PathBuf>, StateError> {
        let found = self.scan()?;
        let newest = found.complete.last();
        Ok(newest.map(|step| self.step_folder(*step)))
    }

    /// Checks that `run` may save its step `step` here: complete checkpoints are all its own, and of
    /// earlier steps.
    ///
    /// # Errors
    ///
    /// [`StateError::Occupied`] when there are others.
    pub fn check_target(&self, run: &str, step: u64) -> Result<(), StateError> {
        let Some(newest) = self.scan()?.complete.pop() else {
            return Ok(());
        };
        let occupied = |message: String| {
            Err(StateError::Occupied {
                folder: self.step_folder(newest),
                message,
            })
        };
        match Manifest::read(&self.step_folder(newest)) {
            Err(error) => occupied(format!("a damaged checkpoint ({error})")),
            Ok(manifest) if manifest.run != run => {
                occupied("a checkpoint of another run, to be resumed or moved away".into())
            }
            Ok(_) if newest >= step => occupied(format!(
                "a checkpoint that is not older than step {step}, which is to be saved"
            )),
            Ok(_) => Ok(()),
        }
    }

    /// Where the checkpoint of a step is.
    pub(super) fn step_folder(&self, step: u64) -> PathBuf {
        self.path.join(format!("{PREFIX}{step:08}"))
    }

    /// Removes what interrupted saves and removals have left. A folder that holds anything else is
    /// no such rest.
    pub(super) fn clean(&self) -> Result<(), StateError> {
        for step in self.scan()?.incomplete {
            let folder = self.step_folder(step);
            for entry in fs::read_dir(&folder).map_err(io(&folder))? {
                let name = entry.map_err(io(&folder))?.file_name();
                let name = name.to_string_lossy();
                if name != PARTIAL_MANIFEST && !is_shard_name(&name) {
                    return Err(StateError::Occupied {
                        message: format!("{name}, which is not part of a checkpoint"),
                        folder,
                    });
                }
            }
            self.disk.remove_dir(&folder).map_err(io(&folder))?;
        }
        Ok(())
    }

    /// Removes complete checkpoints that are not to be kept.
    pub(super) fn prune(&self) -> Result<(), StateError> {
        let complete = self.scan()?.complete;
        let old = complete.len().saturating_sub(self.keep);
        for step in &complete[..old] {
            let folder = self.step_folder(*step);
            let manifest = folder.join(MANIFEST);
            // Without manifest first, so that it is at no time a checkpoint with files missing.
            self.disk.remove(&manifest).map_err(io(&manifest))?;
            self.disk.sync_dir(&folder).map_err(io(&folder))?;
            self.disk.remove_dir(&folder).map_err(io(&folder))?;
        }
        Ok(())
    }

    /// Steps whose folders are there, ascending.
    fn scan(&self) -> Result<Found, StateError> {
        let mut found = Found::default();
        let entries = match fs::read_dir(&self.path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(found),
            Err(error) => return Err(io(&self.path)(error)),
            Ok(entries) => entries,
        };
        for entry in entries {
            let path = entry.map_err(io(&self.path))?.path();
            let Some(step) = step_of(&path) else {
                continue;
            };
            // Not what a folder of another spelling is called.
            if path != self.step_folder(step) || !path.is_dir() {
                continue;
            }
            let manifest = path.join(MANIFEST);
            match manifest.try_exists().map_err(io(&manifest))? {
                true => found.complete.push(step),
                false => found.incomplete.push(step),
            }
        }
        found.complete.sort_unstable();
        Ok(found)
    }
}

#[derive(Default)]
struct Found {
    complete: Vec<u64>,
    incomplete: Vec<u64>,
}

fn step_of(path: &Path) -> Option<u64> {
    path.file_name()?
        .to_str()?
        .strip_prefix(PREFIX)?
        .parse()
        .ok()
}

impl fmt::Debug for StateFolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StateFolder")
            .field("path", &self.path)
            .field("keep", &self.keep)
            .finish_non_exhaustive()
    }
}
