//! Runs prompts through a model over expert-parallel ranks.

use std::process::ExitCode;

use burn_moe_examples::cli::{finish, keep_freed_memory, only_rank_0_prints};
use burn_moe_examples::prefill::{PrefillArgs, run};
use clap::Parser;

/// Runs a batch of prompts of any lengths through a model, over any number of expert-parallel ranks,
/// and continues each greedily. The model is a folder of Hugging Face's or what `train --checkpoint`
/// saved. Reports time to first token, tokens per second of reading and writing, the balance of each
/// layer, memory of the KV cache, and the continuations.
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
