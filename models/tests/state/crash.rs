//! A save that ends anywhere leaves the checkpoint before usable.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use burn::tensor::DType;
use burn_moe::comm::{RankOptions, try_run_ranks};
use burn_moe_models::state::{Disk, DiskFile, FileSystem, SavedState, StateFolder};
use tempfile::tempdir;

use crate::common::*;

/// Passes everything on to the file system until a number of bytes and operations is used up, and
/// then nothing: as if the process had been killed there.
#[derive(Clone)]
struct Mortal(Arc<Mutex<Life>>);

#[derive(Default)]
struct Life {
    left: u64,
    used: u64,
    /// What had been used before each operation.
    boundaries: Vec<u64>,
    /// Bytes written to files, as long as they may be lost.
    unsynced: BTreeMap<PathBuf, u64>,
    /// Renames that may be lost.
    renames: Vec<(PathBuf, PathBuf)>,
}

impl Mortal {
    fn new(left: u64) -> Self {
        let life = Life {
            left,
            ..Default::default()
        };
        Self(Arc::new(Mutex::new(life)))
    }

    fn life(&self) -> MutexGuard<'_, Life> {
        self.0.lock().unwrap()
    }

    /// How much of `cost` is left. Killed when it is not all.
    fn spend(&self, cost: u64) -> u64 {
        let mut life = self.life();
        let used = life.used;
        life.boundaries.push(used);
        let granted = cost.min(life.left);
        life.left = match granted < cost {
            true => 0,
            false => life.left - cost,
        };
        life.used += cost;
        granted
    }

    fn operate(&self) -> io::Result<()> {
        match self.spend(1) {
            1 => Ok(()),
            _ => Err(io::Error::other("killed")),
        }
    }

    /// The machine goes down as well: what had not been waited for is lost in part, or undone.
    fn lose_power(&self) {
        let life = self.life();
        for (path, bytes) in &life.unsynced {
            if let Ok(file) = fs::OpenOptions::new().write(true).open(path) {
                file.set_len(bytes / 2).unwrap();
            }
        }
        for (from, to) in life.renames.iter().rev() {
            fs::rename(to, from).unwrap();
        }
    }
}

impl Disk for Mortal {
    fn create_dir(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        FileSystem.create_dir(path)
    }

    fn create(&self, path: &Path) -> io::Result<Box<dyn DiskFile>> {
        self.operate()?;
        self.life().unsynced.insert(path.into(), 0);
        Ok(Box::new(MortalFile {
            file: FileSystem.create(path)?,
            path: path.into(),
            disk: self.clone(),
        }))
    }

    fn rename(&self, from: &Path, to: &Path) -> io::Result<()> {
        self.operate()?;
        FileSystem.rename(from, to)?;
        let mut life = self.life();
        if let Some(bytes) = life.unsynced.remove(from) {
            life.unsynced.insert(to.into(), bytes);
        }
        life.renames.push((from.into(), to.into()));
        Ok(())
    }

    fn sync_dir(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        self.life()
            .renames
            .retain(|(_, to)| to.parent() != Some(path));
        FileSystem.sync_dir(path)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.operate()?;
        self.life().unsynced.remove(path);
        FileSystem.remove(path)
    }

    /// One file after the other, as the system does it, in an order that is its own.
    fn remove_dir(&self, path: &Path) -> io::Result<()> {
        let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
        let mut files: Vec<PathBuf> = entries.collect::<io::Result<_>>()?;
        files.sort();
        for file in files.iter().rev() {
            self.remove(file)?;
        }
        self.operate()?;
        FileSystem.remove_dir(path)
    }
}

struct MortalFile {
    file: Box<dyn DiskFile>,
    path: PathBuf,
    disk: Mortal,
}

