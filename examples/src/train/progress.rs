//! A bar on a terminal, lines elsewhere.

use std::io::IsTerminal;

use burn_moe::parallel::LayerStats;
use indicatif::{ProgressBar, ProgressStyle};

use crate::cli::BalanceArg;

/// Steps that are printed, at most, when there is no terminal for a bar.
const LINES: usize = 10;

/// Shows how far a training run is.
pub struct Progress {
    bar: Option<ProgressBar>,
    steps: usize,
    /// What a token is.
    unit: &'static str,
}

impl Progress {
    pub fn new(steps: usize, balance: &[BalanceArg], unit: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((steps * balance.len()) as u64);
            if let Ok(style) =
                ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed} < {eta}] {msg}")
            {
                bar.set_style(style);
            }
            bar
        });
        Self { bar, steps, unit }
    }

    /// After a step of one balancer.
    pub fn show(
        &self,
        step: usize,
        balance: BalanceArg,
        bits: f64,
        tokens_per_second: f64,
        stats: &[LayerStats],
    ) {
        let mean = |f: fn(&LayerStats) -> f64| {
            stats.iter().map(f).sum::<f64>() / stats.len().max(1) as f64
        };
        let message = format!(
            "{:5} {bits:.3} bits/{}, {tokens_per_second:.0} tokens/s, imbalance {:.2} -> {:.2}",
            balance.name(),
            self.unit,
            mean(|layer| layer.imbalance_before),
            mean(|layer| layer.imbalance_after),
        );
        if let Some(bar) = &self.bar {
            bar.set_message(message);
            bar.inc(1);
            return;
        }
        if (step + 1).is_multiple_of(self.steps.div_ceil(LINES)) {
            eprintln!("step {}/{}: {message}", step + 1, self.steps);
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
