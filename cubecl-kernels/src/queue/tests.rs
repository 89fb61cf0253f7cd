//! Every tile runs exactly once and in the policy's order, and the results are those of the
//! problems run apart. The check itself is checked on queues that are broken on purpose.

use cubecl::client::Client;
use proptest::prelude::*;

use super::*;
use crate::{
    ExpertWeights, common,
    matmul::{grouped_matmul_data_grad, grouped_matmul_weight_grad},
};

const COUNTS: [usize; 5] = [40, 0, 3, 61, 17];
const K: usize = 72;
const M: usize = 80;

/// A backward pass: data gradients are urgent, weight gradients are not.
struct Backward {
    client: Client,
    x: DeviceTensor,
    grad: DeviceTensor,
    weights: ExpertWeights,
    offsets: DeviceTensor,
}

impl Backward {
    fn new() -> Self {
        let client = common::client();
        let rows = COUNTS.iter().sum();
        let tensor = |shape: &[usize], seed| {
            let data = common::random(shape.iter().product(), seed);
            DeviceTensor::from_data(&client, &data, shape).unwrap()
        };
        let offsets = common::offsets(&COUNTS);
        Self {
            x: tensor(&[rows, K], 1),
            grad: tensor(&[rows, M], 2),
            weights: ExpertWeights::new(tensor(&[COUNTS.len(), K, M], 3)).unwrap(),
            offsets: DeviceTensor::from_data(&client, &offsets, [offsets.len()]).unwrap(),
            client,
        }
    }

    /// Where weight gradients go.
    fn target(&self) -> ExpertWeights {
        let home = self.weights.home();
        ExpertWeights::new(DeviceTensor::zeros(
            &self.client,
            home.shape(),
            home.dtype(),
        ))
        .unwrap()
    }

    fn queue(&self, policy: Policy, fault: Fault) -> TileQueue {
        let client = &self.client;
        let target = self.target();
        TileQueue::prepare(
            client,
            Problem::data_grad(client, &self.grad, &self.weights, &self.offsets).unwrap(),
            Problem::weight_grad(client, &self.x, &self.grad, &self.offsets, &target).unwrap(),
            policy,
            fault,
        )
    }

    /// Number of tiles of each class, counted on the host.
    fn tiles(&self, queue: &TileQueue) -> [u32; 2] {
        let spec = queue.problems[0].spec;
        let (rows, columns) = (spec.rows(), spec.columns());
        let urgent: usize = COUNTS.iter().map(|count| count.div_ceil(rows)).sum();
        let busy = COUNTS.iter().filter(|count| **count > 0).count();
        [
            urgent * K.div_ceil(columns),
            busy * K.div_ceil(rows) * M.div_ceil(columns),
        ]
        .map(|tiles| tiles as u32)
    }

    /// Bits of both gradients, from the queue and from the operations apart.
    fn assert_same_bits(&self, queue: &TileQueue) {
        let client = &self.client;
        let bits = |tensor: &DeviceTensor| -> Vec<u32> {
            let values = tensor.read::<f32>(client).unwrap();
            values.iter().map(|value| value.to_bits()).collect()
        };
        let data =
            grouped_matmul_data_grad(client, &self.grad, &self.weights, &self.offsets).unwrap();
        let weights = self.target();
        grouped_matmul_weight_grad(client, &self.x, &self.grad, &self.offsets, &weights).unwrap();
        let [urgent, background] = &queue.problems;
        assert_eq!(bits(urgent.problem.output()), bits(&data));
        assert_eq!(bits(background.problem.output()), bits(weights.home()));
    }
}

/// The property: over all launches, each tile ran once and was drawn once.
fn exactly_once(traces: &[Trace], tiles: [u32; 2]) -> Result<(), String> {
    let mut counts = vec![0; (tiles[0] + tiles[1]) as usize];
    let mut drawn = counts.clone();
    for trace in traces {
        if trace.tiles != tiles {
            return Err(format!("{:?} tiles, {tiles:?} expected", trace.tiles));
        }
        for (sum, count) in counts.iter_mut().zip(&trace.counts) {
            *sum += count;
        }
        for (class, tile) in &trace.order {
            let first = if *class == Class::Urgent { 0 } else { tiles[0] };
            drawn[(first + tile) as usize] += 1;
        }
    }
    for (what, counts) in [("ran", counts), ("was drawn", drawn)] {
        if let Some(tile) = counts.iter().position(|count| *count != 1) {
            return Err(format!("tile {tile} {what} {} times", counts[tile]));
        }
    }
    Ok(())
}

#[test]
fn policies_order_the_classes() {
    let backward = Backward::new();
    for (policy, first) in [
        (Policy::UrgentFirst, Class::Urgent),
        (Policy::BackgroundFirst, Class::Background),
    ] {
        let queue = backward.queue(policy, Fault::None);
        let tiles = backward.tiles(&queue);
        let trace = queue
            .run_traced(&backward.client, TraceOptions::default())
            .unwrap();
        exactly_once(std::slice::from_ref(&trace), tiles).unwrap();
        // Tiles are noted just after they are drawn, so cubes that run together may swap.
        let slack = queue.problems[0].cubes(&backward.client, Some(&queue.problems[1]));
        let of_first = trace.order.iter().filter(|(class, _)| *class == first);
        let head = of_first.count();
        let strays = trace.order[..head]
            .iter()
            .filter(|(class, _)| *class != first);
        assert!(strays.count() < slack);
        backward.assert_same_bits(&queue);
        // Nothing is left.
        let rest = queue
            .run_traced(&backward.client, TraceOptions::default())
            .unwrap();
        assert_eq!(rest.order, []);
    }
}

