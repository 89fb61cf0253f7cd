//! Planning allocates nothing once its buffers have grown to the problem.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use burn_moe::balance::{LoadMatrix, PLANNERS, Placement, Plan, planner};

struct Counting;

thread_local! {
    static ALLOCATIONS: Cell<usize> = const { Cell::new(0) };
}

// SAFETY: every call goes to the system allocator unchanged; counting touches no heap.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: as the caller promises.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        ALLOCATIONS.with(|count| count.set(count.get() + 1));
        // SAFETY: as the caller promises.
        unsafe { System.realloc(pointer, layout, size) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Skewed loads that differ from batch to batch.
fn load(ranks: usize, experts: usize, batch: usize) -> LoadMatrix {
    let counts = (0..ranks * experts)
        .map(|i| {
            let expert = i % experts;
            let mixed = (i * 2654435761 + batch * 40503) % 97;
            (mixed * experts / (1 + (expert * 7 + batch * 13) % experts)) as u32
        })
        .collect();
    LoadMatrix::from_counts(ranks, experts, counts).unwrap()
}

#[test]
fn planners_reuse_their_buffers() {
    let (ranks, experts, slots) = (16, 64, 2);
    let placement = Placement::contiguous(experts, ranks);
    let loads: Vec<LoadMatrix> = (0..12).map(|batch| load(ranks, experts, batch)).collect();
    for name in PLANNERS {
        let mut planner = planner(name).unwrap();
        let mut plan = Plan::default();
        let mut replicas = 0;
        for load in &loads {
            planner.plan(load, &placement, slots, &mut plan);
            replicas += plan.replicas.len();
        }
        assert!(replicas > 0 || *name == "none", "{name} had nothing to do");
        let before = ALLOCATIONS.get();
        for load in &loads {
            planner.plan(load, &placement, slots, &mut plan);
        }
        assert_eq!(ALLOCATIONS.get() - before, 0, "{name} allocates");
    }
}
