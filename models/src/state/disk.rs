use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

/// How checkpoints reach the disk. [`FileSystem`] is the one to use; tests put others in its place,
/// which fail after some bytes.
pub trait Disk: Send + Sync {
    /// Makes a folder, and those above it.
    ///
    /// # Errors
    ///
    /// When it cannot be made. One that is there is no error.
    fn create_dir(&self, path: &Path) -> io::Result<()>;

    /// Makes a file, or empties the one that is there.
    ///
    /// # Errors
    ///
    /// When it cannot be made.
    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>>;

    /// Renames a file, replacing what is there.
    ///
    /// # Errors
    ///
    /// When it cannot be renamed.
    fn rename(&self, from: &Path, to: &Path) -> io::Result<()>;

    /// Waits until the entries of a folder are on disk.
    ///
    /// # Errors
    ///
    /// When they cannot be written.
    fn sync_dir(&self, path: &Path) -> io::Result<()>;

    /// Removes a file.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    fn remove(&self, path: &Path) -> io::Result<()>;

    /// Removes a folder with all it holds.
    ///
    /// # Errors
    ///
    /// When it cannot be removed.
    fn remove_dir(&self, path: &Path) -> io::Result<()>;
}

/// A file that is being written.
pub trait DiskFile: Write {
    /// Waits until everything written is on disk.
    ///
    /// # Errors
    ///
    /// When it cannot be written.
    fn sync(&mut self) -> io::Result<()>;
}

/// The file system of this machine.
#[derive(Debug, Clone, Copy, Default)]
pub struct FileSystem;

impl Disk for FileSystem {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        fs::create_dir_all(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        Ok(Box::new(File::create(path)?))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        fs::rename(from, to)
    }

    #[cfg(unix)]
    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        File::open(path)?.sync_all()
    }

    /// Folders cannot be opened elsewhere; there the system writes their entries when it likes.
    #[cfg(not(unix))]
    fn sync_dir(&self, _path: &Path) -> io::Result<()> {
        Ok(())
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        fs::remove_file(path)
    }

    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        fs::remove_dir_all(path)
    }
}

impl DiskFile for File {
    fn sync(&mut self) -> io::Result<()> {
        self.sync_all()
    }
}
