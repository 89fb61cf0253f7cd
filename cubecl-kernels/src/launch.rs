//! How many units and cubes an operation gets.

use cubecl::{CubeCount, CubeDim, calculate_cube_count_elemwise, client::Client};

/// Units of a cube that share work through shared memory. A CPU runs the units of a cube as
/// threads that wait for each other in the operating system, so there a cube is one unit.
pub(crate) fn sharing_units(client: &Client, wanted: u32) -> u32 {
    if is_cpu(client) {
        return 1;
    }
    let most = client.properties().hardware.max_units_per_cube;
    1 << wanted.min(most).max(1).ilog2()
}

/// Whether the device is a CPU: its cubes run one after the other, its units side by side.
pub(crate) fn is_cpu(client: &Client) -> bool {
    client.properties().hardware.num_cpu_cores.is_some()
}

/// One unit for each of `elements`; kernels must leave out positions past the end.
pub(crate) fn elementwise(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new(client, elements);
    (calculate_cube_count_elemwise(client, elements, dim), dim)
}

/// Elements that one load or store moves, for rows of `width` elements.
pub(crate) fn vector_size(width: usize) -> usize {
    match width {
        width if width.is_multiple_of(4) => 4,
        width if width.is_multiple_of(2) => 2,
        _ => 1,
    }
}

/// So many cubes, over as many dimensions as the device needs. There may be a few more.
pub(crate) fn cubes(client: &Client, count: usize) -> CubeCount {
    calculate_cube_count_elemwise(client, count, CubeDim::new_single())
}
