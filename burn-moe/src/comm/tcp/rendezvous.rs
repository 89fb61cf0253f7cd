//! How processes find each other: all come to rank 0, which knows by a shared secret whom to let in, and learn there
//! where the others listen; then every two connect.
//!
//! Who connects proves that it knows the secret, and so does who accepts: each sends a fresh random number, and answers
//! with a keyed hash (HMAC-SHA256) of both numbers and of what it says. The secret itself is never sent. What follows on
//! the connection is neither encrypted nor signed: the network between the ranks is taken for trusted.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

use hmac::{Hmac, Mac};
use sha2::Sha256;

use super::ConnectError;
use super::launch::{Launch, SECRET};

/// Tells a rank of this version from anything else.
const MAGIC: [u8; 8] = *b"burnmoe1";

/// How long a stranger may keep others waiting.
const GREETING: Duration = Duration::from_secs(2);

/// Most bytes of what is said at a greeting: addresses of many thousand ranks.
const MOST: usize = 1 << 20;

/// One connection to each other rank, index = rank, none to itself.
pub(super) fn connect_all(
    launch: &Launch,
    timeout: Duration,
) -> Result<Vec<Option<TcpStream>>, ConnectError> {
    let secret = match &launch.secret {
        Some(secret) => secret.as_bytes(),
        None if launch.loopback() => b"",
        None => return Err(ConnectError::NoSecret { variable: SECRET }),
    };
    let meeting = Meeting {
        launch,
        secret,
        deadline: Instant::now() + timeout,
        timeout,
    };
    if launch.rank == 0 {
        meeting.host()
    } else {
        meeting.join()
    }
}

struct Meeting<'a> {
    launch: &'a Launch,
    secret: &'a [u8],
    deadline: Instant,
    timeout: Duration,
}

