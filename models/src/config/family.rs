//! From Hugging Face's `config.json` to a [`ModelConfig`], one family of models after another.
//!
//! What a file leaves out has the value that the family's class in `transformers` gives it; what
//! would change the model and is not built here is refused.

use burn_moe::layer::{ConfigError, ScoreFunction};
use serde_json::{Value, json};

use super::ModelConfig;
use super::fields::{Fields, refuse};
use crate::attention::{AttentionConfig, GqaConfig, IndexerConfig, MlaConfig, QkNorm, RopePairs};

/// The values of `model_type` that are known.
const MODEL_TYPES: &str =
    "deepseek_v3, deepseek_v32, glm4_moe, glm_moe_dsa, minimax_m2, mixtral, qwen3_moe";

/// The norms of MLA's compressed vectors do not follow `rms_norm_eps` in `transformers`.
const LATENT_NORM_EPS: f64 = 1e-6;

impl ModelConfig {
    /// The model that a `config.json` of Hugging Face describes, with `model_type` one of
    /// `deepseek_v3`, `deepseek_v32`, `glm4_moe`, `glm_moe_dsa`, `minimax_m2`, `mixtral` and
    /// `qwen3_moe`.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn from_hugging_face(json: &Value) -> Result<Self, ConfigError> {
        let fields = Fields::new(json)?;
        let model_type = fields.get("model_type").unwrap_or(&Value::Null);
        let config = match model_type.as_str() {
            Some("deepseek_v3") => deepseek_v3(&fields),
            Some("deepseek_v32") => deepseek_v32(&fields),
            Some("glm4_moe") => glm4_moe(&fields),
            Some("glm_moe_dsa") => glm_moe_dsa(&fields),
            Some("minimax_m2") => minimax_m2(&fields),
            Some("mixtral") => mixtral(&fields),
            Some("qwen3_moe") => qwen3_moe(&fields),
            _ => Err(refuse("model_type", model_type, MODEL_TYPES)),
        }?;
        config.validate()?;
        Ok(config)
    }
}

/// What all families spell alike, as a model with softmax routing and no dense layers.
fn common(
    fields: &Fields<'_>,
    attention: AttentionConfig,
    num_experts: usize,
    d_hidden_expert: usize,
    rms_norm_eps: f64,
) -> Result<ModelConfig, ConfigError> {
    fields.only("hidden_act", json!("silu"))?;
    fields.only("mlp_bias", json!(false))?;
    let config = ModelConfig {
        vocab_size: fields.count("vocab_size")?,
        d_model: fields.count("hidden_size")?,
        num_layers: fields.count("num_hidden_layers")?,
        num_dense_layers: 0,
        other_dense_layers: Vec::new(),
        num_mtp_layers: 0,
        attention,
        max_sequence_length: fields.count("max_position_embeddings")?,
        d_hidden_dense: fields.count("intermediate_size")?,
        d_hidden_expert,
        num_experts,
        top_k: fields.count("num_experts_per_tok")?,
        n_group: 1,
        topk_group: 1,
        num_shared_experts: 0,
        score_function: ScoreFunction::Softmax,
        norm_topk_prob: true,
        routed_scaling_factor: 1.0,
        selection_bias: false,
        rms_norm_eps: fields.number_or("rms_norm_eps", rms_norm_eps)?,
        tied_embeddings: fields.flag_or("tie_word_embeddings", false)?,
    };
    ConfigError::check(
        config.num_layers <= 4096,
        "num_hidden_layers",
        config.num_layers,
        "at most 4096",
    )?;
    Ok(config)
}

/// The routing and layers of DeepSeek-V3, which GLM shares. `scale` is the default of
/// `routed_scaling_factor`, `groups` of `n_group` and `topk_group`, `dense` of
/// `first_k_dense_replace`.
fn deepseek_routing(
    fields: &Fields<'_>,
    attention: AttentionConfig,
    rms_norm_eps: f64,
    scale: f64,
    groups: [usize; 2],
    dense: usize,
) -> Result<ModelConfig, ConfigError> {
    // Files that transformers has saved leave these two out.
    fields.only("scoring_func", json!("sigmoid"))?;
    fields.only("topk_method", json!("noaux_tc"))?;
    fields.only("moe_layer_freq", json!(1))?;
    let experts = fields.count("n_routed_experts")?;
    let width = fields.count("moe_intermediate_size")?;
    let config = common(fields, attention, experts, width, rms_norm_eps)?;
    let num_dense_layers = fields
        .count_or("first_k_dense_replace", dense)?
        .min(config.num_layers);
    let kinds: Vec<&str> = (0..config.num_layers)
        .map(|layer| {
            if layer < num_dense_layers {
                "dense"
            } else {
                "sparse"
            }
        })
        .collect();
    fields.only("mlp_layer_types", json!(kinds))?;
    let mtp = match fields.get("num_nextn_predict_layers") {
        Some(_) => "num_nextn_predict_layers",
        None => "num_mtp_layers",
    };
    Ok(ModelConfig {
        num_dense_layers,
        num_mtp_layers: fields.count_or(mtp, 0)?,
        n_group: fields.count_or("n_group", groups[0])?,
        topk_group: fields.count_or("topk_group", groups[1])?,
        num_shared_experts: fields.count_or("n_shared_experts", 1)?,
        score_function: ScoreFunction::Sigmoid,
        norm_topk_prob: fields.flag_or("norm_topk_prob", true)?,
        routed_scaling_factor: fields.number_or("routed_scaling_factor", scale)?,
        selection_bias: true,
        ..config
    })
}

