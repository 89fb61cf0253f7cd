//! Decoder language models with mixture-of-experts layers, put together from parts.
//!
//! [`ModelConfig`] describes a model, [`Decoder`] is one, [`checkpoint`] saves and loads it,
//! [`pretrained`] loads one from a folder of Hugging Face's, and the module `state` (feature
//! `autodiff`) keeps a training run's checkpoints. Every rank of an expert-parallel group has its
//! own `Decoder`, with its share of the experts.

pub mod attention;
pub mod checkpoint;
mod config;
mod counts;
mod decoder;
pub mod hf;
mod module_path;
pub mod pretrained;
#[cfg(feature = "autodiff")]
pub mod state;
#[cfg(feature = "autodiff")]
pub mod train;

pub use config::{ModelConfig, ModelError, Scale, ScaleError};
pub use counts::ParameterCounts;
pub use decoder::{Block, Decoder, DecoderOutput, FeedForwardKind, TokenBatch};
