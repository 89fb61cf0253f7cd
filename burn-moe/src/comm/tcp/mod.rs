//! Ranks as processes that talk over TCP: for machines without an MPI, and for what ranks with GPUs have to say to each
//! other besides NCCL.
//!
//! ```sh
//! for rank in 1 2 3 0; do
//!   RANK=$rank WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 target/release/train --comm tcp --ranks 4 &
//! done; wait
//! ```
//!
//! or through `torchrun`, `mpirun` or `srun`, whose variables [`Launch::from_env`] reads.
//!
//! Every two ranks share a connection. One thread reads from it all the time, so a message is taken off the network
//! whatever its receiver does; another writes, so that sending does not wait. A process that ends closes its connections,
//! which the system tells the others at once; one that falls silent is noticed after the timeout.

mod inbox;
mod launch;
mod rendezvous;

#[cfg(test)]
mod tests;

use std::error::Error;
use std::io::{self, Read, Write};
use std::net::{Shutdown, TcpStream};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::clock::{Monotonic, TimeSource, Timing, WorldClock, clock_methods, lock};
use super::error::{Loss, check_rank};
use super::ranks::{check_options, pool};
use super::wire::{HEADER, Header};
use super::{CommError, Communicator, Key, Op, RankOptions, RankOutcome, RanksError, RanksFailure};
use inbox::Inbox;

pub use launch::{Launch, LaunchError};

/// Why the ranks did not come together.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConnectError {
    /// A rank did not come in time.
    #[error("rank {rank} waited {after:?} for rank {waiting_for} to connect and gave up")]
    Timeout {
        /// The rank that waited.
        rank: usize,
        /// The rank that did not come.
        waiting_for: usize,
        /// How long it waited.
        after: Duration,
    },
    /// The port cannot be listened on.
    #[error("cannot listen at {address}: {error}")]
    Listen {
        /// Address and port.
        address: String,
        /// What the system says.
        error: String,
    },
    /// Ranks are on several machines, where strangers may connect.
    #[error("{variable} is not set: ranks on several machines need a secret that all of them know")]
    NoSecret {
        /// The variable that holds it.
        variable: &'static str,
    },
    /// Ranks disagree on how many there are.
    #[error("rank {rank} was started as one of {got} ranks, this one as one of {expected}")]
    WorldSize {
        /// The other rank.
        rank: String,
        /// How many ranks it thinks there are.
        got: String,
        /// How many this one thinks there are.
        expected: usize,
    },
    /// Two processes claim one rank.
    #[error("two processes say that they are rank {rank}")]
    Twice {
        /// The rank.
        rank: usize,
    },
    /// A rank would not let this one in, or ended before all were connected.
    #[error("no connection with rank {rank}: {reason}")]
    Refused {
        /// The other rank.
        rank: usize,
        /// Why.
        reason: String,
    },
}

/// Runs `f` as this process's rank, and returns what it returned here.
///
/// All processes of the run call this, within the timeout of each other. `f` runs inside the rank's own rayon pool.
///
/// # Errors
///
/// - [`RanksError::World`] when there are not `size` processes, [`RanksError::Timing`] unless the clocks are to show wall
///   time, [`RanksError::Invalid`] when an option is 0, [`RanksError::Engine`] with a [`ConnectError`]'s text when the
///   ranks do not come together.
/// - [`RanksError::Failed`] when this rank fails or another one is lost.
///
/// # Panics
///
/// Never: panics of `f` are caught. The panic hook still prints them.
pub fn try_run_tcp<R: Send, E: Into<Box<dyn Error + Send + Sync>>>(
    launch: &Launch,
    size: usize,
    options: RankOptions,
    f: impl FnOnce(Arc<dyn Communicator>) -> Result<R, E> + Send,
) -> Result<R, RanksError> {
    check_options(size, &options)?;
    if options.timing != Timing::Wall {
        return Err(RanksError::Timing);
    }
    if launch.world_size != size {
        return Err(RanksError::World {
            expected: size,
            found: launch.world_size,
        });
    }
    let pool = pool(launch.rank, &options)?;
    let source = (options.time_source).unwrap_or_else(|| Arc::new(Monotonic::default()));
    let comm = TcpCommunicator::connect(launch, options.timeout, source);
    let comm = Arc::new(comm.map_err(|error| RanksError::Engine {
        engine: "TCP",
        message: error.to_string(),
    })?);
    // A caught panic may leave what `f` captures in disorder, but the caller learns of the panic.
    let shared: Arc<dyn Communicator> = comm.clone();
    let result = pool.install(|| {
        catch_unwind(AssertUnwindSafe(|| {
            f(shared).map_err(|error| Box::new(RankOutcome::of_error(error.into())))
        }))
    });
    let (outcome, below) = match result {
        Ok(Ok(value)) => {
            comm.leave(None);
            return Ok(value);
        }
        Ok(Err(failed)) => (failed.0, failed.1),
        Err(payload) => (RankOutcome::of_panic(payload), None),
    };
    let failure = RanksFailure::seen_by(launch.rank, outcome, below, lock(&comm.seen).clone());
    comm.leave(Some(Loss {
        rank: failure.rank,
        reason: failure.cause.to_string(),
    }));
    Err(RanksError::Failed(Box::new(failure)))
}

