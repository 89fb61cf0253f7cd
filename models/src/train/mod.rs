//! What a training loop needs beside the model and burn-optim: AdamW whose weights and moments are
//! f32 whatever the type of the model, sums of micro-batches' gradients, and learning rates with a
//! warm-up.
//!
//! One optimizer step over expert-parallel ranks, in order: the gradients of each micro-batch into
//! an [`Accumulator`]; [`reduce_gradients`](burn_moe::parallel::reduce_gradients) over the ranks;
//! [`gradient_norm`](burn_moe::parallel::gradient_norm) and
//! [`clip_gradients`](burn_moe::parallel::clip_gradients); the step of the optimizer that
//! [`OptimizerConfig`] makes, with the rate that [`ScheduleConfig`] gives.
//!
//! Activations are recomputed in the backward pass, rather than kept, in a model made on a device
//! with [`Device::gradient_checkpointing`](burn::tensor::Device::gradient_checkpointing).

mod accumulate;
mod adamw;
mod optimizer;
mod schedule;

pub use accumulate::Accumulator;
pub use adamw::{MasterAdamW, MasterAdamWState};
pub use optimizer::OptimizerConfig;
pub use schedule::{ScheduleConfig, ScheduleKind};
