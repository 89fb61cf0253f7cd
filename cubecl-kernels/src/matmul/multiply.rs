//! Multiplying staged operands, and writing the tile out.

use cubecl::{cmma, prelude::*};

use super::{
    problem::Product,
    stage::Staging,
    tile::{Engine, FRAGMENT, TileSpec},
    view::{Place, ProblemView},
};

/// The sums of a tile: a unit's vectors, or a plane's fragments.
#[derive(CubeType)]
#[allow(dead_code, reason = "made by what the derive generates")]
pub(crate) enum Sums<V: Size> {
    Registers(Array<Vector<f32, V>>),
    Fragments(Sequence<cmma::Matrix<f32>>),
}

#[cube]
pub(crate) fn zero_sums<V: Size>(#[comptime] spec: TileSpec) -> Sums<V> {
    match comptime!(spec.engine) {
        Engine::Registers {
            vectors_m,
            vectors_n,
            ..
        } => {
            let count = comptime!(vectors_m * spec.vector * vectors_n);
            let mut sums = Array::<Vector<f32, V>>::new(count);
            #[unroll]
            for i in 0..count {
                sums[i] = Vector::new(0.0f32);
            }
            Sums::new_Registers(sums)
        }
        Engine::Fragments {
            fragments_m,
            fragments_n,
            ..
        } => {
            let mut sums = Sequence::<cmma::Matrix<f32>>::new();
            #[unroll]
            for _ in 0..comptime!(fragments_m * fragments_n) {
                sums.push(cmma::Matrix::<f32>::from_value(
                    cmma::MatrixIdent::Accumulator,
                    FRAGMENT,
                    FRAGMENT,
                    FRAGMENT,
                    cmma::MatrixLayout::Undefined,
                    0.0,
                ));
            }
            Sums::new_Fragments(sums)
        }
    }
}

/// Adds the product of one stage of each operand.
#[cube]
pub(crate) fn multiply<S: Float, V: Size>(
    sums: &mut Sums<V>,
    left: &Shared<[Vector<S, V>]>,
    left_start: usize,
    right: &Shared<[Vector<S, V>]>,
    right_start: usize,
    #[comptime] stagings: (Staging, Staging),
    #[comptime] spec: TileSpec,
) {
    match sums {
        Sums::Registers(sums) => {
            multiply_registers::<S, V>(sums, left, left_start, right, right_start, stagings, spec)
        }
        Sums::Fragments(sums) => {
            multiply_fragments::<S, V>(sums, left, left_start, right, right_start, stagings, spec)
        }
    }
}

/// Steps of the depth in one pass of the loop; every depth is a multiple. Beside the usual gain, it
/// keeps long reductions below the 65 535 loop passes after which Mesa's software Vulkan (22.3)
/// leaves all loops of an invocation, without an error.
const UNROLL: usize = 4;

#[cube]
fn multiply_registers<S: Float, V: Size>(
    sums: &mut Array<Vector<f32, V>>,
    left: &Shared<[Vector<S, V>]>,
    left_start: usize,
    right: &Shared<[Vector<S, V>]>,
    right_start: usize,
    #[comptime] stagings: (Staging, Staging),
    #[comptime] spec: TileSpec,
) {
    let (units_m, units_n, vectors_m, vectors_n) = comptime!(spec.registers());
    let unit_m = UNIT_POS as usize / units_n;
    let unit_n = UNIT_POS as usize % units_n;
    let mut columns = Array::<Vector<f32, V>>::new(vectors_n);
    for block in 0..comptime!(spec.depth / UNROLL) {
        #[unroll]
        for within in 0..UNROLL {
            let step = block * UNROLL + within;
            let left_line = left_start + step * comptime!(stagings.0.pitch) + unit_m;
            let right_line = right_start + step * comptime!(stagings.1.pitch) + unit_n;
            #[unroll]
            for j in 0..vectors_n {
                columns[j] = Vector::cast_from(right[right_line + comptime!(j * units_n)]);
            }
            #[unroll]
            for i in 0..vectors_m {
                let rows = Vector::<f32, V>::cast_from(left[left_line + comptime!(i * units_m)]);
                #[unroll]
                for r in 0..comptime!(spec.vector) {
                    let row = Vector::<f32, V>::new(rows.extract(r));
                    #[unroll]
                    for j in 0..vectors_n {
                        let sum = comptime!((i * spec.vector + r) * vectors_n + j);
                        sums[sum] = fma(row, columns[j], sums[sum]);
                    }
                }
            }
        }
    }
}

