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
    pub fn new(first: usize, steps: usize, balance: &[BalanceArg], unit: &'static str) -> Self {
        let bar = std::io::stderr().is_terminal().then(|| {
            let bar = ProgressBar::new((steps * balance.len()) as u64);
            if let Ok(style) =
                ProgressStyle::with_template("{bar:30} {pos}/{len} [{elapsed} < {eta}] {msg}")
            {
                bar.set_style(style);
            }
            bar.set_position((first * balance.len()) as u64);
            bar.reset_eta();
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

    /// How far a checkpoint of a step is saved or loaded, in bytes.
    pub fn show_bytes(&self, what: &str, step: u64, done: u64, total: u64) {
        if let Some(bar) = &self.bar {
            let mb = |bytes: u64| bytes as f64 / 1e6;
            bar.set_message(format!(
                "{what} step {step}: {:.0} of {:.0} MB",
                mb(done),
                mb(total)
            ));
        }
    }

    /// Something worth a line of its own.
    pub fn note(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            None => eprintln!("{line}"),
        }
    }

    pub fn finish(&self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}
