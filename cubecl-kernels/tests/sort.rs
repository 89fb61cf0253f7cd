//! Counting and sorting by expert are those of the standard library, for any number of ids and
//! experts.

mod common;

use cubecl_kernels::sort::{histogram, sort_by_expert};
use cubecl_kernels::{DeviceTensor, KernelError};
use proptest::prelude::*;
use rand::{RngExt, SeedableRng, rngs::StdRng};

/// Fails unless the device counts and sorts `ids` as the host does.
fn check(ids: &[i32], experts: usize) {
    let client = common::client();
    let tensor = DeviceTensor::from_data(&client, ids, [ids.len()]).unwrap();
    let names = |id: &i32| (*id >= 0 && (*id as usize) < experts).then_some(*id as usize);
    let mut counts = vec![0u32; experts];
    for id in ids.iter().filter_map(names) {
        counts[id] += 1;
    }
    let mut offsets = vec![0u32];
    for count in &counts {
        offsets.push(offsets.last().unwrap() + count);
    }
    let mut order: Vec<u32> = (0..ids.len() as u32).collect();
    order.sort_by_key(|i| names(&ids[*i as usize]).unwrap_or(experts));

    let what = format!("{} ids, {experts} experts", ids.len());
    let counted = histogram(&client, &tensor, experts).unwrap();
    assert_eq!(counted.read::<u32>(&client).unwrap(), counts, "{what}");
    let sorted = sort_by_expert(&client, &tensor, experts).unwrap();
    let got = sorted.offsets.read::<u32>(&client).unwrap();
    assert_eq!(got, offsets, "offsets of {what}");
    let got = sorted.order.read::<u32>(&client).unwrap();
    assert_eq!(got, order, "order of {what}");
}

fn random_ids(len: usize, experts: usize, seed: u64) -> Vec<i32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len)
        .map(|_| rng.random_range(0..experts as i32))
        .collect()
}

#[test]
fn sizes() {
    for experts in [1, 2, 3, 64, 511, 512] {
        for len in [0, 1, 2, 255, 256, 257, 1025, 5000] {
            check(&random_ids(len, experts, len as u64), experts);
        }
    }
}

#[test]
fn many_ids() {
    check(&random_ids(100_000, 256, 1), 256);
    check(&random_ids(100_000, 512, 2), 512);
}

#[test]
fn all_on_one_expert() {
    for expert in [0, 100, 255] {
        check(&vec![expert; 3000], 256);
    }
}

/// More than one pass: as many bins as there are tokens.
#[test]
fn thousands_of_bins() {
    for bins in [1023, 1024, 5000, 65_535, 70_000] {
        check(&random_ids(20_000, bins, 3), bins);
    }
    check(&vec![69_999; 100], 70_000);
}

#[test]
fn ids_that_name_no_expert_come_last() {
    check(&[3, -1, 0, 7, -1, 3, 8, 0], 8);
    check(&[-1; 600], 4);
    check(&[5, 6, -1], 0);
    let mut ids = random_ids(4000, 3000, 4);
    ids.iter_mut().step_by(7).for_each(|id| *id = -1);
    check(&ids, 2000);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn any_ids(experts in 1usize..600, ids in prop::collection::vec(-1i32..600, 0..1500)) {
        check(&ids, experts);
    }
}

#[test]
fn floats_are_no_ids() {
    let client = common::client();
    let ids = DeviceTensor::from_data(&client, &[1.0f32], [1]).unwrap();
    let error = sort_by_expert(&client, &ids, 4).unwrap_err();
    assert!(
        matches!(
            error,
            KernelError::Dtype {
                argument: "ids",
                ..
            }
        ),
        "{error}"
    );
    assert!(histogram(&client, &ids, 4).is_err());
}
