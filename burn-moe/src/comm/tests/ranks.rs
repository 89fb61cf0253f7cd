//! How ranks are run.

use std::sync::Mutex;

use super::*;

#[test]
fn results_come_in_rank_order_and_closures_borrow() {
    let names = Mutex::new(Vec::new());
    let results = run_ranks(4, patient(), |comm| {
        let name = std::thread::current().name().map(str::to_owned);
        names.lock().unwrap().push(name.unwrap());
        (comm.rank(), comm.size())
    });
    assert_eq!(results.unwrap(), [(0, 4), (1, 4), (2, 4), (3, 4)]);
    let mut names = names.into_inner().unwrap();
    names.sort();
    assert_eq!(names, ["rank 0", "rank 1", "rank 2", "rank 3"]);
}

#[test]
fn each_rank_has_its_own_pool() {
    for threads_per_rank in [1, 3] {
        let options = RankOptions {
            threads_per_rank,
            ..patient()
        };
        run_ranks(2, options, |comm| {
            assert_eq!(rayon::current_num_threads(), threads_per_rank);
            let own = format!("rank {}", comm.rank());
            let seen = rayon::broadcast(|_| std::thread::current().name().unwrap().to_owned());
            assert!(seen.iter().all(|name| name.starts_with(&own)), "{seen:?}");
        })
        .unwrap();
    }
}

#[test]
fn deep_stacks_fit() {
    #[inline(never)]
    fn deep(left: usize) -> u64 {
        let frame = std::hint::black_box([left as u64; 128]);
        match left {
            0 => frame[0],
            _ => deep(left - 1) + frame[1] - left as u64,
        }
    }
    // More than the 2 MiB that threads get by default.
    let results = run_ranks(2, patient(), |_| deep(3 << 10));
    assert_eq!(results.unwrap(), [0; 2]);
}

#[test]
fn nothing_to_run_is_a_typed_error() {
    let error = run_ranks(0, patient(), |_| ()).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the number of ranks is 0, allowed is 1 or more"
    );
    let options = RankOptions {
        threads_per_rank: 0,
        ..patient()
    };
    let error = run_ranks(1, options, |_| ()).unwrap_err();
    assert!(matches!(
        error,
        RanksError::Invalid {
            field: "threads_per_rank",
            value: 0,
            ..
        }
    ));
}

#[test]
fn keys_print_what_they_mean() {
    assert_eq!(
        key(Op::Dispatch).to_string(),
        "dispatch (layer 3, micro-batch 17)"
    );
    assert_eq!(
        key(Op::Custom(4)).with_part(2).to_string(),
        "custom operation 4 (layer 3, micro-batch 17, part 2)"
    );
    assert_eq!(
        key(Op::Dispatch).with_part(2).with_op(Op::DispatchBackward),
        key(Op::DispatchBackward)
    );
}
