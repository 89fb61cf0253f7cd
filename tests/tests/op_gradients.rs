//! Every operation of `burn_moe::ops` computes what a naive loop in f64 computes, and its gradients
//! are those that finite differences of that loop give, for any sizes.

use std::sync::Arc;

use burn::tensor::{DType, Device, Tensor, s};
use burn_moe::comm::{Key, Op, RankOptions, run_ranks};
use burn_moe::ops::{
    Replica, ReplicaPool, Replication, RowExchange, all_to_all_rows, expert_swiglu, gather_rows,
    sum_rows,
};
use burn_moe_tests::naive::NaiveExperts;
use burn_moe_tests::{
    assert_close, assert_gradient, assert_near, dot, index_of, random, rounded, shuffled,
    tensor_of, tensor64, values,
};
use proptest::prelude::*;

/// Element types, each with how far from the f64 loop a result may be, relative to the largest.
const TOLERANCES: [(DType, f64); 4] = [
    (DType::F64, 1e-12),
    (DType::F32, 1e-5),
    (DType::BF16, 1e-2),
    (DType::F16, 1e-2),
];

fn cases(count: u32) -> ProptestConfig {
    ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(count)
    }
}

fn offsets_of(counts: &[usize], device: &Device) -> Tensor<1, burn::tensor::Int> {
    let mut offsets = vec![0];
    for count in counts {
        offsets.push(offsets[offsets.len() - 1] + *count as i64);
    }
    index_of(&offsets, [offsets.len()], device)
}

/// `[index.len(), D]`
fn naive_gather(x: &[f64], width: usize, index: &[i64]) -> Vec<f64> {
    index
        .iter()
        .flat_map(|row| x[*row as usize * width..][..width].to_vec())
        .collect()
}

/// `[T, D]` from `index` and `weights` `[T, K]`.
fn naive_sum(y: &[f64], width: usize, index: &[i64], weights: &[f64], k: usize) -> Vec<f64> {
    let mut out = vec![0.0; index.len() / k * width];
    for (copy, row) in index.iter().enumerate().filter(|(_, row)| **row >= 0) {
        for i in 0..width {
            out[copy / k * width + i] += weights[copy] * y[*row as usize * width + i];
        }
    }
    out
}

/// Experts over rows sorted by expert.
#[derive(Debug, Clone)]
struct Experts {
    d_model: usize,
    d_hidden: usize,
    /// Rows of each expert.
    counts: Vec<usize>,
    seed: u64,
}

impl Experts {
    fn shapes(&self) -> ([usize; 2], [usize; 3], [usize; 3]) {
        let (experts, d, f) = (self.counts.len(), self.d_model, self.d_hidden);
        let rows = self.counts.iter().sum();
        ([rows, d], [experts, d, 2 * f], [experts, f, d])
    }

    /// `x`, `gate_up`, `down` and the factors of the loss.
    fn draw(&self) -> [Vec<f64>; 4] {
        let (x, gate_up, down) = self.shapes();
        let mut seed = 10 * self.seed;
        [
            x.iter().product(),
            gate_up.iter().product(),
            down.iter().product(),
            x.iter().product(),
        ]
        .map(|len| {
            seed += 1;
            random(len, seed).iter().map(|v| 2.0 * v).collect()
        })
    }

    fn naive(&self, x: &[f64], gate_up: &[f64], down: &[f64]) -> Vec<f64> {
        let experts = NaiveExperts {
            d_model: self.d_model,
            d_hidden: self.d_hidden,
            gate_up,
            down,
        };
        let of_rows = self.counts.iter().enumerate();
        of_rows
            .flat_map(|(expert, count)| std::iter::repeat_n(expert, *count))
            .zip(x.chunks(self.d_model))
            .flat_map(|(expert, x)| experts.expert(expert, x))
            .collect()
    }

    fn compute(&self, x: Tensor<2>, gate_up: Tensor<3>, down: Tensor<3>) -> Tensor<2> {
        let offsets = offsets_of(&self.counts, &x.device());
        expert_swiglu(x, gate_up, down, offsets, Replication::none())
    }

