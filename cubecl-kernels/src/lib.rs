//! CubeCL kernels of mixture-of-experts layers, without Burn: any CubeCL runtime runs them (CUDA,
//! ROCm, Metal, Vulkan, WebGPU, and LLVM on CPUs), and the caller chooses it by the
//! [`Client`](cubecl::client::Client) it passes.
//!
//! | module | operations |
//! |---|---|
//! | [`router`] | scores, group-limited top-k |
//! | [`sort`] | counts per expert, stable sort by expert |
//! | [`rows`] | permute, unpermute, and their gradients |
//! | [`matmul`] | grouped products with their gradients, fused SwiGLU; experts in one or two buffers |
//! | [`swiglu`] | the activation alone |
//! | [`queue`] | an urgent and a background product in one persistent launch |
//! | [`copy`] | copies in tiles |
//!
//! Conventions of every operation:
//!
//! - One function an operation: `fn operation(client, arguments ..) -> Result<outputs, KernelError>`.
//!   It checks its arguments, allocates its outputs, queues the work and returns at once; nothing
//!   waits for the device until [`DeviceTensor::read`].
//! - Tensors are [`DeviceTensor`]s: contiguous, row-major, with a shape and an element type.
//! - Integer tensors that name rows, experts or offsets are `u32` or `i32`; both are read as `u32`.
//! - Results do not depend on scheduling: the same arguments give the same bits.
//!
//! Letters in shapes: `T` tokens, `N` token copies (rows sorted by expert), `E` experts, `K` experts
//! per token or the depth of a product, `M` columns, `D` model width, `F` expert width, `L` experts
//! at home on a rank, `R` replica slots.

mod check;
#[cfg(all(test, feature = "runtime"))]
#[path = "../tests/common/mod.rs"]
mod common;
pub mod copy;
mod error;
mod launch;
pub mod matmul;
pub mod queue;
pub mod router;
pub mod rows;
pub mod sort;
pub mod swiglu;
mod tensor;

pub use error::KernelError;
pub use matmul::ExpertWeights;
pub use tensor::DeviceTensor;
