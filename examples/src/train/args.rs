//! Options of `train`.

use std::collections::HashSet;
use std::path::PathBuf;

use burn::tensor::{Device, FloatDType};
use burn_moe_models::train::{OptimizerConfig, ScheduleConfig, ScheduleKind};
use burn_moe_models::{ModelConfig, Scale};
use clap::builder::ArgPredicate;
use clap::{Args, ValueEnum};

use super::states::StateArgs;
use crate::cli::{BalanceArg, CliError, RankArgs, check};

/// Headings of the help.
const MODEL: &str = "Model";
const OPTIMIZER: &str = "Optimizer (AdamW)";

/// Options of `train`.
#[derive(Debug, Clone, Args)]
pub struct TrainArgs {
    /// Named config (tiny, smoke, or a published model such as deepseek-v3) or a JSON file with all
    /// fields of one.
    #[arg(long, default_value = "tiny", help_heading = MODEL)]
    pub config: String,
    /// Makes the model of --config smaller, such as 1/16: widths, heads, ranks of compressed vectors
    /// and vocabulary shrink, what shapes the routing (experts, groups, top-k, shared experts) stays.
    #[arg(long, value_name = "FRACTION", help_heading = MODEL)]
    pub scale: Option<Scale>,
    /// Gives the model of --config fewer layers.
    #[arg(long, value_name = "N", help_heading = MODEL)]
    pub layers: Option<usize>,
    /// Folder of a Hugging Face model to fine-tune, instead of --config. Text becomes tokens by its
    /// tokenizer.json; without one, bytes are the tokens.
    #[arg(long, value_name = "DIR", conflicts_with_all = ["config", "scale", "layers"], help_heading = MODEL)]
    pub model: Option<PathBuf>,
    /// Folder to save the first balancer's model to, in the layout of --model.
    #[arg(long, value_name = "DIR", requires = "model", help_heading = MODEL)]
    pub save: Option<PathBuf>,
    /// Type of weights and activations. With bf16, the optimizer keeps f32 weights and moments.
    #[arg(long, default_value = "f32", help_heading = MODEL)]
    pub dtype: DtypeArg,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub ranks: RankArgs,
    /// Data-parallel replicas of the model. The ranks, all of them as in Megatron and DeepSpeed, form so
    /// many groups of consecutive ranks, each of which shares the experts of its replica: --ranks 8 --dp 2
    /// is 2 x 4, data times expert parallel.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub dp: usize,
    /// Balancers to run side by side on the same batches; exact alone with --model, --state and
    /// --resume.
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "none,exact,ideal",
        default_value_ifs([
            ("model", ArgPredicate::IsPresent, "exact"),
            ("state", ArgPredicate::IsPresent, "exact"),
            ("resume", ArgPredicate::IsPresent, "exact"),
        ])
    )]
    pub balance: Vec<BalanceArg>,
    /// Optimizer steps.
    #[arg(long, default_value_t = 50)]
    pub steps: usize,
    /// Seed of weights and data.
    #[arg(long, default_value_t = 0)]
    pub seed: u64,
    /// Sequences of a step, over all ranks.
    #[arg(long, default_value_t = 16)]
    pub batch: usize,
    /// Tokens of a sequence.
    #[arg(long, default_value_t = 128)]
    pub sequence_length: usize,
    /// Micro-batches that a step's sequences are cut into, one after another; their gradients are
    /// added up.
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub accumulate: usize,
    /// Recomputes cheap activations in the backward pass instead of keeping them.
    #[arg(long)]
    pub checkpointing: bool,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub optimizer: OptimizerArgs,
    /// Step of the routers' selection bias.
    #[arg(long, default_value_t = 1e-3)]
    pub bias_speed: f64,
    /// Weight of the sequence-wise auxiliary loss.
    #[arg(long, default_value_t = 1e-4)]
    pub aux_loss: f64,
    /// Text to train on, a file or a folder. Default: the sources of this workspace's dependencies.
    #[arg(long)]
    pub data: Option<PathBuf>,
    #[command(flatten)]
    #[allow(missing_docs)]
    pub states: StateArgs,
    /// Folder for report.json and report.html.
    #[arg(long, default_value = "target/train-report")]
    pub report: PathBuf,
    /// Folder to save the first balancer's model to.
    #[arg(long)]
    pub checkpoint: Option<PathBuf>,
    /// File to save the first balancer's routing to, as safetensors (ids [layers, tokens, k]).
    #[arg(long)]
    pub save_routing: Option<PathBuf>,
}

/// Options of the optimizer.
#[derive(Debug, Clone, Args)]
pub struct OptimizerArgs {
    /// Highest learning rate; 1e-5 with --model.
    #[arg(
        long,
        default_value = "3e-3",
        default_value_if("model", ArgPredicate::IsPresent, "1e-5"),
        help_heading = OPTIMIZER
    )]
    pub lr: f64,
    /// Course of the learning rate: constant, or along a cosine to a tenth.
    #[arg(long, default_value = "cosine", help_heading = OPTIMIZER)]
    pub schedule: ScheduleArg,
    /// Steps in which the learning rate rises to --lr before.
    #[arg(long, default_value_t = 0, value_name = "STEPS", help_heading = OPTIMIZER)]
    pub warmup: usize,
    /// Share of the weights, times the learning rate, that a step takes away; norms and biases keep
    /// theirs.
    #[arg(long, default_value_t = 1e-4, help_heading = OPTIMIZER)]
    pub weight_decay: f64,
    /// Largest norm of all gradients together; larger ones are scaled down to it. Default: no limit.
    #[arg(long, value_name = "NORM", help_heading = OPTIMIZER)]
    pub clip: Option<f64>,
}

