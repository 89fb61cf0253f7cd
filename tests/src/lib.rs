//! What the workspace's tests share: random host tensors, a naive MoE layer in f64, and a layer run
//! over any number of ranks.

pub mod layer_run;
pub mod naive;

use burn::tensor::{Device, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// `len` numbers in -1..1, the same for the same seed.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// An f64 tensor from host values.
pub fn tensor64<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    let data = TensorData::new(values.to_vec(), shape);
    Tensor::from_data(data, (device, burn::tensor::DType::F64))
}

/// The values of a tensor, as f64.
pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// Largest difference, relative to the largest value of `b` (at least 1e-6).
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "different lengths");
    let scale = b.iter().fold(1e-6f64, |max, v| max.max(v.abs()));
    a.iter()
        .zip(b)
        .fold(0.0, |max: f64, (a, b)| max.max((a - b).abs()))
        / scale
}