fn mla(fields: &Fields<'_>) -> Result<MlaConfig, ConfigError> {
    let pairs = pairs(fields, "rope_interleave", true)?;
    Ok(MlaConfig {
        num_heads: fields.count("num_attention_heads")?,
        q_lora_rank: match fields.get("q_lora_rank") {
            Some(_) => Some(fields.count("q_lora_rank")?),
            None => None,
        },
        kv_lora_rank: fields.count("kv_lora_rank")?,
        qk_nope_head_dim: fields.count("qk_nope_head_dim")?,
        qk_rope_head_dim: fields.count("qk_rope_head_dim")?,
        v_head_dim: fields.count("v_head_dim")?,
        rope: fields.rope(pairs, 10_000.0)?,
        latent_norm_eps: LATENT_NORM_EPS,
        bias: fields.flag_or("attention_bias", false)?,
        indexer: None,
    })
}

fn pairs(
    fields: &Fields<'_>,
    field: &'static str,
    interleaved: bool,
) -> Result<RopePairs, ConfigError> {
    Ok(match fields.flag_or(field, interleaved)? {
        true => RopePairs::Interleaved,
        false => RopePairs::HalfSplit,
    })
}

fn deepseek_v3(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let attention = AttentionConfig::Mla(mla(fields)?);
    deepseek_routing(fields, attention, 1e-6, 2.5, [8, 4], 3)
}

fn deepseek_v32(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let attention = indexed(fields, 64, false, Vec::new())?;
    deepseek_routing(fields, attention, 1e-6, 2.5, [8, 4], 3)
}

fn glm_moe_dsa(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let attention = indexed(fields, 32, true, shared_indexers(fields)?)?;
    deepseek_routing(fields, attention, 1e-5, 2.5, [1, 1], 3)
}

/// MLA with a sparse indexer.
fn indexed(
    fields: &Fields<'_>,
    num_heads: usize,
    interleaved: bool,
    shared_layers: Vec<usize>,
) -> Result<AttentionConfig, ConfigError> {
    let indexer = IndexerConfig {
        num_heads: fields.count_or("index_n_heads", num_heads)?,
        head_dim: fields.count_or("index_head_dim", 128)?,
        top_k: fields.count_or("index_topk", 2048)?,
        pairs: pairs(fields, "indexer_rope_interleave", interleaved)?,
        shared_layers,
    };
    Ok(AttentionConfig::Mla(MlaConfig {
        indexer: Some(indexer),
        ..mla(fields)?
    }))
}

/// Layers that use the choice of the last indexer before them, in each of the three spellings.
fn shared_indexers(fields: &Fields<'_>) -> Result<Vec<usize>, ConfigError> {
    let layers = fields.count("num_hidden_layers")?;
    let shared: Vec<bool> = if let Some(value) = fields.get("indexer_types") {
        let types = value.as_array().map(Vec::as_slice).unwrap_or_default();
        let known: Option<Vec<bool>> = types
            .iter()
            .map(|kind| match kind.as_str() {
                Some("full") => Some(false),
                Some("shared") => Some(true),
                _ => None,
            })
            .collect();
        known
            .filter(|types| types.len() == layers)
            .ok_or_else(|| refuse("indexer_types", value, "a full or shared for each layer"))?
    } else if let Some(value) = fields.get("index_topk_pattern") {
        let pattern = value.as_str().unwrap_or_default();
        let known = pattern.len() == layers && pattern.bytes().all(|c| c == b'F' || c == b'S');
        if !known {
            return Err(refuse(
                "index_topk_pattern",
                value,
                "an F or S for each layer",
            ));
        }
        pattern.bytes().map(|c| c == b'S').collect()
    } else {
        let every = fields.count_or("index_topk_freq", 1)?.max(1);
        let offset = fields.count_or("index_skip_topk_offset", 2)?;
        (0..layers.min(4096))
            .map(|layer| !(layer + 1).saturating_sub(offset).is_multiple_of(every))
            .collect()
    };
    Ok((0..shared.len()).filter(|layer| shared[*layer]).collect())
}

