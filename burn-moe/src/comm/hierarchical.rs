//! All-to-all that respects which ranks share a fast domain.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::clock::wrapper_methods;
use super::{CommError, Communicator, Key, Topology};

/// `comm` with another way of all-to-all: parts for another domain go in one message to its rank of the same index,
/// which hands them on inside of the domain. What arrives is the same.
///
/// With `n` domains of `p` ranks, a rank sends `n - 1` messages over slow links instead of `(n - 1) p`, of `p` parts each
/// (Tutel, arXiv 2206.03382, section 3.3). Domains may differ in size: indices wrap around.
///
/// # Panics
///
/// When the topology is of another number of ranks.
pub fn hierarchical(comm: Arc<dyn Communicator>, topology: Topology) -> Arc<dyn Communicator> {
    Arc::new(Routed::new(comm, topology, true))
}

/// `comm` with another topology than it says: for ranks of one machine that stand for several nodes.
///
/// # Panics
///
/// When the topology is of another number of ranks.
pub fn with_topology(comm: Arc<dyn Communicator>, topology: Topology) -> Arc<dyn Communicator> {
    Arc::new(Routed::new(comm, topology, false))
}

struct Routed {
    inner: Arc<dyn Communicator>,
    topology: Topology,
    hierarchical: bool,
}

impl Routed {
    fn new(inner: Arc<dyn Communicator>, topology: Topology, hierarchical: bool) -> Self {
        assert_eq!(
            topology.ranks(),
            inner.size(),
            "the topology must be of the communicator's ranks"
        );
        Self {
            inner,
            topology,
            hierarchical,
        }
    }
}

impl Communicator for Routed {
    wrapper_methods!(|own| own.inner);

    fn topology(&self) -> Topology {
        self.topology.clone()
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        self.inner.send(to, key, payload)
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.inner.recv(from, key)
    }

    fn all_to_all(&self, key: Key, parts: Vec<Bytes>) -> Result<Vec<Bytes>, CommError> {
        if !self.hierarchical || parts.len() != self.size() {
            return self.inner.all_to_all(key, parts);
        }
        exchange_over(&*self.inner, &self.topology, key, parts)
    }

    #[cfg(any(test, feature = "link"))]
    fn device_link(&self) -> Option<&super::nccl::Link> {
        self.inner.device_link()
    }
}

/// The place of a rank in its domain.
fn index(topology: &Topology, rank: usize) -> usize {
    let members = topology.members(topology.domain(rank));
    members.partition_point(|member| *member < rank)
}

/// The rank of `domain` that hands on what `from`, of another domain, sends there.
fn relay(topology: &Topology, domain: usize, from: usize) -> usize {
    let members = topology.members(domain);
    members[index(topology, from) % members.len()]
}

/// The ranks of other domains whose parts go through `through`, ascending.
fn sources(topology: &Topology, through: usize) -> Vec<usize> {
    let own = topology.domain(through);
    (0..topology.ranks())
        .filter(|from| topology.domain(*from) != own && relay(topology, own, *from) == through)
        .collect()
}

/// The all-to-all itself; there must be a part for each rank.
pub(super) fn exchange_over(
    comm: &dyn Communicator,
    topology: &Topology,
    key: Key,
    mut parts: Vec<Bytes>,
) -> Result<Vec<Bytes>, CommError> {
    let rank = comm.rank();
    let own = topology.domain(rank);
    let neighbours = topology.members(own);
    // All messages of a pair of ranks have the same key and stay in order: what neighbours send each other comes
    // before what they hand on.
    let domains = topology.domains();
    for domain in (1..domains).map(|distance| (own + distance) % domains) {
        let members = topology.members(domain);
        let bundle = bundle(members.iter().map(|to| &parts[*to]));
        comm.send(relay(topology, domain, rank), key, bundle)?;
    }
    for to in neighbours.iter().filter(|to| **to != rank) {
        comm.send(*to, key, std::mem::take(&mut parts[*to]))?;
    }
    // For each neighbour, what has come for it from each source.
    let handed_on = sources(topology, rank);
    let mut to_neighbours = vec![Vec::with_capacity(handed_on.len()); neighbours.len()];
    for from in &handed_on {
        let bundle = comm.recv(*from, key)?;
        let received = open(&bundle, neighbours.len(), *from, key)?;
        for (for_neighbour, part) in to_neighbours.iter_mut().zip(received) {
            for_neighbour.push(part);
        }
    }
    let mut results = vec![Bytes::new(); comm.size()];
    for (to, for_neighbour) in neighbours.iter().zip(to_neighbours) {
        match *to == rank {
            true => {
                results[rank] = std::mem::take(&mut parts[rank]);
                for (from, part) in handed_on.iter().zip(for_neighbour) {
                    results[*from] = part;
                }
            }
            false => comm.send(*to, key, bundle(for_neighbour.iter()))?,
        }
    }
    for relay in neighbours.iter().filter(|relay| **relay != rank) {
        results[*relay] = comm.recv(*relay, key)?;
        let sources = sources(topology, *relay);
        let bundle = comm.recv(*relay, key)?;
        for (from, part) in sources
            .iter()
            .zip(open(&bundle, sources.len(), *relay, key)?)
        {
            results[*from] = part;
        }
    }
    Ok(results)
}

/// Parts in one message: their lengths, then their bytes.
pub(super) fn bundle<'a>(parts: impl Iterator<Item = &'a Bytes> + Clone) -> Bytes {
    let total = parts.clone().map(|part| 8 + part.len()).sum();
    let mut bytes = Vec::with_capacity(total);
    for part in parts.clone() {
        bytes.extend_from_slice(&(part.len() as u64).to_le_bytes());
    }
    for part in parts {
        bytes.extend_from_slice(part);
    }
    bytes.into()
}

/// The `count` parts of a bundle, sharing its memory.
pub(super) fn open(
    bundle: &Bytes,
    count: usize,
    from: usize,
    key: Key,
) -> Result<Vec<Bytes>, CommError> {
    let mismatch = |expected: usize| CommError::Mismatch {
        what: "bytes of the bundle",
        expected,
        got: bundle.len(),
        from,
        key,
    };
    let table = bundle.get(..8 * count).ok_or(mismatch(8 * count))?;
    let mut start = 8 * count;
    let mut parts = Vec::with_capacity(count);
    for len in bytemuck::pod_collect_to_vec::<u8, [u8; 8]>(table) {
        let len = usize::try_from(u64::from_le_bytes(len)).unwrap_or(usize::MAX);
        let end = start.saturating_add(len);
        if end > bundle.len() {
            return Err(mismatch(end));
        }
        parts.push(bundle.slice(start..end));
        start = end;
    }
    match start == bundle.len() {
        true => Ok(parts),
        false => Err(mismatch(start)),
    }
}
