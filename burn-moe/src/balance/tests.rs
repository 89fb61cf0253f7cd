//! Properties that every planner and the reroute hold, on random loads and at the edges.

use super::*;
use proptest::prelude::*;

mod costs;
mod optimum;
mod targets;

/// Loads of any scale up to `u32::MAX`, with experts and sources that have none.
pub(crate) fn loads() -> impl Strategy<Value = (LoadMatrix, Placement, usize)> {
    (1usize..10, 0usize..20, 0u32..33, 0usize..4, any::<bool>()).prop_flat_map(
        |(ranks, experts, bits, slots, anywhere)| {
            let max = if bits == 0 {
                0
            } else {
                u32::MAX >> (32 - bits)
            };
            let count = prop_oneof![2 => 0..=max, 1 => Just(0), 1 => Just(max)];
            let counts = prop::collection::vec(count, ranks * experts);
            let homes = prop::collection::vec(0..ranks as u32, experts);
            (counts, homes, 1..=ranks).prop_map(move |(counts, homes, per_domain)| {
                let placement = if anywhere {
                    Placement::from_homes(homes, ranks).unwrap()
                } else {
                    Placement::contiguous(experts, ranks)
                };
                let placement = placement.with_domains(per_domain).unwrap();
                let load = LoadMatrix::from_counts(ranks, experts, counts).unwrap();
                (load, placement, slots)
            })
        },
    )
}

/// The rows of small matrices, for tests that state their loads.
pub(crate) fn matrix(rows: &[&[u32]]) -> LoadMatrix {
    let experts = rows.first().map_or(0, |r| r.len());
    LoadMatrix::from_counts(rows.len(), experts, rows.concat()).unwrap()
}

proptest! {
    #[test]
    fn plans_are_legal_deterministic_and_never_worse((load, placement, slots) in loads()) {
        let (mut before, mut after) = (Vec::new(), Vec::new());
        Plan::default().rank_load(&load, &placement, &mut before);
        // Planners with history see three micro-batches.
        let counts = load.counts().iter().rev().copied().collect();
        let other = LoadMatrix::from_counts(load.ranks(), load.experts(), counts).unwrap();
        for &name in PLANNERS {
            let (mut plan, mut again) = (Plan::default(), Plan::default());
            let (mut first, mut second) = (planner(name).unwrap(), planner(name).unwrap());
            prop_assert_eq!(first.name(), name);
            for load in [&load, &other, &load] {
                first.plan(load, &placement, slots, &mut plan);
                let used = if first.ignores_slots() { plan.slots_used() } else { slots };
                prop_assert_eq!(check(load, &placement, used, &plan), Ok(()), "{}", name);
                second.plan(load, &placement, slots, &mut again);
                prop_assert_eq!(&plan, &again, "{}", name);
            }
            plan.rank_load(&load, &placement, &mut after);
            prop_assert_eq!(after.iter().sum::<u64>(), load.total());
            let max = after.iter().copied().max().unwrap_or(0);
            // History may mislead; exact loads never make it worse.
            if !name.starts_with("eplb") {
                prop_assert!(max <= before.iter().copied().max().unwrap_or(0), "{}", name);
            }
            let used = slots.max(plan.slots_used());
            prop_assert!(max >= lower_bound(&load, &placement, used), "{}", name);
        }
    }

    #[test]
    fn reroute_keeps_every_quota_and_prefers_local((load, placement, slots) in loads()) {
        let mut plan = Plan::default();
        Quota::new(1).plan(&load, &placement, slots, &mut plan);
        let mut reroute = Reroute::default();
        reroute.build(&load, &placement, &plan);
        let ranks = load.ranks();
        for expert in 0..load.experts() {
            let instances = reroute.instances(expert).to_vec();
            prop_assert_eq!(instances[0] as usize, placement.home(expert));
            let mut got = vec![0u64; instances.len()];
            for source in 0..ranks {
                let mut start = 0;
                for (got, &end) in got.iter_mut().zip(reroute.ends(source, expert)) {
                    prop_assert!(end >= start);
                    *got += u64::from(end - start);
                    start = end;
                }
                prop_assert_eq!(start, load.get(source, expert));
            }
            let quotas: Vec<u64> = plan.replicas_of(expert).iter().map(|r| r.quota).collect();
            prop_assert_eq!(&got[1..], &quotas[..]);
            for (i, &rank) in instances.iter().enumerate() {
                let ends = reroute.ends(rank as usize, expert);
                let local = ends[i] - if i == 0 { 0 } else { ends[i - 1] };
                let held = u64::from(load.get(rank as usize, expert));
                prop_assert_eq!(u64::from(local), held.min(got[i]));
            }
        }
        let mut rank_load = Vec::new();
        plan.rank_load(&load, &placement, &mut rank_load);
        for (destination, &tokens) in rank_load.iter().enumerate() {
            let sum: u64 = (0..ranks).map(|s| reroute.counts(s, destination)).sum();
            prop_assert_eq!(sum, tokens);
        }
    }

    #[test]
    fn assign_sends_what_counts_say(ids in prop::collection::vec(0u32..6, 0..200), split in 0usize..200) {
        let split = split.min(ids.len());
        let per_source = [&ids[..split], &ids[split..], &[]];
        let mut load = LoadMatrix::new(3, 6);
        for (source, ids) in per_source.iter().enumerate() {
            ids.iter().for_each(|&id| load.row_mut(source)[id as usize] += 1);
        }
        let placement = Placement::contiguous(6, 3);
        let mut plan = Plan::default();
        Quota::new(1).plan(&load, &placement, 2, &mut plan);
        let mut reroute = Reroute::default();
        reroute.build(&load, &placement, &plan);
        let mut out = Vec::new();
        for (source, ids) in per_source.iter().enumerate() {
            reroute.assign(source, ids, &mut out);
            prop_assert_eq!(out.len(), ids.len());
            for destination in 0..3 {
                let sent = out.iter().filter(|&&d| d == destination as u32).count();
                prop_assert_eq!(sent as u64, reroute.counts(source, destination));
            }
            for (&id, &rank) in ids.iter().zip(&out) {
                prop_assert!(reroute.instances(id as usize).contains(&rank));
            }
        }
    }
}

