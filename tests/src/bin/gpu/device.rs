//! The device that is checked and measured, and what a machine may lack for it.

use std::panic::{AssertUnwindSafe, catch_unwind};

use clap::ValueEnum;
use cubecl::{Device, client::Client, device::DeviceUnavailable, future::block_on};
use cubecl_kernels::DeviceTensor;
use serde::Serialize;

use crate::measure::fill;

/// A CubeCL runtime.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Runtime {
    /// CUDA, compiled by NVRTC.
    Cuda,
    /// WebGPU or Vulkan, as this binary was built.
    Wgpu,
    /// The machine's cores: to see this program work, not for figures.
    Cpu,
}

/// Why there is no device to work on.
#[derive(Debug, thiserror::Error)]
pub enum DeviceError {
    /// Not in this binary, or not in this machine.
    #[error("no device: {0}")]
    Unavailable(DeviceUnavailable),
    /// The runtime gave up, as CubeCL's do where a library is missing.
    #[error("{runtime:?} cannot run kernels here: {reason}{hint}")]
    Unusable {
        /// The runtime.
        runtime: Runtime,
        /// What it said.
        reason: String,
        /// What may help.
        hint: &'static str,
    },
}

/// What a report says of the device.
#[derive(Debug, Clone, Serialize)]
pub struct Description {
    /// As it names itself.
    pub name: String,
    /// The runtime.
    pub runtime: &'static str,
    /// Multiprocessors, if the runtime tells.
    pub multiprocessors: Option<u32>,
    /// Bytes of shared memory of a cube.
    pub shared_memory: usize,
    /// Units of a cube.
    pub units_per_cube: u32,
}

const CUDA_HINT: &str = "\nThe CUDA runtime needs NVIDIA's driver (libcuda), NVRTC (libnvrtc) on the \
    library path, and CUDA's headers in $CUDA_PATH/include; benches/gpu.sh looks for all three.";

impl Runtime {
    /// The most capable one of this binary.
    pub fn of_build() -> Self {
        if cfg!(feature = "cuda") {
            Self::Cuda
        } else if cfg!(any(feature = "wgpu", feature = "vulkan")) {
            Self::Wgpu
        } else {
            Self::Cpu
        }
    }

    /// A client of device `index`, on which a kernel has run.
    pub fn client(self, index: usize) -> Result<Client, DeviceError> {
        let hint = match self {
            Self::Cuda => CUDA_HINT,
            _ => "",
        };
        let unusable = |reason| DeviceError::Unusable {
            runtime: self,
            reason,
            hint,
        };
        // A missing library ends in a panic inside of the runtime.
        let client = quietly(|| self.open(index))
            .map_err(unusable)?
            .map_err(DeviceError::Unavailable)?;
        quietly(|| try_kernel(&client))
            .and_then(|ran| ran)
            .map_err(unusable)?;
        Ok(client)
    }

    fn open(self, index: usize) -> Result<Client, DeviceUnavailable> {
        let device = match self {
            Self::Cuda => Device::cuda(index),
            Self::Wgpu => Device::wgpu(Default::default()),
            Self::Cpu => Device::cpu(),
        };
        device.map(|device| device.client())
    }
}

/// What the client tells of its device.
pub fn describe(client: &Client) -> Description {
    let properties = client.properties();
    let hardware = &properties.hardware;
    Description {
        name: match properties.identity.name.as_str() {
            "" => "unnamed".into(),
            name => name.into(),
        },
        runtime: client.name(),
        multiprocessors: hardware.num_streaming_multiprocessors,
        shared_memory: hardware.max_shared_memory_size,
        units_per_cube: hardware.max_units_per_cube,
    }
}

/// Waits for all work; the runtime's message if some of it failed.
pub fn sync(client: &Client) -> Result<(), String> {
    block_on(client.sync()).map_err(|error| error.to_string())
}

fn try_kernel(client: &Client) -> Result<(), String> {
    let values: DeviceTensor = fill(client, &[1024], cubecl::ir::FloatKind::F32, 1);
    let values = values.read::<f32>(client).map_err(|e| e.to_string())?;
    if values.iter().all(|value| *value == 0.0) {
        return Err("a kernel ran and wrote nothing".into());
    }
    Ok(())
}

/// What `f` gives, or the message it panics with, which is not printed.
pub fn quietly<T>(f: impl FnOnce() -> T) -> Result<T, String> {
    let hook = std::panic::take_hook();
    std::panic::set_hook(Box::new(|_| {}));
    let result = catch_unwind(AssertUnwindSafe(f));
    std::panic::set_hook(hook);
    result.map_err(|payload| {
        let text = payload.downcast_ref::<&str>().map(|text| text.to_string());
        text.or_else(|| payload.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "a panic without a message".into())
    })
}
