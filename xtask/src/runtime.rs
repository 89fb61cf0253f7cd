//! The CubeCL runtimes that tests run on, and what each needs on a machine.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::ValueEnum;

use crate::llvm::{Llvm, LlvmError};

/// A CubeCL runtime that needs no GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Runtime {
    /// Kernels compiled for this machine's cores by LLVM.
    Cpu,
    /// WebGPU, on the machine's Vulkan driver, which may be a software one.
    Wgpu,
    /// The same driver, but kernels are translated to SPIR-V rather than to WebGPU's language; also where `wgpu` is
    /// asked for, if both are.
    Vulkan,
}

/// Why a runtime cannot work on this machine.
#[derive(Debug, thiserror::Error)]
pub enum RuntimeError {
    /// The `cpu` runtime lacks its compiler.
    #[error(transparent)]
    Llvm(#[from] LlvmError),
    /// The `wgpu` and `vulkan` runtimes lack a driver.
    #[error(
        "runtimes wgpu and vulkan need a Vulkan driver and there is none in {searched:?}: install one (in \
         Debian, mesa-vulkan-drivers draws on the CPU), or name its manifest in VK_DRIVER_FILES"
    )]
    NoVulkan {
        /// Folders that a driver's manifest may lie in.
        searched: Vec<PathBuf>,
    },
    /// The `wgpu` and `vulkan` runtimes lack a folder for their files.
    #[error("XDG_RUNTIME_DIR is not set and {path} cannot be created for it: {source}")]
    NoRuntimeDir {
        /// The folder that was to take its place.
        path: PathBuf,
        /// The cause.
        source: std::io::Error,
    },
}

type Environment = Vec<(&'static str, OsString)>;

impl Runtime {
    /// Cargo's feature of this runtime, in `cubecl-kernels` as in `burn-moe`.
    pub fn feature(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Wgpu => "wgpu",
            Self::Vulkan => "vulkan",
        }
    }

    /// Sees to it that the runtime can be built and run; gives what both must find in their
    /// environment.
    pub fn prepare(self) -> Result<Environment, RuntimeError> {
        match self {
            Self::Cpu => Ok(Llvm::prepare(false)?.environment(false)),
            Self::Wgpu | Self::Vulkan if cfg!(target_os = "linux") => prepare_vulkan(),
            Self::Wgpu | Self::Vulkan => Ok(Vec::new()), // the system brings Metal or Direct3D
        }
    }

    /// What makes the tests run on this runtime rather than on another one of the same build:
    /// the first is read by the tests of `cubecl-kernels`, the second by Burn.
    pub fn selection(self) -> Environment {
        let kernels = match self {
            Self::Vulkan => Self::Wgpu,
            other => other,
        };
        let mut environment = vec![
            ("CUBECL_KERNELS_RUNTIME", kernels.feature().into()),
            ("BURN_DEVICE", self.feature().into()),
        ];
        // A kernel takes all cores, whose threads spin while they wait for each other: two kernels
        // at a time take many times as long as one after the other.
        if self == Self::Cpu && std::env::var_os("RUST_TEST_THREADS").is_none() {
            environment.push(("RUST_TEST_THREADS", "1".into()));
        }
        environment
    }
}

fn prepare_vulkan() -> Result<Environment, RuntimeError> {
    let named = ["VK_DRIVER_FILES", "VK_ICD_FILENAMES"];
    if named.iter().all(|name| std::env::var_os(name).is_none()) {
        let searched = manifest_folders();
        let any = |folder: &PathBuf| {
            folder
                .read_dir()
                .is_ok_and(|mut files| files.next().is_some())
        };
        if !searched.iter().any(any) {
            return Err(RuntimeError::NoVulkan { searched });
        }
    }
    if std::env::var_os("XDG_RUNTIME_DIR").is_some() {
        return Ok(Vec::new());
    }
    // The driver wants a place for its sockets, which a login would have made.
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/xdg-runtime");
    std::fs::create_dir_all(&path)
        .and_then(|()| path.canonicalize())
        .map(|path| vec![("XDG_RUNTIME_DIR", path.into())])
        .map_err(|source| RuntimeError::NoRuntimeDir { path, source })
}

/// Where the Vulkan loader looks for drivers.
fn manifest_folders() -> Vec<PathBuf> {
    let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty());
    let data = variable("XDG_DATA_DIRS").unwrap_or_else(|| "/usr/local/share:/usr/share".into());
    let home = variable("XDG_DATA_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(variable("HOME")?).join(".local/share")));
    std::env::split_paths(&data)
        .chain(home)
        .chain(["/etc".into(), "/usr/local/etc".into()])
        .map(|folder| folder.join("vulkan/icd.d"))
        .collect()
}
