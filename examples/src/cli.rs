//! What the binaries have in common: option values, errors, exit codes.

use std::error::Error;
use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use burn::tensor::Device;
use burn_moe::balance::{BalanceError, PLANNERS};
#[cfg(feature = "nccl")]
use burn_moe::comm::nccl::local_device;
use burn_moe::comm::{
    CommError, Communicator, RankOptions, RanksError, Timing, Topology, try_run_ranks,
    with_topology,
};
use burn_moe::layer::ConfigError;
use burn_moe::parallel::{Balance, ParallelError};
use burn_moe_models::checkpoint::CheckpointError;
use burn_moe_models::hf::HfError;
use burn_moe_models::pretrained::PretrainedError;
use burn_moe_models::state::StateError;
use burn_moe_models::{GenerateError, ModelConfig, ModelError};
use clap::{Args, ValueEnum};
use serde::Serialize;
use serde::de::DeserializeOwned;

#[cfg(any(feature = "mpi", feature = "tcp"))]
mod processes;

use crate::data::DataError;

/// Options of everything that runs a model over ranks.
#[derive(Debug, Clone, Args)]
pub struct RankArgs {
    /// All ranks, as many as a launcher starts processes (its world size). They share the experts, and
    /// must divide them; with --dp of train, those of a group do.
    #[arg(long, default_value_t = 4)]
    pub ranks: usize,
    /// What ranks are: `threads` of this process, processes that `mpirun -n RANKS` starts, or processes with the variables
    /// of torchrun, mpirun or srun (RANK, WORLD_SIZE, MASTER_ADDR, ...) that connect by TCP.
    #[arg(long, default_value = "threads")]
    pub comm: CommArg,
    /// Nodes that the ranks are on, each with equally many consecutive ranks; replicas stay on their node. Default: as
    /// found, one for threads.
    #[arg(long)]
    pub nodes: Option<usize>,
    /// Sends tokens between nodes in two hops: one message for each node, to the rank there of the same
    /// index, which hands them on. Fewer and larger messages on slow links, the same bits. With --nodes.
    #[arg(long)]
    pub hierarchical: bool,
    /// Replica slots of each rank, shared by all layers.
    #[arg(long, default_value_t = 2)]
    pub slots: usize,
    /// Planner of `--balance exact`.
    #[arg(long, default_value = DEFAULT_PLANNER, value_parser = clap::builder::PossibleValuesParser::new(PLANNERS))]
    pub planner: String,
    /// What the times are: `wall` clock, or the `critical-path`, where the ranks compute one after
    /// another and a step takes the sum over its phases of the slowest rank. Default: wall when
    /// there are at least as many cores as ranks.
    #[arg(long)]
    pub timing: Option<TimingArg>,
    /// Seconds to wait for another rank before giving up.
    #[arg(long, default_value_t = 120.0)]
    pub timeout: f64,
    /// Where tensors live.
    #[arg(long, default_value = "flex")]
    pub device: DeviceArg,
}

/// Planner that the binaries use unless told otherwise.
pub const DEFAULT_PLANNER: &str = "exact-fit";

/// Values of `--comm`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum CommArg {
    /// Threads of this process.
    Threads,
    /// Processes of an MPI world.
    Mpi,
    /// Processes connected by TCP.
    Tcp,
    /// Processes connected by TCP, whose GPUs are linked by NCCL: one process a GPU.
    #[cfg(feature = "nccl")]
    Nccl,
}

/// Values of `--timing`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum TimingArg {
    /// Time on the clock.
    Wall,
    /// Sum over phases of the slowest rank.
    CriticalPath,
}

/// Values of `--device`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DeviceArg {
    /// Burn's Flex CPU backend.
    Flex,
    /// The GPU of this process: LOCAL_RANK of its machine's, or the only one.
    #[cfg(feature = "nccl")]
    Cuda,
}

/// Values of `--balance`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, ValueEnum)]
pub enum BalanceArg {
    /// No balancing.
    None,
    /// Replicas by exact load.
    Exact,
    /// Forced balanced routing.
    Ideal,
}

