//! Grouped products against loops in f64.

mod common;

use common::grouped::{Case, swiglu};
use common::{Value, assert_close, offsets, random_of, supports, to_f64};
use cubecl::client::Client;
use cubecl_kernels::{
    DeviceTensor, ExpertWeights, KernelError,
    matmul::{
        grouped_matmul, grouped_matmul_data_grad, grouped_matmul_weight_grad, grouped_swiglu,
        swiglu_backward,
    },
};
use half::{bf16, f16};
use proptest::prelude::*;

/// The weights of a case, in one buffer or two.
fn weights_of<T: Value>(client: &Client, case: &Case, data: &[T]) -> ExpertWeights {
    let home = case.counts.len() - case.replicas;
    let (first, second) = data.split_at(home * case.k * case.m);
    let tensor =
        |data, experts| DeviceTensor::from_data(client, data, [experts, case.k, case.m]).unwrap();
    if case.replicas == 0 {
        ExpertWeights::new(tensor(first, home)).unwrap()
    } else {
        ExpertWeights::with_replicas(tensor(first, home), tensor(second, case.replicas)).unwrap()
    }
}

fn offsets_of(client: &Client, case: &Case) -> DeviceTensor {
    let offsets = offsets(&case.counts);
    DeviceTensor::from_data(client, &offsets, [offsets.len()]).unwrap()
}

/// All three products of a case are right.
fn check_products<T: Value>(client: &Client, case: &Case) {
    let (n, k, m) = (case.rows(), case.k, case.m);
    let x_data = random_of::<T>(n * k, 1);
    let w_data = random_of::<T>(case.counts.len() * k * m, 2);
    let grad_data = random_of::<T>(n * m, 3);
    let x = DeviceTensor::from_data(client, &x_data, [n, k]).unwrap();
    let grad = DeviceTensor::from_data(client, &grad_data, [n, m]).unwrap();
    let weights = weights_of(client, case, &w_data);
    let offsets = offsets_of(client, case);
    let (x64, w64, grad64) = (to_f64(&x_data), to_f64(&w_data), to_f64(&grad_data));

    let y = grouped_matmul(client, &x, &weights, &offsets).unwrap();
    assert_eq!(y.shape(), [n, m]);
    let y = y.read::<T>(client).unwrap();
    assert_close("product", &y, &case.forward_reference(&x64, &w64));

    let dx = grouped_matmul_data_grad(client, &grad, &weights, &offsets).unwrap();
    assert_eq!(dx.shape(), [n, k]);
    let dx = dx.read::<T>(client).unwrap();
    assert_close(
        "data gradient",
        &dx,
        &case.data_grad_reference(&grad64, &w64),
    );

    let untouched = vec![T::of(7.0); w_data.len()];
    let dw = weights_of(client, case, &untouched);
    grouped_matmul_weight_grad(client, &x, &grad, &offsets, &dw).unwrap();
    let mut dw_data = dw.home().read::<T>(client).unwrap();
    if let Some(replicas) = dw.replicas() {
        dw_data.extend(replicas.read::<T>(client).unwrap());
    }
    assert_close(
        "weight gradient",
        &dw_data,
        &case.weight_grad_reference(&x64, &grad64, 7.0),
    );
}

