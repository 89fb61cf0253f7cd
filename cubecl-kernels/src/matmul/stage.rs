//! Filling the stages in shared memory, in two steps: `fetch` reads vectors from device memory
//! into registers, `commit` converts them and writes them to a stage. Or in one, where an operand is
//! staged as it lies: `copy_ahead`, with the device's asynchronous copies. What lies outside the tile
//! is read as zero.
//!
//! A stage holds lines along one direction. For registers, a line is one step of the depth, so
//! that a unit reads its rows and columns as vectors; operands that lie the other way in memory
//! are transposed in blocks of `V` by `V` on the way. Fragments are loaded in either direction, so
//! for them operands are staged as they lie.

use cubecl::prelude::{barrier::copy_async_checked, *};

use super::{
    problem::Product,
    tile::TileSpec,
    view::{Place, ProblemView},
};

/// One operand of a tile: how it lies in memory, and how it is staged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Staging {
    /// The left operand (rows of the tile) or the right one (columns).
    pub left: bool,
    /// Lines in memory that the window of the tile spans, and the length of each.
    pub lines: usize,
    pub length: usize,
    /// Whether lines run along the depth; else each is one step of it.
    pub along: bool,
    /// Whether the stage has memory's columns as lines.
    pub transposed: bool,
    pub vector: usize,
    /// Vectors from one line of the stage to the next.
    pub pitch: usize,
    /// Vectors of one stage.
    pub size: usize,
    pub units: usize,
    /// Whether the columns are in two halves, of gate and up.
    pub halves: bool,
}

impl Staging {
    pub fn left(spec: &TileSpec, product: Product) -> Self {
        // In memory depth runs along the lines, except over the rows of a weight gradient.
        let along = product != Product::WeightGrad;
        Self::new(spec, true, along, spec.rows(), false)
    }

    pub fn right(spec: &TileSpec, product: Product) -> Self {
        let along = product == Product::DataGrad;
        Self::new(
            spec,
            false,
            along,
            spec.columns(),
            product == Product::SwiGlu,
        )
    }

    fn new(spec: &TileSpec, left: bool, along: bool, across: usize, halves: bool) -> Self {
        let transposed = along && !spec.uses_fragments();
        let (lines, length) = if along {
            (across, spec.depth)
        } else {
            (spec.depth, across)
        };
        let (stage_lines, stage_length) = if transposed {
            (length, lines)
        } else {
            (lines, length)
        };
        Self {
            left,
            lines,
            length,
            along,
            transposed,
            vector: spec.vector,
            pitch: spec.line_vectors(stage_length),
            size: spec.stage_vectors(stage_lines, stage_length),
            units: spec.units(),
            halves,
        }
    }

    /// Vectors that a unit reads and writes together.
    pub fn block(&self) -> usize {
        if self.transposed { self.vector } else { 1 }
    }

    /// Blocks of a stage.
    pub fn blocks(&self) -> usize {
        self.lines * self.length / self.vector / self.block()
    }

    /// Blocks of a unit.
    pub fn blocks_per_unit(&self) -> usize {
        self.blocks().div_ceil(self.units)
    }

    /// Vectors of a line in memory.
    fn line_vectors(&self) -> usize {
        self.length / self.vector
    }
}

/// Fetches and commits at once, block after block: for stages that are not overlapped.
#[cube]
pub(crate) fn fill<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    stage: &mut Shared<[Vector<S, V>]>,
    #[comptime] staging: Staging,
) {
    let mut registers = Array::<Vector<F, V>>::new(comptime!(staging.block()));
    // Without a loop where blocks are few: see `UNROLL` for more than speed.
    if comptime!(staging.blocks_per_unit() <= 16) {
        #[unroll]
        for i in 0..comptime!(staging.blocks_per_unit()) {
            let block = UNIT_POS as usize + comptime!(i * staging.units);
            if block < comptime!(staging.blocks()) {
                fill_block::<F, S, V>(problem, place, depth, block, &mut registers, stage, staging);
            }
        }
    } else {
        let mut block = UNIT_POS as usize;
        while block < comptime!(staging.blocks()) {
            fill_block::<F, S, V>(problem, place, depth, block, &mut registers, stage, staging);
            block += comptime!(staging.units);
        }
    }
}

#[cube]
fn fill_block<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    block: usize,
    registers: &mut Array<Vector<F, V>>,
    stage: &mut Shared<[Vector<S, V>]>,
    #[comptime] staging: Staging,
) {
    fetch_block::<F, V>(problem, place, depth, block, registers, 0usize, staging);
    commit_block::<F, S, V>(&*registers, 0usize, block, stage, 0usize, staging);
}