/// Grouped-query attention as most families have it: no bias, no norm, whole heads rotated.
fn gqa(fields: &Fields<'_>, theta: f64) -> Result<GqaConfig, ConfigError> {
    let num_heads = fields.count("num_attention_heads")?;
    let head_dim = fields.count_or("head_dim", fields.count("hidden_size")? / num_heads.max(1))?;
    Ok(GqaConfig {
        num_heads,
        num_kv_heads: fields.count_or("num_key_value_heads", num_heads)?,
        head_dim,
        rotary_dim: head_dim,
        rope: fields.rope(RopePairs::HalfSplit, theta)?,
        qk_norm: QkNorm::None,
        qkv_bias: false,
        output_bias: false,
    })
}

fn glm4_moe(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    let gqa = gqa(fields, 10_000.0)?;
    let attention = AttentionConfig::Gqa(GqaConfig {
        rotary_dim: fields.rotary_dim(gqa.head_dim, 0.5)?,
        qk_norm: match fields.flag_or("use_qk_norm", false)? {
            true => QkNorm::PerHead,
            false => QkNorm::None,
        },
        qkv_bias: fields.flag_or("attention_bias", false)?,
        ..gqa
    });
    deepseek_routing(fields, attention, 1e-5, 1.0, [1, 1], 1)
}

fn minimax_m2(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    fields.only("scoring_func", json!("sigmoid"))?;
    fields.only("use_qk_norm", json!(true))?;
    fields.only("qk_norm_type", json!("per_layer"))?;
    fields.only("shared_intermediate_size", json!(0))?;
    if let Some(types) = fields.get("attn_type_list").and_then(Value::as_array) {
        // 0 stands for the linear attention of earlier models.
        fields.only("attn_type_list", json!(vec![1; types.len()]))?;
    }
    let gqa = gqa(fields, 5_000_000.0)?;
    let attention = AttentionConfig::Gqa(GqaConfig {
        rotary_dim: match fields.get("rotary_dim") {
            Some(_) => fields.count("rotary_dim")?,
            None => fields.rotary_dim(gqa.head_dim, 1.0)?,
        },
        qk_norm: QkNorm::AllHeads,
        ..gqa
    });
    let experts = fields.count("num_local_experts")?;
    let width = fields.count("intermediate_size")?;
    Ok(ModelConfig {
        score_function: ScoreFunction::Sigmoid,
        selection_bias: fields.flag_or("use_routing_bias", true)?,
        ..common(fields, attention, experts, width, 1e-6)?
    })
}

fn qwen3_moe(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    fields.only("scoring_func", json!("softmax"))?;
    fields.only("use_sliding_window", json!(false))?;
    fields.only("partial_rotary_factor", json!(1.0))?;
    let gqa = gqa(fields, 10_000.0)?;
    let bias = fields.flag_or("attention_bias", false)?;
    let attention = AttentionConfig::Gqa(GqaConfig {
        qk_norm: QkNorm::PerHead,
        qkv_bias: bias,
        output_bias: bias,
        ..gqa
    });
    let experts = match fields.get("num_experts") {
        Some(_) => fields.count("num_experts")?,
        None => fields.count("num_local_experts")?,
    };
    let width = fields.count("moe_intermediate_size")?;
    let config = common(fields, attention, experts, width, 1e-6)?;
    let dense = qwen3_dense_layers(fields, config.num_layers)?;
    let in_front = (0..).zip(&dense).take_while(|(i, l)| i == *l).count();
    Ok(ModelConfig {
        num_dense_layers: in_front,
        other_dense_layers: dense[in_front..].to_vec(),
        norm_topk_prob: fields.flag_or("norm_topk_prob", false)?,
        ..config
    })
}

/// Layers without experts: those of `mlp_only_layers`, and all but every `decoder_sparse_step`-th.
fn qwen3_dense_layers(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<usize>, ConfigError> {
    const LISTED: &str = "mlp_only_layers";
    let listed: Vec<u64> = match fields.get(LISTED) {
        None => Vec::new(),
        Some(value) => value
            .as_array()
            .and_then(|layers| layers.iter().map(Value::as_u64).collect())
            .ok_or_else(|| refuse(LISTED, value, "a list of layers"))?,
    };
    let step = fields.count_or("decoder_sparse_step", 1)?;
    ConfigError::check(step > 0, "decoder_sparse_step", step, "1 or more")?;
    let dense =
        |layer: &usize| listed.contains(&(*layer as u64)) || !(layer + 1).is_multiple_of(step);
    Ok((0..num_layers).filter(dense).collect())
}

fn mixtral(fields: &Fields<'_>) -> Result<ModelConfig, ConfigError> {
    fields.only("scoring_func", json!("softmax"))?;
    let longest = fields.count("max_position_embeddings")?;
    if let Some(window) = fields.get("sliding_window") {
        let wide = fields.count("sliding_window")? >= longest;
        let allowed = "null, or at least max_position_embeddings";
        ConfigError::check(wide, "sliding_window", window, allowed)?;
    }
    let attention = AttentionConfig::Gqa(gqa(fields, 1_000_000.0)?);
    let experts = fields.count("num_local_experts")?;
    let width = fields.count("intermediate_size")?;
    common(fields, attention, experts, width, 1e-5)
}