/// The fused activation and its gradient are right; `case.m` is `2F`.
fn check_swiglu<T: Value>(client: &Client, case: &Case) {
    let (n, d, f) = (case.rows(), case.k, case.m / 2);
    let x_data = random_of::<T>(n * d, 4);
    let w_data = random_of::<T>(case.counts.len() * d * 2 * f, 5);
    let x = DeviceTensor::from_data(client, &x_data, [n, d]).unwrap();
    let weights = weights_of(client, case, &w_data);
    let out = grouped_swiglu(client, &x, &weights, &offsets_of(client, case)).unwrap();
    assert_eq!(out.hidden.shape(), [n, 2 * f]);
    assert_eq!(out.activation.shape(), [n, f]);

    let hidden64 = case.forward_reference(&to_f64(&x_data), &to_f64(&w_data));
    let hidden = out.hidden.read::<T>(client).unwrap();
    assert_close("hidden", &hidden, &hidden64);
    let activation = case.activation_reference(&hidden64);
    let actual = out.activation.read::<T>(client).unwrap();
    assert_close("activation", &actual, &activation);

    // The gradient, by central differences on what the device holds.
    let grad_data = random_of::<T>(n * f, 6);
    let grad = DeviceTensor::from_data(client, &grad_data, [n, f]).unwrap();
    let back = swiglu_backward(client, &out.hidden, &grad).unwrap();
    let (hidden, grad64, step) = (to_f64(&hidden), to_f64(&grad_data), 1e-5);
    let mut expected = vec![0.0; n * 2 * f];
    for row in 0..n {
        for column in 0..f {
            let (g, u) = (row * 2 * f + column, row * 2 * f + f + column);
            let slope = |dg: f64, du: f64| {
                let plus = swiglu(hidden[g] + dg, hidden[u] + du);
                let minus = swiglu(hidden[g] - dg, hidden[u] - du);
                grad64[row * f + column] * (plus - minus) / (2.0 * step)
            };
            expected[g] = slope(step, 0.0);
            expected[u] = slope(0.0, step);
        }
    }
    let back = back.read::<T>(client).unwrap();
    assert_close("activation gradient", &back, &expected);
}

/// Sizes around the tiles' edges, empty ones, and lopsided loads.
fn cases() -> Vec<Case> {
    let mut one_busy = vec![0; 16];
    one_busy[11] = 77;
    let mut sparse = vec![0; 64];
    (sparse[3], sparse[40], sparse[63]) = (1, 9, 2);
    vec![
        Case::new([], 8, 8),
        Case::new([0], 8, 8),
        Case::new([0, 0, 0], 8, 16),
        Case::new([1], 1, 2),
        Case::new([1, 0, 1], 1, 6),
        Case::new([3, 5], 7, 10),
        Case::new([8, 16, 1], 16, 32),
        Case::new([33, 0, 7, 12], 24, 40),
        Case::new([130, 2], 136, 72),
        Case::new([5, 4], 300, 34),
        Case::new(one_busy, 12, 20),
        Case::new(sparse, 20, 28),
    ]
}

#[test]
fn f32_products() {
    let client = common::client();
    for case in cases() {
        check_products::<f32>(&client, &case);
    }
}

#[test]
fn f32_swiglu() {
    let client = common::client();
    for case in cases() {
        check_swiglu::<f32>(&client, &case);
    }
}

/// Every `step`-th of the larger cases; in a type that the device lacks, the operation says so.
fn half_type<T: Value>(step: usize) {
    let client = common::client();
    if supports::<T>(&client) {
        for case in cases().into_iter().skip(5).step_by(step) {
            check_products::<T>(&client, &case);
            check_swiglu::<T>(&client, &case);
        }
        return;
    }
    let x = DeviceTensor::from_data(&client, &[T::of(0.0); 4], [2, 2]).unwrap();
    let w = DeviceTensor::from_data(&client, &[T::of(0.0); 4], [1, 2, 2]).unwrap();
    let offsets = DeviceTensor::from_data(&client, &[0u32, 2], [2]).unwrap();
    let error = grouped_matmul(&client, &x, &ExpertWeights::new(w).unwrap(), &offsets);
    assert!(matches!(error, Err(KernelError::Unsupported { .. })));
}

#[test]
fn f16_products() {
    half_type::<f16>(4);
}

#[test]
fn bf16_products() {
    half_type::<bf16>(2);
}

