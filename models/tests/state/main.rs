//! Checkpoints of training runs: what is saved is what is loaded, to the bit, on any number of
//! ranks; whatever interrupts a save, the checkpoint before stays; what is not the checkpoint is
//! refused by name.
#![cfg(feature = "autodiff")]

mod common;
mod crash;
mod layout;
mod refusals;
mod resume;
