use core::fmt;

/// What a message is, so that ranks match operations by meaning and not by order of arrival.
///
/// Two messages with the same sender, receiver and key are delivered in the order in which they were sent. Operations
/// that may be in flight at the same time need keys that differ.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Key {
    /// The micro-batch, counted over the whole run.
    pub step: u64,
    /// The layer of the model.
    pub layer: u32,
    /// The operation and its direction.
    pub op: Op,
    /// A chunk or sub-message of the operation, for example a replica slot. Zero when there is only one; the highest
    /// number is for what ranks tell each other about the operation itself.
    pub part: u32,
    /// The sub-group that exchanges it, 0 for the whole world. [`split`](super::split) sets it; nobody else needs to.
    pub group: u64,
}

impl Key {
    /// The key of operation `op` of layer `layer` in micro-batch `step`, part 0.
    pub const fn new(op: Op, step: u64, layer: u32) -> Self {
        Self {
            step,
            layer,
            op,
            part: 0,
            group: 0,
        }
    }

    /// The same operation, another part of it.
    pub const fn with_part(self, part: u32) -> Self {
        Self { part, ..self }
    }

    /// The key of what ranks tell each other about this operation, and errors show as this operation.
    pub(crate) const fn about(self) -> Self {
        self.with_part(ABOUT)
    }

    /// The same place in the model and in the run, another operation, part 0.
    ///
    /// Backward code gets its key from the one the forward pass kept.
    pub const fn with_op(self, op: Op) -> Self {
        Self {
            op,
            part: 0,
            ..self
        }
    }
}

const ABOUT: u32 = u32::MAX;

/// Readable, for errors: `dispatch (layer 3, micro-batch 17)`, with the part when it is not 0.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} (layer {}, micro-batch {}",
            self.op, self.layer, self.step
        )?;
        if self.part != 0 && self.part != ABOUT {
            write!(f, ", part {}", self.part)?;
        }
        if self.group != 0 {
            write!(f, ", group {:x}", self.group & 0xffff)?;
        }
        f.write_str(")")
    }
}

/// The operation a message belongs to.
///
/// Forward and backward have variants of their own: both may be in flight for one layer and micro-batch.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[non_exhaustive]
pub enum Op {
    /// Token counts per expert, gathered from all ranks.
    Count,
    /// Token rows, to the ranks that hold their experts.
    Dispatch,
    /// Expert and source indices that go with the rows of a dispatch.
    DispatchIds,
    /// Router weights that go with the rows of a dispatch.
    DispatchWeights,
    /// Expert outputs, back to the ranks the tokens came from.
    Combine,
    /// Weights of an expert, from its home rank to a replica slot.
    Replicate,
    /// Gradients of the rows of a dispatch, back to the ranks the tokens came from.
    DispatchBackward,
    /// Gradients of the router weights of a dispatch.
    DispatchWeightsBackward,
    /// Gradients of the rows of a combine, to the ranks that hold the experts.
    CombineBackward,
    /// Weights of an expert, fetched again for the backward pass.
    ReplicateBackward,
    /// Weight gradients of a replica, to the home rank of its expert.
    ReplicaGrad,
    /// Gradients of parameters that every rank holds.
    GradReduce,
    /// A sum over all ranks.
    AllReduce,
    /// A gather to all ranks.
    AllGather,
    /// An exchange of everyone with everyone.
    AllToAll,
    /// A copy from one rank to all.
    Broadcast,
    /// A wait for all ranks.
    Barrier,
    /// Loads, timings and other observations.
    Telemetry,
    /// An operation of the user's own; the number keeps several of them apart.
    Custom(u32),
}

impl fmt::Display for Op {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Op::Count => "count",
            Op::Dispatch => "dispatch",
            Op::DispatchIds => "dispatch ids",
            Op::DispatchWeights => "dispatch weights",
            Op::Combine => "combine",
            Op::Replicate => "replicate",
            Op::DispatchBackward => "dispatch backward",
            Op::DispatchWeightsBackward => "dispatch weights backward",
            Op::CombineBackward => "combine backward",
            Op::ReplicateBackward => "replicate backward",
            Op::ReplicaGrad => "replica gradient",
            Op::GradReduce => "gradient reduce",
            Op::AllReduce => "all-reduce",
            Op::AllGather => "all-gather",
            Op::AllToAll => "all-to-all",
            Op::Broadcast => "broadcast",
            Op::Barrier => "barrier",
            Op::Telemetry => "telemetry",
            Op::Custom(number) => return write!(f, "custom operation {number}"),
        })
    }
}
