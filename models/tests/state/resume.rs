//! Training that is interrupted and continued gives the losses of training that is not.

use std::sync::Arc;

use burn::optim::GradientsParams;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Int, Tensor, TensorData};
use burn_moe::comm::{Communicator, Key, Op, RankOptions, RanksError, try_run_ranks};
use burn_moe::parallel::{clip_gradients, gradient_norm, reduce_gradients};
use burn_moe_models::TokenBatch;
use burn_moe_models::state::{SavedState, StateFolder};
use burn_moe_models::train::{OptimizerConfig, ScheduleConfig, ScheduleKind};
use tempfile::tempdir;

use crate::common::*;

const STEPS: u64 = 8;
const BATCH: usize = 8;
const LENGTH: usize = 16;

/// Ends a rank at the beginning of a step, or behind its forward pass, where others wait for it.
#[derive(Clone, Copy)]
struct Death {
    rank: usize,
    step: u64,
    behind_forward: bool,
}

/// Trains up to step `until`, from the newest checkpoint if there is one. The losses of all steps.
fn train(
    ranks: usize,
    until: u64,
    save_every: u64,
    states: &StateFolder,
    death: Option<Death>,
) -> Result<Vec<f64>, RanksError> {
    let newest = states.newest().unwrap();
    let run = |comm: Arc<dyn Communicator>| -> Result<Vec<f64>, AnyError> {
        let mut trainee = match &newest {
            Some(path) => Trainee::load(comm.clone(), path).map_err(of_rank)?,
            None => {
                let (mesh, ep) = parallel(comm.clone());
                let model = config().init(&ep, 1, &device())?;
                Trainee {
                    optimizer: OptimizerConfig::default().init(&model)?,
                    model,
                    mesh,
                    state: state("real", 0),
                }
            }
        };
        let schedule = ScheduleConfig {
            kind: ScheduleKind::Cosine { end: 0.1 },
            lr: 1e-2,
            steps: STEPS as usize,
            warmup: 3,
        };
        let mut schedule = schedule.init()?;
        (0..trainee.state.step).for_each(|_| drop(schedule.step()));
        let rank = comm.rank();
        for step in trainee.state.step..until {
            let dies = death.filter(|death| (death.rank, death.step) == (rank, step));
            if dies.is_some_and(|death| !death.behind_forward) {
                return Err("killed".into());
            }
            let own = BATCH * rank / ranks..BATCH * (rank + 1) / ranks;
            let first = trainee.state.position as usize;
            let sequences: Vec<Vec<u32>> = own
                .map(|i| {
                    (0..=LENGTH)
                        .map(|t| ((first + i) * 5 + t * t) as u32 % 16)
                        .collect()
                })
                .collect();
            let inputs = TokenBatch::new(sequences.iter().map(|s| &s[..LENGTH]));
            let targets = sequences
                .iter()
                .flat_map(|s| s[1..].iter().map(|id| *id as i32));
            let targets: Vec<i32> = targets.collect();
            let tokens = targets.len();
            let targets = TensorData::new(targets, [tokens, 1]);
            let targets = Tensor::<2, Int>::from_data(targets, &device());
            let logits = trainee.model.forward(&inputs).logits;
            if dies.is_some() {
                std::panic::resume_unwind(Box::new("killed"));
            }
            let share = 1.0 / (BATCH * LENGTH) as f64;
            let loss = log_softmax(logits, 1).gather(1, targets).sum() * -share;
            let grads = GradientsParams::from_grads(loss.backward(), &trainee.model);
            let key = Key::new(Op::GradReduce, step + 1, 0);
            let grads = reduce_gradients(grads, &trainee.model, &comm, key)?;
            let norm_key = key.with_op(Op::AllReduce);
            let norm = gradient_norm(&grads, &trainee.model, comm.as_ref(), norm_key)?;
            let grads = clip_gradients(grads, &trainee.model, norm, 0.5);
            let model = trainee.model.clone();
            trainee.model = trainee.optimizer.step(schedule.step(), model, grads);
            trainee.model.update_bias(1e-2);
            let mut loss = [loss.into_scalar::<f64>()];
            comm.all_reduce_sum_f64(key.with_op(Op::Telemetry), &mut loss)?;
            let state = &mut trainee.state;
            state.step += 1;
            state.position += BATCH as u64;
            state
                .history
                .entry("loss".into())
                .or_default()
                .push(loss[0]);
            if state.step.is_multiple_of(save_every) {
                trainee.save(states).map_err(of_rank)?;
            }
        }
        Ok(trainee.state.history["loss"].clone())
    };
    let all = try_run_ranks(ranks, RankOptions::default(), run)?;
    assert!(all.iter().all(|losses| *losses == all[0]));
    Ok(all[0].clone())
}