    /// Output and all gradients in f64.
    fn check(&self) {
        let device = Device::flex().autodiff();
        let (x_shape, gate_up_shape, down_shape) = self.shapes();
        let [x, gate_up, down, factors] = self.draw();
        let tensors = (
            tensor64(&x, x_shape, &device).require_grad(),
            tensor64(&gate_up, gate_up_shape, &device).require_grad(),
            tensor64(&down, down_shape, &device).require_grad(),
        );
        let out = self.compute(tensors.0.clone(), tensors.1.clone(), tensors.2.clone());
        let expected = self.naive(&x, &gate_up, &down);
        assert_near("output", &values(&out), &expected, 1e-12);
        let grads = (out * tensor64(&factors, x_shape, &device))
            .sum()
            .backward();
        let grad = |g: Option<Tensor<3>>| values(&g.expect("a gradient"));
        assert_gradient(
            "x",
            &values(&tensors.0.grad(&grads).expect("a gradient")),
            &x,
            |x| dot(&self.naive(x, &gate_up, &down), &factors),
        );
        assert_gradient("gate_up", &grad(tensors.1.grad(&grads)), &gate_up, |w| {
            dot(&self.naive(&x, w, &down), &factors)
        });
        assert_gradient("down", &grad(tensors.2.grad(&grads)), &down, |w| {
            dot(&self.naive(&x, &gate_up, w), &factors)
        });
    }
}

