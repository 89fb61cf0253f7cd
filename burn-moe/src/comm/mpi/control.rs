//! Who is still there. MPI does not say: its processes wait for ever for one that is gone.
//!
//! Every process keeps a TCP connection to rank 0, which passes on what it learns. A process that ends, however it ends,
//! closes its connection, which the system tells the other end at once. Every process sends a sign of life several times
//! within the timeout from a thread of its own, so one that is stopped or cut off is noticed after the timeout. A process
//! that leaves says how, and how many messages it has sent to whom, so that none is taken for missing while it is on its way.

use std::io::{self, Read, Write};
use std::net::{Ipv4Addr, Shutdown, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use crate::comm::clock::lock;
use crate::comm::error::Loss;

/// How a rank left.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) enum Left {
    /// It has returned.
    Returned {
        /// Messages it has sent to each rank.
        sent: Vec<u64>,
    },
    /// It has failed, or another rank did and it says which.
    Failed {
        /// The rank that failed first, as far as it knows.
        lost: usize,
        /// Why.
        reason: String,
        /// Messages it has sent to each rank; empty when it did not live to say so.
        sent: Vec<u64>,
    },
}

#[derive(Serialize, Deserialize)]
enum Frame {
    /// The first: who connects, and the secret of this run.
    Hello { rank: usize, secret: String },
    /// A sign of life. From rank 0 with the ranks that it has not heard of lately, and for how long.
    Alive { silent: Vec<(usize, Duration)> },
    /// A rank has left.
    Left { rank: usize, left: Left },
}

/// This rank's view of the others, and its connections.
pub(super) struct Control {
    rank: usize,
    timeout: Duration,
    state: Mutex<State>,
    /// On rank 0 one for each rank, on the others the one to rank 0. `None` where there is none.
    out: Vec<Option<Mutex<TcpStream>>>,
}

struct State {
    heard: Vec<Instant>,
    left: Vec<Option<Left>>,
    /// The first loss this rank has learned of.
    failed: Option<Loss>,
    /// What rank 0 said last.
    silent: Vec<(usize, Duration)>,
    closing: bool,
}

/// Signs of life within the timeout.
const SIGNS: u32 = 20;

/// Largest frame: the counts of a hundred thousand ranks.
const LARGEST: usize = 1 << 20;

