use std::collections::HashMap;

use burn::tensor::{Device, Tensor, TensorData};
use burn_moe::layer::ConfigError;
use serde::{Deserialize, Serialize};

/// Which dimensions of a head are rotated together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RopePairs {
    /// `2i` with `2i + 1` (DeepSeek-V3, GLM-5).
    Interleaved,
    /// `i` with `dims / 2 + i` (GLM-4.5, Qwen3, MiniMax-M2, Mixtral).
    HalfSplit,
}

/// Rotary position embedding (arXiv 2104.09864).
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RopeConfig {
    /// Base of the rotation frequencies.
    pub theta: f64,
    /// Which dimensions are rotated together.
    pub pairs: RopePairs,
    /// Frequencies stretched for sequences longer than those trained on; `null`: as they are.
    pub yarn: Option<YarnConfig>,
}

/// YaRN (arXiv 2309.00071): low frequencies are divided by `factor`, high ones kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct YarnConfig {
    /// How much longer sequences become.
    pub factor: f64,
    /// Rotations over the original length from which on a frequency is kept.
    pub beta_fast: f64,
    /// Rotations over the original length up to which a frequency is divided by `factor`.
    pub beta_slow: f64,
    /// Longest sequence before stretching.
    pub original_max_length: usize,
    /// Weight of `ln factor` in the factor on cosine and sine; `null`: 1, and `mscale_all_dim`
    /// does not count there.
    pub mscale: Option<f64>,
    /// Weight of `ln factor` in the factor on attention scores (DeepSeek's attention only), which
    /// divides the one on cosine and sine.
    pub mscale_all_dim: Option<f64>,
    /// The factor on cosine and sine, instead of the one that follows from `mscale`.
    pub attention_factor: Option<f64>,
    /// Whether the bounds between kept and divided frequencies are whole pairs.
    pub truncate: bool,
}

impl RopeConfig {
    /// Frequencies as they are.
    pub fn plain(theta: f64, pairs: RopePairs) -> Self {
        Self {
            theta,
            pairs,
            yarn: None,
        }
    }

    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let positive = |field, value: f64| {
            let allowed = value.is_finite() && value > 0.0;
            ConfigError::check(allowed, field, value, "a positive number")
        };
        positive("rope_theta", self.theta)?;
        let Some(yarn) = &self.yarn else {
            return Ok(());
        };
        ConfigError::check(
            yarn.factor.is_finite() && yarn.factor >= 1.0,
            "factor",
            yarn.factor,
            "1 or more",
        )?;
        positive("beta_slow", yarn.beta_slow)?;
        ConfigError::check(
            yarn.beta_fast.is_finite() && yarn.beta_fast >= yarn.beta_slow,
            "beta_fast",
            yarn.beta_fast,
            format!("at least beta_slow ({})", yarn.beta_slow),
        )?;
        ConfigError::check(
            yarn.original_max_length > 0,
            "original_max_position_embeddings",
            yarn.original_max_length,
            "1 or more",
        )?;
        ConfigError::check(
            self.theta != 1.0,
            "rope_theta",
            self.theta,
            "other than 1 with YaRN",
        )?;
        for (field, value) in [
            ("mscale", yarn.mscale),
            ("mscale_all_dim", yarn.mscale_all_dim),
            ("attention_factor", yarn.attention_factor),
        ] {
            let allowed = value.is_none_or(|value| value.is_finite() && value >= 0.0);
            ConfigError::check(allowed, field, value.unwrap_or(0.0), "0 or more")?;
        }
        Ok(())
    }

    /// What attention scores are multiplied by in DeepSeek's attention: `mscale ^ 2`.
    pub fn score_factor(&self) -> f64 {
        match &self.yarn {
            Some(yarn) => match yarn.mscale_all_dim {
                Some(weight) if weight != 0.0 => mscale(yarn.factor, weight).powi(2),
                _ => 1.0,
            },
            None => 1.0,
        }
    }

    /// Radians per position of each pair of `dims` dimensions, and the factor on cosine and sine.
    /// Rounded to f32 where the reference implementation rounds, so that angles agree far out.
    fn frequencies(&self, dims: usize) -> (Vec<f32>, f64) {
        let periods = (0..dims / 2).map(|pair| {
            let exponent = (2 * pair) as f32 / dims as f32;
            self.theta.powf(f64::from(exponent)) as f32
        });
        let Some(yarn) = &self.yarn else {
            return (periods.map(|period| 1.0 / period).collect(), 1.0);
        };
        let bound = |rotations: f64| {
            let length = yarn.original_max_length as f64;
            let rotations = (length / (rotations * std::f64::consts::TAU)).ln();
            dims as f64 * rotations / (2.0 * self.theta.ln())
        };
        let (mut low, mut high) = (bound(yarn.beta_fast), bound(yarn.beta_slow));
        if yarn.truncate {
            (low, high) = (low.floor(), high.ceil());
        }
        let (low, mut high) = (low.max(0.0), high.min(dims as f64 - 1.0));
        if low == high {
            high += 0.001;
        }
        let frequencies = periods
            .enumerate()
            .map(|(pair, period)| {
                let ramp = (pair as f32 - low as f32) / (high - low) as f32;
                let kept = 1.0 - ramp.clamp(0.0, 1.0);
                let stretched = 1.0 / (yarn.factor as f32 * period);
                stretched * (1.0 - kept) + (1.0 / period) * kept
            })
            .collect();
        (frequencies, yarn.angle_factor())
    }
}

