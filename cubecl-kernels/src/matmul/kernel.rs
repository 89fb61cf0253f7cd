//! The persistent kernel: draw a tile, find its expert, compute it, until none is left.

use cubecl::prelude::*;

use super::{
    multiply::{Sums, multiply, write, zero_sums},
    problem::Product,
    stage::{Staging, await_groups, commit, copy_ahead, end_group, fetch, fill},
    tile::{FRAGMENT, TileSpec, Transfer},
    view::{Place, ProblemView, TraceView, expert_rows},
};
use crate::queue::{BACKGROUND, NONE, URGENT, draw, take};

/// How the queue is broken, so that a test sees its own check fail.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Fault {
    None,
    #[cfg_attr(not(all(test, feature = "runtime")), allow(dead_code))]
    Repeats,
    #[cfg_attr(not(all(test, feature = "runtime")), allow(dead_code))]
    Skips,
    #[cfg_attr(not(all(test, feature = "runtime")), allow(dead_code))]
    WrongPrefix,
}

/// `next [2]` and `policy [1]` are the words of [`crate::queue`]; the policy is read only when
/// there is a background problem. `S` is the type of what is staged.
#[cube(launch_unchecked, create_dummy_kernel, address_type = "dynamic")]
#[allow(clippy::too_many_arguments)]
pub(crate) fn persistent_kernel<F: Float, S: Float, V: Size>(
    mut urgent: ProblemView<F, V>,
    mut background: ComptimeOption<ProblemView<F, V>>,
    next: &[Atomic<u32>],
    policy: &[Atomic<u32>],
    mut trace: ComptimeOption<TraceView>,
    #[comptime] spec: TileSpec,
    #[comptime] fault: Fault,
    #[define(F, S)] _dtypes: [ElemType; 2],
) {
    let buffers = comptime!(spec.buffers);
    let mut left = Shared::<[Vector<S, V>]>::new_aligned_slice(
        comptime!(buffers * spec.left_stage_vectors()),
        128usize,
    );
    let mut right = Shared::<[Vector<S, V>]>::new_aligned_slice(
        comptime!(buffers * spec.right_stage_vectors()),
        128usize,
    );
    let mut scratch = new_scratch::<V>(spec);
    let mut drawn = Shared::<[u32]>::new_slice(7usize);
    let mut tiles_left = tiles_per_cube(&trace);

    loop {
        if UNIT_POS == 0 {
            drawn[0] = NONE;
            if tiles_left > 0 {
                let (class, tile) = draw_any::<F, V>(&urgent, &background, next, policy, fault);
                drawn[0] = class;
                drawn[6] = tile;
                locate::<F, V>(&urgent, &background, class, tile, &mut drawn, spec);
                note_draw(&mut trace, policy, class, tile);
            }
        }
        sync_cube();
        let class = drawn[0];
        if class == NONE {
            break;
        }
        let place = Place {
            expert: drawn[1] as usize,
            begin: drawn[2] as usize,
            end: drawn[3] as usize,
            row: drawn[4] as usize,
            column: drawn[5] as usize,
        };
        if class == URGENT {
            compute::<F, S, V>(
                &mut urgent,
                &place,
                &mut left,
                &mut right,
                &mut scratch,
                spec,
            );
        } else {
            #[comptime]
            match &mut background {
                ComptimeOption::Some(problem) => {
                    compute::<F, S, V>(problem, &place, &mut left, &mut right, &mut scratch, spec)
                }
                ComptimeOption::None => {}
            }
        }
        note_done(&mut trace, class, drawn[6]);
        tiles_left -= 1;
        // The next draw overwrites what all units have read by now.
        sync_cube();
    }
}

/// Draws for one problem without a policy, or for two under it.
#[cube]
fn draw_any<F: Float, V: Size>(
    urgent: &ProblemView<F, V>,
    background: &ComptimeOption<ProblemView<F, V>>,
    next: &[Atomic<u32>],
    policy: &[Atomic<u32>],
    #[comptime] fault: Fault,
) -> (u32, u32) {
    #[comptime]
    match background {
        ComptimeOption::Some(background) => {
            draw(next, policy, urgent.total(), background.total(), fault)
        }
        ComptimeOption::None => {
            let total = urgent.total();
            let tile = take(next, URGENT, total, fault);
            let class = if tile < total { URGENT } else { NONE };
            (class, tile)
        }
    }
}

