//! NCCL between CUDA devices, as an [`Engine`].

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cudarc::driver::result::{self as driver, DriverError};
use cudarc::driver::sys::{self, CUevent, CUstream};

use super::NcclError;
use super::device::{Device, failed};
use super::engine::{Engine, Placed};
use super::library::{BYTES, Code, Config, IN_PROGRESS, Library, NcclComm, SUCCESS, UniqueId};
use super::plan::Way;
use crate::comm::clock::lock;

/// One NCCL communicator with a stream of its own.
pub(super) struct NcclEngine {
    library: Arc<Library>,
    device: Arc<Device>,
    stream: Stream,
    /// NCCL's communicators take one call at a time. `None` when it is aborted or closed.
    comm: Mutex<Option<Comm>>,
    marks: Mutex<Marks>,
    timeout: Duration,
}

struct Stream(CUstream);
struct Comm(NcclComm);

#[derive(Default)]
struct Marks {
    last: u64,
    /// What is recorded at each mark that was not seen passed.
    events: BTreeMap<u64, Event>,
}

struct Event(CUevent);

// SAFETY: CUDA's streams and events, and NCCL's communicators, belong to the process and not to a thread. The mutexes
// around the latter two see to it that one thread at a time uses them.
unsafe impl Send for Stream {}
// SAFETY: as above; CUDA takes calls on a stream from several threads.
unsafe impl Sync for Stream {}
// SAFETY: as above.
unsafe impl Send for Comm {}
// SAFETY: as above.
unsafe impl Send for Event {}

impl NcclEngine {
    /// Begins to connect the ranks that meet under `id`; [`settled`](Engine::settled) when it is done.
    pub fn connect(
        library: Arc<Library>,
        device: Arc<Device>,
        id: UniqueId,
        rank: usize,
        ranks: usize,
        timeout: Duration,
    ) -> Result<Self, NcclError> {
        device.enter()?;
        // Ahead of the matrix products: what it carries is waited for.
        let (_, highest) =
            driver::stream::get_priority_range().map_err(failed("cuCtxGetStreamPriorityRange"))?;
        let kind = driver::stream::StreamKind::NonBlocking;
        let stream = driver::stream::create_with_priority(kind, highest)
            .map_err(failed("cuStreamCreateWithPriority"))?;
        let mut comm: NcclComm = std::ptr::null_mut();
        let mut config = Config::not_blocking();
        // SAFETY: `comm` and `config` are there, and NCCL copies the latter.
        let code = unsafe {
            (library.comm_init_rank_config)(
                &mut comm,
                ranks as c_int,
                id,
                rank as c_int,
                &mut config,
            )
        };
        let engine = Self {
            library,
            device,
            stream: Stream(stream),
            comm: Mutex::new((!comm.is_null()).then_some(Comm(comm))),
            marks: Mutex::default(),
            timeout,
        };
        match code {
            SUCCESS | IN_PROGRESS if !comm.is_null() => Ok(engine),
            code => Err(NcclError::Call {
                call: "ncclCommInitRankConfig",
                message: engine.library.message(code, comm),
            }),
        }
    }

    /// Runs `f` with the communicator, on the device.
    fn with<R>(&self, f: impl FnOnce(NcclComm) -> Result<R, String>) -> Result<R, String> {
        self.device.enter().map_err(|error| error.to_string())?;
        match &*lock(&self.comm) {
            Some(comm) => f(comm.0),
            None => Err("the communicator was given up".to_owned()),
        }
    }

    /// The result of a call that may go on in the background.
    fn begun(&self, call: &str, code: Code, comm: NcclComm) -> Result<(), String> {
        match code {
            SUCCESS | IN_PROGRESS => Ok(()),
            code => Err(format!("{call}: {}", self.library.message(code, comm))),
        }
    }

    /// Whether NCCL is idle.
    fn idle(&self, comm: NcclComm) -> Result<bool, String> {
        let mut state = SUCCESS;
        // SAFETY: the communicator is alive, `state` is there for the result.
        let code = unsafe { (self.library.comm_get_async_error)(comm, &mut state) };
        self.begun("ncclCommGetAsyncError", code, comm)?;
        self.begun("asynchronous error", state, comm)?;
        Ok(state == SUCCESS)
    }

    /// Waits until a call that goes on in the background is done, at most for the timeout.
    fn until_idle(&self, comm: NcclComm) -> bool {
        let start = Instant::now();
        loop {
            match self.idle(comm) {
                Ok(true) => return true,
                Ok(false) if start.elapsed() < self.timeout => {
                    std::thread::sleep(Duration::from_millis(1))
                }
                _ => return false,
            }
        }
    }
}