proptest! {
    #![proptest_config(cases(40))]

    #[test]
    fn gather_rows_copies_and_adds_back(
        (tokens, rows) in prop_oneof![Just((0, 0)), (1usize..9, 0usize..20)],
        width in 1usize..6,
        seed in 0u64..1000,
    ) {
        let device = Device::flex().autodiff();
        let index: Vec<i64> = random(rows, seed)
            .iter()
            .map(|v| ((v + 1.0) / 2.0 * tokens as f64) as i64)
            .collect();
        let x = random(tokens * width, seed + 1);
        let factors = random(rows * width, seed + 2);
        for (dtype, _) in TOLERANCES {
            let x = rounded(&x, dtype);
            let input = tensor_of(&x, [tokens, width], dtype, &device);
            let out = gather_rows(input, index_of(&index, [rows], &device));
            prop_assert_eq!(out.dtype(), dtype);
            prop_assert_eq!(values(&out), naive_gather(&x, width, &index));
        }
        let input = tensor64(&x, [tokens, width], &device).require_grad();
        let out = gather_rows(input.clone(), index_of(&index, [rows], &device));
        let grads = (out * tensor64(&factors, [rows, width], &device)).sum().backward();
        assert_gradient("x", &values(&input.grad(&grads).expect("a gradient")), &x, |x| {
            dot(&naive_gather(x, width, &index), &factors)
        });
    }

    #[test]
    fn sum_rows_adds_weighted_rows(
        tokens in 0usize..9,
        k in 1usize..5,
        width in prop_oneof![1usize..6, Just(8), Just(19)],
        named in 0.0f64..1.1,
        unused_rows in 0usize..3,
        seed in 0u64..1000,
    ) {
        let device = Device::flex().autodiff();
        // Each place names a row of its own, or none.
        let places = tokens * k;
        let chance = random(places, seed);
        let used = chance.iter().filter(|v| (**v + 1.0) / 2.0 < named).count();
        let rows = used + unused_rows;
        let mut free = shuffled(rows, seed + 1).into_iter();
        let index: Vec<i64> = chance
            .iter()
            .map(|v| match (v + 1.0) / 2.0 < named {
                true => free.next().map_or(-1, |row| row as i64),
                false => -1,
            })
            .collect();
        let y = random(rows * width, seed + 2);
        let weights = random(places, seed + 3);
        let factors = random(tokens * width, seed + 4);
        for (dtype, tolerance) in TOLERANCES {
            let (y, weights) = (rounded(&y, dtype), rounded(&weights, dtype));
            let out = sum_rows(
                tensor_of(&y, [rows, width], dtype, &device),
                index_of(&index, [tokens, k], &device),
                tensor_of(&weights, [tokens, k], dtype, &device),
            );
            prop_assert_eq!(out.dtype(), dtype);
            let expected = naive_sum(&y, width, &index, &weights, k);
            assert_near("output", &values(&out), &expected, tolerance);
        }
        let y_in = tensor64(&y, [rows, width], &device).require_grad();
        let weights_in = tensor64(&weights, [tokens, k], &device).require_grad();
        let out = sum_rows(
            y_in.clone(),
            index_of(&index, [tokens, k], &device),
            weights_in.clone(),
        );
        let grads = (out * tensor64(&factors, [tokens, width], &device)).sum().backward();
        assert_gradient("y", &values(&y_in.grad(&grads).expect("a gradient")), &y, |y| {
            dot(&naive_sum(y, width, &index, &weights, k), &factors)
        });
        let grad = values(&weights_in.grad(&grads).expect("a gradient"));
        assert_gradient("weights", &grad, &weights, |w| {
            dot(&naive_sum(&y, width, &index, w, k), &factors)
        });
        for (place, _) in index.iter().enumerate().filter(|(_, row)| **row < 0) {
            prop_assert_eq!(grad[place], 0.0, "weight {} of no row", place);
        }
    }

    #[test]
    fn expert_swiglu_is_a_loop_over_rows(
        // Most experts have no row or one.
        counts in prop::collection::vec(prop_oneof![Just(0), Just(0), Just(1), 2usize..6], 1..7),
        d_model in 1usize..6,
        d_hidden in 1usize..6,
        seed in 0u64..1000,
    ) {
        Experts { d_model, d_hidden, counts, seed }.check();
    }

    #[test]
    fn all_to_all_rows_moves_rows_and_gradients(
        ranks in 2usize..5,
        width in 1usize..4,
        // Rows from each rank to each other, many of them none.
        counts in prop::collection::vec(prop_oneof![Just(0), 0usize..5], 16),
        seed in 0u64..1000,
    ) {
        let count = |from: usize, to: usize| counts[4 * from + to];
        let sent = |rank: usize| (0..ranks).map(|to| count(rank, to)).collect::<Vec<_>>();
        let received = |rank: usize| (0..ranks).map(|from| count(from, rank)).collect::<Vec<_>>();
        let x_of = |rank: usize| {
            random(sent(rank).iter().sum::<usize>() * width, seed + rank as u64)
        };
        let factors_of = |rank: usize| {
            random(received(rank).iter().sum::<usize>() * width, seed + 100 + rank as u64)
        };
        // Rows of `from` for `to` begin behind those for lower ranks.
        let naive = |x: &[Vec<f64>], rank: usize| -> Vec<f64> {
            (0..ranks)
                .flat_map(|from| {
                    let start: usize = (0..rank).map(|to| count(from, to)).sum();
                    x[from][start * width..][..count(from, rank) * width].to_vec()
                })
                .collect()
        };
        let all: Vec<Vec<f64>> = (0..ranks).map(x_of).collect();
        let results = run_ranks(ranks, RankOptions::default(), |comm| {
            let device = Device::flex().autodiff();
            let rank = comm.rank();
            let exchange = |step| RowExchange {
                comm: comm.clone(),
                key: Key::new(Op::Dispatch, step, 0),
                backward_key: Key::new(Op::DispatchBackward, step, 0),
                send: sent(rank).into(),
                receive: received(rank).into(),
                before_backward: None,
            };
            let shape = [sent(rank).iter().sum(), width];
            for (step, (dtype, _)) in TOLERANCES.into_iter().enumerate() {
                let x = tensor_of(&all[rank], shape, dtype, &device);
                let out = all_to_all_rows(x, exchange(step as u64));
                assert_eq!(out.dtype(), dtype);
                let rounded: Vec<_> = all.iter().map(|x| rounded(x, dtype)).collect();
                assert_eq!(values(&out), naive(&rounded, rank));
            }
            let x = tensor64(&all[rank], shape, &device).require_grad();
            let out = all_to_all_rows(x.clone(), exchange(9));
            let factors = tensor64(&factors_of(rank), out.dims(), &device);
            let grads = (out * factors).sum().backward();
            values(&x.grad(&grads).expect("a gradient"))
        });
        for (rank, grad) in results.expect("all ranks").iter().enumerate() {
            // A row's gradient depends on the loss of the rank that received it.
            assert_gradient("x", grad, &all[rank], |x| {
                let mut all = all.clone();
                all[rank] = x.to_vec();
                (0..ranks).map(|rank| dot(&naive(&all, rank), &factors_of(rank))).sum()
            });
        }
    }
}