#[cube]
fn multiply_fragments<S: Float, V: Size>(
    sums: &mut Sequence<cmma::Matrix<f32>>,
    left: &Shared<[Vector<S, V>]>,
    left_start: usize,
    right: &Shared<[Vector<S, V>]>,
    right_start: usize,
    #[comptime] stagings: (Staging, Staging),
    #[comptime] spec: TileSpec,
) {
    let (plane, planes_m, planes_n, fragments_m, fragments_n) = comptime!(spec.fragments());
    let plane_m = UNIT_POS as usize / plane / planes_n;
    let plane_n = UNIT_POS as usize / plane % planes_n;
    // Row-major fragments have depth along the rows of the left operand, across those of the right.
    let left_rows = comptime!(stagings.0.along);
    let right_rows = comptime!(!stagings.1.along);
    let (left_layout, right_layout) = comptime!((layout(left_rows), layout(right_rows)));
    let left_pitch = comptime!(stagings.0.pitch);
    let right_pitch = comptime!(stagings.1.pitch);
    let edge = comptime!(FRAGMENT / spec.vector);
    #[unroll]
    for step in 0..comptime!(spec.depth / FRAGMENT) {
        let mut rows = Sequence::<cmma::Matrix<S>>::new();
        #[unroll]
        for i in 0..fragments_m {
            let mut fragment = unsafe {
                cmma::Matrix::<S>::uninitialized(
                    cmma::MatrixIdent::A,
                    FRAGMENT,
                    FRAGMENT,
                    FRAGMENT,
                    left_layout,
                )
            };
            let row = plane_m + comptime!(i * planes_m);
            let start = if left_rows {
                left_start + row * comptime!(FRAGMENT * left_pitch) + comptime!(step * edge)
            } else {
                left_start + comptime!(step * FRAGMENT * left_pitch) + row * edge
            };
            let end = left_start + comptime!(stagings.0.size);
            cmma::load(
                &mut fragment,
                &left[start..end],
                comptime!((left_pitch * spec.vector) as u32),
            );
            rows.push(fragment);
        }
        #[unroll]
        for j in 0..fragments_n {
            let mut fragment = unsafe {
                cmma::Matrix::<S>::uninitialized(
                    cmma::MatrixIdent::B,
                    FRAGMENT,
                    FRAGMENT,
                    FRAGMENT,
                    right_layout,
                )
            };
            let column = plane_n + comptime!(j * planes_n);
            let start = if right_rows {
                right_start + comptime!(step * FRAGMENT * right_pitch) + column * edge
            } else {
                right_start + column * comptime!(FRAGMENT * right_pitch) + comptime!(step * edge)
            };
            let end = right_start + comptime!(stagings.1.size);
            cmma::load(
                &mut fragment,
                &right[start..end],
                comptime!((right_pitch * spec.vector) as u32),
            );
            #[unroll]
            for i in 0..fragments_m {
                let sum = sums.index(comptime!(i * fragments_n + j));
                cmma::execute(rows.index(i), &fragment, sum, sum);
            }
        }
    }
}

fn layout(rows: bool) -> cmma::MatrixLayout {
    if rows {
        cmma::MatrixLayout::RowMajor
    } else {
        cmma::MatrixLayout::ColMajor
    }
}

/// Writes the tile, rounded to the element type, and for SwiGLU its activation.
#[cube]
pub(crate) fn write<F: Float, V: Size>(
    problem: &mut ProblemView<F, V>,
    place: &Place,
    sums: &Sums<V>,
    scratch: &mut ComptimeOption<Shared<[Vector<f32, V>]>>,
    #[comptime] spec: TileSpec,
) {
    let halves = comptime!(problem.product == Product::SwiGlu);
    match sums {
        Sums::Registers(sums) => {
            let (units_m, units_n, vectors_m, vectors_n) = comptime!(spec.registers());
            let unit_m = UNIT_POS as usize / units_n;
            let unit_n = UNIT_POS as usize % units_n;
            let half = comptime!(vectors_n / 2);
            #[unroll]
            for i in 0..comptime!(vectors_m * spec.vector) {
                let block = comptime!(i / spec.vector * units_m);
                let row = (unit_m + block) * comptime!(spec.vector) + comptime!(i % spec.vector);
                #[unroll]
                for j in 0..comptime!(if halves { half } else { vectors_n }) {
                    let column = unit_n + comptime!(j * units_n);
                    let value = sums[comptime!(i * vectors_n + j)];
                    let up = sums[comptime!(if halves { i * vectors_n + j + half } else { 0 })];
                    write_vector::<F, V>(problem, place, row, column, value, up, spec);
                }
            }
        }
        Sums::Fragments(sums) =>
        {
            #[comptime]
            match scratch {
                ComptimeOption::Some(scratch) => {
                    write_fragments::<F, V>(problem, place, sums, scratch, spec)
                }
                ComptimeOption::None => {}
            }
        }
    }
}

