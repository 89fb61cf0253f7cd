//! Checkpoints of a [`Decoder`]: a folder with `config.json`, one safetensors file a rank, and an
//! index that says which file holds which tensor.
//!
//! Experts are stored one by one under their global ids, so a checkpoint can be loaded on another
//! number of ranks; each rank maps the files and reads only what lives there. Files are written to
//! a folder beside the target and renamed into place when complete.

use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor, TensorData};
use burn_moe::comm::{CommError, Key, Op};
use burn_moe::parallel::ExpertParallel;
use memmap2::Mmap;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use crate::module_path::ModulePath;
use crate::{Decoder, ModelConfig, ModelError};

const CONFIG: &str = "config.json";
const INDEX: &str = "index.json";

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

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    format: String,
    /// Tensor name to file name.
    tensors: BTreeMap<String, String>,
}

const FORMAT: &str = "burn-moe checkpoint 1";

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

/// The config of the checkpoint in `folder`.
///
/// # Errors
///
/// When there is none, or it is not valid.
pub fn read_config(folder: &Path) -> Result<ModelConfig, CheckpointError> {
    Ok(ModelConfig::read(&folder.join(CONFIG))?)
}

/// Saves the model; all ranks call it with the same arguments, and all return when it is in place.
///
/// A checkpoint that is already there is replaced at once, after the new one is complete.
///
/// # Errors
///
/// When a file cannot be written, [`check_target`] refuses the folder, or a rank is lost. What was
/// in the folder stays.
pub fn save(
    decoder: &Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    folder: &Path,
    step: u64,
) -> Result<(), CheckpointError> {
    check_target(folder, config)?;
    let comm = ep.comm().as_ref();
    let key = |part| Key::new(Op::Barrier, step, u32::MAX).with_part(part);
    let partial = beside(folder, "partial");
    if comm.rank() == 0 {
        if partial.exists() {
            fs::remove_dir_all(&partial).map_err(io(&partial))?;
        }
        fs::create_dir_all(&partial).map_err(io(&partial))?;
    }
    comm.barrier(key(0))?;

    let mut collect = Collect {
        path: ModulePath::default(),
        first_expert: local_experts(config, ep)?.start,
        replicated: comm.rank() == 0,
        tensors: Vec::new(),
    };
    decoder.visit(&mut collect);
    let file = format!("rank-{:05}-of-{:05}.safetensors", comm.rank(), comm.size());
    let path = partial.join(&file);
    let views: Result<Vec<_>, _> = collect
        .tensors
        .iter()
        .map(|(name, shape, values)| {
            let bytes = bytemuck::cast_slice(values);
            TensorView::new(Dtype::F32, shape.clone(), bytes).map(|view| (name.as_str(), view))
        })
        .collect();
    views
        .and_then(|views| safetensors::serialize_to_file(views, None, &path))
        .map_err(|error| CheckpointError::Format {
            path: path.clone(),
            message: error.to_string(),
        })?;

    let names: Vec<&str> = collect
        .tensors
        .iter()
        .map(|(name, ..)| name.as_str())
        .collect();
    let mine = serde_json::to_vec(&(file, names)).map_err(json(&path))?;
    let all = comm.all_gather(key(1), mine.into())?;
    if comm.rank() == 0 {
        let mut index = Index {
            format: FORMAT.into(),
            tensors: BTreeMap::new(),
        };
        for part in all {
            let (file, names): (String, Vec<String>) =
                serde_json::from_slice(&part).map_err(json(&path))?;
            index
                .tensors
                .extend(names.into_iter().map(|name| (name, file.clone())));
        }
        write_json(&partial.join(CONFIG), config)?;
        write_json(&partial.join(INDEX), &index)?;
        swap_into_place(&partial, folder)?;
    }
    comm.barrier(key(2))?;
    Ok(())
}

/// Replaces the weights of this rank's `decoder` by those in `folder`.
///
/// # Errors
///
/// When a file is missing or damaged, or a tensor is missing, superfluous or of another shape.
pub fn load(
    decoder: Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    folder: &Path,
) -> Result<Decoder, CheckpointError> {
    load_with_progress(decoder, config, ep, folder, &mut |_, _| {})
}

