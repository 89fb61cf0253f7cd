//! The hierarchical all-to-all delivers what the direct one does, over fewer messages between domains.

use std::sync::Mutex;

use super::*;

fn part(seed: u64, from: usize, to: usize) -> Bytes {
    let mut random = Random(seed ^ ((from as u64) << 32) ^ ((to as u64) << 48));
    let len = random.below(4) * random.below(40);
    random.bytes(len)
}

/// Notes who sends to whom.
struct Spy<'a> {
    inner: Comm,
    sent: &'a Mutex<Vec<(usize, usize)>>,
}

impl Communicator for Spy<'_> {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        self.sent.lock().unwrap().push((self.rank(), to));
        self.inner.send(to, key, payload)
    }
    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.inner.recv(from, key)
    }
    fn clock(&self) -> Duration {
        self.inner.clock()
    }
    fn pause_clock(&self) {}
    fn resume_clock(&self) {}
}

#[test]
fn every_grouping_delivers_the_same() {
    for domains in [
        vec![0],
        vec![0, 0, 0],
        vec![0, 1],
        vec![0, 0, 1, 1],
        vec![0, 1, 0, 1],
        vec![0, 0, 0, 1],
        vec![0, 1, 1, 1],
        vec![0, 0, 1, 1, 2, 2, 2, 3],
        vec![3, 0, 1, 0, 3, 3, 0, 1],
    ] {
        let size = domains.len();
        let topology = Topology::from_domains(domains);
        let results = run_ranks(size, patient(), |comm| {
            let rank = comm.rank();
            let comm = hierarchical(comm, topology.clone());
            // Twice with one key, and something direct between.
            for seed in [1, 2] {
                let parts = (0..size).map(|to| part(seed, rank, to)).collect();
                let got = comm.all_to_all(key(Op::Dispatch), parts).unwrap();
                let expected: Vec<_> = (0..size).map(|from| part(seed, from, rank)).collect();
                assert_eq!(got, expected, "{topology:?}");
                comm.barrier(key(Op::Barrier)).unwrap();
            }
        });
        results.unwrap();
    }
}

#[test]
fn one_message_crosses_for_each_rank_and_domain() {
    let topology = Topology::nodes(6, 2).unwrap();
    let sent = Mutex::new(Vec::new());
    run_ranks(6, patient(), |comm| {
        let rank = comm.rank();
        // A communicator that borrows cannot be shared as `Arc<dyn Communicator>`, so it is used as it is.
        let spy = Spy {
            inner: comm,
            sent: &sent,
        };
        let parts = (0..6).map(|to| part(1, rank, to)).collect();
        let routed =
            super::super::hierarchical::exchange_over(&spy, &topology, key(Op::Dispatch), parts);
        let expected: Vec<_> = (0..6).map(|from| part(1, from, rank)).collect();
        assert_eq!(routed.unwrap(), expected);
    })
    .unwrap();
    let sent = sent.into_inner().unwrap();
    let mut across: Vec<_> = (sent.into_iter())
        .filter(|(from, to)| topology.domain(*from) != topology.domain(*to))
        .collect();
    across.sort_unstable();
    assert_eq!(across, [(0, 3), (1, 4), (2, 5), (3, 0), (4, 1), (5, 2)]);
}

#[test]
fn bundles_that_are_cut_are_refused() {
    use super::super::hierarchical::{bundle, open};
    let parts = [part(1, 0, 0), Bytes::from_static(b"abc"), Bytes::new()];
    let whole = bundle(parts.iter());
    assert_eq!(open(&whole, 3, 0, key(Op::Dispatch)).unwrap(), parts);
    for len in 0..whole.len() {
        let error = open(&whole.slice(..len), 3, 5, key(Op::Dispatch)).unwrap_err();
        assert!(matches!(error, CommError::Mismatch { from: 5, .. }));
    }
    let mut wild = whole.to_vec();
    wild[7] = 0xff;
    assert!(open(&wild.into(), 3, 0, key(Op::Dispatch)).is_err());
}
