//! Checkpoints of a [`Decoder`]: a folder with `config.json`, one safetensors file a rank, and an
//! index that says which file holds which tensor.
//!
//! Experts are stored one by one under their global ids, so a checkpoint can be loaded on another
//! number of ranks; each rank maps the files and reads only what lives there. Files are written to
//! a folder beside the target and renamed into place when complete.

mod error;
mod files;

use std::collections::{BTreeMap, HashMap};
use std::fs;
use std::path::Path;

use burn::module::Module;
use burn::tensor::{DType, TensorData};
use burn_moe::comm::{Key, Op};
use burn_moe::parallel::ExpertParallel;
use safetensors::tensor::TensorView;
use safetensors::{Dtype, SafeTensors};
use serde::{Deserialize, Serialize};

use crate::module_path::ModulePath;
use crate::parameters::{self, Parameter};
use crate::place::{beside, swap_into_place};
use crate::pretrained::LoadOptions;
use crate::{Decoder, ModelConfig, ModelError};
use error::{io, json};
use files::{map_file, write_json};

pub use error::CheckpointError;
pub use files::check_target;

const CONFIG: &str = "config.json";
const INDEX: &str = "index.json";

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Index {
    format: String,
    /// Tensor name to file name.
    tensors: BTreeMap<String, String>,
}

const FORMAT: &str = "burn-moe checkpoint 1";

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

    let first_expert = local_experts(config, ep)?.start;
    let mut tensors = Vec::new();
    parameters::visit(decoder, |parameter| {
        if parameter.path.inside_experts() {
            tensors.extend(experts(&parameter, first_expert));
        } else if comm.rank() == 0 {
            let name = parameter.path.name();
            tensors.push((name, parameter.shape.clone(), f32s(&parameter)));
        }
        Ok::<(), CheckpointError>(())
    })?;
    let file = format!("rank-{:05}-of-{:05}.safetensors", comm.rank(), comm.size());
    let path = partial.join(&file);
    let views: Result<Vec<_>, _> = tensors
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

    let names: Vec<&str> = tensors.iter().map(|(name, ..)| name.as_str()).collect();
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
        swap_into_place(&partial, folder, |path, source| io(path)(source))?;
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
    load_with(decoder, config, ep, folder, &LoadOptions::default())
}

/// [`load`] with options.
///
/// # Errors
///
/// As [`load`].
pub fn load_with(
    decoder: Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    folder: &Path,
    options: &LoadOptions<'_>,
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
    let mut reader = Reader {
        first_expert: local_experts(config, ep)?.start,
        folder,
        index: &index,
        files: &tensors,
        used: 0,
    };
    let (mut read, all) = (0, (decoder.num_params() * size_of::<f32>()) as u64);
    let decoder = parameters::replace(decoder, |vacancy| {
        let values = reader.values(vacancy.path, vacancy.shape)?;
        read += size_of_val(values.as_slice()) as u64;
        if let Some(progress) = options.progress {
            progress(read, all);
        }
        Ok::<_, CheckpointError>(TensorData::new(values, vacancy.shape.to_vec()))
    })?;
    // Experts of other ranks are not read here, but they are counted: each rank's share is equal.
    let expert_tensors = index
        .tensors
        .keys()
        .filter(|n| n.contains(".experts."))
        .count();
    let expected = reader.used + expert_tensors - expert_tensors / ep.comm().size();
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

/// Name, shape and values.
type Saved = (String, Vec<usize>, Vec<f32>);

/// The experts of a parameter that stacks them, one by one.
fn experts(parameter: &Parameter<'_>, first: usize) -> Vec<Saved> {
    let shape = &parameter.shape[1..];
    let len = shape.iter().product::<usize>();
    let values = f32s(parameter);
    let experts = values.chunks_exact(len.max(1)).enumerate();
    experts
        .map(|(expert, values)| {
            let name = parameter.path.expert_name(first + expert);
            (name, shape.to_vec(), values.to_vec())
        })
        .collect()
}

fn f32s(parameter: &Parameter<'_>) -> Vec<f32> {
    let values = parameter.values().convert_dtype(DType::F32);
    values.iter().collect()
}

/// Finds the values of parameters, and counts the tensors they came from.
struct Reader<'a> {
    first_expert: usize,
    folder: &'a Path,
    index: &'a Index,
    files: &'a HashMap<&'a str, SafeTensors<'a>>,
    used: usize,
}

impl Reader<'_> {
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

    fn values(&mut self, path: &ModulePath, shape: &[usize]) -> Result<Vec<f32>, CheckpointError> {
        let mut values = Vec::with_capacity(shape.iter().product());
        if !path.inside_experts() {
            self.read(&path.name(), shape, &mut values)?;
        } else {
            for expert in 0..shape[0] {
                let name = path.expert_name(self.first_expert + expert);
                self.read(&name, &shape[1..], &mut values)?;
            }
        }
        Ok(values)
    }
}
