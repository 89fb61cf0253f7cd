//! Moving rows is what plain loops in f64 do, in every precision that the device has.

mod common;

use cubecl::CubeElement;
use cubecl::client::Client;
use cubecl::frontend::CubePrimitive;
use cubecl::ir::features::TypeUsage;
use cubecl_kernels::rows::{gather_rows, scatter_add_rows, sum_rows, sum_rows_backward};
use cubecl_kernels::{DeviceTensor, KernelError};
use half::{bf16, f16};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// An element type of rows, and how far a sum of a few of its numbers may be off.
trait Real: CubeElement + CubePrimitive + Copy + PartialEq + std::fmt::Debug {
    const TOLERANCE: f64;
    fn of(value: f32) -> Self;
    fn wide(self) -> f64;
}

macro_rules! real {
    ($type:ty, $tolerance:expr, $of:expr) => {
        impl Real for $type {
            const TOLERANCE: f64 = $tolerance;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn wide(self) -> f64 {
                f64::from(self)
            }
        }
    };
}

real!(f32, 1e-6, |value| value);
real!(f16, 1e-3, f16::from_f32);
real!(bf16, 8e-3, bf16::from_f32);

fn has<T: Real>(client: &Client) -> bool {
    let usage = client.features().type_usage(T::cube_type());
    usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion)
}

fn reals<T: Real>(len: usize, seed: u64) -> Vec<T> {
    common::random(len, seed).into_iter().map(T::of).collect()
}

fn wide<T: Real>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| value.wide()).collect()
}

fn tensor<T: CubeElement>(client: &Client, values: &[T], shape: &[usize]) -> DeviceTensor {
    DeviceTensor::from_data(client, values, shape).unwrap()
}

/// `places` numbers of rows, none twice, about a third of them -1.
fn distinct_rows(places: usize, rows: usize, seed: u64) -> Vec<i32> {
    let mut rng = StdRng::seed_from_u64(seed);
    let mut free: Vec<i32> = (0..rows as i32).collect();
    (0..places)
        .map(|_| match free.is_empty() || rng.random_bool(0.3) {
            true => -1,
            false => free.swap_remove(rng.random_range(0..free.len())),
        })
        .collect()
}

fn check_gather<T: Real>(rows: usize, width: usize, index: &[i32]) {
    let client = common::client();
    if !has::<T>(&client) {
        return;
    }
    let x = reals::<T>(rows * width, 1);
    let index_tensor = tensor(&client, index, &[index.len()]);
    let row = |r: i32| match usize::try_from(r).ok().filter(|r| *r < rows) {
        Some(r) => wide(&x[r * width..(r + 1) * width]),
        None => vec![0.0; width],
    };
    let gathered: Vec<f64> = index.iter().flat_map(|r| row(*r)).collect();
    let x_tensor = tensor(&client, &x, &[rows, width]);
    let out = gather_rows(&client, &x_tensor, &index_tensor, T::cube_type()).unwrap();
    assert_eq!(out.shape(), [index.len(), width]);
    assert_eq!(wide(&out.read::<T>(&client).unwrap()), gathered);
    let out = gather_rows(&client, &x_tensor, &index_tensor, f32::cube_type()).unwrap();
    assert_eq!(wide(&out.read::<f32>(&client).unwrap()), gathered);

    let grad = reals::<T>(index.len() * width, 2);
    let mut added = vec![0.0f64; rows * width];
    for (i, r) in index.iter().enumerate() {
        if let Some(r) = usize::try_from(*r).ok().filter(|r| *r < rows) {
            for c in 0..width {
                added[r * width + c] += grad[i * width + c].wide();
            }
        }
    }
    let grad = tensor(&client, &grad, &[index.len(), width]);
    let run = || {
        let out = scatter_add_rows(&client, &grad, &index_tensor, rows).unwrap();
        assert_eq!(out.shape(), [rows, width]);
        out.read::<T>(&client).unwrap()
    };
    let out = run();
    assert_eq!(out, run(), "two runs differ");
    let error = common::relative_error(wide(&out), &added);
    assert!(error <= T::TOLERANCE, "{error:e} for {rows} x {width}");
}

