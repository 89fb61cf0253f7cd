//! What a rank takes from the files.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::ops::Range;
use std::path::Path;

use burn::module::{ModuleMapper, Param, ParamId};
use burn::tensor::{Bytes, DType, Shape, Tensor, TensorData};
use burn_pack::Scalar;
use bytemuck::Pod;
use safetensors::Dtype;
use safetensors::tensor::TensorView;

use super::error::StateError;
use super::load::Tensors;
use super::optimizer::{Leaf, RecordBuilder};
use super::shard::burn_type;
use crate::module_path::ModulePath;

/// Replaces each parameter by what was saved, and puts the optimizer's record together.
pub(super) struct Fill<'a> {
    tensors: &'a Tensors<'a>,
    experts: Range<usize>,
    num_experts: usize,
    /// Leaves of the optimizer's state, by parameter or expert.
    leaves: HashMap<&'a str, Vec<&'a str>>,
    path: ModulePath,
    /// The path as the optimizer spells it.
    names: Vec<String>,
    used: HashSet<String>,
    record: RecordBuilder,
    error: Option<StateError>,
}

/// Values by name, one for each step done.
type History = BTreeMap<String, Vec<f64>>;

impl<'a> Fill<'a> {
    pub fn new(tensors: &'a Tensors<'a>, experts: Range<usize>, num_experts: usize) -> Self {
        let mut leaves: HashMap<_, Vec<_>> = HashMap::new();
        for name in tensors.names() {
            let of_optimizer = name.strip_prefix("optimizer/");
            if let Some((path, leaf)) = of_optimizer.and_then(|name| name.rsplit_once('/')) {
                leaves.entry(path).or_default().push(leaf);
            }
        }
        for of in leaves.values_mut() {
            of.sort_unstable();
        }
        Self {
            tensors,
            experts,
            num_experts,
            leaves,
            path: ModulePath::default(),
            names: Vec::new(),
            used: HashSet::new(),
            record: RecordBuilder::default(),
            error: None,
        }
    }

    /// The history and the record, after the visit.
    pub fn finish(mut self) -> Result<(History, RecordBuilder), StateError> {
        if let Some(error) = self.error {
            return Err(error);
        }
        let mut history = History::new();
        for name in self.tensors.names() {
            if let Some(of) = name.strip_prefix("history/") {
                history.insert(of.into(), self.values(name)?);
            }
        }
        let mut superfluous = self
            .tensors
            .names()
            .filter(|name| !self.used.contains(*name));
        match superfluous.next() {
            Some(name) => Err(self.fault(name, "the model has no such parameter")),
            None => Ok((history, self.record)),
        }
    }

    fn values(&mut self, name: &str) -> Result<Vec<f64>, StateError> {
        let (view, _) = self.find(name)?;
        if view.dtype() != Dtype::F64 || view.shape().len() != 1 {
            return Err(self.fault(name, "not a list of F64"));
        }
        Ok(bytemuck::pod_collect_to_vec(view.data()))
    }

    /// The value of a parameter of this shape, and the optimizer's state of it.
    fn parameter(
        &mut self,
        shape: &Shape,
    ) -> Result<(TensorData, Vec<(String, Leaf)>), StateError> {
        if !self.path.inside_experts() {
            let name = self.path.name();
            let value = self.tensor(&[format!("model/{name}")], shape)?;
            return Ok((value, self.state(&[name], shape)?));
        }
        // Experts that live elsewhere must be there, too.
        for expert in 0..self.num_experts {
            let name = self.path.expert_name(expert);
            self.find(&format!("model/{name}"))?;
            for leaf in self.leaves.get(name.as_str()).cloned().unwrap_or_default() {
                self.find(&format!("optimizer/{name}/{leaf}"))?;
            }
        }
        let own = self
            .experts
            .clone()
            .map(|expert| self.path.expert_name(expert));
        let own: Vec<String> = own.collect();
        let names: Vec<String> = own.iter().map(|name| format!("model/{name}")).collect();
        let value = self.tensor(&names, shape)?;
        Ok((value, self.state(&own, shape)?))
    }

    /// The optimizer's state of a parameter that is stored under these names.
    fn state(
        &mut self,
        names: &[String],
        shape: &Shape,
    ) -> Result<Vec<(String, Leaf)>, StateError> {
        let leaves = |name: &String| self.leaves.get(name.as_str()).cloned().unwrap_or_default();
        let first = leaves(&names[0]);
        if let Some(other) = names.iter().find(|name| leaves(name) != first) {
            let (name, of) = (format!("optimizer/{other}"), leaves(other));
            return Err(self.fault(
                &name,
                &format!("has {of:?} where {} has {first:?}", names[0]),
            ));
        }
        let mut state = Vec::with_capacity(first.len());
        for leaf in first {
            let names = names.iter().map(|name| format!("optimizer/{name}/{leaf}"));
            let names: Vec<String> = names.collect();
            let (view, _) = self.find(&names[0])?;
            let value = match view.shape().is_empty() {
                true => Leaf::Scalar(self.scalar(&names)?),
                false => Leaf::Tensor(self.tensor(&names, shape)?),
            };
            state.push((leaf.into(), value));
        }
        Ok(state)
    }

