use super::BalanceError;

/// The home rank of every expert, and which ranks share a fast domain.
///
/// Homes do not change within a step: parameters and optimizer state of an expert live there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Placement {
    /// Home rank of each expert, `[experts]`.
    homes: Vec<u32>,
    /// Experts grouped by home rank, each group in ascending order, `[experts]`.
    grouped: Vec<u32>,
    /// Where each rank's group starts in `grouped`, `[ranks + 1]`.
    starts: Vec<usize>,
    ranks_per_domain: usize,
}

impl Placement {
    /// Experts in order over the ranks, as evenly as possible: the first `experts % ranks` ranks have one more.
    ///
    /// # Panics
    ///
    /// When `ranks` is zero.
    pub fn contiguous(experts: usize, ranks: usize) -> Self {
        assert!(ranks > 0, "ranks is 0, allowed: at least 1");
        let (each, more) = (experts / ranks, experts % ranks);
        let homes = (0..ranks)
            .flat_map(|r| std::iter::repeat_n(r as u32, each + usize::from(r < more)))
            .collect();
        Self::group(homes, ranks)
    }

    /// Any placement: `homes[e]` is the home rank of expert `e`. Ranks without experts are allowed.
    ///
    /// # Errors
    ///
    /// [`BalanceError::Invalid`] when `ranks` is zero or a home is not below `ranks`.
    pub fn from_homes(homes: Vec<u32>, ranks: usize) -> Result<Self, BalanceError> {
        if ranks == 0 {
            return Err(BalanceError::invalid("ranks", ranks, "at least 1"));
        }
        if let Some(&home) = homes.iter().find(|&&h| h as usize >= ranks) {
            return Err(BalanceError::invalid(
                "home rank",
                home as usize,
                format!("below the {ranks} ranks"),
            ));
        }
        Ok(Self::group(homes, ranks))
    }

    fn group(homes: Vec<u32>, ranks: usize) -> Self {
        let mut grouped: Vec<u32> = (0..homes.len() as u32).collect();
        grouped.sort_by_key(|&e| homes[e as usize]);
        let mut starts = vec![0; ranks + 1];
        for &h in &homes {
            starts[h as usize + 1] += 1;
        }
        for r in 0..ranks {
            starts[r + 1] += starts[r];
        }
        Self {
            homes,
            grouped,
            starts,
            ranks_per_domain: ranks,
        }
    }

    /// Groups ranks into fast domains (such as nodes) of `ranks_per_domain` consecutive ranks; the last domain may be
    /// smaller. Replicas then stay in the domain of the expert's home. Without this call all ranks share one domain.
    ///
    /// # Errors
    ///
    /// [`BalanceError::Invalid`] when `ranks_per_domain` is zero.
    pub fn with_domains(mut self, ranks_per_domain: usize) -> Result<Self, BalanceError> {
        if ranks_per_domain == 0 {
            return Err(BalanceError::invalid(
                "ranks_per_domain",
                ranks_per_domain,
                "at least 1",
            ));
        }
        self.ranks_per_domain = ranks_per_domain.min(self.ranks());
        Ok(self)
    }

    /// Number of ranks.
    pub fn ranks(&self) -> usize {
        self.starts.len() - 1
    }

    /// Number of experts.
    pub fn experts(&self) -> usize {
        self.homes.len()
    }

    /// Home rank of `expert`.
    ///
    /// # Panics
    ///
    /// When `expert` is out of range.
    pub fn home(&self, expert: usize) -> usize {
        self.homes[expert] as usize
    }

    /// Home rank of every expert, `[experts]`.
    pub fn homes(&self) -> &[u32] {
        &self.homes
    }

    /// The experts whose home is `rank`, ascending.
    ///
    /// # Panics
    ///
    /// When `rank` is out of range.
    pub fn experts_of(&self, rank: usize) -> &[u32] {
        &self.grouped[self.starts[rank]..self.starts[rank + 1]]
    }

    /// The domain of `rank`.
    pub fn domain(&self, rank: usize) -> usize {
        rank / self.ranks_per_domain
    }

    /// Number of domains.
    pub fn domains(&self) -> usize {
        self.ranks().div_ceil(self.ranks_per_domain)
    }

    /// The ranks of `domain`.
    pub fn ranks_of(&self, domain: usize) -> std::ops::Range<usize> {
        let start = domain * self.ranks_per_domain;
        start..(start + self.ranks_per_domain).min(self.ranks())
    }

    /// Whether replicas of experts at home on one of the ranks may live on the other.
    pub fn same_domain(&self, a: usize, b: usize) -> bool {
        self.domain(a) == self.domain(b)
    }
}
