//! Mixture-of-experts layers with load-balanced expert parallelism for [Burn](https://burn.dev).
//!
//! Start with [`layer::Moe`], a drop-in feed-forward. [`parallel::ExpertParallel`] spreads its
//! experts over the ranks of a [`comm::Communicator`]; a [`balance::Planner`] decides, from the
//! exact load of each micro-batch, which experts get replicas; [`ops`] is what runs on a backend.
//!
//! Dependencies run one way: `layer` uses `parallel`, which uses `ops`, `comm` and `balance`;
//! `ops` uses `comm`; `balance` uses none of them.

pub mod balance;
pub mod comm;
pub mod layer;
pub mod ops;
pub mod parallel;

/// The examples of the README are tests.
#[cfg(all(doctest, feature = "flex", feature = "autodiff"))]
#[doc = include_str!("../../README.md")]
struct Readme;
