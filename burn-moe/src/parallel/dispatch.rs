//! Who sends which rows where: the index arithmetic of dispatch and combine, on the host.

use bytes::Bytes;

use crate::balance::{Placement, Plan};
use crate::comm::CommError;
use crate::comm::Key;

/// Destination of a token copy that is dropped.
pub(super) const DROPPED: u32 = u32::MAX;

/// The source's side: rows and copies by destination rank.
pub(super) struct Outbound {
    /// Token of each row, by destination, then token; a token goes once to a rank.
    pub token_of_row: Vec<i32>,
    /// Rows to each rank.
    pub rows: Vec<usize>,
    /// Place in `ids [T, K]` of each copy, by destination, then token, then k.
    pub place_of_copy: Vec<i32>,
    /// Copies to each rank.
    pub copies: Vec<usize>,
    /// `[T, K]` place of each copy in the order above, -1 where dropped.
    pub copy_index: Vec<i32>,
    /// `[T, width]` rows of each token in rank order, -1 behind the last.
    pub row_index: Vec<i32>,
    /// Columns of `row_index`.
    pub row_index_width: usize,
    /// For each copy the row within its destination's rows, and the expert.
    routes: Vec<[u32; 2]>,
}

impl Outbound {
    /// `ids` and `destinations` are `[T, K]`.
    pub fn new(ids: &[u32], destinations: &[u32], k: usize, ranks: usize) -> Self {
        let tokens = ids.len().checked_div(k).unwrap_or(0);
        let (mut rows, mut copies) = (vec![0; ranks], vec![0; ranks]);
        // The last token seen by each rank, plus one.
        let mut seen = vec![0; ranks];
        for (token, destinations) in destinations.chunks_exact(k.max(1)).enumerate() {
            for &rank in destinations.iter().filter(|rank| **rank != DROPPED) {
                let rank = rank as usize;
                copies[rank] += 1;
                rows[rank] += usize::from(seen[rank] != token + 1);
                seen[rank] = token + 1;
            }
        }
        let row_index_width = k.min(ranks);
        let mut out = Self {
            token_of_row: vec![0; rows.iter().sum()],
            place_of_copy: vec![0; copies.iter().sum()],
            copy_index: vec![-1; ids.len()],
            row_index: vec![-1; tokens * row_index_width],
            row_index_width,
            routes: vec![[0; 2]; copies.iter().sum()],
            rows,
            copies,
        };
        out.fill(ids, destinations, k);
        out
    }

    fn fill(&mut self, ids: &[u32], destinations: &[u32], k: usize) {
        let first_row = starts(&self.rows);
        let (mut next_row, mut next_copy) = (first_row.clone(), starts(&self.copies));
        let mut seen = vec![0; self.rows.len()];
        let mut touched: Vec<usize> = Vec::with_capacity(k);
        for token in 0..ids.len().checked_div(k).unwrap_or(0) {
            touched.clear();
            for place in token * k..(token + 1) * k {
                if destinations[place] == DROPPED {
                    continue;
                }
                let rank = destinations[place] as usize;
                if seen[rank] != token + 1 {
                    seen[rank] = token + 1;
                    self.token_of_row[next_row[rank]] = token as i32;
                    next_row[rank] += 1;
                    touched.push(rank);
                }
                let copy = next_copy[rank];
                next_copy[rank] += 1;
                self.place_of_copy[copy] = place as i32;
                self.copy_index[place] = copy as i32;
                let row = next_row[rank] - 1 - first_row[rank];
                self.routes[copy] = [row as u32, ids[place]];
            }
            touched.sort_unstable();
            let index = &mut self.row_index[token * self.row_index_width..];
            for (index, &rank) in index.iter_mut().zip(&touched) {
                *index = (next_row[rank] - 1) as i32;
            }
        }
    }

    /// What each destination must know of its rows: the routes of its copies.
    pub fn messages(&self) -> Vec<Bytes> {
        let bytes = Bytes::copy_from_slice(bytemuck::cast_slice(&self.routes));
        let mut start = 0;
        self.copies
            .iter()
            .map(|copies| {
                let end = start + copies * size_of::<[u32; 2]>();
                let part = bytes.slice(start..end);
                start = end;
                part
            })
            .collect()
    }
}