/// Fragments pass through shared memory, because which unit holds which element is the
/// hardware's business.
#[cube]
fn write_fragments<F: Float, V: Size>(
    problem: &mut ProblemView<F, V>,
    place: &Place,
    sums: &Sequence<cmma::Matrix<f32>>,
    scratch: &mut Shared<[Vector<f32, V>]>,
    #[comptime] spec: TileSpec,
) {
    let (plane, planes_m, planes_n, fragments_m, fragments_n) = comptime!(spec.fragments());
    let plane_m = UNIT_POS as usize / plane / planes_n;
    let plane_n = UNIT_POS as usize / plane % planes_n;
    let halves = comptime!(problem.product == Product::SwiGlu);
    let half = comptime!(fragments_n / 2);
    let edge = comptime!(FRAGMENT / spec.vector);
    let area = comptime!(FRAGMENT * edge);
    let start = UNIT_POS as usize / plane * comptime!(2 * area);
    #[unroll]
    for i in 0..fragments_m {
        #[unroll]
        for j in 0..comptime!(if halves { half } else { fragments_n }) {
            store_fragment::<V>(
                scratch,
                start,
                sums.index(comptime!(i * fragments_n + j)),
                area,
            );
            if halves {
                store_fragment::<V>(
                    scratch,
                    start + area,
                    sums.index(comptime!(i * fragments_n + j + half)),
                    area,
                );
            }
            sync_cube();
            let mut vector = UNIT_POS as usize % plane;
            while vector < area {
                let row = (plane_m + comptime!(i * planes_m)) * FRAGMENT + vector / edge;
                let column = (plane_n + comptime!(j * planes_n)) * edge + vector % edge;
                let value = scratch[start + vector];
                let up = if halves {
                    scratch[start + area + vector]
                } else {
                    value
                };
                write_vector::<F, V>(problem, place, row, column, value, up, spec);
                vector += plane;
            }
            sync_cube();
        }
    }
}

#[cube]
fn store_fragment<V: Size>(
    scratch: &mut Shared<[Vector<f32, V>]>,
    start: usize,
    fragment: &cmma::Matrix<f32>,
    #[comptime] area: usize,
) {
    cmma::store(
        &mut scratch[start..start + area],
        fragment,
        comptime!(FRAGMENT as u32),
        cmma::MatrixLayout::RowMajor,
    );
}

/// Writes one vector at `row` (elements) and `column` (vectors) of the tile; for SwiGLU `value` is
/// the gate.
#[cube]
fn write_vector<F: Float, V: Size>(
    problem: &mut ProblemView<F, V>,
    place: &Place,
    row: usize,
    column: usize,
    value: Vector<f32, V>,
    up: Vector<f32, V>,
    #[comptime] spec: TileSpec,
) {
    let v = comptime!(spec.vector);
    let row = place.row + row;
    let column = place.column / v + column;
    let columns = problem.columns() / v;
    if row < problem.row_end(place) && column < columns {
        match comptime!(problem.product) {
            Product::SwiGlu => {
                let hidden = row * 2 * columns + column;
                problem.out[hidden] = Vector::cast_from(value);
                problem.out[hidden + columns] = Vector::cast_from(up);
                let one = Vector::<f32, V>::new(1.0f32);
                let activation = value / (one + (-value).exp()) * up;
                #[comptime]
                match &mut problem.out_second {
                    ComptimeOption::Some(out) => {
                        out[row * columns + column] = Vector::cast_from(activation);
                    }
                    ComptimeOption::None => {}
                }
            }
            Product::WeightGrad => {
                let inner = problem.inner as usize;
                let index = (problem.local_expert(place.expert) * inner + row) * columns + column;
                let home = problem.home as usize;
                #[comptime]
                match &mut problem.out_second {
                    ComptimeOption::Some(replicas) => {
                        if place.expert < home {
                            problem.out[index] = Vector::cast_from(value);
                        } else {
                            replicas[index] = Vector::cast_from(value);
                        }
                    }
                    ComptimeOption::None => problem.out[index] = Vector::cast_from(value),
                }
            }
            Product::Forward | Product::DataGrad => {
                problem.out[row * columns + column] = Vector::cast_from(value);
            }
        }
    }
}
