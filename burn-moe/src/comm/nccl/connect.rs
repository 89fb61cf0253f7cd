//! From processes that can talk to each other to GPUs that can.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::cuda::NcclEngine;
use super::device::{Device, Memory};
use super::engine::Engine;
use super::library::{Library, UNIQUE_ID, UniqueId, version_name};
use super::plan::all_to_all;
use super::{Lane, Link, LinkDevice, NcclError, Span, with_link};
use crate::comm::{Communicator, Key, Op};

/// How ranks use NCCL. `NcclOptions { chunk_bytes, ..Default::default() }` changes one thing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NcclOptions {
    /// Bytes of a chunk where relays forward an expert's weights; at least 1. Each chunk is a call of its own, which
    /// takes some ten microseconds to start. Default: 4 MiB.
    pub chunk_bytes: usize,
}

impl Default for NcclOptions {
    fn default() -> Self {
        Self {
            chunk_bytes: 4 << 20,
        }
    }
}

/// The CUDA number of this process's GPU: its place among the processes of its machine, as `torchrun`, OpenMPI's `mpirun`
/// or Slurm's `srun` give it (`LOCAL_RANK`, `OMPI_COMM_WORLD_LOCAL_RANK`, `SLURM_LOCALID`); 0 where CUDA shows the process
/// one GPU only, or no launcher says anything.
///
/// # Errors
///
/// [`NcclError::LocalRank`], [`NcclError::NoDriver`], [`NcclError::NoDevice`].
pub fn local_device() -> Result<usize, NcclError> {
    let place = local_rank(&|variable| std::env::var(variable).ok())?;
    let found = Device::count()?;
    match found {
        1 => Ok(0),
        found if place < found => Ok(place),
        found => Err(NcclError::NoDevice {
            device: place,
            found,
            visible_devices: std::env::var("CUDA_VISIBLE_DEVICES").ok(),
        }),
    }
}

