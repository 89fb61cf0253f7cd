//! What the room promises, against plain references. No test waits longer than its timeout.

mod collectives;
mod faults;
mod groups;
mod hierarchies;
mod ranks;
mod timing;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use super::*;

type Comm = Arc<dyn Communicator>;

const SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Long enough that a test that is meant to pass never meets it on a busy machine, and short enough to fail.
fn patient() -> RankOptions {
    RankOptions {
        timeout: Duration::from_secs(20),
        ..Default::default()
    }
}

fn impatient() -> RankOptions {
    RankOptions {
        timeout: Duration::from_millis(100),
        ..Default::default()
    }
}

fn key(op: Op) -> Key {
    Key::new(op, 17, 3)
}

fn failure<R>(result: Result<Vec<R>, RanksError>) -> RanksFailure {
    match result {
        Err(RanksError::Failed(failure)) => *failure,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("no rank failed"),
    }
}

/// A small generator (splitmix64), so that every run tests the same cases.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn bytes(&mut self, len: usize) -> Bytes {
        (0..len).map(|_| self.next() as u8).collect()
    }

    fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i + 1));
        }
    }
}
