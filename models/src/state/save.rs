use std::path::{Path, PathBuf};

use burn::module::Module;
use burn::optim::ModuleOptimizer;
use burn_moe::comm::{Key, Op};
use burn_moe::parallel::Mesh;

use super::collect::Collect;
use super::error::{StateError, io};
use super::folder::StateFolder;
use super::manifest::{MANIFEST, Manifest, PARTIAL_MANIFEST, RunState, ShardEntry};
use super::{optimizer, shard};
use crate::{Decoder, ModelConfig, ModelError};

/// What is saved of a run, on one rank.
#[derive(Clone, Copy)]
pub struct Snapshot<'a> {
    /// How far the run is; the same on all ranks, but for its name, which is the first rank's.
    pub state: &'a RunState,
    /// The model's config.
    pub config: &'a ModelConfig,
    /// This rank's part of the model.
    pub model: &'a Decoder,
    /// Its optimizer.
    pub optimizer: &'a ModuleOptimizer,
}

/// Keeps the exchanges of states apart from those of the model.
const STATE_OP: u32 = 0x57a7e;

/// The key of an exchange while a state is saved or loaded.
pub(super) fn key(step: u64, part: u32) -> Key {
    Key::new(Op::Custom(STATE_OP), step, 0).with_part(part)
}

impl StateFolder {
    /// Saves a checkpoint, and then removes those that are too old; all ranks of `mesh` call it with the
    /// same state, and all return when it is complete. `progress` is told how many bytes this rank has
    /// written, and how many it has to.
    ///
    /// Returns the checkpoint's folder.
    ///
    /// # Errors
    ///
    /// When a file cannot be written, [`check_target`](Self::check_target) refuses the folder, the
    /// optimizer keeps tensors of other shapes than the parameters', or a rank is lost. Checkpoints
    /// that were there stay usable.
    pub fn save(
        &self,
        snapshot: Snapshot<'_>,
        mesh: &Mesh,
        progress: &dyn Fn(u64, u64),
    ) -> Result<PathBuf, StateError> {
        let Snapshot {
            state,
            config,
            model,
            optimizer,
        } = snapshot;
        let comm = mesh.world().as_ref();
        let (rank, ranks) = (comm.rank(), comm.size());
        let folder = self.step_folder(state.step);
        if rank == 0 {
            self.check_target(&state.run, state.step)?;
            self.clean()?;
            self.create(&folder)?;
        }
        // The folder is there, and the run has the name that the first rank has given it.
        let name = (rank == 0).then(|| state.run.clone().into());
        let name = comm.broadcast(key(state.step, 0), 0, name)?;
        let state = &RunState {
            run: String::from_utf8_lossy(&name).into_owned(),
            ..state.clone()
        };

        let experts = mesh.local_experts(config.num_experts);
        let experts = experts.map_err(ModelError::from)?;
        let leaves = optimizer::leaves(optimizer)?;
        let mut collect = Collect::new(mesh, experts, leaves);
        model.visit(&mut collect);
        if let Some(error) = collect.error {
            return Err(error);
        }
        if rank == 0 {
            collect.history(&state.history);
        }
        let (disk, entries) = (self.disk.as_ref(), collect.entries);
        let entry = shard::write(disk, &folder, state, [rank, ranks], entries, progress)?;
        self.disk.sync_dir(&folder).map_err(io(&folder))?;

        let manifest_path = folder.join(MANIFEST);
        let json = |error: serde_json::Error| StateError::Manifest {
            path: manifest_path.clone(),
            message: error.to_string(),
        };
        let entry = serde_json::to_vec(&entry).map_err(json)?;
        let entries = comm.all_gather(key(state.step, 1), entry.into())?;
        if rank == 0 {
            let shards = entries.iter().map(|text| serde_json::from_slice(text));
            let shards: Vec<ShardEntry> = shards.collect::<Result<_, _>>().map_err(json)?;
            let manifest = Manifest::new(state, config, mesh.ep().size(), shards);
            let text = manifest.to_text().map_err(json)?;
            self.complete(&folder, &text)?;
            self.prune()?;
        }
        comm.barrier(key(state.step, 2))?;
        Ok(folder)
    }

    /// Puts the manifest in its place, which makes the folder a checkpoint.
    fn complete(&self, folder: &Path, text: &[u8]) -> Result<(), StateError> {
        let (partial, path) = (folder.join(PARTIAL_MANIFEST), folder.join(MANIFEST));
        let mut file = self.disk.create(&partial).map_err(io(&partial))?;
        file.write_all(text).map_err(io(&partial))?;
        file.sync().map_err(io(&partial))?;
        drop(file);
        self.disk.rename(&partial, &path).map_err(io(&path))?;
        self.disk.sync_dir(folder).map_err(io(folder))
    }

    /// Makes a checkpoint's folder, such that it is found after a crash.
    fn create(&self, folder: &Path) -> Result<(), StateError> {
        let new = !self.path.exists();
        self.disk.create_dir(folder).map_err(io(folder))?;
        self.disk.sync_dir(&self.path).map_err(io(&self.path))?;
        match self.path.parent() {
            Some(above) if new && !above.as_os_str().is_empty() => {
                self.disk.sync_dir(above).map_err(io(above))
            }
            _ => Ok(()),
        }
    }
}
