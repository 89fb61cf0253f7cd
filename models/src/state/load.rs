use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use burn::module::Module;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::Device;
use burn_moe::parallel::{ExpertParallel, Mesh};
use safetensors::SafeTensors;
use safetensors::tensor::TensorView;

use super::error::StateError;
use super::fill::Fill;
use super::folder::StateFolder;
use super::manifest::{MANIFEST, Manifest, RunState};
use super::optimizer;
use super::save::key;
use super::shard::Shard;
use crate::{Decoder, ModelConfig, ModelError};

/// A complete checkpoint, opened.
#[derive(Debug, Clone)]
pub struct SavedState {
    folder: PathBuf,
    manifest: Manifest,
}

/// What a rank gets of a checkpoint.
pub struct Loaded {
    /// This rank's part of the model.
    pub model: Decoder,
    /// How far the run is.
    pub state: RunState,
    folder: PathBuf,
    record: OptimizerRecord,
    leaves: usize,
}

impl SavedState {
    /// Opens the checkpoint at `path`, or the newest one of the run's folder there.
    ///
    /// # Errors
    ///
    /// When there is none, or its manifest is damaged.
    pub fn open(path: &Path) -> Result<Self, StateError> {
        let missing = |message: &str| StateError::Missing {
            folder: path.into(),
            message: message.into(),
        };
        if !path.is_dir() {
            return Err(missing("no such folder"));
        }
        let folder = match path.join(MANIFEST).exists() {
            true => path.into(),
            false => StateFolder::new(path).newest()?.ok_or_else(|| {
                missing("no manifest.json, and no folder step-... with one: no complete checkpoint")
            })?,
        };
        let manifest = Manifest::read(&folder)?;
        Ok(Self { folder, manifest })
    }

    /// Where it is.
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// Name of the run.
    pub fn run(&self) -> &str {
        &self.manifest.run
    }

    /// Optimizer steps done.
    pub fn step(&self) -> u64 {
        self.manifest.step
    }

    /// Sequences of the data that were consumed.
    pub fn position(&self) -> u64 {
        self.manifest.position
    }

    /// Ranks that saved it.
    pub fn ranks(&self) -> usize {
        self.manifest.ranks
    }

    /// How many of them shared the experts of one replica of the model.
    pub fn expert_ranks(&self) -> usize {
        self.manifest.expert_ranks.unwrap_or(self.manifest.ranks)
    }

    /// Checks that a run of `config` with `settings` may continue it.
    ///
    /// # Errors
    ///
    /// [`StateError::Setting`] names the first that differs.
    pub fn check(
        &self,
        config: &ModelConfig,
        settings: &BTreeMap<String, String>,
    ) -> Result<(), StateError> {
        self.manifest.check_config(&self.folder, config)?;
        self.manifest.check_settings(&self.folder, settings)
    }

    /// Loads what belongs on this rank; all ranks of `mesh` call it, as many as they may be, with `ep` over
    /// its [`ep`](Mesh::ep). Every file is read as a whole by one of them and compared with its
    /// checksum, before any rank goes on. `progress` is told how many bytes this rank has read of
    /// those that it compares.
    ///
    /// # Errors
    ///
    /// When a file is missing, damaged or another one, `config` is not the one saved, a tensor is
    /// missing, superfluous or of another shape, or a rank is lost.
    pub fn load(
        &self,
        config: &ModelConfig,
        ep: &Arc<ExpertParallel>,
        mesh: &Mesh,
        device: &Device,
        progress: &dyn Fn(u64, u64),
    ) -> Result<Loaded, StateError> {
        let Self { folder, manifest } = self;
        manifest.check_config(folder, config)?;
        let comm = mesh.world().as_ref();
        let ranks = 0..manifest.ranks;
        let shards = ranks.map(|rank| Shard::open(folder, manifest, rank));
        let shards: Vec<Shard> = shards.collect::<Result<_, _>>()?;

        let own = || (comm.rank()..manifest.ranks).step_by(comm.size());
        let total = own().map(|shard| manifest.shards[shard].bytes).sum();
        let mut done = 0;
        for shard in own() {
            let entry = &manifest.shards[shard];
            shards[shard].verify(folder, entry, &mut |bytes| {
                done += bytes;
                progress(done, total);
            })?;
        }
        comm.barrier(key(manifest.step, 3))?;

        let files = shards.iter().zip(&manifest.shards).map(|(shard, entry)| {
            let path = folder.join(&entry.file);
            Ok((shard.tensors(&path)?, path))
        });
        let files: Vec<(SafeTensors, PathBuf)> = files.collect::<Result<_, StateError>>()?;
        let tensors = Tensors::new(folder, &files)?;
        let experts = mesh.local_experts(config.num_experts);
        let experts = experts.map_err(ModelError::from)?;
        let mut fill = Fill::new(&tensors, experts, config.num_experts);
        // The seed is of no use: nothing is drawn, as every parameter is replaced before.
        let model = config.init_lazy(ep, 0, device)?.map(&mut fill);
        let (history, record) = fill.finish()?;
        Ok(Loaded {
            model,
            state: RunState {
                run: manifest.run.clone(),
                step: manifest.step,
                position: manifest.position,
                settings: manifest.settings.clone(),
                history,
            },
            folder: folder.clone(),
            leaves: record.count(),
            record: record.build()?,
        })
    }
}

impl Loaded {
    /// Gives `optimizer`, made for this [`model`](Self::model), the state that was saved.
    ///
    /// # Errors
    ///
    /// When the optimizer is of another kind than the one saved.
    pub fn optimizer(self, optimizer: ModuleOptimizer) -> Result<Restored, StateError> {
        let optimizer = optimizer.load_record(self.record);
        // Burn leaves out what it cannot use, without a word.
        let taken = optimizer::count(&optimizer)?;
        if taken != self.leaves {
            return Err(StateError::Tensor {
                path: self.folder,
                tensor: "optimizer/...".into(),
                message: format!(
                    "of {} values of its state, the optimizer takes {taken}",
                    self.leaves
                ),
            });
        }
        Ok(Restored {
            model: self.model,
            optimizer,
            state: self.state,
        })
    }
}

/// A run to go on with, on one rank.
pub struct Restored {
    /// This rank's part of the model.
    pub model: Decoder,
    /// Its optimizer.
    pub optimizer: ModuleOptimizer,
    /// How far the run is.
    pub state: RunState,
}

/// The tensors of all files by name.
pub(super) struct Tensors<'a> {
    pub folder: &'a Path,
    by_name: HashMap<&'a str, (TensorView<'a>, &'a Path)>,
}

impl<'a> Tensors<'a> {
    fn new(folder: &'a Path, files: &'a [(SafeTensors<'a>, PathBuf)]) -> Result<Self, StateError> {
        let mut by_name = HashMap::new();
        for (file, path) in files {
            for (name, view) in file.iter() {
                if by_name.insert(name, (view, path.as_path())).is_some() {
                    return Err(StateError::Tensor {
                        path: path.clone(),
                        tensor: name.into(),
                        message: "another file has it, too".into(),
                    });
                }
            }
        }
        Ok(Self { folder, by_name })
    }

    pub fn get(&self, name: &str) -> Option<&(TensorView<'a>, &'a Path)> {
        self.by_name.get(name)
    }

    pub fn names(&self) -> impl Iterator<Item = &'a str> {
        self.by_name.keys().copied()
    }
}
