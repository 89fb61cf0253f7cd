//! What becomes of the others when a rank or its engine fails: nobody waits for ever, and the error says who and where.

use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;

use super::memory::{Fault, run_linked};
use super::{KEY, exchange, link, rows_arrive, start};
use crate::comm::nccl::{Lane, plan};
use crate::comm::{
    CommError, Communicator, Key, Op, RankOptions, RankOutcome, RanksError, RanksFailure, fail,
};

fn options(timeout: Duration) -> RankOptions {
    RankOptions {
        timeout,
        ..Default::default()
    }
}

/// Is waited for, and must let all ranks start on a busy machine.
const SHORT: Duration = Duration::from_secs(1);
const LONG: Duration = Duration::from_secs(60);

/// A row from everyone to everyone.
fn all(comm: &Arc<dyn Communicator>, key: Key) -> Result<(), CommError> {
    let ones = vec![1; comm.size()];
    let round = plan::all_to_all(&ones, &ones, 4);
    let mut buffers = [vec![1; 4 * comm.size()], vec![0; 4 * comm.size()]];
    exchange(comm, Lane::Rows, key, &[round], &mut buffers)
}

fn failure(
    timeout: Duration,
    fault: impl Fn(usize) -> Option<Fault> + Sync,
    f: impl Fn(Arc<dyn Communicator>) + Sync,
) -> RanksFailure {
    let start = Instant::now();
    let error = run_linked(3, options(timeout), 1, fault, f).expect_err("a failure");
    assert!(
        start.elapsed() < Duration::from_secs(20),
        "too long: {error}"
    );
    match error {
        RanksError::Failed(failure) => *failure,
        error => panic!("{error}"),
    }
}

#[test]
fn a_rank_that_panics_ends_the_others_waits() {
    let failure = failure(
        LONG,
        |_| None,
        |comm| {
            all(&comm, KEY).unwrap();
            let ready = Key::new(Op::Custom(0), 0, 0);
            if comm.rank() == 1 {
                // A loss ends every wait: the others must have left the first exchange.
                for other in [0, 2] {
                    comm.recv(other, ready).unwrap();
                }
                std::panic::resume_unwind(Box::new("out of memory".to_owned()));
            }
            comm.send(1, ready, Bytes::new()).unwrap();
            all(&comm, KEY).unwrap_or_else(|error| fail(error));
        },
    );
    assert_eq!(failure.rank, 1);
    assert_eq!(failure.cause, RankOutcome::Panicked("out of memory".into()));
    for (rank, outcome) in &failure.others {
        let RankOutcome::Comm(CommError::RankLost { lost: 1, key, .. }) = outcome else {
            panic!("rank {rank}: {outcome}");
        };
        assert_eq!(key.op, KEY.op);
    }
}

#[test]
fn a_silent_rank_is_named_after_the_timeout() {
    let failure = failure(
        SHORT,
        |_| None,
        |comm| {
            if comm.rank() == 2 {
                // It is somewhere else, for longer than the others wait.
                std::thread::sleep(4 * SHORT);
                return;
            }
            all(&comm, KEY).unwrap_or_else(|error| fail(error));
        },
    );
    let text = failure.to_string();
    assert!(text.contains("for rank 2 in dispatch"), "{text}");
}

#[test]
fn an_engine_that_fails_is_told_apart_from_a_lost_rank() {
    let fault = |rank| (rank == 0).then_some(Fault::FailsAfter(1));
    let failure = failure(LONG, fault, |comm| {
        all(&comm, KEY).unwrap();
        all(&comm, KEY).unwrap_or_else(|error| fail(error));
    });
    let text = failure.to_string();
    assert_eq!(failure.rank, 0);
    let expected =
        "dispatch (layer 2, micro-batch 3): the NCCL engine failed on rank 0: the cable is cut";
    assert!(text.contains(expected), "{text}");
    // The others lost that rank, unless its rows had left before it failed.
    for (rank, outcome) in &failure.others {
        assert!(
            matches!(
                outcome,
                RankOutcome::Returned | RankOutcome::Comm(CommError::RankLost { lost: 0, .. })
            ),
            "rank {rank}: {outcome}"
        );
    }
}

#[test]
fn a_device_that_never_finishes_times_out() {
    let fault = |rank| (rank == 1).then_some(Fault::Stuck);
    let failure = failure(SHORT, fault, |comm| {
        all(&comm, KEY).unwrap_or_else(|error| fail(error));
    });
    let text = failure.to_string();
    assert!(text.contains("not done after 1s, though ranks"), "{text}");
}

/// Two ranks of which one does `a` then `b` and the other `b` then `a`, both under way at once: NCCL would hand each the
/// other's bytes. Where each waits for the other before both are under way, it ends by the timeout.
#[test]
fn another_order_is_an_error_and_not_other_bytes() {
    let failure = failure(
        SHORT,
        |_| None,
        |comm| {
            let mut keys = [Key::new(Op::Replicate, 0, 0), Key::new(Op::Replicate, 0, 1)];
            if comm.rank() == 1 {
                keys.reverse();
            }
            let ones = vec![1; comm.size()];
            let round = [plan::all_to_all(&ones, &ones, 4)];
            let mut buffers = [(); 2].map(|()| [vec![1; 12], vec![0; 12]]);
            let [first, second] = &mut buffers;
            let begin =
                |key, buffers: &mut [Vec<u8>; 2]| start(&comm, Lane::Weights, key, &round, buffers);
            let flights = begin(keys[0], first).and_then(|a| Ok((a, begin(keys[1], second)?)));
            let done = flights.and_then(|(a, b)| a.wait(&*comm).and_then(|()| b.wait(&*comm)));
            done.unwrap_or_else(|error| fail(error));
        },
    );
    let text = failure.to_string();
    let expected = ["place in the order of exchanges", "it did send replicate"];
    assert!(expected.iter().any(|it| text.contains(it)), "{text}");
}

#[test]
fn counts_that_disagree_are_an_error() {
    let failure = failure(
        LONG,
        |_| None,
        |comm| {
            let bytes = if comm.rank() == 1 { 3 } else { 4 };
            let ones = vec![1; comm.size()];
            let round = plan::all_to_all(&ones, &ones, bytes);
            let mut buffers = [vec![1; 12], vec![0; 12]];
            exchange(&comm, Lane::Rows, KEY, &[round], &mut buffers)
                .unwrap_or_else(|error| fail(error));
        },
    );
    let text = failure.to_string();
    assert!(text.contains("bytes"), "{text}");
}

#[test]
fn a_flight_that_is_dropped_ends_the_link() {
    run_linked(
        1,
        options(LONG),
        1,
        |_| None,
        |comm| {
            rows_arrive(&comm, &[vec![1]], 4, KEY);
            let round = plan::all_to_all(&[1], &[1], 4);
            let mut buffers = [vec![1; 4], vec![0; 4]];
            drop(start(&comm, Lane::Rows, KEY, &[round], &mut buffers).unwrap());
            let error = all(&comm, KEY).unwrap_err().to_string();
            assert!(error.contains("was given up"), "{error}");
            // A row of 4 bytes twice; what the broken link refused does not count.
            let traffic = link(&comm).traffic();
            assert_eq!((traffic.row_exchanges, traffic.row_bytes), (2, 8));
        },
    )
    .unwrap();
}
