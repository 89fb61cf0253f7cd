//! What ranks send, and how long they are in it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::Bytes;

use super::clock::{lock, wrapper_methods};
use super::{CommError, Communicator, Key, Op, Topology};

/// A communicator that measures: bytes to other ranks and time by operation. What travels over a link between devices is
/// not among it; the link counts that itself.
pub struct Meter {
    inner: Arc<dyn Communicator>,
    traffic: Mutex<BTreeMap<Op, Traffic>>,
}

/// What one rank spent on one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Payload bytes sent to other ranks.
    pub bytes: usize,
    /// Messages sent to other ranks. The parts of an all-to-all count one each.
    pub messages: usize,
    /// Time in the calls, on the rank's clock: most of it waiting for others.
    pub time: Duration,
}

impl Meter {
    /// Measures what goes through it to `inner`.
    pub fn new(inner: Arc<dyn Communicator>) -> Arc<Self> {
        Arc::new(Self {
            inner,
            traffic: Mutex::default(),
        })
    }

    /// What was measured since the last call, by operation.
    pub fn take(&self) -> BTreeMap<Op, Traffic> {
        std::mem::take(&mut lock(&self.traffic))
    }

    fn measure<R>(&self, op: Op, bytes: usize, messages: usize, f: impl FnOnce() -> R) -> R {
        let start = self.inner.clock();
        let result = f();
        let time = self.inner.clock().saturating_sub(start);
        let mut traffic = lock(&self.traffic);
        let traffic = traffic.entry(op).or_default();
        traffic.bytes += bytes;
        traffic.messages += messages;
        traffic.time += time;
        result
    }
}

impl Communicator for Meter {
    wrapper_methods!(|own| own.inner);

    fn topology(&self) -> Topology {
        self.inner.topology()
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        let remote = usize::from(to != self.rank());
        self.measure(key.op, remote * payload.len(), remote, || {
            self.inner.send(to, key, payload)
        })
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.measure(key.op, 0, 0, || self.inner.recv(from, key))
    }

    fn all_to_all(&self, key: Key, parts: Vec<Bytes>) -> Result<Vec<Bytes>, CommError> {
        let others = parts
            .iter()
            .enumerate()
            .filter(|(to, _)| *to != self.rank());
        let (mut bytes, mut messages) = (0, 0);
        for (_, part) in others {
            bytes += part.len();
            messages += 1;
        }
        self.measure(key.op, bytes, messages, || {
            self.inner.all_to_all(key, parts)
        })
    }

    #[cfg(any(test, feature = "link"))]
    fn device_link(&self) -> Option<&super::nccl::Link> {
        self.inner.device_link()
    }
}

#[cfg(test)]
mod tests {
    use super::super::{RankOptions, run_ranks};
    use super::*;

    #[test]
    fn bytes_to_others_are_counted_by_operation() {
        let results = run_ranks(3, RankOptions::default(), |comm| {
            let meter = Meter::new(comm);
            let rank = meter.rank();
            let key = |op| Key::new(op, 0, 0);
            let parts = (0..3).map(|to| Bytes::from(vec![0; 10 * to])).collect();
            meter.all_to_all(key(Op::Dispatch), parts).unwrap();
            for to in [rank, (rank + 1) % 3] {
                meter
                    .send(to, key(Op::Replicate), Bytes::from_static(b"four"))
                    .unwrap();
            }
            meter.recv(rank, key(Op::Replicate)).unwrap();
            meter.recv((rank + 2) % 3, key(Op::Replicate)).unwrap();
            let traffic = meter.take();
            assert!(meter.take().is_empty());
            [Op::Dispatch, Op::Replicate].map(|op| (traffic[&op].bytes, traffic[&op].messages))
        });
        let expected = [30, 20, 10].map(|dispatch| [(dispatch, 2), (4, 1)]);
        assert_eq!(results.unwrap(), expected);
    }
}
