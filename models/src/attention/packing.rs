use burn::tensor::{Bool, Device, Tensor};

use super::cache::{Rows, SequenceCache};
use super::{AttentionConfig, Rope};

/// How the sequences of a batch lie in its rows, one behind the other, and which keys their tokens
/// see.
#[derive(Debug)]
pub struct Packing {
    /// Of each row.
    pub(super) angles: Rope,
    pub(super) runs: Vec<Run>,
}

/// Sequences of equal length that are computed together; with a cache, one sequence.
#[derive(Debug)]
pub(super) struct Run {
    first_row: usize,
    sequences: usize,
    /// New tokens of each.
    pub length: usize,
    cached: SequenceCache,
    /// `[1, 1, length, past + length]`: true where a key comes after the query.
    pub future: Tensor<4, Bool>,
    /// `[1 or sequences, 1, length, past + length]`: keys that a query does not see, as the layers
    /// so far have left it.
    pub hidden: Tensor<4, Bool>,
}

impl Packing {
    /// Of sequences of these lengths, each from its beginning.
    pub fn new(config: &AttentionConfig, lengths: &[usize], device: &Device) -> Self {
        let mut runs: Vec<(usize, usize, usize)> = Vec::new();
        let mut row = 0;
        for &length in lengths.iter().filter(|length| **length > 0) {
            match runs.last_mut() {
                Some((_, sequences, of)) if *of == length => *sequences += 1,
                _ => runs.push((row, 1, length)),
            }
            row += length;
        }
        let positions: Vec<usize> = lengths.iter().flat_map(|length| 0..*length).collect();
        Self {
            angles: config.angles(&positions, device),
            runs: runs
                .into_iter()
                .map(|(row, sequences, length)| {
                    let cached = SequenceCache::default();
                    Run::new(row, sequences, length, cached, device)
                })
                .collect(),
        }
    }

    /// Of the sequences of a cache, which go on by these lengths; 0 leaves one out.
    pub(crate) fn behind(
        config: &AttentionConfig,
        cached: &[SequenceCache],
        lengths: &[usize],
        device: &Device,
    ) -> Self {
        let (mut row, mut positions, mut runs) = (0, Vec::new(), Vec::new());
        for (cached, &length) in cached.iter().zip(lengths) {
            if length > 0 {
                positions.extend(cached.past..cached.past + length);
                runs.push(Run::new(row, 1, length, *cached, device));
                row += length;
            }
        }
        Self {
            angles: config.angles(&positions, device),
            runs,
        }
    }

    /// What `attend` makes of each run, `[sequences, length, width]`, as rows `[tokens, width]`.
    pub(super) fn each(&self, mut attend: impl FnMut(&Run) -> Tensor<3>) -> Tensor<2> {
        let rows = self.runs.iter().map(|run| {
            let attended = attend(run);
            let [sequences, length, width] = attended.dims();
            attended.reshape([sequences * length, width])
        });
        Tensor::cat(rows.collect(), 0)
    }
}

impl Run {
    fn new(
        first_row: usize,
        sequences: usize,
        length: usize,
        cached: SequenceCache,
        device: &Device,
    ) -> Self {
        let past = cached.past;
        let shape = [length, past + length];
        let future: Tensor<4, Bool> =
            Tensor::<2, Bool>::tril_mask(shape, past as i64, device).unsqueeze();
        Self {
            first_row,
            sequences,
            length,
            cached,
            hidden: future.clone(),
            future,
        }
    }

    /// Tokens before the new ones.
    pub fn past(&self) -> usize {
        self.cached.past
    }

    /// Tokens that the indexer's rows of scores stand for: all that the sequence has once its prompt
    /// has been read, or all so far behind it.
    pub fn span(&self) -> usize {
        (self.past() + self.length).max(self.cached.prompt)
    }

    /// This run's of the rows `[tokens, width]`: `[sequences, length, width]`.
    pub fn of(&self, rows: &Tensor<2>) -> Tensor<3> {
        let [_, width] = rows.dims();
        let count = self.sequences * self.length;
        rows.clone()
            .slice_dim(0, self.first_row..self.first_row + count)
            .reshape([self.sequences, self.length, width])
    }

    /// [`of`](Self::of) behind what the cache has of the same: `[sequences, past + length, width]`.
    pub fn behind_past(&self, rows: &Tensor<2>, cache: Option<&mut Vec<Rows>>) -> Tensor<3> {
        let new = self.of(rows);
        match cache {
            None => new,
            Some(cache) => cache[self.cached.sequence]
                .extend(new.squeeze_dim(0), &self.cached)
                .unsqueeze(),
        }
    }
}