struct TcpCommunicator {
    rank: usize,
    timeout: Duration,
    inbox: Arc<Inbox>,
    /// By rank; none to itself.
    peers: Vec<Option<Peer>>,
    /// This rank's own clock is all it has; see [`Timing::Wall`].
    clock: WorldClock,
    /// The last loss this rank was told of: tells a rank that fails because of it from one that fails on its own.
    seen: Mutex<Option<CommError>>,
}

struct Peer {
    stream: TcpStream,
    out: Sender<Frame>,
    writer: Mutex<Option<JoinHandle<()>>>,
}

/// What goes over a connection.
enum Frame {
    Message(Key, Bytes),
    /// This rank has returned.
    Goodbye,
    /// This rank fails, for that reason.
    Failure(Loss),
}

/// What a header without a key of its own means.
const GOODBYE: Key = Key::new(Op::Custom(u32::MAX), u64::MAX, 0);
const FAILURE: Key = Key::new(Op::Custom(u32::MAX), u64::MAX, 1);

/// Most bytes of the text of a failure.
const LONGEST_REASON: usize = 4096;

impl TcpCommunicator {
    fn connect(
        launch: &Launch,
        timeout: Duration,
        source: Arc<dyn TimeSource>,
    ) -> Result<Self, ConnectError> {
        let streams = rendezvous::connect_all(launch, timeout)?;
        let inbox = Arc::new(Inbox::new(launch.world_size));
        let refused = |rank: usize| {
            move |error: io::Error| ConnectError::Refused {
                rank,
                reason: error.to_string(),
            }
        };
        let mut peers = Vec::with_capacity(streams.len());
        for (rank, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                peers.push(None);
                continue;
            };
            // A peer that does not read for so long is lost.
            stream
                .set_write_timeout(Some(timeout))
                .map_err(refused(rank))?;
            let reader = stream.try_clone().map_err(refused(rank))?;
            let writer = stream.try_clone().map_err(refused(rank))?;
            let (out, frames) = channel();
            let their = inbox.clone();
            spawn(format!("from rank {rank}"), move || {
                read_all(rank, reader, &their)
            })
            .map_err(refused(rank))?;
            let their = inbox.clone();
            let writer = spawn(format!("to rank {rank}"), move || {
                write_all(rank, writer, &frames, &their);
            });
            peers.push(Some(Peer {
                stream,
                out,
                writer: Mutex::new(Some(writer.map_err(refused(rank))?)),
            }));
        }
        let clock = WorldClock::new(1, Timing::Wall, source);
        Ok(Self {
            rank: launch.rank,
            timeout,
            inbox,
            peers,
            clock,
            seen: Mutex::new(None),
        })
    }

    fn check(&self, peer: usize, key: Key) -> Result<(), CommError> {
        check_rank(peer, self.peers.len(), key)
    }

    fn lost(&self, loss: Loss, key: Key) -> CommError {
        let error = loss.seen_by(self.rank, key);
        *lock(&self.seen) = Some(error.clone());
        error
    }

    /// Says goodbye, or why this rank fails, and sees to it that all has been sent.
    fn leave(&self, failed: Option<Loss>) {
        for peer in self.peers.iter().flatten() {
            let last = failed.clone().map_or(Frame::Goodbye, Frame::Failure);
            // A peer that is gone needs no goodbye.
            let _ = peer.out.send(last);
        }
        let deadline = Instant::now() + self.timeout;
        for peer in self.peers.iter().flatten() {
            // The writer ends with the last frame, or when the peer takes nothing for too long.
            if let Some(writer) = lock(&peer.writer).take() {
                while !writer.is_finished() && Instant::now() < deadline {
                    std::thread::sleep(Duration::from_millis(1));
                }
            }
            // Readers go on until the peers say goodbye, so that what is under way meets an open connection; one that is
            // closed already is no loss.
            let _ = peer.stream.shutdown(Shutdown::Write);
        }
    }
}