fn bits(losses: &[f64]) -> Vec<u64> {
    losses.iter().map(|loss| loss.to_bits()).collect()
}

#[test]
fn a_resumed_run_has_the_losses_of_an_unbroken_one() {
    for ranks in [1, 4] {
        let elsewhere = tempdir().unwrap();
        let unbroken = train(ranks, STEPS, 99, &StateFolder::new(elsewhere.path()), None).unwrap();
        assert_eq!(unbroken.len(), STEPS as usize);
        assert!(unbroken[7] < unbroken[0] - 0.1, "it learns: {unbroken:?}");
        let folder = tempdir().unwrap();
        let states = StateFolder::new(folder.path());
        // Three interruptions in one run.
        for until in [2, 4, 7] {
            train(ranks, until, 1, &states, None).unwrap();
        }
        let resumed = train(ranks, STEPS, 1, &states, None).unwrap();
        assert_eq!(bits(&resumed), bits(&unbroken), "{resumed:?} {unbroken:?}");
        // Nothing is left to do, and the losses are those of the run.
        let again = train(ranks, STEPS, 1, &states, None).unwrap();
        assert_eq!(bits(&again), bits(&unbroken));
    }
}

#[test]
fn another_number_of_ranks_has_the_same_losses_up_to_order() {
    let elsewhere = tempdir().unwrap();
    let unbroken = train(4, STEPS, 99, &StateFolder::new(elsewhere.path()), None).unwrap();
    let folder = tempdir().unwrap();
    let states = StateFolder::new(folder.path());
    for (ranks, until) in [(4, 2), (2, 4), (1, 6), (8, STEPS)] {
        let losses = train(ranks, until, 2, &states, None).unwrap();
        for (step, (a, b)) in losses.iter().zip(&unbroken).enumerate() {
            assert!(
                (a - b).abs() < 1e-4 * b,
                "step {step} on {ranks} ranks: {a} and {b}"
            );
        }
    }
}

/// A rank is lost again and again, anywhere. The examples' test `resume` does it with
/// processes.
#[test]
fn whatever_rank_is_lost_no_saved_step_is() {
    let elsewhere = tempdir().unwrap();
    let unbroken = train(4, STEPS, 99, &StateFolder::new(elsewhere.path()), None).unwrap();
    let mut random = 12345u64;
    let mut draw = |below: u64| {
        random = random
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (random >> 33) % below
    };
    for save_every in [1, 2, 3] {
        let folder = tempdir().unwrap();
        let states = StateFolder::new(folder.path()).with_keep(2);
        for _ in 0..4 {
            let saved = match states.newest().unwrap() {
                Some(path) => SavedState::open(&path).unwrap().step(),
                None => 0,
            };
            let death = Death {
                rank: draw(4) as usize,
                step: (saved + draw(3)).min(STEPS - 1),
                behind_forward: draw(2) == 0,
            };
            let error = train(4, STEPS, save_every, &states, Some(death)).unwrap_err();
            assert!(
                error.to_string().contains(&format!("rank {}", death.rank)),
                "{error}"
            );
            let expected = death.step / save_every * save_every;
            let newest = states.newest().unwrap();
            let newest = newest.map_or(0, |path| SavedState::open(&path).unwrap().step());
            assert_eq!(newest, expected, "lost at step {}", death.step);
        }
        let resumed = train(4, STEPS, save_every, &states, None).unwrap();
        assert_eq!(
            bits(&resumed),
            bits(&unbroken),
            "saved every {save_every} steps"
        );
    }
}
