//! Element types and what is computed element by element: the SwiGLU activation, `silu(gate) * up`
//! (Shazeer 2020, arXiv 2002.05202), and sums of rows.

use burn::tensor::Element;

use super::kernels::{self, Kernels};

/// An element type that the kernels compute in.
pub(super) trait Real:
    num_traits::Float + bytemuck::Pod + Element + Send + Sync + 'static
{
    /// The kernels of matrix products.
    fn kernels() -> &'static Kernels<Self>;

    /// `out[i] = silu(gate[i]) * up[i]`.
    fn swiglu(gate: &[Self], up: &[Self], out: &mut [Self]);

    /// From `grad`, the gradient of [`swiglu`](Real::swiglu)'s output: writes the gradients of
    /// `gate` and `up` over them, and the output itself over `grad`.
    fn swiglu_backward(grad: &mut [Self], gate: &mut [Self], up: &mut [Self]);

    /// `out[i] = 0 + factor * x[i]`: the first summand of a sum of rows, which has no negative zero.
    fn scale(x: &[Self], factor: Self, out: &mut [Self]);

    /// `out[i] = out[i] + factor * x[i]`.
    fn add_scaled(x: &[Self], factor: Self, out: &mut [Self]);

    /// Sum of the products of `a` and `b`, in as many lanes as a vector has.
    fn dot(a: &[Self], b: &[Self]) -> Self;
}

/// `1 / (1 + exp(-x))` without a branch, so that loops over it become vector code. The exponential
/// is `2^i * exp(r)`, with a polynomial for `exp(r)` up to half of ln 2 from zero (relative error
/// below 2e-7).
#[inline(always)]
fn sigmoid_f32(x: f32) -> f32 {
    // Beyond these limits the sigmoid is 0 or 1 to the last bit that counts, and 2^i stays normal.
    let y = (-x).clamp(-87.0, 87.0);
    // Adding and subtracting 1.5 * 2^23 rounds to the nearest integer.
    const ROUND: f32 = 12_582_912.0;
    let shifted = y * std::f32::consts::LOG2_E + ROUND;
    let i = shifted - ROUND;
    // ln 2 in two parts, so that the products with `i` and the differences are exact where it counts.
    let r = y - i * 0.693_359_4 - i * -2.121_944_4e-4;
    // Taylor coefficients: 1 / n!.
    let mut p = 1.388_888_9e-3;
    p = p * r + 8.333_334e-3;
    p = p * r + 4.166_666_8e-2;
    p = p * r + 1.666_666_7e-1;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    let scale = f32::from_bits((shifted.to_bits().wrapping_add(127)) << 23);
    1.0 / (1.0 + p * scale)
}

#[inline(always)]
fn swiglu_f32(gate: &[f32], up: &[f32], out: &mut [f32]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = gate * sigmoid_f32(*gate) * up;
    }
}

#[inline(always)]
fn swiglu_backward_f32(grad: &mut [f32], gate: &mut [f32], up: &mut [f32]) {
    for ((grad, gate), up) in grad.iter_mut().zip(gate).zip(up) {
        let sigmoid = sigmoid_f32(*gate);
        let silu = *gate * sigmoid;
        let dsilu = sigmoid * (1.0 + *gate * (1.0 - sigmoid));
        let (g, u) = (*grad, *up);
        *grad = silu * u;
        *gate = g * u * dsilu;
        *up = g * silu;
    }
}

#[inline(always)]
fn scale<T: Real>(x: &[T], factor: T, out: &mut [T]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = T::zero() + factor * *x;
    }
}

#[inline(always)]
fn add_scaled<T: Real>(x: &[T], factor: T, out: &mut [T]) {
    for (out, x) in out.iter_mut().zip(x) {
        *out = *out + factor * *x;
    }
}

#[inline(always)]
fn dot<T: Real>(a: &[T], b: &[T]) -> T {
    const LANES: usize = 16;
    let mut lanes = [T::zero(); LANES];
    let (a_chunks, b_chunks) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a_chunks
        .remainder()
        .iter()
        .zip(b_chunks.remainder())
        .fold(T::zero(), |sum, (a, b)| sum + *a * *b);
    for (a, b) in a_chunks.zip(b_chunks) {
        for lane in 0..LANES {
            lanes[lane] = lanes[lane] + a[lane] * b[lane];
        }
    }
    lanes.into_iter().fold(rest, |sum, lane| sum + lane)
}

/// Compiles `$body` a second time for AVX2, and takes that version where the machine has it. Both
/// do the same operations in the same order, without fused multiply-add: the bits are equal.
macro_rules! wide {
    ($name:ident, $body:ident, ($($arg:ident: $type:ty),*) $(-> $result:ty)?) => {
        fn $name($($arg: $type),*) $(-> $result)? {
            #[cfg(target_arch = "x86_64")]
            {
                #[target_feature(enable = "avx2")]
                fn avx2($($arg: $type),*) $(-> $result)? {
                    $body($($arg),*)
                }
                if std::arch::is_x86_feature_detected!("avx2") {
                    // SAFETY: the machine has AVX2, as just asked.
                    return unsafe { avx2($($arg),*) };
                }
            }
            $body($($arg),*)
        }
    };
}