#[test]
fn expert_swiglu_at_the_edges() {
    let experts = |d_model, d_hidden, counts: &[usize]| Experts {
        d_model,
        d_hidden,
        counts: counts.to_vec(),
        seed: 5,
    };
    // No rows at all; all rows on one expert, first, in the middle and last; one row for each.
    experts(4, 3, &[0, 0, 0]).check();
    experts(4, 3, &[9, 0, 0]).check();
    experts(4, 3, &[0, 9, 0]).check();
    experts(4, 3, &[0, 0, 0, 0, 9]).check();
    experts(3, 5, &[1, 1, 1, 1]).check();
    experts(1, 1, &[1]).check();
    // Odd sizes that fill no vector register, and some that fill several.
    experts(17, 9, &[3, 0, 1]).check();
}

#[test]
fn expert_swiglu_in_every_precision() {
    let device = Device::flex().autodiff();
    for (d_model, d_hidden, counts) in [
        (48, 40, vec![7, 0, 1, 33, 2, 0]),
        (33, 65, vec![70]),
        (600, 20, vec![1, 0, 5]),
    ] {
        let experts = Experts {
            d_model,
            d_hidden,
            counts,
            seed: 6,
        };
        let (x_shape, gate_up_shape, down_shape) = experts.shapes();
        let scale = 1.0 / (d_model as f64).sqrt();
        let drawn = experts.draw();
        let drawn = drawn.map(|v| v.iter().map(|v| v * scale).collect::<Vec<_>>());
        // The gradients in f64, which the test above has compared with finite differences.
        let gradients = |drawn: &[Vec<f64>; 4], dtype| {
            let x = tensor_of(&drawn[0], x_shape, dtype, &device).require_grad();
            let gate_up = tensor_of(&drawn[1], gate_up_shape, dtype, &device).require_grad();
            let down = tensor_of(&drawn[2], down_shape, dtype, &device).require_grad();
            let out = experts.compute(x.clone(), gate_up.clone(), down.clone());
            assert_eq!(out.dtype(), dtype);
            let grads = (out.clone() * tensor_of(&drawn[3], x_shape, dtype, &device))
                .sum()
                .backward();
            (
                values(&out),
                [
                    values(&x.grad(&grads).expect("a gradient")),
                    values(&gate_up.grad(&grads).expect("a gradient")),
                    values(&down.grad(&grads).expect("a gradient")),
                ],
            )
        };
        for (dtype, tolerance) in TOLERANCES {
            let drawn = drawn.clone().map(|v| rounded(&v, dtype));
            let (out, grads) = gradients(&drawn, dtype);
            let expected = experts.naive(&drawn[0], &drawn[1], &drawn[2]);
            assert_close("output", &out, &expected, tolerance);
            let (_, exact) = gradients(&drawn, DType::F64);
            for (name, (grad, exact)) in ["x", "gate_up", "down"]
                .into_iter()
                .zip(grads.iter().zip(&exact))
            {
                assert_close(
                    &format!("{dtype:?} gradient of {name}"),
                    grad,
                    exact,
                    2.0 * tolerance,
                );
            }
        }
    }
}