/// Starts reading the stage that begins at `depth`.
#[cube]
pub(crate) fn fetch<F: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    registers: &mut Array<Vector<F, V>>,
    #[comptime] staging: Staging,
) {
    #[unroll]
    for i in 0..comptime!(staging.blocks_per_unit()) {
        let block = UNIT_POS as usize + comptime!(i * staging.units);
        let whole = comptime!((i + 1) * staging.units <= staging.blocks());
        if whole || block < comptime!(staging.blocks()) {
            fetch_block::<F, V>(
                problem,
                place,
                depth,
                block,
                registers,
                comptime!(i * staging.block()),
                staging,
            );
        }
    }
}

/// Writes what `fetch` read to the stage that starts at vector `start`.
#[cube]
pub(crate) fn commit<F: Float, S: Float, V: Size>(
    registers: &Array<Vector<F, V>>,
    stage: &mut Shared<[Vector<S, V>]>,
    start: usize,
    #[comptime] staging: Staging,
) {
    #[unroll]
    for i in 0..comptime!(staging.blocks_per_unit()) {
        let block = UNIT_POS as usize + comptime!(i * staging.units);
        if block < comptime!(staging.blocks()) {
            commit_block::<F, S, V>(
                registers,
                comptime!(i * staging.block()),
                block,
                stage,
                start,
                staging,
            );
        }
    }
}

#[cube]
fn fetch_block<F: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    block: usize,
    registers: &mut Array<Vector<F, V>>,
    #[comptime] slot: usize,
    #[comptime] staging: Staging,
) {
    let line = block / comptime!(staging.line_vectors()) * comptime!(staging.block());
    let vector = block % comptime!(staging.line_vectors());
    #[unroll]
    for i in 0..comptime!(staging.block()) {
        let mut value = Vector::new(F::new(0.0));
        if comptime!(staging.left) {
            let from = find_left::<F, V>(problem, place, depth, line + i, vector, staging);
            if from.inside {
                value = problem.lhs[from.index];
            }
        } else {
            let from = find_right::<F, V>(problem, place, depth, line + i, vector, staging);
            if from.inside {
                value = problem.right(place.expert, from.index);
            }
        }
        registers[comptime!(slot + i)] = value;
    }
}

#[cube]
fn commit_block<F: Float, S: Float, V: Size>(
    registers: &Array<Vector<F, V>>,
    #[comptime] slot: usize,
    block: usize,
    stage: &mut Shared<[Vector<S, V>]>,
    start: usize,
    #[comptime] staging: Staging,
) {
    let line = block / comptime!(staging.line_vectors());
    let vector = block % comptime!(staging.line_vectors());
    if comptime!(staging.transposed) {
        let first = vector * comptime!(staging.vector * staging.pitch) + line;
        let mut rows = Array::<Vector<S, V>>::new(comptime!(staging.vector));
        #[unroll]
        for j in 0..comptime!(staging.vector) {
            rows[j] = Vector::cast_from(registers[comptime!(slot + j)]);
        }
        #[unroll]
        for i in 0..comptime!(staging.vector) {
            let mut column = Vector::<S, V>::empty();
            #[unroll]
            for j in 0..comptime!(staging.vector) {
                column.insert(j, rows[j].extract(i));
            }
            stage[start + first + comptime!(i * staging.pitch)] = column;
        }
    } else {
        stage[start + line * comptime!(staging.pitch) + vector] =
            Vector::cast_from(registers[slot]);
    }
}

/// Copies the stage that begins at `depth` to the one that starts at vector `start`, or starts to.
#[cube]
pub(crate) fn copy_ahead<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    stage: &mut Shared<[Vector<S, V>]>,
    start: usize,
    #[comptime] staging: Staging,
    #[comptime] asynchronous: bool,
) {
    #[unroll]
    for i in 0..comptime!(staging.blocks_per_unit()) {
        let block = UNIT_POS as usize + comptime!(i * staging.units);
        let whole = comptime!((i + 1) * staging.units <= staging.blocks());
        if whole || block < comptime!(staging.blocks()) {
            let line = block / comptime!(staging.line_vectors());
            let vector = block % comptime!(staging.line_vectors());
            // Turning blocks of one element is a matter of where they go.
            let to = if comptime!(staging.transposed) {
                start + vector * comptime!(staging.pitch) + line
            } else {
                start + line * comptime!(staging.pitch) + vector
            };
            if comptime!(staging.left) {
                let from = find_left::<F, V>(problem, place, depth, line, vector, staging);
                copy_vector::<F, S, V>(&problem.lhs, &from, stage, to, asynchronous);
            } else {
                let from = find_right::<F, V>(problem, place, depth, line, vector, staging);
                copy_right::<F, S, V>(problem, place.expert, &from, stage, to, asynchronous);
            }
        }
    }
}