wide!(swiglu_f32_wide, swiglu_f32, (gate: &[f32], up: &[f32], out: &mut [f32]));
wide!(
    swiglu_backward_f32_wide,
    swiglu_backward_f32,
    (grad: &mut [f32], gate: &mut [f32], up: &mut [f32])
);

wide!(scale_f32_wide, scale, (x: &[f32], factor: f32, out: &mut [f32]));
wide!(add_scaled_f32_wide, add_scaled, (x: &[f32], factor: f32, out: &mut [f32]));
wide!(dot_f32_wide, dot, (a: &[f32], b: &[f32]) -> f32);

impl Real for f32 {
    fn kernels() -> &'static Kernels<Self> {
        kernels::f32_kernels()
    }

    fn swiglu(gate: &[Self], up: &[Self], out: &mut [Self]) {
        swiglu_f32_wide(gate, up, out);
    }

    fn swiglu_backward(grad: &mut [Self], gate: &mut [Self], up: &mut [Self]) {
        swiglu_backward_f32_wide(grad, gate, up);
    }

    fn scale(x: &[Self], factor: Self, out: &mut [Self]) {
        scale_f32_wide(x, factor, out);
    }

    fn add_scaled(x: &[Self], factor: Self, out: &mut [Self]) {
        add_scaled_f32_wide(x, factor, out);
    }

    fn dot(a: &[Self], b: &[Self]) -> Self {
        dot_f32_wide(a, b)
    }
}

impl Real for f64 {
    fn kernels() -> &'static Kernels<Self> {
        kernels::f64_kernels()
    }

    fn swiglu(gate: &[Self], up: &[Self], out: &mut [Self]) {
        for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
            *out = gate / (1.0 + (-gate).exp()) * up;
        }
    }

    fn swiglu_backward(grad: &mut [Self], gate: &mut [Self], up: &mut [Self]) {
        for ((grad, gate), up) in grad.iter_mut().zip(gate).zip(up) {
            let sigmoid = 1.0 / (1.0 + (-*gate).exp());
            let silu = *gate * sigmoid;
            let dsilu = sigmoid * (1.0 + *gate * (1.0 - sigmoid));
            let (g, u) = (*grad, *up);
            *grad = silu * u;
            *gate = g * u * dsilu;
            *up = g * silu;
        }
    }

    fn scale(x: &[Self], factor: Self, out: &mut [Self]) {
        scale(x, factor, out);
    }

    fn add_scaled(x: &[Self], factor: Self, out: &mut [Self]) {
        add_scaled(x, factor, out);
    }

    fn dot(a: &[Self], b: &[Self]) -> Self {
        dot(a, b)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sigmoid_is_accurate_over_the_whole_range() {
        let mut x = -120.0f32;
        while x < 120.0 {
            let exact = 1.0 / (1.0 + (-f64::from(x)).exp());
            let error = (f64::from(sigmoid_f32(x)) - exact).abs() / exact.max(1e-37);
            assert!(x < -87.0 || error < 5e-7, "sigmoid({x}): {error:e}");
            assert!((0.0..=1.0).contains(&sigmoid_f32(x)), "sigmoid({x})");
            x += 0.003;
        }
    }

    #[test]
    fn f32_agrees_with_f64() {
        let gate: Vec<f32> = (0..101).map(|i| (i as f32 - 50.0) * 0.3).collect();
        let up: Vec<f32> = (0..101).map(|i| (i as f32 * 0.7).sin()).collect();
        let grad: Vec<f32> = (0..101).map(|i| (i as f32 * 0.3).cos()).collect();
        let wide = |v: &[f32]| v.iter().map(|v| f64::from(*v)).collect::<Vec<_>>();
        let mut narrow = (grad.clone(), gate.clone(), up.clone());
        f32::swiglu_backward(&mut narrow.0, &mut narrow.1, &mut narrow.2);
        let mut exact = (wide(&grad), wide(&gate), wide(&up));
        f64::swiglu_backward(&mut exact.0, &mut exact.1, &mut exact.2);
        let mut out = vec![0.0; 101];
        f32::swiglu(&gate, &up, &mut out);
        assert_eq!(out, narrow.0, "backward recomputes the forward output");
        for i in 0..101 {
            for (a, b) in [
                (narrow.0[i], exact.0[i]),
                (narrow.1[i], exact.1[i]),
                (narrow.2[i], exact.2[i]),
            ] {
                assert!(
                    (f64::from(a) - b).abs() <= 1e-6 * b.abs().max(1.0),
                    "{i}: {a} {b}"
                );
            }
        }
    }
}
