//! Selection compares integers whose order is that of the scores: no device treats infinities, NaN
//! or the sign of zero in its own way, and the choice is the same to the bit everywhere.

use cubecl::prelude::*;

/// Key of no score at all: every score's key is higher.
const NONE: u32 = 0;

const SIGN: u32 = 0x8000_0000;
const MINUS_INFINITY: u32 = 0xff80_0000;

/// An integer that orders as `score` does, NaN as minus infinity, -0 as 0.
#[cube]
fn key_of(score: f32) -> u32 {
    let mut bits = u32::reinterpret(score);
    if (bits & 0x7fff_ffffu32) > 0x7f80_0000u32 {
        bits = MINUS_INFINITY.runtime();
    }
    if bits == SIGN {
        bits = 0u32.runtime();
    }
    let mut key = bits | SIGN;
    if bits >= SIGN {
        key = bits ^ 0xffff_ffffu32;
    }
    key
}

#[cube]
fn score_of(key: u32) -> f32 {
    let mut bits = key ^ 0xffff_ffffu32;
    if key >= SIGN {
        bits = key ^ SIGN;
    }
    f32::reinterpret(bits)
}

/// `ids[token]`: the best experts of each token. Units along x share a token.
#[cube(launch_unchecked)]
pub(super) fn select(
    scores: &[f32],
    bias: &[f32],
    ids: &mut [u32],
    tokens: u32,
    experts: u32,
    groups: u32,
    kept_groups: u32,
    k: u32,
    #[comptime] capacity: usize,
    #[comptime] group_capacity: usize,
    #[comptime] along: u32,
    #[comptime] beside: u32,
    #[comptime] grouped: bool,
) {
    let mut keys = Shared::<[u32]>::new_slice(capacity * beside as usize);
    let token = CUBE_POS as u32 * beside + UNIT_POS_Y;
    let first = (UNIT_POS_Y * capacity as u32) as usize;
    let mut expert = UNIT_POS_X;
    while expert < experts {
        let mut key = NONE.runtime();
        if token < tokens {
            let score = scores[(token * experts + expert) as usize];
            key = key_of(score + bias[expert as usize]);
        }
        keys[first + expert as usize] = key;
        expert += along;
    }
    share(along);
    if comptime!(grouped) {
        drop_groups(
            &mut keys,
            first,
            experts / groups,
            groups,
            kept_groups,
            group_capacity,
            along,
            beside,
        );
    }
    let mut best_keys = Shared::<[u32]>::new_slice((along * beside) as usize);
    let mut best_ids = Shared::<[u32]>::new_slice((along * beside) as usize);
    // Candidates come after the last one chosen: with a lower key, or the same and a higher id.
    let mut last_key = 0xffff_ffffu32.runtime();
    let mut last_id = 0u32.runtime();
    for place in 0..k {
        let mut best_key = NONE.runtime();
        let mut best_id = 0u32.runtime();
        let mut expert = UNIT_POS_X;
        while expert < experts {
            let key = keys[first + expert as usize];
            let after = key < last_key || (key == last_key && expert > last_id);
            if after && key > best_key {
                best_key = key;
                best_id = expert;
            }
            expert += along;
        }
        if comptime!(along > 1) {
            best_keys[UNIT_POS as usize] = best_key;
            best_ids[UNIT_POS as usize] = best_id;
            sync_cube();
            let mut half = comptime!(along / 2).runtime();
            while half > 0 {
                if UNIT_POS_X < half {
                    let here = UNIT_POS as usize;
                    let there = (UNIT_POS + half) as usize;
                    let key = best_keys[there];
                    let id = best_ids[there];
                    let better =
                        key > best_keys[here] || (key == best_keys[here] && id < best_ids[here]);
                    if better {
                        best_keys[here] = key;
                        best_ids[here] = id;
                    }
                }
                sync_cube();
                half /= 2;
            }
            best_key = best_keys[(UNIT_POS_Y * along) as usize];
            best_id = best_ids[(UNIT_POS_Y * along) as usize];
            sync_cube();
        }
        last_key = best_key;
        last_id = best_id;
        if UNIT_POS_X == 0 && token < tokens {
            ids[(token * k + place) as usize] = best_id;
        }
    }
}

