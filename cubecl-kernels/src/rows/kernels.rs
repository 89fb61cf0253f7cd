//! One unit computes one vector of a result, except for dot products, which a few units share.
//!
//! Lengths are arguments: what a slice says of its own length includes the padding of the buffer.

use cubecl::prelude::*;

#[cube(launch_unchecked)]
pub(super) fn gather<F: Float, G: Float, V: Size>(
    x: &[Vector<F, V>],
    index: &[u32],
    out: &mut [Vector<G, V>],
    len: usize,
    rows: u32,
    width: usize,
    #[define(F, G)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < len {
        let row = index[ABSOLUTE_POS / width];
        let mut value = Vector::<F, V>::new(F::new(0.0));
        if row < rows {
            value = x[row as usize * width + ABSOLUTE_POS % width];
        }
        out[ABSOLUTE_POS] = Vector::cast_from(value);
    }
}

/// Adds up the rows of each segment: `order[offsets[r]..offsets[r + 1]]` for row `r`.
#[cube(launch_unchecked)]
pub(super) fn sum_segments<F: Float, V: Size>(
    grad: &[Vector<F, V>],
    offsets: &[u32],
    order: &[u32],
    out: &mut [Vector<F, V>],
    len: usize,
    width: usize,
    #[define(F)] _dtype: ElemType,
) {
    if ABSOLUTE_POS < len {
        let row = ABSOLUTE_POS / width;
        let column = ABSOLUTE_POS % width;
        let mut sum = Vector::<f32, V>::new(0.0f32);
        for i in offsets[row]..offsets[row + 1] {
            let source = order[i as usize] as usize;
            sum += Vector::cast_from(grad[source * width + column]);
        }
        out[ABSOLUTE_POS] = Vector::cast_from(sum);
    }
}

#[cube(launch_unchecked)]
pub(super) fn weighted_sum<F: Float, W: Float, V: Size>(
    y: &[Vector<F, V>],
    index: &[u32],
    weights: &[W],
    out: &mut [Vector<F, V>],
    len: usize,
    rows: u32,
    width: usize,
    k: u32,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < len {
        let token = ABSOLUTE_POS / width;
        let column = ABSOLUTE_POS % width;
        let mut sum = Vector::<f32, V>::new(0.0f32);
        for i in 0..k {
            let place = token * k as usize + i as usize;
            let row = index[place];
            if row < rows {
                let weight = f32::cast_from(weights[place]);
                let value = Vector::<f32, V>::cast_from(y[row as usize * width + column]);
                sum += Vector::new(weight) * value;
            }
        }
        out[ABSOLUTE_POS] = Vector::cast_from(sum);
    }
}

/// `dy[r] = weights[place] * grad[token]`, where `place` is the one that names row `r`.
#[cube(launch_unchecked)]
pub(super) fn row_gradients<F: Float, W: Float, V: Size>(
    grad: &[Vector<F, V>],
    places: &[u32],
    weights: &[W],
    dy: &mut [Vector<F, V>],
    len: usize,
    copies: u32,
    width: usize,
    k: u32,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    if ABSOLUTE_POS < len {
        let place = places[ABSOLUTE_POS / width];
        let mut value = Vector::<f32, V>::new(0.0f32);
        if place < copies {
            let weight = f32::cast_from(weights[place as usize]);
            let at = (place / k) as usize * width + ABSOLUTE_POS % width;
            value = Vector::new(weight) * Vector::cast_from(grad[at]);
        }
        dy[ABSOLUTE_POS] = Vector::cast_from(value);
    }
}

/// `dw[place]`: dot product of the gradient of a token and the row that `place` names. The units
/// along x share one.
#[cube(launch_unchecked)]
pub(super) fn weight_gradients<F: Float, W: Float, V: Size>(
    grad: &[Vector<F, V>],
    y: &[Vector<F, V>],
    index: &[u32],
    dw: &mut [W],
    len: usize,
    rows: u32,
    width: usize,
    k: u32,
    #[comptime] along: u32,
    #[comptime] dots: u32,
    #[define(F, W)] _dtypes: [ElemType; 2],
) {
    let place = CUBE_POS * dots as usize + UNIT_POS_Y as usize;
    let mut sum = Vector::<f32, V>::new(0.0f32);
    if place < len {
        let row = index[place];
        if row < rows {
            let grad_at = place / k as usize * width;
            let y_at = row as usize * width;
            let mut column = UNIT_POS_X as usize;
            while column < width {
                let left = Vector::<f32, V>::cast_from(grad[grad_at + column]);
                let right = Vector::<f32, V>::cast_from(y[y_at + column]);
                sum += left * right;
                column += along as usize;
            }
        }
    }
    let mut total = 0.0f32;
    #[unroll]
    for lane in 0..V::value() {
        total += sum.extract(lane);
    }
    if comptime!(along > 1) {
        let mut parts = Shared::<[f32]>::new_slice((along * dots) as usize);
        parts[UNIT_POS as usize] = total;
        sync_cube();
        let mut half = comptime!(along / 2).runtime();
        while half > 0 {
            if UNIT_POS_X < half {
                let other = parts[(UNIT_POS + half) as usize];
                parts[UNIT_POS as usize] += other;
            }
            sync_cube();
            half /= 2;
        }
        total = parts[UNIT_POS as usize];
    }
    if UNIT_POS_X == 0 && place < len {
        dw[place] = W::cast_from(total);
    }
}

#[cube(launch_unchecked)]
pub(super) fn fill(out: &mut [u32], len: usize, value: u32) {
    if ABSOLUTE_POS < len {
        out[ABSOLUTE_POS] = value;
    }
}

/// `places[index[i]] = i`, where that is a row.
#[cube(launch_unchecked)]
pub(super) fn invert(index: &[u32], places: &mut [u32], len: usize, rows: u32) {
    if ABSOLUTE_POS < len {
        let row = index[ABSOLUTE_POS];
        if row < rows {
            places[row as usize] = ABSOLUTE_POS as u32;
        }
    }
}
