//! Messages over MPI.
//!
//! The MPI library is used with `MPI_THREAD_SERIALIZED`: whoever holds the [`Engine`] (behind a mutex) may call. No call
//! blocks but those of [`start`](super::start::start), [`Engine::broadcast`] and [`Engine::finalize`], in which every rank
//! takes part.

use std::collections::{HashMap, VecDeque};
use std::ffi::c_int;
use std::mem::MaybeUninit;

use bytes::Bytes;
use mpi::environment::Universe;
use mpi::ffi;

use super::requests::{Failure, Requests, ok};
use crate::comm::Key;
use crate::comm::wire::{HEADER, Header};

/// Tags of headers (with small payloads), and of the pieces of large payloads.
const HEADERS: c_int = 1;
const PIECES: c_int = 2;

/// Payloads up to this size travel with their header in one message, below the size up to which MPI sends at once.
const INLINE: usize = 3 << 10;

/// Most bytes of one message, as MPI's counts are 32 bits wide.
const CHUNK: usize = 1 << 30;

/// One rank's messages in flight and what has arrived.
pub(super) struct Engine {
    comm: ffi::MPI_Comm,
    universe: Option<Universe>,
    pub rank: usize,
    pub size: usize,
    /// Sends whose memory the library still reads.
    sends: Requests<Bytes>,
    /// Pieces that the library still writes, by arrival.
    pieces: Requests<u64>,
    arrivals: HashMap<u64, Arrival>,
    next_arrival: u64,
    /// By sender and key, in the order in which they were sent. No queue is ever empty.
    queues: HashMap<(usize, Key), VecDeque<Slot>>,
    /// Where the next header goes, whoever sends it.
    header: Option<ffi::MPI_Request>,
    header_buffer: Box<[u8; HEADER + INLINE]>,
    /// Messages sent to each rank, and taken over from each rank.
    pub sent: Vec<u64>,
    pub received: Vec<u64>,
}

// SAFETY: the handles are not tied to a thread; MPI_THREAD_SERIALIZED has been checked, and `&mut self` (behind a mutex)
// keeps calls from being made at the same time.
unsafe impl Send for Engine {}

enum Slot {
    Ready(Bytes),
    Arriving(u64),
}

/// A large payload on its way.
struct Arrival {
    from: usize,
    key: Key,
    payload: Vec<u8>,
    size: usize,
    pieces_left: usize,
}

impl Engine {
    /// The engine of `rank` of the `size` ranks of `comm`, which is its own and returns errors.
    pub fn new(
        universe: Universe,
        comm: ffi::MPI_Comm,
        rank: usize,
        size: usize,
    ) -> Result<Self, Failure> {
        let mut engine = Self {
            comm,
            universe: Some(universe),
            rank,
            size,
            sends: Requests::default(),
            pieces: Requests::default(),
            arrivals: HashMap::new(),
            next_arrival: 0,
            queues: HashMap::new(),
            header: None,
            header_buffer: Box::new([0; HEADER + INLINE]),
            sent: vec![0; size],
            received: vec![0; size],
        };
        engine.await_header()?;
        Ok(engine)
    }

    /// Replaces `text`, of at most `N` bytes, by that of rank 0. All ranks call it.
    pub fn broadcast<const N: usize>(&mut self, text: &str) -> Result<String, Failure> {
        let mut buffer = [0u8; N];
        let bytes = text.as_bytes();
        if bytes.len() > N {
            return Err(Failure(format!("{} bytes do not fit", bytes.len())));
        }
        buffer[..bytes.len()].copy_from_slice(bytes);
        // SAFETY: the buffer has `N` bytes.
        unsafe {
            ok(ffi::MPI_Bcast(
                buffer.as_mut_ptr().cast(),
                N as c_int,
                ffi::RSMPI_UINT8_T,
                0,
                self.comm,
            ))?;
        }
        let text = String::from_utf8_lossy(&buffer);
        Ok(text.trim_end_matches('\0').to_owned())
    }

