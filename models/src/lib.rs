//! Decoder language models with mixture-of-experts layers, put together from parts.
//!
//! [`ModelConfig`] describes a model, [`Decoder`] is one, [`checkpoint`] saves and loads it,
//! [`pretrained`] loads one from a folder of Hugging Face's and saves it there, and the module `state` (feature
//! `autodiff`) keeps a training run's checkpoints. Every rank of an expert-parallel group has its
//! own `Decoder`, with its share of the experts.

pub mod attention;
mod cache;
pub mod checkpoint;
mod config;
mod counts;
mod decoder;
mod generate;
pub mod hf;
mod module_path;
mod parameters;
mod place;
pub mod pretrained;
#[cfg(feature = "autodiff")]
pub mod state;
#[cfg(feature = "autodiff")]
pub mod train;

pub use cache::{CacheError, KvCache};
pub use config::{ModelConfig, ModelError, Scale, ScaleError};
pub use counts::ParameterCounts;
pub use decoder::{Block, Decoder, DecoderOutput, FeedForwardKind, LogitsOf, TokenBatch};
pub use generate::{GenerateError, GenerateOptions, Generation};
