//! Grouped matrix products: the rows of `x` are sorted by expert, and each expert's rows are
//! multiplied by that expert's weights, in one launch, whatever the row counts are.
//!
//! `offsets [E + 1]` lies on the device and is never read back: expert `e` has the rows
//! `offsets[e] .. offsets[e + 1]`. It starts at 0, does not decrease, and ends at `N` at most; rows
//! from `offsets[E]` on are written by nobody. Offsets that break this give undefined numbers, but
//! nothing outside the tensors is read or written.
//!
//! A fixed grid of cubes (as many as the device runs at once) draws tiles from a counter until none
//! are left, so a device stays full however uneven the experts are, and no cube waits for another.
//! Each element is the sum over the depth in ascending order, in f32, computed by one cube: the
//! same row gives the same bits whatever the other rows are, and whatever the tile: which one is
//! used is a matter of speed ([`Tiling`]). Only tensor cores and registers differ in bits, and which
//! of them computes depends on the device and the element type alone.
//!
//! Element types: f32, and f16 and bf16 where the runtime has them; all tensors of a call share
//! one. f16 and bf16 run on tensor cores where the device offers 16 by 16 by 16 fragments; there, and
//! where it copies to shared memory asynchronously (`cp.async`), some shapes of tiles fill up to three
//! stages ahead by such copies. [`Tiling::Tuned`] finds out whether that pays.

mod activation;
mod kernel;
mod launch;
mod multiply;
mod problem;
mod stage;
mod tile;
mod tune;
mod view;

#[cfg(all(test, feature = "runtime"))]
mod tests;

pub use activation::swiglu_backward;
pub use problem::Problem;
pub use tune::Tiling;

pub(crate) use kernel::Fault;
pub(crate) use launch::Prepared;
pub(crate) use view::TraceViewLaunch;

use cubecl::client::Client;

use crate::{DeviceTensor, KernelError};

/// Weights of experts in one or two buffers: those at home on a rank, `[L, K, M]`, and those in its
/// replica slots, `[R, K, M]`. Offsets number them through: first the `L`, then the `R`.
#[derive(Debug, Clone)]
pub struct ExpertWeights {
    home: DeviceTensor,
    replicas: Option<DeviceTensor>,
}

impl ExpertWeights {
    /// Experts in one buffer, `[E, K, M]`.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when the tensor has not three dimensions.
    pub fn new(home: DeviceTensor) -> Result<Self, KernelError> {
        if home.shape().len() != 3 {
            return Err(KernelError::Shape {
                argument: "home",
                shape: home.shape().to_vec(),
                allowed: "[L, K, M]".into(),
            });
        }
        Ok(Self {
            home,
            replicas: None,
        })
    }

    /// Experts in two buffers, `[L, K, M]` and `[R, K, M]`. `R` may be 0.
    ///
    /// # Errors
    /// [`KernelError::Shape`] when one has not three dimensions or the last two differ;
    /// [`KernelError::Dtype`] when the element types differ.
    pub fn with_replicas(home: DeviceTensor, replicas: DeviceTensor) -> Result<Self, KernelError> {
        let weights = Self::new(home)?;
        let [_, k, m] = weights.sizes();
        if replicas.shape().len() != 3 || replicas.shape()[1..] != [k, m] {
            return Err(KernelError::Shape {
                argument: "replicas",
                shape: replicas.shape().to_vec(),
                allowed: format!("[R, {k}, {m}], as the home experts"),
            });
        }
        crate::check::same_dtype("replicas", &replicas, &weights.home)?;
        let replicas = (replicas.shape()[0] > 0).then_some(replicas);
        Ok(Self {
            replicas,
            ..weights
        })
    }

    /// Experts at home, `[L, K, M]`.
    pub fn home(&self) -> &DeviceTensor {
        &self.home
    }

    /// Experts in replica slots, `[R, K, M]`, if there are any.
    pub fn replicas(&self) -> Option<&DeviceTensor> {
        self.replicas.as_ref()
    }

