//! Streaming copies of expert weights, by a chosen number of cubes, so that a copy can share a GPU
//! with computation instead of taking all of it.
//!
//! A fixed grid of cubes draws tiles from a counter until none is left; no cube waits for another.
//! Elements are moved as they are, whatever their type.

use cubecl::{
    CubeDim,
    client::Client,
    ir::{ElemType, UIntKind},
    prelude::*,
};

use crate::{DeviceTensor, KernelError, check, launch};

/// Consecutive elements to copy, counted from the beginnings of the tensors.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Chunk {
    /// First element in the source.
    pub source: usize,
    /// First element in the destination.
    pub destination: usize,
    /// Number of elements.
    pub len: usize,
}

/// Bytes of a tile: enough to be worth drawing, few enough to leave all cubes some.
const TILE_BYTES: usize = 1 << 16;

/// Units of a cube.
const UNITS: u32 = 256;

/// Gathers the weights of chosen experts into one buffer, in the order of `experts`.
///
/// - `weights`: `[E, ..]`
/// - `experts`: ids in `0..E`; an expert may be named more than once
/// - `cubes`: cubes that copy, at least 1
/// - result: `[experts.len(), ..]`
///
/// # Errors
/// [`KernelError`] when an expert is not there, `cubes` is 0, or sizes do not fit 32 bits.
pub fn gather_experts(
    client: &Client,
    weights: &DeviceTensor,
    experts: &[usize],
    cubes: u32,
) -> Result<DeviceTensor, KernelError> {
    let (count, size) = experts_of("weights", weights)?;
    let mut shape = weights.shape().to_vec();
    shape[0] = experts.len();
    let out = DeviceTensor::empty(client, shape, weights.dtype());
    let chunks = chunks_of("experts", experts, count, |i, expert| Chunk {
        source: expert * size,
        destination: i * size,
        len: size,
    })?;
    copy_chunks(client, weights, &out, &chunks, cubes)?;
    Ok(out)
}

/// Scatters experts that were received one after the other into slots; adjoint of
/// [`gather_experts`].
///
/// - `received`: `[slots.len(), ..]`
/// - `weights`: `[R, ..]`, written to; slots that are not named stay as they are
/// - `slots`: slots in `0..R`, none twice
/// - `cubes`: cubes that copy, at least 1
///
/// # Errors
/// [`KernelError`] when a slot is not there or named twice, the tensors' experts differ in size or
/// type, `cubes` is 0, or sizes do not fit 32 bits.
pub fn scatter_experts(
    client: &Client,
    received: &DeviceTensor,
    weights: &DeviceTensor,
    slots: &[usize],
    cubes: u32,
) -> Result<(), KernelError> {
    let (count, size) = experts_of("weights", weights)?;
    let mut shape = weights.shape().to_vec();
    shape[0] = slots.len();
    check::shape("received", received, &shape, "[slots, ..]")?;
    let chunks = chunks_of("slots", slots, count, |i, slot| Chunk {
        source: i * size,
        destination: slot * size,
        len: size,
    })?;
    copy_chunks(client, received, weights, &chunks, cubes)
}

/// Copies chunks of one tensor to places of another, which must not share memory with it.
///
/// - `source` and `destination`: any shape, the same element type
/// - `chunks`: inside of both; destinations do not overlap
/// - `cubes`: cubes that copy, at least 1
///
/// # Errors
/// [`KernelError`] when element types differ, a chunk leaves its tensor, destinations overlap,
/// `cubes` is 0, or sizes do not fit 32 bits.
pub fn copy_chunks(
    client: &Client,
    source: &DeviceTensor,
    destination: &DeviceTensor,
    chunks: &[Chunk],
    cubes: u32,
) -> Result<(), KernelError> {
    check::same_dtype("destination", destination, source)?;
    if cubes == 0 {
        return refuse("cubes", cubes, "at least 1".into());
    }
    check_chunks(source, destination, chunks)?;
    let words = Words::new(source.dtype(), chunks);
    let tile = (TILE_BYTES / words.bytes()) as u32;
    let mut places = Vec::with_capacity(3 * chunks.len());
    let mut first_tiles = vec![0u32];
    let mut tiles = 0usize;
    for chunk in chunks.iter().filter(|chunk| chunk.len > 0) {
        let [from, to, len] = [chunk.source, chunk.destination, chunk.len]
            .map(|elements| elements * source.dtype().size() / words.bytes());
        check::fits_u32("chunks", from + len)?;
        check::fits_u32("chunks", to + len)?;
        tiles += len.div_ceil(tile as usize);
        // Cubes draw once more than there are tiles.
        check::fits_u32("chunks", tiles + cubes as usize)?;
        places.extend([from as u32, to as u32, len as u32]);
        first_tiles.push(tiles as u32);
    }
    if tiles == 0 {
        return Ok(());
    }
    let count = first_tiles.len() - 1;
    let units = UNITS.min(client.properties().hardware.max_units_per_cube);
    let places = DeviceTensor::from_data(client, &places, [count, 3])?;
    let first_tiles = DeviceTensor::from_data(client, &first_tiles, [count + 1])?;
    let drawn = DeviceTensor::from_data(client, &[0u32], [1])?;
    // SAFETY: `check_chunks` has seen that chunks lie inside of the tensors.
    unsafe {
        stream::launch_unchecked(
            client,
            launch::cubes(client, cubes as usize),
            CubeDim::new_1d(units),
            words.vector,
            words.of(source)?.arg(),
            words.of(destination)?.arg(),
            places.arg(),
            first_tiles.arg(),
            drawn.arg(),
            count as u32,
            tile,
            units,
            words.dtype,
        );
    }
    Ok(())
}