/// The computing rank's side: rows from all sources, their copies sorted by instance.
pub(super) struct Inbound {
    /// Rows from each rank.
    pub rows: Vec<usize>,
    /// Copies from each rank.
    pub copies: Vec<usize>,
    /// Received row of each copy, in order of instance, then arrival.
    pub row_of_copy: Vec<i32>,
    /// Place in the order above of each copy in order of arrival.
    pub sorted_place: Vec<i32>,
    /// `[instances + 1]`: first copy of each instance.
    pub offsets: Vec<i32>,
    /// `[rows, width]` places in instance order of each row's copies, -1 behind the last.
    pub copies_of_row: Vec<i32>,
    /// The same, as places in order of arrival, 0 behind the last.
    pub arrivals_of_row: Vec<i32>,
    /// Columns of the two above: the most copies of a row.
    pub width: usize,
}

impl Inbound {
    /// From what each source sent about its rows.
    ///
    /// # Errors
    ///
    /// When a source names an expert that has no instance here, or rows out of order.
    pub fn new(
        messages: &[Bytes],
        instance_of: &[u32],
        instances: usize,
        key: Key,
    ) -> Result<Self, CommError> {
        let mut rows = Vec::with_capacity(messages.len());
        let mut copies = Vec::with_capacity(messages.len());
        let mut arrivals: Vec<(usize, u32)> = Vec::new();
        for (from, message) in messages.iter().enumerate() {
            let routes: Vec<[u32; 2]> = bytemuck::pod_collect_to_vec(message);
            let first: usize = rows.iter().sum();
            let mut count = 0;
            for &[row, expert] in &routes {
                let instance = instance_of
                    .get(expert as usize)
                    .copied()
                    .filter(|instance| (*instance as usize) < instances);
                let row = row as usize;
                let (Some(instance), true) = (instance, row == count || row + 1 == count) else {
                    return Err(CommError::Mismatch {
                        what: "expert of a dispatched row",
                        expected: instances,
                        got: expert as usize,
                        from,
                        key,
                    });
                };
                count = row + 1;
                arrivals.push((first + row, instance));
            }
            rows.push(count);
            copies.push(routes.len());
        }
        Ok(Self::sort(rows, copies, &arrivals, instances))
    }

    /// Stable counting sort of `arrivals` (row, instance) by instance.
    fn sort(
        rows: Vec<usize>,
        copies: Vec<usize>,
        arrivals: &[(usize, u32)],
        instances: usize,
    ) -> Self {
        let mut offsets = vec![0; instances + 1];
        for (_, instance) in arrivals {
            offsets[*instance as usize + 1] += 1;
        }
        for instance in 0..instances {
            offsets[instance + 1] += offsets[instance];
        }
        let mut next = offsets.clone();
        let mut row_of_copy = vec![0; arrivals.len()];
        let sorted_place: Vec<i32> = arrivals
            .iter()
            .map(|(row, instance)| {
                let place = next[*instance as usize];
                next[*instance as usize] += 1;
                row_of_copy[place as usize] = *row as i32;
                place
            })
            .collect();
        let total: usize = rows.iter().sum();
        let mut counts = vec![0usize; total];
        for (row, _) in arrivals {
            counts[*row] += 1;
        }
        let width = counts.iter().copied().max().unwrap_or(1);
        let mut copies_of_row = vec![-1; total * width];
        let mut arrivals_of_row = vec![0; total * width];
        counts.fill(0);
        for (arrival, (row, _)) in arrivals.iter().enumerate() {
            let at = row * width + counts[*row];
            counts[*row] += 1;
            copies_of_row[at] = sorted_place[arrival];
            arrivals_of_row[at] = arrival as i32;
        }
        Self {
            rows,
            copies,
            row_of_copy,
            sorted_place,
            offsets,
            copies_of_row,
            arrivals_of_row,
            width,
        }
    }
}

/// Instance of each expert on `rank`: home experts in order, then replicas by slot; `u32::MAX`
/// where there is none. Also how many there are.
pub(super) fn instances_on(rank: usize, placement: &Placement, plan: &Plan) -> (Vec<u32>, usize) {
    let mut instance_of = vec![u32::MAX; placement.experts()];
    let home = placement.experts_of(rank);
    for (instance, expert) in home.iter().enumerate() {
        instance_of[*expert as usize] = instance as u32;
    }
    let mut count = home.len();
    for replica in plan.hosted(rank) {
        instance_of[replica.expert as usize] = home.len() as u32 + replica.slot;
        count += 1;
    }
    (instance_of, count)
}

fn starts(counts: &[usize]) -> Vec<usize> {
    counts
        .iter()
        .scan(0, |next, count| {
            let start = *next;
            *next += count;
            Some(start)
        })
        .collect()
}
