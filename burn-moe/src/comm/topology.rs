use std::sync::Arc;

/// Which ranks share a fast domain, such as the links inside a node.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Topology {
    /// Domain of each rank, numbered from 0 in the order in which they first appear.
    domains: Arc<[usize]>,
    /// Ranks of each domain, ascending.
    members: Arc<[Vec<usize>]>,
}

impl Topology {
    /// All ranks in one domain.
    pub fn flat(ranks: usize) -> Self {
        Self::from_domains(vec![0; ranks])
    }

    /// `nodes` domains of equally many consecutive ranks each.
    ///
    /// # Errors
    ///
    /// [`TopologyError`] unless `nodes` divides `ranks`.
    pub fn nodes(ranks: usize, nodes: usize) -> Result<Self, TopologyError> {
        if nodes == 0 || !ranks.is_multiple_of(nodes) {
            return Err(TopologyError { ranks, nodes });
        }
        let each = (ranks / nodes).max(1);
        Ok(Self::from_domains((0..ranks).map(|r| r / each).collect()))
    }

    /// Any grouping: `domains[r]` names the domain of rank `r`. Only equality counts.
    pub fn from_domains(domains: Vec<usize>) -> Self {
        let mut names: Vec<usize> = Vec::new();
        let mut members: Vec<Vec<usize>> = Vec::new();
        let domains = domains
            .iter()
            .enumerate()
            .map(|(rank, name)| {
                let known = names.iter().position(|it| it == name);
                let domain = known.unwrap_or_else(|| {
                    names.push(*name);
                    members.push(Vec::new());
                    names.len() - 1
                });
                members[domain].push(rank);
                domain
            })
            .collect();
        Self {
            domains,
            members: members.into(),
        }
    }

    /// How many ranks there are.
    pub fn ranks(&self) -> usize {
        self.domains.len()
    }

    /// How many domains there are.
    pub fn domains(&self) -> usize {
        self.members.len()
    }

    /// The domain of `rank`.
    ///
    /// # Panics
    ///
    /// When `rank` is out of range.
    pub fn domain(&self, rank: usize) -> usize {
        self.domains[rank]
    }

    /// The ranks of `domain`, ascending.
    ///
    /// # Panics
    ///
    /// When `domain` is out of range.
    pub fn members(&self, domain: usize) -> &[usize] {
        &self.members[domain]
    }

    /// Ranks of each domain when all hold equally many consecutive ranks (the last may hold fewer), which is what a
    /// launcher gives that fills node after node; `None` otherwise.
    pub fn ranks_per_domain(&self) -> Option<usize> {
        let each = self.members.first().map_or(1, Vec::len);
        let regular = |(rank, domain): (usize, &usize)| *domain == rank / each;
        (self.domains.iter().enumerate())
            .all(regular)
            .then_some(each)
    }
}

/// A number of nodes that does not divide the ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nodes is {nodes}, allowed is a divisor of the {ranks} ranks")]
pub struct TopologyError {
    /// How many ranks there are.
    pub ranks: usize,
    /// How many nodes were asked for.
    pub nodes: usize,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn regular_and_irregular_domains() {
        let two = Topology::nodes(6, 2).unwrap();
        assert_eq!(two.members(1), [3, 4, 5]);
        assert_eq!((two.domain(2), two.domain(3), two.domains()), (0, 1, 2));
        assert_eq!(two.ranks_per_domain(), Some(3));
        assert_eq!(Topology::flat(4).ranks_per_domain(), Some(4));
        // As a launcher that deals ranks out over the nodes in turn gives them.
        let dealt = Topology::from_domains(vec![7, 9, 7, 9]);
        assert_eq!((dealt.domains(), dealt.domain(3)), (2, 1));
        assert_eq!(dealt.members(0), [0, 2]);
        assert_eq!(dealt.ranks_per_domain(), None);
        let short = Topology::from_domains(vec![0, 0, 1]);
        assert_eq!(short.ranks_per_domain(), Some(2));
    }

    #[test]
    fn nodes_must_divide_the_ranks() {
        for (ranks, nodes) in [(4, 3), (4, 0), (4, 8)] {
            let error = Topology::nodes(ranks, nodes).unwrap_err();
            assert_eq!(
                error.to_string(),
                format!("nodes is {nodes}, allowed is a divisor of the {ranks} ranks")
            );
        }
    }
}