#[test]
fn replicas_are_read_and_written_where_they_lie() {
    let client = common::client();
    for (counts, replicas) in [
        (vec![4, 0, 9, 3], 1),
        (vec![0, 6, 5], 2),
        (vec![7, 3], 2),
        (vec![7, 0], 1),
    ] {
        let case = Case {
            replicas,
            ..Case::new(counts, 16, 24)
        };
        check_products::<f32>(&client, &case);
        check_swiglu::<f32>(&client, &case);
    }
    // Slots without experts are no second buffer.
    let case = Case::new([5, 3], 8, 8);
    let w = random_of::<f32>(128, 2);
    let empty = DeviceTensor::from_data::<f32>(&client, &[], [0, 8, 8]).unwrap();
    let home = weights_of(&client, &case, &w).home().clone();
    let weights = ExpertWeights::with_replicas(home, empty).unwrap();
    let x = random_of::<f32>(64, 1);
    let device_x = DeviceTensor::from_data(&client, &x, [8, 8]).unwrap();
    let y = grouped_matmul(&client, &device_x, &weights, &offsets_of(&client, &case)).unwrap();
    assert_close(
        "product",
        &y.read::<f32>(&client).unwrap(),
        &case.forward_reference(&to_f64(&x), &to_f64(&w)),
    );
}

#[test]
fn many_rows_and_many_experts() {
    let client = common::client();
    check_products::<f32>(&client, &Case::new([60_000, 0, 39_999, 1], 4, 8));
    let counts: Vec<usize> = (0..512)
        .map(|e| if e % 7 == 0 { e % 23 } else { 0 })
        .collect();
    check_products::<f32>(&client, &Case::new(counts.clone(), 8, 16));
    check_swiglu::<f32>(&client, &Case::new(counts, 8, 16));
}

#[test]
fn signed_offsets_are_read_too() {
    let client = common::client();
    let case = Case::new([3, 2], 4, 4);
    let (x, w) = (random_of::<f32>(20, 1), random_of::<f32>(32, 2));
    let device_x = DeviceTensor::from_data(&client, &x, [5, 4]).unwrap();
    let offsets = DeviceTensor::from_data(&client, &[0i32, 3, 5], [3]).unwrap();
    let y = grouped_matmul(
        &client,
        &device_x,
        &weights_of(&client, &case, &w),
        &offsets,
    )
    .unwrap();
    assert_close(
        "product",
        &y.read::<f32>(&client).unwrap(),
        &case.forward_reference(&to_f64(&x), &to_f64(&w)),
    );
}

/// Offsets that decrease or pass the end must not reach outside the tensors; experts whose range
/// is sound are computed all the same.
#[test]
fn broken_offsets_stay_inside() {
    let client = common::client();
    let case = Case::new([2, 2, 2], 4, 8);
    let (x, w) = (random_of::<f32>(24, 1), random_of::<f32>(96, 2));
    let device_x = DeviceTensor::from_data(&client, &x, [6, 4]).unwrap();
    let weights = weights_of(&client, &case, &w);
    let expected = case.forward_reference(&to_f64(&x), &to_f64(&w));
    for broken in [[0, 2, u32::MAX, 4], [0, 2, 1, u32::MAX]] {
        let offsets = DeviceTensor::from_data(&client, &broken, [4]).unwrap();
        let y = grouped_matmul(&client, &device_x, &weights, &offsets).unwrap();
        let y = y.read::<f32>(&client).unwrap();
        assert_close("the first expert", &y[..8], &expected[..8]);
        let dw = weights_of(&client, &case, &w);
        grouped_matmul_weight_grad(&client, &device_x, &y_like(&client), &offsets, &dw).unwrap();
        dw.home().read::<f32>(&client).unwrap();
    }
}

fn y_like(client: &Client) -> DeviceTensor {
    DeviceTensor::from_data(client, &random_of::<f32>(48, 3), [6, 8]).unwrap()
}

/// A row's bits depend neither on the run nor on what other rows there are.
#[test]
fn the_same_row_gives_the_same_bits() {
    let client = common::client();
    let (k, m) = (40, 24);
    let case = Case::new([50, 0, 31], k, m);
    let x = random_of::<f32>(81 * k, 1);
    let w = random_of::<f32>(3 * k * m, 2);
    let run = |x: &[f32], case: &Case| {
        let x = DeviceTensor::from_data(&client, x, [case.rows(), k]).unwrap();
        let weights = weights_of(&client, case, &w);
        let y = grouped_matmul(&client, &x, &weights, &offsets_of(&client, case)).unwrap();
        y.read::<f32>(&client).unwrap()
    };
    let all = run(&x, &case);
    assert_eq!(all, run(&x, &case));
    let few = run(&x[79 * k..], &Case::new([0, 0, 2], k, m));
    assert_eq!(all[79 * m..], few);
}

