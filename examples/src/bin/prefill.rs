//! Runs prompts through a trained model over expert-parallel ranks.

use std::process::ExitCode;

use burn_moe_examples::cli::{finish, keep_freed_memory, only_rank_0_prints};
use burn_moe_examples::prefill::{PrefillArgs, run};
use clap::Parser;

/// Runs a batch of prompts through a model that `train --checkpoint` saved, over any number of
/// expert-parallel ranks; reports time to first token, load, and how each prompt goes on.
#[derive(Parser)]
#[command(version)]
struct Cli {
    #[command(flatten)]
    prefill: PrefillArgs,
}

fn main() -> ExitCode {
    keep_freed_memory();
    only_rank_0_prints();
    finish(run(&Cli::parse().prefill).map(|_| ()))
}
