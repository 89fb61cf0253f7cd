//! Filling tensors on the device, and timing what is queued on it.

use std::time::{Duration, Instant};

use cubecl::{
    CubeCount, CubeDim,
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::*,
};
use cubecl_kernels::DeviceTensor;

use crate::device::sync;

/// How long and how often something is run.
#[derive(Debug, Clone, Copy)]
pub struct Timing {
    /// Wanted length of a sample, which runs the operation as often as that takes.
    pub sample: Duration,
    /// Samples, whose median counts.
    pub samples: usize,
}

/// Seconds of one run of `queue`, which queues work and does not wait: the median over samples of
/// many runs, with the device idle before and after each sample. What the host does to queue a run
/// is hidden where the device takes longer.
pub fn seconds(
    client: &Client,
    timing: Timing,
    mut queue: impl FnMut() -> Result<(), String>,
) -> Result<f64, String> {
    // Compiles, and grows the memory pool.
    queue()?;
    sync(client)?;
    let mut sample = |runs: u32| -> Result<f64, String> {
        let start = Instant::now();
        for _ in 0..runs {
            queue()?;
        }
        sync(client)?;
        Ok(start.elapsed().as_secs_f64() / f64::from(runs))
    };
    let first = sample(1)?;
    let runs = (timing.sample.as_secs_f64() / first).clamp(1.0, 200.0) as u32;
    sample(runs)?;
    let mut samples = (0..timing.samples.max(1))
        .map(|_| sample(runs))
        .collect::<Result<Vec<_>, _>>()?;
    samples.sort_by(f64::total_cmp);
    Ok(samples[samples.len() / 2])
}

/// A tensor of numbers in -1..1, written by the device, different for each seed.
pub fn fill(client: &Client, shape: &[usize], kind: FloatKind, seed: u32) -> DeviceTensor {
    let dtype = ElemType::Float(kind);
    let tensor = DeviceTensor::empty(client, shape, dtype);
    let len = tensor.len();
    let units = client.properties().hardware.max_units_per_cube.min(256);
    let cubes = len.div_ceil(units as usize).clamp(1, 4096) as u32;
    // SAFETY: the kernel stays below `len`.
    unsafe {
        fill_kernel::launch_unchecked(
            client,
            CubeCount::new_1d(cubes),
            CubeDim::new_1d(units),
            AddressType::from_len(len),
            BufferArg::from_raw_parts(tensor.handle().clone(), len),
            len,
            seed,
            dtype,
        );
    }
    tensor
}

/// A hash of the position (Wang's), so that no value or bit pattern is frequent.
#[cube(launch_unchecked, address_type = "dynamic")]
fn fill_kernel<F: Float>(values: &mut [F], len: usize, seed: u32, #[define(F)] _dtype: ElemType) {
    let mut position = ABSOLUTE_POS;
    while position < len {
        let mut hash = position as u32 ^ (seed * 0x9E37_79B1u32);
        hash = (hash ^ 61u32) ^ (hash >> 16u32);
        hash *= 9u32;
        hash ^= hash >> 4u32;
        hash *= 0x27D4_EB2Du32;
        hash ^= hash >> 15u32;
        let value = f32::cast_from(hash >> 8u32) * (2.0f32 / 16_777_216.0f32) - 1.0f32;
        values[position] = F::cast_from(value);
        position += CUBE_COUNT * CUBE_DIM as usize;
    }
}

/// A plain copy of a whole tensor in vectors of 16 bytes, by as many cubes as there is work for: what
/// streaming copies are compared with.
pub fn plain_copy(client: &Client, source: &DeviceTensor, destination: &DeviceTensor) {
    let words = source.len() * source.dtype().size() / 4;
    let vectors = words / 4;
    let units = client.properties().hardware.max_units_per_cube.min(256);
    let most = client.properties().hardware.max_cube_count.0 as usize;
    let cubes = vectors.div_ceil(units as usize).clamp(1, most) as u32;
    // SAFETY: both tensors hold `words` words, and the kernel stays below `vectors`.
    unsafe {
        copy_kernel::launch_unchecked(
            client,
            CubeCount::new_1d(cubes),
            CubeDim::new_1d(units),
            AddressType::from_len(words),
            4,
            BufferArg::from_raw_parts(source.handle().clone(), words),
            BufferArg::from_raw_parts(destination.handle().clone(), words),
            vectors,
        );
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn copy_kernel<V: Size>(
    source: &[Vector<u32, V>],
    destination: &mut [Vector<u32, V>],
    vectors: usize,
) {
    let mut position = ABSOLUTE_POS;
    while position < vectors {
        destination[position] = source[position];
        position += CUBE_COUNT * CUBE_DIM as usize;
    }
}