impl Communicator for TcpCommunicator {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.peers.len()
    }

    fn timeout(&self) -> Duration {
        self.timeout
    }

    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        self.check(to, key)?;
        if let Some(loss) = self.inbox.failed() {
            return Err(self.lost(loss, key));
        }
        match &self.peers[to] {
            None => self.inbox.deliver(self.rank, key, payload),
            // Without a writer the peer has returned, and does not miss the message.
            Some(peer) => drop(peer.out.send(Frame::Message(key, payload))),
        }
        Ok(())
    }

    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        self.check(from, key)?;
        // Nothing sent to itself is ever on its way.
        let limit = if from == self.rank {
            Duration::ZERO
        } else {
            self.timeout
        };
        match self.inbox.wait(from, key, limit) {
            Ok(payload) => Ok(payload),
            Err(Some(loss)) => Err(self.lost(loss, key)),
            Err(None) => Err(CommError::Timeout {
                rank: self.rank,
                waiting_for: from,
                key,
                after: limit,
                unclaimed: self.inbox.unclaimed(from),
            }),
        }
    }

    clock_methods!(|own| own.clock.of(0));
}

fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    let thread = std::thread::Builder::new().stack_size(256 << 10);
    thread.name(name).spawn(run)
}

/// Writes until the last frame.
fn write_all(rank: usize, mut stream: TcpStream, frames: &Receiver<Frame>, inbox: &Inbox) {
    while let Ok(frame) = frames.recv() {
        let (key, payload, last) = match frame {
            Frame::Message(key, payload) => (key, payload, false),
            Frame::Goodbye => (GOODBYE, Bytes::new(), true),
            Frame::Failure(loss) => {
                let mut reason = format!("{} {}", loss.rank, loss.reason);
                reason.truncate(reason.floor_char_boundary(LONGEST_REASON));
                (FAILURE, reason.into(), true)
            }
        };
        let len = payload.len() as u64;
        let written = stream
            .write_all(&Header { key, len }.encode())
            .and_then(|()| stream.write_all(&payload));
        if let Err(error) = written {
            // A peer that has said goodbye closes its connection.
            if !inbox.has_returned(rank) {
                inbox.fail(Loss {
                    rank,
                    reason: format!("does not take messages: {error}"),
                });
            }
            return;
        }
        if last {
            return;
        }
    }
}

/// Reads until the peer is gone.
fn read_all(rank: usize, mut stream: TcpStream, inbox: &Inbox) {
    let reason = loop {
        let mut header = [0; HEADER];
        if let Err(error) = stream.read_exact(&mut header) {
            break match error.kind() {
                io::ErrorKind::UnexpectedEof => "its process ended".to_owned(),
                _ => format!("connection lost: {error}"),
            };
        }
        let Some(Header { key, len }) = Header::decode(&header) else {
            break "sent something that is no message".to_owned();
        };
        if key == GOODBYE {
            return inbox.returned(rank);
        }
        let mut payload = Vec::new();
        let size = usize::try_from(len).unwrap_or(usize::MAX);
        if payload.try_reserve_exact(size).is_err() {
            break format!("sent {len} bytes, for which there is no memory");
        }
        match (&mut stream).take(len).read_to_end(&mut payload) {
            Ok(read) if read == size => {}
            Ok(_) => break "its process ended in the middle of a message".to_owned(),
            Err(error) => break format!("connection lost: {error}"),
        }
        if key == FAILURE {
            let text = String::from_utf8_lossy(&payload);
            let (lost, reason) = text.split_once(' ').unwrap_or(("", &text));
            return inbox.fail(Loss {
                rank: lost.parse().unwrap_or(rank),
                reason: reason.to_owned(),
            });
        }
        inbox.deliver(rank, key, payload.into());
    };
    inbox.fail(Loss { rank, reason });
}