/// Finds the tile's expert and place, and leaves them in shared memory.
#[cube]
fn locate<F: Float, V: Size>(
    urgent: &ProblemView<F, V>,
    background: &ComptimeOption<ProblemView<F, V>>,
    class: u32,
    tile: u32,
    drawn: &mut Shared<[u32]>,
    #[comptime] spec: TileSpec,
) {
    if class == URGENT {
        locate_in::<F, V>(urgent, tile, drawn, spec);
    }
    #[comptime]
    match background {
        ComptimeOption::Some(background) => {
            if class == BACKGROUND {
                locate_in::<F, V>(background, tile, drawn, spec);
            }
        }
        ComptimeOption::None => {}
    }
}

#[cube]
fn locate_in<F: Float, V: Size>(
    problem: &ProblemView<F, V>,
    tile: u32,
    drawn: &mut Shared<[u32]>,
    #[comptime] spec: TileSpec,
) {
    // The last expert whose tiles start at or before this one; experts without tiles start where
    // the next one does, so they are never the last.
    let row_tile = tile / problem.column_tiles;
    let mut low = 0u32;
    let mut high = problem.experts;
    while high - low > 1 {
        let middle = (low + high) / 2;
        if problem.tiles[middle as usize] <= row_tile {
            low = middle;
        } else {
            high = middle;
        }
    }
    let expert = low as usize;
    let first = problem.tiles[expert];
    let row_tiles = problem.tiles[expert + 1] - first;
    // Tiles of one expert go down the rows first: those that run together then share the columns
    // of the weights, the larger operand.
    let local = tile - first * problem.column_tiles;
    let (begin, end) = expert_rows(&problem.offsets, expert, problem.rows);
    let row = local % row_tiles * comptime!(spec.rows() as u32);
    let columns = comptime!(match problem.product {
        Product::SwiGlu => spec.columns() / 2,
        _ => spec.columns(),
    });
    drawn[1] = low;
    drawn[2] = begin;
    drawn[3] = end;
    drawn[4] = match comptime!(problem.product) {
        Product::WeightGrad => row,
        _ => begin + row,
    };
    drawn[5] = local / row_tiles * comptime!(columns as u32);
}

/// Computes one tile with all units of the cube.
#[cube]
fn compute<F: Float, S: Float, V: Size>(
    problem: &mut ProblemView<F, V>,
    place: &Place,
    left: &mut Shared<[Vector<S, V>]>,
    right: &mut Shared<[Vector<S, V>]>,
    scratch: &mut ComptimeOption<Shared<[Vector<f32, V>]>>,
    #[comptime] spec: TileSpec,
) {
    let rows = comptime!(Staging::left(&spec, problem.product));
    let columns = comptime!(Staging::right(&spec, problem.product));
    let stage_depth = comptime!(spec.depth);
    let steps = problem.depth(place).div_ceil(stage_depth);
    let mut sums = zero_sums::<V>(spec);
    if comptime!(spec.transfer != Transfer::Registers) {
        multiply_ahead::<F, S, V>(&*problem, place, steps, left, right, &mut sums, spec);
    } else if comptime!(spec.buffers == 2) {
        let mut row_registers =
            Array::<Vector<F, V>>::new(comptime!(rows.blocks_per_unit() * rows.block()));
        let mut column_registers =
            Array::<Vector<F, V>>::new(comptime!(columns.blocks_per_unit() * columns.block()));
        fetch::<F, V>(&*problem, place, 0usize, &mut row_registers, rows);
        fetch::<F, V>(&*problem, place, 0usize, &mut column_registers, columns);
        commit::<F, S, V>(&row_registers, left, 0usize, rows);
        commit::<F, S, V>(&column_registers, right, 0usize, columns);
        sync_cube();
        for step in 0..steps {
            let now = step % 2;
            let more = step + 1 < steps;
            if more {
                let depth = (step + 1) * stage_depth;
                fetch::<F, V>(&*problem, place, depth, &mut row_registers, rows);
                fetch::<F, V>(&*problem, place, depth, &mut column_registers, columns);
            }
            multiply::<S, V>(
                &mut sums,
                &*left,
                now * comptime!(rows.size),
                &*right,
                now * comptime!(columns.size),
                comptime!((rows, columns)),
                spec,
            );
            if more {
                let next = 1 - now;
                commit::<F, S, V>(&row_registers, left, next * comptime!(rows.size), rows);
                commit::<F, S, V>(
                    &column_registers,
                    right,
                    next * comptime!(columns.size),
                    columns,
                );
            }
            sync_cube();
        }
    } else {
        for step in 0..steps {
            let depth = step * stage_depth;
            fill::<F, S, V>(&*problem, place, depth, left, rows);
            fill::<F, S, V>(&*problem, place, depth, right, columns);
            sync_cube();
            multiply::<S, V>(
                &mut sums,
                &*left,
                0usize,
                &*right,
                0usize,
                comptime!((rows, columns)),
                spec,
            );
            sync_cube();
        }
    }
    write::<F, V>(problem, place, &sums, scratch, spec);
}

