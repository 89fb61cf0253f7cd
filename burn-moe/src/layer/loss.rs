//! Auxiliary losses of the router. Each returns a tensor `[1]` to be scaled and added to the loss.

use burn::tensor::{Int, Tensor};

use super::Routing;

/// Switch Transformer's load-balancing loss (arXiv 2101.03961, equation 4) for top-k routing:
/// `E * sum over experts of f_e * P_e`, where `f_e` is the share of token copies that expert `e`
/// gets and `P_e` its mean share of the scores. 1 when both are even, up to `E` when one expert
/// gets all.
///
/// # Shapes
///
/// - `routing`: of `T >= 1` tokens
pub fn load_balancing(routing: &Routing) -> Tensor<1> {
    sequence_balancing(routing, routing.ids.dims()[0])
}

/// DeepSeek-V3's sequence-wise loss (arXiv 2412.19437, equations 17 to 20, without the factor
/// alpha): [`load_balancing`] of each sequence by itself, averaged over the sequences.
///
/// # Shapes
///
/// - `routing`: of `sequences * sequence_length` tokens, sequence by sequence
///
/// # Panics
///
/// Panics when `sequence_length` does not divide the number of tokens, or there are none.
pub fn sequence_balancing(routing: &Routing, sequence_length: usize) -> Tensor<1> {
    let [tokens, experts] = routing.scores.dims();
    let [_, k] = routing.ids.dims();
    assert!(
        tokens > 0 && sequence_length > 0 && tokens.is_multiple_of(sequence_length),
        "sequences of {sequence_length} do not divide {tokens} tokens"
    );
    let sequences = tokens / sequence_length;
    let by_sequence = |x: Tensor<2>| x.reshape([sequences, sequence_length, experts]);
    let chosen = by_sequence(one_hot(&routing.ids, &routing.scores));
    let share = chosen.sum_dim(1) / (sequence_length * k) as f64;
    let scores = routing.scores.clone();
    let sum = scores.clone().sum_dim(1) + 1e-20;
    let mean_score = by_sequence(scores / sum).mean_dim(1);
    (share * mean_score).sum() * (experts as f64 / sequences as f64)
}

/// Router z-loss (ST-MoE, arXiv 2202.08906, equation 5): the mean over tokens of
/// `(log sum over experts of exp(logit))^2`; keeps logits small.
///
/// # Shapes
///
/// - `routing`: of `T >= 1` tokens
pub fn router_z(routing: &Routing) -> Tensor<1> {
    let logits = routing.logits.clone();
    let max = logits.clone().max_dim(1).detach();
    let log_sum = (logits - max.clone()).exp().sum_dim(1).log() + max;
    log_sum.square().mean()
}

/// `[T, K]` ids -> `[T, E]`, 1 where the token chose the expert; a constant.
fn one_hot(ids: &Tensor<2, Int>, like: &Tensor<2>) -> Tensor<2> {
    let zeros = like.zeros_like().inner();
    let ids = ids.clone().inner();
    let ones = Tensor::ones(ids.dims(), (&zeros.device(), zeros.dtype()));
    let chosen = zeros.scatter(1, ids, ones, burn::tensor::IndexingUpdateOp::Add);
    #[cfg(feature = "autodiff")]
    if let Some(strategy) = like.gradient_checkpointing_strategy() {
        return chosen
            .autodiff()
            .with_gradient_checkpointing_strategy(strategy);
    }
    chosen
}
