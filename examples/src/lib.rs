//! What the binaries `train`, `prefill` and `plan` are made of.

pub mod cli;
pub mod data;
pub mod page;
pub mod prefill;
pub mod report;
mod tokenizer;
pub mod train;