/// Views of larger tensors: transposed, and beginning in the middle.
#[test]
fn operands_need_not_be_contiguous() {
    let device = Device::flex().autodiff();
    let experts = Experts {
        d_model: 5,
        d_hidden: 4,
        counts: vec![2, 0, 3],
        seed: 8,
    };
    let (x_shape, gate_up_shape, down_shape) = experts.shapes();
    let [x, gate_up, down, factors] = experts.draw();
    // Whole tensors, of which the operands are views.
    let x_whole = tensor64(&x, x_shape, &device)
        .transpose()
        .repeat_dim(1, 1)
        .require_grad();
    let gate_up_whole = Tensor::cat(
        vec![
            Tensor::ones([2, 5, 8], (&device, DType::F64)),
            tensor64(&gate_up, gate_up_shape, &device),
        ],
        0,
    )
    .require_grad();
    let down_whole = tensor64(&down, down_shape, &device)
        .swap_dims(1, 2)
        .require_grad();
    let x_view = x_whole.clone().transpose();
    let out = experts.compute(
        x_view.clone(),
        gate_up_whole.clone().slice(s![2..5]),
        down_whole.clone().swap_dims(1, 2),
    );
    let expected = experts.naive(&x, &gate_up, &down);
    assert_close("output", &values(&out), &expected, 1e-12);
    let factors_view = tensor64(&factors, x_shape, &device)
        .transpose()
        .repeat_dim(1, 1)
        .transpose();
    let grads = (out * factors_view).sum().backward();
    let grad = x_whole.grad(&grads).expect("a gradient").transpose();
    assert_gradient("x", &values(&grad), &x, |x| {
        dot(&experts.naive(x, &gate_up, &down), &factors)
    });
    let grad = gate_up_whole.grad(&grads).expect("a gradient");
    assert_gradient("gate_up", &values(&grad.slice(s![2..5])), &gate_up, |w| {
        dot(&experts.naive(&x, w, &down), &factors)
    });
    let grad = down_whole.grad(&grads).expect("a gradient").swap_dims(1, 2);
    assert_gradient("down", &values(&grad), &down, |w| {
        dot(&experts.naive(&x, &gate_up, w), &factors)
    });

    let index = [4, 0, 0, 3];
    let gathered = gather_rows(x_view.clone(), index_of(&index, [4], &device));
    assert_eq!(values(&gathered), naive_gather(&x, 5, &index));
    // Rows 1 to 4 of the view: a start in the middle of the memory.
    let middle = tensor64(&x, x_shape, &device).slice(s![1..4]);
    let gathered = gather_rows(middle.clone(), index_of(&[2, 0], [2], &device));
    assert_eq!(values(&gathered), naive_gather(&x[5..20], 5, &[2, 0]));
    let weights = [0.5, -2.0, 3.0, 0.25];
    let sum = sum_rows(
        middle.clone(),
        index_of(&[2, -1, 0, 1], [2, 2], &device).transpose(),
        tensor64(&weights, [2, 2], &device).transpose(),
    );
    let expected = naive_sum(&x[5..20], 5, &[2, 0, -1, 1], &[0.5, 3.0, -2.0, 0.25], 2);
    assert_close("sum", &values(&sum), &expected, 1e-12);

    let results = run_ranks(2, RankOptions::default(), |comm| {
        let exchange = RowExchange {
            comm: comm.clone(),
            key: Key::new(Op::Dispatch, 0, 0),
            backward_key: Key::new(Op::DispatchBackward, 0, 0),
            send: [1, 2].into(),
            receive: [comm.rank() + 1; 2].into(),
            before_backward: None,
        };
        let rows = tensor64(&x, x_shape, &Device::flex()).slice(s![1..4]);
        values(&all_to_all_rows(rows, exchange))
    })
    .expect("both ranks");
    assert_eq!(results[0], [&x[5..10], &x[5..10]].concat());
    assert_eq!(results[1], [&x[10..20], &x[10..20]].concat());
}

