//! Kinds of attention.

mod mla;
mod rope;

pub use mla::{Mla, MlaConfig};
pub use rope::Rope;
