//! Permute and unpermute with their gradients, and streaming copies.

use cubecl_kernels::{copy, rows};

use super::{Checks, error_of, largest, same, tensor, text};
use crate::common::{self, Value};

/// Tokens, copies of each, and width: vectors of 4 fit the first width, none the second.
const SIZES: [(usize, usize, usize); 2] = [(60, 3, 72), (33, 2, 37)];

pub fn run<T: Value>(checks: &mut Checks) {
    for (tokens, k, width) in SIZES {
        let copies = tokens * k;
        // Copies in another order, a fifth of them dropped.
        let order: Vec<usize> = (0..copies).map(|i| i * 7 % copies).collect();
        assert_ne!(copies % 7, 0, "7 divides the number of copies");
        let source: Vec<i32> = order.iter().map(|copy| (copy / k) as i32).collect();
        let mut place = vec![-1i32; copies];
        for (row, copy) in order.iter().enumerate() {
            if row % 5 != 0 {
                place[*copy] = row as i32;
            }
        }
        let x = common::random_of::<T>(tokens * width, 1);
        let y = common::random_of::<T>(copies * width, 2);
        let weights = common::random(copies, 3);
        let (x64, y64) = (common::to_f64(&x), common::to_f64(&y));

        checks.equal("gather_rows", &T::cube_type().to_string(), |client| {
            let index = tensor(client, &source, &[copies])?;
            let x_tensor = tensor(client, &x, &[tokens, width])?;
            let out = rows::gather_rows(client, &x_tensor, &index, T::cube_type()).map_err(text)?;
            let row = |token: &i32| x64[*token as usize * width..][..width].to_vec();
            let expected: Vec<f64> = source.iter().flat_map(row).collect();
            match error_of::<T>(client, &out, &expected)? {
                Some(0.0) => Ok(None),
                error => Err(format!("off by {error:?}")),
            }
        });
        checks.close::<T>("scatter_add_rows", |client| {
            let mut expected = vec![0.0; tokens * width];
            for (row, token) in source.iter().enumerate() {
                for c in 0..width {
                    expected[*token as usize * width + c] += y64[row * width + c];
                }
            }
            let index = tensor(client, &source, &[copies])?;
            let grad = tensor(client, &y, &[copies, width])?;
            let out = rows::scatter_add_rows(client, &grad, &index, tokens).map_err(text)?;
            error_of::<T>(client, &out, &expected)
        });
        let placed = || (0..copies).filter(|copy| place[*copy] >= 0);
        checks.close::<T>("sum_rows", |client| {
            let mut expected = vec![0.0; tokens * width];
            for copy in placed() {
                for c in 0..width {
                    expected[copy / k * width + c] +=
                        f64::from(weights[copy]) * y64[place[copy] as usize * width + c];
                }
            }
            let y = tensor(client, &y, &[copies, width])?;
            let index = tensor(client, &place, &[tokens, k])?;
            let weights = tensor(client, &weights, &[tokens, k])?;
            let out = rows::sum_rows(client, &y, &index, &weights).map_err(text)?;
            error_of::<T>(client, &out, &expected)
        });
        checks.close::<T>("sum_rows_backward", |client| {
            let mut dy = vec![0.0; copies * width];
            let mut dw = vec![0.0; copies];
            for copy in placed() {
                for c in 0..width {
                    let at = place[copy] as usize * width + c;
                    let grad = x64[copy / k * width + c];
                    dy[at] += f64::from(weights[copy]) * grad;
                    dw[copy] += grad * y64[at];
                }
            }
            let grad = tensor(client, &x, &[tokens, width])?;
            let y = tensor(client, &y, &[copies, width])?;
            let index = tensor(client, &place, &[tokens, k])?;
            let weights = tensor(client, &weights, &[tokens, k])?;
            let (y_grad, w_grad) =
                rows::sum_rows_backward(client, &grad, &y, &index, &weights).map_err(text)?;
            largest([
                error_of::<T>(client, &y_grad, &dy),
                error_of::<f32>(client, &w_grad, &dw),
            ])
        });
    }
}

/// Copies, which move bits.
pub fn run_for_any_type(checks: &mut Checks) {
    for size in [15usize, 40_000] {
        let values: Vec<u32> = (0..6 * size as u32).collect();
        let chosen = [4usize, 0, 5];
        let sent: Vec<u32> = chosen
            .iter()
            .flat_map(|expert| values[expert * size..][..size].to_vec())
            .collect();
        for cubes in [1, 7] {
            checks.equal("gather_experts, scatter_experts", "u32", |client| {
                let weights = tensor(client, &values, &[6, size])?;
                let out = copy::gather_experts(client, &weights, &chosen, cubes).map_err(text)?;
                same(client, &out, &sent)?;
                let slots = [1usize, 5, 3];
                let mut expected = vec![7u32; 6 * size];
                for (i, slot) in slots.iter().enumerate() {
                    expected[slot * size..][..size].copy_from_slice(&sent[i * size..][..size]);
                }
                let target = tensor(client, &vec![7u32; 6 * size], &[6, size])?;
                copy::scatter_experts(client, &out, &target, &slots, cubes).map_err(text)?;
                same(client, &target, &expected)
            });
        }
    }
}
