//! What one rank does.

use std::sync::Arc;

use burn_moe::comm::{Communicator, Key, Op};
use burn_moe::parallel::{ExpertParallel, LayerStats, ParallelOptions};
use burn_moe_models::{GenerateOptions, Generation, LogitsOf, ModelConfig};
use indicatif::{ProgressBar, ProgressStyle};
use serde::{Deserialize, Serialize};

use super::PrefillArgs;
use super::logits::PromptOutput;
use super::source::Source;
use crate::cli::CliError;
use crate::report::RoutingRecord;

/// What all ranks work on.
pub(super) struct Job<'a> {
    pub args: &'a PrefillArgs,
    pub source: &'a Source,
    pub model: &'a ModelConfig,
    pub prompts: &'a [Vec<u32>],
    pub eos: &'a [u32],
}

/// One balancer on one rank.
#[derive(Serialize, Deserialize)]
pub(super) struct RunOutcome {
    pub time_to_first_token: f64,
    pub decode_seconds: f64,
    /// Of the passes over the prompts.
    pub prefill_stats: Vec<LayerStats>,
    /// Of those after.
    pub decode_stats: Vec<LayerStats>,
    pub replica_bytes: usize,
    pub cache_bytes: usize,
    /// Of each pass over the prompts, for `--save-routing`.
    pub routing: Vec<RoutingRecord>,
    /// For `--logits`, of the first balancer.
    pub exact: Vec<PromptOutput>,
    /// Tokens behind each of the rank's prompts.
    pub written: Vec<Vec<u32>>,
}

impl Job<'_> {
    /// All balancers, one after another.
    pub fn run(&self, comm: Arc<dyn Communicator>) -> Result<Vec<RunOutcome>, CliError> {
        let lanes = 0..self.args.balance.len();
        lanes.map(|lane| self.run_balancer(lane, &comm)).collect()
    }

    /// This rank's prompts: an equal share, in order.
    fn own(&self, comm: &dyn Communicator) -> &[Vec<u32>] {
        let (rank, ranks, all) = (comm.rank(), comm.size(), self.prompts.len());
        &self.prompts[all * rank / ranks..all * (rank + 1) / ranks]
    }

    fn run_balancer(
        &self,
        lane: usize,
        comm: &Arc<dyn Communicator>,
    ) -> Result<RunOutcome, CliError> {
        let Self { args, model, .. } = *self;
        let name = args.balance[lane].name();
        let ep = ExpertParallel::new(
            comm.clone(),
            ParallelOptions {
                balance: args.balance[lane].into(),
                planner: args.ranks.planner.clone(),
                slots: args.ranks.slots,
                hierarchical: args.ranks.hierarchical,
                lane: lane as u64,
                lanes: args.balance.len() as u64,
                ..Default::default()
            },
        )?;
        let shown = comm.rank() == 0;
        let bar = bar(shown, &format!("{name}: weights"), 0);
        let load = |read: u64, all: u64| {
            bar.set_length(all);
            bar.set_position(read);
        };
        let device = args.ranks.device();
        let decoder = self.source.load(model, &ep, &device, &load)?;
        bar.finish_and_clear();

        let own = self.own(comm.as_ref());
        let options = GenerateOptions {
            chunk: args.chunk.unwrap_or(0),
            max_new_tokens: args.max_new_tokens,
            eos: self.eos.to_vec(),
            candidates: self.source.candidates(model),
        };
        let keep_logits = lane == 0 && args.logits.is_some();
        let longest = self.prompts.iter().map(Vec::len).max().unwrap_or(0);
        let passes = Generation::passes(longest, options.chunk);
        let mut generation = Generation::new(&decoder, comm.as_ref(), own, options)?;
        let barrier = |part| Key::new(Op::Barrier, lane as u64, 0).with_part(part);
        let (mut exact, mut routing) = (Vec::new(), Vec::new());
        exact.resize_with(
            if keep_logits { own.len() } else { 0 },
            PromptOutput::default,
        );

        let bar = self::bar(shown, &format!("{name}: prompts"), passes);
        comm.barrier(barrier(0))?;
        let start = comm.clock();
        let logits = match keep_logits {
            true => LogitsOf::All,
            false => LogitsOf::Last,
        };
        generation.prefill(logits, |batch, out| {
            comm.exclude(|| {
                if keep_logits {
                    PromptOutput::extend(&mut exact, batch, out);
                }
                if args.save_routing.is_some() {
                    routing.push(RoutingRecord::of(&out.routings));
                }
                bar.inc(1);
            });
        })?;
        comm.barrier(barrier(1))?;
        let time_to_first_token = (comm.clock() - start).as_secs_f64();
        let prefill_stats = ep.take_stats();
        bar.finish_and_clear();

        let more = args.max_new_tokens.saturating_sub(1);
        let bar = self::bar(shown, &format!("{name}: new tokens"), more);
        let start = comm.clock();
        generation.decode(|_, _| comm.exclude(|| bar.inc(1)))?;
        comm.barrier(barrier(2))?;
        let decode_seconds = (comm.clock() - start).as_secs_f64();
        bar.finish_and_clear();
        Ok(RunOutcome {
            time_to_first_token,
            decode_seconds,
            prefill_stats,
            decode_stats: ep.take_stats(),
            replica_bytes: ep.replica_bytes(),
            cache_bytes: generation.cache().bytes(),
            routing,
            exact,
            written: generation.written().to_vec(),
        })
    }
}

/// A bar on a terminal; nothing elsewhere.
fn bar(shown: bool, what: &str, length: usize) -> ProgressBar {
    if !shown {
        return ProgressBar::hidden();
    }
    let bar = ProgressBar::new(length as u64);
    if let Ok(style) = ProgressStyle::with_template("{msg:20} {bar:30} {percent}% [{eta}]") {
        bar.set_style(style);
    }
    bar.set_message(what.to_owned());
    bar
}
