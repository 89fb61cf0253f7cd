//! Ranks that are processes.

use std::error::Error;
use std::sync::Arc;

#[cfg(feature = "mpi")]
use burn_moe::comm::mpi::try_run_mpi;
#[cfg(feature = "nccl")]
use burn_moe::comm::nccl::{self, NcclOptions};
#[cfg(feature = "tcp")]
use burn_moe::comm::tcp::{Launch, try_run_tcp};
use burn_moe::comm::{CommError, Communicator, Key, Op, RankOptions, RanksError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::CommArg;

type AnyError = Box<dyn Error + Send + Sync>;

/// What `f` returns on each rank, on rank 0; the processes of the other ranks end here.
pub(super) fn run<R: Send + Serialize + DeserializeOwned>(
    comm: CommArg,
    ranks: usize,
    options: RankOptions,
    f: impl Fn(Arc<dyn Communicator>) -> Result<R, AnyError> + Sync,
) -> Result<Vec<R>, RanksError> {
    let f = |comm: Arc<dyn Communicator>| {
        let result = f(comm.clone())?;
        gather(&*comm, result)
    };
    let results = match comm {
        #[cfg(feature = "mpi")]
        CommArg::Mpi => try_run_mpi(ranks, options, f)?,
        #[cfg(feature = "tcp")]
        CommArg::Tcp => {
            let launch = Launch::from_env().map_err(|error| RanksError::Engine {
                engine: "TCP",
                message: error.to_string(),
            })?;
            try_run_tcp(&launch, ranks, options, f)?
        }
        #[cfg(feature = "nccl")]
        CommArg::Nccl => {
            let launch = Launch::from_env().map_err(|error| RanksError::Engine {
                engine: "NCCL",
                message: error.to_string(),
            })?;
            try_run_tcp(&launch, ranks, options, |comm| {
                let device = nccl::local_device()?;
                f(nccl::connect(comm, device, NcclOptions::default())?)
            })?
        }
        _ => unreachable!("validate has refused it"),
    };
    match results {
        Some(results) => Ok(results),
        None => std::process::exit(0),
    }
}

/// The results of all ranks, on rank 0.
fn gather<R: Serialize + DeserializeOwned>(
    comm: &dyn Communicator,
    result: R,
) -> Result<Option<Vec<R>>, AnyError> {
    let key = Key::new(Op::Telemetry, u64::MAX, u32::MAX);
    if comm.rank() != 0 {
        comm.send(0, key, postcard::to_stdvec(&result)?.into())?;
        return Ok(None);
    }
    let mut results = vec![result];
    for from in 1..comm.size() {
        let bytes = comm.recv(from, key)?;
        results.push(
            postcard::from_bytes(&bytes).map_err(|_| CommError::Mismatch {
                what: "bytes of a readable result",
                expected: bytes.len(),
                got: 0,
                from,
                key,
            })?,
        );
    }
    Ok(Some(results))
}
