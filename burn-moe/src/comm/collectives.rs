//! The collectives, built on `send` and `recv` alone.
//!
//! All sends of a collective come before its first receive, and sends do not block: no order of ranks can deadlock.

use bytes::Bytes;

use super::{CommError, Communicator, Key};

/// A message to itself: sending fails when a rank is lost, and what was sent is there at once.
pub(super) fn check_ranks<C: Communicator + ?Sized>(comm: &C, key: Key) -> Result<(), CommError> {
    let (rank, key) = (comm.rank(), key.about());
    comm.send(rank, key, Bytes::new())?;
    comm.recv(rank, key).map(drop)
}

pub(super) fn all_to_all<C: Communicator + ?Sized>(
    comm: &C,
    key: Key,
    mut parts: Vec<Bytes>,
) -> Result<Vec<Bytes>, CommError> {
    check("parts", comm.size(), parts.len(), comm.rank(), key)?;
    for to in others(comm) {
        comm.send(to, key, core::mem::take(&mut parts[to]))?;
    }
    // The own part has stayed in its place.
    for from in others(comm) {
        parts[from] = comm.recv(from, key)?;
    }
    Ok(parts)
}

pub(super) fn all_gather<C: Communicator + ?Sized>(
    comm: &C,
    key: Key,
    payload: Bytes,
) -> Result<Vec<Bytes>, CommError> {
    // Clones of `Bytes` share the memory.
    all_to_all(comm, key, vec![payload; comm.size()])
}

pub(super) fn broadcast<C: Communicator + ?Sized>(
    comm: &C,
    key: Key,
    root: usize,
    payload: Option<Bytes>,
) -> Result<Bytes, CommError> {
    if comm.rank() != root {
        return comm.recv(root, key);
    }
    let payload = payload.ok_or(CommError::RootWithoutPayload { root, key })?;
    for to in others(comm) {
        comm.send(to, key, payload.clone())?;
    }
    Ok(payload)
}

/// Dissemination barrier: `ceil(log2(size))` rounds; after round `i` a rank has heard, directly or not, of the
/// `2^(i+1) - 1` ranks before it. Each round has another peer, so one key serves all rounds.
pub(super) fn barrier<C: Communicator + ?Sized>(comm: &C, key: Key) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    let mut distance = 1;
    while distance < size {
        comm.send((rank + distance) % size, key, Bytes::new())?;
        let heard = comm.recv((rank + size - distance) % size, key)?;
        check(
            "bytes of the barrier message",
            0,
            heard.len(),
            (rank + size - distance) % size,
            key,
        )?;
        distance *= 2;
    }
    Ok(())
}

/// Reduce-scatter, then all-gather: rank `r` sums chunk `r` in rank order and everyone takes that sum, so the bits
/// cannot differ between ranks. Both halves use `key`; messages of one sender and key stay in order.
pub(super) fn all_reduce_sum<C: Communicator + ?Sized, T: Scalar>(
    comm: &C,
    key: Key,
    data: &mut [T],
) -> Result<(), CommError> {
    let (rank, size) = (comm.rank(), comm.size());
    if size == 1 {
        return Ok(());
    }
    let bounds = |r: usize| data.len() * r / size..data.len() * (r + 1) / size;
    // The own part is not read back from bytes, so it is not encoded.
    let parts = (0..size)
        .map(|r| {
            if r == rank {
                Bytes::new()
            } else {
                encode(&data[bounds(r)])
            }
        })
        .collect();
    let parts = all_to_all(comm, key, parts)?;

    let own = &data[bounds(rank)];
    for (from, part) in parts.iter().enumerate().filter(|(from, _)| *from != rank) {
        check(
            "bytes of the all-reduce chunk",
            size_of_val(own),
            part.len(),
            from,
            key,
        )?;
    }
    let mut sum = if rank == 0 {
        own.to_vec()
    } else {
        decode(&parts[0]).collect()
    };
    for (from, part) in parts.iter().enumerate().skip(1) {
        if from == rank {
            sum.iter_mut().zip(own).for_each(|(s, x)| s.add(*x));
        } else {
            sum.iter_mut().zip(decode(part)).for_each(|(s, x)| s.add(x));
        }
    }

    let sums = all_gather(comm, key, encode(&sum))?;
    for (from, chunk) in sums.iter().enumerate() {
        let expected = size_of::<T>() * bounds(from).len();
        check(
            "bytes of the all-reduce sum",
            expected,
            chunk.len(),
            from,
            key,
        )?;
    }
    // Only now: `data` stays as it was when anything fails.
    let sums = sums.iter().flat_map(|chunk| decode(chunk));
    data.iter_mut().zip(sums).for_each(|(x, sum)| *x = sum);
    Ok(())
}

/// The other ranks, beginning with the next one, so that not all ranks send to rank 0 first.
fn others<C: Communicator + ?Sized>(comm: &C) -> impl Iterator<Item = usize> + use<C> {
    let (rank, size) = (comm.rank(), comm.size());
    (1..size).map(move |distance| (rank + distance) % size)
}

fn check(
    what: &'static str,
    expected: usize,
    got: usize,
    from: usize,
    key: Key,
) -> Result<(), CommError> {
    if expected == got {
        return Ok(());
    }
    Err(CommError::Mismatch {
        what,
        expected,
        got,
        from,
        key,
    })
}

/// A number on the wire: little-endian, so that ranks on different machines agree.
pub(super) trait Scalar: Copy {
    fn write(self, to: &mut [u8]);
    fn read(from: &[u8]) -> Self;
    fn add(&mut self, other: Self);
}

macro_rules! scalar {
    ($($float:ty),*) => {$(
        impl Scalar for $float {
            fn write(self, to: &mut [u8]) {
                to.copy_from_slice(&self.to_le_bytes());
            }
            fn read(from: &[u8]) -> Self {
                let mut bytes = [0; size_of::<Self>()];
                bytes.copy_from_slice(from);
                Self::from_le_bytes(bytes)
            }
            fn add(&mut self, other: Self) {
                *self += other;
            }
        }
    )*};
}
scalar!(f32, f64);

fn encode<T: Scalar>(values: &[T]) -> Bytes {
    let mut bytes = vec![0; size_of_val(values)];
    let slots = bytes.chunks_exact_mut(size_of::<T>());
    slots
        .zip(values)
        .for_each(|(slot, value)| value.write(slot));
    bytes.into()
}

fn decode<T: Scalar>(bytes: &[u8]) -> impl Iterator<Item = T> {
    bytes.chunks_exact(size_of::<T>()).map(T::read)
}
