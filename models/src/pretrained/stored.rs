//! Which tensors of a model folder hold a parameter of the decoder.

/// Where a parameter's values are stored.
#[derive(Debug, PartialEq)]
pub(super) enum Stored {
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
    /// Gate and up of the experts of a layer, such as `model.layers.3`.
    ExpertsGateUp(String),
    /// Down of a layer's experts.
    ExpertsDown(String),
}

impl Stored {
    /// Of the parameter at `path` in the decoder, in a folder where a tensor `exists` or not.
    pub fn of(path: &[&str], exists: impl Fn(&str) -> bool) -> Option<Self> {
        let (layer, part) = match path {
            ["embedding", "weight"] => {
                return Some(Self::Plain("model.embed_tokens.weight".into()));
            }
            ["norm", "gamma"] => return Some(Self::Plain("model.norm.weight".into())),
            ["head", "weight"] => return Some(Self::Transposed(HEAD.into())),
            ["layers", layer, part @ ..] => (format!("model.layers.{layer}"), part),
            _ => return None,
        };
        // Mixtral and MiniMax-M2 as published; transformers can write `mlp` for all.
        let block = match exists(&format!("{layer}.block_sparse_moe.gate.weight")) {
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
                return attention(&format!("{layer}.self_attn"), part, exists);
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
                Self::GateBias(match exists(&in_block) {
                    true => in_block,
                    false => format!("{block}.gate.e_score_correction_bias"),
                })
            }
            ["feed_forward", "Moe", "experts", "gate_up"] => Self::ExpertsGateUp(layer),
            ["feed_forward", "Moe", "experts", "down"] => Self::ExpertsDown(layer),
            _ => return None,
        })
    }

    /// The tensors of a parameter that is not of experts.
    pub fn names(&self) -> &[String] {
        match self {
            Self::Plain(name)
            | Self::Transposed(name)
            | Self::Gate(name)
            | Self::GateBias(name) => std::slice::from_ref(name),
            Self::GateUp(names) => names,
            Self::ExpertsGateUp(_) | Self::ExpertsDown(_) => &[],
        }
    }
}

/// The last product. Folders of models that use the embedding for it may still have it.
pub(super) const HEAD: &str = "lm_head.weight";

/// The parameters of attention, of either kind.
fn attention(of: &str, part: &[&str], exists: impl Fn(&str) -> bool) -> Option<Stored> {
    let compressed = exists(&format!("{of}.q_a_proj.weight"));
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
