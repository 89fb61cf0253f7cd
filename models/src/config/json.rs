//! Reading configs: our own, those written before there were several kinds of attention, and
//! Hugging Face's.

use std::path::Path;

use burn_moe::layer::ConfigError;
use serde_json::{Map, Value, json};

use super::{ModelConfig, ModelError};

impl ModelConfig {
    /// Reads and checks a JSON file: a config of our own, where every field must be there and no
    /// other, or one of Hugging Face's, which has `model_type` (see
    /// [`from_hugging_face`](Self::from_hugging_face)).
    ///
    /// # Errors
    ///
    /// When the file cannot be read or is not a valid config; names the field.
    pub fn read(path: &Path) -> Result<Self, ModelError> {
        let text = std::fs::read_to_string(path).map_err(|source| ModelError::Io {
            path: path.into(),
            source,
        })?;
        let json = |source| ModelError::Json {
            path: path.into(),
            source,
        };
        let field = |source: ConfigError| ModelError::File {
            path: path.into(),
            source,
        };
        let value: Value = serde_json::from_str(&text).map_err(json)?;
        match value {
            Value::Object(fields) if fields.contains_key("model_type") => {
                Self::from_hugging_face(&Value::Object(fields)).map_err(field)
            }
            Value::Object(fields) if !fields.contains_key("attention") => {
                let config: Self = serde_json::from_value(nested(fields)).map_err(json)?;
                config.validate()?;
                Ok(config)
            }
            _ => {
                let config: Self = serde_json::from_str(&text).map_err(json)?;
                config.validate()?;
                Ok(config)
            }
        }
    }
}

/// A config from before there were several kinds of attention: the fields of multi-head latent
/// attention stood among the others.
fn nested(mut fields: Map<String, Value>) -> Value {
    let mut attention = Map::new();
    attention.insert("kind".into(), json!("mla"));
    for name in [
        "num_heads",
        "q_lora_rank",
        "kv_lora_rank",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    ] {
        if let Some(value) = fields.remove(name) {
            attention.insert(name.into(), value);
        }
    }
    if let Some(theta) = fields.remove("rope_theta") {
        let rope = json!({ "theta": theta, "pairs": "interleaved", "yarn": null });
        attention.insert("rope".into(), rope);
    }
    if let Some(epsilon) = fields.get("rms_norm_eps") {
        attention.insert("latent_norm_eps".into(), epsilon.clone());
    }
    fields.insert("attention".into(), Value::Object(attention));
    Value::Object(fields)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// `config.json` of a checkpoint of `smoke` as it was first written.
    const FLAT: &str = r#"{
        "vocab_size": 256, "d_model": 32, "num_layers": 3, "num_dense_layers": 1, "num_heads": 2,
        "q_lora_rank": null, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
        "v_head_dim": 16, "rope_theta": 10000.0, "max_sequence_length": 64, "d_hidden_dense": 48,
        "d_hidden_expert": 24, "num_experts": 16, "top_k": 3, "n_group": 4, "topk_group": 2,
        "num_shared_experts": 1, "score_function": "Sigmoid", "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "selection_bias": true, "rms_norm_eps": 1e-6
    }"#;

    fn read(text: &str) -> Result<ModelConfig, ModelError> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("config.json");
        std::fs::write(&path, text).unwrap();
        ModelConfig::read(&path)
    }

    #[test]
    fn configs_with_flat_attention_are_still_read() {
        assert_eq!(read(FLAT).unwrap(), ModelConfig::named("smoke").unwrap());
        for (from, to, expected) in [
            ("\"kv_lora_rank\": 16,", "", "kv_lora_rank"),
            ("\"rope_theta\": 10000.0,", "", "rope"),
            ("\"top_k\": 3", "\"top_k\": 3, \"top_kk\": 3", "top_kk"),
            (
                "\"kv_lora_rank\": 16",
                "\"kv_lora_rank\": 0",
                "kv_lora_rank is 0",
            ),
        ] {
            let error = read(&FLAT.replace(from, to)).unwrap_err().to_string();
            assert!(error.contains(expected), "{error}");
        }
    }

    #[test]
    fn named_configs_survive_a_file() {
        for name in ModelConfig::NAMES {
            let config = ModelConfig::named(name).unwrap();
            let text = serde_json::to_string(&config).unwrap();
            assert_eq!(read(&text).unwrap(), config, "{name}");
            let unknown = text.replacen("\"attention\":{", "\"attention\":{\"colour\":1,", 1);
            let error = read(&unknown).unwrap_err().to_string();
            assert!(error.contains("colour"), "{error}");
        }
    }
}
