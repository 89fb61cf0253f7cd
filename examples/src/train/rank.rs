//! What one rank does.

use std::sync::Arc;

use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use burn_moe::comm::{Communicator, Key, Op};
use burn_moe::layer::loss::sequence_balancing;
use burn_moe::parallel::{ExpertParallel, LayerStats, Mesh, ParallelOptions, clip_gradients};
use burn_moe_models::hf::Layout;
use burn_moe_models::pretrained::{self, PretrainedError};
use burn_moe_models::state::Snapshot;
use burn_moe_models::train::Accumulator;
use burn_moe_models::{Decoder, FeedForwardKind, TokenBatch, checkpoint};

use serde::{Deserialize, Serialize};

use super::TrainArgs;
use super::progress::Progress;
use super::states::States;
use super::subject::Subject;
use crate::cli::{BalanceArg, CliError};
use crate::data::Corpus;
use crate::report::RoutingRecord;

/// What a rank brings home.
#[derive(Serialize, Deserialize)]
pub struct RankOutcome {
    pub runs: Vec<RunOutcome>,
    /// Parameters of the whole model.
    pub parameters: usize,
    /// Of the first run, when it is to be saved.
    pub routing: Vec<RoutingRecord>,
}

/// Of one balancer's run.
#[derive(Default, Serialize, Deserialize)]
pub struct RunOutcome {
    /// Bits per token of each step.
    pub loss: Vec<f64>,
    /// Norm of all gradients of each step, when it is limited.
    pub grad_norm: Vec<f64>,
    /// Seconds of each step.
    pub seconds: Vec<f64>,
    /// This rank's layers in each step.
    pub stats: Vec<Vec<LayerStats>>,
    pub replica_bytes: usize,
}

/// Names of a state's histories.
const LOSS: &str = "bits";
const GRAD_NORM: &str = "grad_norm";

/// One balancer's model and optimizer.
struct Lane<'a> {
    index: usize,
    balance: BalanceArg,
    mesh: &'a Mesh,
    ep: Arc<ExpertParallel>,
    model: Decoder,
    optimizer: ModuleOptimizer,
    outcome: RunOutcome,
}

/// What all ranks share.
pub struct Run<'a> {
    pub args: &'a TrainArgs,
    pub subject: &'a Subject,
    pub corpus: &'a Corpus,
    pub states: Option<&'a States>,
    pub progress: &'a Progress,
    pub device: &'a Device,
}

/// Trains all lanes, step by step in turn.
pub fn run(run: &Run<'_>, world: Arc<dyn Communicator>) -> Result<RankOutcome, CliError> {
    let Run {
        args,
        subject,
        corpus,
        states,
        progress,
        device,
    } = *run;
    let mesh = Mesh::new(world, args.expert_ranks())?;
    let comm = mesh.world();
    let mut lanes = args
        .balance
        .iter()
        .enumerate()
        .map(|(index, balance)| Lane::new(run, index, *balance, &mesh))
        .collect::<Result<Vec<_>, _>>()?;
    let mut schedule = args.schedule().init()?;
    let first_step = states.map_or(0, States::steps_done);
    // Rates follow from the step alone.
    (0..first_step).for_each(|_| drop(schedule.step()));
    let mut position = states.map_or(0, States::position);
    let mut routing = Vec::new();
    comm.barrier(Key::new(Op::Barrier, 0, 0))?;
    for step in first_step..args.steps {
        let (rank, ranks) = (comm.rank(), comm.size());
        let first = args.batch * rank / ranks;
        let count = args.batch * (rank + 1) / ranks - first;
        let sequences = corpus.sequences(position + first, count, args.sequence_length);
        position += args.batch;
        let rate = schedule.step();
        for lane in &mut lanes {
            let start = comm.clock();
            let record = (lane.index == 0 && args.save_routing.is_some()).then_some(&mut routing);
            let nats = lane.step(args, step, &sequences, rate.clone(), record, device)?;
            comm.barrier(lane.key(Op::Barrier, step, args))?;
            let seconds = (comm.clock() - start).as_secs_f64();
            comm.exclude(|| lane.record(args, step, nats, seconds, progress))?;
            if let Some(states) = states {
                comm.exclude(|| lane.save_state(states, step + 1, position, run))?;
            }
        }
    }
    let parameters = lanes[0].parameters();
    lanes[0].save(args, subject)?;
    Ok(RankOutcome {
        runs: lanes
            .into_iter()
            .map(|lane| RunOutcome {
                replica_bytes: lane.ep.replica_bytes(),
                ..lane.outcome
            })
            .collect(),
        parameters,
        routing,
    })
}