/// Leaves no key to the experts of groups that are not kept.
#[cube]
fn drop_groups(
    keys: &mut Shared<[u32]>,
    first: usize,
    group_size: u32,
    groups: u32,
    kept_groups: u32,
    #[comptime] group_capacity: usize,
    #[comptime] along: u32,
    #[comptime] beside: u32,
) {
    let mut group_keys = Shared::<[u32]>::new_slice(group_capacity * beside as usize);
    let mut kept = Shared::<[u32]>::new_slice(group_capacity * beside as usize);
    let first_group = (UNIT_POS_Y * group_capacity as u32) as usize;
    let mut group = UNIT_POS_X;
    while group < groups {
        let mut best = NONE.runtime();
        let mut second = NONE.runtime();
        for i in 0..group_size {
            let key = keys[first + (group * group_size + i) as usize];
            if key > best {
                second = best;
                best = key;
            } else if key > second {
                second = key;
            }
        }
        // The two may be equal, as keys or, at the end of a short group, as none.
        let mut sum = best;
        if group_size > 1 && best != NONE {
            sum = key_of(score_of(best) + score_of(second));
        }
        group_keys[first_group + group as usize] = sum;
        group += along;
    }
    share(along);
    let mut group = UNIT_POS_X;
    while group < groups {
        let own = group_keys[first_group + group as usize];
        let mut better = 0u32.runtime();
        for other in 0..groups {
            let key = group_keys[first_group + other as usize];
            if key > own || (key == own && other < group) {
                better += 1;
            }
        }
        let mut keep = 0u32.runtime();
        if better < kept_groups {
            keep = 1u32.runtime();
        }
        kept[first_group + group as usize] = keep;
        group += along;
    }
    share(along);
    let mut expert = UNIT_POS_X;
    while expert < groups * group_size {
        if kept[first_group + (expert / group_size) as usize] == 0 {
            keys[first + expert as usize] = NONE.runtime();
        }
        expert += along;
    }
    share(along);
}

/// What one unit wrote to shared memory is there for the others of its token.
#[cube]
fn share(#[comptime] along: u32) {
    if comptime!(along > 1) {
        sync_cube();
    }
}

#[cube(launch_unchecked)]
pub(super) fn sigmoid(logits: &[f32], out: &mut [f32], len: usize) {
    if ABSOLUTE_POS < len {
        let logit = logits[ABSOLUTE_POS];
        // The exponential of a negative number, which cannot overflow.
        let power = (-logit.abs()).exp();
        let mut score = 1.0f32 / (1.0f32 + power);
        if logit < 0.0f32 {
            score = power / (1.0f32 + power);
        }
        out[ABSOLUTE_POS] = score;
    }
}

/// Units along x share a token.
#[cube(launch_unchecked)]
pub(super) fn softmax(
    logits: &[f32],
    out: &mut [f32],
    tokens: u32,
    experts: u32,
    #[comptime] along: u32,
    #[comptime] beside: u32,
) {
    let mut parts = Shared::<[f32]>::new_slice((along * beside) as usize);
    let token = CUBE_POS as u32 * beside + UNIT_POS_Y;
    // Units without a token repeat the last one's numbers, so that all reach the barriers.
    let row = min(token, tokens - 1) * experts;
    let mut largest = logits[row as usize];
    let mut expert = UNIT_POS_X;
    while expert < experts {
        largest = max(largest, logits[(row + expert) as usize]);
        expert += along;
    }
    largest = of_all_units(largest, &mut parts, true, along);
    let mut sum = 0.0f32.runtime();
    let mut expert = UNIT_POS_X;
    while expert < experts {
        sum += (logits[(row + expert) as usize] - largest).exp();
        expert += along;
    }
    sum = of_all_units(sum, &mut parts, false, along);
    if token < tokens {
        let mut expert = UNIT_POS_X;
        while expert < experts {
            let at = (row + expert) as usize;
            out[at] = (logits[at] - largest).exp() / sum;
            expert += along;
        }
    }
}

/// The largest, or the sum, of the values of the units along x.
#[cube]
fn of_all_units(
    value: f32,
    parts: &mut Shared<[f32]>,
    #[comptime] largest: bool,
    #[comptime] along: u32,
) -> f32 {
    if comptime!(along > 1) {
        parts[UNIT_POS as usize] = value;
        sync_cube();
        let mut half = comptime!(along / 2).runtime();
        while half > 0 {
            if UNIT_POS_X < half {
                let here = parts[UNIT_POS as usize];
                let there = parts[(UNIT_POS + half) as usize];
                if comptime!(largest) {
                    parts[UNIT_POS as usize] = max(here, there);
                } else {
                    parts[UNIT_POS as usize] = here + there;
                }
            }
            sync_cube();
            half /= 2;
        }
        let result = parts[(UNIT_POS_Y * along) as usize];
        sync_cube();
        result
    } else {
        value
    }
}

/// One unit a token.
#[cube(launch_unchecked)]
pub(super) fn weights(
    scores: &[f32],
    ids: &[u32],
    out: &mut [f32],
    tokens: u32,
    experts: u32,
    k: u32,
    scaling_factor: f32,
    #[comptime] normalize: bool,
) {
    let token = ABSOLUTE_POS as u32;
    if token < tokens {
        let mut sum = 0.0f32.runtime();
        for i in 0..k {
            let at = (token * k + i) as usize;
            let id = ids[at];
            let mut score = 0.0f32.runtime();
            if id < experts {
                score = scores[(token * experts + id) as usize];
            }
            sum += score;
            out[at] = score;
        }
        let mut divisor = 1.0f32.runtime();
        if comptime!(normalize) {
            divisor = sum + 1e-20f32;
        }
        for i in 0..k {
            let at = (token * k + i) as usize;
            out[at] = out[at] / divisor * scaling_factor;
        }
    }
}