impl Control {
    /// Connects the ranks. `share` hands the text of rank 0 to all ranks; `host` is the name of this machine, and
    /// `one_node` says that all ranks are on it.
    pub fn connect(
        rank: usize,
        size: usize,
        timeout: Duration,
        host: &str,
        one_node: bool,
        share: impl FnOnce(&str) -> Result<String, String>,
    ) -> Result<Arc<Self>, String> {
        let fail = |what: &str| {
            let what = what.to_owned();
            move |error: io::Error| format!("{what}: {error}")
        };
        let address = if one_node {
            Ipv4Addr::LOCALHOST
        } else {
            Ipv4Addr::UNSPECIFIED
        };
        let host = if one_node { "127.0.0.1" } else { host };
        let streams = if rank == 0 {
            let listener = TcpListener::bind((address, 0)).map_err(fail("cannot listen"))?;
            let port = listener.local_addr().map_err(fail("cannot listen"))?.port();
            let secret = secret();
            share(&format!("{host} {port} {secret}"))?;
            accept(&listener, size, &secret, timeout)?
        } else {
            let text = share("")?;
            let mut words = text.split(' ');
            let (Some(host), Some(port), Some(secret)) = (words.next(), words.next(), words.next())
            else {
                return Err(format!("rank 0 shared {text:?} and not where it listens"));
            };
            let at = format!("{host}:{port}");
            let unreachable =
                |error: io::Error| format!("rank 0 is not reachable at {at}: {error}");
            let mut stream = connect(&at, timeout).map_err(unreachable)?;
            let secret = secret.to_owned();
            write(&mut stream, &Frame::Hello { rank, secret }).map_err(unreachable)?;
            vec![Some(stream)]
        };
        let mut out = Vec::new();
        let mut readers = Vec::new();
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else {
                out.push(None);
                continue;
            };
            // A peer that does not read must not keep this one from telling the others.
            let prepared = stream
                .set_write_timeout(Some(timeout.min(Duration::from_millis(200))))
                .and_then(|()| stream.set_nodelay(true))
                .and_then(|()| stream.try_clone());
            readers.push((peer, prepared.map_err(fail("cannot prepare a connection"))?));
            out.push(Some(Mutex::new(stream)));
        }
        let now = Instant::now();
        let control = Arc::new(Self {
            rank,
            timeout,
            state: Mutex::new(State {
                heard: vec![now; size],
                left: vec![None; size],
                failed: None,
                silent: Vec::new(),
                closing: false,
            }),
            out,
        });
        for (peer, stream) in readers {
            let control = control.clone();
            spawn(format!("watch rank {peer}"), move || {
                control.read(peer, stream)
            })?;
        }
        Ok(control)
    }

    /// How long to wait between two calls of [`beat`](Self::beat).
    pub fn interval(&self) -> Duration {
        (self.timeout / SIGNS).clamp(Duration::from_millis(5), Duration::from_secs(1))
    }

    /// Gives a sign of life, and looks who gave none.
    pub fn beat(&self) {
        let mut state = lock(&self.state);
        if state.closing {
            return;
        }
        let silent: Vec<_> = (0..state.heard.len())
            .filter(|rank| self.watches(*rank) && state.left[*rank].is_none())
            .map(|rank| (rank, state.heard[rank].elapsed()))
            .filter(|(_, age)| *age > 3 * self.interval())
            .collect();
        let dead = silent.iter().find(|(_, age)| *age >= self.timeout).copied();
        if self.rank == 0 {
            state.silent = silent.clone();
        } else {
            // What rank 0 says stays, but of rank 0 itself this rank knows more.
            state.silent.retain(|(rank, _)| *rank != 0);
            state.silent.extend(&silent);
        }
        drop(state);
        if let Some((rank, age)) = dead {
            self.lost(rank, silence(age));
        }
        self.tell_all(&Frame::Alive { silent }, None);
    }

    /// Which ranks this one has a connection to.
    fn watches(&self, rank: usize) -> bool {
        rank != self.rank && self.out.get(rank).is_some_and(Option::is_some)
    }

    /// This rank leaves.
    pub fn leave(&self, left: Left) {
        self.note(self.rank, left, None);
    }

    /// The first rank that was lost.
    pub fn failed(&self) -> Option<Loss> {
        lock(&self.state).failed.clone()
    }

    /// How `rank` has left, if it has.
    pub fn left(&self, rank: usize) -> Option<Left> {
        lock(&self.state).left[rank].clone()
    }

    /// Whether all other ranks have left.
    pub fn all_left(&self) -> bool {
        let state = lock(&self.state);
        let others = state.left.iter().enumerate();
        let mut others = others.filter(|(rank, _)| *rank != self.rank);
        others.all(|(_, left)| left.is_some())
    }

    /// A rank that has given no sign of life for a while: what others wait for, when a wait takes too long.
    pub fn suspect(&self) -> Option<Loss> {
        let state = lock(&self.state);
        let (rank, age) = state.silent.iter().max_by_key(|(_, age)| *age)?;
        Some(Loss {
            rank: *rank,
            reason: silence(*age),
        })
    }

    /// Ends the connections.
    pub fn close(&self) {
        lock(&self.state).closing = true;
        for stream in self.out.iter().flatten() {
            // The peer may have closed it already.
            let _ = lock(stream).shutdown(Shutdown::Both);
        }
    }

    /// Reads what the other end says until it is gone.
    fn read(&self, peer: usize, mut stream: TcpStream) {
        while let Ok(frame) = read(&mut stream) {
            let mut state = lock(&self.state);
            state.heard[peer] = Instant::now();
            match frame {
                Frame::Alive { silent } if self.rank != 0 => {
                    state.silent = silent;
                    state.silent.retain(|(rank, _)| *rank != self.rank);
                }
                Frame::Alive { .. } | Frame::Hello { .. } => {}
                Frame::Left { rank, left } if rank < state.left.len() => {
                    drop(state);
                    self.note(rank, left, Some(peer));
                }
                Frame::Left { .. } => break,
            }
        }
        self.lost(
            peer,
            "died: its process ended without leaving the group".into(),
        );
    }

    /// `rank` is gone without a word.
    fn lost(&self, rank: usize, reason: String) {
        let lost = Left::Failed {
            lost: rank,
            reason,
            sent: Vec::new(),
        };
        self.note(rank, lost, None);
    }

    /// Keeps how `rank` left, and passes it on.
    fn note(&self, rank: usize, left: Left, from: Option<usize>) {
        let mut state = lock(&self.state);
        if state.closing || state.left[rank].is_some() {
            return;
        }
        if let Left::Failed { lost, reason, .. } = &left {
            state.failed.get_or_insert_with(|| Loss {
                rank: *lost,
                reason: reason.clone(),
            });
        }
        state.left[rank] = Some(left.clone());
        drop(state);
        // Ranks other than 0 have only their own word to pass on.
        if self.rank == 0 || rank == self.rank {
            self.tell_all(&Frame::Left { rank, left }, from);
        }
    }

    fn tell_all(&self, frame: &Frame, but: Option<usize>) {
        for (peer, stream) in self.out.iter().enumerate() {
            if let Some(stream) = stream
                && Some(peer) != but
            {
                // One that is gone is noticed by its reader.
                let _ = write(&mut lock(stream), frame);
            }
        }
    }
}

