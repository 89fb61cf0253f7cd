//! Whatever goes wrong on one rank in the middle of a model, all ranks end soon, with an error that
//! names the rank and what the others waited in; and replicas take no more memory than promised.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Device, Tensor};
use burn_moe::comm::{
    CommError, Communicator, Key, Op, RankOptions, RankOutcome, RanksError, RanksFailure, Timing,
    run_ranks,
};
use burn_moe::layer::{Moe, MoeConfig, RouterConfig};
use burn_moe::parallel::{Balance, CombineOrder, ExpertParallel, ParallelOptions};
use burn_moe_tests::{random, tensor_of, with_values};
use bytes::Bytes;

const RANKS: usize = 4;
const WIDTH: usize = 6;
const EXPERTS: usize = 8;

/// What a test never waits for.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A communicator that does something when its rank comes to one operation.
struct Saboteur {
    inner: Arc<dyn Communicator>,
    at: (Op, u32),
    role: Role,
}

enum Role {
    /// Panics once all others have come to the same operation, a collective.
    PanicAfterAll,
    /// Panics once another rank waits for a message of that operation.
    PanicAfterOne(Arc<Mutex<Receiver<()>>>),
    /// Tells that it waits for a message of that operation.
    Tell(Sender<()>),
}

/// Returns when all other ranks have sent for the collective `key`: from then on they wait in it.
fn await_others(comm: &dyn Communicator, key: Key) {
    for other in (0..comm.size()).filter(|other| *other != comm.rank()) {
        comm.recv(other, key).expect("the others are healthy");
    }
}

impl Communicator for Saboteur {
    fn rank(&self) -> usize {
        self.inner.rank()
    }
    fn size(&self) -> usize {
        self.inner.size()
    }
    fn timeout(&self) -> Duration {
        self.inner.timeout()
    }
    fn send(&self, to: usize, key: Key, payload: Bytes) -> Result<(), CommError> {
        if (key.op, key.layer) == self.at {
            match &self.role {
                Role::PanicAfterAll => {
                    await_others(&*self.inner, key);
                    panic!("sabotage");
                }
                Role::PanicAfterOne(waits) => {
                    let told = waits.lock().unwrap().recv_timeout(TIMEOUT / 16);
                    told.expect("another rank waits");
                    panic!("sabotage");
                }
                Role::Tell(_) => {}
            }
        }
        self.inner.send(to, key, payload)
    }
    fn recv(&self, from: usize, key: Key) -> Result<Bytes, CommError> {
        if let Role::Tell(waits) = &self.role
            && (key.op, key.layer) == self.at
        {
            // Nobody listens after the panic.
            let _ = waits.send(());
        }
        self.inner.recv(from, key)
    }
    fn clock(&self) -> Duration {
        self.inner.clock()
    }
    fn pause_clock(&self) {
        self.inner.pause_clock();
    }
    fn resume_clock(&self) {
        self.inner.resume_clock();
    }
}

/// Layers one after the other, each added to its input.
struct Model {
    layers: Vec<Moe>,
    ep: Arc<ExpertParallel>,
}

impl Model {
    fn new(comm: Arc<dyn Communicator>, layers: u32, options: ParallelOptions) -> Self {
        let ep = ExpertParallel::new(comm, options).expect("options");
        let device = Device::flex().autodiff();
        let config = MoeConfig::new(RouterConfig::new(WIDTH, EXPERTS, 3), 4);
        let layers = (0..layers)
            .map(|layer| config.init_parallel(&ep, layer, &device).expect("a layer"))
            .collect();
        Self { layers, ep }
    }

    /// Makes all tokens choose experts 0 to 2, which live on rank 0 of two, on 0 and 1 of four.
    fn heated(mut self) -> Self {
        let mut bias = [0.0; EXPERTS];
        bias[..3].fill(100.0);
        for layer in &mut self.layers {
            let param = layer.router.bias.take();
            layer.router.bias = param.map(|param| with_values(param, &bias));
        }
        self
    }

