//! One process of an MPI world of tests; `mpirun` starts it.
//!
//! `rank bodies` runs all test bodies. `rank messages` and `rank faults ...` are for `tests/mpi.rs`.

use std::error::Error;
use std::io::Write;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use burn_moe::comm::mpi::try_run_mpi;
use burn_moe::comm::{Communicator, RankOptions, RanksError, Timing};
use burn_moe_tests::{bodies, processes, ranks};

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    match run(&arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            // In one piece: all processes share the standard error.
            let line = format!("error: {error}\n");
            let _ = std::io::stderr().write_all(line.as_bytes());
            ExitCode::FAILURE
        }
    }
}

/// Arguments: ranks, timeout in seconds, what to do, and its own arguments.
fn run(arguments: &[String]) -> Result<(), Box<dyn Error>> {
    let [size, timeout, task, rest @ ..] = arguments else {
        return Err("arguments: RANKS SECONDS TASK ...".into());
    };
    let options = RankOptions {
        timeout: Duration::from_secs_f64(timeout.parse()?),
        timing: match task.as_str() {
            "critical-path" => Timing::CriticalPath,
            _ => Timing::Wall,
        },
        ..Default::default()
    };
    let rank = |comm: Arc<dyn Communicator>| match task.as_str() {
        "bodies" => {
            ranks::use_world(comm.clone());
            for (name, body) in bodies::all() {
                body();
                if comm.rank() == 0 {
                    println!("{name} ok");
                }
            }
            Ok(())
        }
        "messages" => processes::messages(&comm),
        "large" => processes::large(&comm),
        "send-and-return" => processes::send_and_return(&comm),
        "train" => processes::train(&comm, rest),
        task => Err(format!("there is no task {task}").into()),
    };
    let result: Result<(), RanksError> = try_run_mpi(size.parse()?, options, rank);
    Ok(result?)
}
