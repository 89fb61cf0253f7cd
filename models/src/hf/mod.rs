//! Model folders of Hugging Face: `config.json` and safetensors, as one file or in shards.
//!
//! [`Folder`] maps the files and checks them; tensors are read from the map straight into the form
//! the model wants ([`Folder::read`], [`Folder::read_transposed`], [`Experts`]), so that a rank
//! touches only what it owns, and nothing is held twice. [`Saver`] writes a model back in the
//! [`Layout`] it came from.

mod element;
mod encode;
mod error;
mod experts;
mod folder;
mod layout;
#[cfg(target_arch = "x86_64")]
mod lines;
mod matrix;
mod place;
mod read;
mod save;
mod shard;
mod transpose;

pub use element::Element;
pub use error::HfError;
pub use experts::{ExpertLayout, Experts};
pub use folder::{Folder, TensorInfo, ignorable};
pub use layout::Layout;
pub use place::check_target;
pub use safetensors::Dtype;
pub use save::Saver;

/// `X.weight` in FP8 has its scales in `X.weight_scale_inv`.
const SCALE_SUFFIX: &str = "_scale_inv";
