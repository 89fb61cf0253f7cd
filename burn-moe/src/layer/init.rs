//! Initial weights, drawn on the host: the random state of a CPU backend is shared by all ranks of a
//! process, and an expert must start with the same weights wherever it lives.

use burn::module::{Param, ParamId};
use burn::tensor::{DType, Device, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

/// What is drawn. Each has a random stream of its own under a seed.
#[derive(Debug, Clone, Copy)]
pub(super) enum Drawn {
    Gate,
    ExpertGateUp(u64),
    ExpertDown(u64),
    DenseGateUp,
    DenseDown,
}

/// A matrix `[rows, columns]`, uniform in +-sqrt(1 / rows) as Burn's `LinearConfig` has it.
pub(super) fn draw(seed: u64, drawn: Drawn, rows: usize, columns: usize) -> Vec<f32> {
    let (kind, id) = match drawn {
        Drawn::Gate => (0, 0),
        Drawn::ExpertGateUp(id) => (1, id),
        Drawn::ExpertDown(id) => (2, id),
        Drawn::DenseGateUp => (3, 0),
        Drawn::DenseDown => (4, 0),
    };
    let mut key = [0; 32];
    for (bytes, part) in key.chunks_exact_mut(8).zip([seed, kind, id, 0]) {
        bytes.copy_from_slice(&u64::to_le_bytes(part));
    }
    let mut rng = StdRng::from_seed(key);
    let bound = 1.0 / (rows.max(1) as f32).sqrt();
    (0..rows * columns)
        .map(|_| rng.random_range(-bound..bound))
        .collect()
}

/// A parameter whose values are drawn when it is first used.
pub(super) fn lazy<const D: usize>(
    shape: [usize; D],
    device: &Device,
    draw: impl Fn() -> Vec<f32> + Send + Sync + 'static,
) -> Param<Tensor<D>> {
    lazy_of(|dtype| dtype, shape, device, draw)
}

/// [`lazy`], in f32 where the device's default type is narrower.
pub(super) fn lazy_wide<const D: usize>(
    shape: [usize; D],
    device: &Device,
    draw: impl Fn() -> Vec<f32> + Send + Sync + 'static,
) -> Param<Tensor<D>> {
    let wide = |dtype| match dtype {
        DType::F64 => DType::F64,
        _ => DType::F32,
    };
    lazy_of(wide, shape, device, draw)
}

/// `dtype` makes the parameter's type from the device's default.
fn lazy_of<const D: usize>(
    dtype: fn(DType) -> DType,
    shape: [usize; D],
    device: &Device,
    draw: impl Fn() -> Vec<f32> + Send + Sync + 'static,
) -> Param<Tensor<D>> {
    Param::uninitialized(
        ParamId::new(),
        move |device, require_grad| {
            let dtype = dtype(device.settings().float_dtype.into());
            let values = Tensor::from_data(TensorData::new(draw(), shape), (device, dtype));
            values.set_require_grad(require_grad)
        },
        device.clone(),
        true,
        shape.into(),
    )
}
