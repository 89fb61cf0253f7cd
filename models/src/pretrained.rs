//! Models from and to folders of Hugging Face's: `config.json` and safetensors.

mod save;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_moe::comm::CommError;
use burn_moe::layer::ConfigError;
use burn_moe::parallel::ExpertParallel;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::Arc;

pub use save::save;

use crate::hf::{Experts, Folder, HfError, ignorable};
use crate::module_path::ModulePath;
use crate::{Decoder, ModelConfig, ModelError};

/// What can go wrong with a model folder.
#[derive(Debug, thiserror::Error)]
pub enum PretrainedError {
    /// A file or tensor is not what it should be.
    #[error(transparent)]
    Folder(#[from] HfError),
    /// `config.json` describes no model that is known here.
    #[error("{}: {source}", path.display())]
    Config {
        /// The file.
        path: PathBuf,
        /// Which field, and what is allowed.
        source: ConfigError,
    },
    /// The model cannot be built.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// A rank was lost or too late while saving.
    #[error(transparent)]
    Comm(#[from] CommError),
}

/// The model that the folder's `config.json` describes.
///
/// # Errors
///
/// Names the first field whose value is not allowed.
pub fn read_config(folder: &Folder) -> Result<ModelConfig, PretrainedError> {
    ModelConfig::from_hugging_face(folder.config_json()).map_err(|source| PretrainedError::Config {
        path: folder.path().join("config.json"),
        source,
    })
}

/// This rank's part of the model in `folder`: of the experts only its own are read. Layers for
/// multi-token prediction are left aside.
///
/// # Errors
///
/// When a tensor is missing, has no place in the model or has another shape, a router's values are
/// not finite, or the ranks do not divide the experts.
pub fn load(
    config: &ModelConfig,
    ep: &Arc<ExpertParallel>,
    folder: &Folder,
    device: &Device,
) -> Result<Decoder, PretrainedError> {
    let decoder = config.init_lazy(ep, 0, device)?;
    let mut names = Names {
        path: ModulePath::default(),
        config,
        folder,
        names: Vec::new(),
        error: None,
    };
    decoder.visit(&mut names);
    if let Some(error) = names.error {
        return Err(error.into());
    }
    let (layers, ahead) = (config.num_layers, config.num_mtp_layers);
    folder.check_names(names.names, |name| {
        let of_rope = ignorable(name, usize::MAX);
        of_rope || (ignorable(name, layers) && !ignorable(name, layers + ahead))
    })?;
    let own = ep
        .local_experts(config.num_experts)
        .map_err(ModelError::from)?;
    let mut fill = Fill {
        path: ModulePath::default(),
        config,
        folder,
        own,
        down: None,
        error: None,
    };
    let decoder = decoder.map(&mut fill);
    match fill.error {
        Some(error) => Err(error.into()),
        None => Ok(decoder),
    }
}

/// Where a parameter's values are stored.
#[derive(Debug, PartialEq)]
enum Stored {
    /// As they are.
    Plain(String),
    /// A matrix `[outputs, inputs]`.
    Transposed(String),
    /// Gate and up of a feed-forward, each `[outputs, inputs]`.
    GateUp([String; 2]),
    /// A router's weight, `[experts, inputs]`.
    Gate(String),
    /// A router's bias.
    GateBias(String),
    /// Gate and up of a layer's experts.
    ExpertsGateUp(String),
    /// Down of a layer's experts.
    ExpertsDown,
}

impl Stored {
    /// Of the parameter at `path` in the decoder.
    fn of(path: &[&str], folder: &Folder) -> Option<Self> {
        let (layer, part) = match path {
            ["embedding", "weight"] => {
                return Some(Self::Plain("model.embed_tokens.weight".into()));
            }
            ["norm", "gamma"] => return Some(Self::Plain("model.norm.weight".into())),
            ["head", "weight"] => return Some(Self::Transposed("lm_head.weight".into())),
            ["layers", layer, part @ ..] => (format!("model.layers.{layer}"), part),
            _ => return None,
        };
        // Mixtral and MiniMax-M2 as published; transformers can write `mlp` for all.
        let block = match folder.contains(&format!("{layer}.block_sparse_moe.gate.weight")) {
            true => format!("{layer}.block_sparse_moe"),
            false => format!("{layer}.mlp"),
        };
        let gate_up = |of: String| {
            Self::GateUp(["gate", "up"].map(|part| format!("{of}.{part}_proj.weight")))
        };
        Some(match part {
            ["attention_norm", "gamma"] => Self::Plain(format!("{layer}.input_layernorm.weight")),
            ["feed_forward_norm", "gamma"] => {
                Self::Plain(format!("{layer}.post_attention_layernorm.weight"))
            }
            ["attention", part @ ..] => {
                return attention(&format!("{layer}.self_attn"), part, folder);
            }
            ["feed_forward", "Dense", "gate_up"] => gate_up(format!("{layer}.mlp")),
            ["feed_forward", "Dense", "down"] => {
                Self::Transposed(format!("{layer}.mlp.down_proj.weight"))
            }
            ["feed_forward", "Moe", "shared", "gate_up"] => {
                gate_up(format!("{block}.shared_experts"))
            }
            ["feed_forward", "Moe", "shared", "down"] => {
                Self::Transposed(format!("{block}.shared_experts.down_proj.weight"))
            }
            ["feed_forward", "Moe", "router", "gate"] => Self::Gate(format!("{block}.gate.weight")),
            ["feed_forward", "Moe", "router", "bias"] => {
                let in_block = format!("{block}.e_score_correction_bias");
                Self::GateBias(match folder.contains(&in_block) {
                    true => in_block,
                    false => format!("{block}.gate.e_score_correction_bias"),
                })
            }
            ["feed_forward", "Moe", "experts", "gate_up"] => Self::ExpertsGateUp(layer),
            ["feed_forward", "Moe", "experts", "down"] => Self::ExpertsDown,
            _ => return None,
        })
    }

    /// The names of the tensors.
    fn names(self, config: &ModelConfig, folder: &Folder) -> Result<Vec<String>, HfError> {
        Ok(match self {
            Self::Plain(name)
            | Self::Transposed(name)
            | Self::Gate(name)
            | Self::GateBias(name) => vec![name],
            Self::GateUp(names) => names.into(),
            Self::ExpertsGateUp(layer) => find_experts(folder, &layer, config)?.names(),
            Self::ExpertsDown => Vec::new(),
        })
    }
}

/// The parameters of attention, of either kind.
fn attention(of: &str, part: &[&str], folder: &Folder) -> Option<Stored> {
    let compressed = folder.contains(&format!("{of}.q_a_proj.weight"));
    let (name, field) = match part {
        [name, field] => (
            match *name {
                "q_down" => "q_a_proj",
                "q_up" if compressed => "q_b_proj",
                "q_up" | "query" => "q_proj",
                "kv_down" => "kv_a_proj_with_mqa",
                "kv_norm" => "kv_a_layernorm",
                "kv_up" => "kv_b_proj",
                "q_norm" if compressed => "q_a_layernorm",
                "q_norm" => "q_norm",
                "k_norm" => "k_norm",
                "key" => "k_proj",
                "value" => "v_proj",
                "output" => "o_proj",
                _ => return None,
            },
            *field,
        ),
        ["indexer", name, field] => (
            match *name {
                "query" => "indexer.wq_b",
                "key" => "indexer.wk",
                "k_norm" => "indexer.k_norm",
                "weights" => "indexer.weights_proj",
                _ => return None,
            },
            *field,
        ),
        _ => return None,
    };
    Some(match field {
        "weight" => Stored::Transposed(format!("{of}.{name}.weight")),
        "gamma" => Stored::Plain(format!("{of}.{name}.weight")),
        "bias" | "beta" => Stored::Plain(format!("{of}.{name}.bias")),
        _ => return None,
    })
}

fn find_experts<'a>(
    folder: &'a Folder,
    layer: &str,
    config: &ModelConfig,
) -> Result<Experts<'a>, HfError> {
    let (width, hidden) = (config.d_model, config.d_hidden_expert);
    Experts::find(folder, layer, config.num_experts, width, hidden)
}

