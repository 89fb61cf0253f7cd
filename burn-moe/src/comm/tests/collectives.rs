//! Every collective against what a plain loop over the ranks' inputs gives.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::*;

/// What rank `from` sends to rank `to`: any rank can work it out. Sizes are uneven and often zero.
fn part(seed: u64, from: usize, to: usize) -> Bytes {
    let mut random = Random(seed ^ ((from as u64) << 32) ^ ((to as u64) << 48));
    let len = random.below(4) * random.below(40);
    random.bytes(len)
}

#[test]
fn all_to_all_transposes_uneven_parts() {
    for size in SIZES {
        let results = run_ranks(size, patient(), |comm| {
            let parts = (0..size).map(|to| part(1, comm.rank(), to)).collect();
            comm.all_to_all(key(Op::Dispatch), parts).unwrap()
        });
        for (rank, got) in results.unwrap().iter().enumerate() {
            let expected: Vec<_> = (0..size).map(|from| part(1, from, rank)).collect();
            assert_eq!(*got, expected);
        }
    }
}

#[test]
fn all_to_all_of_nothing() {
    let results = run_ranks(3, patient(), |comm| {
        comm.all_to_all(key(Op::Dispatch), vec![Bytes::new(); 3])
            .unwrap()
    });
    assert_eq!(results.unwrap(), vec![vec![Bytes::new(); 3]; 3]);
}

#[test]
fn all_gather_orders_by_rank() {
    for size in SIZES {
        let results = run_ranks(size, patient(), |comm| {
            comm.all_gather(key(Op::Count), part(2, comm.rank(), 0))
                .unwrap()
        });
        let expected: Vec<_> = (0..size).map(|from| part(2, from, 0)).collect();
        assert_eq!(results.unwrap(), vec![expected; size]);
    }
}

#[test]
fn broadcast_gives_the_roots_payload() {
    for size in SIZES {
        for root in 0..size {
            let results = run_ranks(size, patient(), |comm| {
                let payload = (comm.rank() == root).then(|| part(3, root, root));
                comm.broadcast(key(Op::Broadcast), root, payload).unwrap()
            });
            assert_eq!(results.unwrap(), vec![part(3, root, root); size]);
        }
    }
}

/// Exponents far apart, so that another order of additions gives other bits.
fn numbers(seed: u64, len: usize) -> Vec<f64> {
    let mut random = Random(seed);
    let mut number = || {
        let unit = random.next() as f64 / u64::MAX as f64 - 0.5;
        unit * 10f64.powi(random.below(12) as i32 - 6)
    };
    (0..len).map(|_| number()).collect()
}

#[test]
fn all_reduce_sums_in_rank_order_to_the_bit() {
    for size in SIZES {
        for len in [0, 1, 2, 7, 64, 1001] {
            let input = |rank: usize| numbers(rank as u64 + 1, len);
            let results = run_ranks(size, patient(), |comm| {
                let mut double = input(comm.rank());
                let mut single: Vec<f32> = double.iter().map(|x| *x as f32).collect();
                // The same key on purpose: one after the other, on all ranks.
                comm.all_reduce_sum_f32(key(Op::AllReduce), &mut single)
                    .unwrap();
                comm.all_reduce_sum_f64(key(Op::AllReduce), &mut double)
                    .unwrap();
                let single: Vec<_> = single.iter().map(|x| x.to_bits()).collect();
                let double: Vec<_> = double.iter().map(|x| x.to_bits()).collect();
                (single, double)
            });
            let (mut single, mut double) = (Vec::new(), Vec::new());
            for i in 0..len {
                let mut sum = input(0)[i];
                let mut single_sum = input(0)[i] as f32;
                for rank in 1..size {
                    sum += input(rank)[i];
                    single_sum += input(rank)[i] as f32;
                }
                single.push(single_sum.to_bits());
                double.push(sum.to_bits());
            }
            assert_eq!(results.unwrap(), vec![(single, double); size]);
        }
    }
}

#[test]
fn no_rank_leaves_a_barrier_before_all_have_entered() {
    for size in SIZES {
        let entered = AtomicUsize::new(0);
        run_ranks(size, patient(), |comm| {
            for round in 1..=20 {
                entered.fetch_add(1, Ordering::SeqCst);
                comm.barrier(key(Op::Barrier)).unwrap();
                assert!(entered.load(Ordering::SeqCst) >= round * size);
            }
        })
        .unwrap();
    }
}

#[test]
fn messages_are_found_by_key_and_not_by_arrival() {
    run_ranks(2, patient(), |comm| {
        let peer = 1 - comm.rank();
        let keys: Vec<_> = (0..6)
            .map(|i| {
                let op = [Op::Dispatch, Op::Combine][i % 2];
                Key::new(op, i as u64 / 4, 5).with_part(i as u32 / 2)
            })
            .collect();
        for (i, key) in keys.iter().enumerate() {
            comm.send(peer, *key, vec![i as u8; i].into()).unwrap();
        }
        for (i, key) in keys.iter().enumerate().rev() {
            assert_eq!(comm.recv(peer, *key).unwrap(), vec![i as u8; i]);
        }
    })
    .unwrap();
}