fn check_sum<T: Real>(tokens: usize, k: usize, rows: usize, width: usize, index: &[i32]) {
    let client = common::client();
    if !has::<T>(&client) {
        return;
    }
    let y = reals::<T>(rows * width, 3);
    let weights = reals::<f32>(tokens * k, 4);
    let grad = reals::<T>(tokens * width, 5);
    let mut sums = vec![0.0f64; tokens * width];
    let mut dy = vec![0.0f64; rows * width];
    let mut dw = vec![0.0f64; tokens * k];
    for (place, row) in index.iter().enumerate() {
        let Some(row) = usize::try_from(*row).ok().filter(|row| *row < rows) else {
            continue;
        };
        for c in 0..width {
            let (at, from) = (place / k * width + c, row * width + c);
            let weight = f64::from(weights[place]);
            sums[at] += weight * y[from].wide();
            dy[from] += weight * grad[at].wide();
            dw[place] += grad[at].wide() * y[from].wide();
        }
    }
    let y = tensor(&client, &y, &[rows, width]);
    let weights = tensor(&client, &weights, &[tokens, k]);
    let grad = tensor(&client, &grad, &[tokens, width]);
    let index = tensor(&client, index, &[tokens, k]);
    let what = format!("{tokens} tokens, {k} of {rows} rows, width {width}");
    let close = |name: &str, values: Vec<f64>, expected: &[f64], tolerance: f64| {
        let error = common::relative_error(values, expected);
        assert!(error <= tolerance, "{name}: {error:e}, {what}");
    };
    let out = sum_rows(&client, &y, &index, &weights).unwrap();
    let values = wide(&out.read::<T>(&client).unwrap());
    close("sum", values, &sums, T::TOLERANCE);
    let (y_grad, w_grad) = sum_rows_backward(&client, &grad, &y, &index, &weights).unwrap();
    let values = wide(&y_grad.read::<T>(&client).unwrap());
    close("rows", values, &dy, T::TOLERANCE);
    // Weights are f32, and their gradients are sums over the width.
    let values = wide(&w_grad.read::<f32>(&client).unwrap());
    close("weights", values, &dw, 1e-5);
}

#[test]
fn gather_and_scatter() {
    for (rows, width) in [(1, 1), (5, 3), (7, 6), (64, 32), (300, 5), (3000, 8)] {
        let mut rng = StdRng::seed_from_u64(rows as u64);
        for len in [0, 1, 17, 1000] {
            let index: Vec<i32> = (0..len)
                .map(|_| rng.random_range(-1..rows as i32 + 1))
                .collect();
            check_gather::<f32>(rows, width, &index);
            check_gather::<f16>(rows, width, &index);
            check_gather::<bf16>(rows, width, &index);
        }
    }
}

#[test]
fn all_on_one_row() {
    check_gather::<f32>(9, 4, &[5; 500]);
    check_gather::<f32>(0, 4, &[-1; 3]);
    check_gather::<f32>(3, 0, &[1; 3]);
}

#[test]
fn a_hundred_thousand_rows() {
    let mut rng = StdRng::seed_from_u64(6);
    let index: Vec<i32> = (0..100_000).map(|_| rng.random_range(0..20_000)).collect();
    check_gather::<f32>(20_000, 4, &index);
}

#[test]
fn sums() {
    for (tokens, k, rows, width) in [
        (0, 2, 3, 4),
        (1, 1, 1, 1),
        (3, 2, 0, 4),
        (5, 3, 20, 7),
        (33, 8, 300, 64),
        (100, 6, 100, 130),
    ] {
        let index = distinct_rows(tokens * k, rows, tokens as u64);
        check_sum::<f32>(tokens, k, rows, width, &index);
        check_sum::<f16>(tokens, k, rows, width, &index);
        check_sum::<bf16>(tokens, k, rows, width, &index);
    }
    check_sum::<f32>(4, 2, 10, 8, &[-1; 8]);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn any_sums(
        tokens in 0usize..40,
        k in 1usize..9,
        rows in 0usize..200,
        width in 1usize..40,
        seed: u64,
    ) {
        let index = distinct_rows(tokens * k, rows, seed);
        check_sum::<f32>(tokens, k, rows, width, &index);
    }

    #[test]
    fn any_rows(
        rows in 1usize..50,
        width in 1usize..20,
        index in prop::collection::vec(-1i32..50, 0..200),
    ) {
        check_gather::<f32>(rows, width, &index);
    }
}

#[test]
fn misuse_is_named() {
    let client = common::client();
    let x = tensor(&client, &[0.0f32; 6], &[2, 3]);
    let index = tensor(&client, &[0i32; 2], &[2]);
    let shape = |error: KernelError, name: &str| match error {
        KernelError::Shape { argument, .. } => assert_eq!(argument, name),
        error => panic!("{error}"),
    };
    let flat = tensor(&client, &[0.0f32; 6], &[6]);
    shape(
        gather_rows(&client, &flat, &index, f32::cube_type()).unwrap_err(),
        "x",
    );
    let three = tensor(&client, &[0i32; 3], &[3]);
    shape(
        scatter_add_rows(&client, &x, &three, 4).unwrap_err(),
        "index",
    );
    let places = tensor(&client, &[0i32; 4], &[2, 2]);
    let weights = tensor(&client, &[0.0f32; 2], &[1, 2]);
    shape(
        sum_rows(&client, &x, &places, &weights).unwrap_err(),
        "weights",
    );
    let error = gather_rows(&client, &x, &x, f32::cube_type()).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Dtype {
                argument: "index",
                ..
            }
        ),
        "{error}"
    );
    let whole = u32::cube_type();
    let error = gather_rows(&client, &x, &index, whole).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Dtype {
                argument: "dtype",
                ..
            }
        ),
        "{error}"
    );
}
