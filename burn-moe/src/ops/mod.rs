//! The Burn backend extension of this crate: the operations of a mixture-of-experts layer that
//! Burn's own tensor operations cannot express, or only at the price of copies.
//!
//! Letters in shapes: `T` tokens, `N` token copies (rows sorted by expert), `D` model width,
//! `F` expert width, `K` experts per token, `E` experts, `L` experts at home on a rank, `R`
//! replica slots in use on a rank.
//!
//! | operation | forward | backward |
//! |---|---|---|
//! | [`gather_rows`] | permute: copies rows into expert order | adds rows back |
//! | [`sum_rows`] | unpermute: weighted sum of each token's copies | gathers, and dots for the weights |
//! | [`expert_swiglu`] | grouped SwiGLU over home experts and replicas | data and weight gradients |
//! | [`all_to_all_rows`] | rows to the ranks that compute them | the same, the other way |
//! | [`select_experts`] | group-limited top-k | none (ids) |
//!
//! A backend that wants to run MoE layers implements [`MoeOps`]; the operations that talk to
//! other ranks have default bodies that pass through host memory. On CUDA tensors they go from
//! device to device where the communicator has a link (feature `nccl`).

mod backends;
mod exchange;
mod functions;
mod replication;

pub use exchange::RowExchange;
pub(crate) use functions::reshape;
pub use functions::{
    all_to_all_rows, expert_swiglu, gather_rows, select_experts, send_experts, sum_rows,
};
pub use replication::{Pass, Replica, ReplicaPool, Replication};

use burn::backend::{
    Backend, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
#[cfg(feature = "fusion")]
use burn::tensor::{DType, Shape};

/// How many experts a token chooses, and from which groups (DeepSeek-V3, section 2.1.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TopK {
    /// Experts per token.
    pub k: usize,
    /// Groups that the experts are divided into, in order of their ids; 1 means no groups.
    pub groups: usize,
    /// Groups a token may choose from: those with the largest sum of their two best scores.
    pub kept_groups: usize,
}

/// Operations of a mixture-of-experts layer, supplied by a backend extension.
///
/// Model authors use the functions of [this module](crate::ops) or the layers built on them;
/// this trait is what a backend implements. Differentiable are `gather_rows`, `sum_rows`,
/// `expert_swiglu` and `all_to_all_rows`; the others are what these are made of, and treat their
/// inputs as constants.
#[backend_extension(
    Flex: cfg(feature = "flex"),
    Cube: cfg(feature = "cubecl"),
    Autodiff: cfg(feature = "autodiff"),
    Fusion: cfg(feature = "fusion")
)]
pub trait MoeOps: Backend {
    /// Experts of each token, best first: top-k of `scores + bias` within the kept groups.
    /// `scores [T, E]`, `bias [E]` -> ids `[T, K]`. Ties go to the lowest id.
    #[fusion(dtype = DType::I32, shape = Shape::new([scores[0], top_k.k]))]
    #[allow(unused_variables)]
    fn select_experts(
        scores: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        top_k: TopK,
    ) -> IntTensor<Self>;

