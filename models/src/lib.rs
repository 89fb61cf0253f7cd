//! Decoder language models with mixture-of-experts layers, put together from parts.
//!
//! [`ModelConfig`] describes a model, [`Decoder`] is one, [`checkpoint`] saves and loads it,
//! [`pretrained`] loads one from a folder of Hugging Face's and saves it there. Every rank of an expert-parallel group has its own `Decoder`, with its share of the experts.

pub mod attention;
pub mod checkpoint;
mod config;
mod counts;
mod decoder;
pub mod hf;
mod module_path;
mod parameters;
mod place;
pub mod pretrained;

pub use config::{ModelConfig, ModelError};
pub use counts::ParameterCounts;
pub use decoder::{Block, Decoder, DecoderOutput, FeedForwardKind, TokenBatch};