/// What elements are moved as: the largest words that all chunks consist of.
struct Words {
    dtype: ElemType,
    vector: usize,
}

impl Words {
    fn new(dtype: ElemType, chunks: &[Chunk]) -> Self {
        let all_divide = |bytes| {
            let mut positions = chunks
                .iter()
                .flat_map(|chunk| [chunk.source, chunk.destination, chunk.len]);
            positions.all(|position| (position * dtype.size()).is_multiple_of(bytes))
        };
        let word = ElemType::UInt(UIntKind::U32);
        let (dtype, vector) = match () {
            () if all_divide(16) => (word, 4),
            () if all_divide(4) => (word, 1),
            () => (dtype, 1),
        };
        Self { dtype, vector }
    }

    fn bytes(&self) -> usize {
        self.dtype.size() * self.vector
    }

    /// The part of a tensor that whole words fill.
    fn of(&self, tensor: &DeviceTensor) -> Result<DeviceTensor, KernelError> {
        let bytes = tensor.len() * tensor.dtype().size();
        let words = bytes / self.bytes() * self.vector;
        DeviceTensor::new(tensor.handle().clone(), [words], self.dtype)
    }
}

/// Every cube draws a tile, copies it, and draws the next.
#[cube(launch_unchecked)]
fn stream<W: Numeric, V: Size>(
    source: &[Vector<W, V>],
    destination: &mut [Vector<W, V>],
    places: &[u32],
    first_tiles: &[u32],
    drawn: &[Atomic<u32>],
    chunks: u32,
    tile: u32,
    #[comptime] units: u32,
    #[define(W)] _dtype: ElemType,
) {
    let mut at_hand = Shared::<[u32]>::new_slice(1usize);
    let tiles = first_tiles[chunks as usize];
    let mut index = 0u32.runtime();
    while index < tiles {
        if UNIT_POS == 0 {
            at_hand[0] = drawn[0].fetch_add(1u32);
        }
        sync_cube();
        index = at_hand[0];
        sync_cube();
        if index < tiles {
            // The last chunk whose first tile is not past this one, by bisection.
            let mut chunk = 0u32;
            let mut end = chunks;
            while end - chunk > 1 {
                let middle = chunk + (end - chunk) / 2;
                if first_tiles[middle as usize] <= index {
                    chunk = middle;
                } else {
                    end = middle;
                }
            }
            let from = places[(3 * chunk) as usize];
            let to = places[(3 * chunk + 1) as usize];
            let len = places[(3 * chunk + 2) as usize];
            let first = (index - first_tiles[chunk as usize]) * tile;
            let stop = min(first + tile, len);
            let mut i = first + UNIT_POS;
            while i < stop {
                destination[(to + i) as usize] = source[(from + i) as usize];
                i += units;
            }
        }
    }
}

/// Number of experts and elements of each.
fn experts_of(
    argument: &'static str,
    weights: &DeviceTensor,
) -> Result<(usize, usize), KernelError> {
    match weights.shape() {
        [count, rest @ ..] => Ok((*count, rest.iter().product())),
        [] => Err(KernelError::Shape {
            argument,
            shape: Vec::new(),
            allowed: "[experts, ..]".into(),
        }),
    }
}

fn chunks_of(
    argument: &'static str,
    experts: &[usize],
    count: usize,
    chunk: impl Fn(usize, usize) -> Chunk,
) -> Result<Vec<Chunk>, KernelError> {
    let mut chunks = Vec::with_capacity(experts.len());
    for (i, expert) in experts.iter().enumerate() {
        if *expert >= count {
            return refuse(argument, *expert, format!("0..{count}"));
        }
        chunks.push(chunk(i, *expert));
    }
    Ok(chunks)
}

fn check_chunks(
    source: &DeviceTensor,
    destination: &DeviceTensor,
    chunks: &[Chunk],
) -> Result<(), KernelError> {
    for (argument, tensor, starts) in [
        (
            "chunks.source",
            source,
            chunks.iter().map(|c| c.source).collect::<Vec<_>>(),
        ),
        (
            "chunks.destination",
            destination,
            chunks.iter().map(|c| c.destination).collect(),
        ),
    ] {
        for (start, chunk) in starts.into_iter().zip(chunks) {
            let end = start.checked_add(chunk.len);
            if end.is_none_or(|end| end > tensor.len()) {
                let allowed = format!("chunks inside of {} elements", tensor.len());
                return refuse(argument, format!("{chunk:?}"), allowed);
            }
        }
    }
    let mut written: Vec<_> = chunks.iter().filter(|chunk| chunk.len > 0).collect();
    written.sort_by_key(|chunk| chunk.destination);
    for pair in written.windows(2) {
        if pair[0].destination + pair[0].len > pair[1].destination {
            return refuse(
                "chunks.destination",
                format!("{:?} and {:?}", pair[0], pair[1]),
                "chunks that do not overlap".into(),
            );
        }
    }
    Ok(())
}

fn refuse<T>(
    argument: &'static str,
    value: impl ToString,
    allowed: String,
) -> Result<T, KernelError> {
    Err(KernelError::Value {
        argument,
        value: value.to_string(),
        allowed,
    })
}
