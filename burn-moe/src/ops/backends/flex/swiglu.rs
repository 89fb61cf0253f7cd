//! Grouped SwiGLU: every expert's rows through its own two matrices, experts and row blocks in
//! parallel, weights read where they lie.

use super::activation::Real;
use super::buffers::Buffer;
use super::matmul::{matmul, matmul_transposed, matmul_weight_grad};
use rayon::prelude::*;
use std::ops::Range;

/// Row blocks are not cut below this: a block reads all of its expert's weights once.
const MIN_BLOCK_ROWS: usize = 32;

/// Row blocks are cut above this: as many as meet weights that are read once.
const MAX_BLOCK_ROWS: usize = 256;

/// Weight gradients are not cut into blocks of fewer rows: each reads all of one operand.
const MIN_GRAD_ROWS: usize = 96;

/// One matrix of all experts on a rank: of those at home and of those in replica slots.
pub(super) struct Weights<'a, T> {
    pub home: &'a [T],
    pub slots: &'a [T],
}

impl<'a, T> Weights<'a, T> {
    fn of(&self, instance: usize, size: usize) -> &'a [T] {
        let home = self.home.len() / size;
        match instance.checked_sub(home) {
            None => &self.home[instance * size..(instance + 1) * size],
            Some(slot) => &self.slots[slot * size..(slot + 1) * size],
        }
    }
}

/// The experts of a rank and the rows of each.
pub(super) struct Groups<'a, T> {
    /// Instances that have rows, with those rows, in order.
    rows: Vec<(usize, Range<usize>)>,
    gate_up: Weights<'a, T>,
    down: Weights<'a, T>,
    d_model: usize,
    d_hidden: usize,
}

impl<'a, T: Real> Groups<'a, T> {
    pub(super) fn new(
        offsets: &[i32],
        gate_up: Weights<'a, T>,
        down: Weights<'a, T>,
        d_model: usize,
        d_hidden: usize,
    ) -> Self {
        let rows = offsets
            .windows(2)
            .enumerate()
            .map(|(instance, pair)| (instance, pair[0] as usize..pair[1] as usize))
            .filter(|(_, rows)| !rows.is_empty())
            .collect();
        Self {
            rows,
            gate_up,
            down,
            d_model,
            d_hidden,
        }
    }

    fn gate_up(&self, instance: usize) -> &'a [T] {
        self.gate_up.of(instance, self.d_model * 2 * self.d_hidden)
    }

    fn down(&self, instance: usize) -> &'a [T] {
        self.down.of(instance, self.d_hidden * self.d_model)
    }
}

/// Output `[N, D]` for `x [N, D]`, and the hidden `[N, 2F]` where they are asked for.
pub(super) fn forward<T: Real>(
    x: &[T],
    groups: &Groups<'_, T>,
    keep_hidden: bool,
) -> (Buffer<T>, Buffer<T>) {
    let (d, f) = (groups.d_model, groups.d_hidden);
    let rows = x.len() / d.max(1);
    let mut out = Buffer::new(rows * d);
    let mut hidden = Buffer::new(if keep_hidden { rows * 2 * f } else { 0 });
    let mut tasks = Vec::with_capacity(groups.rows.len());
    let (mut out_rest, mut hidden_rest) = (&mut *out, &mut *hidden);
    for (instance, block) in row_blocks(groups, rows) {
        let (out_block, hidden_block);
        (out_block, out_rest) = out_rest.split_at_mut(block.len() * d);
        let kept = if keep_hidden { block.len() * 2 * f } else { 0 };
        (hidden_block, hidden_rest) = hidden_rest.split_at_mut(kept);
        tasks.push((instance, block, out_block, hidden_block));
    }
    tasks
        .into_par_iter()
        .for_each(|(instance, block, out, hidden)| {
            let x = &x[block.start * d..block.end * d];
            let mut passing = Buffer::new(if keep_hidden { 0 } else { block.len() * 2 * f });
            let hidden = if keep_hidden { hidden } else { &mut *passing };
            matmul(x, groups.gate_up(instance), hidden, d, 2 * f);
            let mut activated = Buffer::new(block.len() * f);
            for (hidden, activated) in hidden
                .chunks_exact(2 * f)
                .zip(activated.chunks_exact_mut(f))
            {
                let (gate, up) = hidden.split_at(f);
                T::swiglu(gate, up, activated);
            }
            matmul(&activated, groups.down(instance), out, f, d);
        });
    (out, hidden)
}

/// Every instance's rows, cut so that all threads of the pool find work.
fn row_blocks<'a, T: Real>(
    groups: &'a Groups<'_, T>,
    rows: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    let threads = rayon::current_num_threads();
    let most = if threads == 1 {
        MAX_BLOCK_ROWS
    } else {
        rows.div_ceil(4 * threads)
            .clamp(MIN_BLOCK_ROWS, MAX_BLOCK_ROWS)
    };
    groups.rows.iter().flat_map(move |(instance, rows)| {
        let blocks = rows.len().div_ceil(most);
        (0..blocks).map(move |block| {
            let at = |i: usize| rows.start + rows.len() * i / blocks;
            (*instance, at(block)..at(block + 1))
        })
    })
}

/// Gradients of [`forward`]; weight gradients as those of the home experts and of the slots.
pub(super) struct Grads<T> {
    pub x: Buffer<T>,
    pub gate_up: (Buffer<T>, Buffer<T>),
    pub down: (Buffer<T>, Buffer<T>),
}

