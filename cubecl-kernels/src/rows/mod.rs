//! Moving rows: permute and unpermute of token copies, with their adjoints.
//!
//! Sums are in f32, in a fixed order. Rows are named by `u32` or `i32` numbers; numbers past the
//! end, and with them -1, name no row.

mod kernels;

use cubecl::{
    CubeDim,
    client::Client,
    ir::{ElemType, UIntKind},
};

use crate::{DeviceTensor, KernelError, check, launch, sort};

/// Units that add up a dot product together.
const DOT_UNITS: u32 = 32;

/// Units of a cube of dot products.
const DOT_CUBE_UNITS: u32 = 256;

/// Copies rows: `out[i] = x[index[i]]`, zero where `index[i]` names no row.
///
/// - `x`: `[R, D]`, f32, f16 or bf16
/// - `index`: `[N]`
/// - `dtype`: element type of the result, f32, f16 or bf16
/// - result: `[N, D]`
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these.
pub fn gather_rows(
    client: &Client,
    x: &DeviceTensor,
    index: &DeviceTensor,
    dtype: ElemType,
) -> Result<DeviceTensor, KernelError> {
    let [rows, width] = matrix(client, "x", x)?;
    let n = list("index", index)?;
    let out = DeviceTensor::empty(client, [n, width], dtype);
    check::float(client, "dtype", &out)?;
    check::fits_u32("index", n * width)?;
    if out.is_empty() || x.is_empty() {
        return Ok(DeviceTensor::zeros(client, [n, width], dtype));
    }
    let vector = launch::vector_size(width);
    let (cubes, dim) = launch::elementwise(client, out.len() / vector);
    // SAFETY: the kernel reads no row that is not there.
    unsafe {
        kernels::gather::launch_unchecked(
            client,
            cubes,
            dim,
            vector,
            x.arg(),
            index.arg(),
            out.arg(),
            out.len() / vector,
            rows as u32,
            width / vector,
            [x.dtype(), dtype],
        );
    }
    Ok(out)
}

/// Adjoint of [`gather_rows`]: `out[index[i]] += grad[i]`, in the order of `i`.
///
/// - `grad`: `[N, D]`, f32, f16 or bf16
/// - `index`: `[N]`
/// - result: `[rows, D]`, of the element type of `grad`
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these.
pub fn scatter_add_rows(
    client: &Client,
    grad: &DeviceTensor,
    index: &DeviceTensor,
    rows: usize,
) -> Result<DeviceTensor, KernelError> {
    let [n, width] = matrix(client, "grad", grad)?;
    check::index("index", index)?;
    check::shape("index", index, &[n], "[N]")?;
    check::fits_u32("rows", rows * width)?;
    let out = DeviceTensor::empty(client, [rows, width], grad.dtype());
    if out.is_empty() || grad.is_empty() {
        return Ok(DeviceTensor::zeros(client, [rows, width], grad.dtype()));
    }
    let sorted = sort::sort_by_expert(client, index, rows)?;
    let vector = launch::vector_size(width);
    let (cubes, dim) = launch::elementwise(client, out.len() / vector);
    // SAFETY: the sort names rows of `grad` alone.
    unsafe {
        kernels::sum_segments::launch_unchecked(
            client,
            cubes,
            dim,
            vector,
            grad.arg(),
            sorted.offsets.arg(),
            sorted.order.arg(),
            out.arg(),
            out.len() / vector,
            width / vector,
            grad.dtype(),
        );
    }
    Ok(out)
}

/// Weighted sum of rows: `out[t] = sum over k of weights[t, k] * y[index[t, k]]`, added in the
/// order of `k`, leaving out places of `index` that name no row.
///
/// - `y`: `[N, D]`, f32, f16 or bf16
/// - `index`: `[T, K]`
/// - `weights`: `[T, K]`, f32, f16 or bf16
/// - result: `[T, D]`, of the element type of `y`
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these.
pub fn sum_rows(
    client: &Client,
    y: &DeviceTensor,
    index: &DeviceTensor,
    weights: &DeviceTensor,
) -> Result<DeviceTensor, KernelError> {
    let [rows, width] = matrix(client, "y", y)?;
    let [tokens, k] = copies(client, index, weights)?;
    check::fits_u32("index", tokens * width)?;
    let out = DeviceTensor::empty(client, [tokens, width], y.dtype());
    if out.is_empty() || y.is_empty() || k == 0 {
        return Ok(DeviceTensor::zeros(client, [tokens, width], y.dtype()));
    }
    let vector = launch::vector_size(width);
    let (cubes, dim) = launch::elementwise(client, out.len() / vector);
    // SAFETY: the kernel reads no row that is not there.
    unsafe {
        kernels::weighted_sum::launch_unchecked(
            client,
            cubes,
            dim,
            vector,
            y.arg(),
            index.arg(),
            weights.arg(),
            out.arg(),
            out.len() / vector,
            rows as u32,
            width / vector,
            k as u32,
            [y.dtype(), weights.dtype()],
        );
    }
    Ok(out)
}

