//! What a rank stores.
//!
//! All ranks see the same sizes, and so agree on who stores what without a word.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use burn::module::{ModuleVisitor, Param};
use burn::tensor::{Bool, Bytes, Int, Tensor, TensorData};
use burn_moe::comm::Communicator;
use burn_moe::parallel::Mesh;
use burn_pack::Scalar;
use safetensors::Dtype;

use super::error::StateError;
use super::optimizer::{Leaf, Leaves};
use super::shard::{Entry, stored_type};
use crate::module_path::ModulePath;

/// Visits a model and collects this rank's tensors: some of the experts that live on it, one by one (all, unless
/// others hold them too), and some of what every rank holds.
pub(super) struct Collect {
    path: ModulePath,
    experts: Range<usize>,
    /// Who stores what all ranks hold.
    shared: Shares,
    /// Who stores what the ranks that hold the same experts hold.
    replicated: Shares,
    leaves: Leaves,
    pub entries: Vec<Entry>,
    pub error: Option<StateError>,
}

impl Collect {
    pub fn new(mesh: &Mesh, experts: Range<usize>, leaves: Leaves) -> Self {
        Self {
            path: ModulePath::default(),
            experts,
            shared: Shares::among(mesh.world().as_ref()),
            replicated: Shares::among(mesh.dp().as_ref()),
            leaves,
            entries: Vec::new(),
            error: None,
        }
    }

    /// `stored` are the experts whose part of the tensor is stored here.
    fn tensor(
        &mut self,
        kind: &str,
        leaf: &str,
        data: TensorData,
        stored: &[usize],
    ) -> Result<(), StateError> {
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
        for expert in stored {
            let name = format!("{kind}/{}{leaf}", self.path.expert_name(*expert));
            let at = (expert - self.experts.start) * each;
            let (shape, range) = (shape[1..].to_vec(), at..at + each);
            self.push(name, dtype, shape, data.clone(), range);
        }
        Ok(())
    }

    fn scalar(&mut self, leaf: &str, value: Scalar, stored: &[usize]) {
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
            true => {
                let name = |expert: &usize| self.path.expert_name(*expert);
                stored.iter().map(name).collect()
            }
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
        let mut stored = Vec::new();
        let own = match self.path.inside_experts() {
            false => self.shared.is_own(bytes),
            true => {
                let each = bytes / self.experts.len().max(1);
                let experts = self.experts.clone();
                stored.extend(experts.filter(|_| self.replicated.is_own(each)));
                !stored.is_empty()
            }
        };
        if !own {
            return Ok(());
        }
        self.tensor("model", "", value.into_data(), &stored)?;
        for (leaf, value) in self.leaves.remove(&param.id).unwrap_or_default() {
            let suffix = format!("/{leaf}");
            match value {
                Leaf::Scalar(value) => self.scalar(&suffix, value, &stored),
                Leaf::Tensor(data) if *data.shape() == shape => {
                    self.tensor("optimizer", &suffix, data, &stored)?;
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

/// How much each of the ranks that hold the same things has to store so far.
struct Shares {
    rank: usize,
    bytes: Vec<usize>,
}

impl Shares {
    fn among(comm: &dyn Communicator) -> Self {
        Self {
            rank: comm.rank(),
            bytes: vec![0; comm.size()],
        }
    }

    /// Whether this rank stores the next of these things, which is what the one with the least does.
    fn is_own(&mut self, bytes: usize) -> bool {
        let ranks = 0..self.bytes.len();
        let owner = ranks.min_by_key(|rank| self.bytes[*rank]).unwrap_or(0);
        self.bytes[owner] += bytes;
        owner == self.rank
    }
}
