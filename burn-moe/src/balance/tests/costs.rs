//! The cost model decides: what transfer costs is spent only where it pays, and the simulator keeps to its limits.

use super::*;

/// Time units that are easy to count: a byte takes a microsecond.
const MODEL: CostModel = CostModel {
    token_ps: 1_000_000,
    expert_bytes: 64,
    bandwidth: 1_000_000,
    latency_ps: 5,
    chunk_bytes: 0,
};
const EXPERT_PS: u64 = 64_000_000;

fn skewed(ranks: usize, hot: u32) -> (LoadMatrix, Placement) {
    let mut load = LoadMatrix::new(ranks, ranks * 2);
    for source in 0..ranks {
        load.row_mut(source).fill(100);
        load.row_mut(source)[0] = hot;
    }
    (load, Placement::contiguous(ranks * 2, ranks))
}

fn plan_with(cost: CostModel, load: &LoadMatrix, placement: &Placement, slots: usize) -> Plan {
    let mut plan = Plan::default();
    let config = ExactFitConfig {
        cost,
        ..ExactFitConfig::default()
    };
    ExactFit::new(config).plan(load, placement, slots, &mut plan);
    assert_eq!(check(load, placement, slots, &plan), Ok(()));
    plan
}

#[test]
fn nothing_is_replicated_without_bandwidth() {
    let (load, placement) = skewed(8, 4000);
    let none = CostModel {
        bandwidth: 0,
        ..MODEL
    };
    assert!(plan_with(none, &load, &placement, 2).is_empty());
    assert!(
        !plan_with(
            CostModel {
                bandwidth: u64::MAX,
                ..MODEL
            },
            &load,
            &placement,
            2
        )
        .is_empty()
    );
}

#[test]
fn dearer_transfer_buys_fewer_copies_and_never_a_slower_step() {
    let (load, placement) = skewed(8, 4000);
    let mut simulator = TransferSimulator::default();
    let mut slowest = Vec::new();
    let mut step = |model: &CostModel, plan: &Plan| {
        plan.rank_load(&load, &placement, &mut slowest);
        let max = slowest.iter().copied().max().unwrap();
        model.step_ps(max, simulator.transfer_ps(model, &placement, plan))
    };
    let mut copies = usize::MAX;
    for bytes in [1, 1_000, 4_000, 10_000, 100_000] {
        let model = CostModel {
            expert_bytes: bytes,
            ..MODEL
        };
        let plan = plan_with(model, &load, &placement, 2);
        assert!(
            step(&model, &plan) <= step(&model, &Plan::default()),
            "{bytes} bytes"
        );
        assert!(
            plan.replicas.len() <= copies,
            "{bytes} bytes: {} copies",
            plan.replicas.len()
        );
        copies = plan.replicas.len();
    }
    assert_eq!(copies, 0);
}

#[test]
fn balanced_loads_need_no_plan() {
    let (load, placement) = skewed(8, 100);
    for name in [
        "quota",
        "pairing",
        "least-loaded",
        "exact-fit",
        "exact-fit-strict",
    ] {
        let mut plan = Plan::default();
        planner(name).unwrap().plan(&load, &placement, 2, &mut plan);
        assert!(plan.is_empty(), "{name}");
    }
}

#[test]
fn minimum_quota_is_kept() {
    let (load, placement) = skewed(8, 137);
    let config = ExactFitConfig {
        min_quota: 64,
        ..ExactFitConfig::strict()
    };
    let mut plan = Plan::default();
    ExactFit::new(config).plan(&load, &placement, 2, &mut plan);
    assert!(!plan.is_empty());
    assert!(plan.replicas.iter().all(|r| r.quota >= 64), "{plan:?}");
}

