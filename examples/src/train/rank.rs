//! What one rank does.

use std::sync::Arc;

use burn::lr_scheduler::cosine::CosineAnnealingLrSchedulerConfig;
use burn::lr_scheduler::module_lr_scheduler::ModuleLearningRate;
use burn::module::Module;
use burn::optim::{AdamWConfig, GradientsParams, ModuleOptimizer};
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Int, Tensor, TensorData};
use burn_moe::comm::{Communicator, Key, Op};
use burn_moe::layer::loss::sequence_balancing;
use burn_moe::parallel::{ExpertParallel, LayerStats, ParallelOptions, reduce_gradients};
use burn_moe_models::{Decoder, FeedForwardKind, ModelConfig, TokenBatch, checkpoint};

use serde::{Deserialize, Serialize};

use super::TrainArgs;
use super::progress::Progress;
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
    /// Bits per byte of each step.
    pub loss: Vec<f64>,
    /// Seconds of each step.
    pub seconds: Vec<f64>,
    /// This rank's layers in each step.
    pub stats: Vec<Vec<LayerStats>>,
    pub replica_bytes: usize,
}

/// One balancer's model and optimizer.
struct Lane {
    index: usize,
    balance: BalanceArg,
    ep: Arc<ExpertParallel>,
    model: Decoder,
    optimizer: ModuleOptimizer,
    outcome: RunOutcome,
}

/// Trains all lanes, step by step in turn.
pub fn run(
    args: &TrainArgs,
    config: &ModelConfig,
    corpus: &Corpus,
    progress: &Progress,
    comm: Arc<dyn Communicator>,
) -> Result<RankOutcome, CliError> {
    let device = args.ranks.device().autodiff();
    let mut lanes = args
        .balance
        .iter()
        .enumerate()
        .map(|(index, balance)| Lane::new(args, config, index, *balance, &comm, &device))
        .collect::<Result<Vec<_>, _>>()?;
    let mut schedule = CosineAnnealingLrSchedulerConfig::new(args.lr, args.steps)
        .with_min_lr(args.lr / 10.0)
        .init()
        .expect("--lr and --steps have been checked");
    let mut routing = Vec::new();
    comm.barrier(Key::new(Op::Barrier, 0, 0))?;
    for step in 0..args.steps {
        let (rank, ranks) = (comm.rank(), comm.size());
        let first = args.batch * rank / ranks;
        let count = args.batch * (rank + 1) / ranks - first;
        let sequences = corpus.sequences(step * args.batch + first, count, args.sequence_length);
        let rate = schedule.step();
        for lane in &mut lanes {
            let start = comm.clock();
            let record = (lane.index == 0 && args.save_routing.is_some()).then_some(&mut routing);
            let nats = lane.step(args, step, &sequences, rate.clone(), record, &device)?;
            comm.barrier(lane.key(Op::Barrier, step, args))?;
            let seconds = (comm.clock() - start).as_secs_f64();
            comm.exclude(|| lane.record(args, step, nats, seconds, progress))?;
        }
    }
    let parameters = lanes[0].parameters(comm.size());
    if let Some(folder) = &args.checkpoint {
        checkpoint::save(
            &lanes[0].model,
            config,
            &lanes[0].ep,
            folder,
            args.steps as u64,
        )?;
    }
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

impl Lane {
    fn new(
        args: &TrainArgs,
        config: &ModelConfig,
        index: usize,
        balance: BalanceArg,
        comm: &Arc<dyn Communicator>,
        device: &Device,
    ) -> Result<Self, CliError> {
        let options = ParallelOptions {
            balance: balance.into(),
            planner: args.ranks.planner.clone(),
            slots: args.ranks.slots,
            lane: index as u64,
            lanes: args.balance.len() as u64,
            ..Default::default()
        };
        let ep = ExpertParallel::new(comm.clone(), options)?;
        Ok(Self {
            index,
            balance,
            model: config.init(&ep, args.seed, device)?,
            ep,
            optimizer: AdamWConfig::new().init(),
            outcome: RunOutcome::default(),
        })
    }

    /// One optimizer step. Returns this rank's share of the loss, in nats.
    fn step(
        &mut self,
        args: &TrainArgs,
        step: usize,
        sequences: &[Vec<u32>],
        rate: ModuleLearningRate,
        record: Option<&mut Vec<RoutingRecord>>,
        device: &Device,
    ) -> Result<Tensor<1>, CliError> {
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
        let nats = log_softmax(out.logits, 1).gather(1, targets).sum() * -share;
        let mut loss = nats.clone();
        for routing in &out.routings {
            let weight = args.aux_loss * tokens as f64 * share;
            loss = loss + sequence_balancing(routing, length) * weight;
        }
        if let Some(record) = record {
            record.push(RoutingRecord::of(&out.routings));
        }
        let grads = GradientsParams::from_grads(loss.backward(), &self.model);
        let key = self.key(Op::GradReduce, step, args);
        let grads = reduce_gradients(grads, &self.model, self.ep.comm().as_ref(), key)?;
        // A clone shares the tensors; the optimizer replaces them by new ones.
        self.model = self.optimizer.step(rate, self.model.clone(), grads);
        self.model.update_bias(args.bias_speed);
        Ok(nats.inner())
    }

    /// Notes what the step did, and shows it.
    fn record(
        &mut self,
        args: &TrainArgs,
        step: usize,
        nats: Tensor<1>,
        seconds: f64,
        progress: &Progress,
    ) -> Result<(), CliError> {
        let mut loss = [nats.into_scalar::<f64>()];
        let key = self.key(Op::Telemetry, step, args);
        self.ep.comm().all_reduce_sum_f64(key, &mut loss)?;
        let bits = loss[0] / std::f64::consts::LN_2;
        let stats = self.ep.take_stats();
        if self.ep.comm().rank() == 0 {
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

    /// Parameters of the whole model: this rank's, and the experts of the others.
    fn parameters(&self, ranks: usize) -> usize {
        let experts: usize = self
            .model
            .layers
            .iter()
            .map(|block| match &block.feed_forward {
                FeedForwardKind::Dense(_) => 0,
                FeedForwardKind::Moe(moe) => moe.experts.num_params(),
            })
            .sum();
        self.model.num_params() + (ranks - 1) * experts
    }
}