impl<'a> Lane<'a> {
    fn new(
        run: &Run<'_>,
        index: usize,
        balance: BalanceArg,
        mesh: &'a Mesh,
    ) -> Result<Self, CliError> {
        let Run {
            args,
            subject,
            device,
            ..
        } = *run;
        let options = ParallelOptions {
            balance: balance.into(),
            planner: args.ranks.planner.clone(),
            slots: args.ranks.slots,
            hierarchical: args.ranks.hierarchical,
            lane: index as u64,
            lanes: args.balance.len() as u64,
            ..Default::default()
        };
        let ep = ExpertParallel::new(mesh.ep().clone(), options)?;
        let mut outcome = RunOutcome::default();
        let saved = run.states.and_then(States::saved);
        let (model, optimizer) = match saved {
            None => {
                let model = subject.model(&ep, args.seed, device)?;
                let optimizer = args.optimizer().init(&model)?;
                (model, optimizer)
            }
            Some(saved) => {
                let show = |done, total| {
                    if mesh.world().rank() == 0 {
                        run.progress
                            .show_bytes("loading", saved.step(), done, total);
                    }
                };
                let loaded = saved.load(&subject.config, &ep, mesh, device, &show)?;
                let optimizer = args.optimizer().init(&loaded.model)?;
                let mut restored = loaded.optimizer(optimizer)?;
                let history = &mut restored.state.history;
                outcome.loss = history.remove(LOSS).unwrap_or_default();
                outcome.grad_norm = history.remove(GRAD_NORM).unwrap_or_default();
                (restored.model, restored.optimizer)
            }
        };
        Ok(Self {
            index,
            balance,
            mesh,
            optimizer,
            model,
            ep,
            outcome,
        })
    }

    /// One optimizer step. Returns this rank's share of the loss, in nats.
    fn step(
        &mut self,
        args: &TrainArgs,
        step: usize,
        sequences: &[Vec<u32>],
        rate: ModuleLearningRate,
        mut record: Option<&mut Vec<RoutingRecord>>,
        device: &Device,
    ) -> Result<f64, CliError> {
        let mut accumulator = Accumulator::default();
        let (count, parts) = (sequences.len(), args.accumulate);
        let mut nats = Vec::with_capacity(parts);
        for part in 0..parts {
            let sequences = &sequences[count * part / parts..count * (part + 1) / parts];
            let (share, grads) = self.gradients(args, sequences, &mut record, device);
            accumulator.add(grads, &self.model);
            nats.push(share);
        }
        let key = self.key(Op::GradReduce, step, args);
        let mesh = self.mesh;
        let mut grads = mesh.reduce_gradients(accumulator.take(), &self.model, key)?;
        if let Some(most) = args.optimizer.clip {
            let norm = mesh.gradient_norm(&grads, &self.model, key.with_op(Op::AllReduce))?;
            finite(step, "the norm of the gradients", norm)?;
            grads = clip_gradients(grads, &self.model, norm, most);
            self.outcome.grad_norm.push(norm);
        }
        // A clone shares the tensors; the optimizer replaces them by new ones.
        self.model = self.optimizer.step(rate, self.model.clone(), grads);
        let of_replicas = mesh.dp().as_ref();
        self.model
            .reduce_load(of_replicas, key.with_op(Op::Count))?;
        self.model.update_bias(args.bias_speed);
        Ok(nats.into_iter().map(|nats| nats.into_scalar::<f64>()).sum())
    }

    /// Loss and gradients of one micro-batch, as shares of the step's.
    fn gradients(
        &self,
        args: &TrainArgs,
        sequences: &[Vec<u32>],
        record: &mut Option<&mut Vec<RoutingRecord>>,
        device: &Device,
    ) -> (Tensor<1>, GradientsParams) {
        let length = args.sequence_length;
        let inputs = TokenBatch::new(sequences.iter().map(|s| &s[..length]));
        let targets: Vec<i32> = sequences
            .iter()
            .flat_map(|s| s[1..].iter().map(|id| *id as i32))
            .collect();
        let tokens = targets.len();
        let targets = Tensor::<2, Int>::from_data(TensorData::new(targets, [tokens, 1]), device);

        let out = self.model.forward(&inputs);
        // This rank's share of the mean over the whole batch, so that gradients add up.
        let share = 1.0 / args.tokens_per_step() as f64;
        let logits = out.logits.cast(DType::F32);
        let nats = log_softmax(logits, 1).gather(1, targets).sum() * -share;
        let mut loss = nats.clone();
        for routing in &out.routings {
            let weight = args.aux_loss * tokens as f64 * share;
            loss = loss + sequence_balancing(routing, length) * weight;
        }
        if let Some(record) = record {
            record.push(RoutingRecord::of(&out.routings));
        }
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        (nats.inner(), grads)
    }

