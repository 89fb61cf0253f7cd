//! What the workspace's tests share: random host tensors, naive references in f64, and a layer run
//! over any number of ranks.

pub mod bodies;
pub mod layer_run;
pub mod naive;
#[cfg(feature = "mpi")]
pub mod processes;
pub mod ranks;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// `len` numbers in -1..1, the same for the same seed.
pub fn random(len: usize, seed: u64) -> Vec<f64> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// `0..len` in an order that depends on the seed.
pub fn shuffled(len: usize, seed: u64) -> Vec<usize> {
    let keys = random(len, seed);
    let mut order: Vec<usize> = (0..len).collect();
    order.sort_by(|a, b| keys[*a].total_cmp(&keys[*b]));
    order
}

/// A tensor of `dtype` from host values.
pub fn tensor_of<const D: usize>(
    values: &[f64],
    shape: [usize; D],
    dtype: DType,
    device: &Device,
) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values.to_vec(), shape), (device, dtype))
}

/// An f64 tensor from host values.
pub fn tensor64<const D: usize>(values: &[f64], shape: [usize; D], device: &Device) -> Tensor<D> {
    tensor_of(values, shape, DType::F64, device)
}

/// Row numbers, -1 for none.
pub fn index_of<const D: usize>(
    rows: &[i64],
    shape: [usize; D],
    device: &Device,
) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(rows.to_vec(), shape), device)
}

/// The values of a tensor, as f64.
pub fn values<const D: usize>(tensor: &Tensor<D>) -> Vec<f64> {
    tensor.to_data().iter::<f64>().collect()
}

/// The values of an f32 tensor, to the bit.
pub fn bits<const D: usize>(tensor: &Tensor<D>) -> Vec<u32> {
    tensor.to_data().iter::<f32>().map(f32::to_bits).collect()
}

/// The numbers as a tensor of `dtype` holds them.
pub fn rounded(numbers: &[f64], dtype: DType) -> Vec<f64> {
    let shape = [numbers.len()];
    values(&tensor_of(numbers, shape, dtype, &Device::flex()))
}

/// Largest difference, relative to the largest value of `b` (at least 1e-6).
pub fn relative_error(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "different lengths");
    let scale = b.iter().fold(1e-6f64, |max, v| max.max(v.abs()));
    // Not `f64::max`, which would let NaN pass.
    let largest = a.iter().zip(b).fold(0.0, |max: f64, (a, b)| {
        let difference = (a - b).abs();
        if difference <= max { max } else { difference }
    });
    largest / scale
}

/// Fails unless all values agree within `tolerance` of the largest value of `expected`.
#[track_caller]
pub fn assert_close(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    assert_eq!(actual.len(), expected.len(), "length of {what}");
    let error = relative_error(actual, expected);
    assert!(error <= tolerance, "{what} differs by {error:e}");
}

/// [`assert_close`] for values of order 1, of which all may happen to be small.
#[track_caller]
pub fn assert_near(what: &str, actual: &[f64], expected: &[f64], tolerance: f64) {
    let scale = expected.iter().fold(1.0f64, |max, v| max.max(v.abs()));
    assert_eq!(actual.len(), expected.len(), "length of {what}");
    for (i, (a, b)) in actual.iter().zip(expected).enumerate() {
        let near = (a - b).abs() <= tolerance * scale;
        assert!(near, "{what} is {a:e} at {i}, expected {b:e}");
    }
}

/// Fails unless `gradient` is that of `f` at `x`, by central differences.
#[track_caller]
pub fn assert_gradient(what: &str, gradient: &[f64], x: &[f64], f: impl Fn(&[f64]) -> f64) {
    let expected = naive::finite_differences(x, f);
    assert_eq!(
        gradient.len(),
        expected.len(),
        "length of the gradient of {what}"
    );
    for (i, (a, b)) in gradient.iter().zip(&expected).enumerate() {
        // The differences themselves are good to 1e-10 for functions of order 1, to 1e-8 or so
        // for the sums of hundreds that some tests have.
        assert!(
            (a - b).abs() <= 1e-7 * b.abs().max(1.0),
            "gradient {i} of {what} is {a:e}, by differences {b:e}"
        );
    }
}

/// The sum of products, for losses that weigh every output differently.
pub fn dot(a: &[f64], b: &[f64]) -> f64 {
    assert_eq!(a.len(), b.len(), "different lengths");
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// The module with all float parameters cast to `dtype`.
pub fn cast<M: Module>(module: M, dtype: DType) -> M {
    struct Cast(DType);

    impl ModuleMapper for Cast {
        fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
            let require_grad = param.is_require_grad();
            param.map(|value| value.cast(self.0).detach().set_require_grad(require_grad))
        }
    }

    module.map(&mut Cast(dtype))
}

/// The parameter with other values, of the same shape and type.
pub fn with_values<const D: usize>(param: Param<Tensor<D>>, values: &[f64]) -> Param<Tensor<D>> {
    let require_grad = param.is_require_grad();
    param.map(|old| {
        tensor_of(values, old.dims(), old.dtype(), &old.device()).set_require_grad(require_grad)
    })
}
