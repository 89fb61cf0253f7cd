//! A pass of the sort: chunks count their ids by bin, the counts become the places where each
//! chunk's part of each bin starts, and chunks write their ids there. No cube waits for another.

use cubecl::prelude::*;

/// How an id becomes a bin.
#[derive(CubeType, CubeLaunch, Clone)]
pub(super) struct Key {
    /// Ids from here on name no expert, and come last.
    experts: u32,
    shift: u32,
    mask: u32,
}

#[cube]
fn bin_of(key: &Key, id: u32) -> u32 {
    (min(id, key.experts) >> key.shift) & key.mask
}

/// Which id comes at place `i` of a pass.
#[cube]
fn element(source: &[u32], i: u32, #[comptime] ordered: bool) -> u32 {
    if comptime!(ordered) {
        source[i as usize]
    } else {
        i
    }
}

/// `counts[chunk, bin]`: ids of the chunk in the bin.
#[cube(launch_unchecked)]
pub(super) fn count(
    ids: &[u32],
    source: &[u32],
    counts: &mut [u32],
    key: Key,
    n: u32,
    chunk: u32,
    bins: u32,
    #[comptime] capacity: usize,
    #[comptime] units: u32,
    #[comptime] ordered: bool,
) {
    let in_bin = Shared::<[Atomic<u32>]>::new_slice(capacity);
    let mut bin = UNIT_POS;
    while bin < bins {
        in_bin[bin as usize].store(0u32);
        bin += units;
    }
    sync_cube();
    let first = CUBE_POS_X * chunk;
    let end = min(first + chunk, n);
    let mut i = first + UNIT_POS;
    while i < end {
        let id = ids[element(source, i, ordered) as usize];
        in_bin[bin_of(&key, id) as usize].fetch_add(1u32);
        i += units;
    }
    sync_cube();
    let mut bin = UNIT_POS;
    while bin < bins {
        counts[(CUBE_POS_X * bins + bin) as usize] = in_bin[bin as usize].load();
        bin += units;
    }
}

/// Counts become the number of ids in the chunks before; `totals[bin]` those of all chunks.
#[cube(launch_unchecked)]
pub(super) fn scan_chunks(counts: &mut [u32], totals: &mut [u32], chunks: u32, bins: u32) {
    let bin = ABSOLUTE_POS as u32;
    if bin < bins {
        let mut sum = 0u32;
        for chunk in 0..chunks {
            let at = (chunk * bins + bin) as usize;
            let count = counts[at];
            counts[at] = sum;
            sum += count;
        }
        totals[bin as usize] = sum;
    }
}

/// Totals of bins become the places where bins start. One cube.
#[cube(launch_unchecked)]
pub(super) fn scan_bins(
    totals: &mut [u32],
    bins: u32,
    #[comptime] capacity: usize,
    #[comptime] units: u32,
) {
    let mut starts = Shared::<[u32]>::new_slice(capacity);
    let mut bin = UNIT_POS;
    while bin < bins {
        starts[bin as usize] = totals[bin as usize];
        bin += units;
    }
    sync_cube();
    if UNIT_POS == 0 {
        let mut sum = 0u32;
        for bin in 0..bins {
            let total = starts[bin as usize];
            starts[bin as usize] = sum;
            sum += total;
        }
    }
    sync_cube();
    let mut bin = UNIT_POS;
    while bin < bins {
        totals[bin as usize] = starts[bin as usize];
        bin += units;
    }
}

/// Writes each chunk's ids to their places, as many at a time as there are units.
#[cube(launch_unchecked)]
pub(super) fn place(
    ids: &[u32],
    source: &[u32],
    counts: &[u32],
    starts: &[u32],
    order: &mut [u32],
    key: Key,
    n: u32,
    chunk: u32,
    bins: u32,
    #[comptime] capacity: usize,
    #[comptime] units: u32,
    #[comptime] ordered: bool,
) {
    // Where the next id of each bin goes, and the bins of the ids at hand.
    let mut next = Shared::<[u32]>::new_slice(capacity);
    let mut at_hand = Shared::<[u32]>::new_slice(units as usize);
    let mut bin = UNIT_POS;
    while bin < bins {
        let before = counts[(CUBE_POS_X * bins + bin) as usize];
        next[bin as usize] = starts[bin as usize] + before;
        bin += units;
    }
    let mut round = CUBE_POS_X * chunk;
    let end = min(round + chunk, n);
    while round < end {
        let i = round + UNIT_POS;
        let mut this = 0u32;
        let mut bin = bins; // none
        if i < end {
            this = element(source, i, ordered);
            bin = bin_of(&key, ids[this as usize]);
        }
        at_hand[UNIT_POS as usize] = bin;
        sync_cube();
        let mut before = 0u32;
        let mut after = 0u32;
        for unit in 0..units {
            if at_hand[unit as usize] == bin {
                if unit < UNIT_POS {
                    before += 1;
                }
                if unit > UNIT_POS {
                    after += 1;
                }
            }
        }
        let mut at = 0u32;
        if i < end {
            at = next[bin as usize] + before;
            order[at as usize] = this;
        }
        sync_cube();
        // The last id of each bin moves on for all.
        if i < end && after == 0 {
            next[bin as usize] = at + 1;
        }
        round += units;
    }
}

/// `offsets[expert]`: ids in order that name an expert before this one, by bisection.
#[cube(launch_unchecked)]
pub(super) fn bounds(ids: &[u32], order: &[u32], offsets: &mut [u32], n: u32, experts: u32) {
    let expert = ABSOLUTE_POS as u32;
    if expert <= experts {
        let mut low = 0u32;
        let mut high = n;
        while low < high {
            let middle = low + (high - low) / 2;
            if min(ids[order[middle as usize] as usize], experts) < expert {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        offsets[expert as usize] = low;
    }
}

/// `counts[id] += 1` for every id that is an expert.
#[cube(launch_unchecked)]
pub(super) fn count_globally(ids: &[u32], counts: &[Atomic<u32>], n: u32, experts: u32) {
    if (ABSOLUTE_POS as u32) < n {
        let id = ids[ABSOLUTE_POS];
        if id < experts {
            counts[id as usize].fetch_add(1u32);
        }
    }
}