    /// A scalar that all of these tensors hold.
    fn scalar(&mut self, names: &[String]) -> Result<Scalar, StateError> {
        let mut value = None;
        for name in names {
            let (view, _) = self.find(name)?;
            let eight = || <[u8; 8]>::try_from(view.data()).ok();
            let found = match (view.dtype(), view.data()) {
                (Dtype::I64, _) => eight().map(|bytes| i64::from_le_bytes(bytes).into()),
                (Dtype::U64, _) => eight().map(|bytes| u64::from_le_bytes(bytes).into()),
                (Dtype::F64, _) => eight().map(|bytes| f64::from_le_bytes(bytes).into()),
                (Dtype::BOOL, [byte]) => Some(Scalar::Bool(*byte != 0)),
                _ => None,
            };
            let found: Scalar = found.ok_or_else(|| {
                self.fault(
                    name,
                    &format!("{:?} {:?}, not a scalar", view.dtype(), view.shape()),
                )
            })?;
            match value {
                None => value = Some(found),
                Some(value) if value == found => {}
                // Only experts that have not been trained together can differ.
                Some(value) => {
                    let message = format!("{found:?} where {} is {value:?}", names[0]);
                    return Err(self.fault(name, &message));
                }
            }
        }
        value.ok_or_else(|| self.fault("optimizer/", "no expert"))
    }

    /// A tensor of this shape, stored as a whole or by slices of the first dimension.
    fn tensor(&mut self, names: &[String], shape: &Shape) -> Result<TensorData, StateError> {
        let slice = match self.path.inside_experts() {
            true => &shape[1..],
            false => &shape[..],
        };
        let mut parts = Vec::with_capacity(names.len());
        let mut dtype = None;
        for name in names {
            let (view, path) = self.find(name)?;
            let of = burn_type(view.dtype()).filter(|of| *dtype.get_or_insert(*of) == *of);
            if of.is_none() || view.shape() != slice {
                return Err(StateError::Tensor {
                    path: path.into(),
                    tensor: name.clone(),
                    message: format!(
                        "{:?} {:?} where {:?} {slice:?} belongs",
                        view.dtype(),
                        view.shape(),
                        dtype.unwrap_or(DType::F32)
                    ),
                });
            }
            parts.push(view.data());
        }
        let bytes = match dtype {
            Some(DType::F64) => join::<f64>(&parts),
            Some(DType::F32) => join::<f32>(&parts),
            _ => join::<u16>(&parts),
        };
        let data = TensorData::try_from_bytes(bytes, shape.clone(), dtype.unwrap_or(DType::F32));
        data.map_err(|error| self.fault(&names[0], &error.to_string()))
    }

    fn find(&mut self, name: &str) -> Result<(TensorView<'a>, &'a Path), StateError> {
        let Some((view, path)) = self.tensors.get(name) else {
            return Err(self.fault(name, "missing"));
        };
        self.used.insert(name.into());
        Ok((view.clone(), path))
    }

    fn fault(&self, tensor: &str, message: &str) -> StateError {
        let path = match self.tensors.get(tensor) {
            Some((_, path)) => path,
            None => self.tensors.folder,
        };
        StateError::Tensor {
            path: path.into(),
            tensor: tensor.into(),
            message: message.into(),
        }
    }
}

/// The parts one behind the other, aligned for their type.
fn join<E: Pod + Send + Sync>(parts: &[&[u8]]) -> Bytes {
    let bytes: usize = parts.iter().map(|part| part.len()).sum();
    let mut values = vec![E::zeroed(); bytes / size_of::<E>()];
    let mut rest: &mut [u8] = bytemuck::cast_slice_mut(&mut values);
    for part in parts {
        let (own, behind) = rest.split_at_mut(part.len());
        own.copy_from_slice(part);
        rest = behind;
    }
    Bytes::from_elems(values)
}

impl ModuleMapper for Fill<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
        self.names.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
        self.names.pop();
    }

    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        if self.error.is_some() {
            return param;
        }
        let (value, state) = match self.parameter(&param.lazy_shape()) {
            Ok(parts) => parts,
            Err(error) => {
                self.error = Some(error);
                return param;
            }
        };
        let id: ParamId = param.id;
        if !state.is_empty() {
            self.record.add(id, self.names.join("."), D, state);
        }
        let (device, dtype) = (param.lazy_device(), value.dtype());
        let tensor = Tensor::<D>::from_data(value, (&device, dtype));
        // Keeps what the parameter was never drawn for.
        param.transform_for_load(tensor, id)
    }
}
