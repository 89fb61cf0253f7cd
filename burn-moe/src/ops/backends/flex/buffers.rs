//! Large buffers, kept for the next step when their tensors are gone. Memory fresh from the system
//! costs a page fault every 4 KiB, several times what the kernels need to fill it; and buffers that
//! are used again need no zeroing either, since every byte of them has been written before.

use std::marker::PhantomData;
use std::mem::{self, MaybeUninit};
use std::ops::{Deref, DerefMut, Range};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use burn_std::{AccessError, AccessPolicy, AllocationController, AllocationProperty, Bytes};
use bytemuck::Pod;

/// Buffers begin at multiples of this many bytes: a cache line, and the widest vector.
pub(super) const ALIGN: usize = 64;

/// Smaller buffers are left to the allocator.
const LEAST_KEPT: usize = 4 << 10;

/// A buffer that nobody has wanted for so long is freed when the next one is put back. Next to so
/// much time, faulting its pages in anew is nothing.
const KEPT_FOR: Duration = Duration::from_secs(20);

static UNUSED: Mutex<Vec<Unused>> = Mutex::new(Vec::new());

struct Unused {
    words: Vec<u64>,
    written: Written,
    since: Instant,
}

/// Which bytes of a buffer may be other than zero.
enum Written {
    All,
    /// These, in order, disjoint.
    Ranges(Vec<Range<usize>>),
}

/// Memory that is initialised, and zero where it has not been written. When dropped, it waits for
/// the next that wants about so much.
struct Memory {
    words: Vec<u64>,
    written: Written,
}

impl Memory {
    /// At least `bytes` bytes from the first aligned one on.
    fn new(bytes: usize) -> Self {
        let least = (bytes + ALIGN).div_ceil(size_of::<u64>());
        if bytes >= LEAST_KEPT {
            let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
            let fitting = (0..unused.len())
                .rev()
                .filter(|i| (least..=2 * least).contains(&unused[*i].words.len()))
                .min_by_key(|i| unused[*i].words.len());
            if let Some(i) = fitting {
                let Unused { words, written, .. } = unused.remove(i);
                return Self { words, written };
            }
        }
        Self {
            // From `calloc`: pages that nobody writes are not touched.
            words: vec![0; least],
            written: Written::Ranges(Vec::new()),
        }
    }

    fn start(&self) -> usize {
        self.words.as_ptr().addr().wrapping_neg() % ALIGN
    }

    fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.words)[self.start()..]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        let start = self.start();
        &mut bytemuck::cast_slice_mut(&mut self.words)[start..]
    }

    /// Makes the first `len` bytes zero outside of `kept`, which is in order and disjoint.
    fn clear_except(&mut self, len: usize, kept: Vec<Range<usize>>) {
        let capacity = self.bytes().len();
        let written = match mem::replace(&mut self.written, Written::All) {
            Written::All => std::iter::once(0..capacity).collect(),
            Written::Ranges(ranges) => ranges,
        };
        let bytes = self.bytes_mut();
        let mut ahead = kept.iter().peekable();
        for range in &written {
            let (mut at, end) = (range.start, range.end.min(len));
            while at < end {
                match ahead.peek() {
                    Some(kept) if kept.end <= at => _ = ahead.next(),
                    Some(kept) if kept.start <= at => at = kept.end,
                    next => {
                        let stop = next.map_or(end, |kept| kept.start.min(end));
                        bytes[at..stop].fill(0);
                        at = stop;
                    }
                }
            }
        }
        // What lies behind `len` is not the new owner's, and stays as it is.
        let behind = written.last().filter(|range| range.end > len);
        let behind = behind.map(|range| len..range.end);
        self.written = Written::Ranges(kept.into_iter().chain(behind).collect());
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        if self.words.len() * size_of::<u64>() < LEAST_KEPT {
            return;
        }
        let since = Instant::now();
        let returned = Unused {
            words: mem::take(&mut self.words),
            written: mem::replace(&mut self.written, Written::All),
            since,
        };
        let mut unused = UNUSED.lock().unwrap_or_else(PoisonError::into_inner);
        // In order of time: the oldest are first.
        let old = unused.partition_point(|unused| unused.since + KEPT_FOR < since);
        let freed: Vec<_> = unused.drain(..old).collect();
        unused.push(returned);
        drop(unused);
        drop(freed);
    }
}

/// A slice of `T` in memory that is used again.
pub(super) struct Buffer<T> {
    memory: Memory,
    len: usize,
    element: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// A buffer with any content.
    pub(super) fn new(len: usize) -> Self {
        let mut memory = Memory::new(len * size_of::<T>());
        memory.written = Written::All;
        Self {
            memory,
            len,
            element: PhantomData,
        }
    }

