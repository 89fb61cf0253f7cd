//! What a rank stores.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};
use burn_pack::Scalar;
use safetensors::Dtype;

use super::error::StateError;
use super::optimizer::{Leaf, Leaves};
use super::shard::{Entry, stored_type};
use crate::module_path::ModulePath;

/// Visits a model and collects this rank's tensors: its experts, one by one, and some of what every
/// rank holds. All ranks see the same sizes and so agree on who stores what.
pub(super) struct Collect {
    path: ModulePath,
    experts: Range<usize>,
    rank: usize,
    /// Bytes of shared parameters that each rank has to store so far.
    shares: Vec<usize>,
    leaves: Leaves,
    pub entries: Vec<Entry>,
    pub error: Option<StateError>,
}

impl Collect {
    pub fn new(experts: Range<usize>, rank: usize, ranks: usize, leaves: Leaves) -> Self {
        Self {
            path: ModulePath::default(),
            experts,
            rank,
            shares: vec![0; ranks],
            leaves,
            entries: Vec::new(),
            error: None,
        }
    }

    /// Whether this rank stores the next shared parameter.
    fn is_own(&mut self, bytes: usize) -> bool {
        let ranks = 0..self.shares.len();
        let owner = ranks.min_by_key(|rank| self.shares[*rank]).unwrap_or(0);
        self.shares[owner] += bytes;
        owner == self.rank
    }

    fn tensor(&mut self, kind: &str, leaf: &str, data: TensorData) -> Result<(), StateError> {
        let dtype = stored_type(data.dtype()).ok_or_else(|| StateError::Unsupported {
            what: format!("{kind}/{}{leaf}", self.path.name()),
            message: format!("type {:?}, allowed: F64, F32, BF16, F16", data.dtype()),
        })?;
        let shape = data.shape().to_vec();
        let bytes = data.into_bytes();
        let len = bytes.len();
        let data = Rc::new(bytes);
        if !self.path.inside_experts() {
            let name = format!("{kind}/{}{leaf}", self.path.name());
            self.push(name, dtype, shape, data, 0..len);
            return Ok(());
        }
        let each = len / self.experts.len().max(1);
        for (at, expert) in self.experts.clone().enumerate() {
            let name = format!("{kind}/{}{leaf}", self.path.expert_name(expert));
            let (shape, range) = (shape[1..].to_vec(), at * each..(at + 1) * each);
            self.push(name, dtype, shape, data.clone(), range);
        }
        Ok(())
    }

    fn scalar(&mut self, leaf: &str, value: Scalar) {
        let (dtype, bytes) = match value {
            Scalar::Int(value) => (Dtype::I64, value.to_le_bytes().to_vec()),
            Scalar::UInt(value) => (Dtype::U64, value.to_le_bytes().to_vec()),
            Scalar::Float(value) => (Dtype::F64, value.to_le_bytes().to_vec()),
            Scalar::Bool(value) => (Dtype::BOOL, vec![u8::from(value)]),
        };
        let len = bytes.len();
        let data = Rc::new(Bytes::from_bytes_vec(bytes));
        let names = match self.path.inside_experts() {
            false => vec![self.path.name()],
            true => self
                .experts
                .clone()
                .map(|expert| self.path.expert_name(expert))
                .collect(),
        };
        for name in names {
            let name = format!("optimizer/{name}{leaf}");
            self.push(name, dtype, Vec::new(), data.clone(), 0..len);
        }
    }

    fn push(
        &mut self,
        name: String,
        dtype: Dtype,
        shape: Vec<usize>,
        data: Rc<Bytes>,
        range: Range<usize>,
    ) {
        self.entries.push(Entry {
            name,
            dtype,
            shape,
            data,
            range,
        });
    }

    fn parameter<const D: usize>(&mut self, param: &Param<Tensor<D>>) -> Result<(), StateError> {
        let value = param.val().inner();
        let shape = value.shape();
        let bytes = shape.num_elements() * value.dtype().size();
        if !self.path.inside_experts() && !self.is_own(bytes) {
            return Ok(());
        }
        self.tensor("model", "", value.into_data())?;
        for (leaf, value) in self.leaves.remove(&param.id).unwrap_or_default() {
            let suffix = format!("/{leaf}");
            match value {
                Leaf::Scalar(value) => self.scalar(&suffix, value),
                Leaf::Tensor(data) if *data.shape() == shape => {
                    self.tensor("optimizer", &suffix, data)?;
                }
                Leaf::Tensor(data) => {
                    return Err(StateError::Unsupported {
                        what: format!("optimizer/{}/{leaf}", self.path.name()),
                        message: format!(
                            "shape {:?}, allowed: that of the parameter, {shape:?}",
                            data.shape()
                        ),
                    });
                }
            }
        }
        Ok(())
    }

    /// Adds values that one rank stores for all.
    pub fn history(&mut self, history: &BTreeMap<String, Vec<f64>>) {
        for (name, values) in history {
            let data = Bytes::from_elems(values.clone());
            let (len, shape) = (data.len(), vec![values.len()]);
            let name = format!("history/{name}");
            self.push(name, Dtype::F64, shape, Rc::new(data), 0..len);
        }
    }

    fn unsupported(&mut self, what: &str) {
        let what = format!("{} ({what})", self.path.name());
        self.error.get_or_insert(StateError::Unsupported {
            what,
            message: "only floating-point parameters are stored".into(),
        });
    }
}

impl ModuleVisitor for Collect {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if self.error.is_none() {
            self.error = self.parameter(param).err();
        }
    }

    fn visit_int<const D: usize>(&mut self, _param: &Param<Tensor<D, Int>>) {
        self.unsupported("integers");
    }

    fn visit_bool<const D: usize>(&mut self, _param: &Param<Tensor<D, Bool>>) {
        self.unsupported("booleans");
    }
}
