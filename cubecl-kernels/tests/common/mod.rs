//! What the tests of all kernels share: the device they run on, and comparison with f64.

#![allow(dead_code, reason = "each test binary uses a part")]

pub mod grouped;

use cubecl::{CubeElement, Device, client::Client, features::TypeUsage};
use half::{bf16, f16};

/// The client that `CUBECL_KERNELS_RUNTIME` names (`cpu`, `wgpu` or `cuda`); without it the first
/// of these that the build links.
pub fn client() -> Client {
    let name = std::env::var("CUBECL_KERNELS_RUNTIME").unwrap_or_else(|_| {
        let built = [
            ("cpu", cfg!(feature = "cpu")),
            ("wgpu", cfg!(any(feature = "wgpu", feature = "vulkan"))),
            ("cuda", cfg!(feature = "cuda")),
        ];
        let first = built.iter().find(|(_, built)| *built);
        first
            .expect("tests of kernels want one of the features cpu, wgpu, vulkan, cuda")
            .0
            .to_string()
    });
    let device = match name.as_str() {
        "cpu" => Device::cpu(),
        "wgpu" => Device::wgpu(Default::default()),
        "cuda" => Device::cuda(0),
        other => panic!("CUBECL_KERNELS_RUNTIME: {other} given, cpu, wgpu, cuda allowed"),
    };
    device.expect("no such device").client()
}

/// Largest difference from `expected`, relative to the largest magnitude in `expected`.
pub fn relative_error(actual: impl IntoIterator<Item = f64>, expected: &[f64]) -> f64 {
    let actual: Vec<f64> = actual.into_iter().collect();
    assert_eq!(actual.len(), expected.len());
    let scale = expected.iter().fold(0.0_f64, |m, v| m.max(v.abs()));
    let worst = actual.iter().zip(expected).fold(0.0_f64, |m, (a, e)| {
        // A NaN must not vanish in `max`.
        if a.is_nan() {
            f64::INFINITY
        } else {
            m.max((a - e).abs())
        }
    });
    if worst == 0.0 { 0.0 } else { worst / scale }
}

/// Deterministic values in [-1, 1), different for each `seed`.
pub fn random(len: usize, seed: u64) -> Vec<f32> {
    use rand::{RngExt, SeedableRng};
    let mut rng = rand::rngs::StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-1.0..1.0)).collect()
}

/// Row offsets of experts with the given numbers of rows.
pub fn offsets(counts: &[usize]) -> Vec<u32> {
    let mut sum = 0;
    let mut offsets = vec![0];
    offsets.extend(counts.iter().map(|count| {
        sum += *count as u32;
        sum
    }));
    offsets
}

/// An element type that kernels take, and how exact their results must be in it.
pub trait Value: CubeElement + Copy {
    /// Largest allowed [`relative_error`].
    const TOLERANCE: f64;
    fn of(value: f32) -> Self;
    fn f64(self) -> f64;
}

impl Value for f32 {
    const TOLERANCE: f64 = 1e-5;
    fn of(value: f32) -> Self {
        value
    }
    fn f64(self) -> f64 {
        self.into()
    }
}

impl Value for f16 {
    const TOLERANCE: f64 = 1e-2;
    fn of(value: f32) -> Self {
        f16::from_f32(value)
    }
    fn f64(self) -> f64 {
        self.into()
    }
}

impl Value for bf16 {
    const TOLERANCE: f64 = 1e-2;
    fn of(value: f32) -> Self {
        bf16::from_f32(value)
    }
    fn f64(self) -> f64 {
        self.into()
    }
}

/// Deterministic values in [-1, 1) rounded to `T`.
pub fn random_of<T: Value>(len: usize, seed: u64) -> Vec<T> {
    random(len, seed).into_iter().map(T::of).collect()
}

/// The same in f64.
pub fn to_f64<T: Value>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.f64()).collect()
}

/// Whether the device stores `T` and converts it.
pub fn supports<T: Value>(client: &Client) -> bool {
    let usage = client.features().type_usage(T::cube_type());
    usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
}

/// `values` is as close to `expected` as its type allows.
#[track_caller]
pub fn assert_close<T: Value>(what: &str, values: &[T], expected: &[f64]) {
    let error = relative_error(values.iter().map(|value| value.f64()), expected);
    assert!(error <= T::TOLERANCE, "{what}: relative error {error:e}");
}
