use burn::tensor::{Tensor, s};

/// What the attention of one layer keeps of the sequences of a batch, one entry a sequence.
#[derive(Debug, Clone)]
pub(crate) struct LayerCache {
    /// MLA: compressed vectors and rotated keys side by side; GQA: keys.
    pub keys: Vec<Rows>,
    /// GQA: values.
    pub values: Vec<Rows>,
    /// The indexer's keys.
    pub index_keys: Vec<Rows>,
}

/// One sequence in a cache.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SequenceCache {
    /// Its place in the cache.
    pub sequence: usize,
    /// Tokens that have been read.
    pub past: usize,
    /// Tokens of its prompt.
    pub prompt: usize,
    /// Tokens that room is made for at first.
    pub room: usize,
}

/// Rows of one sequence, one a token, with room for more behind them.
#[derive(Debug, Clone, Default)]
pub(crate) struct Rows(Option<Tensor<2>>);

impl LayerCache {
    pub fn new(sequences: usize) -> Self {
        let empty = || vec![Rows::default(); sequences];
        Self {
            keys: empty(),
            values: empty(),
            index_keys: empty(),
        }
    }

    /// Bytes allocated.
    pub fn bytes(&self) -> usize {
        let kinds = [&self.keys, &self.values, &self.index_keys];
        kinds.into_iter().flatten().map(Rows::bytes).sum()
    }
}

impl Rows {
    /// Puts rows `[length, width]` behind the `past` ones that are there and returns all,
    /// `[past + length, width]`, as a view. Rows that lie there already are overwritten: they are of
    /// a pass that has not come to its end.
    pub fn extend(&mut self, rows: Tensor<2>, at: &SequenceCache) -> Tensor<2> {
        // The past is constant to later tokens.
        let rows = rows.detach();
        let [length, width] = rows.dims();
        let end = at.past + length;
        let held = self.0.take();
        let capacity = held.as_ref().map_or(0, |held| held.dims()[0]);
        let buffer = match held {
            Some(held) if end <= capacity => held,
            held => {
                let wanted = end.max(at.room).max(2 * capacity);
                let larger = Tensor::empty([wanted, width], (&rows.device(), rows.dtype()));
                match held {
                    Some(held) if at.past > 0 => {
                        let past = held.slice(s![0..at.past]);
                        larger.slice_assign(s![0..at.past], past)
                    }
                    _ => larger,
                }
            }
        };
        // In place: nothing else refers to the buffer.
        let buffer = buffer.slice_assign(s![at.past..end], rows);
        let all = buffer.clone().slice(s![0..end]);
        self.0 = Some(buffer);
        all
    }

    fn bytes(&self) -> usize {
        let size = |rows: &Tensor<2>| rows.shape().num_elements() * rows.dtype().size();
        self.0.as_ref().map_or(0, size)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn::tensor::Device;

    fn at(past: usize, room: usize) -> SequenceCache {
        SequenceCache {
            past,
            room,
            ..Default::default()
        }
    }

    fn rows(first: usize, count: usize) -> Tensor<2> {
        let values = (2 * first..2 * (first + count)).map(|v| v as f32);
        Tensor::<1>::from_floats(values.collect::<Vec<f32>>().as_slice(), &Device::flex())
            .reshape([count, 2])
    }

    /// Rows come back in order however they came, capacity at most doubles, and what a broken pass
    /// has left is overwritten.
    #[test]
    fn rows_grow_by_doubling() {
        let mut held = Rows::default();
        let (mut past, mut capacities) = (0, Vec::new());
        for count in [3, 1, 1, 1, 1, 1, 1, 5, 1, 20, 1, 1, 1] {
            held.extend(rows(90, 2), &at(past, 4));
            let all = held.extend(rows(past, count), &at(past, 4));
            past += count;
            let values: Vec<f32> = all.into_data().iter().collect();
            let expected: Vec<f32> = (0..2 * past).map(|v| v as f32).collect();
            assert_eq!(values, expected);
            capacities.push(held.bytes() / 8);
        }
        capacities.dedup();
        assert_eq!(capacities, [4, 8, 16, 64]);
    }
}