impl Engine for NcclEngine {
    unsafe fn start(&self, transfers: &[Placed]) -> Result<(), String> {
        self.with(|comm| {
            let library = &self.library;
            let stream = self.stream.0.cast::<c_void>();
            // SAFETY: no arguments. Every path below comes to the end of the group.
            let code = unsafe { (library.group_start)() };
            self.begun("ncclGroupStart", code, comm)?;
            let mut refused = Ok(());
            for Placed {
                peer,
                way,
                address,
                bytes,
            } in transfers
            {
                let peer = *peer as c_int;
                // SAFETY: the communicator is alive, and the caller promises the memory until all is done.
                let code = unsafe {
                    match way {
                        Way::Send => {
                            (library.send)(*address as *const _, *bytes, BYTES, peer, comm, stream)
                        }
                        Way::Receive => {
                            (library.recv)(*address as *mut _, *bytes, BYTES, peer, comm, stream)
                        }
                    }
                };
                refused = refused.and(self.begun("ncclSend or ncclRecv", code, comm));
            }
            // SAFETY: in the group that was started above.
            let code = unsafe { (library.group_end)() };
            refused.and(self.begun("ncclGroupEnd", code, comm))
        })
    }

    fn settled(&self) -> Result<bool, String> {
        self.with(|comm| self.idle(comm))
    }

    fn mark(&self) -> Result<u64, String> {
        self.with(|_| {
            let flags = sys::CUevent_flags::CU_EVENT_DISABLE_TIMING;
            let event = driver::event::create(flags).map_err(text("cuEventCreate"))?;
            let mut marks = lock(&self.marks);
            marks.last += 1;
            let last = marks.last;
            marks.events.insert(last, Event(event));
            // SAFETY: both are alive.
            unsafe { driver::event::record(event, self.stream.0) }
                .map_err(text("cuEventRecord"))?;
            Ok(last)
        })
    }

    fn passed(&self, mark: u64) -> Result<bool, String> {
        self.with(|comm| {
            let mut marks = lock(&self.marks);
            let Some(event) = marks.events.get(&mark) else {
                return Ok(true);
            };
            // SAFETY: events are in the map for as long as they live.
            match unsafe { driver::event::query(event.0) } {
                Ok(()) => {
                    // What comes before a mark that is passed is passed.
                    let later = marks.events.split_off(&(mark + 1));
                    marks.events = later;
                    Ok(true)
                }
                Err(DriverError(sys::CUresult::CUDA_ERROR_NOT_READY)) => {
                    self.idle(comm)?;
                    Ok(false)
                }
                Err(error) => Err(text("cuEventQuery")(error)),
            }
        })
    }

    fn abort(&self) {
        let Some(comm) = lock(&self.comm).take() else {
            return;
        };
        let (library, device) = (self.library.clone(), self.device.clone());
        // On a thread of its own, because nobody but NCCL promises that it ends.
        let abort = std::thread::Builder::new().spawn(move || {
            let comm = comm;
            if device.enter().is_ok() {
                // SAFETY: taken out of its place, so nobody uses it from now on.
                unsafe { (library.comm_abort)(comm.0) };
            }
        });
        let Ok(abort) = abort else { return };
        let start = Instant::now();
        while !abort.is_finished() && start.elapsed() < self.timeout.min(MOST_FOR_ABORT) {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    fn close(&self) {
        let Some(comm) = lock(&self.comm).take() else {
            return;
        };
        if self.device.enter().is_err() {
            return;
        }
        // SAFETY: taken out of its place, so nobody else uses it.
        let code = unsafe { (self.library.comm_finalize)(comm.0) };
        if self.begun("ncclCommFinalize", code, comm.0).is_ok() && self.until_idle(comm.0) {
            // SAFETY: as above, and finalised.
            unsafe { (self.library.comm_destroy)(comm.0) };
            return;
        }
        *lock(&self.comm) = Some(comm);
        self.abort();
    }
}

/// How long an abort may take before it goes on without anyone waiting for it.
const MOST_FOR_ABORT: Duration = Duration::from_secs(10);

impl Drop for NcclEngine {
    fn drop(&mut self) {
        self.abort();
        lock(&self.marks).events.clear();
        if self.device.enter().is_ok() {
            // SAFETY: nothing uses the stream any more; CUDA frees it when its work is done.
            let _ = unsafe { driver::stream::destroy(self.stream.0) };
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created in `mark`, and owned by this.
        let _ = unsafe { driver::event::destroy(self.0) };
    }
}

fn text(call: &'static str) -> impl Fn(DriverError) -> String {
    move |error| format!("{call}: {error}")
}
