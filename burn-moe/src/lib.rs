//! Mixture-of-experts layers with load-balanced expert parallelism for [Burn](https://burn.dev).

pub mod balance;
pub mod comm;
pub mod layer;
pub mod ops;
pub mod parallel;