    /// Forward and backward; `before` runs before each layer and may skip it.
    fn step(&self, before: impl Fn(usize) -> bool) {
        let rank = self.ep.comm().rank();
        let mut x = tensor_of(
            &random(12 * WIDTH, rank as u64),
            [12, WIDTH],
            DType::F32,
            &Device::flex().autodiff(),
        )
        .require_grad();
        for (i, layer) in self.layers.iter().enumerate() {
            if before(i) {
                x = layer.forward(x.clone()) + x;
            }
        }
        x.sum().backward();
    }
}

fn options(timeout: Duration, timing: Timing) -> RankOptions {
    RankOptions {
        timeout,
        timing,
        ..Default::default()
    }
}

fn failure<R>(result: Result<Vec<R>, RanksError>) -> RanksFailure {
    match result {
        Err(RanksError::Failed(failure)) => *failure,
        Err(error) => panic!("another error: {error}"),
        Ok(_) => panic!("no rank failed"),
    }
}

/// Runs `f` on four ranks; the failure must come long before the timeout.
fn fails_soon_on(timing: Timing, f: impl Fn(Arc<dyn Communicator>) + Sync) -> RanksFailure {
    let start = Instant::now();
    let failure = failure(run_ranks(RANKS, options(TIMEOUT, timing), f));
    let took = start.elapsed();
    assert!(took < TIMEOUT / 8, "took {took:?}");
    failure
}

/// [`fails_soon_on`] both clocks.
fn fails_soon(f: impl Fn(Arc<dyn Communicator>) + Sync) -> [RanksFailure; 2] {
    [Timing::Wall, Timing::CriticalPath].map(|timing| fails_soon_on(timing, &f))
}

/// All other ranks waited in `op` of `layer` and were told of the loss.
#[track_caller]
fn assert_waited_in(failure: &RanksFailure, op: Op, layer: u32) {
    let waited = Key::new(op, 0, layer);
    assert_eq!(failure.others.len(), RANKS - 1);
    for (rank, outcome) in &failure.others {
        match outcome {
            RankOutcome::Comm(CommError::RankLost { lost, key, .. }) => {
                assert_eq!((*lost, *key), (failure.rank, waited), "{failure}");
            }
            outcome => panic!("rank {rank} {outcome}: {failure}"),
        }
        let text = format!("rank {rank} was in {waited}");
        assert!(failure.to_string().contains(&text), "{failure}");
    }
}

#[test]
fn a_panic_in_the_forward_pass() {
    for failure in fails_soon(|comm| {
        Model::new(comm.clone(), 4, ParallelOptions::default()).step(|layer| {
            if (comm.rank(), layer) == (2, 2) {
                await_others(&*comm, Key::new(Op::Count, 0, 2));
                panic!("out of luck");
            }
            true
        });
    }) {
        assert_eq!(failure.rank, 2);
        assert_eq!(failure.cause, RankOutcome::Panicked("out of luck".into()));
        let text = failure.to_string();
        assert!(
            text.starts_with(
                "rank 2 panicked: out of luck; meanwhile rank 0 was in count (layer 2"
            ),
            "{text}"
        );
        assert_waited_in(&failure, Op::Count, 2);
    }
}

#[test]
fn a_panic_inside_an_operation() {
    for combine in [CombineOrder::Exact, CombineOrder::Rank] {
        for (op, layer) in [
            (Op::Dispatch, 2),
            (Op::Combine, 1),
            (Op::CombineBackward, 3),
            (Op::CombineBackward, 2),
            (Op::DispatchBackward, 2),
        ] {
            for failure in fails_soon(|comm| {
                let comm: Arc<dyn Communicator> = match comm.rank() {
                    1 => Arc::new(Saboteur {
                        inner: comm,
                        at: (op, layer),
                        role: Role::PanicAfterAll,
                    }),
                    _ => comm,
                };
                let options = ParallelOptions {
                    combine,
                    ..Default::default()
                };
                Model::new(comm, 4, options).step(|_| true);
            }) {
                assert_eq!(failure.rank, 1, "{failure}");
                assert_eq!(failure.cause, RankOutcome::Panicked("sabotage".into()));
                assert_waited_in(&failure, op, layer);
            }
        }
    }
    // What failed in this process does no harm to the next run.
    run_ranks(RANKS, options(TIMEOUT, Timing::Wall), |comm| {
        Model::new(comm, 4, ParallelOptions::default()).step(|_| true);
    })
    .expect("a healthy run");
}