/// [`load`], with `progress` told, after each parameter, how many values have been read and how many
/// this rank reads in all.
///
/// # Errors
///
/// As [`load`].
pub fn load_with_progress(
    decoder: Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    folder: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<Decoder, CheckpointError> {
    let index_path = folder.join(INDEX);
    let text = fs::read(&index_path).map_err(io(&index_path))?;
    let index: Index = serde_json::from_slice(&text).map_err(json(&index_path))?;
    if index.format != FORMAT {
        return Err(CheckpointError::Format {
            path: index_path,
            message: format!("format is {:?}, allowed: {FORMAT:?}", index.format),
        });
    }
    let mut files = HashMap::new();
    for name in index.tensors.values() {
        if !files.contains_key(name.as_str()) {
            files.insert(name.as_str(), map_file(folder, name)?);
        }
    }
    let mut tensors = HashMap::new();
    for (name, map) in &files {
        let path = folder.join(name);
        tensors.insert(
            *name,
            SafeTensors::deserialize(map).map_err(|error| CheckpointError::Format {
                path,
                message: format!("not a safetensors file: {error}"),
            })?,
        );
    }
    let mut fill = Fill {
        path: ModulePath::default(),
        first_expert: local_experts(config, ep)?.start,
        folder,
        index: &index,
        files: &tensors,
        used: 0,
        values: 0,
        total: decoder.num_params(),
        progress,
        error: None,
    };
    let decoder = decoder.map(&mut fill);
    if let Some(error) = fill.error {
        return Err(error);
    }
    // Experts of other ranks are not read here, but they are counted: each rank's share is equal.
    let expert_tensors = index
        .tensors
        .keys()
        .filter(|n| n.contains(".experts."))
        .count();
    let expected = fill.used + expert_tensors - expert_tensors / ep.comm().size();
    if expected != index.tensors.len() {
        return Err(CheckpointError::Format {
            path: index_path,
            message: format!("{} tensors, the config has {expected}", index.tensors.len()),
        });
    }
    Ok(decoder)
}

fn local_experts(
    config: &ModelConfig,
    ep: &ExpertParallel,
) -> Result<std::ops::Range<usize>, ModelError> {
    Ok(ep.local_experts(config.num_experts)?)
}

fn map_file(folder: &Path, name: &str) -> Result<Mmap, CheckpointError> {
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

/// Takes what is at `folder` away, puts `partial` there, and deletes what was.
fn swap_into_place(partial: &Path, folder: &Path) -> Result<(), CheckpointError> {
    let old = beside(folder, "old");
    if old.exists() {
        fs::remove_dir_all(&old).map_err(io(&old))?;
    }
    let replaces = folder.exists();
    if replaces {
        fs::rename(folder, &old).map_err(io(folder))?;
    }
    fs::rename(partial, folder).map_err(io(folder))?;
    if replaces {
        fs::remove_dir_all(&old).map_err(io(&old))?;
    }
    Ok(())
}

/// `folder.suffix`, beside the folder so that renaming stays within one file system.
fn beside(folder: &Path, suffix: &str) -> PathBuf {
    let mut name = folder.as_os_str().to_os_string();
    name.push(".");
    name.push(suffix);
    name.into()
}

fn write_json(path: &Path, value: &impl Serialize) -> Result<(), CheckpointError> {
    let text = serde_json::to_string_pretty(value).map_err(json(path))?;
    fs::write(path, text + "\n").map_err(io(path))
}

fn io(path: &Path) -> impl FnOnce(std::io::Error) -> CheckpointError {
    move |source| CheckpointError::Io {
        path: path.into(),
        source,
    }
}

fn json(path: &Path) -> impl FnOnce(serde_json::Error) -> CheckpointError {
    move |error| CheckpointError::Format {
        path: path.into(),
        message: error.to_string(),
    }
}

struct Collect {
    path: ModulePath,
    first_expert: usize,
    replicated: bool,
    tensors: Vec<(String, Vec<usize>, Vec<f32>)>,
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let sharded = self.path.inside_experts();
        if !sharded && !self.replicated {
            return;
        }
        let data = param.val().inner().cast(DType::F32).into_data();
        let shape = data.shape().to_vec();
        let values: Vec<f32> = data.iter().collect();
        if !sharded {
            self.tensors.push((self.path.name(), shape, values));
            return;
        }
        let len = shape[1..].iter().product::<usize>();
        for (expert, values) in values.chunks_exact(len.max(1)).enumerate() {
            let name = self.path.expert_name(self.first_expert + expert);
            self.tensors
                .push((name, shape[1..].to_vec(), values.to_vec()));
        }
    }
}

struct Fill<'a> {
    path: ModulePath,
    first_expert: usize,
    folder: &'a Path,
    index: &'a Index,
    files: &'a HashMap<&'a str, SafeTensors<'a>>,
    /// Tensors read.
    used: usize,
    /// Values read.
    values: usize,
    total: usize,
    progress: &'a mut dyn FnMut(usize, usize),
    error: Option<CheckpointError>,
}

impl Fill<'_> {
    /// Appends one tensor of the checkpoint to `values`.
    fn read(
        &mut self,
        name: &str,
        shape: &[usize],
        values: &mut Vec<f32>,
    ) -> Result<(), CheckpointError> {
        let fault = |message: String| CheckpointError::Tensor {
            path: self.folder.into(),
            tensor: name.into(),
            message,
        };
        let view = self
            .index
            .tensors
            .get(name)
            .and_then(|file| self.files.get(file.as_str()))
            .ok_or_else(|| fault("missing".into()))?
            .tensor(name)
            .map_err(|error| fault(error.to_string()))?;
        if view.dtype() != Dtype::F32 || view.shape() != shape {
            return Err(fault(format!(
                "{:?} {:?} where the config has F32 {shape:?}",
                view.dtype(),
                view.shape()
            )));
        }
        values.extend(bytemuck::pod_collect_to_vec::<u8, f32>(view.data()));
        self.used += 1;
        Ok(())
    }

    fn values(&mut self, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let mut values = Vec::with_capacity(shape.iter().product());
        if !self.path.inside_experts() {
            self.read(&self.path.name(), shape, &mut values)?;
        } else {
            for expert in 0..shape[0] {
                let name = self.path.expert_name(self.first_expert + expert);
                self.read(&name, &shape[1..], &mut values)?;
            }
        }
        Ok(values)
    }
}

impl ModuleMapper for Fill<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let shape = param.lazy_shape().to_vec();
        match self.values(&shape) {
            Ok(values) => {
                self.values += values.len();
                (self.progress)(self.values, self.total);
                param.map(|tensor| {
                    let data = TensorData::new(values, shape);
                    Tensor::<D>::from_data(data, &tensor.device())
                        .cast(tensor.dtype())
                        .set_require_grad(tensor.is_require_grad())
                })
            }
            Err(error) => {
                self.error = Some(error);
                param
            }
        }
    }
}