impl YarnConfig {
    /// The factor on cosine and sine.
    fn angle_factor(&self) -> f64 {
        match (self.attention_factor, self.mscale, self.mscale_all_dim) {
            (Some(factor), ..) => factor,
            (None, Some(a), Some(b)) if a != 0.0 && b != 0.0 => {
                mscale(self.factor, a) / mscale(self.factor, b)
            }
            _ => mscale(self.factor, 1.0),
        }
    }
}

fn mscale(factor: f64, weight: f64) -> f64 {
    if factor <= 1.0 {
        return 1.0;
    }
    0.1 * weight * factor.ln() + 1.0
}

/// Angles of [`RopeConfig`] for tokens at some positions.
#[derive(Debug, Clone)]
pub struct Rope {
    /// `[tokens, 1, dims / 2, 1]`
    cos: Tensor<4>,
    sin: Tensor<4>,
    pairs: RopePairs,
}

impl Rope {
    /// Angles for tokens at these positions, counted from 0, and `dims` dimensions.
    pub fn new(positions: &[usize], dims: usize, config: &RopeConfig, device: &Device) -> Self {
        let (frequencies, factor) = config.frequencies(dims);
        let shape = [positions.len(), 1, frequencies.len(), 1];
        let table = |f: fn(f64) -> f64| {
            // A batch has the same positions many times.
            let mut known: HashMap<usize, Vec<f32>> = HashMap::new();
            let mut values: Vec<f32> = Vec::with_capacity(shape.iter().product());
            for &position in positions {
                let row = known.entry(position).or_insert_with(|| {
                    let angles = frequencies.iter().map(|f| position as f32 * f);
                    angles
                        .map(|angle| f(f64::from(angle)) as f32 * factor as f32)
                        .collect()
                });
                values.extend_from_slice(row);
            }
            Tensor::from_data(TensorData::new(values, shape), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
            pairs: config.pairs,
        }
    }

    /// The same angles for other pairs of dimensions.
    pub fn with_pairs(&self, pairs: RopePairs) -> Self {
        Self {
            pairs,
            ..self.clone()
        }
    }

    /// Rotates the first dimensions of each head, as many as there are angles for; the others pass.
    ///
    /// # Shapes
    ///
    /// - `x` and result: `[batch, length, heads, dims]`
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, length, heads, dims] = x.dims();
        let rotated = 2 * self.cos.dims()[2];
        if rotated < dims {
            let passed = x.clone().slice_dim(3, rotated..dims);
            let turned = self.apply(x.slice_dim(3, 0..rotated));
            return Tensor::cat(vec![turned, passed], 3);
        }
        // The two of a pair side by side in a dimension of their own.
        let (shape, of_pair) = match self.pairs {
            RopePairs::Interleaved => ([batch, length, heads, dims / 2, 2], 4),
            RopePairs::HalfSplit => ([batch, length, heads, 2, dims / 2], 3),
        };
        let pairs = x.reshape(shape);
        let first = pairs.clone().slice_dim(of_pair, 0..1);
        let second = pairs.slice_dim(of_pair, 1..2);
        let table = |table: &Tensor<4>| {
            let table = table.clone().cast(first.dtype());
            let table = match self.pairs {
                RopePairs::Interleaved => table,
                RopePairs::HalfSplit => table.swap_dims(2, 3),
            };
            table.unsqueeze::<5>()
        };
        let (cos, sin) = (table(&self.cos), table(&self.sin));
        let turned = vec![
            first.clone() * cos.clone() - second.clone() * sin.clone(),
            first * sin + second * cos,
        ];
        Tensor::cat(turned, of_pair).reshape([batch, length, heads, dims])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rotation of the complex number `x[a] + j x[b]`, for both kinds of pairs, and dimensions
    /// beyond the rotated ones left as they are.
    #[test]
    fn rotates_pairs_by_position() {
        let device = Device::flex();
        let (length, heads, dims, rotated) = (5, 2, 8, 6);
        let values: Vec<f32> = (0..length * heads * dims)
            .map(|i| (i as f32 * 0.37).sin())
            .collect();
        for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
            let data = TensorData::new(values.clone(), [1, length, heads, dims]);
            let got: Vec<f32> = Rope::new(
                &[0, 1, 2, 7, 1],
                rotated,
                &RopeConfig::plain(100.0, pairs),
                &device,
            )
            .apply(Tensor::from_data(data, &device))
            .into_data()
            .iter()
            .collect();
            for (row, (got, x)) in got.chunks(dims).zip(values.chunks(dims)).enumerate() {
                let position = [0.0, 1.0, 2.0, 7.0, 1.0][row / heads];
                for pair in 0..rotated / 2 {
                    let (i, j) = match pairs {
                        RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
                        RopePairs::HalfSplit => (pair, rotated / 2 + pair),
                    };
                    let angle = position * 100f64.powf(-2.0 * pair as f64 / rotated as f64);
                    let (a, b) = (f64::from(x[i]), f64::from(x[j]));
                    let expected = [
                        a * angle.cos() - b * angle.sin(),
                        a * angle.sin() + b * angle.cos(),
                    ];
                    for (got, want) in [got[i], got[j]].iter().zip(expected) {
                        assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
                    }
                }
                assert_eq!(got[rotated..], x[rotated..]);
            }
        }
    }

    /// Equation 23 of the paper at its three ends: fast pairs are kept, slow ones divided by the
    /// factor, and DeepSeek's equal mscales leave cosine and sine alone but sharpen the scores.
    #[test]
    fn yarn_divides_slow_frequencies_only() {
        let yarn = YarnConfig {
            factor: 40.0,
            beta_fast: 32.0,
            beta_slow: 1.0,
            original_max_length: 4096,
            mscale: Some(1.0),
            mscale_all_dim: Some(1.0),
            attention_factor: None,
            truncate: true,
        };
        let config = RopeConfig {
            yarn: Some(yarn.clone()),
            ..RopeConfig::plain(10_000.0, RopePairs::Interleaved)
        };
        let plain = RopeConfig::plain(10_000.0, RopePairs::Interleaved).frequencies(64);
        let (stretched, factor) = config.frequencies(64);
        assert_eq!(factor, 1.0);
        assert_eq!(stretched[..10], plain.0[..10]);
        for (got, plain) in stretched[24..].iter().zip(&plain.0[24..]) {
            assert!((got * 40.0 / plain - 1.0).abs() < 1e-6);
        }
        let between = stretched[16] / plain.0[16];
        assert!((0.03..0.97).contains(&between), "{between}");
        let mscale = 0.1 * 40f64.ln() + 1.0;
        assert!((config.score_factor() - mscale * mscale).abs() < 1e-12);
        let alone = YarnConfig {
            mscale: None,
            mscale_all_dim: None,
            ..yarn
        };
        assert!((alone.angle_factor() - mscale).abs() < 1e-12);
    }
}
