//! Whatever a rank does, the others end soon and say why.

use std::panic::catch_unwind;
use std::time::Instant;

use super::*;

/// Runs `f` on four ranks with a timeout no test waits for, on both clocks: the failure must come long before.
fn soon<R: Send>(f: impl Fn(Comm) -> Result<R, CommError> + Sync) -> RanksFailure {
    let run = |timing| {
        let options = RankOptions {
            timing,
            timeout: Duration::from_secs(60),
            ..Default::default()
        };
        let start = Instant::now();
        let failure = failure(try_run_ranks(4, options, &f));
        assert!(start.elapsed() < Duration::from_secs(20));
        failure
    };
    run(Timing::CriticalPath);
    run(Timing::Wall)
}

#[test]
fn a_panic_ends_the_collectives_of_the_others() {
    let failure = soon(|comm| {
        if comm.rank() == 2 {
            panic!("boom {}", comm.rank());
        }
        comm.all_gather(key(Op::Count), Bytes::new())
    });
    assert_eq!(failure.rank, 2);
    assert_eq!(failure.cause, RankOutcome::Panicked("boom 2".into()));
    let ranks: Vec<_> = failure.others.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, [0, 1, 3]);
    for (rank, outcome) in &failure.others {
        let lost = CommError::RankLost {
            lost: 2,
            reason: "panicked: boom 2".into(),
            rank: *rank,
            key: key(Op::Count),
        };
        assert_eq!(*outcome, RankOutcome::Comm(lost));
    }
    assert_eq!(
        failure.to_string(),
        "rank 2 panicked: boom 2; meanwhile rank 0 was in count (layer 3, micro-batch 17), \
         rank 1 was in count (layer 3, micro-batch 17), rank 3 was in count (layer 3, micro-batch 17)"
    );
}

#[test]
fn an_error_ends_the_collectives_of_the_others() {
    let failure = soon(|comm| {
        if comm.rank() == 1 {
            comm.send(9, key(Op::Dispatch), Bytes::new())?;
        }
        comm.all_to_all(key(Op::Combine), vec![Bytes::new(); 4])
    });
    assert_eq!(failure.rank, 1);
    assert_eq!(
        failure.to_string().split(';').next().unwrap(),
        "rank 1 failed: dispatch (layer 3, micro-batch 17): there is no rank 9, ranks are 0 to 3"
    );
}

#[test]
fn an_early_return_is_the_cause_when_someone_waits() {
    let failure = soon(|comm| match comm.rank() {
        3 => Ok(()),
        _ => comm.all_reduce_sum_f32(key(Op::AllReduce), &mut [1.0; 8]),
    });
    assert_eq!(failure.rank, 3);
    assert_eq!(failure.cause, RankOutcome::Returned);
    let text = failure.to_string();
    assert!(
        text.starts_with("rank 3 returned early; meanwhile rank 0 was in all-reduce (layer 3"),
        "{text}"
    );
}

#[test]
fn a_return_does_not_matter_to_those_who_do_not_wait() {
    let results = run_ranks(3, patient(), |comm| match comm.rank() {
        0 => {}
        rank => {
            let peer = 3 - rank;
            // Rank 0 may be gone: what is sent to it is dropped.
            comm.send(0, key(Op::Telemetry), Bytes::new()).unwrap();
            for _ in 0..100 {
                comm.send(peer, key(Op::Dispatch), Bytes::new()).unwrap();
                comm.recv(peer, key(Op::Dispatch)).unwrap();
            }
        }
    });
    results.unwrap();
}

#[test]
fn a_chain_of_waits_names_its_end() {
    let failure = soon(|comm| match comm.rank() {
        3 => panic!("the end"),
        rank => comm.recv(rank + 1, key(Op::Replicate)),
    });
    assert_eq!(failure.rank, 3);
    for (_, outcome) in &failure.others {
        assert!(matches!(
            outcome,
            RankOutcome::Comm(CommError::RankLost { lost: 3, .. })
        ));
    }
    let failure = soon(|comm| match comm.rank() {
        3 => Ok(Bytes::new()),
        rank => comm.recv(rank + 1, key(Op::Replicate)),
    });
    assert_eq!((failure.rank, failure.cause), (3, RankOutcome::Returned));
}

