//! The operations on Burn's [`Tensor`], with their shapes checked.

use burn::backend::Dispatch;
use burn::backend::ops::FloatTensorOps;
use burn::tensor::{Int, Shape, Tensor};

use super::{MoeOps, Pass, Replication, RowExchange, TopK};

/// Chooses each token's experts, best first (DeepSeek-V3, arXiv 2412.19437, section 2.1.2):
/// top-k of `scores + bias` within the `kept_groups` groups whose two best biased scores sum
/// highest. Ties go to the lowest id; groups that are not kept cannot be chosen, however low the
/// other scores are.
///
/// # Shapes
///
/// - `scores`: `[tokens, experts]`
/// - `bias`: `[experts]`
/// - result: `[tokens, k]`
///
/// # Panics
///
/// Panics when the shapes disagree, when the groups do not divide the experts, or when the kept
/// groups hold fewer than `k` experts.
pub fn select_experts(scores: Tensor<2>, bias: Tensor<1>, top_k: TopK) -> Tensor<2, Int> {
    let [_, experts] = scores.dims();
    assert_eq!(bias.dims(), [experts], "bias must have one value an expert");
    let TopK {
        k,
        groups,
        kept_groups,
    } = top_k;
    assert!(
        groups > 0 && experts.is_multiple_of(groups),
        "{groups} groups do not divide {experts} experts"
    );
    assert!(
        (1..=groups).contains(&kept_groups) && k <= experts / groups * kept_groups,
        "cannot choose {k} experts from {kept_groups} of {groups} groups of {}",
        experts / groups
    );
    Tensor::from_dispatch(Dispatch::select_experts(
        scores.into_dispatch(),
        bias.into_dispatch(),
        top_k,
    ))
}

/// Copies rows: `out[i] = x[index[i]]`. The gradient adds rows back in the order of `i`, so it is
/// the same in every run.
///
/// # Shapes
///
/// - `x`: `[tokens, d_model]`
/// - `index`: `[rows]`, values in `0..tokens`
/// - result: `[rows, d_model]`
pub fn gather_rows(x: Tensor<2>, index: Tensor<1, Int>) -> Tensor<2> {
    Tensor::from_dispatch(Dispatch::gather_rows(
        x.into_dispatch(),
        index.into_dispatch(),
    ))
}

/// Weighted sum of rows, added in the order of `k`:
/// `out[t] = sum over k of weights[t, k] * y[index[t, k]]`, where index -1 stands for no row.
/// Every row of `y` must be named at most once.
///
/// # Shapes
///
/// - `y`: `[rows, d_model]`
/// - `index` and `weights`: `[tokens, k]`
/// - result: `[tokens, d_model]`
///
/// # Panics
///
/// Panics when `index` and `weights` differ in shape.
pub fn sum_rows(y: Tensor<2>, index: Tensor<2, Int>, weights: Tensor<2>) -> Tensor<2> {
    assert_eq!(
        index.dims(),
        weights.dims(),
        "index and weights must have the same shape"
    );
    Tensor::from_dispatch(Dispatch::sum_rows(
        y.into_dispatch(),
        index.into_dispatch(),
        weights.into_dispatch(),
    ))
}

/// SwiGLU experts over rows that are sorted by expert: for the rows of expert `e`,
/// `(silu(x W_gate[e]) * (x W_up[e])) W_down[e]`. Rows of instance `i` are
/// `offsets[i]..offsets[i + 1]`: first the experts at home, then the replicas of `replication`.
///
/// # Shapes
///
/// - `x`: `[rows, d_model]`
/// - `gate_up`: `[experts, d_model, 2 * d_hidden]`, gate first
/// - `down`: `[experts, d_hidden, d_model]`
/// - `offsets`: `[experts + replicas + 1]`, rising from 0 to `rows`
/// - result: `[rows, d_model]`
///
/// # Panics
///
/// Panics when the shapes disagree. With replicas, unwinds with the
/// [`CommError`](crate::comm::CommError) when a rank is lost or too late.
pub fn expert_swiglu(
    x: Tensor<2>,
    gate_up: Tensor<3>,
    down: Tensor<3>,
    offsets: Tensor<1, Int>,
    replication: Replication,
) -> Tensor<2> {
    let [_, d_model] = x.dims();
    let [experts, d_hidden, _] = down.dims();
    assert_eq!(
        gate_up.dims(),
        [experts, d_model, 2 * d_hidden],
        "gate_up must be [experts, d_model, 2 * d_hidden]"
    );
    assert_eq!(
        down.dims(),
        [experts, d_hidden, d_model],
        "down must be [experts, d_hidden, d_model]"
    );
    assert_eq!(
        offsets.dims(),
        [experts + replication.incoming().len() + 1],
        "offsets must have one place an instance, and one more"
    );
    Tensor::from_dispatch(Dispatch::expert_swiglu(
        x.into_dispatch(),
        gate_up.into_dispatch(),
        down.into_dispatch(),
        offsets.into_dispatch(),
        replication,
    ))
}

/// Sends the home experts that `replication` names to the ranks that replicate them, without waiting. What would send
/// them in this pass ([`expert_swiglu`], or its backward pass) then only receives. No gradient flows through it.
///
/// # Shapes
///
/// - `gate_up`: `[experts, d_model, 2 * d_hidden]`
/// - `down`: `[experts, d_hidden, d_model]`
///
/// # Panics
///
/// Unwinds with the [`CommError`](crate::comm::CommError) when a rank is lost.
pub fn send_experts(gate_up: Tensor<3>, down: Tensor<3>, replication: &Replication, pass: Pass) {
    let Some(outgoing) = replication.outgoing_only(pass) else {
        return;
    };
    // With nothing to receive, the slots that come back are empty.
    Dispatch::fetch_experts(
        gate_up.inner().into_dispatch(),
        down.inner().into_dispatch(),
        outgoing,
        pass,
    );
}

/// Sends rows to other ranks and receives theirs; all ranks of the exchange must call it. The
/// gradient travels back the same ways.
///
/// # Shapes
///
/// - `x`: `[sum of exchange.send, d_model]`, in order of destination
/// - result: `[sum of exchange.receive, d_model]`, in order of source
///
/// # Panics
///
/// Panics when `x` has another number of rows than announced; unwinds with the
/// [`CommError`](crate::comm::CommError) when a rank is lost or too late.
pub fn all_to_all_rows(x: Tensor<2>, exchange: RowExchange) -> Tensor<2> {
    let [rows, _] = x.dims();
    assert_eq!(
        rows,
        exchange.send.iter().sum::<usize>(),
        "rows to send must be as many as announced in {exchange:?}"
    );
    Tensor::from_dispatch(Dispatch::all_to_all_rows(x.into_dispatch(), exchange))
}

/// The same elements in another shape. Burn's own `reshape` reads a 0 in the shape as "the size it
/// had", which is not what an empty batch means.
pub(crate) fn reshape<const D: usize, const D2: usize>(
    x: Tensor<D>,
    shape: impl Into<Shape>,
) -> Tensor<D2> {
    Tensor::from_dispatch(Dispatch::float_reshape(x.into_dispatch(), shape.into()))
}
