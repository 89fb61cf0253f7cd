use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{DType, Device, TensorData};
use burn_moe::parallel::ExpertParallel;
use half::{bf16, f16};

use super::stored::{HEAD, Stored};
use super::{PretrainedError, find_experts, stored};
use crate::hf::{Element, Folder, HfError, ignorable};
use crate::module_path::ModulePath;
use crate::parameters::{self, Vacancy};
use crate::{Decoder, ModelConfig, ModelError};

/// How [`load_with`] loads.
#[derive(Clone, Copy, Default)]
pub struct LoadOptions<'a> {
    /// Called as loading goes on, from any thread: bytes that this rank has read of its tensors, and
    /// all that it is going to read. The last call has both equal.
    pub progress: Option<&'a (dyn Fn(u64, u64) + Sync)>,
}

/// [`load_with`] the default options.
///
/// # Errors
///
/// As [`load_with`].
pub fn load(
    config: &ModelConfig,
    ep: &Arc<ExpertParallel>,
    folder: &Folder,
    device: &Device,
) -> Result<Decoder, PretrainedError> {
    load_with(config, ep, folder, device, &LoadOptions::default())
}

/// This rank's part of the model in `folder`: of the experts only its own are read, on all threads
/// of the current rayon pool, in the device's kind of float. Layers for multi-token prediction are
/// left aside.
///
/// # Errors
///
/// When a tensor is missing, has no place in the model or has another shape, a router's values are
/// not finite, or the ranks do not divide the experts.
pub fn load_with(
    config: &ModelConfig,
    ep: &Arc<ExpertParallel>,
    folder: &Folder,
    device: &Device,
    options: &LoadOptions<'_>,
) -> Result<Decoder, PretrainedError> {
    let decoder = config.init_lazy(ep, 0, device)?;
    let own = ep
        .local_experts(config.num_experts)
        .map_err(ModelError::from)?;
    let total = check(&decoder, config, folder, own.clone())?;
    let mut reader = Reader {
        config,
        folder,
        own,
        down: None,
        progress: Progress {
            report: options.progress,
            read: Mutex::new(0),
            total,
        },
    };
    Ok(parameters::replace(decoder, |vacancy| {
        reader.values(&vacancy)
    })?)
}

/// Checks that the folder has the tensors of the model, other ranks' experts included, and no others.
/// Returns the bytes of those that this rank reads.
fn check(
    decoder: &Decoder,
    config: &ModelConfig,
    folder: &Folder,
    own: Range<usize>,
) -> Result<u64, HfError> {
    let mut names = Vec::new();
    let mut bytes = 0;
    parameters::visit(decoder, |parameter| {
        let stored = stored(parameter.path, folder)?;
        if let Stored::ExpertsGateUp(layer) = &stored {
            let experts = find_experts(folder, layer, config)?;
            names.extend(experts.names());
            bytes += experts.bytes_of(own.clone());
        }
        names.extend_from_slice(stored.names());
        bytes += bytes_of(folder, &stored);
        Ok(())
    })?;
    let (layers, ahead) = (config.num_layers, config.num_mtp_layers);
    folder.check_names(names, |name| {
        let of_rope = ignorable(name, usize::MAX);
        let of_embedding = config.tied_embeddings && name == HEAD;
        let of_mtp = ignorable(name, layers) && !ignorable(name, layers + ahead);
        of_rope || of_embedding || of_mtp
    })?;
    Ok(bytes)
}

/// Bytes of a parameter that is not of experts.
fn bytes_of(folder: &Folder, stored: &Stored) -> u64 {
    let names = stored.names().iter();
    names.map(|name| folder.bytes_of(name)).sum()
}

/// Finds the values of parameters, one after another.
struct Reader<'a> {
    config: &'a ModelConfig,
    folder: &'a Folder,
    own: Range<usize>,
    /// Down of the experts whose gate and up have been read.
    down: Option<TensorData>,
    progress: Progress<'a>,
}

impl Reader<'_> {
    fn values(&mut self, of: &Vacancy<'_>) -> Result<TensorData, HfError> {
        match of.dtype {
            DType::BF16 => self.values_as::<bf16>(of),
            DType::F16 => self.values_as::<f16>(of),
            _ => self.values_as::<f32>(of),
        }
    }

    fn values_as<E: Element + burn::tensor::Element>(
        &mut self,
        of: &Vacancy<'_>,
    ) -> Result<TensorData, HfError> {
        let (folder, shape) = (self.folder, of.shape);
        // Stored matrices are [outputs, inputs].
        let (inputs, outputs) = match shape {
            [inputs, outputs] => (*inputs, *outputs),
            _ => (0, 0),
        };
        let stored = stored(of.path, folder)?;
        let values: Vec<E> = match &stored {
            Stored::Plain(name) => folder.read(name, shape)?,
            Stored::Transposed(name) => folder.read_transposed(name, [outputs, inputs])?,
            Stored::GateUp([gate, up]) => {
                folder.read_side_by_side(&[gate, up], [outputs / 2, inputs])?
            }
            // Routers are f32, whatever `E` is; a device of f64 widens them afterwards.
            Stored::Gate(name) => {
                let rows = folder.read_finite_f32(name, &[outputs, inputs])?;
                let by_input = (0..inputs).flat_map(|i| (0..outputs).map(move |o| (i, o)));
                let values = by_input.map(|(i, o)| E::from_f32(rows[o * inputs + i]));
                values.collect()
            }
            Stored::GateBias(name) => {
                let values = folder.read_finite_f32(name, shape)?;
                values.into_iter().map(E::from_f32).collect()
            }
            Stored::ExpertsGateUp(layer) => {
                let experts = find_experts(folder, layer, self.config)?;
                let progress = &self.progress;
                let (gate_up, down) = experts.read_noting(self.own.clone(), |expert| {
                    progress.add(experts.bytes_of(expert..expert + 1));
                })?;
                let (width, hidden) = (self.config.d_model, self.config.d_hidden_expert);
                let down: Vec<E> = down;
                self.down = Some(TensorData::new(down, [self.own.len(), hidden, width]));
                gate_up
            }
            Stored::ExpertsDown(_) => {
                return self.down.take().ok_or_else(|| missing(folder, of.path));
            }
        };
        if !stored.names().is_empty() {
            self.progress.add(bytes_of(folder, &stored));
        }
        Ok(TensorData::new(values, shape.to_vec()))
    }
}

struct Progress<'a> {
    report: Option<&'a (dyn Fn(u64, u64) + Sync)>,
    read: Mutex<u64>,
    total: u64,
}

impl Progress<'_> {
    fn add(&self, bytes: u64) {
        if let Some(report) = self.report {
            // Held meanwhile, so that no thread reports less than another before it.
            let mut read = self.read.lock().unwrap_or_else(PoisonError::into_inner);
            *read += bytes;
            report(*read, self.total);
        }
    }
}

pub(super) fn missing(folder: &Folder, path: &ModulePath) -> HfError {
    HfError::Missing {
        file: folder.path().into(),
        tensor: path.name(),
    }
}