    /// A buffer with any content in the ranges `written`, which are in order and disjoint, and zero
    /// elsewhere. The caller must write nowhere else. What is zero already costs nothing.
    pub(super) fn zero_except(len: usize, written: &[Range<usize>]) -> Self {
        let size = size_of::<T>();
        let ranges = written
            .iter()
            .map(|range| range.start * size..range.end * size)
            .collect();
        let mut memory = Memory::new(len * size);
        memory.clear_except(len * size, ranges);
        Self {
            memory,
            len,
            element: PhantomData,
        }
    }

    /// The memory as that of a tensor.
    pub(super) fn into_bytes(self) -> Bytes {
        let len = self.len * size_of::<T>();
        let memory = Box::new(TensorMemory {
            memory: self.memory,
            len,
        });
        // SAFETY: all of the memory is initialised, and `len` bytes of it are the tensor's.
        unsafe { Bytes::from_controller(memory, len) }
    }
}

impl<T: Pod> Deref for Buffer<T> {
    type Target = [T];

    fn deref(&self) -> &[T] {
        bytemuck::cast_slice(&self.memory.bytes()[..self.len * size_of::<T>()])
    }
}

impl<T: Pod> DerefMut for Buffer<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        let len = self.len * size_of::<T>();
        bytemuck::cast_slice_mut(&mut self.memory.bytes_mut()[..len])
    }
}

struct TensorMemory {
    memory: Memory,
    len: usize,
}

impl AllocationController for TensorMemory {
    fn alloc_align(&self) -> usize {
        align_of::<u64>()
    }

    fn property(&self) -> AllocationProperty {
        AllocationProperty::Other
    }

    unsafe fn memory_mut(
        &mut self,
        _policy: AccessPolicy,
    ) -> Result<&mut [MaybeUninit<u8>], AccessError> {
        self.memory.written = Written::All;
        let bytes = &mut self.memory.bytes_mut()[..self.len];
        // SAFETY: the layout is the same, and the caller promises to write initialised bytes only.
        Ok(unsafe { mem::transmute::<&mut [u8], &mut [MaybeUninit<u8>]>(bytes) })
    }

    fn memory(&self, _policy: AccessPolicy) -> Result<&[MaybeUninit<u8>], AccessError> {
        let bytes = &self.memory.bytes()[..self.len];
        // SAFETY: the layout is the same, and any initialised byte may be seen as a maybe
        // uninitialised one.
        Ok(unsafe { mem::transmute::<&[u8], &[MaybeUninit<u8>]>(bytes) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A size that no other test wants, so that none takes the memory.
    const LEN: usize = 1_234_567;

    #[test]
    fn memory_comes_back_and_is_zero_where_asked() {
        let mut first = Buffer::<f32>::new(LEN);
        first.fill(1.0);
        let address = first.as_ptr();
        assert!(address.addr().is_multiple_of(ALIGN));
        drop(first);
        let mut second = Buffer::<f32>::zero_except(LEN, &[10..20, 20..30, 100..LEN - 1]);
        assert_eq!(second.as_ptr(), address);
        let kept = |i: usize| (10..30).contains(&i) || (100..LEN - 1).contains(&i);
        assert!((0..LEN).all(|i| kept(i) || second[i] == 0.0));
        second[10..30].fill(2.0);
        second[100..LEN - 1].fill(2.0);
        // Through a tensor's bytes and back, then with other ranges.
        let Written::Ranges(ranges) = &second.memory.written else {
            panic!("all written");
        };
        assert_eq!(ranges[..3], [40..80, 80..120, 400..4 * (LEN - 1)]);
        drop(second.into_bytes());
        let third = Buffer::<f32>::zero_except(LEN, &[0..15, 25..110]);
        assert_eq!(third.as_ptr(), address);
        let kept = |i: usize| i < 15 || (25..110).contains(&i);
        assert!((0..LEN).all(|i| kept(i) || third[i] == 0.0));
        // Written by whoever had the tensor: anywhere.
        let mut bytes = third.into_bytes();
        bytes.fill(7);
        drop(bytes);
        // A smaller one leaves the end as it is.
        let fourth = Buffer::<f32>::zero_except(LEN - 100, &[]);
        assert_eq!(fourth.as_ptr(), address);
        assert!(fourth.iter().all(|v| *v == 0.0));
        drop(fourth);
        let fifth = Buffer::<f32>::zero_except(LEN, &[]);
        assert_eq!(fifth.as_ptr(), address);
        assert!(fifth.iter().all(|v| *v == 0.0));
    }
}
