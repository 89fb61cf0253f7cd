//! The published targets on a sample of real routing: one micro-batch of 2048 tokens for each of 26 layers and two text
//! domains, as token copies of 64 experts (top-6). Router decisions of a 16B-class DeepSeek MoE, repacked from the results
//! of the public ESFT repository of deepseek-ai (MIT). The `plan` binary measures whole routing files.

use super::*;

const LOADS: &str = include_str!("loads.txt");

/// Mean and 95th percentile of the imbalance, and mean copies.
fn measure(name: &str, ranks: usize, slots: usize) -> (f64, f64, f64) {
    let placement = Placement::contiguous(64, ranks);
    let mut planner = planner(name).unwrap();
    let (mut plan, mut after) = (Plan::default(), Vec::new());
    let (mut imbalances, mut copies) = (Vec::new(), 0);
    for line in LOADS.lines() {
        let mut load = LoadMatrix::new(ranks, 64);
        for (e, tokens) in line.split(' ').enumerate() {
            let tokens: u32 = tokens.parse().unwrap();
            for source in 0..ranks {
                let share = |s: usize| tokens as usize * s / ranks;
                load.row_mut(source)[e] = (share(source + 1) - share(source)) as u32;
            }
        }
        planner.plan(&load, &placement, slots, &mut plan);
        plan.rank_load(&load, &placement, &mut after);
        imbalances.push(imbalance(&after));
        copies += plan.replicas.len();
    }
    imbalances.sort_by(f64::total_cmp);
    let n = imbalances.len();
    assert_eq!(n, 52);
    let mean = imbalances.iter().sum::<f64>() / n as f64;
    (mean, imbalances[n * 95 / 100], copies as f64 / n as f64)
}

#[test]
fn one_slot_gives_nearly_perfect_balance_with_fewer_copies_than_pairing() {
    for (ranks, mean_at_most, p95_at_most) in
        [(8, 1.010, 1.05), (16, 1.003, 1.01), (32, 1.003, 1.01)]
    {
        let (mean, p95, copies) = measure("exact-fit", ranks, 1);
        let (_, _, pairing) = measure("pairing-unlimited", ranks, 1);
        assert!(
            mean <= mean_at_most && p95 <= p95_at_most,
            "EP{ranks}: {mean} {p95}"
        );
        assert!(
            copies < pairing,
            "EP{ranks}: {copies} copies, pairing {pairing}"
        );
    }
}

#[test]
fn two_slots_give_better_balance_than_quota_with_fewer_copies() {
    for ranks in [8, 16, 32] {
        let (mean, _, copies) = measure("exact-fit", ranks, 2);
        let (quota_mean, _, quota) = measure("quota", ranks, 2);
        assert!(
            mean <= 1.005 && mean < quota_mean,
            "EP{ranks}: {mean}, quota {quota_mean}"
        );
        assert!(copies < quota, "EP{ranks}: {copies} copies, quota {quota}");
    }
}

#[test]
fn strict_is_as_balanced_as_pairing_without_its_slots() {
    for ranks in [8, 16, 32] {
        let (mean, _, copies) = measure("exact-fit-strict", ranks, 2);
        let (_, _, pairing) = measure("pairing-unlimited", ranks, 2);
        assert!(mean < 1.0002, "EP{ranks}: {mean}");
        assert!(
            copies < pairing,
            "EP{ranks}: {copies} copies, pairing {pairing}"
        );
    }
}

/// Loads that one slot a rank can hardly balance at 8 ranks, of the recorded routing and of a model of ours in training:
/// the slowest rank's tokens of the optimum, then the token copies of 64 experts. The optima are those of a mixed-integer
/// program (which rank replicates which expert, and with how many tokens), solved to the last token with HiGHS.
const HARD: &str = include_str!("hard.txt");

#[test]
fn hard_loads_are_balanced_almost_as_well_as_possible() {
    let placement = Placement::contiguous(64, 8);
    let mut planner = planner("exact-fit-strict").unwrap();
    let (mut plan, mut after, mut over) = (Plan::default(), Vec::new(), Vec::new());
    for line in HARD.lines() {
        let mut numbers = line.split(' ').map(|n| n.parse::<u32>().unwrap());
        let optimum = f64::from(numbers.next().unwrap());
        let mut load = LoadMatrix::new(8, 64);
        load.row_mut(0)
            .iter_mut()
            .zip(numbers)
            .for_each(|(e, n)| *e = n);
        planner.plan(&load, &placement, 1, &mut plan);
        assert_eq!(check(&load, &placement, 1, &plan), Ok(()));
        plan.rank_load(&load, &placement, &mut after);
        let slowest = after.iter().copied().max().unwrap() as f64;
        assert!(
            slowest >= optimum,
            "better than the optimum: {slowest} {optimum}"
        );
        over.push(slowest / optimum);
    }
    assert_eq!(over.len(), 24);
    let mean = over.iter().sum::<f64>() / over.len() as f64;
    let worst = over.iter().copied().fold(1.0, f64::max);
    assert!(mean < 1.003 && worst < 1.015, "{mean} {worst}");
}