impl Meeting<'_> {
    /// Rank 0: waits for all others, then tells each where the others listen.
    fn host(&self) -> Result<Vec<Option<TcpStream>>, ConnectError> {
        let size = self.launch.world_size;
        let mut streams: Vec<Option<TcpStream>> = (0..size).map(|_| None).collect();
        if size == 1 {
            return Ok(streams);
        }
        let port = self.launch.master_port;
        let at = if self.launch.loopback() {
            format!("127.0.0.1:{port}")
        } else {
            format!("0.0.0.0:{port}")
        };
        let listener = TcpListener::bind(&at).map_err(|error| ConnectError::Listen {
            address: at,
            error: error.to_string(),
        })?;
        let mut addresses = vec![String::new(); size];
        while let Some(missing) = (1..size).find(|rank| streams[*rank].is_none()) {
            let (stream, said) = self.accept(&listener, missing)?;
            let (rank, address) = self.introduced(&said)?;
            if streams[rank].is_some() || rank == 0 {
                return Err(ConnectError::Twice { rank });
            }
            // Where it listens, at the address from which it has come.
            let host = stream.peer_addr().map(|address| address.ip());
            let port = address.rsplit(':').next().unwrap_or_default().to_owned();
            addresses[rank] = match host {
                Ok(host) => SocketAddr::new(host, port.parse().unwrap_or(0)).to_string(),
                Err(error) => return Err(self.lost(rank, &error)),
            };
            streams[rank] = Some(stream);
        }
        let table = addresses.join(" ");
        for (rank, stream) in streams.iter_mut().enumerate() {
            if let Some(stream) = stream {
                say(stream, table.as_bytes()).map_err(|error| self.lost(rank, &error))?;
            }
        }
        Ok(streams)
    }

    /// Other ranks: go to rank 0, then to all lower ranks, and wait for the higher ones.
    fn join(&self) -> Result<Vec<Option<TcpStream>>, ConnectError> {
        let Launch {
            rank, world_size, ..
        } = *self.launch;
        let at = if self.launch.loopback() {
            "127.0.0.1:0"
        } else {
            "0.0.0.0:0"
        };
        let listen = |error: io::Error| ConnectError::Listen {
            address: at.to_owned(),
            error: error.to_string(),
        };
        let listener = TcpListener::bind(at).map_err(listen)?;
        let own = listener.local_addr().map_err(listen)?;
        let said = format!("{rank} {world_size} {own}");
        let master = format!("{}:{}", self.launch.master_address, self.launch.master_port);
        let mut streams: Vec<Option<TcpStream>> = (0..world_size).map(|_| None).collect();
        let mut first = self.go_to(0, &master, &said)?;
        let left = self.left(0)?;
        let table = first
            .set_read_timeout(Some(left))
            .and_then(|()| hear(&mut first))
            .map_err(|error| self.lost(0, &error))?;
        let table = String::from_utf8_lossy(&table).into_owned();
        let addresses: Vec<&str> = table.split(' ').collect();
        if addresses.len() != world_size {
            return Err(ConnectError::Refused {
                rank: 0,
                reason: format!("it named {} ranks of {world_size}", addresses.len()),
            });
        }
        streams[0] = Some(first);
        for peer in 1..rank {
            streams[peer] = Some(self.go_to(peer, addresses[peer], &said)?);
        }
        while let Some(missing) = (rank + 1..world_size).find(|peer| streams[*peer].is_none()) {
            let (stream, said) = self.accept(&listener, missing)?;
            let (peer, _) = self.introduced(&said)?;
            if streams[peer].is_some() || peer <= rank {
                return Err(ConnectError::Twice { rank: peer });
            }
            streams[peer] = Some(stream);
        }
        Ok(streams)
    }

    /// Waits for someone who knows the secret. `missing` is who is named when nobody comes.
    fn accept(
        &self,
        listener: &TcpListener,
        missing: usize,
    ) -> Result<(TcpStream, Vec<u8>), ConnectError> {
        let failed = |error: io::Error| ConnectError::Listen {
            address: listener
                .local_addr()
                .map_or_else(|_| "?".into(), |a| a.to_string()),
            error: error.to_string(),
        };
        listener.set_nonblocking(true).map_err(failed)?;
        loop {
            match listener.accept() {
                Ok((stream, _)) => {
                    stream.set_nonblocking(false).map_err(failed)?;
                    // Strangers, and those who gave up, are none of our business.
                    if let Ok(guest) = self.admit(stream) {
                        return Ok(guest);
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.left(missing)?;
                    std::thread::sleep(Duration::from_millis(2));
                }
                Err(error) => return Err(failed(error)),
            }
        }
    }

    /// The accepting side of a greeting: returns what the other side said of itself.
    fn admit(&self, mut stream: TcpStream) -> io::Result<(TcpStream, Vec<u8>)> {
        stream.set_read_timeout(Some(GREETING))?;
        stream.set_write_timeout(Some(GREETING))?;
        let mut hello = [0; 40];
        stream.read_exact(&mut hello)?;
        if hello[..8] != MAGIC {
            return Err(io::Error::other("not a rank"));
        }
        let own = random()?;
        stream.write_all(&own)?;
        stream.write_all(&self.proof("accept", &[&hello[8..], &own]))?;
        let said = hear(&mut stream)?;
        let mut proof = [0; 32];
        stream.read_exact(&mut proof)?;
        self.check("connect", &[&hello[8..], &own, &said], &proof)?;
        prepare(&stream)?;
        Ok((stream, said))
    }

    /// The connecting side: goes to `address`, again and again until rank `peer` is there.
    fn go_to(&self, peer: usize, address: &str, said: &str) -> Result<TcpStream, ConnectError> {
        loop {
            let left = self.left(peer)?;
            let error = match dial(address, left).and_then(|stream| self.greet(stream, said)) {
                Ok(stream) => return Ok(stream),
                Err(error) => error,
            };
            if error.kind() == io::ErrorKind::PermissionDenied {
                return Err(ConnectError::Refused {
                    rank: peer,
                    reason: error.to_string(),
                });
            }
            // It may not have started yet.
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn greet(&self, mut stream: TcpStream, said: &str) -> io::Result<TcpStream> {
        stream.set_read_timeout(Some(GREETING))?;
        stream.set_write_timeout(Some(GREETING))?;
        let own = random()?;
        stream.write_all(&MAGIC)?;
        stream.write_all(&own)?;
        let mut reply = [0; 64];
        stream.read_exact(&mut reply)?;
        let (other, proof) = reply.split_at(32);
        self.check("accept", &[&own, other], proof)?;
        say(&mut stream, said.as_bytes())?;
        stream.write_all(&self.proof("connect", &[&own, other, said.as_bytes()]))?;
        prepare(&stream)?;
        Ok(stream)
    }

    fn proof(&self, side: &str, parts: &[&[u8]]) -> [u8; 32] {
        self.mac(side, parts).finalize().into_bytes().into()
    }

    /// Compares in constant time.
    fn check(&self, side: &str, parts: &[&[u8]], proof: &[u8]) -> io::Result<()> {
        self.mac(side, parts).verify_slice(proof).map_err(|_| {
            let what = format!("it does not know the secret of this run ({SECRET})");
            io::Error::new(io::ErrorKind::PermissionDenied, what)
        })
    }

    fn mac(&self, side: &str, parts: &[&[u8]]) -> Hmac<Sha256> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.secret)
            .unwrap_or_else(|_| unreachable!("HMAC takes keys of any length"));
        mac.update(side.as_bytes());
        parts.iter().for_each(|part| mac.update(part));
        mac
    }

    /// What a rank said of itself: rank, number of ranks, where it listens.
    fn introduced(&self, said: &[u8]) -> Result<(usize, String), ConnectError> {
        let said = String::from_utf8_lossy(said);
        let mut words = said.split(' ');
        let mut next = || words.next().unwrap_or_default().to_owned();
        let (rank, size, address) = (next(), next(), next());
        let expected = self.launch.world_size;
        if size != expected.to_string() {
            return Err(ConnectError::WorldSize {
                rank,
                got: size,
                expected,
            });
        }
        match rank.parse() {
            Ok(rank) if rank < expected => Ok((rank, address)),
            _ => Err(ConnectError::Refused {
                rank: self.launch.rank,
                reason: format!("someone calls itself rank {rank:?} of {expected}"),
            }),
        }
    }

    fn left(&self, missing: usize) -> Result<Duration, ConnectError> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(ConnectError::Timeout {
                rank: self.launch.rank,
                waiting_for: missing,
                after: self.timeout,
            });
        }
        Ok(left)
    }

    fn lost(&self, rank: usize, error: &io::Error) -> ConnectError {
        match error.kind() {
            io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut => ConnectError::Timeout {
                rank: self.launch.rank,
                waiting_for: rank,
                after: self.timeout,
            },
            _ => ConnectError::Refused {
                rank,
                reason: error.to_string(),
            },
        }
    }
}

fn random() -> io::Result<[u8; 32]> {
    let mut bytes = [0; 32];
    getrandom::fill(&mut bytes).map_err(io::Error::other)?;
    Ok(bytes)
}

fn dial(address: &str, left: Duration) -> io::Result<TcpStream> {
    let mut last = io::Error::other(format!("{address} is no address"));
    for address in address.to_socket_addrs()? {
        match TcpStream::connect_timeout(&address, left) {
            Ok(stream) => return Ok(stream),
            Err(error) => last = error,
        }
    }
    Err(last)
}

fn prepare(stream: &TcpStream) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)
}

fn say(stream: &mut TcpStream, text: &[u8]) -> io::Result<()> {
    stream.write_all(&(text.len() as u32).to_le_bytes())?;
    stream.write_all(text)
}

fn hear(stream: &mut TcpStream) -> io::Result<Vec<u8>> {
    let mut len = [0; 4];
    stream.read_exact(&mut len)?;
    let len = u32::from_le_bytes(len) as usize;
    if len > MOST {
        return Err(io::Error::other(format!("{len} bytes are too many")));
    }
    let mut text = vec![0; len];
    stream.read_exact(&mut text)?;
    Ok(text)
}