    /// Begins to send. The payload is kept until the library no longer needs it.
    pub fn send(&mut self, to: usize, key: Key, payload: Bytes) -> Result<(), Failure> {
        self.sent[to] += 1;
        if to == self.rank {
            self.received[to] += 1;
            self.queue(to, key).push_back(Slot::Ready(payload));
            return Ok(());
        }
        let len = payload.len() as u64;
        let header = Header { key, len }.encode();
        if payload.len() <= INLINE {
            let mut message = Vec::with_capacity(HEADER + payload.len());
            message.extend_from_slice(&header);
            message.extend_from_slice(&payload);
            return self.post(to, HEADERS, message.into());
        }
        self.post(to, HEADERS, Bytes::copy_from_slice(&header))?;
        for start in (0..payload.len()).step_by(CHUNK) {
            let end = payload.len().min(start + CHUNK);
            self.post(to, PIECES, payload.slice(start..end))?;
        }
        Ok(())
    }

    fn post(&mut self, to: usize, tag: c_int, bytes: Bytes) -> Result<(), Failure> {
        // SAFETY: `bytes` is kept in `sends` until the request is complete, and its memory never moves.
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            ok(ffi::MPI_Isend(
                bytes.as_ptr().cast(),
                bytes.len() as c_int,
                ffi::RSMPI_UINT8_T,
                to as c_int,
                tag,
                self.comm,
                &mut request,
            ))?;
            self.sends.push(request, bytes);
        }
        Ok(())
    }

    /// The next message `key` of rank `from`, when it is here in full.
    pub fn take(&mut self, from: usize, key: Key) -> Option<Bytes> {
        let queue = self.queues.get_mut(&(from, key))?;
        let Some(Slot::Ready(_)) = queue.front() else {
            return None;
        };
        let Some(Slot::Ready(payload)) = queue.pop_front() else {
            return None;
        };
        if queue.is_empty() {
            self.queues.remove(&(from, key));
        }
        Some(payload)
    }

    /// A few of the messages of rank `from` that no one has asked for.
    pub fn unclaimed(&self, from: usize) -> Vec<Key> {
        let keys = self.queues.keys().filter(|(sender, _)| *sender == from);
        let mut keys: Vec<Key> = keys.map(|(_, key)| *key).collect();
        keys.sort_unstable();
        keys.truncate(4);
        keys
    }

    /// Drops what has arrived and nobody will ask for.
    pub fn discard(&mut self) {
        self.queues.retain(|_, queue| {
            queue.retain(|slot| matches!(slot, Slot::Arriving(_)));
            !queue.is_empty()
        });
    }

    /// Whether messages are on their way from here or to here.
    pub fn busy(&self) -> bool {
        !self.sends.is_empty() || !self.pieces.is_empty()
    }

    /// Whether the library still reads from what was sent.
    pub fn sending(&self) -> bool {
        !self.sends.is_empty()
    }

    /// Lets the library work, and takes over what has arrived. Returns whether anything was done.
    pub fn progress(&mut self) -> Result<bool, Failure> {
        let mut moved = false;
        while let Some((from, len)) = self.arrived_header()? {
            self.accept(from, len)?;
            self.await_header()?;
            moved = true;
        }
        for id in self.pieces.completed()? {
            self.complete(id);
            moved = true;
        }
        moved |= !self.sends.completed()?.is_empty();
        Ok(moved)
    }

    /// The sender and size of the header that has arrived.
    fn arrived_header(&mut self) -> Result<Option<(usize, usize)>, Failure> {
        let Some(request) = &mut self.header else {
            return Ok(None);
        };
        // SAFETY: the request was made by `await_header`; flag and status are written by the library.
        unsafe {
            let mut flag = 0;
            let mut status = MaybeUninit::<ffi::MPI_Status>::zeroed();
            ok(ffi::MPI_Test(request, &mut flag, status.as_mut_ptr()))?;
            if flag == 0 {
                return Ok(None);
            }
            self.header = None;
            let status = status.assume_init();
            let mut count = 0;
            ok(ffi::MPI_Get_count(&status, ffi::RSMPI_UINT8_T, &mut count))?;
            Ok(Some((status.MPI_SOURCE as usize, count as usize)))
        }
    }

    fn await_header(&mut self) -> Result<(), Failure> {
        // SAFETY: the boxed buffer lives as long as the engine; `finalize` ends the request, and an engine that is
        // dropped without it is leaked (see `Drop`).
        unsafe {
            let mut request = ffi::RSMPI_REQUEST_NULL;
            ok(ffi::MPI_Irecv(
                self.header_buffer.as_mut_ptr().cast(),
                self.header_buffer.len() as c_int,
                ffi::RSMPI_UINT8_T,
                ffi::RSMPI_ANY_SOURCE,
                HEADERS,
                self.comm,
                &mut request,
            ))?;
            self.header = Some(request);
        }
        Ok(())
    }

    /// Queues the message whose header has arrived, and asks for the rest of its payload.
    fn accept(&mut self, from: usize, len: usize) -> Result<(), Failure> {
        let bytes = &self.header_buffer[..len];
        let header = Header::decode(bytes)
            .ok_or_else(|| Failure(format!("rank {from} sent {len} bytes that are no header")))?;
        let rest = Bytes::copy_from_slice(&bytes[HEADER..]);
        let size = usize::try_from(header.len)
            .map_err(|_| Failure(format!("rank {from} announces {} bytes", header.len)))?;
        if size <= INLINE {
            if rest.len() != size {
                let got = rest.len();
                return Err(Failure(format!(
                    "rank {from} announced {size} bytes and sent {got}"
                )));
            }
            self.received[from] += 1;
            self.queue(from, header.key).push_back(Slot::Ready(rest));
            return Ok(());
        }
        let mut payload = Vec::new();
        payload.try_reserve_exact(size).map_err(|_| {
            Failure(format!(
                "no memory for {size} bytes of rank {from} in {}",
                header.key
            ))
        })?;
        let id = self.next_arrival;
        self.next_arrival += 1;
        let memory: *mut u8 = payload.as_mut_ptr();
        self.queue(from, header.key).push_back(Slot::Arriving(id));
        let arrival = Arrival {
            from,
            key: header.key,
            payload,
            size,
            pieces_left: size.div_ceil(CHUNK),
        };
        self.arrivals.insert(id, arrival);
        for start in (0..size).step_by(CHUNK) {
            let len = CHUNK.min(size - start);
            // SAFETY: the memory belongs to the vector in `arrivals`, which nobody touches until all pieces are there.
            unsafe {
                let mut request = ffi::RSMPI_REQUEST_NULL;
                ok(ffi::MPI_Irecv(
                    memory.add(start).cast(),
                    len as c_int,
                    ffi::RSMPI_UINT8_T,
                    from as c_int,
                    PIECES,
                    self.comm,
                    &mut request,
                ))?;
                self.pieces.push(request, id);
            }
        }
        Ok(())
    }

    /// One piece of arrival `id` is there.
    fn complete(&mut self, id: u64) {
        let Some(arrival) = self.arrivals.get_mut(&id) else {
            return;
        };
        arrival.pieces_left -= 1;
        if arrival.pieces_left > 0 {
            return;
        }
        let Some(mut arrival) = self.arrivals.remove(&id) else {
            return;
        };
        // SAFETY: `size` bytes have been reserved, and the pieces have written all of them.
        unsafe { arrival.payload.set_len(arrival.size) };
        self.received[arrival.from] += 1;
        let queue = self.queue(arrival.from, arrival.key);
        for slot in queue {
            if matches!(slot, Slot::Arriving(it) if *it == id) {
                *slot = Slot::Ready(arrival.payload.into());
                return;
            }
        }
    }

    fn queue(&mut self, from: usize, key: Key) -> &mut VecDeque<Slot> {
        self.queues.entry((from, key)).or_default()
    }

    /// Ends MPI. All ranks must call it when nothing is in flight, on the thread that called [`start`].
    pub fn finalize(&mut self) -> Result<(), Failure> {
        // SAFETY: the request is ours; after the wait the library no longer writes to the buffer.
        unsafe {
            if let Some(mut request) = self.header.take() {
                ok(ffi::MPI_Cancel(&mut request))?;
                ok(ffi::MPI_Wait(&mut request, ffi::RSMPI_STATUS_IGNORE))?;
            }
            ok(ffi::MPI_Comm_free(&mut self.comm))?;
        }
        drop(self.universe.take());
        Ok(())
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let Some(universe) = self.universe.take() else {
            return;
        };
        // Left without `finalize`, because ranks are missing that would have to take part in it: the library may still
        // use the buffers, so they stay until the process ends.
        std::mem::forget(universe);
        std::mem::forget(std::mem::take(&mut self.sends));
        std::mem::forget(std::mem::take(&mut self.arrivals));
        std::mem::forget(std::mem::replace(
            &mut self.header_buffer,
            Box::new([0; HEADER + INLINE]),
        ));
    }
}
