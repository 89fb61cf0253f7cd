//! Tensors go to the device and come back unchanged, and misuse is refused.

mod common;

use cubecl_kernels::{DeviceTensor, KernelError};

#[test]
fn data_comes_back_unchanged() {
    let client = common::client();
    for len in [0, 1, 3, 1000] {
        let data = common::random(len, 1);
        let tensor = DeviceTensor::from_data(&client, &data, [len]).unwrap();
        assert_eq!(tensor.read::<f32>(&client).unwrap(), data);
    }
}

#[test]
fn misuse_is_named() {
    let client = common::client();
    let error = DeviceTensor::from_data(&client, &[1.0f32; 6], [2, 4]).unwrap_err();
    assert!(
        matches!(&error, KernelError::Shape { argument: "data", shape, .. } if shape == &[2, 4])
    );

    let tensor = DeviceTensor::from_data(&client, &[1.0f32; 6], [2, 3]).unwrap();
    let error = tensor.read::<u32>(&client).unwrap_err();
    assert!(matches!(error, KernelError::Dtype { .. }), "{error}");

    let error = DeviceTensor::new(tensor.handle().clone(), [100], tensor.dtype()).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Shape {
                argument: "handle",
                ..
            }
        ),
        "{error}"
    );
}
