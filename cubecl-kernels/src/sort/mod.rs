//! Counting and stable sorting by expert.

mod kernels;

use cubecl::{
    CubeCount, CubeDim,
    client::Client,
    ir::{ElemType, UIntKind},
};

use crate::{DeviceTensor, KernelError, check, launch};

/// Token copies in the order of their experts.
#[derive(Debug, Clone)]
pub struct Sorted {
    /// `[E + 1]`, `u32`: the copies of expert `e` are at `offsets[e]..offsets[e + 1]` of `order`.
    pub offsets: DeviceTensor,
    /// As many as there are ids, `u32`: positions of the ids, those of expert 0 first, each
    /// expert's rising. Behind `offsets[E]` are the positions of ids that name no expert.
    pub order: DeviceTensor,
}

/// Most bins of one pass: their counts lie in shared memory.
const MOST_BINS: usize = 1024;

/// Bits of a key that one pass sorts by, when there are more bins than that.
const DIGIT_BITS: usize = 8;

/// Units that sort a chunk together.
const UNITS: u32 = 256;

/// Fewest ids of a chunk, and most chunks.
const LEAST_CHUNK: usize = 1024;
const MOST_CHUNKS: usize = 256;

/// Number of times that each expert occurs.
///
/// - `ids`: any shape, `u32` or `i32`; ids that are not in `0..experts` are left out
/// - result: `[experts]`, `u32`
///
/// # Errors
/// [`KernelError`] when `ids` has another element type, or sizes do not fit 32 bits.
pub fn histogram(
    client: &Client,
    ids: &DeviceTensor,
    experts: usize,
) -> Result<DeviceTensor, KernelError> {
    check_arguments(ids, experts)?;
    let counts = DeviceTensor::from_data(client, &vec![0u32; experts], [experts])?;
    if !ids.is_empty() && experts > 0 {
        let (cubes, dim) = launch::elementwise(client, ids.len());
        // SAFETY: the kernel reads and writes inside of the buffers that it is given.
        unsafe {
            kernels::count_globally::launch_unchecked(
                client,
                cubes,
                dim,
                ids.arg(),
                counts.arg(),
                ids.len() as u32,
                experts as u32,
            );
        }
    }
    Ok(counts)
}

/// Sorts token copies by expert, stably: copies of an expert stay in their order. The same ids
/// give the same result in every run.
///
/// - `ids`: any shape, `u32` or `i32`; read in row-major order
/// - result: offsets `[experts + 1]` and the order, one position for each id
///
/// # Errors
/// [`KernelError`] when `ids` has another element type, or sizes do not fit 32 bits.
pub fn sort_by_expert(
    client: &Client,
    ids: &DeviceTensor,
    experts: usize,
) -> Result<Sorted, KernelError> {
    check_arguments(ids, experts)?;
    let n = ids.len();
    let offsets = DeviceTensor::empty(client, [experts + 1], U32);
    if n == 0 {
        return Ok(Sorted {
            offsets: DeviceTensor::from_data(client, &vec![0u32; experts + 1], [experts + 1])?,
            order: DeviceTensor::empty(client, [0], U32),
        });
    }
    // The last bin is for ids that name no expert.
    let bins = experts + 1;
    if bins <= MOST_BINS {
        let digit = Digit {
            bins,
            shift: 0,
            mask: u32::MAX,
        };
        let order = pass(client, ids, None, experts, &digit, &offsets)?;
        return Ok(Sorted { offsets, order });
    }
    // From the lowest digit to the highest: each pass keeps the order of the one before.
    let bits = (experts.ilog2() + 1) as usize;
    let bins = 1 << DIGIT_BITS;
    let starts = DeviceTensor::empty(client, [bins], U32);
    let mut order = None;
    for shift in (0..bits).step_by(DIGIT_BITS) {
        let digit = Digit {
            bins,
            shift,
            mask: bins as u32 - 1,
        };
        order = Some(pass(client, ids, order.as_ref(), experts, &digit, &starts)?);
    }
    let Some(order) = order else {
        unreachable!("more than {MOST_BINS} bins have digits")
    };
    let (cubes, dim) = launch::elementwise(client, experts + 1);
    // SAFETY: as above.
    unsafe {
        kernels::bounds::launch_unchecked(
            client,
            cubes,
            dim,
            ids.arg(),
            order.arg(),
            offsets.arg(),
            n as u32,
            experts as u32,
        );
    }
    Ok(Sorted { offsets, order })
}

/// What part of a key a pass sorts by.
struct Digit {
    bins: usize,
    shift: usize,
    mask: u32,
}

/// Sorts by a digit what `input` names, or everything, and writes where each bin starts to
/// `starts`, `[bins]`.
fn pass(
    client: &Client,
    ids: &DeviceTensor,
    input: Option<&DeviceTensor>,
    experts: usize,
    digit: &Digit,
    starts: &DeviceTensor,
) -> Result<DeviceTensor, KernelError> {
    let n = ids.len();
    let units = launch::sharing_units(client, UNITS);
    let chunk = match launch::is_cpu(client) {
        true => n,
        false => LEAST_CHUNK.max(n.div_ceil(MOST_CHUNKS)),
    };
    let chunks = n.div_ceil(chunk);
    // Few different capacities, for each is another kernel.
    let capacity = digit.bins.next_power_of_two();
    let counts = DeviceTensor::empty(client, [chunks, digit.bins], U32);
    let order = DeviceTensor::empty(client, [n], U32);
    let source = input.unwrap_or(ids);
    let key = || kernels::KeyLaunch::new(experts as u32, digit.shift as u32, digit.mask);
    let sizes = (n as u32, chunk as u32, digit.bins as u32);
    let each_chunk = CubeCount::Static(chunks as u32, 1, 1);
    // SAFETY: the kernels read and write inside of the buffers that they are given.
    unsafe {
        kernels::count::launch_unchecked(
            client,
            each_chunk.clone(),
            CubeDim::new_1d(units),
            ids.arg(),
            source.arg(),
            counts.arg(),
            key(),
            sizes.0,
            sizes.1,
            sizes.2,
            capacity,
            units,
            input.is_some(),
        );
        let (cubes, dim) = launch::elementwise(client, digit.bins);
        kernels::scan_chunks::launch_unchecked(
            client,
            cubes,
            dim,
            counts.arg(),
            starts.arg(),
            chunks as u32,
            sizes.2,
        );
        kernels::scan_bins::launch_unchecked(
            client,
            CubeCount::Static(1, 1, 1),
            CubeDim::new_1d(units),
            starts.arg(),
            sizes.2,
            capacity,
            units,
        );
        kernels::place::launch_unchecked(
            client,
            each_chunk,
            CubeDim::new_1d(units),
            ids.arg(),
            source.arg(),
            counts.arg(),
            starts.arg(),
            order.arg(),
            key(),
            sizes.0,
            sizes.1,
            sizes.2,
            capacity,
            units,
            input.is_some(),
        );
    }
    Ok(order)
}

const U32: ElemType = ElemType::UInt(UIntKind::U32);

fn check_arguments(ids: &DeviceTensor, experts: usize) -> Result<(), KernelError> {
    check::index("ids", ids)?;
    check::fits_u32("ids", ids.len())?;
    // One more stands for ids that name no expert.
    check::fits_u32("experts", experts.saturating_add(1))
}
