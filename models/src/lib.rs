//! Decoder language models with mixture-of-experts layers, put together from parts.
//!
//! [`ModelConfig`] describes a model, [`Decoder`] is one, [`checkpoint`] saves and loads it. Every
//! rank of an expert-parallel group has its own `Decoder`, with its share of the experts.

pub mod attention;
pub mod checkpoint;
mod config;
mod decoder;

pub use config::{ModelConfig, ModelError};
pub use decoder::{Block, Decoder, DecoderOutput, FeedForwardKind, TokenBatch};
