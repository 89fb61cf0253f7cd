//! An optimizer's state, in and out of Burn's record. The record's only open form is burnpack, whose
//! tensors are called `ID.LEAF`; ids of parameters are drawn anew in every process.

use std::collections::{BTreeMap, HashMap};

use burn::module::ParamId;
use burn::optim::{ModuleOptimizer, OptimizerRecord};
use burn::tensor::{Bytes, TensorData};
use burn_pack::{Reader, Scalar, Tensor, Writer};

use super::error::StateError;

/// The scalar under which Burn keeps the number of a parameter's dimensions. It follows from the
/// parameter.
const RANK: &str = "__rank";

/// A part of one parameter's state.
pub(super) enum Leaf {
    Tensor(TensorData),
    Scalar(Scalar),
}

/// Leaves by the id of their parameter, in order of name.
pub(super) type Leaves = HashMap<ParamId, BTreeMap<String, Leaf>>;

/// What the optimizer keeps of every parameter that it has moved.
pub(super) fn leaves(optimizer: &ModuleOptimizer) -> Result<Leaves, StateError> {
    let bytes = optimizer.to_record().into_bytes().map_err(unsupported)?;
    let reader = Reader::from_bytes(bytes).map_err(unsupported)?;
    let mut leaves = Leaves::new();
    for (name, value) in reader.scalars() {
        let (id, leaf) = split(name)?;
        if leaf != RANK {
            let of = leaves.entry(id).or_default();
            of.insert(leaf.into(), Leaf::Scalar(*value));
        }
    }
    for tensor in reader.into_tensors().map_err(unsupported)? {
        let (name, dtype, shape, _, bytes) = tensor.into_parts().map_err(unsupported)?;
        let (id, leaf) = split(&name)?;
        let data = TensorData::try_from_bytes(bytes, shape, dtype).map_err(unsupported)?;
        let of = leaves.entry(id).or_default();
        of.insert(leaf.into(), Leaf::Tensor(data));
    }
    Ok(leaves)
}

/// A record that is put together parameter by parameter.
#[derive(Default)]
pub(super) struct RecordBuilder {
    tensors: Vec<Tensor>,
    scalars: BTreeMap<String, Scalar>,
    paths: BTreeMap<String, String>,
}

impl RecordBuilder {
    /// Adds the state of a parameter of `rank` dimensions, at `path` as the optimizer spells it.
    pub fn add(&mut self, id: ParamId, path: String, rank: usize, leaves: Vec<(String, Leaf)>) {
        let prefix = id.val().to_string();
        for (leaf, value) in leaves {
            let name = format!("{prefix}.{leaf}");
            match value {
                Leaf::Scalar(value) => {
                    self.scalars.insert(name, value);
                }
                Leaf::Tensor(data) => {
                    let (bytes, shape, dtype) = data.into_parts();
                    let tensor = Tensor::new(name, dtype, shape, Some(id.val()), bytes);
                    self.tensors.push(tensor);
                }
            }
        }
        self.scalars.insert(format!("{prefix}.{RANK}"), rank.into());
        self.paths.insert(prefix, path);
    }

    /// Leaves so far, with one scalar for each parameter's dimensions.
    pub fn count(&self) -> usize {
        self.tensors.len() + self.scalars.len()
    }

    pub fn build(self) -> Result<OptimizerRecord, StateError> {
        let mut writer = Writer::new(self.tensors);
        for (name, value) in &self.scalars {
            writer = writer.with_scalar(name, *value);
        }
        for (id, path) in &self.paths {
            writer = writer.with_metadata(id, path);
        }
        let bytes: Bytes = writer.into_bytes().map_err(unsupported)?;
        OptimizerRecord::from_bytes(bytes).map_err(unsupported)
    }
}

/// The leaves of an optimizer as [`RecordBuilder::count`] counts them.
pub(super) fn count(optimizer: &ModuleOptimizer) -> Result<usize, StateError> {
    let bytes = optimizer.to_record().into_bytes().map_err(unsupported)?;
    let reader = Reader::from_bytes(bytes).map_err(unsupported)?;
    Ok(reader.tensor_names().len() + reader.scalars().len())
}

fn split(name: &str) -> Result<(ParamId, &str), StateError> {
    let parts = name.split_once('.');
    let parts = parts.and_then(|(id, leaf)| Some((id.parse::<u64>().ok()?, leaf)));
    let (id, leaf) = parts.ok_or_else(|| unsupported(format!("{name} names no parameter")))?;
    Ok((id.into(), leaf))
}

fn unsupported(error: impl std::fmt::Display) -> StateError {
    StateError::Unsupported {
        what: "the optimizer's state".into(),
        message: error.to_string(),
    }
}