impl BalanceArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::None => "none",
            Self::Exact => "exact",
            Self::Ideal => "ideal",
        }
    }
}

impl From<BalanceArg> for Balance {
    fn from(arg: BalanceArg) -> Self {
        match arg {
            BalanceArg::None => Self::None,
            BalanceArg::Exact => Self::Exact,
            BalanceArg::Ideal => Self::Ideal,
        }
    }
}

impl TimingArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Wall => "wall",
            Self::CriticalPath => "critical-path",
        }
    }
}

impl RankArgs {
    /// How the times are measured.
    pub fn timing(&self) -> TimingArg {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        match self.timing {
            Some(timing) => timing,
            None if self.comm != CommArg::Threads => TimingArg::Wall,
            None if cores >= self.ranks => TimingArg::Wall,
            None => TimingArg::CriticalPath,
        }
    }

    /// Checks what clap cannot, for groups of `expert_ranks` ranks that share the experts of `model`.
    ///
    /// # Errors
    ///
    /// Names the option, its value and what is allowed.
    pub fn validate(&self, model: &ModelConfig, expert_ranks: usize) -> Result<(), CliError> {
        let groups = self.ranks.checked_div(expert_ranks).unwrap_or(0);
        check(
            groups > 0 && model.num_experts.is_multiple_of(expert_ranks),
            "--ranks",
            self.ranks,
            || {
                let divisors = (1..=model.num_experts)
                    .filter(|ranks| model.num_experts.is_multiple_of(*ranks))
                    .map(|ranks| (ranks * groups.max(1)).to_string())
                    .collect::<Vec<_>>()
                    .join(", ");
                match groups {
                    0 | 1 => format!(
                        "the divisors of the config's {} experts ({divisors})",
                        model.num_experts
                    ),
                    _ => format!(
                        "{groups} times (--dp) the divisors of the config's {} experts ({divisors})",
                        model.num_experts
                    ),
                }
            },
        )?;
        let nodes = self.nodes.unwrap_or(1);
        check(
            nodes > 0 && self.ranks.is_multiple_of(nodes),
            "--nodes",
            nodes,
            || format!("the divisors of the {} ranks", self.ranks),
        )?;
        check(
            nodes.is_multiple_of(groups) || groups.is_multiple_of(nodes),
            "--nodes",
            nodes,
            || {
                format!(
                    "a divisor or a multiple of --dp ({groups}), so that a node holds whole groups, or a group whole nodes"
                )
            },
        )?;
        check(
            !self.hierarchical || nodes > groups,
            "--hierarchical",
            "set",
            || match self.nodes {
                None => "only with --nodes".into(),
                Some(_) => format!(
                    "only where experts are shared between nodes: more --nodes ({nodes}) than groups ({groups})"
                ),
            },
        )?;
        for (comm, built) in [
            (CommArg::Mpi, cfg!(feature = "mpi")),
            (CommArg::Tcp, cfg!(feature = "tcp")),
        ] {
            check(self.comm != comm || built, "--comm", comm.name(), || {
                format!(
                    "threads, or {0} in a build with `--features {0}`",
                    comm.name()
                )
            })?;
        }
        #[cfg(feature = "nccl")]
        if self.device == DeviceArg::Cuda {
            local_device()?;
        } else {
            check(self.comm != CommArg::Nccl, "--device", "flex", || {
                "cuda, with --comm nccl".into()
            })?;
        }
        check(
            self.timeout > 0.0 && self.timeout <= 86_400.0,
            "--timeout",
            self.timeout,
            || "more than 0, at most 86400".into(),
        )
    }

