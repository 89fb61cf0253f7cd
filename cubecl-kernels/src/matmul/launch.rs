//! Preparing and launching problems: what the device finds out from the offsets, and the grid.

use cubecl::{client::Client, ir::ElemType, ir::UIntKind, prelude::*};

use super::{
    kernel::{Fault, persistent_kernel},
    problem::Problem,
    tile::TileSpec,
    view::{ProblemViewLaunch, TraceViewLaunch, expert_rows},
};
use crate::{DeviceTensor, KernelError, queue::Words};

/// Runs one problem with a given tile.
pub(crate) fn run_with(client: &Client, problem: &Problem, spec: TileSpec) {
    let words = Words::new(client);
    let prepared = Prepared::new(client, problem.clone(), spec, &words, 0, Fault::None);
    prepared.launch(client, None, &words, None, Fault::None);
}

/// A problem whose tiles are counted on the device.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub problem: Problem,
    pub spec: TileSpec,
    /// Row tiles before each expert, `[E + 1]`.
    tiles: DeviceTensor,
}

impl Prepared {
    /// Two problems that share a launch, and so a tile.
    pub fn pair(
        client: &Client,
        urgent: Problem,
        background: Problem,
        words: &Words,
        fault: Fault,
    ) -> [Self; 2] {
        let vector = urgent
            .vector_size(client.properties())
            .min(background.vector_size(client.properties()));
        // The urgent problem chooses; a background that would like larger tiles can wait.
        let spec = TileSpec::choose(
            client.properties(),
            urgent.lhs.dtype(),
            urgent.mean_rows(),
            vector,
        );
        [
            Self::new(client, urgent, spec, words, 0, fault),
            Self::new(client, background, spec, words, 1, fault),
        ]
    }

    /// Counts tiles, and sets counter `class` of `words` to the first.
    pub fn new(
        client: &Client,
        problem: Problem,
        spec: TileSpec,
        words: &Words,
        class: u32,
        fault: Fault,
    ) -> Self {
        let sizes = problem.sizes;
        let tiles = DeviceTensor::empty(client, [sizes.experts + 1], ElemType::UInt(UIntKind::U32));
        let units = client.properties().hardware.max_units_per_cube.min(256);
        let rows = match fault {
            Fault::WrongPrefix => spec.rows() / 2,
            _ => spec.rows(),
        };
        // A problem without outputs has no tiles, whatever its experts' rows.
        let active = if problem.is_empty() { 0 } else { sizes.experts };
        // SAFETY: the kernel stays within `experts` and clamps what it reads.
        unsafe {
            tile_prefix_kernel::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_1d(units),
                problem.offsets.arg(),
                tiles.arg(),
                words.next.arg(),
                sizes.rows as u32,
                sizes.experts as u32,
                active as u32,
                rows as u32,
                problem.fixed_row_tiles(&spec).unwrap_or(0) as u32,
                class,
                units as usize,
            );
        }
        Self {
            problem,
            spec,
            tiles,
        }
    }

    /// Launches the kernel over what is left of this problem and, under the policy, of another.
    pub fn launch(
        &self,
        client: &Client,
        background: Option<&Prepared>,
        words: &Words,
        trace: Option<TraceViewLaunch>,
        fault: Fault,
    ) {
        let spec = self.spec;
        let dtype = self.problem.lhs.dtype();
        let cubes = self.cubes(client, background);
        if cubes == 0 {
            return;
        }
        let address = self
            .problem
            .address_type()
            .max(background.map_or(self.problem.address_type(), |b| b.problem.address_type()));
        // SAFETY: shapes were checked when the problems were made, and offsets are clamped to them.
        unsafe {
            persistent_kernel::launch_unchecked(
                client,
                CubeCount::new_1d(cubes as u32),
                CubeDim::new_1d(spec.units() as u32),
                address,
                spec.vector,
                self.view(),
                background.map(Prepared::view).into(),
                words.next.arg(),
                words.policy.arg(),
                trace.into(),
                spec,
                fault,
                [dtype, spec.staged(dtype)],
            );
        }
    }

    /// Number of tiles; waits for the device.
    pub fn read_total(&self, client: &Client) -> Result<u32, KernelError> {
        let tiles = self.tiles.read::<u32>(client)?;
        Ok(tiles[self.problem.sizes.experts] * self.problem.column_tiles(&self.spec) as u32)
    }

    /// Cubes of a launch.
    pub fn cubes(&self, client: &Client, background: Option<&Prepared>) -> usize {
        let tiles = self.most_tiles() + background.map_or(0, Prepared::most_tiles);
        resident_cubes(client, &self.spec).min(tiles)
    }

    fn most_tiles(&self) -> usize {
        if self.problem.is_empty() {
            0
        } else {
            self.problem.most_tiles(&self.spec)
        }
    }

    pub fn view<F: Float, V: Size>(&self) -> ProblemViewLaunch<F, V> {
        let problem = &self.problem;
        let sizes = problem.sizes;
        ProblemViewLaunch::new(
            problem.lhs.arg(),
            problem.rhs.arg(),
            problem.rhs_replicas.as_ref().map(DeviceTensor::arg).into(),
            problem.out.arg(),
            problem.out_second.as_ref().map(DeviceTensor::arg).into(),
            problem.offsets.arg(),
            self.tiles.arg(),
            sizes.rows as u32,
            sizes.inner as u32,
            sizes.outer as u32,
            sizes.home as u32,
            sizes.experts as u32,
            problem.column_tiles(&self.spec) as u32,
            problem.product,
        )
    }
}