#[test]
fn one_slot_balances_what_domains_allow() {
    // Rank 0 has all the load; its domain is ranks 0 and 1.
    let load = LoadMatrix::from_counts(4, 4, [vec![80, 0, 0, 0], vec![0; 12]].concat()).unwrap();
    let placement = Placement::contiguous(4, 4).with_domains(2).unwrap();
    let mut plan = Plan::default();
    ExactFit::default().plan(&load, &placement, 1, &mut plan);
    let half = Replica {
        expert: 0,
        rank: 1,
        slot: 0,
        quota: 40,
    };
    assert_eq!(plan.replicas, [half]);
    assert_eq!(lower_bound(&load, &placement, 1), 40);
}

#[test]
fn direct_sends_queue_up_and_relays_shorten_the_queue() {
    // Expert 0 of rank 0 on 16 other ranks.
    let placement = Placement::contiguous(17, 17);
    let replicas = (1..17)
        .map(|rank| Replica {
            expert: 0,
            rank,
            slot: 0,
            quota: 1,
        })
        .collect();
    let plan = Plan { replicas };
    let (mut schedule, mut simulator) = (Schedule::default(), TransferSimulator::default());
    schedule.direct(&placement, &plan);
    assert_eq!(
        simulator.simulate(&MODEL, &placement, &schedule),
        16 * EXPERT_PS + 5
    );
    schedule.relayed(&placement, &plan, &mut Vec::new());
    // 4 relays, the last of which has the weights after 4 sends, and then makes 3 of its own.
    assert_eq!(
        simulator.simulate(&MODEL, &placement, &schedule),
        7 * EXPERT_PS + 10
    );
    // In 16 chunks the second level starts with the first chunk.
    let chunked = CostModel {
        chunk_bytes: 1,
        ..MODEL
    };
    let time = simulator.simulate(&chunked, &placement, &schedule);
    assert!(time < 4 * EXPERT_PS + EXPERT_PS / 2, "{time}");
    assert_eq!(simulator.transfer_ps(&chunked, &placement, &plan), time);
}

#[test]
fn a_rank_receives_one_expert_at_a_time() {
    let placement = Placement::contiguous(3, 3);
    let to_zero = |expert, slot| Replica {
        expert,
        rank: 0,
        slot,
        quota: 1,
    };
    let plan = Plan {
        replicas: vec![to_zero(1, 0), to_zero(2, 1)],
    };
    let time = TransferSimulator::default().transfer_ps(&MODEL, &placement, &plan);
    assert_eq!(time, 2 * EXPERT_PS + 5);
}

proptest! {
    #[test]
    fn every_schedule_ends_within_its_limits((load, placement, slots) in loads(), chunk_bytes in 0u64..70) {
        let mut plan = Plan::default();
        Pairing::unlimited().plan(&load, &placement, slots, &mut plan);
        let model = CostModel { chunk_bytes, latency_ps: 0, ..MODEL };
        let (mut schedule, mut simulator) = (Schedule::default(), TransferSimulator::default());
        schedule.direct(&placement, &plan);
        let direct = simulator.simulate(&model, &placement, &schedule);
        schedule.relayed(&placement, &plan, &mut Vec::new());
        let relayed = simulator.simulate(&model, &placement, &schedule);
        let count = |rank: usize, side: fn(&Hop) -> u32| {
            schedule.hops.iter().filter(|h| side(h) as usize == rank).count() as u64
        };
        for rank in 0..placement.ranks() {
            prop_assert!(relayed >= count(rank, |h| h.to) * EXPERT_PS);
            prop_assert!(relayed >= count(rank, |h| h.from) * EXPERT_PS);
            prop_assert_eq!(count(rank, |h| h.to), plan.hosted(rank).count() as u64);
        }
        // One link working at any time is the worst that can happen.
        let all = plan.replicas.len() as u64 * (EXPERT_PS + 64_000_000);
        prop_assert!(direct <= all && relayed <= all, "{} {} {}", direct, relayed, all);
        prop_assert!(simulator.at_least_ps(&model, &placement, &plan) <= direct.min(relayed));
    }
}