    /// Number of experts in both buffers.
    pub fn experts(&self) -> usize {
        self.home.shape()[0] + self.replicas.as_ref().map_or(0, |r| r.shape()[0])
    }

    /// `[L, K, M]`.
    pub(crate) fn sizes(&self) -> [usize; 3] {
        let shape = self.home.shape();
        [shape[0], shape[1], shape[2]]
    }
}

/// What [`grouped_swiglu`] gives.
#[derive(Debug, Clone)]
pub struct SwiGlu {
    /// Gate and up values before the activation, `[N, 2F]`, gate first.
    pub hidden: DeviceTensor,
    /// `silu(gate) * up`, `[N, F]`.
    pub activation: DeviceTensor,
}

/// Each row times its expert's weights: `x [N, K]`, `weights [E, K, M]`, `offsets [E + 1]` ->
/// `[N, M]`.
///
/// # Errors
/// [`KernelError`] when shapes or element types do not fit, or the device lacks the element type.
pub fn grouped_matmul(
    client: &Client,
    x: &DeviceTensor,
    weights: &ExpertWeights,
    offsets: &DeviceTensor,
) -> Result<DeviceTensor, KernelError> {
    let problem = Problem::matmul(client, x, weights, offsets)?;
    problem.run(client, Tiling::default());
    Ok(problem.out)
}

/// Gradient of [`grouped_matmul`] for `x`: `grad [N, M]`, `weights [E, K, M]`, `offsets [E + 1]` ->
/// `[N, K]`. The weights are read as they lie, not transposed in memory.
///
/// # Errors
/// As for [`grouped_matmul`].
pub fn grouped_matmul_data_grad(
    client: &Client,
    grad: &DeviceTensor,
    weights: &ExpertWeights,
    offsets: &DeviceTensor,
) -> Result<DeviceTensor, KernelError> {
    let problem = Problem::data_grad(client, grad, weights, offsets)?;
    problem.run(client, Tiling::default());
    Ok(problem.out)
}

/// Gradient of [`grouped_matmul`] for the weights, written into `out`: `x [N, K]`, `grad [N, M]`,
/// `offsets [E + 1]`, `out [E, K, M]` (its buffers are overwritten, whoever else shares them).
///
/// Rows are added in ascending order. Experts without rows cost nothing and are not written:
/// their part of `out` keeps what it held, so start from [`DeviceTensor::zeros`] for a gradient.
///
/// # Errors
/// As for [`grouped_matmul`].
pub fn grouped_matmul_weight_grad(
    client: &Client,
    x: &DeviceTensor,
    grad: &DeviceTensor,
    offsets: &DeviceTensor,
    out: &ExpertWeights,
) -> Result<(), KernelError> {
    let problem = Problem::weight_grad(client, x, grad, offsets, out)?;
    problem.run(client, Tiling::default());
    Ok(())
}

/// First product of SwiGLU experts with its activation, in one pass: `x [N, D]`,
/// `gate_up [E, D, 2F]` (gate columns first), `offsets [E + 1]` -> hidden `[N, 2F]`, activation
/// `silu(gate) * up`, `[N, F]` (Shazeer 2020, "GLU Variants Improve Transformer"). The activation
/// is computed from the sums in f32, before they are rounded to the element type.
///
/// # Errors
/// As for [`grouped_matmul`]; also when the last dimension of `gate_up` is odd.
pub fn grouped_swiglu(
    client: &Client,
    x: &DeviceTensor,
    gate_up: &ExpertWeights,
    offsets: &DeviceTensor,
) -> Result<SwiGlu, KernelError> {
    let problem = Problem::swiglu(client, x, gate_up, offsets)?;
    problem.run(client, Tiling::default());
    let Problem {
        out, out_second, ..
    } = problem;
    Ok(SwiGlu {
        hidden: out,
        activation: out_second.expect("a SwiGLU problem has two outputs"),
    })
}
