//! The clocks, with a time that only the tests move: the numbers are exact.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use super::*;

#[derive(Debug, Default)]
struct Fake(AtomicU64);

impl TimeSource for Fake {
    fn now(&self) -> Duration {
        ms(self.0.load(Ordering::SeqCst))
    }
}

impl Fake {
    /// On the critical path only one rank computes, so only its clock sees this.
    fn compute(&self, millis: u64) {
        self.0.fetch_add(millis, Ordering::SeqCst);
    }
}

fn ms(millis: u64) -> Duration {
    Duration::from_millis(millis)
}

/// Runs ranks with a fake time and returns each rank's clock at its end, in milliseconds.
fn clocks(size: usize, timing: Timing, f: impl Fn(Comm, &Fake) + Sync) -> Vec<u64> {
    let time = Arc::new(Fake::default());
    let options = RankOptions {
        timing,
        time_source: Some(time.clone()),
        ..patient()
    };
    let run = |comm: Comm| {
        f(comm.clone(), &time);
        comm.clock().as_millis() as u64
    };
    run_ranks(size, options, run).unwrap()
}

#[test]
fn a_step_takes_the_slowest_rank_of_each_phase() {
    let phases = [[5, 1, 9, 2], [1, 1, 1, 8], [0, 7, 3, 0], [4, 4, 4, 4]];
    let got = clocks(4, Timing::CriticalPath, |comm, time| {
        let mut expected = 0;
        for (step, phase) in phases.iter().enumerate() {
            time.compute(phase[comm.rank()]);
            let key = Key::new(Op::Dispatch, step as u64, 0);
            comm.all_to_all(key, vec![Bytes::new(); 4]).unwrap();
            expected += phase.iter().max().unwrap();
            assert_eq!(comm.clock(), ms(expected));
        }
    });
    assert_eq!(got, [9 + 8 + 7 + 4; 4]);
}

#[test]
fn only_what_a_rank_waits_for_moves_its_clock() {
    let got = clocks(4, Timing::CriticalPath, |comm, time| match comm.rank() {
        0 => {
            time.compute(5);
            comm.send(1, key(Op::Dispatch), Bytes::new()).unwrap();
            time.compute(100);
        }
        1 => {
            time.compute(2);
            comm.recv(0, key(Op::Dispatch)).unwrap();
            time.compute(3);
            comm.send(2, key(Op::Dispatch), Bytes::new()).unwrap();
        }
        // The message is older than the receiver.
        2 => {
            time.compute(50);
            comm.recv(1, key(Op::Dispatch)).unwrap();
        }
        _ => time.compute(1),
    });
    assert_eq!(got, [105, 8, 50, 1]);
}

#[test]
fn one_rank_computes_at_a_time() {
    let computing = AtomicUsize::new(0);
    let compute = || {
        assert_eq!(computing.fetch_add(1, Ordering::SeqCst), 0);
        std::thread::sleep(Duration::from_micros(50));
        assert_eq!(computing.fetch_sub(1, Ordering::SeqCst), 1);
    };
    clocks(8, Timing::CriticalPath, |comm, _| {
        for _ in 0..20 {
            compute();
            comm.exclude(compute);
            comm.barrier(key(Op::Barrier)).unwrap();
        }
    });
}

#[test]
fn excluded_sections_do_not_count() {
    let got = clocks(2, Timing::CriticalPath, |comm, time| {
        time.compute(1 + comm.rank() as u64);
        comm.exclude(|| {
            time.compute(1000);
            comm.exclude(|| time.compute(1000));
            time.compute(1000);
            // A report may travel between ranks.
            comm.barrier(key(Op::Telemetry)).unwrap();
            time.compute(1000);
        });
        time.compute(10);
    });
    assert_eq!(got, [11, 12]);
    let got = clocks(1, Timing::Wall, |comm, time| {
        time.compute(1);
        assert_eq!(comm.exclude(|| time.compute(1000)), ());
        time.compute(2);
    });
    assert_eq!(got, [3]);
}

#[test]
fn a_panic_in_an_excluded_section_resumes_the_clock() {
    let got = clocks(1, Timing::CriticalPath, |comm, time| {
        let thrown = catch_unwind(AssertUnwindSafe(|| {
            comm.exclude(|| {
                time.compute(1000);
                panic!("inside")
            })
        }));
        assert!(thrown.is_err());
        time.compute(4);
        // One too many does nothing.
        comm.resume_clock();
        time.compute(4);
    });
    assert_eq!(got, [8]);
}

#[test]
fn the_wall_clock_is_the_time_since_the_start() {
    let got = clocks(3, Timing::Wall, |comm, time| {
        time.compute(7);
        comm.barrier(key(Op::Barrier)).unwrap();
    });
    assert_eq!(got, [21; 3]);
}

#[test]
fn the_system_clock_moves() {
    for timing in [Timing::Wall, Timing::CriticalPath] {
        let options = RankOptions {
            timing,
            ..patient()
        };
        let clocks = run_ranks(2, options, |comm| {
            std::thread::sleep(ms(5));
            comm.clock()
        });
        assert!(clocks.unwrap().iter().all(|clock| *clock >= ms(5)));
    }
}

#[test]
fn a_rank_that_leaves_hands_the_machine_over() {
    // More ranks than turns in flight, leaving at different times and in different ways.
    let options = RankOptions {
        timing: Timing::CriticalPath,
        ..patient()
    };
    let failure = failure(run_ranks(8, options, |comm| {
        for round in 0..comm.rank() {
            std::thread::yield_now();
            let peer = comm.rank() ^ 1;
            if round < peer {
                comm.send(peer, key(Op::Dispatch), Bytes::new()).unwrap();
                comm.recv(peer, key(Op::Dispatch)).unwrap();
            }
        }
        assert_ne!(comm.rank(), 7, "the last one");
    }));
    assert_eq!(failure.rank, 7);
}