/// Gradients of [`sum_rows`] for `y` and `weights`, from that of its result. A row of `y` may be
/// named by one place of `index` at most; rows that none names get zero, and so do weights whose
/// place names no row.
///
/// - `grad`: `[T, D]`, of the element type of `y`
/// - `y`: `[N, D]`, f32, f16 or bf16
/// - `index`: `[T, K]`
/// - `weights`: `[T, K]`, f32, f16 or bf16
/// - result: `[N, D]` and `[T, K]`, of the element types of `y` and `weights`
///
/// # Errors
/// [`KernelError`] when shapes or element types are others than these.
pub fn sum_rows_backward(
    client: &Client,
    grad: &DeviceTensor,
    y: &DeviceTensor,
    index: &DeviceTensor,
    weights: &DeviceTensor,
) -> Result<(DeviceTensor, DeviceTensor), KernelError> {
    let [rows, width] = matrix(client, "y", y)?;
    let [tokens, k] = copies(client, index, weights)?;
    check::same_dtype("grad", grad, y)?;
    check::shape("grad", grad, &[tokens, width], "[T, D]")?;
    if y.is_empty() || weights.is_empty() {
        return Ok((
            DeviceTensor::zeros(client, [rows, width], y.dtype()),
            DeviceTensor::zeros(client, [tokens, k], weights.dtype()),
        ));
    }
    let dy = DeviceTensor::empty(client, [rows, width], y.dtype());
    let dw = DeviceTensor::empty(client, [tokens, k], weights.dtype());
    let vector = launch::vector_size(width);
    let dtypes = [y.dtype(), weights.dtype()];
    let places = places_of_rows(client, index, rows);
    let (cubes, dim) = launch::elementwise(client, dy.len() / vector);
    // SAFETY: places are below `tokens * k`.
    unsafe {
        kernels::row_gradients::launch_unchecked(
            client,
            cubes,
            dim,
            vector,
            grad.arg(),
            places.arg(),
            weights.arg(),
            dy.arg(),
            dy.len() / vector,
            (tokens * k) as u32,
            width / vector,
            k as u32,
            dtypes,
        );
    }
    let along = launch::sharing_units(client, DOT_UNITS);
    let dots = match launch::is_cpu(client) {
        true => client.properties().hardware.max_units_per_cube,
        false => launch::sharing_units(client, DOT_CUBE_UNITS) / along,
    };
    let cubes = launch::cubes(client, dw.len().div_ceil(dots as usize));
    // SAFETY: the kernel reads no row that is not there.
    unsafe {
        kernels::weight_gradients::launch_unchecked(
            client,
            cubes,
            CubeDim::new_2d(along, dots),
            vector,
            grad.arg(),
            y.arg(),
            index.arg(),
            dw.arg(),
            dw.len(),
            rows as u32,
            width / vector,
            k as u32,
            along,
            dots,
            dtypes,
        );
    }
    Ok((dy, dw))
}

/// The place of `index` that names each row, `u32::MAX` where none does: `[rows]`.
fn places_of_rows(client: &Client, index: &DeviceTensor, rows: usize) -> DeviceTensor {
    let places = DeviceTensor::empty(client, [rows], ElemType::UInt(UIntKind::U32));
    // SAFETY: the kernels write inside of the buffer.
    unsafe {
        let (cubes, dim) = launch::elementwise(client, rows);
        kernels::fill::launch_unchecked(client, cubes, dim, places.arg(), rows, u32::MAX);
        let (cubes, dim) = launch::elementwise(client, index.len());
        kernels::invert::launch_unchecked(
            client,
            cubes,
            dim,
            index.arg(),
            places.arg(),
            index.len(),
            rows as u32,
        );
    }
    places
}

/// The sizes of a float matrix.
fn matrix(
    client: &Client,
    argument: &'static str,
    tensor: &DeviceTensor,
) -> Result<[usize; 2], KernelError> {
    check::float(client, argument, tensor)?;
    let &[rows, width] = tensor.shape() else {
        return Err(wrong_rank(argument, tensor, "[rows, D]"));
    };
    check::fits_u32(argument, tensor.len())?;
    Ok([rows, width])
}

/// The length of a list of row numbers.
fn list(argument: &'static str, tensor: &DeviceTensor) -> Result<usize, KernelError> {
    check::index(argument, tensor)?;
    let &[len] = tensor.shape() else {
        return Err(wrong_rank(argument, tensor, "[N]"));
    };
    check::fits_u32(argument, len)?;
    Ok(len)
}

/// The sizes of `index` and `weights`, which agree.
fn copies(
    client: &Client,
    index: &DeviceTensor,
    weights: &DeviceTensor,
) -> Result<[usize; 2], KernelError> {
    check::index("index", index)?;
    let &[tokens, k] = index.shape() else {
        return Err(wrong_rank("index", index, "[T, K]"));
    };
    check::float(client, "weights", weights)?;
    check::shape("weights", weights, &[tokens, k], "[T, K]")?;
    check::fits_u32("index", tokens * k)?;
    Ok([tokens, k])
}

fn wrong_rank(argument: &'static str, tensor: &DeviceTensor, allowed: &str) -> KernelError {
    KernelError::Shape {
        argument,
        shape: tensor.shape().to_vec(),
        allowed: allowed.into(),
    }
}
