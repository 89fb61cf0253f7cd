use super::{LoadMatrix, Placement, Plan};

/// Where every token copy goes: the plan's quotas split over the source ranks (UltraEP, arXiv 2606.04101, reroute).
///
/// Every instance first takes the copies that are already on its own rank; what remains of each source is split over
/// the instances' remaining capacity by largest remainder, ties to the lower rank. All ranks get the same answer.
#[derive(Debug, Clone, Default)]
pub struct Reroute {
    ranks: usize,
    /// Where each expert's instances start in `instances`, `[experts + 1]`.
    starts: Vec<usize>,
    /// Ranks of each expert's instances: home, then replicas by rank.
    instances: Vec<u32>,
    /// For source `s` and instance `i` of expert `e` the copies of `e` from `s` that go to the instances up to and
    /// including `i`: at `s * instances.len() + starts[e] + i`.
    ends: Vec<u32>,
    /// Copies from each source to each destination, `[ranks, ranks]`.
    counts: Vec<u64>,
    capacity: Vec<u64>,
    parts: Vec<Part>,
}

impl Reroute {
    /// Splits the quotas of `plan` over the source ranks.
    ///
    /// # Panics
    ///
    /// When the plan does not pass [`check`](super::check) for this load and placement.
    pub fn build(&mut self, load: &LoadMatrix, placement: &Placement, plan: &Plan) {
        self.ranks = placement.ranks();
        self.list_instances(placement, plan);
        let width = self.instances.len();
        self.ends.clear();
        self.ends.resize(self.ranks * width, 0);
        self.counts.clear();
        self.counts.resize(self.ranks * self.ranks, 0);
        for (source, ends) in self.ends.chunks_exact_mut(width.max(1)).enumerate() {
            for (&start, &count) in self.starts.iter().zip(load.row(source)) {
                ends[start] = count;
            }
        }
        let mut quotas = plan.replicas.as_slice();
        while let Some(first) = quotas.first() {
            let expert = first.expert as usize;
            let n = self.starts[expert + 1] - self.starts[expert];
            let (of_expert, rest) = quotas.split_at(n - 1);
            quotas = rest;
            let replicas: u64 = of_expert.iter().map(|r| r.quota).sum();
            self.capacity.clear();
            self.capacity.push(load.expert_load(expert) - replicas);
            self.capacity.extend(of_expert.iter().map(|r| r.quota));
            self.split(load, expert);
        }
        self.count();
    }

    /// Ranks that hold an instance of `expert`: its home first, then its replicas by rank.
    ///
    /// # Panics
    ///
    /// When `expert` is out of range.
    pub fn instances(&self, expert: usize) -> &[u32] {
        &self.instances[self.starts[expert]..self.starts[expert + 1]]
    }

    /// How the copies of `expert` from `source` are cut: instance `i` gets those numbered from `ends[i - 1]` (0 for the
    /// first) up to `ends[i]`, in the order in which they stand in the source's ids.
    ///
    /// # Panics
    ///
    /// When either is out of range.
    pub fn ends(&self, source: usize, expert: usize) -> &[u32] {
        let row = source * self.instances.len();
        &self.ends[row + self.starts[expert]..row + self.starts[expert + 1]]
    }

    /// Destination rank of each token copy of `source`, written to `out` in the order of `ids`, `[tokens * k]`.
    ///
    /// The n-th copy of an expert in `ids` goes to the instance whose range of [`ends`](Self::ends) holds n. Copies
    /// beyond those that the load counted stay at home. Takes time proportional to `ids.len()`.
    ///
    /// # Panics
    ///
    /// When `source` is not a rank or an id is not an expert.
    pub fn assign(&self, source: usize, ids: &[u32], out: &mut Vec<u32>) {
        assert!(
            source < self.ranks,
            "source {source} of {} ranks",
            self.ranks
        );
        // For each expert the copies seen so far and the instance they have reached.
        let mut cursors = vec![(0u32, 0usize); self.starts.len() - 1];
        out.clear();
        out.extend(ids.iter().map(|&id| {
            let expert = id as usize;
            let (seen, at) = &mut cursors[expert];
            let instances = self.instances(expert);
            if instances.len() > 1 {
                let ends = self.ends(source, expert);
                while *at < ends.len() && *seen >= ends[*at] {
                    *at += 1;
                }
                *seen = seen.saturating_add(1);
            }
            *instances.get(*at).unwrap_or(&instances[0])
        }));
    }

