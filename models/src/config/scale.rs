//! Smaller models of a family.

use std::fmt;
use std::str::FromStr;

use burn_moe::layer::ConfigError;

use super::ModelConfig;
use crate::attention::{AttentionConfig, GqaConfig, MlaConfig};

/// A fraction above 0 and at most 1, such as `1/16`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Scale {
    numerator: u32,
    denominator: u32,
}

/// Not a [`Scale`].
#[derive(Debug, thiserror::Error)]
#[error("a fraction above 0, at most 1, such as 1/16")]
pub struct ScaleError;

impl FromStr for Scale {
    type Err = ScaleError;

    fn from_str(text: &str) -> Result<Self, ScaleError> {
        let (numerator, denominator) = text.split_once('/').unwrap_or((text, "1"));
        let parse = |part: &str| part.trim().parse().map_err(|_| ScaleError);
        let (numerator, denominator) = (parse(numerator)?, parse(denominator)?);
        if numerator == 0 || numerator > denominator {
            return Err(ScaleError);
        }
        Ok(Self {
            numerator,
            denominator,
        })
    }
}

impl fmt::Display for Scale {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.numerator, self.denominator)
    }
}

impl Scale {
    /// The whole model.
    pub const ONE: Self = Self {
        numerator: 1,
        denominator: 1,
    };

    fn of(self, size: usize) -> f64 {
        size as f64 * f64::from(self.numerator) / f64::from(self.denominator)
    }

    /// A width in multiples of 8, which vector instructions like.
    fn width(self, field: &'static str, size: usize) -> Result<usize, ConfigError> {
        if self == Self::ONE {
            return Ok(size);
        }
        let scaled = self.of(size);
        ConfigError::check(
            scaled >= LEAST_WIDTH as f64,
            field,
            format!("{size} x {self} = {scaled:.1}"),
            format!("at least {LEAST_WIDTH} after scaling"),
        )?;
        Ok((scaled / 8.0).round().max(1.0) as usize * 8)
    }

    /// Heads, at least one, and what is left of the factor for their dimensions.
    fn heads(self, heads: usize) -> (usize, f64) {
        let scaled = self.of(heads);
        ((scaled.round() as usize).max(1), scaled.min(1.0))
    }
}

/// Narrower layers do not compute anything of use.
const LEAST_WIDTH: usize = 8;

/// The least vocabulary: bytes.
const BYTES: usize = 256;

impl ModelConfig {
    /// The family's model with widths, ranks of compressed vectors, heads and vocabulary scaled.
    /// What shapes routing stays: experts, groups, top-k, shared experts. Layers stay too; see
    /// [`with_layers`](Self::with_layers).
    ///
    /// Widths are rounded to multiples of 8. Heads keep their dimensions and become fewer; when not
    /// one would be left, one is, with smaller dimensions, even ones. The vocabulary has at least
    /// the 256 bytes. Layers for multi-token prediction, which only checkpoints have, are left out.
    ///
    /// # Errors
    ///
    /// Names the first field of which nothing usable would be left.
    pub fn scaled(&self, scale: Scale) -> Result<Self, ConfigError> {
        let config = Self {
            vocab_size: match self.vocab_size {
                small if small <= BYTES => small,
                large => (scale.of(large).ceil() as usize).max(BYTES),
            },
            d_model: scale.width("d_model", self.d_model)?,
            num_mtp_layers: 0,
            attention: match &self.attention {
                AttentionConfig::Mla(mla) => AttentionConfig::Mla(scaled_mla(mla, scale)?),
                AttentionConfig::Gqa(gqa) => AttentionConfig::Gqa(scaled_gqa(gqa, scale)?),
            },
            d_hidden_dense: scale.width("d_hidden_dense", self.d_hidden_dense)?,
            d_hidden_expert: scale.width("d_hidden_expert", self.d_hidden_expert)?,
            ..self.clone()
        };
        config.validate()?;
        Ok(config)
    }

