//! Fields of a Hugging Face `config.json`, each checked as it is read.

use burn_moe::layer::ConfigError;
use serde_json::{Map, Value};

use crate::attention::{RopeConfig, RopePairs, YarnConfig};

/// The fields of `config.json`, or of an object in it. A field that is `null` counts as absent.
#[derive(Clone, Copy)]
pub(super) struct Fields<'a>(&'a Map<String, Value>);

impl<'a> Fields<'a> {
    pub fn new(value: &'a Value) -> Result<Self, ConfigError> {
        match value.as_object() {
            Some(map) => Ok(Self(map)),
            None => Err(refuse("config.json", value, "an object")),
        }
    }

    pub fn get(&self, field: &str) -> Option<&'a Value> {
        self.0.get(field).filter(|value| !value.is_null())
    }

    pub fn count_or(&self, field: &'static str, default: usize) -> Result<usize, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value
                .as_u64()
                .and_then(|count| u32::try_from(count).ok())
                .map(|count| count as usize)
                .ok_or_else(|| refuse(field, value, "a whole number from 0 on, below 2^32")),
        }
    }

    pub fn count(&self, field: &'static str) -> Result<usize, ConfigError> {
        match self.get(field) {
            None => Err(refuse(field, "absent", "a whole number")),
            Some(_) => self.count_or(field, 0),
        }
    }

    pub fn number_or(&self, field: &'static str, default: f64) -> Result<f64, ConfigError> {
        Ok(self.number(field)?.unwrap_or(default))
    }

    pub fn number(&self, field: &'static str) -> Result<Option<f64>, ConfigError> {
        self.get(field)
            .map(|value| {
                value
                    .as_f64()
                    .ok_or_else(|| refuse(field, value, "a number"))
            })
            .transpose()
    }

    pub fn flag_or(&self, field: &'static str, default: bool) -> Result<bool, ConfigError> {
        match self.get(field) {
            None => Ok(default),
            Some(value) => value
                .as_bool()
                .ok_or_else(|| refuse(field, value, "true or false")),
        }
    }

    /// Refuses the field unless it is absent or has this value.
    pub fn only(&self, field: &'static str, allowed: Value) -> Result<(), ConfigError> {
        match self.get(field) {
            Some(value) if *value != allowed => Err(refuse(field, value, &allowed.to_string())),
            _ => Ok(()),
        }
    }

    /// The rotation by position, in the old spelling (`rope_theta`, `rope_scaling`) or the new one
    /// (`rope_parameters`).
    pub fn rope(&self, pairs: RopePairs, default_theta: f64) -> Result<RopeConfig, ConfigError> {
        let scaling = self.scaling()?;
        let theta = match scaling.and_then(|s| s.get("rope_theta").map(|_| s)) {
            Some(scaling) => scaling.number_or("rope_theta", default_theta)?,
            None => self.number_or("rope_theta", default_theta)?,
        };
        let plain = RopeConfig::plain(theta, pairs);
        let Some(scaling) = scaling else {
            return Ok(plain);
        };
        let kind = scaling.get("rope_type").or(scaling.get("type"));
        match kind.map(Value::as_str) {
            None | Some(Some("default")) => return Ok(plain),
            Some(Some("yarn")) => {}
            Some(_) => {
                let value = kind.unwrap_or(&Value::Null);
                return Err(refuse("rope_type", value, "\"default\" or \"yarn\""));
            }
        }
        let longest = self.count("max_position_embeddings")?;
        let original = scaling.count_or("original_max_position_embeddings", longest)?;
        let factor = longest as f64 / original.max(1) as f64;
        Ok(RopeConfig {
            yarn: Some(YarnConfig {
                factor: scaling.number_or("factor", factor)?,
                beta_fast: scaling.number_or("beta_fast", 32.0)?,
                beta_slow: scaling.number_or("beta_slow", 1.0)?,
                original_max_length: original,
                mscale: scaling.number("mscale")?,
                mscale_all_dim: scaling.number("mscale_all_dim")?,
                attention_factor: scaling.number("attention_factor")?,
                truncate: scaling.flag_or("truncate", true)?,
            }),
            ..plain
        })
    }

    /// Dimensions of a head that are rotated: `partial_rotary_factor` of them, in either place.
    pub fn rotary_dim(&self, head_dim: usize, default: f64) -> Result<usize, ConfigError> {
        const FIELD: &str = "partial_rotary_factor";
        let factor = match self.scaling()?.map(|s| s.number(FIELD)).transpose()? {
            Some(Some(factor)) => factor,
            _ => self.number_or(FIELD, default)?,
        };
        ConfigError::check(
            factor > 0.0 && factor <= 1.0,
            FIELD,
            factor,
            "more than 0, at most 1",
        )?;
        Ok((head_dim as f64 * factor) as usize)
    }

    fn scaling(&self) -> Result<Option<Fields<'a>>, ConfigError> {
        for field in ["rope_parameters", "rope_scaling"] {
            if let Some(value) = self.get(field) {
                return match value.as_object() {
                    Some(map) => Ok(Some(Fields(map))),
                    None => Err(refuse(field, value, "an object")),
                };
            }
        }
        Ok(None)
    }
}

pub(super) fn refuse(field: &'static str, value: impl ToString, allowed: &str) -> ConfigError {
    ConfigError {
        field,
        value: value.to_string(),
        allowed: allowed.into(),
    }
}
