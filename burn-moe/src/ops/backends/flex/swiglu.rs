//! Grouped SwiGLU: every expert's rows through its own two matrices, experts and row blocks in
//! parallel, weights read where they lie.

use super::activation::Real;
use super::matmul::{matmul, matmul_transposed, matmul_weight_grad};
use rayon::prelude::*;
use std::ops::Range;

/// Row blocks are not cut below this: a block reads all of its expert's weights once.
const MIN_BLOCK_ROWS: usize = 32;

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

/// Output `[N, D]` and hidden `[N, 2F]` for `x [N, D]`.
pub(super) fn forward<T: Real>(x: &[T], groups: &Groups<'_, T>) -> (Vec<T>, Vec<T>) {
    let (d, f) = (groups.d_model, groups.d_hidden);
    let rows = x.len() / d.max(1);
    let mut out = vec![T::zero(); rows * d];
    let mut hidden = vec![T::zero(); rows * 2 * f];
    let mut tasks = Vec::with_capacity(groups.rows.len());
    let (mut out_rest, mut hidden_rest) = (out.as_mut_slice(), hidden.as_mut_slice());
    for (instance, block) in row_blocks(groups, rows) {
        let (out_block, hidden_block);
        (out_block, out_rest) = out_rest.split_at_mut(block.len() * d);
        (hidden_block, hidden_rest) = hidden_rest.split_at_mut(block.len() * 2 * f);
        tasks.push((instance, block, out_block, hidden_block));
    }
    tasks.into_par_iter().for_each_init(
        Vec::new,
        |activated: &mut Vec<T>, (instance, block, out, hidden)| {
            let x = &x[block.start * d..block.end * d];
            matmul(x, groups.gate_up(instance), hidden, d, 2 * f);
            activated.clear();
            activated.resize(block.len() * f, T::zero());
            for (hidden, activated) in hidden
                .chunks_exact(2 * f)
                .zip(activated.chunks_exact_mut(f))
            {
                let (gate, up) = hidden.split_at(f);
                T::swiglu(gate, up, activated);
            }
            matmul(activated, groups.down(instance), out, f, d);
        },
    );
    (out, hidden)
}

/// Every instance's rows, cut so that all threads of the pool find work.
fn row_blocks<'a, T: Real>(
    groups: &'a Groups<'_, T>,
    rows: usize,
) -> impl Iterator<Item = (usize, Range<usize>)> + 'a {
    let threads = rayon::current_num_threads();
    let most = if threads == 1 {
        rows
    } else {
        rows.div_ceil(4 * threads)
    }
    .max(MIN_BLOCK_ROWS);
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
    pub x: Vec<T>,
    pub gate_up: (Vec<T>, Vec<T>),
    pub down: (Vec<T>, Vec<T>),
}

/// Gradients for `x` and the weights, from the gradient of the output and the hidden `[N, 2F]`.
pub(super) fn backward<T: Real>(
    grad: &[T],
    x: &[T],
    hidden: &[T],
    groups: &Groups<'_, T>,
) -> Grads<T> {
    let (d, f) = (groups.d_model, groups.d_hidden);
    // Fresh zero pages: an expert without rows costs no write.
    let zeros = |weights: &Weights<'_, T>| {
        (
            vec![T::zero(); weights.home.len()],
            vec![T::zero(); weights.slots.len()],
        )
    };
    let mut grads = Grads {
        x: vec![T::zero(); x.len()],
        gate_up: zeros(&groups.gate_up),
        down: zeros(&groups.down),
    };
    let mut tasks = Vec::with_capacity(groups.rows.len());
    {
        let mut x_rest = grads.x.as_mut_slice();
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
    tasks.into_par_iter().for_each_init(
        || (Vec::new(), Vec::new()),
        |(activated, dhidden): &mut (Vec<T>, Vec<T>), (instance, rows, dx, dgate_up, ddown)| {
            let x = &x[rows.start * d..rows.end * d];
            let grad = &grad[rows.start * d..rows.end * d];
            activated.clear();
            activated.resize(rows.len() * f, T::zero());
            matmul_transposed(grad, groups.down(instance), activated, d, f);
            dhidden.clear();
            dhidden.extend_from_slice(&hidden[rows.start * 2 * f..rows.end * 2 * f]);
            for (hidden, activated) in dhidden
                .chunks_exact_mut(2 * f)
                .zip(activated.chunks_exact_mut(f))
            {
                let (gate, up) = hidden.split_at_mut(f);
                T::swiglu_backward(activated, gate, up);
            }
            matmul_weight_grad(activated, grad, ddown, f, d);
            matmul_transposed(dhidden, groups.gate_up(instance), dx, 2 * f, d);
            matmul_weight_grad(x, dhidden, dgate_up, d, 2 * f);
        },
    );
    grads
}

/// The gradient matrices of all instances, home first.
fn chunks<T>(grads: &mut (Vec<T>, Vec<T>), size: usize) -> impl Iterator<Item = &mut [T]> {
    let size = size.max(1);
    grads
        .0
        .chunks_exact_mut(size)
        .chain(grads.1.chunks_exact_mut(size))
}
