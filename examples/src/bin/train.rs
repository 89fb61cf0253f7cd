//! Trains a mixture-of-experts language model over expert-parallel ranks.

use std::process::ExitCode;

use burn_moe_examples::cli::{finish, keep_freed_memory, only_rank_0_prints};
use burn_moe_examples::train::{TrainArgs, run};
use clap::Parser;

/// Trains a mixture-of-experts language model over expert-parallel ranks, with several balancers
/// side by side on the same batches, and reports load, throughput and loss.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    train: TrainArgs,
}

fn main() -> ExitCode {
    keep_freed_memory();
    only_rank_0_prints();
    finish(run(&Cli::parse().train).map(|_| ()))
}
