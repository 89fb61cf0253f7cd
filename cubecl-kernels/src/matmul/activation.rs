use cubecl::{calculate_cube_count_elemwise, client::Client, ir::AddressType, prelude::*};

use super::tile::vector_size;
use crate::{DeviceTensor, KernelError, check};

/// Gradient of the activation of [`grouped_swiglu`](super::grouped_swiglu): `hidden [N, 2F]` (gate
/// first), `grad [N, F]` of the activation -> gradient of `hidden`, `[N, 2F]`. Computed in f32.
///
/// # Errors
/// [`KernelError`] when shapes or element types do not fit, or the device lacks the element type.
pub fn swiglu_backward(
    client: &Client,
    hidden: &DeviceTensor,
    grad: &DeviceTensor,
) -> Result<DeviceTensor, KernelError> {
    if grad.shape().len() != 2 {
        return Err(KernelError::Shape {
            argument: "grad",
            shape: grad.shape().to_vec(),
            allowed: "[N, F]".into(),
        });
    }
    let [rows, width] = [grad.shape()[0], grad.shape()[1]];
    check::shape("hidden", hidden, &[rows, 2 * width], "[N, 2F]")?;
    check::same_dtype("grad", grad, hidden)?;
    check::float(client, "hidden", hidden)?;
    check::fits_u32("F", width)?;
    let out = DeviceTensor::empty(client, hidden.shape(), hidden.dtype());
    if grad.is_empty() {
        return Ok(out);
    }
    let vector = vector_size(client.properties(), hidden.dtype(), &[width]);
    let vectors = grad.len() / vector;
    let cube = CubeDim::new(client, vectors);
    // SAFETY: shapes were checked, and units past `vectors` do nothing.
    unsafe {
        swiglu_backward_kernel::launch_unchecked(
            client,
            calculate_cube_count_elemwise(client, vectors, cube),
            cube,
            AddressType::from_len(hidden.len()),
            vector,
            hidden.arg(),
            grad.arg(),
            out.arg(),
            vectors,
            width / vector,
            hidden.dtype(),
        );
    }
    Ok(out)
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn swiglu_backward_kernel<F: Float, V: Size>(
    hidden: &[Vector<F, V>],
    grad: &[Vector<F, V>],
    out: &mut [Vector<F, V>],
    vectors: usize,
    width: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS >= vectors {
        terminate!();
    }
    let row = ABSOLUTE_POS / width;
    let gate_index = row * 2 * width + ABSOLUTE_POS % width;
    let gate = Vector::<f32, V>::cast_from(hidden[gate_index]);
    let up = Vector::<f32, V>::cast_from(hidden[gate_index + width]);
    let grad = Vector::<f32, V>::cast_from(grad[ABSOLUTE_POS]);
    let one = Vector::<f32, V>::new(1.0f32);
    let sigmoid = one / (one + (-gate).exp());
    // d silu(g) = sigmoid(g) * (1 + g * (1 - sigmoid(g)))
    let slope = sigmoid * (one + gate * (one - sigmoid));
    out[gate_index] = Vector::cast_from(grad * up * slope);
    out[gate_index + width] = Vector::cast_from(grad * gate * sigmoid);
}
