//! Checks of arguments that operations share.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind, IntKind, UIntKind, features::TypeUsage},
};

use crate::{DeviceTensor, KernelError};

/// The tensor has this shape, which `letters` names in the documentation.
pub(crate) fn shape(
    argument: &'static str,
    tensor: &DeviceTensor,
    shape: &[usize],
    letters: &str,
) -> Result<(), KernelError> {
    if tensor.shape() == shape {
        return Ok(());
    }
    Err(KernelError::Shape {
        argument,
        shape: tensor.shape().to_vec(),
        allowed: format!("{letters} = {shape:?}"),
    })
}

/// The tensor has the element type of `other`.
pub(crate) fn same_dtype(
    argument: &'static str,
    tensor: &DeviceTensor,
    other: &DeviceTensor,
) -> Result<(), KernelError> {
    if tensor.dtype() == other.dtype() {
        return Ok(());
    }
    Err(KernelError::Dtype {
        argument,
        dtype: tensor.dtype(),
        allowed: format!("{}, as the other tensors", other.dtype()),
    })
}

/// The tensor holds row numbers: `u32` or `i32`.
pub(crate) fn index(argument: &'static str, tensor: &DeviceTensor) -> Result<(), KernelError> {
    match tensor.dtype() {
        ElemType::UInt(UIntKind::U32) | ElemType::Int(IntKind::I32) => Ok(()),
        dtype => Err(KernelError::Dtype {
            argument,
            dtype,
            allowed: "u32 or i32".into(),
        }),
    }
}

/// The tensor holds f32, f16 or bf16, and the device stores and computes with that.
pub(crate) fn float(
    client: &Client,
    argument: &'static str,
    tensor: &DeviceTensor,
) -> Result<(), KernelError> {
    let dtype = tensor.dtype();
    let known = [FloatKind::F32, FloatKind::F16, FloatKind::BF16].map(ElemType::Float);
    if !known.contains(&dtype) {
        return Err(KernelError::Dtype {
            argument,
            dtype,
            allowed: "f32, f16 or bf16".into(),
        });
    }
    let usage = client.features().type_usage(dtype);
    // Values are converted to f32 before anything is computed.
    if usage.contains(TypeUsage::Buffer) && usage.contains(TypeUsage::Conversion) {
        return Ok(());
    }
    Err(KernelError::Unsupported {
        feature: format!("buffers of {dtype}"),
        device: client.name(),
    })
}

/// A size that kernels pass as a 32-bit number.
pub(crate) fn fits_u32(argument: &'static str, value: usize) -> Result<(), KernelError> {
    if u32::try_from(value).is_ok() {
        return Ok(());
    }
    Err(KernelError::Value {
        argument,
        value: value.to_string(),
        allowed: format!("at most {}", u32::MAX),
    })
}
