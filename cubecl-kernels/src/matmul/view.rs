//! What the kernel sees of a problem.

use cubecl::prelude::*;

use super::problem::Product;

/// A [`Problem`](super::Problem) on the device. Sizes in vectors where they say so.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct ProblemView<F: Float, V: Size> {
    pub lhs: Box<[Vector<F, V>]>,
    pub rhs: Box<[Vector<F, V>]>,
    pub rhs_replicas: ComptimeOption<Box<[Vector<F, V>]>>,
    pub out: Box<[Vector<F, V>]>,
    pub out_second: ComptimeOption<Box<[Vector<F, V>]>>,
    pub offsets: Box<[u32]>,
    /// Row tiles of all experts before each, `[experts + 1]`.
    pub tiles: Box<[u32]>,
    pub rows: u32,
    pub inner: u32,
    pub outer: u32,
    pub home: u32,
    pub experts: u32,
    pub column_tiles: u32,
    #[cube(comptime)]
    pub product: Product,
}

/// Where the launch notes which tiles ran, for tests and debugging.
#[derive(CubeType, CubeLaunch)]
pub(crate) struct TraceView {
    /// How often each tile ran: the urgent ones, then the background ones.
    pub counts: Box<[Atomic<u32>]>,
    /// Tiles in the order they were drawn; background tiles come after `urgent_tiles`.
    pub order: Box<[u32]>,
    /// Number of tiles drawn.
    pub drawn: Box<[Atomic<u32>]>,
    pub urgent_tiles: u32,
    /// After this many draws the launch writes `switch_to` into the policy word, as somebody
    /// outside might.
    pub switch_after: u32,
    pub switch_to: u32,
    /// Tiles after which a cube leaves.
    pub tiles_per_cube: u32,
}

/// The tile a cube works on.
#[derive(CubeType, Clone, Copy)]
pub(crate) struct Place {
    /// Position among the experts of both buffers.
    pub expert: usize,
    /// First row of the expert, and one past its last.
    pub begin: usize,
    pub end: usize,
    /// First row of the tile: of `x`, or of the weights for a weight gradient.
    pub row: usize,
    /// First column of the tile.
    pub column: usize,
}

#[cube]
impl<F: Float, V: Size> ProblemView<F, V> {
    /// Number of tiles of the problem.
    pub fn total(&self) -> u32 {
        self.tiles[self.experts as usize] * self.column_tiles
    }

    /// Elements along the depth of the product for the expert.
    pub fn depth(&self, place: &Place) -> usize {
        match comptime!(self.product) {
            Product::Forward | Product::SwiGlu => self.inner as usize,
            Product::DataGrad => self.outer as usize,
            Product::WeightGrad => place.end - place.begin,
        }
    }

    /// One past the last row of the output that belongs to the tile's expert.
    pub fn row_end(&self, place: &Place) -> usize {
        match comptime!(self.product) {
            Product::WeightGrad => self.inner as usize,
            _ => place.end,
        }
    }

    /// Columns of the output; for SwiGLU of one half.
    pub fn columns(&self) -> usize {
        match comptime!(self.product) {
            Product::Forward | Product::WeightGrad => self.outer as usize,
            Product::SwiGlu => self.outer as usize / 2,
            Product::DataGrad => self.inner as usize,
        }
    }

    /// A vector of the right operand; of weights, `index` counts from the first expert of the buffer
    /// that holds `expert`.
    pub fn right(&self, expert: usize, index: usize) -> Vector<F, V> {
        #[comptime]
        match &self.rhs_replicas {
            ComptimeOption::Some(replicas) => {
                if expert < self.home as usize {
                    self.rhs[index]
                } else {
                    replicas[index]
                }
            }
            ComptimeOption::None => self.rhs[index],
        }
    }

    /// Position of the expert within its buffer.
    pub fn local_expert(&self, expert: usize) -> usize {
        let home = self.home as usize;
        if expert < home { expert } else { expert - home }
    }
}

/// Rows `begin .. end` of an expert, whatever the offsets say: within `rows`, and not reversed.
#[cube]
pub(crate) fn expert_rows(offsets: &[u32], expert: usize, rows: u32) -> (u32, u32) {
    let begin = clamp_max(offsets[expert], rows);
    let end = clamp_max(offsets[expert + 1], rows);
    let end = if end < begin { begin } else { end };
    (begin, end)
}

#[cube]
fn clamp_max(value: u32, most: u32) -> u32 {
    if value < most { value } else { most }
}