/// Two ranks with two experts each. Rank 1 hosts a replica of expert 0, rank 0 one of expert 3 and
/// one of expert 2: the outputs and gradients are those of one loop over all rows.
#[test]
fn expert_swiglu_with_replicas() {
    let (d_model, d_hidden) = (4, 3);
    // Rows by rank and instance; which expert each instance is.
    let rows = [[2, 0, 1, 3], [1, 2, 4, 0]];
    let expert_of = [[0, 1, 2, 3], [2, 3, 0, 0]];
    let instances = [4, 3];
    let gate_up = random(4 * d_model * 2 * d_hidden, 1);
    let down = random(4 * d_hidden * d_model, 2);
    let total = |rank: usize| rows[rank].iter().sum::<usize>();
    let x_of = |rank: usize| random(total(rank) * d_model, 3 + rank as u64);
    let factors_of = |rank: usize| random(total(rank) * d_model, 5 + rank as u64);
    let naive = |rank: usize, x: &[f64], gate_up: &[f64], down: &[f64]| -> Vec<f64> {
        let experts = NaiveExperts {
            d_model,
            d_hidden,
            gate_up,
            down,
        };
        let of_rows = expert_of[rank].into_iter().zip(rows[rank]);
        of_rows
            .flat_map(|(expert, count)| std::iter::repeat_n(expert, count))
            .zip(x.chunks(d_model))
            .flat_map(|(expert, x)| experts.expert(expert, x))
            .collect()
    };
    let replica = |local_expert, peer, slot| Replica {
        local_expert,
        peer,
        slot,
    };
    let results = run_ranks(2, RankOptions::default(), |comm| {
        let device = Device::flex().autodiff();
        let rank = comm.rank();
        let pool = Arc::new(ReplicaPool::default());
        // By expert and rank, and by slot.
        let (outgoing, incoming) = match rank {
            0 => (
                vec![replica(0, 1, 0)],
                vec![replica(0, 1, 0), replica(1, 1, 1)],
            ),
            _ => (
                vec![replica(0, 0, 0), replica(1, 0, 1)],
                vec![replica(0, 0, 0)],
            ),
        };
        let replication = Replication::new(comm.clone(), 0, 0, outgoing, incoming, pool.clone());
        let half = |all: &[f64]| {
            let half = all.len() / 2;
            all[rank * half..(rank + 1) * half].to_vec()
        };
        let x = tensor64(&x_of(rank), [total(rank), d_model], &device).require_grad();
        let gate_up = tensor64(&half(&gate_up), [2, d_model, 2 * d_hidden], &device).require_grad();
        let down = tensor64(&half(&down), [2, d_hidden, d_model], &device).require_grad();
        let offsets = offsets_of(&rows[rank][..instances[rank]], &device);
        let out = expert_swiglu(
            x.clone(),
            gate_up.clone(),
            down.clone(),
            offsets,
            replication,
        );
        let factors = tensor64(&factors_of(rank), out.dims(), &device);
        let grads = (out.clone() * factors).sum().backward();
        (
            values(&out),
            values(&x.grad(&grads).expect("a gradient")),
            values(&gate_up.grad(&grads).expect("a gradient")),
            values(&down.grad(&grads).expect("a gradient")),
            pool.peak_bytes(),
        )
    })
    .expect("both ranks");
    let loss = |gate_up: &[f64], down: &[f64]| {
        (0..2)
            .map(|rank| dot(&naive(rank, &x_of(rank), gate_up, down), &factors_of(rank)))
            .sum()
    };
    let mut grad_gate_up = Vec::new();
    let mut grad_down = Vec::new();
    for (rank, (out, grad_x, of_gate_up, of_down, peak)) in results.into_iter().enumerate() {
        let expected = naive(rank, &x_of(rank), &gate_up, &down);
        assert_close("output", &out, &expected, 1e-12);
        assert_gradient("x", &grad_x, &x_of(rank), |x| {
            dot(&naive(rank, x, &gate_up, &down), &factors_of(rank))
        });
        grad_gate_up.extend(of_gate_up);
        grad_down.extend(of_down);
        let slots = instances[rank] - 2;
        assert_eq!(peak, slots * 3 * d_model * d_hidden * size_of::<f64>());
    }
    assert_gradient("gate_up", &grad_gate_up, &gate_up, |w| loss(w, &down));
    assert_gradient("down", &grad_down, &down, |w| loss(&gate_up, w));
}

#[test]
fn wrong_shapes_panic_and_say_which() {
    let device = Device::flex();
    let zeros2 = |shape: [usize; 2]| Tensor::<2>::zeros(shape, &device);
    let zeros3 = |shape: [usize; 3]| Tensor::<3>::zeros(shape, &device);
    let message = |f: Box<dyn FnOnce() -> Tensor<2>>| {
        let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("a panic");
        match panic.downcast::<String>() {
            Ok(text) => *text,
            Err(panic) => panic.downcast::<&str>().expect("a text").to_string(),
        }
    };
    let swiglu = |x, gate_up, down, counts: &[usize]| {
        let offsets = offsets_of(counts, &device);
        let (x, gate_up, down) = (zeros2(x), zeros3(gate_up), zeros3(down));
        message(Box::new(move || {
            expert_swiglu(x, gate_up, down, offsets, Replication::none())
        }))
    };
    let text = swiglu([2, 5], [3, 4, 6], [3, 3, 5], &[2, 0, 0]);
    assert!(text.contains("gate_up must be"), "{text}");
    let text = swiglu([2, 5], [3, 5, 6], [3, 3, 4], &[2, 0, 0]);
    assert!(text.contains("down must be"), "{text}");
    let text = swiglu([2, 5], [3, 5, 6], [3, 3, 5], &[2, 0]);
    assert!(text.contains("offsets must have"), "{text}");
    let index = index_of(&[0, -1], [1, 2], &device);
    let (y, weights) = (zeros2([1, 3]), zeros2([2, 1]));
    let text = message(Box::new(move || sum_rows(y, index, weights)));
    assert!(text.contains("same shape"), "{text}");
}