    /// Runs `f` on every rank and returns what each returned, in order of rank.
    ///
    /// When ranks are processes, only that of rank 0 returns from a success; the others end.
    ///
    /// # Errors
    ///
    /// The first error that a rank returned for its own reason, as it is; otherwise what
    /// [`try_run_ranks`] says of the rank that failed.
    pub fn run<R: Send + Serialize + DeserializeOwned>(
        &self,
        f: impl Fn(Arc<dyn Communicator>) -> Result<R, CliError> + Sync,
    ) -> Result<Vec<R>, CliError> {
        let options = RankOptions {
            timeout: Duration::from_secs_f64(self.timeout),
            timing: match self.timing() {
                TimingArg::Wall => Timing::Wall,
                TimingArg::CriticalPath => Timing::CriticalPath,
            },
            ..Default::default()
        };
        let topology = self.nodes.map(|nodes| Topology::nodes(self.ranks, nodes));
        let topology = topology.transpose().map_err(|error| ConfigError {
            field: "--nodes",
            value: error.nodes.to_string(),
            allowed: format!("the divisors of the {} ranks", error.ranks),
        })?;
        let f = |comm: Arc<dyn Communicator>| match &topology {
            Some(topology) => f(with_topology(comm, topology.clone())),
            None => f(comm),
        };
        let own = Mutex::new(None);
        let own_error = |error: CliError| match error {
            CliError::Comm(error) => Box::<dyn Error + Send + Sync>::from(error),
            error => {
                let message = error.to_string();
                own.lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .get_or_insert(error);
                message.into()
            }
        };
        let result = match self.comm {
            CommArg::Threads => {
                try_run_ranks(self.ranks, options, |comm| f(comm).map_err(own_error))
            }
            #[cfg(any(feature = "mpi", feature = "tcp"))]
            comm => processes::run(comm, self.ranks, options, |comm| f(comm).map_err(own_error)),
            #[cfg(not(any(feature = "mpi", feature = "tcp")))]
            _ => unreachable!("validate has refused it"),
        };
        let own = own.into_inner().unwrap_or_else(PoisonError::into_inner);
        match (result, own) {
            (Ok(results), _) => Ok(results),
            (Err(_), Some(error)) => Err(error),
            (Err(error), None) => Err(error.into()),
        }
    }

    /// The device, without autodiff.
    pub fn device(&self) -> Device {
        match self.device {
            DeviceArg::Flex => Device::flex(),
            // `validate` has seen it.
            #[cfg(feature = "nccl")]
            DeviceArg::Cuda => Device::cuda(local_device().unwrap_or(0)),
        }
    }
}

/// `Ok` when `allowed`, else an error that names the option.
pub fn check(
    allowed: bool,
    option: &'static str,
    value: impl ToString,
    what: impl FnOnce() -> String,
) -> Result<(), CliError> {
    if allowed {
        return Ok(());
    }
    Err(CliError::option(option, value, what()))
}