#[test]
fn other_shapes_give_the_empty_plan() {
    let load = matrix(&[&[9, 0, 0], &[0, 0, 0]]);
    for name in PLANNERS {
        let mut plan = Plan {
            replicas: vec![board::replica(0, 1, 1)],
        };
        let mut planner = planner(name).unwrap();
        planner.plan(&load, &Placement::contiguous(4, 2), 1, &mut plan);
        assert!(plan.is_empty(), "{name}");
    }
}

#[test]
fn unknown_names_list_the_known() {
    let error = planner("magic").err().unwrap().to_string();
    assert!(
        error.contains("magic") && error.contains("quota"),
        "{error}"
    );
}

#[test]
fn largest_loads_do_not_overflow() {
    let load = LoadMatrix::from_counts(64, 64, vec![u32::MAX; 64 * 64]).unwrap();
    let mut hot = LoadMatrix::new(64, 64);
    (0..64).for_each(|s| hot.row_mut(s)[5] = u32::MAX);
    let placement = Placement::contiguous(64, 64);
    for name in PLANNERS {
        for load in [&load, &hot] {
            let mut plan = Plan::default();
            let mut planner = planner(name).unwrap();
            planner.plan(load, &placement, 1, &mut plan);
            planner.plan(load, &placement, 1, &mut plan);
            let slots = if planner.ignores_slots() {
                plan.slots_used()
            } else {
                1
            };
            assert_eq!(check(load, &placement, slots, &plan), Ok(()), "{name}");
            let mut reroute = Reroute::default();
            reroute.build(load, &placement, &plan);
        }
    }
}

#[test]
fn check_names_each_broken_rule() {
    let load = matrix(&[&[6, 2, 0, 0], &[3, 0, 0, 0]]);
    let placement = Placement::contiguous(4, 2);
    let replica = |expert, rank, slot, quota| Replica {
        expert,
        rank,
        slot,
        quota,
    };
    let verdict = |replicas: &[Replica], slots| {
        check(
            &load,
            &placement,
            slots,
            &Plan {
                replicas: replicas.to_vec(),
            },
        )
    };
    assert_eq!(verdict(&[replica(0, 1, 0, 9)], 1), Ok(()));
    type Case = (&'static [(u32, u32, u32, u64)], fn(&PlanError) -> bool);
    let cases: &[Case] = &[
        (&[(0, 2, 0, 1)], |e| {
            matches!(e, PlanError::OutOfRange { .. })
        }),
        (&[(4, 1, 0, 1)], |e| {
            matches!(e, PlanError::OutOfRange { .. })
        }),
        (&[(0, 0, 0, 1)], |e| matches!(e, PlanError::OnHome { .. })),
        (&[(0, 1, 1, 1)], |e| {
            matches!(e, PlanError::NoSuchSlot { .. })
        }),
        (&[(0, 1, 0, 0)], |e| matches!(e, PlanError::NoTokens { .. })),
        (&[(0, 1, 0, 10)], |e| {
            matches!(e, PlanError::TooManyTokens { .. })
        }),
        (&[(0, 1, 0, 1), (0, 1, 0, 1)], |e| {
            matches!(e, PlanError::OrderOrTwice { .. })
        }),
        (&[(0, 1, 0, 1), (1, 1, 0, 1)], |e| {
            matches!(e, PlanError::SlotTaken { .. })
        }),
    ];
    for (replicas, broken) in cases {
        let replicas: Vec<_> = replicas
            .iter()
            .map(|&(e, r, s, q)| replica(e, r, s, q))
            .collect();
        let error = verdict(&replicas, 1).unwrap_err();
        assert!(broken(&error), "{error}");
    }
    let apart = placement.clone().with_domains(1).unwrap();
    let plan = Plan {
        replicas: vec![replica(0, 1, 0, 1)],
    };
    let error = check(&load, &apart, 1, &plan).unwrap_err();
    assert!(matches!(error, PlanError::OutsideDomain { .. }), "{error}");
    let error = check(&LoadMatrix::new(3, 4), &placement, 1, &plan).unwrap_err();
    assert!(matches!(error, PlanError::Shape { .. }), "{error}");
}

#[test]
fn placement_spreads_what_does_not_divide() {
    let placement = Placement::contiguous(7, 3);
    assert_eq!(placement.homes(), [0, 0, 0, 1, 1, 2, 2]);
    assert_eq!(placement.experts_of(1), [3, 4]);
    let few = Placement::contiguous(1, 3);
    assert_eq!(few.experts_of(2), [0u32; 0]);
    let domains = Placement::contiguous(8, 5).with_domains(2).unwrap();
    assert_eq!((domains.domains(), domains.ranks_of(2)), (3, 4..5));
    assert!(Placement::from_homes(vec![0, 3], 3).is_err());
    assert!(Placement::from_homes(vec![], 0).is_err());
    assert!(LoadMatrix::from_counts(2, 3, vec![0; 5]).is_err());
}

#[test]
fn imbalance_is_max_over_mean() {
    assert_eq!(imbalance(&[4, 0]), 2.0);
    assert_eq!(imbalance(&[3, 3, 3]), 1.0);
    assert_eq!(imbalance(&[0, 0]), 1.0);
    assert_eq!(imbalance(&[]), 1.0);
}