#[test]
fn consequences_are_recognised_however_they_come() {
    #[derive(Debug, thiserror::Error)]
    #[error("step failed")]
    struct Step(#[source] CommError);

    for _ in 0..20 {
        let result = try_run_ranks(4, patient(), |comm| match comm.rank() {
            0 => {
                std::thread::sleep(Duration::from_millis(1));
                panic!("the cause")
            }
            1 => comm.recv(0, key(Op::Count)).map_err(Step),
            2 => Ok(comm.recv(0, key(Op::Count)).unwrap()),
            _ => comm
                .recv(0, key(Op::Count))
                .or_else(|error| fail(error.clone())),
        });
        let failure = failure(result);
        assert_eq!(failure.rank, 0);
        assert_eq!(failure.cause, RankOutcome::Panicked("the cause".into()));
        let (_, wrapped) = &failure.others[0];
        assert_eq!(
            wrapped.to_string(),
            "failed: step failed: rank 0 was lost (panicked: the cause) while rank 1 was in \
             count (layer 3, micro-batch 17)"
        );
        for (_, outcome) in &failure.others[1..] {
            assert!(matches!(
                outcome,
                RankOutcome::Comm(CommError::RankLost { lost: 0, .. })
            ));
        }
    }
}

#[test]
fn what_was_sent_before_the_loss_is_delivered() {
    let failure = soon(|comm| match comm.rank() {
        0 => {
            comm.send(1, key(Op::Dispatch), vec![42].into())?;
            panic!("after sending")
        }
        1 => {
            // Fails once rank 0 is gone.
            let lost = comm.recv(0, key(Op::Combine)).unwrap_err();
            assert!(matches!(lost, CommError::RankLost { lost: 0, .. }));
            let late = comm.send(2, key(Op::Combine), Bytes::new()).unwrap_err();
            assert!(matches!(late, CommError::RankLost { lost: 0, .. }));
            assert_eq!(comm.recv(0, key(Op::Dispatch))?, vec![42]);
            Ok(())
        }
        _ => Ok(()),
    });
    assert_eq!(failure.rank, 0);
    assert_eq!(failure.others[0].1, RankOutcome::Returned);
}

#[test]
fn a_timeout_names_the_silent_rank_and_what_it_sent_instead() {
    for timing in [Timing::Wall, Timing::CriticalPath] {
        let options = RankOptions {
            timing,
            // Both ranks must have started by then.
            timeout: Duration::from_secs(2),
            ..Default::default()
        };
        // Two ranks that disagree on what comes first.
        let failure = failure(try_run_ranks(2, options, |comm| {
            let order = match comm.rank() {
                0 => [Op::Dispatch, Op::Combine],
                _ => [Op::Combine, Op::Dispatch],
            };
            for op in order {
                comm.all_gather(key(op), Bytes::new())?;
            }
            Ok::<_, CommError>(())
        }));
        let RankOutcome::Comm(CommError::Timeout {
            rank,
            waiting_for,
            key: waited,
            unclaimed,
            ..
        }) = &failure.cause
        else {
            panic!("{failure}");
        };
        assert_eq!((*rank, *waiting_for), (failure.rank, 1 - failure.rank));
        let ops = [Op::Dispatch, Op::Combine];
        assert_eq!(*waited, key(ops[*rank]));
        assert_eq!(*unclaimed, [key(ops[*waiting_for])]);
    }
}

#[test]
fn a_timeout_is_readable() {
    let failure = failure(try_run_ranks(2, impatient(), |comm| match comm.rank() {
        0 => comm.recv(1, key(Op::Dispatch)).map(|_| ()),
        // Alive, but not talking to rank 0, until that gives up.
        _ => loop {
            match comm.recv(0, key(Op::Combine).with_part(2)) {
                Err(CommError::Timeout { .. }) => {}
                Err(CommError::RankLost { .. }) => return Ok(()),
                other => panic!("{other:?}"),
            }
        },
    }));
    assert_eq!(
        failure.to_string(),
        "rank 0 failed: rank 0 waited 100ms for rank 1 in dispatch (layer 3, micro-batch 17) and gave up"
    );
}

#[test]
fn bad_arguments_are_typed_errors() {
    let comm = solo();
    let dispatch = key(Op::Dispatch);
    let invalid = CommError::InvalidRank {
        rank: 1,
        size: 1,
        key: dispatch,
    };
    assert_eq!(comm.send(1, dispatch, Bytes::new()), Err(invalid.clone()));
    assert_eq!(comm.recv(1, dispatch), Err(invalid.clone()));
    assert_eq!(comm.broadcast(dispatch, 1, None), Err(invalid));
    assert_eq!(
        comm.broadcast(dispatch, 0, None),
        Err(CommError::RootWithoutPayload {
            root: 0,
            key: dispatch
        })
    );
    let error = comm
        .all_to_all(dispatch, vec![Bytes::new(); 2])
        .unwrap_err();
    assert_eq!(
        error.to_string(),
        "dispatch (layer 3, micro-batch 17): parts of rank 0: expected 1, got 2"
    );
}

#[test]
fn an_all_reduce_of_unequal_lengths_fails_and_changes_nothing() {
    let failure = soon(|comm| {
        let mut data = vec![1.0; 8 + comm.rank() / 3];
        let result = comm.all_reduce_sum_f64(key(Op::AllReduce), &mut data);
        assert!(data.iter().all(|x| *x == 1.0));
        result
    });
    assert!(matches!(
        failure.cause,
        RankOutcome::Comm(CommError::Mismatch { .. })
    ));
}

#[test]
fn fail_unwinds_with_the_typed_error() {
    let error = CommError::RootWithoutPayload {
        root: 0,
        key: key(Op::Broadcast),
    };
    let thrown = error.clone();
    let payload = catch_unwind(move || fail(thrown)).unwrap_err();
    assert_eq!(*payload.downcast::<CommError>().unwrap(), error);
}

#[test]
fn errors_can_be_sent_between_threads() {
    fn check<T: std::error::Error + Send + Sync + Clone + 'static>() {}
    check::<CommError>();
    check::<RanksError>();
}