#[test]
fn urgent_tiles_start_within_a_tile_of_the_switch() {
    let backward = Backward::new();
    for after in [1, 5] {
        let queue = backward.queue(Policy::BackgroundOnly, Fault::None);
        let tiles = backward.tiles(&queue);
        assert!(tiles[1] > after + 2, "too few background tiles to tell");
        let options = TraceOptions {
            switch: Some((after, Policy::UrgentFirst)),
            tiles_per_cube: None,
        };
        let trace = queue.run_traced(&backward.client, options).unwrap();
        exactly_once(std::slice::from_ref(&trace), tiles).unwrap();
        let (before, behind) = trace.order.split_at(after as usize);
        assert!(before.iter().all(|(class, _)| *class == Class::Background));
        let last_urgent = behind
            .iter()
            .rposition(|(class, _)| *class == Class::Urgent)
            .unwrap();
        let late = behind[..last_urgent]
            .iter()
            .filter(|(class, _)| *class == Class::Background);
        // Each other cube may have drawn one tile before it could see the switch.
        let cubes = queue.problems[0].cubes(&backward.client, Some(&queue.problems[1]));
        let late = late.count();
        assert!(late < cubes, "{late} background tiles after the switch");
        backward.assert_same_bits(&queue);
    }
}

#[test]
fn what_is_held_back_runs_later() {
    let backward = Backward::new();
    let client = &backward.client;
    let queue = backward.queue(Policy::BackgroundOnly, Fault::None);
    let held = queue.run_traced(client, TraceOptions::default()).unwrap();
    assert!(
        held.order
            .iter()
            .all(|(class, _)| *class == Class::Background)
    );
    queue.set_policy(client, Policy::UrgentFirst);
    let rest = queue.run_traced(client, TraceOptions::default()).unwrap();
    assert!(rest.order.iter().all(|(class, _)| *class == Class::Urgent));
    exactly_once(&[held, rest], backward.tiles(&queue)).unwrap();
    backward.assert_same_bits(&queue);
}

#[test]
fn element_types_must_agree() {
    let backward = Backward::new();
    let client = &backward.client;
    let urgent =
        Problem::data_grad(client, &backward.grad, &backward.weights, &backward.offsets).unwrap();
    let f64_like = Problem {
        lhs: DeviceTensor::empty(client, [1, 1], ElemType::UInt(UIntKind::U32)),
        ..urgent.clone()
    };
    let error = TileQueue::new(client, urgent, f64_like, Policy::UrgentFirst).unwrap_err();
    assert!(matches!(
        error,
        KernelError::Dtype {
            argument: "background",
            ..
        }
    ));
}

/// The check of [`exactly_once`] can fail: each way to break the queue is seen.
#[test]
fn broken_queues_are_caught() {
    let backward = Backward::new();
    for (fault, message) in [
        (Fault::Repeats, "tile 0 ran 2 times"),
        (Fault::Skips, "tile 1 ran 0 times"),
        (Fault::WrongPrefix, "tiles, "),
    ] {
        let queue = backward.queue(Policy::UrgentFirst, fault);
        let tiles = backward.tiles(&queue);
        let trace = queue
            .run_faulty(&backward.client, TraceOptions::default(), fault)
            .unwrap();
        let error = exactly_once(&[trace], tiles).unwrap_err();
        assert!(error.contains(message), "{fault:?}: {error}");
    }
}

fn policy() -> impl Strategy<Value = Policy> {
    prop_oneof![
        Just(Policy::UrgentFirst),
        Just(Policy::BackgroundFirst),
        Just(Policy::BackgroundOnly),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 12, ..ProptestConfig::default() })]

    /// Launches that stop early, under policies that change between and during them.
    #[test]
    fn any_interleaving_runs_each_tile_once(
        launches in prop::collection::vec(
            (policy(), prop::option::of((1u32..12, policy())), 1u32..6),
            0..5,
        ),
    ) {
        let backward = Backward::new();
        let client = &backward.client;
        let queue = backward.queue(Policy::UrgentFirst, Fault::None);
        let mut traces = Vec::new();
        for (policy, switch, tiles_per_cube) in launches {
            queue.set_policy(client, policy);
            let options = TraceOptions { switch, tiles_per_cube: Some(tiles_per_cube) };
            traces.push(queue.run_traced(client, options).unwrap());
        }
        queue.set_policy(client, Policy::BackgroundFirst);
        traces.push(queue.run_traced(client, TraceOptions::default()).unwrap());
        prop_assert_eq!(exactly_once(&traces, backward.tiles(&queue)), Ok(()));
        backward.assert_same_bits(&queue);
    }
}
