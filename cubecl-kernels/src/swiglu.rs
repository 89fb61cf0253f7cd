//! The activation of SwiGLU experts on its own, for backward passes that kept what was before it.

use cubecl::{client::Client, prelude::*};

use crate::{DeviceTensor, KernelError, check, launch};

/// `silu(gate) * up` (Shazeer 2020, "GLU Variants Improve Transformer"), computed in f32.
///
/// - `hidden`: `[N, 2F]`, gate first; f32, f16 or bf16
/// - result: `[N, F]`, of the same element type
///
/// # Errors
/// [`KernelError`] when `hidden` has another rank, an odd width or another element type.
pub fn swiglu(client: &Client, hidden: &DeviceTensor) -> Result<DeviceTensor, KernelError> {
    check::float(client, "hidden", hidden)?;
    check::fits_u32("hidden", hidden.len())?;
    let (rows, width) = match *hidden.shape() {
        [rows, both] if both.is_multiple_of(2) => (rows, both / 2),
        _ => {
            return Err(KernelError::Shape {
                argument: "hidden",
                shape: hidden.shape().to_vec(),
                allowed: "[N, 2F]".into(),
            });
        }
    };
    let out = DeviceTensor::empty(client, [rows, width], hidden.dtype());
    if out.is_empty() {
        return Ok(out);
    }
    let vector = launch::vector_size(width);
    let (cubes, dim) = launch::elementwise(client, out.len() / vector);
    // SAFETY: the kernel reads and writes inside of the buffers.
    unsafe {
        activate::launch_unchecked(
            client,
            cubes,
            dim,
            vector,
            hidden.arg(),
            out.arg(),
            out.len() / vector,
            width / vector,
            hidden.dtype(),
        );
    }
    Ok(out)
}

#[cube(launch_unchecked)]
fn activate<F: Float, V: Size>(
    hidden: &[Vector<F, V>],
    out: &mut [Vector<F, V>],
    len: usize,
    width: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < len {
        let at = ABSOLUTE_POS / width * 2 * width + ABSOLUTE_POS % width;
        let gate = Vector::<f32, V>::cast_from(hidden[at]);
        let up = Vector::<f32, V>::cast_from(hidden[at + width]);
        let one = Vector::<f32, V>::new(1.0f32);
        out[ABSOLUTE_POS] = Vector::cast_from(gate / (one + (-gate).exp()) * up);
    }
}