impl Write for MortalFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let granted = self.disk.spend(bytes.len() as u64) as usize;
        self.file.write_all(&bytes[..granted])?;
        *self
            .disk
            .life()
            .unsynced
            .entry(self.path.clone())
            .or_default() += granted as u64;
        match granted == bytes.len() {
            true => Ok(granted),
            false => Err(io::Error::other("killed")),
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

impl DiskFile for MortalFile {
    fn sync(&mut self) -> io::Result<()> {
        self.disk.operate()?;
        self.disk.life().unsynced.remove(&self.path);
        self.file.sync()
    }
}

const KEEP: usize = 1;

/// Loads the newest checkpoint of `path` on `ranks` and saves the next step through `disk`.
fn save_next(path: &Path, ranks: usize, disk: Arc<dyn Disk>) -> bool {
    let states = StateFolder::new(path).with_keep(KEEP).with_disk(disk);
    let result = try_run_ranks(ranks, RankOptions::default(), |comm| {
        let mut trainee = Trainee::load(comm, path).map_err(of_rank)?;
        trainee.step();
        trainee.save(&states).map_err(of_rank)
    });
    result.is_ok()
}

/// Copies the checkpoints of a run.
fn copy(from: &Path, to: &Path) {
    for step in fs::read_dir(from).unwrap() {
        let step = step.unwrap();
        let folder = to.join(step.file_name());
        fs::create_dir(&folder).unwrap();
        for file in fs::read_dir(step.path()).unwrap() {
            let file = file.unwrap();
            fs::copy(file.path(), folder.join(file.file_name())).unwrap();
        }
    }
}

/// Before and into every file operation of a save, and at many bytes between; with the process gone,
/// and with the power gone. Steps 1 and 2 are there, 3 is saved, and then they are removed.
#[test]
fn a_save_that_ends_anywhere_leaves_the_checkpoint_before() {
    for ranks in [1, 2] {
        let before = tempdir().unwrap();
        saved(&StateFolder::new(before.path()), "a", ranks, &[1, 2]);
        let expected: BTreeMap<u64, _> = [2, 3]
            .map(|step| (step, unbroken(ranks, step, DType::F32)))
            .into();

        let whole = tempdir().unwrap();
        copy(before.path(), whole.path());
        let disk = Mortal::new(u64::MAX);
        assert!(save_next(whole.path(), ranks, Arc::new(disk.clone())));
        let total = disk.life().used;
        let mut ends: Vec<u64> = disk.life().boundaries.clone();
        ends.extend(ends.clone().iter().map(|end| end + 1));
        ends.extend((0..24).map(|i| total * i / 24));
        ends.sort_unstable();
        ends.dedup();
        ends.retain(|end| *end < total);
        assert!(ends.len() > 40, "{ends:?}");

        let mut after = BTreeMap::new();
        for (i, end) in ends.iter().enumerate() {
            let folder = tempdir().unwrap();
            copy(before.path(), folder.path());
            let disk = Mortal::new(*end);
            assert!(!save_next(folder.path(), ranks, Arc::new(disk.clone())));
            if (i + ranks) % 2 == 1 {
                disk.lose_power();
            }
            let step = SavedState::open(folder.path()).unwrap().step();
            *after.entry(step).or_insert(0) += 1;
            let got = on_ranks(ranks, |comm| {
                Trainee::load(comm, folder.path()).unwrap().weights()
            });
            assert!(
                got == expected[&step],
                "killed after {end} of {total}: step {step}"
            );
            // An older one that counts as a checkpoint is whole, too.
            for entry in fs::read_dir(folder.path()).unwrap() {
                let path = entry.unwrap().path();
                if path.join("manifest.json").exists() {
                    let files = fs::read_dir(&path).unwrap().count();
                    assert_eq!(files, ranks + 1, "killed after {end}: {}", path.display());
                }
            }
            // The next save puts things in order, from wherever it is.
            if i % 4 == 0 {
                assert!(save_next(folder.path(), ranks, Arc::new(FileSystem)));
                let mut left: Vec<_> = fs::read_dir(folder.path())
                    .unwrap()
                    .map(|entry| entry.unwrap().file_name().into_string().unwrap())
                    .collect();
                left.sort();
                let names = [format!("step-{:08}", step + 1)];
                assert_eq!(left, names, "killed after {end} of {total}");
                for name in left {
                    let files = fs::read_dir(folder.path().join(name)).unwrap().count();
                    assert_eq!(files, ranks + 1, "files left behind");
                }
            }
        }
        assert!(after[&2] > 30 && after[&3] > 2, "{after:?}");
    }
}

#[test]
fn what_is_not_of_a_save_is_not_removed() {
    let folder = tempdir().unwrap();
    let stranger = folder.path().join("step-00000009");
    fs::create_dir(&stranger).unwrap();
    fs::write(stranger.join("notes.txt"), "mine").unwrap();
    for name in ["step-9", "step-x", "other"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    let states = StateFolder::new(folder.path());
    let error = {
        let result = try_run_ranks(1, RankOptions::default(), |comm| {
            Trainee::new(comm, "a", DType::F32).save(&states)
        });
        format!("{:?}", result.unwrap_err())
    };
    assert!(error.contains("notes.txt"), "{error}");
    assert!(stranger.join("notes.txt").exists());
    fs::remove_dir_all(&stranger).unwrap();
    saved(&states, "a", 1, &[1]);
    assert!(folder.path().join("step-9").exists());
    assert!(folder.path().join("other").exists());
}
