//! Groups of some of the ranks.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::clock::clock_methods;
use super::error::check_rank;
use super::{CommError, Communicator, Key, Op, Topology};

/// Divides the ranks of `comm` into groups and returns this rank's group: the ranks that gave the same `color`, in their
/// old order. Every rank of `comm` must call it with the same key.
///
/// Messages of a group never meet those of the whole or of another group, also with the same keys: a group's messages
/// carry its number, made from `key` and `color`. Two splits of one communicator need keys that differ.
///
/// Errors name ranks as `comm` numbers them, because that is what whoever reads them knows;
/// [`CommError::InvalidRank`] and [`CommError::Mismatch`] alone number within the group.
///
/// # Errors
///
/// When a rank is lost or too late.
pub fn split(
    comm: &Arc<dyn Communicator>,
    key: Key,
    color: usize,
) -> Result<Arc<dyn Communicator>, CommError> {
    let own = Bytes::copy_from_slice(&(color as u64).to_le_bytes());
    let colors = comm.all_gather(key, own.clone())?;
    let ranks: Vec<usize> = (0..comm.size()).filter(|r| colors[*r] == own).collect();
    Ok(group(comm, ranks, key, color as u64))
}

fn group(
    comm: &Arc<dyn Communicator>,
    ranks: Vec<usize>,
    key: Key,
    color: u64,
) -> Arc<dyn Communicator> {
    let rank = ranks.iter().position(|rank| *rank == comm.rank());
    let topology = comm.topology();
    Arc::new(Group {
        parent: comm.clone(),
        rank: rank.expect("a rank has the color that it gave"),
        topology: Topology::from_domains(ranks.iter().map(|r| topology.domain(*r)).collect()),
        #[cfg(any(test, feature = "link"))]
        link: comm.device_link().map(|link| link.of_group(&ranks)),
        ranks,
        number: number(key, color),
    })
}

struct Group {
    parent: Arc<dyn Communicator>,
    rank: usize,
    topology: Topology,
    /// The members, as the parent numbers them.
    ranks: Vec<usize>,
    number: u64,
    #[cfg(any(test, feature = "link"))]
    link: Option<super::nccl::Link>,
}

impl Group {
    fn parents(&self, rank: usize, key: Key) -> Result<usize, CommError> {
        check_rank(rank, self.ranks.len(), key)?;
        Ok(self.ranks[rank])
    }

    /// The key by which the parent knows it.
    fn key(&self, key: Key) -> Key {
        let group = match key.group {
            0 => self.number,
            // Of a group of this group.
            inner => mix(self.number, inner),
        };
        Key { group, ..key }
    }
}

impl Communicator for Group {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.ranks.len()
    }

    fn topology(&self) -> Topology {
        self.topology.clone()
    }

    fn timeout(&self) -> Duration {
        self.parent.timeout()
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        let to = self.parents(to, key)?;
        self.parent.send(to, self.key(key), payload)
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        let from = self.parents(from, key)?;
        self.parent.recv(from, self.key(key))
    }

    fn check(&self, key: Key) -> Result<(), CommError> {
        self.parent.check(self.key(key))
    }

    #[cfg(any(test, feature = "link"))]
    fn device_link(&self) -> Option<&super::nccl::Link> {
        self.link.as_ref()
    }

    clock_methods!(|own| own.parent);
}

/// The number of a group, the same on every machine, never 0.
fn number(key: Key, color: u64) -> u64 {
    let op = match key.op {
        Op::Custom(number) => u64::from(number) | 1 << 32,
        op => format!("{op:?}")
            .bytes()
            .fold(0, |hash, byte| mix(hash, byte.into())),
    };
    [key.step, key.layer.into(), op, key.part.into(), color]
        .into_iter()
        .fold(key.group, mix)
        .max(1)
}

/// A hash of both (the finish of splitmix64).
fn mix(a: u64, b: u64) -> u64 {
    let mut z = (a.rotate_left(23) ^ b).wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