#[cube]
fn copy_right<F: Float, S: Float, V: Size>(
    problem: &ProblemView<F, V>,
    expert: usize,
    from: &Source,
    stage: &mut Shared<[Vector<S, V>]>,
    to: usize,
    #[comptime] asynchronous: bool,
) {
    #[comptime]
    match &problem.rhs_replicas {
        ComptimeOption::Some(replicas) => {
            if expert < problem.home as usize {
                copy_vector::<F, S, V>(&problem.rhs, from, stage, to, asynchronous);
            } else {
                copy_vector::<F, S, V>(replicas, from, stage, to, asynchronous);
            }
        }
        ComptimeOption::None => copy_vector::<F, S, V>(&problem.rhs, from, stage, to, asynchronous),
    }
}

#[cube]
fn copy_vector<F: Float, S: Float, V: Size>(
    memory: &[Vector<F, V>],
    from: &Source,
    stage: &mut Shared<[Vector<S, V>]>,
    to: usize,
    #[comptime] asynchronous: bool,
) {
    if asynchronous {
        // Of no vector, zeros are what arrives; the address is one that could be read all the same.
        let (first, count) = if from.inside {
            (from.index, 1usize.runtime())
        } else {
            (0usize.runtime(), 0usize.runtime())
        };
        let width = V::value();
        copy_async_checked(
            &memory[first..first + count],
            stage[to..to + 1].downcast_mut(),
            comptime!(width as u32),
        );
    } else {
        stage[to] = if from.inside {
            Vector::cast_from(memory[from.index])
        } else {
            Vector::new(S::new(0.0))
        };
    }
}

/// Ends a group of asynchronous copies of this unit.
#[cube]
pub(crate) fn end_group(#[comptime] asynchronous: bool) {
    if asynchronous {
        gpu_asm!("cp.async.commit_group;");
    }
}

/// Waits until all groups of this unit but the last `pending` have arrived.
#[cube]
pub(crate) fn await_groups(#[comptime] pending: usize, #[comptime] asynchronous: bool) {
    if asynchronous {
        gpu_asm!("cp.async.wait_group {};", const pending);
    }
}

/// Where a vector is read, unless it lies outside the tile: then it is zero.
#[derive(CubeType, Clone, Copy)]
struct Source {
    index: usize,
    inside: bool,
}

/// A vector of the rows of the tile: `x`, or the gradient for its data.
#[cube]
fn find_left<F: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    line: usize,
    vector: usize,
    #[comptime] staging: Staging,
) -> Source {
    let v = comptime!(staging.vector);
    let (row, row_end, column, width) = match comptime!(problem.product) {
        Product::Forward | Product::SwiGlu => (
            place.row + line,
            place.end,
            depth / v + vector,
            problem.inner as usize / v,
        ),
        Product::DataGrad => (
            place.row + line,
            place.end,
            depth / v + vector,
            problem.outer as usize / v,
        ),
        Product::WeightGrad => (
            place.begin + depth + line,
            place.end,
            place.row / v + vector,
            problem.inner as usize / v,
        ),
    };
    Source {
        index: row * width + column,
        inside: row < row_end && column < width,
    }
}

/// A vector of the columns of the tile: weights, or the gradient for a weight gradient.
#[cube]
fn find_right<F: Float, V: Size>(
    problem: &ProblemView<F, V>,
    place: &Place,
    depth: usize,
    line: usize,
    vector: usize,
    #[comptime] staging: Staging,
) -> Source {
    let v = comptime!(staging.vector);
    let inner = problem.inner as usize;
    let width = problem.outer as usize / v;
    match comptime!(problem.product) {
        Product::Forward | Product::SwiGlu => {
            // A half of the tile's columns lies in each half of the weights' columns.
            let (half, within) = if comptime!(staging.halves) {
                let half_vectors = comptime!(staging.line_vectors() / 2);
                (vector / half_vectors, vector % half_vectors)
            } else {
                (0usize.runtime(), vector)
            };
            let columns = problem.columns() / v;
            let column = place.column / v + within;
            let row = depth + line;
            let first = problem.local_expert(place.expert) * inner;
            Source {
                index: (first + row) * width + half * columns + column,
                inside: row < inner && column < columns,
            }
        }
        Product::DataGrad => {
            let row = place.column + line;
            let column = depth / v + vector;
            let first = problem.local_expert(place.expert) * inner;
            Source {
                index: (first + row) * width + column,
                inside: row < inner && column < width,
            }
        }
        Product::WeightGrad => {
            let row = place.begin + depth + line;
            let column = place.column / v + vector;
            Source {
                index: row * width + column,
                inside: row < place.end && column < width,
            }
        }
    }
}