#[test]
fn wrong_arguments_are_named() {
    let client = common::client();
    let f32s = |shape: &[usize]| {
        let len = shape.iter().product();
        DeviceTensor::from_data(&client, &vec![0.0f32; len], shape).unwrap()
    };
    let offsets = DeviceTensor::from_data(&client, &[0u32, 1, 2], [3]).unwrap();
    let weights = ExpertWeights::new(f32s(&[2, 4, 6])).unwrap();
    let argument = |error: KernelError| match error {
        KernelError::Shape { argument, .. } => ("shape", argument),
        KernelError::Dtype { argument, .. } => ("dtype", argument),
        other => panic!("{other}"),
    };

    let error = ExpertWeights::new(f32s(&[4, 6])).unwrap_err();
    assert_eq!(argument(error), ("shape", "home"));
    let error = ExpertWeights::with_replicas(f32s(&[2, 4, 6]), f32s(&[1, 6, 4])).unwrap_err();
    assert_eq!(argument(error), ("shape", "replicas"));
    let error = grouped_matmul(&client, &f32s(&[2, 5]), &weights, &offsets).unwrap_err();
    assert_eq!(argument(error), ("shape", "x"));
    let error = grouped_matmul(&client, &f32s(&[2, 2, 2]), &weights, &offsets).unwrap_err();
    assert_eq!(argument(error), ("shape", "x"));
    let error = grouped_matmul_data_grad(&client, &f32s(&[2, 4]), &weights, &offsets).unwrap_err();
    assert_eq!(argument(error), ("shape", "grad"));
    let short = DeviceTensor::from_data(&client, &[0u32, 1], [2]).unwrap();
    let error = grouped_matmul(&client, &f32s(&[2, 4]), &weights, &short).unwrap_err();
    assert_eq!(argument(error), ("shape", "offsets"));
    let error = grouped_matmul(&client, &f32s(&[2, 4]), &weights, &f32s(&[3])).unwrap_err();
    assert_eq!(argument(error), ("dtype", "offsets"));
    let error =
        grouped_matmul_weight_grad(&client, &f32s(&[2, 4]), &f32s(&[1, 6]), &offsets, &weights)
            .unwrap_err();
    assert_eq!(argument(error), ("shape", "grad"));
    let odd = ExpertWeights::new(f32s(&[2, 4, 5])).unwrap();
    let error = grouped_swiglu(&client, &f32s(&[2, 4]), &odd, &offsets).unwrap_err();
    assert_eq!(argument(error), ("shape", "gate_up"));
    let error = swiglu_backward(&client, &f32s(&[2, 4]), &f32s(&[2, 4])).unwrap_err();
    assert_eq!(argument(error), ("shape", "hidden"));
    let ints = DeviceTensor::from_data(&client, &[0u32; 8], [2, 4]).unwrap();
    let error = grouped_matmul(&client, &ints, &weights, &offsets).unwrap_err();
    assert_eq!(argument(error), ("dtype", "x"));
    let int_weights = DeviceTensor::from_data(&client, &[0u32; 48], [2, 4, 6]).unwrap();
    let int_weights = ExpertWeights::new(int_weights).unwrap();
    let error = grouped_matmul(&client, &ints, &int_weights, &offsets).unwrap_err();
    assert_eq!(argument(error), ("dtype", "x"));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn random_products(
        counts in prop::collection::vec(prop_oneof![2 => Just(0usize), 3 => 1usize..40], 1..9),
        replicas in 0usize..4,
        k in 1usize..70,
        f in 1usize..40,
    ) {
        let client = common::client();
        let replicas = replicas.min(counts.len());
        let case = Case { replicas, ..Case::new(counts, k, 2 * f) };
        check_products::<f32>(&client, &case);
        check_swiglu::<f32>(&client, &case);
    }
}