/// Gradients for `x` and the weights, from the gradient of the output and the hidden `[N, 2F]`.
pub(super) fn backward<T: Real>(
    grad: &[T],
    x: &[T],
    hidden: &[T],
    groups: &Groups<'_, T>,
) -> Grads<T> {
    let (d, f) = (groups.d_model, groups.d_hidden);
    let mut grads = Grads {
        x: Buffer::new(x.len()),
        gate_up: grads_of(groups, &groups.gate_up, d * 2 * f),
        down: grads_of(groups, &groups.down, f * d),
    };
    let mut tasks = Vec::with_capacity(groups.rows.len());
    {
        let mut x_rest = &mut *grads.x;
        let mut gate_up = chunks(&mut grads.gate_up, d * 2 * f);
        let mut down = chunks(&mut grads.down, f * d);
        let mut next = 0;
        for (instance, rows) in &groups.rows {
            let dx;
            (dx, x_rest) = x_rest.split_at_mut(rows.len() * d);
            let skip = instance - next;
            next = instance + 1;
            if let (Some(gate_up), Some(down)) = (gate_up.nth(skip), down.nth(skip)) {
                tasks.push((*instance, rows.clone(), dx, gate_up, down));
            }
        }
    }
    tasks
        .into_par_iter()
        .for_each(|(instance, rows, dx, dgate_up, ddown)| {
            let x = &x[rows.start * d..rows.end * d];
            let grad = &grad[rows.start * d..rows.end * d];
            let hidden = &hidden[rows.start * 2 * f..rows.end * 2 * f];
            expert_backward(
                [grad, x, hidden],
                [groups.gate_up(instance), groups.down(instance)],
                [dx, dgate_up, ddown],
                (d, f),
            );
        });
    grads
}

/// [`backward`] of one expert. Experts with many rows are cut into blocks of rows, and of the rows
/// of weight gradients, for the threads that find no expert of their own.
fn expert_backward<T: Real>(
    [grad, x, hidden]: [&[T]; 3],
    [gate_up, down]: [&[T]; 2],
    [dx, dgate_up, ddown]: [&mut [T]; 3],
    (d, f): (usize, usize),
) {
    let rows = grad.len() / d;
    let threads = rayon::current_num_threads();
    let block = |rows: usize, least: usize| match threads {
        1 => rows,
        _ => rows.div_ceil(threads).max(least),
    };
    let most = block(rows, MIN_BLOCK_ROWS).min(MAX_BLOCK_ROWS);
    let mut activated = Buffer::<T>::new(rows * f);
    let mut dhidden = Buffer::<T>::new(rows * 2 * f);
    activated
        .par_chunks_mut(most * f)
        .zip(dhidden.par_chunks_mut(most * 2 * f))
        .zip(grad.par_chunks(most * d))
        .zip(hidden.par_chunks(most * 2 * f))
        .for_each(|(((activated, dhidden), grad), hidden)| {
            matmul_transposed(grad, down, activated, d, f);
            dhidden.copy_from_slice(hidden);
            for (hidden, activated) in dhidden
                .chunks_exact_mut(2 * f)
                .zip(activated.chunks_exact_mut(f))
            {
                let (gate, up) = hidden.split_at_mut(f);
                T::swiglu_backward(activated, gate, up);
            }
        });
    let of_x = || {
        dx.par_chunks_mut(most * d)
            .zip(dhidden.par_chunks(most * 2 * f))
            .for_each(|(dx, dhidden)| matmul_transposed(dhidden, gate_up, dx, 2 * f, d));
    };
    let of_weights = |left: &[T], right: &[T], out: &mut [T], (k, n): (usize, usize)| {
        let rows = block(k, MIN_GRAD_ROWS);
        out.par_chunks_mut(rows * n)
            .enumerate()
            .for_each(|(i, out)| matmul_weight_grad(left, right, out, (k, n), i * rows));
    };
    rayon::join(of_x, || {
        rayon::join(
            || of_weights(x, &dhidden, dgate_up, (d, 2 * f)),
            || of_weights(&activated, grad, ddown, (f, d)),
        )
    });
}

/// Gradients of one matrix of all experts: zero for experts without rows, for the others still to be
/// written.
fn grads_of<T: Real>(
    groups: &Groups<'_, T>,
    weights: &Weights<'_, T>,
    size: usize,
) -> (Buffer<T>, Buffer<T>) {
    let home = weights.home.len().checked_div(size).unwrap_or(0);
    let place = |i: usize| i * size..(i + 1) * size;
    let busy = groups.rows.iter().map(|(instance, _)| *instance);
    let (at_home, in_slots): (Vec<_>, Vec<_>) = busy.partition(|instance| *instance < home);
    let at_home: Vec<_> = at_home.into_iter().map(place).collect();
    let in_slots: Vec<_> = in_slots.into_iter().map(|i| place(i - home)).collect();
    (
        Buffer::zero_except(weights.home.len(), &at_home),
        Buffer::zero_except(weights.slots.len(), &in_slots),
    )
}

/// The gradient matrices of all instances, home first.
fn chunks<T: Real>(
    grads: &mut (Buffer<T>, Buffer<T>),
    size: usize,
) -> impl Iterator<Item = &mut [T]> {
    let size = size.max(1);
    grads
        .0
        .chunks_exact_mut(size)
        .chain(grads.1.chunks_exact_mut(size))
}
