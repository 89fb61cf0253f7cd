//! Grouped products with their gradients, by fixed and by measured tiles, apart and in a queue.

use cubecl::client::Client;
use cubecl_kernels::{
    DeviceTensor, ExpertWeights,
    matmul::{Problem, Tiling, swiglu_backward},
    queue::{Policy, TileQueue},
    swiglu::swiglu,
};

use super::{Checks, Outcome, error_of, largest, tensor, text};
use crate::common::{self, Value, grouped::Case};

pub fn run<T: Value>(checks: &mut Checks) {
    let mut one_busy = vec![0; 16];
    one_busy[11] = 200;
    for (name, case, tilings) in [
        (
            "tile edges",
            Case::new([33, 0, 7, 130], 136, 272),
            &[Tiling::Fixed, Tiling::Tuned][..],
        ),
        (
            "two buffers",
            Case {
                replicas: 2,
                ..Case::new([4, 0, 9, 3], 16, 24)
            },
            &[Tiling::Fixed],
        ),
        ("odd sizes", Case::new([3, 5], 7, 10), &[Tiling::Fixed]),
        (
            "one busy expert",
            Case::new(one_busy, 64, 96),
            &[Tiling::Fixed],
        ),
    ] {
        for &tiling in tilings {
            let name = format!("{name}, {tiling:?} tile");
            products::<T>(checks, &name, &case, tiling);
        }
    }
}

/// Host data of a case, and the same in f64.
struct Data<T> {
    x: Vec<T>,
    weights: Vec<T>,
    grad: Vec<T>,
    x64: Vec<f64>,
    weights64: Vec<f64>,
    grad64: Vec<f64>,
}

fn products<T: Value>(checks: &mut Checks, name: &str, case: &Case, tiling: Tiling) {
    let (n, k, m) = (case.rows(), case.k, case.m);
    let [x, weights, grad] = [n * k, case.counts.len() * k * m, n * m]
        .map(|len| common::random_of::<T>(len, len as u64));
    let data = Data {
        x64: common::to_f64(&x),
        weights64: common::to_f64(&weights),
        grad64: common::to_f64(&grad),
        x,
        weights,
        grad,
    };
    checks.close::<T>(&format!("grouped_matmul, {name}"), |client| {
        let x = tensor(client, &data.x, &[n, k])?;
        let weights = weights_of(client, case, &data.weights)?;
        let offsets = offsets(client, case)?;
        let problem = || Problem::matmul(client, &x, &weights, &offsets).map_err(text);
        let mut tilings = vec![tiling];
        if tiling == Tiling::Tuned {
            // What is measured must be right whether it is fastest or not.
            tilings.extend((0..problem()?.shapes(client)).map(Tiling::Shape));
        }
        let expected = case.forward_reference(&data.x64, &data.weights64);
        // All are kept, so that none finds the results of another in its memory.
        let problems: Vec<Problem> = tilings
            .iter()
            .map(|_| problem())
            .collect::<Result<_, _>>()?;
        largest(problems.iter().zip(tilings).map(|(problem, tiling)| {
            problem.run(client, tiling);
            error_of::<T>(client, problem.output(), &expected)
                .map_err(|error| format!("{tiling:?} tile: {error}"))
        }))
    });
    if tiling == Tiling::Tuned {
        // Measuring compiles every tile: one product will do.
        return;
    }
    checks.close::<T>(&format!("grouped_swiglu, {name}"), |client| {
        let x = tensor(client, &data.x, &[n, k])?;
        let weights = weights_of(client, case, &data.weights)?;
        let problem =
            Problem::swiglu(client, &x, &weights, &offsets(client, case)?).map_err(text)?;
        problem.run(client, tiling);
        let hidden = case.forward_reference(&data.x64, &data.weights64);
        let activation = problem.second_output().ok_or("no activation")?;
        let alone = swiglu(client, problem.output()).map_err(text)?;
        let expected = case.activation_reference(&hidden);
        largest([
            error_of::<T>(client, problem.output(), &hidden),
            error_of::<T>(client, activation, &expected),
            error_of::<T>(client, &alone, &expected),
        ])
    });
    checks.close::<T>(&format!("swiglu_backward, {name}"), |client| {
        activation_backward::<T>(client, &data.grad, &data.grad64, m)
    });
    checks.close::<T>(&format!("grouped_matmul_data_grad, {name}"), |client| {
        let problem = data_grad(client, case, &data)?;
        problem.run(client, tiling);
        let expected = case.data_grad_reference(&data.grad64, &data.weights64);
        error_of::<T>(client, problem.output(), &expected)
    });
    checks.close::<T>(&format!("grouped_matmul_weight_grad, {name}"), |client| {
        let problem = weight_grad(client, case, &data)?;
        problem.run(client, tiling);
        weight_grad_error::<T>(client, case, &data, &problem)
    });
    checks.close::<T>(&format!("queue of both gradients, {name}"), |client| {
        let (urgent, background) = (
            data_grad(client, case, &data)?,
            weight_grad(client, case, &data)?,
        );
        let outputs = (urgent.clone(), background.clone());
        let queue =
            TileQueue::new(client, urgent, background, Policy::BackgroundOnly).map_err(text)?;
        queue.run(client);
        queue.set_policy(client, Policy::UrgentFirst);
        queue.run(client);
        let expected = case.data_grad_reference(&data.grad64, &data.weights64);
        largest([
            error_of::<T>(client, outputs.0.output(), &expected),
            weight_grad_error::<T>(client, case, &data, &outputs.1),
        ])
    });
}