fn local_rank(get: &dyn Fn(&str) -> Option<String>) -> Result<usize, NcclError> {
    let names = ["LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "SLURM_LOCALID"];
    for variable in names {
        if let Some(value) = get(variable) {
            let number = value.trim().parse();
            return number.map_err(|_| NcclError::LocalRank { variable, value });
        }
    }
    Ok(0)
}

/// The version of the NCCL that [`connect`] would load, such as `2.28.3`. Needs no GPU.
///
/// # Errors
///
/// [`NcclError::NoLibrary`], [`NcclError::NoSymbol`], [`NcclError::TooOld`].
pub fn library_version() -> Result<String, NcclError> {
    Ok(version_name(Library::load()?.version))
}

/// `comm` with a link between the GPUs of its ranks; `device` is the CUDA number of this rank's. Operations on tensors of
/// that device then go over the link. All ranks call it, once.
///
/// # Errors
///
/// [`NcclError`], on all ranks when one of them has one.
pub fn connect(
    comm: Arc<dyn Communicator>,
    device: usize,
    options: NcclOptions,
) -> Result<Arc<dyn Communicator>, NcclError> {
    let (rank, ranks) = (comm.rank(), comm.size());
    // Every rank says how far it has come, so that none waits for one that cannot.
    let own = Own::prepare(device);
    let card = match &own {
        Ok(own) => Card {
            version: own.library.version,
            gpu: own.uuid.clone(),
            chunk_bytes: options.chunk_bytes,
            error: String::new(),
        },
        Err(error) => Card {
            error: error.to_string(),
            ..Card::default()
        },
    };
    let cards = comm.all_gather(key(0), card.to_bytes())?;
    let own = own?;
    let cards: Vec<Card> = cards.iter().map(|card| Card::from_bytes(card)).collect();
    agree(&cards, rank)?;

    let ids = match rank {
        0 => {
            let ids = [own.library.unique_id(), own.library.unique_id()];
            // Empty when there is none: the others must not wait for it.
            let ids: Result<Vec<_>, _> = ids.into_iter().collect();
            let bytes = ids
                .as_ref()
                .map_or(Bytes::new(), |ids| [ids[0].0, ids[1].0].concat().into());
            comm.broadcast(key(1), 0, Some(bytes.clone()))?;
            ids?;
            bytes
        }
        _ => comm.broadcast(key(1), 0, None)?,
    };
    let ids = bytemuck::try_cast_slice::<u8, [u8; UNIQUE_ID]>(&ids);
    let Ok(&[rows, weights]) = ids else {
        return Err(NcclError::OtherRank {
            rank: 0,
            message: "it could not make an id".into(),
        });
    };
    let engine = |id| {
        let (library, device) = (own.library.clone(), own.device.clone());
        let engine =
            NcclEngine::connect(library, device, UniqueId(id), rank, ranks, comm.timeout())?;
        until_connected(&engine, &*comm)?;
        Ok::<Box<dyn Engine>, NcclError>(Box::new(engine))
    };
    let engines = [engine(rows)?, engine(weights)?];
    let chunk_bytes = options.chunk_bytes.max(1);
    let device = LinkDevice::Cuda(own.device.number());
    let link = Link::new(device, chunk_bytes, ranks, engines);
    meet(&link, &own, &*comm)?;
    Ok(with_link(comm, link))
}

/// The key of part `part` of making a link.
const fn key(part: u32) -> Key {
    Key::new(Op::Broadcast, u64::MAX, u32::MAX).with_part(part)
}

/// What a rank needs for itself.
struct Own {
    library: Arc<Library>,
    device: Arc<Device>,
    uuid: String,
}

impl Own {
    fn prepare(device: usize) -> Result<Self, NcclError> {
        let device = Arc::new(Device::open(device)?);
        Ok(Self {
            library: Library::load()?,
            uuid: device.uuid()?,
            device,
        })
    }
}

/// What a rank tells the others of itself.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
struct Card {
    version: i32,
    gpu: String,
    chunk_bytes: usize,
    /// Why it cannot take part; empty when it can.
    error: String,
}

impl Card {
    fn to_bytes(&self) -> Bytes {
        let Self {
            version,
            gpu,
            chunk_bytes,
            error,
        } = self;
        format!("{version}\n{gpu}\n{chunk_bytes}\n{error}").into()
    }

    fn from_bytes(bytes: &[u8]) -> Self {
        let text = String::from_utf8_lossy(bytes);
        let mut lines = text.splitn(4, '\n');
        let mut next = || lines.next().unwrap_or_default().to_owned();
        Self {
            version: next().parse().unwrap_or(0),
            gpu: next(),
            chunk_bytes: next().parse().unwrap_or(0),
            error: next(),
        }
    }
}

/// Whether the ranks fit together.
fn agree(cards: &[Card], rank: usize) -> Result<(), NcclError> {
    if let Some(other) = cards.iter().position(|card| !card.error.is_empty()) {
        return Err(NcclError::OtherRank {
            rank: other,
            message: cards[other].error.clone(),
        });
    }
    let ours = cards[rank].version;
    if let Some(other) = cards.iter().position(|card| card.version != ours) {
        return Err(NcclError::Versions {
            rank: other,
            theirs: version_name(cards[other].version),
            ours: version_name(ours),
        });
    }
    let ours = cards[rank].chunk_bytes;
    if let Some(other) = cards.iter().position(|card| card.chunk_bytes != ours) {
        return Err(NcclError::Chunks {
            rank: other,
            theirs: cards[other].chunk_bytes,
            ours,
        });
    }
    for (second, card) in cards.iter().enumerate() {
        if let Some(first) = cards[..second].iter().position(|it| it.gpu == card.gpu) {
            return Err(NcclError::SharedDevice {
                first,
                second,
                gpu: card.gpu.clone(),
            });
        }
    }
    Ok(())
}

fn until_connected(engine: &NcclEngine, comm: &dyn Communicator) -> Result<(), NcclError> {
    let start = Instant::now();
    loop {
        match engine.settled() {
            Ok(true) => return Ok(()),
            Ok(false) => {}
            Err(message) => {
                engine.abort();
                comm.check(key(2))?;
                return Err(NcclError::Call {
                    call: "ncclCommInitRankConfig",
                    message,
                });
            }
        }
        let lost = comm.check(key(2));
        if lost.is_err() || start.elapsed() > comm.timeout() {
            engine.abort();
            lost?;
            return Err(NcclError::Timeout {
                ranks: comm.size(),
                after: comm.timeout(),
            });
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Sends a byte between every two ranks and looks at it: connects them, and a way that does not work shows here.
fn meet(link: &Link, own: &Own, comm: &dyn Communicator) -> Result<(), NcclError> {
    let ranks = comm.size();
    let (sent, received) = (
        Memory::new(&own.device, ranks)?,
        Memory::new(&own.device, ranks)?,
    );
    let byte = |rank: usize| (rank % 251) as u8 + 1;
    sent.write(&vec![byte(comm.rank()); ranks])?;
    received.write(&vec![0; ranks])?;
    let counts = vec![1; ranks];
    let round = all_to_all(&counts, &counts, 1);
    let spans = [&sent, &received].map(|memory| Span {
        address: memory.address(),
        bytes: ranks,
    });
    // SAFETY: both pieces of memory are of the link's device, written by calls that are done, and kept until the flight
    // has been waited for or given up.
    let flight = unsafe { link.start(Lane::Rows, comm, key(3), &[round], &spans, ()) }?;
    flight.wait(comm)?;
    let mut bytes = vec![0; ranks];
    received.read(&mut bytes)?;
    match (0..ranks).find(|rank| bytes[*rank] != byte(*rank)) {
        None => Ok(()),
        Some(rank) => Err(NcclError::OtherRank {
            rank,
            message: format!("sent {}, {} arrived", byte(rank), bytes[rank]),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn launchers_name_the_gpu() {
        let of = |variables: &[(&str, &str)]| {
            local_rank(&|name| {
                let found = variables.iter().find(|(variable, _)| *variable == name);
                found.map(|(_, value)| (*value).to_owned())
            })
        };
        assert_eq!(of(&[]), Ok(0));
        assert_eq!(of(&[("LOCAL_RANK", "3"), ("SLURM_LOCALID", "1")]), Ok(3));
        assert_eq!(of(&[("OMPI_COMM_WORLD_LOCAL_RANK", "7")]), Ok(7));
        assert_eq!(of(&[("SLURM_LOCALID", "2")]), Ok(2));
        let error = of(&[("LOCAL_RANK", "x")]).unwrap_err().to_string();
        assert_eq!(error, "LOCAL_RANK = \"x\" must be a number from 0 on");
    }

    #[test]
    fn ranks_that_do_not_fit_are_named() {
        let card = |gpu: &str| Card {
            version: 22803,
            gpu: gpu.into(),
            chunk_bytes: 4096,
            error: String::new(),
        };
        let cards = [card("a"), card("b"), card("c")];
        assert_eq!(agree(&cards, 1), Ok(()));
        for it in &cards {
            assert_eq!(Card::from_bytes(&it.to_bytes()), *it);
        }
        let mut broken = cards.clone();
        broken[2].error = "no\nlibrary".into();
        broken[2] = Card::from_bytes(&broken[2].to_bytes());
        let text = agree(&broken, 0).unwrap_err().to_string();
        assert_eq!(text, "rank 2 has no NCCL: no\nlibrary");
        let mut old = cards.clone();
        old[0].version = 21800;
        let text = agree(&old, 1).unwrap_err().to_string();
        assert!(
            text.starts_with("rank 0 has NCCL 2.18.0, this one has 2.28.3"),
            "{text}"
        );
        let mut fine = cards.clone();
        fine[1].chunk_bytes = 1;
        let text = agree(&fine, 0).unwrap_err().to_string();
        assert_eq!(
            text,
            "rank 1 has chunk_bytes = 1, this one 4096: all ranks need the same"
        );
        let text = agree(&[card("a"), card("b"), card("a")], 0)
            .unwrap_err()
            .to_string();
        assert!(text.starts_with("ranks 0 and 2 both have GPU a"), "{text}");
    }
}