/// Cubes that run at once: more would only wait to find no tile left.
fn resident_cubes(client: &Client, spec: &TileSpec) -> usize {
    let hardware = &client.properties().hardware;
    let cubes = match (
        hardware.num_cpu_cores,
        hardware.num_streaming_multiprocessors,
    ) {
        (Some(cores), _) => cores as usize,
        // Registers and shared memory of a multiprocessor hold about 512 units of these kernels.
        (_, Some(processors)) => processors as usize * (512 / spec.units()).clamp(1, 4),
        // Other runtimes do not say; this fills large devices and costs small ones little.
        _ => 128,
    };
    cubes.min(hardware.max_cube_count.0 as usize)
}

/// `tiles[e]`: row tiles of the experts before `e`, of `active` experts; the rest have none.
/// An expert with rows has `fixed` tiles, or where that is 0 one for each `tile_rows` rows.
/// One cube; each unit first sums its share of the experts, then adds the shares before it.
#[cube(launch_unchecked)]
#[allow(clippy::too_many_arguments)]
fn tile_prefix_kernel(
    offsets: &[u32],
    tiles: &mut [u32],
    next: &mut [u32],
    rows: u32,
    experts: u32,
    active: u32,
    tile_rows: u32,
    fixed: u32,
    class: u32,
    #[comptime] units: usize,
) {
    let share = experts.div_ceil(comptime!(units as u32));
    let first = UNIT_POS * share;
    let mut last = first + share;
    if last > experts {
        last = experts;
    }
    let mut sums = Shared::<[u32]>::new_slice(units);
    let mut sum = 0u32;
    let mut expert = first;
    while expert < last {
        sum += row_tiles(offsets, expert, rows, active, tile_rows, fixed);
        expert += 1;
    }
    sums[UNIT_POS as usize] = sum;
    sync_cube();
    let mut before = 0u32;
    for unit in 0..UNIT_POS {
        before += sums[unit as usize];
    }
    expert = first;
    while expert < last {
        tiles[expert as usize] = before;
        before += row_tiles(offsets, expert, rows, active, tile_rows, fixed);
        expert += 1;
    }
    if UNIT_POS == comptime!(units as u32 - 1) {
        tiles[experts as usize] = before;
        next[class as usize] = 0;
    }
}

#[cube]
fn row_tiles(
    offsets: &[u32],
    expert: u32,
    rows: u32,
    active: u32,
    tile_rows: u32,
    fixed: u32,
) -> u32 {
    let mut tiles = 0u32;
    if expert < active {
        let (begin, end) = expert_rows(offsets, expert as usize, rows);
        if end > begin {
            tiles = if fixed > 0 {
                fixed
            } else {
                (end - begin).div_ceil(tile_rows)
            };
        }
    }
    tiles
}