/// Collects the names of all tensors of the model, other ranks' experts included.
struct Names<'a> {
    path: ModulePath,
    config: &'a ModelConfig,
    folder: &'a Folder,
    names: Vec<String>,
    error: Option<HfError>,
}

impl ModuleVisitor for Names<'_> {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.enter(name, container);
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.exit(container);
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        let stored = stored(&self.path, self.folder);
        match stored.and_then(|stored| stored.names(self.config, self.folder)) {
            Ok(names) => self.names.extend(names),
            Err(error) => {
                self.error.get_or_insert(error);
            }
        }
    }
}

/// Where the parameter at `path` is stored; one that has no place there is missing under its own name.
fn stored(path: &ModulePath, folder: &Folder) -> Result<Stored, HfError> {
    Stored::of(&path.parts(), folder).ok_or_else(|| HfError::Missing {
        file: folder.path().into(),
        tensor: path.name(),
    })
}

/// Replaces each parameter by what the folder has for it.
struct Fill<'a> {
    path: ModulePath,
    config: &'a ModelConfig,
    folder: &'a Folder,
    own: Range<usize>,
    /// Down of the experts whose gate and up have been read.
    down: Option<Vec<f32>>,
    error: Option<HfError>,
}

impl Fill<'_> {
    /// The values of a parameter of this shape, as Burn has them.
    fn values(&mut self, shape: &[usize]) -> Result<Vec<f32>, HfError> {
        // Stored matrices are [outputs, inputs].
        let (inputs, outputs) = match shape {
            [inputs, outputs] => (*inputs, *outputs),
            _ => (0, 0),
        };
        match stored(&self.path, self.folder)? {
            Stored::Plain(name) => self.folder.read_f32(&name, shape),
            Stored::Transposed(name) => self.folder.read_transposed(&name, [outputs, inputs]),
            Stored::GateUp([gate, up]) => {
                let names = [gate.as_str(), up.as_str()];
                self.folder.read_side_by_side(&names, [outputs / 2, inputs])
            }
            Stored::Gate(name) => {
                let rows = self.folder.read_finite_f32(&name, &[outputs, inputs])?;
                let by_input = (0..inputs).flat_map(|i| (0..outputs).map(move |o| (i, o)));
                Ok(by_input.map(|(i, o)| rows[o * inputs + i]).collect())
            }
            Stored::GateBias(name) => self.folder.read_finite_f32(&name, shape),
            Stored::ExpertsGateUp(layer) => {
                let experts = find_experts(self.folder, &layer, self.config)?;
                let (gate_up, down) = experts.read(self.own.clone())?;
                self.down = Some(down);
                Ok(gate_up)
            }
            Stored::ExpertsDown => self.down.take().ok_or_else(|| HfError::Missing {
                file: self.folder.path().into(),
                tensor: self.path.name(),
            }),
        }
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
        let values = match self.values(&shape) {
            Ok(values) => values,
            Err(error) => {
                self.error = Some(error);
                return param;
            }
        };
        let device = param.lazy_device();
        // Routers stay in f32 whatever the type of the model.
        let of_router = self.path.parts().contains(&"router");
        let dtype = match device.settings().float_dtype.into() {
            DType::F64 => DType::F64,
            _ if of_router => DType::F32,
            dtype => dtype,
        };
        let tensor = Tensor::<D>::from_data(TensorData::new(values, shape), (&device, dtype));
        let id: ParamId = param.id;
        // Keeps what the parameter was never drawn for.
        param.transform_for_load(tensor, id)
    }
}