/// Values of `--dtype`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum DtypeArg {
    /// 32 bits.
    F32,
    /// 16 bits, with the exponents of f32.
    Bf16,
}

impl DtypeArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::F32 => "f32",
            Self::Bf16 => "bf16",
        }
    }
}

/// Values of `--schedule`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum ScheduleArg {
    /// Stays.
    Constant,
    /// Falls along a cosine to a tenth.
    Cosine,
}

impl ScheduleArg {
    /// The name on the command line.
    pub fn name(self) -> &'static str {
        match self {
            Self::Constant => "constant",
            Self::Cosine => "cosine",
        }
    }
}

impl TrainArgs {
    /// Checks what clap cannot, for a run of `model`.
    ///
    /// # Errors
    ///
    /// Names the option, its value and what is allowed.
    pub fn validate(&self, model: &ModelConfig) -> Result<(), CliError> {
        let one_or_more = || "1 or more".to_owned();
        check(self.dp > 0, "--dp", self.dp, one_or_more)?;
        check(
            self.ranks.ranks.is_multiple_of(self.dp),
            "--dp",
            self.dp,
            || format!("the divisors of the {} ranks", self.ranks.ranks),
        )?;
        self.ranks.validate(model, self.expert_ranks())?;
        check(self.steps > 0, "--steps", self.steps, one_or_more)?;
        check(
            self.accumulate > 0,
            "--accumulate",
            self.accumulate,
            one_or_more,
        )?;
        let ranks = self.ranks.ranks;
        let least = ranks.saturating_mul(self.accumulate);
        check(self.batch >= least, "--batch", self.batch, || {
            match self.accumulate {
                1 => format!("at least one sequence a rank ({ranks})"),
                _ => format!("at least one sequence a rank and micro-batch ({least})"),
            }
        })?;
        check(
            (1..=model.max_sequence_length).contains(&self.sequence_length),
            "--sequence-length",
            self.sequence_length,
            || {
                format!(
                    "1 to the config's max_sequence_length ({})",
                    model.max_sequence_length
                )
            },
        )?;
        self.optimizer.validate(self.steps)?;
        self.states.validate(&self.balance)?;
        for (option, value) in [
            ("--bias-speed", self.bias_speed),
            ("--aux-loss", self.aux_loss),
        ] {
            check(value.is_finite() && value >= 0.0, option, value, || {
                "0 or more".into()
            })?;
        }
        check(
            self.balance.iter().collect::<HashSet<_>>().len() == self.balance.len(),
            "--balance",
            self.balance
                .iter()
                .map(|b| b.name())
                .collect::<Vec<_>>()
                .join(","),
            || "each of none, exact, ideal at most once".into(),
        )
    }

    /// Ranks that share the experts of a replica of the model.
    pub fn expert_ranks(&self) -> usize {
        self.ranks.ranks / self.dp
    }

    /// Tokens of a step, over all ranks.
    pub fn tokens_per_step(&self) -> usize {
        self.batch * self.sequence_length
    }

    /// The optimizer's settings.
    pub fn optimizer(&self) -> OptimizerConfig {
        OptimizerConfig {
            weight_decay: self.optimizer.weight_decay as f32,
            ..Default::default()
        }
    }

    /// The learning rates.
    pub fn schedule(&self) -> ScheduleConfig {
        ScheduleConfig {
            kind: match self.optimizer.schedule {
                ScheduleArg::Constant => ScheduleKind::Constant,
                ScheduleArg::Cosine => ScheduleKind::Cosine { end: 0.1 },
            },
            lr: self.optimizer.lr,
            steps: self.steps,
            warmup: self.optimizer.warmup,
        }
    }

    /// Where the model lives, with the default type of its weights. Call it before any tensor is
    /// made: the type is the device's, for the whole process.
    ///
    /// # Errors
    ///
    /// When tensors of another type have been made.
    pub fn device(&self) -> Result<Device, CliError> {
        let mut device = self.ranks.device();
        let wanted = match self.dtype {
            DtypeArg::F32 => FloatDType::F32,
            DtypeArg::Bf16 => FloatDType::BF16,
        };
        let held = device.settings().float_dtype;
        let set = held == wanted || device.configure(wanted).is_ok();
        check(set, "--dtype", self.dtype.name(), || {
            format!("{held:?}, which this process has used before")
        })?;
        let device = device.autodiff();
        Ok(match self.checkpointing {
            true => device.gradient_checkpointing(),
            false => device,
        })
    }
}

impl OptimizerArgs {
    fn validate(&self, steps: usize) -> Result<(), CliError> {
        check(self.lr > 0.0 && self.lr <= 1.0, "--lr", self.lr, || {
            "more than 0, at most 1".into()
        })?;
        check(self.warmup < steps, "--warmup", self.warmup, || {
            format!("less than --steps ({steps})")
        })?;
        let decay = self.weight_decay;
        check(
            (0.0..=1.0).contains(&decay),
            "--weight-decay",
            decay,
            || "0 to 1".into(),
        )?;
        let clip = self.clip.unwrap_or(1.0);
        check(clip.is_finite() && clip > 0.0, "--clip", clip, || {
            "more than 0".into()
        })
    }
}
