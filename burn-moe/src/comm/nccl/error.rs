use std::time::Duration;

use crate::comm::CommError;

/// Why there is no link between the ranks' GPUs.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum NcclError {
    /// No NCCL library could be loaded.
    #[error(
        "cannot load NCCL: {}; install it (libnccl2, or the Python wheel nvidia-nccl-cu12 or -cu13), then put the folder \
         of libnccl.so.2 into LD_LIBRARY_PATH, or name the file in {variable}",
        tried.join("; ")
    )]
    NoLibrary {
        /// Each name that was tried, and what the system said.
        tried: Vec<String>,
        /// The variable that may name the file.
        variable: &'static str,
    },
    /// The library is no NCCL, or an old one.
    #[error("{library} has no function {symbol}")]
    NoSymbol {
        /// The file.
        library: String,
        /// The function.
        symbol: &'static str,
    },
    /// The library is too old.
    #[error("{library} is NCCL {found}, needed is {needed} or later")]
    TooOld {
        /// The file.
        library: String,
        /// Its version.
        found: String,
        /// The oldest version that works.
        needed: &'static str,
    },
    /// There is no CUDA driver.
    #[error(
        "no CUDA driver: libcuda.so cannot be loaded; NCCL links the memory of GPUs, and needs a machine with one"
    )]
    NoDriver,
    /// There is no such GPU.
    #[error(
        "no CUDA device {device}: there are {found}{}",
        visible(visible_devices)
    )]
    NoDevice {
        /// The number that was asked for.
        device: usize,
        /// How many there are.
        found: usize,
        /// `CUDA_VISIBLE_DEVICES`, when it is set.
        visible_devices: Option<String>,
    },
    /// The environment does not say which of the machine's processes this is.
    #[error("{variable} = {value:?} must be a number from 0 on")]
    LocalRank {
        /// The variable.
        variable: &'static str,
        /// Its value.
        value: String,
    },
    /// A call of CUDA or NCCL failed.
    #[error("{call} failed: {message}")]
    Call {
        /// The function.
        call: &'static str,
        /// What it said.
        message: String,
    },
    /// Another rank has no link, so this one has none.
    #[error("rank {rank} has no NCCL: {message}")]
    OtherRank {
        /// The rank.
        rank: usize,
        /// Its error.
        message: String,
    },
    /// Ranks have loaded different libraries.
    #[error("rank {rank} has NCCL {theirs}, this one has {ours}: all ranks need the same version")]
    Versions {
        /// The other rank.
        rank: usize,
        /// Its version.
        theirs: String,
        /// This rank's.
        ours: String,
    },
    /// Ranks would cut weights differently.
    #[error("rank {rank} has chunk_bytes = {theirs}, this one {ours}: all ranks need the same")]
    Chunks {
        /// The other rank.
        rank: usize,
        /// Its size of a chunk.
        theirs: usize,
        /// This rank's.
        ours: usize,
    },
    /// Two ranks want one GPU.
    #[error("ranks {first} and {second} both have GPU {gpu}: each rank needs its own")]
    SharedDevice {
        /// One rank.
        first: usize,
        /// The other one.
        second: usize,
        /// Its number in the system, as `nvidia-smi -L` shows it.
        gpu: String,
    },
    /// NCCL did not connect the ranks in time.
    #[error("NCCL did not connect the {ranks} ranks within {after:?}")]
    Timeout {
        /// How many there are.
        ranks: usize,
        /// How long it had.
        after: Duration,
    },
    /// A rank was lost or too late while the link was made.
    #[error("while the GPUs were linked: {0}")]
    Comm(#[from] CommError),
}

fn visible(variable: &Option<String>) -> String {
    match variable {
        Some(value) => format!(" (CUDA_VISIBLE_DEVICES is {value:?})"),
        None => String::new(),
    }
}