    /// The model with fewer layers. A family that begins with dense layers keeps their share, at
    /// least one, as long as one layer with experts is left.
    ///
    /// # Errors
    ///
    /// When `layers` is 0 or more than the model has.
    pub fn with_layers(&self, layers: usize) -> Result<Self, ConfigError> {
        ConfigError::check(
            (1..=self.num_layers).contains(&layers),
            "num_layers",
            layers,
            format!("1 to {}", self.num_layers),
        )?;
        let mut config = self.clone();
        if layers == self.num_layers {
            return Ok(config);
        }
        config.num_layers = layers;
        config.num_mtp_layers = 0;
        let dense = self.num_dense_layers;
        if dense > 0 && dense < self.num_layers {
            let share = dense as f64 * layers as f64 / self.num_layers as f64;
            config.num_dense_layers = (share.round() as usize).max(1).min(layers - 1);
        } else {
            config.num_dense_layers = dense.min(layers);
        }
        if let AttentionConfig::Mla(MlaConfig {
            indexer: Some(indexer),
            ..
        }) = &mut config.attention
        {
            indexer.shared_layers.retain(|layer| *layer < layers);
        }
        Ok(config)
    }
}

fn scaled_mla(mla: &MlaConfig, scale: Scale) -> Result<MlaConfig, ConfigError> {
    let (num_heads, rest) = scale.heads(mla.num_heads);
    let nope = dims("qk_nope_head_dim", mla.qk_nope_head_dim, rest)?;
    let rope = dims("qk_rope_head_dim", mla.qk_rope_head_dim, rest)?;
    let indexer = match &mla.indexer {
        None => None,
        Some(indexer) => {
            let (num_heads, rest) = scale.heads(indexer.num_heads);
            let mut scaled = indexer.clone();
            scaled.num_heads = num_heads;
            // Its heads begin with the rotated dimensions.
            scaled.head_dim = dims("index_head_dim", indexer.head_dim, rest)?.max(rope);
            Some(scaled)
        }
    };
    Ok(MlaConfig {
        num_heads,
        q_lora_rank: match mla.q_lora_rank {
            Some(rank) => Some(scale.width("q_lora_rank", rank)?),
            None => None,
        },
        kv_lora_rank: scale.width("kv_lora_rank", mla.kv_lora_rank)?,
        qk_nope_head_dim: nope,
        qk_rope_head_dim: rope,
        v_head_dim: dims("v_head_dim", mla.v_head_dim, rest)?,
        indexer,
        ..mla.clone()
    })
}

fn scaled_gqa(gqa: &GqaConfig, scale: Scale) -> Result<GqaConfig, ConfigError> {
    let (num_heads, rest) = scale.heads(gqa.num_heads);
    let head_dim = dims("head_dim", gqa.head_dim, rest)?;
    let wanted = scale.of(gqa.num_kv_heads);
    // The divisor of the heads that is nearest by ratio.
    let off = |kv: usize| (kv as f64 / wanted).ln().abs();
    let divisors = (1..=num_heads).filter(|kv| num_heads.is_multiple_of(*kv));
    let num_kv_heads = divisors.min_by(|a, b| off(*a).total_cmp(&off(*b)));
    Ok(GqaConfig {
        num_heads,
        num_kv_heads: num_kv_heads.unwrap_or(1),
        head_dim,
        rotary_dim: dims("rotary_dim", gqa.rotary_dim, rest)?.min(head_dim),
        ..gqa.clone()
    })
}

/// Dimensions of a head, an even number.
fn dims(field: &'static str, size: usize, rest: f64) -> Result<usize, ConfigError> {
    if rest >= 1.0 {
        return Ok(size);
    }
    let scaled = size as f64 * rest;
    ConfigError::check(
        scaled >= 2.0,
        field,
        format!("{size} x {rest} = {scaled:.1}"),
        "at least 2 after scaling",
    )?;
    Ok((scaled / 2.0).round() as usize * 2)
}
