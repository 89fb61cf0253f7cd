//! Whether a model fits, asked before it is made.

use burn::tensor::Device;
use burn_moe_models::ModelConfig;

use super::{DtypeArg, TrainArgs};
use crate::cli::{CliError, check};

/// Refuses a model whose weights, gradients and optimizer state alone are more than this machine's
/// memory. Where that cannot be known, allows everything.
pub fn check_memory(
    args: &TrainArgs,
    config: &ModelConfig,
    device: &Device,
) -> Result<(), CliError> {
    let counts = config.counts(device)?;
    let (ranks, dp) = (args.ranks.ranks as u64, args.dp as u64);
    let parameters = (counts.total - counts.routed) * ranks + counts.routed * dp;
    let each = match args.dtype {
        // Weight, gradient and two moments.
        DtypeArg::F32 => 16,
        // In f32 the gradient, the master weight and two moments.
        DtypeArg::Bf16 => 18,
    };
    let needed = parameters * each * args.balance.len() as u64;
    let Some(memory) = memory() else {
        return Ok(());
    };
    let gib = |bytes: u64| bytes as f64 / (1u64 << 30) as f64;
    let (option, value) = match &args.model {
        Some(folder) => ("--model", folder.display().to_string()),
        None => ("--config", args.config.clone()),
    };
    check(needed <= memory, option, value, || {
        format!(
            "models that fit into {:.0} GiB of memory; weights, gradients and moments of {ranks} \
             ranks and {} balancers take {:.0} GiB (see --scale, --layers, --ranks, --balance)",
            gib(memory),
            args.balance.len(),
            gib(needed),
        )
    })
}

/// Bytes of memory of this machine.
fn memory() -> Option<u64> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemTotal:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib * 1024)
}