    /// Saves a checkpoint of the run, if it is time.
    fn save_state(
        &self,
        states: &States,
        step: usize,
        position: usize,
        run: &Run<'_>,
    ) -> Result<(), CliError> {
        if !states.is_due(step, run.args) {
            return Ok(());
        }
        let history = [
            (LOSS.into(), self.outcome.loss.clone()),
            (GRAD_NORM.into(), self.outcome.grad_norm.clone()),
        ];
        let state = states.state(step, position, history.into());
        let snapshot = Snapshot {
            state: &state,
            config: &run.subject.config,
            model: &self.model,
            optimizer: &self.optimizer,
        };
        let first = self.mesh.world().rank() == 0;
        let show = |done, total| {
            if first {
                run.progress.show_bytes("saving", step as u64, done, total);
            }
        };
        let folder = states.folder.save(snapshot, self.mesh, &show)?;
        if first {
            run.progress
                .note(&format!("step {step} is saved in {}", folder.display()));
        }
        Ok(())
    }

    /// Saves the model to where the options say.
    fn save(&self, args: &TrainArgs, subject: &Subject) -> Result<(), CliError> {
        // All replicas of the model are the same.
        if self.mesh.dp().rank() != 0 {
            return Ok(());
        }
        let (model, config, steps) = (&self.model, &subject.config, args.steps as u64);
        if let Some(target) = &args.checkpoint {
            checkpoint::save(model, config, &self.ep, target, steps)?;
        }
        if let (Some(target), Some(folder)) = (&args.save, subject.folder()) {
            let layout = Layout::of(folder)?;
            let saved = pretrained::save(model, config, &self.ep, &layout, target, steps);
            saved.map_err(|error| match error {
                // So that the error of the rank that failed is told, not this one.
                PretrainedError::Comm(error) => error.into(),
                error => CliError::from(error),
            })?;
        }
        Ok(())
    }

    /// Notes what the step did, and shows it.
    fn record(
        &mut self,
        args: &TrainArgs,
        step: usize,
        nats: f64,
        seconds: f64,
        progress: &Progress,
    ) -> Result<(), CliError> {
        let mut loss = [nats];
        let key = self.key(Op::Telemetry, step, args);
        let world = self.mesh.world();
        world.all_reduce_sum_f64(key, &mut loss)?;
        let bits = loss[0] / std::f64::consts::LN_2;
        finite(step, "the loss", bits)?;
        let stats = self.ep.take_stats();
        if world.rank() == 0 {
            let rate = args.tokens_per_step() as f64 / seconds;
            progress.show(step, self.balance, bits, rate, &stats);
        }
        self.outcome.loss.push(bits);
        self.outcome.seconds.push(seconds);
        self.outcome.stats.push(stats);
        Ok(())
    }

    fn key(&self, op: Op, step: usize, args: &TrainArgs) -> Key {
        // One behind, as step 0 of lane 0 is the barrier at the start.
        Key::new(op, (step * args.balance.len() + self.index + 1) as u64, 0)
    }

    /// Parameters of the whole model: this rank's, and the experts of the others of its group.
    fn parameters(&self) -> usize {
        let experts: usize = self
            .model
            .layers
            .iter()
            .map(|block| match &block.feed_forward {
                FeedForwardKind::Dense(_) => 0,
                FeedForwardKind::Moe(moe) => moe.experts.num_params(),
            })
            .sum();
        self.model.num_params() + (self.ep.comm().size() - 1) * experts
    }
}

/// The same on all ranks, so that all of them stop.
fn finite(step: usize, what: &'static str, value: f64) -> Result<(), CliError> {
    if value.is_finite() {
        return Ok(());
    }
    let step = step + 1;
    Err(CliError::Diverged { step, what, value })
}
