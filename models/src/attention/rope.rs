use burn::tensor::{Device, Tensor, TensorData};

/// Rotary position embedding (arXiv 2104.09864) for positions `0..length`, interleaved: dimensions
/// `2i` and `2i + 1` are one pair, rotated by `position * theta^(-2i / dims)`.
#[derive(Debug, Clone)]
pub struct Rope {
    /// `[length, 1, dims / 2, 1]`
    cos: Tensor<4>,
    sin: Tensor<4>,
}

impl Rope {
    /// Angles for `length` positions and `dims` dimensions, computed in f64.
    pub fn new(length: usize, dims: usize, theta: f64, device: &Device) -> Self {
        let pairs = dims / 2;
        let table = |f: fn(f64) -> f64| {
            let values: Vec<f32> = (0..length * pairs)
                .map(|i| {
                    let (position, pair) = ((i / pairs) as f64, (i % pairs) as f64);
                    f(position * theta.powf(-2.0 * pair / dims as f64)) as f32
                })
                .collect();
            Tensor::from_data(TensorData::new(values, [length, 1, pairs, 1]), device)
        };
        Self {
            cos: table(f64::cos),
            sin: table(f64::sin),
        }
    }

    /// Rotates `x [batch, length, heads, dims]`.
    pub fn apply(&self, x: Tensor<4>) -> Tensor<4> {
        let [batch, length, heads, dims] = x.dims();
        let pairs = x.reshape([batch, length, heads, dims / 2, 2]);
        let even = pairs.clone().slice_dim(4, 0..1);
        let odd = pairs.slice_dim(4, 1..2);
        let (cos, sin) = (
            self.cos.clone().cast(even.dtype()).unsqueeze::<5>(),
            self.sin.clone().cast(even.dtype()).unsqueeze::<5>(),
        );
        let first = even.clone() * cos.clone() - odd.clone() * sin.clone();
        let second = even * sin + odd * cos;
        Tensor::cat(vec![first, second], 4).reshape([batch, length, heads, dims])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A rotation of the complex number `x[2i] + j x[2i + 1]`.
    #[test]
    fn rotates_neighbouring_pairs_by_position() {
        let device = Device::flex();
        let (length, heads, dims) = (5, 2, 6);
        let values: Vec<f32> = (0..length * heads * dims)
            .map(|i| (i as f32 * 0.37).sin())
            .collect();
        let x = Tensor::<4>::from_data(
            TensorData::new(values.clone(), [1, length, heads, dims]),
            &device,
        );
        let rotated: Vec<f32> = Rope::new(length, dims, 100.0, &device)
            .apply(x)
            .into_data()
            .iter()
            .collect();
        for position in 0..length {
            for head in 0..heads {
                for pair in 0..dims / 2 {
                    let at = (position * heads + head) * dims + 2 * pair;
                    let angle = position as f64 * 100f64.powf(-2.0 * pair as f64 / dims as f64);
                    let (a, b) = (f64::from(values[at]), f64::from(values[at + 1]));
                    let expected = [
                        a * angle.cos() - b * angle.sin(),
                        a * angle.sin() + b * angle.cos(),
                    ];
                    for (got, want) in rotated[at..at + 2].iter().zip(expected) {
                        assert!((f64::from(*got) - want).abs() < 1e-6, "{got} {want}");
                    }
                }
            }
        }
    }
}