#[test]
fn messages_of_one_key_stay_in_order() {
    run_ranks(2, patient(), |comm| {
        let peer = 1 - comm.rank();
        for i in 0..100u8 {
            comm.send(peer, key(Op::Replicate), vec![i].into()).unwrap();
        }
        for i in 0..100u8 {
            assert_eq!(comm.recv(peer, key(Op::Replicate)).unwrap(), vec![i]);
        }
    })
    .unwrap();
}

#[test]
fn payloads_are_handed_over_without_a_copy() {
    let sent = Bytes::from(vec![7; 1000]);
    let address = sent.as_ptr() as usize;
    let results = run_ranks(3, patient(), |comm| {
        let parts = vec![sent.clone(); 3];
        let received = comm.all_to_all(key(Op::Dispatch), parts).unwrap();
        let addresses = received.iter().map(|part| part.as_ptr() as usize);
        addresses.collect::<Vec<_>>()
    });
    assert_eq!(results.unwrap(), vec![vec![address; 3]; 3]);
}

#[test]
fn random_rounds_of_everything() {
    let size = 4;
    for timing in [Timing::Wall, Timing::CriticalPath] {
        let options = RankOptions {
            timing,
            ..patient()
        };
        run_ranks(size, options, |comm| {
            let rank = comm.rank();
            // All ranks draw the same collectives; `own` makes each rank order its messages in its own way.
            let mut shared = Random(99);
            let mut own = Random(rank as u64);
            for round in 0..200 {
                let seed = shared.next();
                let mut messages: Vec<_> = (0..size)
                    .flat_map(|peer| (0..3).map(move |part| (peer, part)))
                    .collect();
                let at = |part| Key::new(Op::Replicate, round, 0).with_part(part);
                let content = |from, to, n: u32| part(seed ^ u64::from(n), from, to);
                own.shuffle(&mut messages);
                for (to, n) in &messages {
                    comm.send(*to, at(*n), content(rank, *to, *n)).unwrap();
                }
                match shared.below(4) {
                    0 => {
                        let parts = (0..size).map(|to| part(seed, rank, to)).collect();
                        let got = comm.all_to_all(key(Op::Combine), parts).unwrap();
                        let expected: Vec<_> = (0..size).map(|it| part(seed, it, rank)).collect();
                        assert_eq!(got, expected);
                    }
                    1 => {
                        let root = shared.below(size);
                        let payload = Some(part(seed, rank, rank));
                        let got = comm.broadcast(key(Op::Broadcast), root, payload);
                        assert_eq!(got.unwrap(), part(seed, root, root));
                    }
                    2 => {
                        let mut data = vec![rank as f32; shared.below(50)];
                        comm.all_reduce_sum_f32(key(Op::AllReduce), &mut data)
                            .unwrap();
                        assert!(data.iter().all(|x| *x == 6.0));
                    }
                    _ => comm.barrier(key(Op::Barrier)).unwrap(),
                }
                own.shuffle(&mut messages);
                for (from, n) in &messages {
                    let got = comm.recv(*from, at(*n)).unwrap();
                    assert_eq!(got, content(*from, rank, *n));
                }
            }
        })
        .unwrap();
    }
}

#[test]
fn two_groups_at_once_do_not_meet() {
    let run = |tag: u8| {
        let results = run_ranks(3, patient(), |comm| {
            (0..50)
                .flat_map(|_| {
                    comm.all_gather(key(Op::Count), vec![tag, comm.rank() as u8].into())
                        .unwrap()
                })
                .collect::<Vec<_>>()
        });
        for (i, payload) in results.unwrap().concat().iter().enumerate() {
            assert_eq!(*payload, vec![tag, (i % 3) as u8]);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(|| run(1));
        scope.spawn(|| run(2));
    });
}

#[test]
fn a_group_of_one_talks_to_itself() {
    let comm = solo();
    assert_eq!((comm.rank(), comm.size()), (0, 1));
    let payload = Bytes::from_static(b"x");
    let gathered = comm.all_gather(key(Op::Count), payload.clone()).unwrap();
    assert_eq!(gathered, vec![payload.clone()]);
    comm.send(0, key(Op::Dispatch), payload.clone()).unwrap();
    assert_eq!(comm.recv(0, key(Op::Dispatch)).unwrap(), payload);
    let missing = comm.recv(0, key(Op::Dispatch)).unwrap_err();
    assert!(matches!(missing, CommError::Timeout { .. }));
    comm.barrier(key(Op::Barrier)).unwrap();
}
