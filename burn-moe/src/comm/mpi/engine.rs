//! Messages over MPI: all of its unsafe calls are here.
//!
//! The MPI library is used with `MPI_THREAD_SERIALIZED`: whoever holds the [`Engine`] (behind a mutex) may call. No call
//! blocks but those of [`start`] and [`Engine::finalize`], in which every rank takes part.

use std::collections::{HashMap, VecDeque};
use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr;

use bytes::Bytes;
use mpi::environment::Universe;
use mpi::ffi;
use mpi::{Threading, initialize_with_threading};

use crate::comm::Key;
use crate::comm::wire::{HEADER, Header};

/// Tags of headers (with small payloads), and of the pieces of large payloads.
const HEADERS: c_int = 1;
const PIECES: c_int = 2;

/// Payloads up to this size travel with their header in one message, below the size up to which MPI sends at once.
const INLINE: usize = 3 << 10;

/// Most bytes of one message, as MPI's counts are 32 bits wide.
const CHUNK: usize = 1 << 30;

/// What the MPI library said.
#[derive(Debug, Clone)]
pub(super) struct Failure(pub String);

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

/// Which ranks are on which node, and a text of rank 0 that all have got.
pub(super) struct Started {
    pub engine: Engine,
    /// The lowest rank on the node of each rank.
    pub nodes: Vec<usize>,
    pub host: String,
}

/// Initialises MPI. Every process of the world must call it, once.
pub(super) fn start() -> Result<Started, Failure> {
    let (universe, threading) = initialize_with_threading(Threading::Serialized)
        .ok_or_else(|| Failure("MPI has already been initialised in this process".into()))?;
    if threading < Threading::Serialized {
        return Err(Failure(format!(
            "the MPI library gives threads only {threading:?}, needed is Serialized"
        )));
    }
    let host = mpi::environment::processor_name().map_err(|error| Failure(error.to_string()))?;
    // SAFETY: MPI is initialised; all out-pointers are to initialised locals that outlive the calls.
    unsafe {
        let mut comm = ffi::RSMPI_COMM_NULL;
        ok(ffi::MPI_Comm_dup(ffi::RSMPI_COMM_WORLD, &mut comm))?;
        ok(ffi::MPI_Comm_set_errhandler(comm, ffi::RSMPI_ERRORS_RETURN))?;
        let (mut rank, mut size) = (0, 0);
        ok(ffi::MPI_Comm_rank(comm, &mut rank))?;
        ok(ffi::MPI_Comm_size(comm, &mut size))?;
        let nodes = nodes(comm, rank, size)?;
        let mut engine = Engine {
            comm,
            universe: Some(universe),
            rank: rank as usize,
            size: size as usize,
            sends: Requests::default(),
            pieces: Requests::default(),
            arrivals: HashMap::new(),
            next_arrival: 0,
            queues: HashMap::new(),
            header: None,
            header_buffer: Box::new([0; HEADER + INLINE]),
            sent: vec![0; size as usize],
            received: vec![0; size as usize],
        };
        engine.await_header()?;
        Ok(Started {
            engine,
            nodes,
            host,
        })
    }
}

/// The lowest rank that shares memory with each rank.
///
/// # Safety
///
/// MPI must be initialised and `comm` valid.
unsafe fn nodes(comm: ffi::MPI_Comm, rank: c_int, size: c_int) -> Result<Vec<usize>, Failure> {
    // SAFETY: as promised by the caller; the buffers have the announced sizes.
    unsafe {
        let mut node = ffi::RSMPI_COMM_NULL;
        ok(ffi::MPI_Comm_split_type(
            comm,
            ffi::RSMPI_COMM_TYPE_SHARED,
            rank,
            ffi::RSMPI_INFO_NULL,
            &mut node,
        ))?;
        let mut lowest = rank as u32;
        let int = ffi::RSMPI_UINT32_T;
        let first = (&raw mut lowest).cast::<c_void>();
        ok(ffi::MPI_Bcast(first, 1, int, 0, node))?;
        let mut all = vec![0u32; size as usize];
        let gathered = all.as_mut_ptr().cast::<c_void>();
        ok(ffi::MPI_Allgather(
            first.cast_const(),
            1,
            int,
            gathered,
            1,
            int,
            comm,
        ))?;
        ok(ffi::MPI_Comm_free(&mut node))?;
        Ok(all.into_iter().map(|rank| rank as usize).collect())
    }
}

impl Engine {
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

/// Requests under way, each with what belongs to it.
struct Requests<T> {
    requests: Vec<ffi::MPI_Request>,
    owners: Vec<T>,
}

impl<T> Default for Requests<T> {
    fn default() -> Self {
        Self {
            requests: Vec::new(),
            owners: Vec::new(),
        }
    }
}

impl<T> Requests<T> {
    fn push(&mut self, request: ffi::MPI_Request, owner: T) {
        self.requests.push(request);
        self.owners.push(owner);
    }

    fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Takes out what is complete.
    fn completed(&mut self) -> Result<Vec<T>, Failure> {
        if self.is_empty() {
            return Ok(Vec::new());
        }
        let mut done: Vec<c_int> = vec![0; self.requests.len()];
        let mut count = 0;
        // SAFETY: `done` has a place for each request.
        unsafe {
            ok(ffi::MPI_Testsome(
                self.requests.len() as c_int,
                self.requests.as_mut_ptr(),
                &mut count,
                done.as_mut_ptr(),
                ffi::RSMPI_STATUSES_IGNORE,
            ))?;
        }
        // Undefined, a negative number, when there is no active request.
        done.truncate(usize::try_from(count).unwrap_or(0));
        // From the end, so that the places of the others stay. The order of completion is of no matter.
        done.sort_unstable_by(|a, b| b.cmp(a));
        Ok(done
            .into_iter()
            .map(|at| {
                self.requests.swap_remove(at as usize);
                self.owners.swap_remove(at as usize)
            })
            .collect())
    }
}

/// The library's own words for an error code.
fn ok(code: c_int) -> Result<(), Failure> {
    if code == ffi::MPI_SUCCESS as c_int {
        return Ok(());
    }
    let mut text = vec![0u8; 1024];
    let mut len = 0;
    // SAFETY: the buffer is longer than MPI_MAX_ERROR_STRING of any implementation (512 at most).
    unsafe { ffi::MPI_Error_string(code, text.as_mut_ptr().cast(), ptr::from_mut(&mut len)) };
    text.truncate(usize::try_from(len).unwrap_or(0));
    Err(Failure(String::from_utf8_lossy(&text).into_owned()))
}
