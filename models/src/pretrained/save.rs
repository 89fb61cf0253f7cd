use std::collections::BTreeMap;
use std::ops::Range;
use std::path::Path;

use burn::tensor::{DType, TensorData};
use burn_moe::comm::{Key, Op};
use burn_moe::parallel::ExpertParallel;
use half::{bf16, f16};

use super::PretrainedError;
use super::stored::{HEAD, Stored};
use crate::hf::{Element, HfError, Layout, Saver};
use crate::parameters::{self, Parameter};
use crate::{Decoder, ModelConfig, ModelError};

/// Saves the model as a folder of Hugging Face's, in `layout`: usually that of the folder that it was
/// loaded from ([`Layout::of`]). All ranks call it with the same arguments, and all return when the
/// folder is in place; one that is there is replaced at once, after the new one is complete.
///
/// Where a value is the one that the folder would be read as, its bytes stay as they were: a model
/// that has not changed gives the same files, also from FP8 (a block of 128 x 128 keeps its scale and
/// its bytes) and also when the model holds fewer bits than the folder. Blocks of FP8 that have
/// changed are quantised anew. What the model leaves aside, such as layers for multi-token
/// prediction, is copied.
///
/// # Errors
///
/// When the layout lacks a tensor of the model or has it in another shape, `target` holds anything
/// but a model folder, a file cannot be written, or a rank is lost. What was in `target` stays.
pub fn save(
    decoder: &Decoder,
    config: &ModelConfig,
    ep: &ExpertParallel,
    layout: &Layout<'_>,
    target: &Path,
    step: u64,
) -> Result<(), PretrainedError> {
    let comm = ep.comm().as_ref();
    let key = |part| Key::new(Op::Barrier, step, u32::MAX - 1).with_part(part);
    let first = comm.rank() == 0;
    let mut saver = None;
    if first {
        saver = Some(Saver::create(layout, target)?);
    }
    comm.barrier(key(0))?;
    let saver = match saver {
        Some(saver) => saver,
        None => Saver::join(layout, target)?,
    };
    let own = ep
        .local_experts(config.num_experts)
        .map_err(ModelError::from)?;
    let mut writer = Writer {
        saver,
        layout,
        config,
        own,
        replicated: first,
        gate_up: None,
    };
    parameters::visit(decoder, |parameter| writer.put(&parameter))?;
    let mut saver = writer.saver;
    saver.flush()?;
    let written = serde_json::to_vec(saver.written()).map_err(|error| HfError::Format {
        file: target.into(),
        message: error.to_string(),
    })?;
    let all = comm.all_gather(key(1), written.into())?;
    if first {
        for of_rank in &all[1..] {
            let of_rank: BTreeMap<String, u64> =
                serde_json::from_slice(of_rank).map_err(|error| HfError::Format {
                    file: target.into(),
                    message: format!("what another rank wrote: {error}"),
                })?;
            saver.add_written(&of_rank);
        }
        for name in layout.names() {
            if !saver.written().contains_key(&name) {
                saver.keep(&name)?;
            }
        }
        saver.finish()?;
    }
    comm.barrier(key(2))?;
    Ok(())
}

struct Writer<'a> {
    saver: Saver<'a>,
    layout: &'a Layout<'a>,
    config: &'a ModelConfig,
    own: Range<usize>,
    /// Whether this rank writes what all have.
    replicated: bool,
    /// Gate and up of the experts whose down comes next.
    gate_up: Option<TensorData>,
}

impl Writer<'_> {
    fn put(&mut self, parameter: &Parameter<'_>) -> Result<(), HfError> {
        if !parameter.path.inside_experts() && !self.replicated {
            return Ok(());
        }
        let values = parameter.values();
        match values.dtype() {
            DType::F32 => self.put_as::<f32>(parameter, values),
            DType::BF16 => self.put_as::<bf16>(parameter, values),
            DType::F16 => self.put_as::<f16>(parameter, values),
            _ => self.put_as::<f32>(parameter, values.convert::<f32>()),
        }
    }

    fn put_as<E: Element + burn::tensor::Element>(
        &mut self,
        parameter: &Parameter<'_>,
        values: TensorData,
    ) -> Result<(), HfError> {
        let path = parameter.path;
        let stored = Stored::of(&path.parts(), |name| self.layout.contains(name));
        let stored = stored.ok_or_else(|| self.saver.missing(&path.name()))?;
        let shape = &parameter.shape;
        // Stored matrices are [outputs, inputs].
        let (inputs, outputs) = match shape[..] {
            [inputs, outputs] => (inputs, outputs),
            _ => (0, 0),
        };
        let of = |values: &TensorData| -> Vec<E> { values.iter().collect() };
        match &stored {
            Stored::Plain(name) | Stored::GateBias(name) => {
                let values = of(&values);
                self.saver.write(name, shape, &values)?;
                let embedding = path.parts() == ["embedding", "weight"];
                if embedding && self.config.tied_embeddings && self.layout.contains(HEAD) {
                    self.saver.write(HEAD, shape, &values)?;
                }
                Ok(())
            }
            Stored::Transposed(name) | Stored::Gate(name) => {
                let stored = [outputs, inputs];
                self.saver.write_transposed(name, stored, &of(&values))
            }
            Stored::GateUp([gate, up]) => {
                let (names, stored) = ([gate.as_str(), up], [outputs / 2, inputs]);
                self.saver.write_side_by_side(&names, stored, &of(&values))
            }
            Stored::ExpertsGateUp(_) => {
                self.gate_up = Some(values);
                Ok(())
            }
            Stored::ExpertsDown(layer) => {
                let gate_up = self.gate_up.take();
                let gate_up = gate_up.ok_or_else(|| self.saver.missing(&path.name()))?;
                self.put_experts::<E>(layer, &of(&gate_up), &of(&values))
            }
        }
    }

    fn put_experts<E: Element>(
        &mut self,
        layer: &str,
        gate_up: &[E],
        down: &[E],
    ) -> Result<(), HfError> {
        let (width, hidden) = (self.config.d_model, self.config.d_hidden_expert);
        let len = width * hidden;
        let experts = gate_up.chunks_exact(2 * len).zip(down.chunks_exact(len));
        for (expert, (gate_up, down)) in self.own.clone().zip(experts) {
            let (all, sides) = (self.config.num_experts, [width, hidden]);
            self.saver
                .write_expert(layer, all, expert, sides, gate_up, down)?;
        }
        Ok(())
    }
}
