//! Saving a run and continuing it.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use burn_moe_models::ModelConfig;
use burn_moe_models::state::{RunState, SavedState, StateFolder};
use clap::Args;

use super::TrainArgs;
use crate::cli::{BalanceArg, CliError, check};
use crate::data::Corpus;

/// Of the options here, in the help.
const HEADING: &str = "Checkpoints of the run";

/// Options to save a run and to continue it.
#[derive(Debug, Clone, Args)]
pub struct StateArgs {
    /// Folder for checkpoints that the run can be resumed from: weights, the optimizer's state and
    /// how far the run is, each in a folder of its own.
    #[arg(long, value_name = "DIR", help_heading = HEADING)]
    pub state: Option<PathBuf>,
    /// Saves after every so many steps, and after the last one. Default: 10.
    #[arg(long, value_name = "STEPS", help_heading = HEADING)]
    pub save_every: Option<usize>,
    /// Newest checkpoints that are kept. Default: 2.
    #[arg(long, value_name = "N", help_heading = HEADING)]
    pub keep: Option<usize>,
    /// Resumes the newest checkpoint in this folder, or the one that is this folder, and goes on to
    /// save beside it, unless --state names another folder. Options that decide what is learned must
    /// be as they were. With the same --ranks, --dp, --nodes, --planner and --slots, the run continues bit
    /// by bit as if it had not been interrupted; otherwise up to the order of additions.
    #[arg(long, value_name = "DIR", help_heading = HEADING)]
    pub resume: Option<PathBuf>,
}

impl StateArgs {
    /// Checks what clap cannot.
    ///
    /// # Errors
    ///
    /// Names the option, its value and what is allowed.
    pub fn validate(&self, balance: &[BalanceArg]) -> Result<(), CliError> {
        let used = self.state.is_some() || self.resume.is_some();
        for (option, value) in [("--save-every", self.save_every), ("--keep", self.keep)] {
            let Some(value) = value else { continue };
            check(value > 0, option, value, || "1 or more".into())?;
            check(used, option, value, || {
                "only with --state or --resume".into()
            })?;
        }
        let names: Vec<_> = balance.iter().map(|balance| balance.name()).collect();
        check(
            !used || balance.len() == 1,
            "--balance",
            names.join(","),
            || "one alone with --state or --resume, which are of one model".into(),
        )
    }
}

/// Where a run is saved, and what it continues.
pub struct States {
    pub folder: StateFolder,
    saved: Option<SavedState>,
    run: String,
    settings: BTreeMap<String, String>,
    every: usize,
}

impl States {
    /// Opens what the options name, if they do, and checks that this run may continue it and save.
    pub fn open(
        args: &TrainArgs,
        config: &ModelConfig,
        corpus: &Corpus,
    ) -> Result<Option<Self>, CliError> {
        let StateArgs {
            state,
            save_every,
            keep,
            resume,
        } = &args.states;
        let saved = match resume {
            Some(path) => Some(SavedState::open(path)?),
            None => None,
        };
        let beside = saved.as_ref().and_then(|saved| saved.folder().parent());
        let Some(path) = state.as_deref().or(beside) else {
            return Ok(None);
        };
        let settings = settings(args, corpus);
        let run = match &saved {
            Some(saved) => saved.run().to_owned(),
            None => new_name(),
        };
        let folder = StateFolder::new(Path::new(path)).with_keep(keep.unwrap_or(2));
        let mut next = 1;
        if let Some(saved) = &saved {
            saved.check(config, &settings)?;
            next = saved.step() + 1;
            println!(
                "resumes step {} of {}{}",
                saved.step(),
                saved.folder().display(),
                match [saved.ranks(), saved.expert_ranks()] {
                    as_now if as_now == [args.ranks.ranks, args.expert_ranks()] => String::new(),
                    [ranks, ep] if ranks == ep => format!(", which {ranks} ranks saved"),
                    [ranks, ep] => format!(", which {} x {ep} ranks saved", ranks / ep),
                }
            );
        }
        folder.check_target(&run, next)?;
        Ok(Some(Self {
            folder,
            saved,
            run,
            settings,
            every: save_every.unwrap_or(10),
        }))
    }

    /// What the run continues.
    pub fn saved(&self) -> Option<&SavedState> {
        self.saved.as_ref()
    }

    /// Steps that are done when it begins.
    pub fn steps_done(&self) -> usize {
        self.saved.as_ref().map_or(0, |saved| saved.step() as usize)
    }

    /// Sequences that are consumed when it begins.
    pub fn position(&self) -> usize {
        self.saved
            .as_ref()
            .map_or(0, |saved| saved.position() as usize)
    }

    /// Whether to save after `step` steps.
    pub fn is_due(&self, step: usize, args: &TrainArgs) -> bool {
        step.is_multiple_of(self.every) || step == args.steps
    }

    /// What is saved after `step` steps and `position` sequences, beside the model.
    pub fn state(
        &self,
        step: usize,
        position: usize,
        history: BTreeMap<String, Vec<f64>>,
    ) -> RunState {
        RunState {
            run: self.run.clone(),
            step: step as u64,
            position: position as u64,
            settings: self.settings.clone(),
            history,
        }
    }
}

/// Everything beside the model's config that decides what is learned.
fn settings(args: &TrainArgs, corpus: &Corpus) -> BTreeMap<String, String> {
    let optimizer = &args.optimizer;
    let balance: Vec<_> = args.balance.iter().map(|balance| balance.name()).collect();
    let settings = [
        ("--balance", balance.join(",")),
        ("--steps", args.steps.to_string()),
        ("--seed", args.seed.to_string()),
        ("--batch", args.batch.to_string()),
        ("--sequence-length", args.sequence_length.to_string()),
        ("--accumulate", args.accumulate.to_string()),
        ("--dtype", args.dtype.name().into()),
        ("--lr", optimizer.lr.to_string()),
        ("--schedule", optimizer.schedule.name().into()),
        ("--warmup", optimizer.warmup.to_string()),
        ("--weight-decay", optimizer.weight_decay.to_string()),
        (
            "--clip",
            optimizer
                .clip
                .map_or("none".into(), |clip| clip.to_string()),
        ),
        ("--bias-speed", args.bias_speed.to_string()),
        ("--aux-loss", args.aux_loss.to_string()),
        ("the text of --data, by checksum,", corpus.checksum()),
    ];
    settings
        .map(|(name, value)| (name.to_owned(), value))
        .into()
}

/// A name that no other run has: the time and the process.
fn new_name() -> String {
    let now = SystemTime::now()
        .duration_since(UNIX_EPOCH)
        .unwrap_or_default();
    format!("{:x}-{:x}", now.as_nanos(), std::process::id())
}