/// The home rank of the hot experts dies while others wait for their weights, forward and backward;
/// and a host while home waits for its gradients.
#[test]
fn a_panic_while_replicating() {
    for (timing, op, rank) in [
        (Timing::Wall, Op::Replicate, 0),
        (Timing::Wall, Op::ReplicateBackward, 0),
        (Timing::Wall, Op::ReplicaGrad, 3),
        (Timing::CriticalPath, Op::Replicate, 0),
        (Timing::CriticalPath, Op::ReplicateBackward, 0),
        (Timing::CriticalPath, Op::ReplicaGrad, 3),
    ] {
        let (told, waits) = channel();
        if timing == Timing::CriticalPath {
            // Nobody would come to wait while the rank that panics holds the machine.
            told.send(()).expect("it is received");
        }
        let waits = Arc::new(Mutex::new(waits));
        let failure = fails_soon_on(timing, |comm| {
            let role = match comm.rank() == rank {
                true => Role::PanicAfterOne(waits.clone()),
                false => Role::Tell(told.clone()),
            };
            let comm = Arc::new(Saboteur {
                inner: comm,
                at: (op, 1),
                role,
            });
            // Sent when they are waited for: early, nobody would wait for weights yet.
            let options = ParallelOptions {
                overlap: false,
                ..Default::default()
            };
            Model::new(comm, 2, options).heated().step(|_| true);
        });
        assert_eq!(failure.rank, rank, "{failure}");
        assert_eq!(failure.cause, RankOutcome::Panicked("sabotage".into()));
        if timing == Timing::CriticalPath {
            continue;
        }
        // Those that host no replica wait for whoever waits.
        let mut in_replication = 0;
        for (_, outcome) in &failure.others {
            match outcome {
                RankOutcome::Comm(CommError::RankLost { lost, key, .. }) => {
                    assert_eq!((*lost, key.layer), (rank, 1), "{failure}");
                    in_replication += usize::from(key.op == op);
                }
                outcome => panic!("{outcome}: {failure}"),
            }
        }
        assert!(in_replication > 0, "{failure}");
    }
}

#[test]
fn an_early_return() {
    for failure in fails_soon(|comm| {
        let rank = comm.rank();
        let model = Model::new(comm, 3, ParallelOptions::default());
        if rank != 3 {
            return model.step(|_| true);
        }
        let x = Tensor::<2>::ones([5, WIDTH], &Device::flex().autodiff());
        model.layers[0].forward(x);
        await_others(&**model.ep.comm(), Key::new(Op::Count, 0, 1));
    }) {
        assert_eq!(failure.rank, 3);
        assert_eq!(failure.cause, RankOutcome::Returned);
        let text = failure.to_string();
        assert!(
            text.starts_with("rank 3 returned early; meanwhile rank 0 was in count"),
            "{text}"
        );
        assert_waited_in(&failure, Op::Count, 1);
    }
}

