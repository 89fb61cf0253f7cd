//! Backward passes. Ops that are not differentiated treat their inputs as constants.

use burn::backend::TensorMetadata;
use burn::backend::tensor::{FloatTensor, IntTensor};
use burn_autodiff::checkpoint::{base::Checkpointer, strategy::CheckpointStrategy};
use burn_autodiff::grads::Gradients;
use burn_autodiff::ops::{Backward, Ops, OpsKind, unary};
use burn_autodiff::{Autodiff, NodeId};

use crate::ops::{MoeOps, Pass, Replication, RowExchange, TopK};

impl<B: MoeOps, C: CheckpointStrategy> MoeOps for Autodiff<B, C> {
    fn gather_rows(x: FloatTensor<Self>, index: IntTensor<Self>) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct GatherRows;

        impl<B: MoeOps> Backward<B, 1> for GatherRows {
            type State = (IntTensor<B>, usize);

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                let (index, rows) = ops.state;
                unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                    B::scatter_add_rows(grad, index, rows)
                });
            }
        }

        let (guard, rows) = (x.node(), x.shape()[0]);
        let out = B::gather_rows(x.into_primitive(), index.clone());
        match GatherRows.prepare::<C>([guard]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((index, rows), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn sum_rows(
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct SumRows;

        impl<B: MoeOps> Backward<B, 2> for SumRows {
            type State = (FloatTensor<B>, IntTensor<B>, FloatTensor<B>);

            fn backward(
                self,
                ops: Ops<Self::State, 2>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                let (y, index, weights) = ops.state;
                let grad = grads.consume::<B>(&ops.node);
                let (dy, dw) = B::sum_rows_backward(grad, y, index, weights);
                register::<B, 2>(grads, ops.parents.map(|node| node.map(|n| n.id)), [dy, dw]);
            }
        }

        let guards = [y.node(), weights.node()];
        let (y, weights) = (y.into_primitive(), weights.into_primitive());
        let out = B::sum_rows(y.clone(), index.clone(), weights.clone());
        match SumRows.prepare::<C>(guards).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish((y, index, weights), out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn expert_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
        replication: Replication,
    ) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct ExpertSwiglu;

        #[derive(Debug, Clone)]
        struct State<B: MoeOps> {
            x: FloatTensor<B>,
            hidden: FloatTensor<B>,
            gate_up: FloatTensor<B>,
            down: FloatTensor<B>,
            offsets: IntTensor<B>,
            replication: Replication,
        }

        impl<B: MoeOps> Backward<B, 3> for ExpertSwiglu {
            type State = State<B>;

            fn backward(
                self,
                ops: Ops<Self::State, 3>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                let grad = grads.consume::<B>(&ops.node);
                let state = ops.state;
                // Fetched again rather than kept since the forward pass: the slots are shared by
                // all layers.
                let (slot_gate_up, slot_down) = B::fetch_experts(
                    state.gate_up.clone(),
                    state.down.clone(),
                    state.replication.clone(),
                    Pass::Backward,
                );
                let (dx, dgate_up, ddown, dslot_gate_up, dslot_down) = B::grouped_swiglu_backward(
                    grad,
                    state.x,
                    state.hidden,
                    state.gate_up,
                    state.down,
                    slot_gate_up.clone(),
                    slot_down.clone(),
                    state.offsets,
                );
                state.replication.release((slot_gate_up, slot_down));
                let (dgate_up, ddown) = B::return_expert_grads(
                    dgate_up,
                    ddown,
                    dslot_gate_up,
                    dslot_down,
                    state.replication,
                );
                let parents = ops.parents.map(|node| node.map(|n| n.id));
                register::<B, 3>(grads, parents, [dx, dgate_up, ddown]);
            }
        }

        let guards = [x.node(), gate_up.node(), down.node()];
        let (x, gate_up, down) = (
            x.into_primitive(),
            gate_up.into_primitive(),
            down.into_primitive(),
        );
        let (slot_gate_up, slot_down) = B::fetch_experts(
            gate_up.clone(),
            down.clone(),
            replication.clone(),
            Pass::Forward,
        );
        let (out, hidden) = B::grouped_swiglu(
            x.clone(),
            gate_up.clone(),
            down.clone(),
            slot_gate_up.clone(),
            slot_down.clone(),
            offsets.clone(),
        );
        replication.release((slot_gate_up, slot_down));
        match ExpertSwiglu.prepare::<C>(guards).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let state = State::<B> {
                    x,
                    hidden,
                    gate_up,
                    down,
                    offsets,
                    replication,
                };
                prep.finish(state, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn all_to_all_rows(x: FloatTensor<Self>, exchange: RowExchange) -> FloatTensor<Self> {
        #[derive(Debug)]
        struct AllToAllRows;

        impl<B: MoeOps> Backward<B, 1> for AllToAllRows {
            type State = RowExchange;

            fn backward(
                self,
                ops: Ops<Self::State, 1>,
                grads: &mut Gradients,
                _checkpointer: &mut Checkpointer,
            ) {
                if let Some(before) = &ops.state.before_backward {
                    before();
                }
                let back = ops.state.reversed();
                unary::<B, _>(ops.parents, ops.node, grads, |grad| {
                    B::all_to_all_rows(grad, back)
                });
            }
        }

        let guard = x.node();
        let out = B::all_to_all_rows(x.into_primitive(), exchange.clone());
        match AllToAllRows
            .prepare::<C>([guard])
            .compute_bound()
            .stateful()
        {
            OpsKind::Tracked(prep) => prep.finish(exchange, out),
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn select_experts(
        scores: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        top_k: TopK,
    ) -> IntTensor<Self> {
        B::select_experts(scores.into_primitive(), bias.into_primitive(), top_k)
    }

    fn scatter_add_rows(
        grad: FloatTensor<Self>,
        index: IntTensor<Self>,
        rows: usize,
    ) -> FloatTensor<Self> {
        constant::<B, C>(B::scatter_add_rows(grad.into_primitive(), index, rows))
    }

    fn sum_rows_backward(
        grad: FloatTensor<Self>,
        y: FloatTensor<Self>,
        index: IntTensor<Self>,
        weights: FloatTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (dy, dw) = B::sum_rows_backward(
            grad.into_primitive(),
            y.into_primitive(),
            index,
            weights.into_primitive(),
        );
        (constant::<B, C>(dy), constant::<B, C>(dw))
    }

    fn grouped_swiglu(
        x: FloatTensor<Self>,
        gate_up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        slot_gate_up: FloatTensor<Self>,
        slot_down: FloatTensor<Self>,
        offsets: IntTensor<Self>,
    ) -> (FloatTensor<Self>, FloatTensor<Self>) {
        let (out, hidden) = B::grouped_swiglu(
            x.into_primitive(),
            gate_up.into_primitive(),
            down.into_primitive(),
            slot_gate_up.into_primitive(),
            slot_down.into_primitive(),
            offsets,
        );
        (constant::<B, C>(out), constant::<B, C>(hidden))
    }

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
    ) {
        let (dx, dgate_up, ddown, dslot_gate_up, dslot_down) = B::grouped_swiglu_backward(
            grad.into_primitive(),
            x.into_primitive(),
            hidden.into_primitive(),
            gate_up.into_primitive(),
            down.into_primitive(),
            slot_gate_up.into_primitive(),
            slot_down.into_primitive(),
            offsets,
        );
        (
            constant::<B, C>(dx),
            constant::<B, C>(dgate_up),
            constant::<B, C>(ddown),
            constant::<B, C>(dslot_gate_up),
            constant::<B, C>(dslot_down),
        )
    }
}

/// A tensor outside of every graph.
fn constant<B: MoeOps, C: CheckpointStrategy>(
    tensor: FloatTensor<B>,
) -> FloatTensor<Autodiff<B, C>> {
    <Autodiff<B, C> as burn::backend::AutodiffBackend>::from_inner(tensor)
}

/// Gives each tracked parent its gradient.
fn register<B: MoeOps, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    values: [FloatTensor<B>; N],
) {
    for (parent, value) in parents.into_iter().zip(values) {
        if let Some(id) = parent {
            grads.register::<B>(id, value);
        }
    }
}
