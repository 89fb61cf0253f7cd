//! What a model author uses: [`Moe`] and its parts, their configs, and the auxiliary losses.
//!
//! ```
//! use burn::tensor::{Device, Distribution, Tensor};
//! use burn_moe::layer::{MoeConfig, RouterConfig};
//!
//! let device = Device::flex();
//! let router = RouterConfig::new(32, 8, 2); // d_model, experts, experts per token
//! let moe = MoeConfig::new(router, 64) // expert width
//!     .with_num_shared_experts(1)
//!     .init(&device);
//! let x = Tensor::<3>::random([2, 5, 32], Distribution::Default, &device);
//! assert_eq!(moe.forward(x).dims(), [2, 5, 32]);
//! ```

mod config_error;
mod experts;
mod feed_forward;
mod init;
pub mod loss;
mod moe;
mod router;

pub use config_error::ConfigError;
pub use experts::{GroupedExperts, GroupedExpertsConfig};
pub use feed_forward::{FeedForward, FeedForwardConfig};
pub use moe::{Moe, MoeConfig, MoeOutput};
pub use router::{Router, RouterConfig, Routing, ScoreFunction};
