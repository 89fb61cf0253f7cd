//! Tasks of the workspace: `cargo xtask test`, `cargo xtask check`, `cargo xtask bench`.

use std::process::{Command, ExitCode};

use clap::{Parser, Subcommand};

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
        /// Arguments for `cargo test`, after `--`.
        #[arg(last = true)]
        args: Vec<String>,
    },
    /// Formatting, lints and documentation, without warnings.
    Check,
    /// Run the benchmarks of the layer and its kernels.
    Bench {
        /// Arguments for `cargo bench`, after `--`.
        #[arg(last = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let done = match Cli::parse().task {
        Task::Test { mpi: true, args } => cargo("test", &MPI, &args, &[]),
        Task::Test { mpi: false, args } => cargo("test", &["--workspace"], &args, &[]),
        Task::Check => check(),
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
    let deny = ("RUSTDOCFLAGS", "-D warnings");
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
        && cargo("doc", &["--workspace", "--no-deps"], &[], &[deny])
}

/// Runs cargo in the workspace and says what it runs.
fn cargo(task: &str, fixed: &[&str], more: &[String], environment: &[(&str, &str)]) -> bool {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command
        .arg(task)
        .args(fixed)
        .args(more)
        .envs(environment.iter().copied());
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