/// A rank that does not call a layer: whoever gives up first says whom it waited for, in what, and
/// what that rank did instead.
#[test]
fn a_skipped_layer() {
    let timeout = Duration::from_secs(2);
    let start = Instant::now();
    let failure = failure(run_ranks(RANKS, options(timeout, Timing::Wall), |comm| {
        let rank = comm.rank();
        Model::new(comm, 3, ParallelOptions::default()).step(|layer| (rank, layer) != (2, 1));
    }));
    let took = start.elapsed();
    assert!(took < TIMEOUT / 8, "took {took:?}");
    let RankOutcome::Comm(CommError::Timeout {
        rank,
        waiting_for,
        key,
        unclaimed,
        ..
    }) = &failure.cause
    else {
        panic!("{failure}");
    };
    let (waited, instead) = match rank {
        2 => (Key::new(Op::Count, 0, 2), Key::new(Op::Count, 0, 1)),
        _ => (Key::new(Op::Count, 0, 1), Key::new(Op::Count, 0, 2)),
    };
    assert_eq!((failure.rank, *key), (*rank, waited));
    assert!((*rank == 2) != (*waiting_for == 2), "{failure}");
    assert_eq!(*unclaimed, [instead], "{failure}");
    let text = failure.to_string();
    let expected = format!(
        "rank {rank} failed: rank {rank} waited 2s for rank {waiting_for} in {waited} and gave \
         up; it did send {instead}"
    );
    assert!(text.starts_with(&expected), "{text}");
}

/// A rank that has no backward pass keeps the others waiting, and they say for what.
#[test]
fn a_rank_without_a_backward_pass() {
    let timeout = Duration::from_secs(2);
    let failure = failure(run_ranks(2, options(timeout, Timing::Wall), |comm| {
        let model = Model::new(comm.clone(), 1, ParallelOptions::default());
        if comm.rank() == 1 {
            let x = Tensor::<2>::ones([5, WIDTH], &Device::flex().autodiff());
            model.layers[0].forward(x);
            // Alive, until the other one gives up.
            let _ = comm.recv(0, Key::new(Op::Custom(1), 0, 0));
            let _ = comm.recv(0, Key::new(Op::Custom(1), 0, 0));
        } else {
            model.step(|_| true);
        }
    }));
    let text = failure.to_string();
    assert_eq!(failure.rank, 0, "{text}");
    let expected = "rank 0 failed: rank 0 waited 2s for rank 1 in combine backward (layer 0, micro-batch 0) and gave up";
    assert!(text.starts_with(expected), "{text}");
}

/// Replica memory is that of R experts, whatever the number of layers and passes.
#[test]
fn replica_memory_does_not_grow_with_layers() {
    let expert_bytes = 3 * WIDTH * 4 * size_of::<f32>();
    for ranks in [2, RANKS] {
        for slots in [1, 2] {
            let peaks = [1, 6].map(|layers| {
                run_ranks(ranks, options(TIMEOUT, Timing::Wall), |comm| {
                    let options = ParallelOptions {
                        balance: Balance::Exact,
                        slots,
                        ..Default::default()
                    };
                    let model = Model::new(comm, layers, options).heated();
                    for _ in 0..2 {
                        model.step(|_| true);
                    }
                    let stats = model.ep.take_stats();
                    assert_eq!(stats.len(), 2 * layers as usize);
                    assert!(stats.iter().all(|stats| !stats.replicas.is_empty()));
                    model.ep.replica_bytes()
                })
                .expect("all ranks")
            });
            assert_eq!(peaks[0], peaks[1], "{ranks} ranks, {slots} slots");
            // Rank 0 is home of hot experts and hosts none; some others fill their slots.
            assert_eq!(peaks[1][0], 0);
            assert_eq!(peaks[1].iter().copied().max(), Some(slots * expert_bytes));
        }
    }
    // Nothing to balance, or nobody to balance it: no memory.
    for (balance, slots) in [(Balance::None, 2), (Balance::Exact, 0)] {
        let peaks = run_ranks(2, options(TIMEOUT, Timing::Wall), |comm| {
            let options = ParallelOptions {
                balance,
                slots,
                ..Default::default()
            };
            let model = Model::new(comm, 2, options).heated();
            model.step(|_| true);
            model.ep.replica_bytes()
        });
        assert_eq!(peaks.expect("both ranks"), [0, 0]);
    }
}