/// Why a binary ends without result.
#[derive(Debug, thiserror::Error)]
pub enum CliError {
    /// An option has a value that is not allowed.
    #[error(transparent)]
    Option(#[from] ConfigError),
    /// The model's description is not usable.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The data is not usable.
    #[error(transparent)]
    Data(#[from] DataError),
    /// A checkpoint cannot be read or written.
    #[error(transparent)]
    Checkpoint(#[from] CheckpointError),
    /// A model folder cannot be read.
    #[error(transparent)]
    Pretrained(#[from] PretrainedError),
    /// The prompts cannot be read by the model.
    #[error(transparent)]
    Generate(GenerateError),
    /// The folder's tokenizer cannot be used.
    #[error("{}: {message}", path.display())]
    Tokenizer {
        /// The file.
        path: PathBuf,
        /// Why not.
        message: String,
    },
    /// The state of a run cannot be read or written.
    #[error(transparent)]
    State(StateError),
    /// Expert parallelism refuses its settings.
    #[error(transparent)]
    Parallel(#[from] ParallelError),
    /// The balancer refuses its input.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// A file cannot be written.
    #[error("{}: {source}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The loss or the gradients are no numbers any more.
    #[error("step {step}: {what} is {value}; a lower --lr, --warmup or --clip may help")]
    Diverged {
        /// The step, from 1 on.
        step: usize,
        /// What is not finite.
        what: &'static str,
        /// Its value.
        value: f64,
    },
    /// There is no GPU, or no way between the ranks' GPUs.
    #[cfg(feature = "nccl")]
    #[error(transparent)]
    Nccl(#[from] burn_moe::comm::nccl::NcclError),
    /// A rank failed while running.
    #[error(transparent)]
    Ranks(#[from] RanksError),
    /// Another rank was lost or too late.
    #[error(transparent)]
    Comm(#[from] CommError),
}

impl From<GenerateError> for CliError {
    fn from(error: GenerateError) -> Self {
        match error {
            GenerateError::Comm(error) => Self::Comm(error),
            error => Self::Generate(error),
        }
    }
}

impl From<HfError> for CliError {
    fn from(error: HfError) -> Self {
        Self::Pretrained(error.into())
    }
}

impl From<StateError> for CliError {
    fn from(error: StateError) -> Self {
        match error {
            // So that the error of the rank that failed is told, not this one.
            StateError::Comm(error) => error.into(),
            error => Self::State(error),
        }
    }
}

impl CliError {
    /// A value of an option that is not allowed.
    pub fn option(field: &'static str, value: impl ToString, allowed: String) -> Self {
        Self::Option(ConfigError {
            field,
            value: value.to_string(),
            allowed,
        })
    }

    /// 2 for wrong input, 1 for a failure while running.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Ranks(RanksError::Failed(_) | RanksError::Engine { .. })
            | Self::Comm(_)
            | Self::Write { .. }
            | Self::State(StateError::Io { .. })
            | Self::Diverged { .. } => 1,
            _ => 2,
        }
    }
}

/// Keeps freed memory for the next step, instead of giving every large buffer back to the system
/// and faulting its pages in again: a training step allocates and frees the same sizes over and
/// over. Call it first thing; does nothing where the C library is not glibc.
pub fn keep_freed_memory() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    // SAFETY: mallopt only sets parameters of the allocator, and no other thread runs yet.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, 1 << 30);
        libc::mallopt(libc::M_TRIM_THRESHOLD, i32::MAX);
        libc::mallopt(libc::M_TOP_PAD, 16 << 20);
    }
}

impl CommArg {
    /// The option's value.
    fn name(self) -> &'static str {
        match self {
            Self::Threads => "threads",
            Self::Mpi => "mpi",
            Self::Tcp => "tcp",
            #[cfg(feature = "nccl")]
            Self::Nccl => "nccl",
        }
    }
}

/// This process's rank when a launcher started it. Before the options are read: so many programs set `RANK` that it
/// counts only with `--comm tcp` or `nccl`.
fn launched_rank() -> Option<usize> {
    let values = ["tcp", "--comm=tcp", "nccl", "--comm=nccl"];
    let tcp = std::env::args().any(|arg| values.contains(&arg.as_str()));
    let names = ["OMPI_COMM_WORLD_RANK", "PMI_RANK", "RANK", "SLURM_PROCID"];
    let known = if tcp { &names[..] } else { &names[..2] };
    known
        .iter()
        .find_map(|name| std::env::var(name).ok()?.parse().ok())
}

/// Drops what processes other than that of rank 0 print on the standard output, where it would be
/// the same again. Errors of ranks still show. Call it before anything is printed.
pub fn only_rank_0_prints() {
    #[cfg(unix)]
    if launched_rank().is_some_and(|rank| rank != 0)
        && let Ok(nowhere) = std::fs::File::options().write(true).open("/dev/null")
    {
        use std::os::fd::AsRawFd;
        // SAFETY: both are open file descriptors; standard output stays one.
        unsafe { libc::dup2(nowhere.as_raw_fd(), libc::STDOUT_FILENO) };
    }
}

/// Prints the error, if any, as one line and gives the exit code.
pub fn finish(result: Result<(), CliError>) -> ExitCode {
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // Wrong input is the same for all processes of a world: one of them says so.
            if error.exit_code() != 2 || launched_rank().unwrap_or(0) == 0 {
                // In one piece: all processes of a world share the standard error.
                let line = format!("error: {error}\n");
                let _ = std::io::stderr().write_all(line.as_bytes());
            } else {
                // A launcher ends the others when one ends like this: that one gets the time to speak.
                std::thread::sleep(Duration::from_secs(1));
            }
            ExitCode::from(error.exit_code())
        }
    }
}
