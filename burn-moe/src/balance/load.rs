use super::BalanceError;

/// Token copies that each source rank sends to each expert, of one micro-batch and layer: `[ranks, experts]`, row-major.
///
/// A token with `K` experts counts `K` times. The counts are exact, made from this micro-batch's router decisions.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct LoadMatrix {
    ranks: usize,
    experts: usize,
    counts: Vec<u32>,
}

impl LoadMatrix {
    /// A matrix of zeros.
    pub fn new(ranks: usize, experts: usize) -> Self {
        Self {
            ranks,
            experts,
            counts: vec![0; ranks * experts],
        }
    }

    /// Takes `counts` as `[ranks, experts]`, row-major.
    ///
    /// # Errors
    ///
    /// [`BalanceError::Invalid`] when `counts` does not hold `ranks * experts` numbers.
    pub fn from_counts(
        ranks: usize,
        experts: usize,
        counts: Vec<u32>,
    ) -> Result<Self, BalanceError> {
        check_len(ranks, experts, counts.len())?;
        Ok(Self {
            ranks,
            experts,
            counts,
        })
    }

    /// Overwrites all counts, keeping shape and memory.
    ///
    /// # Errors
    ///
    /// [`BalanceError::Invalid`] when `counts` does not hold `ranks * experts` numbers; the matrix stays as it was.
    pub fn set_from(&mut self, counts: &[u32]) -> Result<(), BalanceError> {
        check_len(self.ranks, self.experts, counts.len())?;
        self.counts.copy_from_slice(counts);
        Ok(())
    }

    /// Number of source ranks.
    pub fn ranks(&self) -> usize {
        self.ranks
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Token copies from `source` to `expert`.
    ///
    /// # Panics
    ///
    /// When either is out of range.
    pub fn get(&self, source: usize, expert: usize) -> u32 {
        self.row(source)[expert]
    }

    /// The counts of one source rank, `[experts]`.
    ///
    /// # Panics
    ///
    /// When `source` is out of range.
    pub fn row(&self, source: usize) -> &[u32] {
        &self.counts[source * self.experts..(source + 1) * self.experts]
    }

    /// The counts of one source rank, to fill in, `[experts]`.
    ///
    /// # Panics
    ///
    /// When `source` is out of range.
    pub fn row_mut(&mut self, source: usize) -> &mut [u32] {
        &mut self.counts[source * self.experts..(source + 1) * self.experts]
    }

    /// All counts, `[ranks, experts]`, row-major: what ranks gather from each other.
    pub fn counts(&self) -> &[u32] {
        &self.counts
    }

    /// Token copies of one expert, from all sources.
    ///
    /// # Panics
    ///
    /// When `expert` is out of range.
    pub fn expert_load(&self, expert: usize) -> u64 {
        assert!(
            expert < self.experts,
            "expert {expert} of {} experts",
            self.experts
        );
        let column = self.counts[expert.min(self.counts.len())..].iter();
        column.step_by(self.experts).map(|&c| u64::from(c)).sum()
    }

    /// Token copies of every expert, written to `out` as `[experts]`.
    pub fn expert_loads(&self, out: &mut Vec<u64>) {
        // Columns are summed in blocks that fit the vector registers: this is the whole cost of a step with nothing
        // to balance, so it must stay at a few microseconds.
        const BLOCK: usize = 16;
        out.clear();
        out.resize(self.experts, 0);
        let (blocks, tail) = out.as_chunks_mut::<BLOCK>();
        let tail_at = blocks.len() * BLOCK;
        for (b, sums) in blocks.iter_mut().enumerate() {
            let mut acc = [0u64; BLOCK];
            for row in self.counts.chunks_exact(self.experts) {
                if let Some(part) = row[b * BLOCK..].first_chunk::<BLOCK>() {
                    for (a, &c) in acc.iter_mut().zip(part) {
                        *a += u64::from(c);
                    }
                }
            }
            *sums = acc;
        }
        if !tail.is_empty() {
            for row in self.counts.chunks_exact(self.experts) {
                for (a, &c) in tail.iter_mut().zip(&row[tail_at..]) {
                    *a += u64::from(c);
                }
            }
        }
    }

    /// Token copies of the whole micro-batch.
    pub fn total(&self) -> u64 {
        self.counts.iter().map(|&c| u64::from(c)).sum()
    }
}

fn check_len(ranks: usize, experts: usize, len: usize) -> Result<(), BalanceError> {
    if ranks.checked_mul(experts) == Some(len) {
        return Ok(());
    }
    Err(BalanceError::invalid(
        "counts.len()",
        len,
        format!("ranks * experts = {ranks} * {experts}"),
    ))
}