/// Multiplies stage by stage, while those after it are on their way.
#[cube]
#[allow(clippy::too_many_arguments)]
fn multiply_ahead<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    steps: usize,
    left: &mut Shared<[Vector<S, V>]>,
    right: &mut Shared<[Vector<S, V>]>,
    sums: &mut Sums<V>,
    #[comptime] spec: TileSpec,
) {
    let rows = comptime!(Staging::left(&spec, problem.product));
    let columns = comptime!(Staging::right(&spec, problem.product));
    let asynchronous = comptime!(spec.transfer == Transfer::Ahead { asynchronous: true });
    let ahead = comptime!(spec.buffers - 1);
    #[unroll]
    for step in 0..ahead {
        copy_step::<F, S, V>(problem, place, step.runtime(), steps, left, right, spec);
    }
    for step in 0..steps {
        // One group a step, though those beyond the last are empty: so all but the last ones are those
        // of the steps up to this one.
        await_groups(comptime!(spec.buffers - 2), asynchronous);
        // All units have their part of this stage, and are done with the one before, which is next to
        // be filled.
        sync_cube();
        copy_step::<F, S, V>(problem, place, step + ahead, steps, left, right, spec);
        let now = step % comptime!(spec.buffers);
        multiply::<S, V>(
            sums,
            &*left,
            now * comptime!(rows.size),
            &*right,
            now * comptime!(columns.size),
            comptime!((rows, columns)),
            spec,
        );
    }
}

/// Starts to fill the stage of a step of the depth, if there is such a step.
#[cube]
fn copy_step<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    step: usize,
    steps: usize,
    left: &mut Shared<[Vector<S, V>]>,
    right: &mut Shared<[Vector<S, V>]>,
    #[comptime] spec: TileSpec,
) {
    let rows = comptime!(Staging::left(&spec, problem.product));
    let columns = comptime!(Staging::right(&spec, problem.product));
    let asynchronous = comptime!(spec.transfer == Transfer::Ahead { asynchronous: true });
    if step < steps {
        let depth = step * comptime!(spec.depth);
        let stage = step % comptime!(spec.buffers);
        let start = stage * comptime!(rows.size);
        copy_ahead::<F, S, V>(problem, place, depth, left, start, rows, asynchronous);
        let start = stage * comptime!(columns.size);
        copy_ahead::<F, S, V>(problem, place, depth, right, start, columns, asynchronous);
    }
    end_group(asynchronous);
}

/// Two fragments a plane, through which sums leave tensor cores.
#[cube]
fn new_scratch<V: Size>(#[comptime] spec: TileSpec) -> ComptimeOption<Shared<[Vector<f32, V>]>> {
    if comptime!(spec.uses_fragments()) {
        let planes = comptime!(spec.units() / spec.fragments().0);
        ComptimeOption::new_Some(Shared::<[Vector<f32, V>]>::new_aligned_slice(
            comptime!(planes * 2 * FRAGMENT * FRAGMENT / spec.vector),
            128usize,
        ))
    } else {
        ComptimeOption::new_None()
    }
}

#[cube]
fn tiles_per_cube(trace: &ComptimeOption<TraceView>) -> u32 {
    #[comptime]
    match trace {
        ComptimeOption::Some(trace) => trace.tiles_per_cube,
        ComptimeOption::None => u32::MAX.runtime(),
    }
}

/// Notes a drawn tile, and changes the policy where the test asked for it.
#[cube]
fn note_draw(trace: &mut ComptimeOption<TraceView>, policy: &[Atomic<u32>], class: u32, tile: u32) {
    #[comptime]
    match trace {
        ComptimeOption::Some(trace) => {
            if class != NONE {
                let tile = if class == URGENT {
                    tile
                } else {
                    trace.urgent_tiles + tile
                };
                let drawn = trace.drawn[0].fetch_add(1);
                if (drawn as usize) < trace.order.len() {
                    trace.order[drawn as usize] = tile;
                }
                if drawn + 1 == trace.switch_after {
                    policy[0].store(trace.switch_to);
                }
            }
        }
        ComptimeOption::None => {}
    }
}

/// Counts a tile that has run.
#[cube]
fn note_done(trace: &mut ComptimeOption<TraceView>, class: u32, tile: u32) {
    #[comptime]
    match trace {
        ComptimeOption::Some(trace) => {
            let tile = if class == URGENT {
                tile
            } else {
                trace.urgent_tiles + tile
            };
            if UNIT_POS == 0 && (tile as usize) < trace.counts.len() {
                trace.counts[tile as usize].fetch_add(1);
            }
        }
        ComptimeOption::None => {}
    }
}
