//! The activation is `silu(gate) * up`, computed in f64 here.

mod common;

use cubecl_kernels::swiglu::swiglu;
use cubecl_kernels::{DeviceTensor, KernelError};

#[test]
fn activation() {
    let client = common::client();
    for (rows, width) in [(0, 4), (1, 1), (3, 7), (40, 64), (9, 130)] {
        let hidden: Vec<f32> = common::random(rows * 2 * width, 1)
            .iter()
            .map(|v| v * 8.0)
            .collect();
        let mut expected = Vec::new();
        for row in hidden.chunks_exact(2 * width) {
            let (gate, up) = row.split_at(width);
            expected.extend(gate.iter().zip(up).map(|(gate, up)| {
                let gate = f64::from(*gate);
                gate / (1.0 + (-gate).exp()) * f64::from(*up)
            }));
        }
        let tensor = DeviceTensor::from_data(&client, &hidden, [rows, 2 * width]).unwrap();
        let out = swiglu(&client, &tensor).unwrap();
        assert_eq!(out.shape(), [rows, width]);
        let values = out.read::<f32>(&client).unwrap();
        let error = common::relative_error(values.into_iter().map(f64::from), &expected);
        assert!(error < 1e-6, "{error:e} for {rows} x {width}");
    }
}

#[test]
fn an_odd_width_is_refused() {
    let client = common::client();
    let tensor = DeviceTensor::from_data(&client, &[0.0f32; 6], [2, 3]).unwrap();
    let error = swiglu(&client, &tensor).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Shape {
                argument: "hidden",
                ..
            }
        ),
        "{error}"
    );
}
