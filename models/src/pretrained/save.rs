use std::collections::BTreeMap;
use std::path::Path;

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{DType, Tensor};
use burn_moe::comm::Key;
use burn_moe::parallel::ExpertParallel;

use super::{PretrainedError, Stored, stored};
use crate::hf::{Folder, HfError, Layout, Saver, ignorable};
use crate::module_path::ModulePath;
use crate::{Decoder, ModelConfig, ModelError};

/// Saves a model that was [loaded](super::load) from `folder` to `target`, in the same layout: the
/// same files, names, shapes and types of elements, with tokenizer and config. Every rank writes its
/// experts, the first one the rest. Values that are still those of `folder` keep their bytes, and
/// tensors that the model left aside are copied.
///
/// All ranks call it with the same arguments, and all return when the files are in place; a model
/// folder that was there is then replaced, `folder` itself too. `key` is the operation's, its parts
/// are used up.
///
/// # Errors
///
/// When `target` holds anything but a model folder, a file cannot be written, or a rank is lost or
/// too late. What was there stays.
pub fn save(
    decoder: &Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    folder: &Folder,
    target: &Path,
    key: Key,
) -> Result<(), PretrainedError> {
    let comm = ep.comm().as_ref();
    let first = comm.rank() == 0;
    let layout = Layout::of(folder)?;
    let mut saver = match first {
        true => Some(Saver::create(&layout, target)?),
        false => None,
    };
    comm.barrier(key)?;
    let own = ep
        .local_experts(config.num_experts)
        .map_err(ModelError::from)?;
    let mut write = Write {
        path: ModulePath::default(),
        config,
        folder,
        first_expert: own.start,
        replicated: first,
        saver: match saver.take() {
            Some(saver) => saver,
            None => Saver::join(&layout, target)?,
        },
        gate_up: None,
        error: None,
    };
    decoder.visit(&mut write);
    let Write {
        mut saver, error, ..
    } = write;
    if let Some(error) = error {
        return Err(error.into());
    }
    if first {
        for name in layout.names() {
            if ignorable(name, config.num_layers) {
                saver.keep(name)?;
            }
        }
    } else {
        saver.flush()?;
    }
    let json = |source| ModelError::Json {
        path: target.into(),
        source,
    };
    let written = serde_json::to_vec(saver.written()).map_err(json)?;
    let all = comm.all_gather(key.with_part(1), written.into())?;
    if first {
        for part in &all[1..] {
            let part: BTreeMap<String, u64> = serde_json::from_slice(part).map_err(json)?;
            saver.add_written(&part);
        }
        saver.finish()?;
    }
    comm.barrier(key.with_part(2))?;
    Ok(())
}

/// Writes each parameter to where [`Stored`] says it came from.
struct Write<'a> {
    path: ModulePath,
    config: &'a ModelConfig,
    folder: &'a Folder,
    first_expert: usize,
    /// Whether this rank writes what all ranks hold.
    replicated: bool,
    saver: Saver<'a>,
    /// Layer, gate and up of the experts whose down comes next.
    gate_up: Option<(String, Vec<f32>)>,
    error: Option<HfError>,
}

impl Write<'_> {
    fn write(&mut self, shape: &[usize], values: Vec<f32>) -> Result<(), HfError> {
        // Stored matrices are [outputs, inputs].
        let (inputs, outputs) = match shape {
            [inputs, outputs] => (*inputs, *outputs),
            _ => (0, 0),
        };
        let saver = &mut self.saver;
        match stored(&self.path, self.folder)? {
            Stored::Plain(name) | Stored::GateBias(name) => saver.write(&name, shape, &values),
            Stored::Transposed(name) | Stored::Gate(name) => {
                saver.write_transposed(&name, [outputs, inputs], &values)
            }
            Stored::GateUp([gate, up]) => {
                saver.write_side_by_side(&[&gate, &up], [outputs / 2, inputs], &values)
            }
            Stored::ExpertsGateUp(layer) => {
                self.gate_up = Some((layer, values));
                Ok(())
            }
            Stored::ExpertsDown => {
                let (layer, gate_up) = self.gate_up.take().ok_or_else(|| HfError::Missing {
                    file: self.folder.path().into(),
                    tensor: self.path.name(),
                })?;
                let ModelConfig {
                    d_model,
                    d_hidden_expert,
                    num_experts,
                    ..
                } = *self.config;
                let size = d_model * d_hidden_expert;
                let experts = gate_up
                    .chunks_exact(2 * size)
                    .zip(values.chunks_exact(size));
                for (local, (gate_up, down)) in experts.enumerate() {
                    let expert = self.first_expert + local;
                    let shape = [d_model, d_hidden_expert];
                    self.saver
                        .write_expert(&layer, num_experts, expert, shape, gate_up, down)?;
                }
                Ok(())
            }
        }
    }
}

impl ModuleVisitor for Write<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_some() || !(self.replicated || self.path.inside_experts()) {
            return;
        }
        let data = param.val().inner().cast(DType::F32).into_data();
        let shape = data.shape().to_vec();
        if let Err(error) = self.write(&shape, data.iter().collect()) {
            self.error = Some(error);
        }
    }
}