fn silence(age: Duration) -> String {
    let seconds = age.as_secs_f64();
    format!("gave no sign of life for {seconds:.1} s: it is stopped or cut off")
}

pub(super) fn spawn(name: String, run: impl FnOnce() + Send + 'static) -> Result<(), String> {
    let builder = std::thread::Builder::new().stack_size(256 << 10).name(name);
    match builder.spawn(run) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("no thread: {error}")),
    }
}

/// Keeps strangers out. Not guessable: the standard library seeds its hash maps from the system's random numbers.
fn secret() -> String {
    use std::hash::{BuildHasher, RandomState};
    let half = || RandomState::new().hash_one(Instant::now());
    format!("{:016x}{:016x}", half(), half())
}

/// Rank 0 waits for the others, ignoring whoever does not know the secret.
fn accept(
    listener: &TcpListener,
    size: usize,
    secret: &str,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>, String> {
    let failed = |error: io::Error| format!("cannot accept connections: {error}");
    listener.set_nonblocking(true).map_err(failed)?;
    let deadline = Instant::now() + timeout;
    let mut streams: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
    while streams.iter().flatten().count() + 1 < size {
        match listener.accept() {
            Ok((mut stream, _)) => {
                let hello = stream
                    .set_nonblocking(false)
                    .and_then(|()| stream.set_read_timeout(Some(Duration::from_secs(1))))
                    .and_then(|()| read(&mut stream))
                    .and_then(|hello| stream.set_read_timeout(None).map(|()| hello));
                match hello {
                    Ok(Frame::Hello { rank, secret: told })
                        if told == secret && (1..size).contains(&rank) =>
                    {
                        streams[rank] = Some(stream);
                    }
                    _ => {}
                }
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if Instant::now() > deadline {
                    let missing = (1..size).find(|rank| streams[*rank].is_none());
                    let missing = missing.unwrap_or(0);
                    return Err(format!(
                        "rank {missing} did not connect to rank 0 in {timeout:?}"
                    ));
                }
                std::thread::sleep(Duration::from_millis(2));
            }
            Err(error) => return Err(failed(error)),
        }
    }
    Ok(streams)
}

fn connect(at: &str, timeout: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::other("no address");
    for address in at.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, timeout) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

/// A frame: its length, then its content.
fn write(stream: &mut TcpStream, frame: &Frame) -> io::Result<()> {
    let content = postcard::to_stdvec(frame).map_err(io::Error::other)?;
    let mut bytes = (content.len() as u32).to_le_bytes().to_vec();
    bytes.extend(content);
    stream.write_all(&bytes)
}

fn read(stream: &mut TcpStream) -> io::Result<Frame> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > LARGEST {
        return Err(io::Error::other("a frame is too long"));
    }
    let mut content = vec![0; len];
    stream.read_exact(&mut content)?;
    postcard::from_bytes(&content).map_err(io::Error::other)
}