    /// Token copies that `source` sends to `destination` (itself included).
    ///
    /// # Panics
    ///
    /// When either is out of range.
    pub fn counts(&self, source: usize, destination: usize) -> u64 {
        self.counts[source * self.ranks..(source + 1) * self.ranks][destination]
    }

    /// The share of token copies that leave their source rank, 0.0 to 1.0.
    pub fn remote_fraction(&self) -> f64 {
        let total: u64 = self.counts.iter().sum();
        let local: u64 = (0..self.ranks).map(|r| self.counts(r, r)).sum();
        if total == 0 {
            return 0.0;
        }
        (total - local) as f64 / total as f64
    }

    fn list_instances(&mut self, placement: &Placement, plan: &Plan) {
        self.starts.clear();
        self.instances.clear();
        let mut replicas = plan.replicas.iter().peekable();
        for (expert, &home) in placement.homes().iter().enumerate() {
            self.starts.push(self.instances.len());
            self.instances.push(home);
            while let Some(replica) = replicas.next_if(|r| r.expert as usize == expert) {
                self.instances.push(replica.rank);
            }
        }
        self.starts.push(self.instances.len());
    }

    /// Splits one expert's copies over its instances; `capacity` holds their quotas.
    fn split(&mut self, load: &LoadMatrix, expert: usize) {
        let width = self.instances.len();
        let range = self.starts[expert]..self.starts[expert + 1];
        let instances = &self.instances[range.clone()];
        for source in 0..self.ranks {
            self.ends[source * width..][range.clone()].fill(0);
        }
        for (i, (&rank, capacity)) in instances.iter().zip(&mut self.capacity).enumerate() {
            let count = load.get(rank as usize, expert);
            let local = count.min(u32::try_from(*capacity).unwrap_or(u32::MAX));
            self.ends[rank as usize * width + range.start + i] = local;
            *capacity -= u64::from(local);
        }
        let mut capacity_left: u64 = self.capacity.iter().sum();
        for source in 0..self.ranks {
            let shares = &mut self.ends[source * width..][range.clone()];
            let left = load.get(source, expert) - shares.iter().sum::<u32>();
            if left > 0 {
                let capacity = &mut self.capacity;
                largest_remainder(left, capacity, capacity_left, instances, &mut self.parts);
                for (share, (part, capacity)) in
                    shares.iter_mut().zip(self.parts.iter().zip(capacity))
                {
                    *share += part.copies;
                    *capacity -= u64::from(part.copies);
                }
                capacity_left -= u64::from(left);
            }
            let mut end = 0;
            for share in shares {
                end += *share;
                *share = end;
            }
        }
    }

    /// Sums the copies between each pair of ranks.
    fn count(&mut self) {
        let width = self.instances.len().max(1);
        let rows = self.ends.chunks_exact(width);
        for (ends, counts) in rows.zip(self.counts.chunks_exact_mut(self.ranks)) {
            for expert in self.starts.windows(2) {
                let range = expert[0]..expert[1];
                let mut start = 0;
                for (&end, &rank) in ends[range.clone()].iter().zip(&self.instances[range]) {
                    counts[rank as usize] += u64::from(end - start);
                    start = end;
                }
            }
        }
    }
}

/// What one instance gets of a source's copies.
#[derive(Debug, Clone, Copy, Default)]
struct Part {
    copies: u32,
    remainder: u64,
}

/// Splits `left` copies in proportion to `capacity`, which sums to `total >= left`: no part exceeds its capacity.
fn largest_remainder(
    left: u32,
    capacity: &[u64],
    total: u64,
    ranks: &[u32],
    parts: &mut Vec<Part>,
) {
    parts.clear();
    parts.extend(capacity.iter().map(|&capacity| {
        // The product needs more than 64 bits only for loads of billions of tokens.
        let (copies, remainder) = match u64::from(left).checked_mul(capacity) {
            Some(product) => (product / total, product % total),
            None => {
                let product = u128::from(left) * u128::from(capacity);
                let total = u128::from(total);
                ((product / total) as u64, (product % total) as u64)
            }
        };
        Part {
            copies: copies as u32,
            remainder,
        }
    }));
    let rest = left - parts.iter().map(|p| p.copies).sum::<u32>();
    for _ in 0..rest {
        let next =
            (0..parts.len()).max_by_key(|&i| (parts[i].remainder, std::cmp::Reverse(ranks[i])));
        if let Some(i) = next {
            parts[i].copies += 1;
            parts[i].remainder = 0;
        }
    }
}