    /// `x [T, D]`, `index [N]` -> `out [N, D]` with `out[i] = x[index[i]]`.
    #[fusion(dtype = x, shape = Shape::new([index[0], x[1]]))]
    fn gather_rows(x: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self>;

    /// Adjoint of [`gather_rows`](MoeOps::gather_rows): `out[index[i]] += grad[i]` in order of
    /// `i`, `out [rows, D]`.
    #[fusion(dtype = grad, shape = Shape::new([*rows, grad[1]]))]
    #[allow(unused_variables)]
    fn scatter_add_rows(
        grad: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self>;

    /// `y [N, D]`, `index [T, K]` (-1: no row), `weights [T, K]` -> `out [T, D]` with
    /// `out[t] = sum over k of weights[t, k] * y[index[t, k]]`, added in the order of `k`.
    #[fusion(dtype = y, shape = Shape::new([index[0], y[1]]))]
    fn sum_rows(
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self>;

    /// Gradients of [`sum_rows`](MoeOps::sum_rows) for `y` and `weights`. A row of `y` is named
    /// by at most one place of `index`.
    #[fusion(meta = |_grad, y, _index, weights| (y.clone(), weights.clone()))]
    fn sum_rows_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// SwiGLU experts over rows sorted by instance: `x [N, D]`, `offsets [L + R + 1]`, home
    /// weights `gate_up [L, D, 2F]` (gate first) and `down [L, F, D]`, replica weights with `R`
    /// in place of `L` -> output `[N, D]` and `hidden [N, 2F]` (gate and up before the
    /// activation, for the backward pass).
    #[fusion(meta = |x, _gate_up, down, _slot_gate_up, _slot_down, _offsets| {
        let hidden = Shape::new([x.shape[0], 2 * down.shape[1]]);
        (x.clone(), burn::backend::fusion::custom::TensorSpec::new(hidden, x.dtype))
    })]
    fn grouped_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>);

    /// Gradients of [`grouped_swiglu`](MoeOps::grouped_swiglu) for `x`, `gate_up`, `down`,
    /// `slot_gate_up` and `slot_down`, from the gradient of its output and its `hidden`.
    #[fusion(meta = |_grad, x, _hidden, gate_up, down, slot_gate_up, slot_down, _offsets| (
        x.clone(),
        gate_up.clone(),
        down.clone(),
        slot_gate_up.clone(),
        slot_down.clone(),
    ))]
    #[allow(clippy::too_many_arguments, clippy::type_complexity)]
    fn grouped_swiglu_backward(
        grad: FloatTensor<Self>,
        x: FloatTensor<Self>,
        hidden: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
        FloatTensor<Self>,
    );

    /// The experts of a rank, home and replicated: fetches the replicas that `replication` names,
    /// computes [`grouped_swiglu`](MoeOps::grouped_swiglu), and gives the slots back.
    #[fusion(default)]
    #[allow(unused_variables)]
    fn expert_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        replication: Replication,
    ) -> FloatTensor<Self> {
        let (slot_gate_up, slot_down) = Self::fetch_experts(
            gate_up.clone(),
            down.clone(),
            replication.clone(),
            Pass::Forward,
        );
        let (output, _) = Self::grouped_swiglu(
            x,
            gate_up,
            down,
            slot_gate_up.clone(),
            slot_down.clone(),
            offsets,
        );
        replication.release((slot_gate_up, slot_down));
        output
    }

    /// Sends the home experts that others replicate, unless [`send_experts`] already has in this
    /// pass, and receives into this rank's slots:
    /// `gate_up [L, D, 2F]`, `down [L, F, D]` -> `[R, D, 2F]`, `[R, F, D]`.
    #[fusion(default)]
    #[allow(unused_variables)]
    fn fetch_experts(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        replication: Replication,
        pass: Pass,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        exchange::fetch_experts_through_host::<Self>(gate_up, down, &replication, pass)
    }

    /// Gradients of replicas go home: sends `slot_*` to the home ranks and adds what arrives to
    /// the home gradients, in the order of the sending ranks.
    #[fusion(default)]
    #[allow(unused_variables)]
    fn return_expert_grads(
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        replication: Replication,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        exchange::return_grads_through_host::<Self>(
            gate_up,
            down,
            slot_gate_up,
            slot_down,
            &replication,
        )
    }

    /// Rows to other ranks: `x [sum of send, D]`, in order of destination ->
    /// `[sum of receive, D]`, in order of source.
    #[fusion(default)]
    #[allow(unused_variables)]
    fn all_to_all_rows(x: FloatTensor<Self>, exchange: RowExchange) -> FloatTensor<Self> {
        exchange::all_to_all_through_host::<Self>(x, exchange)
    }
}