fn weights_of<T: Value>(client: &Client, case: &Case, data: &[T]) -> Result<ExpertWeights, String> {
    let home = case.counts.len() - case.replicas;
    let (first, second) = data.split_at(home * case.k * case.m);
    let home = tensor(client, first, &[home, case.k, case.m])?;
    let replicas = tensor(client, second, &[case.replicas, case.k, case.m])?;
    ExpertWeights::with_replicas(home, replicas).map_err(text)
}

fn offsets(client: &Client, case: &Case) -> Result<DeviceTensor, String> {
    let offsets = common::offsets(&case.counts);
    tensor(client, &offsets, &[offsets.len()])
}

fn data_grad<T: Value>(client: &Client, case: &Case, data: &Data<T>) -> Result<Problem, String> {
    let grad = tensor(client, &data.grad, &[case.rows(), case.m])?;
    let weights = weights_of(client, case, &data.weights)?;
    Problem::data_grad(client, &grad, &weights, &offsets(client, case)?).map_err(text)
}

/// Into weights that hold 7 everywhere.
fn weight_grad<T: Value>(client: &Client, case: &Case, data: &Data<T>) -> Result<Problem, String> {
    let x = tensor(client, &data.x, &[case.rows(), case.k])?;
    let grad = tensor(client, &data.grad, &[case.rows(), case.m])?;
    let out = weights_of(client, case, &vec![T::of(7.0); data.weights.len()])?;
    Problem::weight_grad(client, &x, &grad, &offsets(client, case)?, &out).map_err(text)
}

fn weight_grad_error<T: Value>(
    client: &Client,
    case: &Case,
    data: &Data<T>,
    problem: &Problem,
) -> Outcome {
    let expected = case.weight_grad_reference(&data.x64, &data.grad64, 7.0);
    let home = problem.output();
    let (first, second) = expected.split_at(home.len());
    match problem.second_output() {
        Some(replicas) => largest([
            error_of::<T>(client, home, first),
            error_of::<T>(client, replicas, second),
        ]),
        None => error_of::<T>(client, home, &expected),
    }
}

/// Hidden values `[N, m]`, and the gradient of their activation, which is their second half.
fn activation_backward<T: Value>(
    client: &Client,
    hidden: &[T],
    hidden64: &[f64],
    m: usize,
) -> Outcome {
    let (rows, width) = (hidden.len() / m, m / 2);
    let grad: Vec<T> = hidden
        .chunks_exact(m)
        .flat_map(|row| row[width..].to_vec())
        .collect();
    let mut expected = Vec::new();
    for row in hidden64.chunks_exact(m) {
        // d silu(g) / dg = s + g s (1 - s), where s is the sigmoid of g.
        let sigmoid = |gate: f64| 1.0 / (1.0 + (-gate).exp());
        for i in 0..width {
            let (gate, up, s) = (row[i], row[width + i], sigmoid(row[i]));
            expected.push(up * up * (s + gate * s * (1.0 - s)));
        }
        expected.extend((0..width).map(|i| row[width + i] * row[i] * sigmoid(row[i])));
    }
    let hidden = tensor(client, hidden, &[rows, m])?;
    let grad = tensor(client, &grad, &[rows, width])?;
    let out = swiglu_backward(client, &hidden, &grad).map_err(text)?;
    error_of::<T>(client, &out, &expected)
}
