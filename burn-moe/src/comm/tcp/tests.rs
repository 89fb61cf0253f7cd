//! Ranks over real connections, as threads of the test.

use std::net::TcpListener;
use std::thread;

use super::*;

fn connect(launch: &Launch, timeout: Duration) -> Result<TcpCommunicator, ConnectError> {
    TcpCommunicator::connect(launch, timeout, Arc::new(Monotonic::default()))
}

fn launch(rank: usize, world_size: usize, master_port: u16) -> Launch {
    Launch {
        rank,
        world_size,
        local_rank: rank,
        master_address: "127.0.0.1".into(),
        master_port,
        secret: Some("of the test".into()),
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

const PATIENT: Duration = Duration::from_secs(20);
/// Is waited for, and must let all ranks start on a busy machine.
const IMPATIENT: Duration = Duration::from_secs(1);

/// Runs `f` as every rank; the results by rank.
fn try_ranks<R: Send>(
    size: usize,
    timeout: Duration,
    f: impl Fn(Arc<dyn Communicator>) -> Result<R, CommError> + Sync,
) -> Vec<Result<R, RanksError>> {
    let port = free_port();
    let options = RankOptions {
        timeout,
        ..Default::default()
    };
    thread::scope(|scope| {
        // Rank 0 last: the others have to wait until it listens.
        let threads: Vec<_> = (0..size)
            .rev()
            .map(|rank| {
                let (f, options) = (&f, options.clone());
                scope.spawn(move || try_run_tcp(&launch(rank, size, port), size, options, f))
            })
            .collect();
        let mut results: Vec<_> = threads.into_iter().map(|t| t.join().unwrap()).collect();
        results.reverse();
        results
    })
}

fn ranks<R: Send>(
    size: usize,
    timeout: Duration,
    f: impl Fn(Arc<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    let results = try_ranks(size, timeout, |comm| Ok(f(comm)));
    results.into_iter().map(|result| result.unwrap()).collect()
}

fn key(op: Op, step: u64) -> Key {
    Key::new(op, step, 3)
}

#[test]
fn collectives_are_right() {
    for size in [1, 2, 3, 5] {
        ranks(size, PATIENT, |comm| {
            let rank = comm.rank();
            // Uneven, and some empty.
            let part = |from: usize, to: usize| vec![(from * 16 + to) as u8; (from * to) % 5];
            let parts = (0..size).map(|to| part(rank, to).into()).collect();
            let got = comm.all_to_all(key(Op::AllToAll, 0), parts).unwrap();
            for (from, got) in got.iter().enumerate() {
                assert_eq!(got[..], part(from, rank)[..]);
            }
            let mut sums = [rank as f32 + 0.5, 1.0];
            comm.all_reduce_sum_f32(key(Op::AllReduce, 0), &mut sums)
                .unwrap();
            let expected = (0..size).map(|r| r as f32 + 0.5).sum::<f32>();
            assert_eq!(sums, [expected, size as f32]);
            comm.barrier(key(Op::Barrier, 0)).unwrap();
        });
    }
}

#[test]
fn messages_come_by_key_in_the_order_sent() {
    ranks(2, PATIENT, |comm| {
        let other = 1 - comm.rank();
        // Larger than the buffers of a connection: sending must not wait for the other side.
        let large: Bytes = vec![comm.rank() as u8; 40 << 20].into();
        comm.send(other, key(Op::Dispatch, 0), large).unwrap();
        for i in 0..100u8 {
            comm.send(other, key(Op::Count, 1), vec![i].into()).unwrap();
        }
        for i in 0..100u8 {
            assert_eq!(comm.recv(other, key(Op::Count, 1)).unwrap()[..], [i]);
        }
        let large = comm.recv(other, key(Op::Dispatch, 0)).unwrap();
        assert!(large.len() == 40 << 20 && large.iter().all(|b| *b == other as u8));
    });
}

#[test]
fn what_was_sent_before_returning_is_delivered() {
    let results = ranks(2, PATIENT, |comm| {
        if comm.rank() == 0 {
            comm.send(1, key(Op::Count, 0), vec![7].into()).unwrap();
            return None;
        }
        let first = comm.recv(0, key(Op::Count, 0)).unwrap();
        assert_eq!(first[..], [7]);
        Some(comm.recv(0, key(Op::Count, 1)).unwrap_err())
    });
    let Some(CommError::RankLost { lost, reason, .. }) = &results[1] else {
        panic!("{:?}", results[1]);
    };
    assert_eq!((*lost, reason.as_str()), (0, "returned early"));
}

#[test]
fn a_failure_reaches_all_with_its_cause() {
    let results = try_ranks(3, PATIENT, |comm| {
        if comm.rank() == 2 {
            std::panic::resume_unwind(Box::new("of rank 2"));
        }
        // Rank 1 waits for rank 0, which is fine: the group is down all the same.
        comm.recv(1 - comm.rank(), key(Op::Dispatch, 9)).map(drop)
    });
    for (rank, result) in results.into_iter().enumerate() {
        let Err(RanksError::Failed(failure)) = result else {
            panic!("rank {rank}: {result:?}");
        };
        assert_eq!(failure.rank, 2, "{failure}");
        assert!(
            failure.cause.to_string().contains("panicked: of rank 2"),
            "{failure}"
        );
        let waited = "dispatch (layer 3, micro-batch 9)";
        assert!(
            rank == 2 || failure.to_string().contains(waited),
            "{failure}"
        );
    }
}

#[test]
fn a_connection_that_breaks_is_a_loss() {
    let port = free_port();
    thread::scope(|scope| {
        scope.spawn(move || {
            // What the system does for a process that is killed.
            let comm = connect(&launch(1, 2, port), PATIENT).unwrap();
            let peer = comm.peers[0].as_ref().unwrap();
            peer.stream.shutdown(Shutdown::Both).unwrap();
        });
        let comm = connect(&launch(0, 2, port), PATIENT).unwrap();
        match comm.recv(1, key(Op::Combine, 2)) {
            Err(CommError::RankLost {
                lost: 1, reason, ..
            }) => {
                assert_eq!(reason, "its process ended");
            }
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn a_silent_rank_is_named() {
    ranks(2, IMPATIENT, |comm| {
        if comm.rank() == 1 {
            for batch in [5, 7] {
                comm.send(0, key(Op::Count, batch), Bytes::new()).unwrap();
            }
            thread::sleep(IMPATIENT * 4);
            return;
        }
        // What was sent before this has arrived, too.
        comm.recv(1, key(Op::Count, 7)).unwrap();
        match comm.recv(1, key(Op::Count, 6)) {
            Err(CommError::Timeout {
                waiting_for: 1,
                unclaimed,
                ..
            }) => assert_eq!(unclaimed, [key(Op::Count, 5)]),
            other => panic!("{other:?}"),
        }
    });
}

#[test]
fn ranks_that_do_not_fit_are_refused() {
    // Nobody comes.
    let error = connect(&launch(0, 2, free_port()), IMPATIENT)
        .err()
        .unwrap();
    assert!(
        matches!(
            error,
            ConnectError::Timeout {
                rank: 0,
                waiting_for: 1,
                ..
            }
        ),
        "{error}"
    );
    let error = connect(&launch(1, 2, free_port()), IMPATIENT)
        .err()
        .unwrap();
    assert!(
        matches!(
            error,
            ConnectError::Timeout {
                rank: 1,
                waiting_for: 0,
                ..
            }
        ),
        "{error}"
    );
    // Several machines without a secret.
    let mut far = launch(1, 2, 1);
    (far.master_address, far.secret) = ("10.0.0.1".into(), None);
    let error = connect(&far, IMPATIENT).err().unwrap();
    assert!(
        matches!(
            error,
            ConnectError::NoSecret {
                variable: "BURN_MOE_SECRET"
            }
        ),
        "{error}"
    );
    let pair = |first: Launch, second: Launch| {
        thread::scope(|scope| {
            let first = scope.spawn(move || connect(&first, IMPATIENT).err());
            let second = scope.spawn(move || connect(&second, IMPATIENT).err());
            [first.join().unwrap(), second.join().unwrap()]
        })
    };
    // A stranger: told so, and ignored.
    let port = free_port();
    let mut stranger = launch(1, 2, port);
    stranger.secret = Some("guessed".into());
    let [host, guest] = pair(launch(0, 2, port), stranger);
    assert!(
        matches!(host, Some(ConnectError::Timeout { waiting_for: 1, .. })),
        "{host:?}"
    );
    assert!(
        guest
            .as_ref()
            .is_some_and(|e| e.to_string().contains("secret")),
        "{guest:?}"
    );
    // Another number of ranks.
    let port = free_port();
    let [host, guest] = pair(launch(0, 2, port), launch(1, 3, port));
    assert!(
        matches!(host, Some(ConnectError::WorldSize { expected: 2, .. })),
        "{host:?}"
    );
    assert!(guest.is_some());
    // Twice the same rank.
    let port = free_port();
    let results = thread::scope(|scope| {
        let threads = [0, 1, 1]
            .map(|rank| scope.spawn(move || connect(&launch(rank, 3, port), IMPATIENT).err()));
        threads.map(|thread| thread.join().unwrap())
    });
    assert_eq!(results[0], Some(ConnectError::Twice { rank: 1 }));
}

#[test]
fn garbage_on_the_port_does_not_stop_the_ranks() {
    let port = free_port();
    thread::scope(|scope| {
        scope.spawn(move || {
            let mut stranger = loop {
                match TcpStream::connect(("127.0.0.1", port)) {
                    Ok(stream) => break stream,
                    Err(_) => thread::sleep(Duration::from_millis(1)),
                }
            };
            stranger
                .write_all(b"GET / HTTP/1.1\r\nHost: someone-with-a-long-name\r\n\r\n")
                .unwrap();
        });
        let threads = [0, 1].map(|rank| {
            scope.spawn(move || {
                if rank == 1 {
                    // The stranger is first.
                    thread::sleep(IMPATIENT / 2);
                }
                let comm = connect(&launch(rank, 2, port), PATIENT).unwrap();
                comm.barrier(key(Op::Barrier, 1)).unwrap();
            })
        });
        let _ = threads.map(|thread| thread.join().unwrap());
    });
}
