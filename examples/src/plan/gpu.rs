//! Published peaks of accelerators, for lower bounds on time.

use serde::Serialize;

/// What one accelerator can do at most. Operations are dense: data sheets often double them for
/// structured sparsity.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Gpu {
    pub name: &'static str,
    /// BF16 operations with FP32 accumulation, in 10^12 a second.
    pub bf16_tflops: f64,
    /// FP8 operations, in 10^12 a second, where there are any.
    pub fp8_tflops: Option<f64>,
    /// Memory, in 10^9 bytes.
    pub memory_gb: f64,
    /// Bandwidth of the memory, in 10^9 bytes a second.
    pub memory_gb_s: f64,
    /// To and from other accelerators of the fast domain, each way, in 10^9 bytes a second: half of
    /// what data sheets give for both ways.
    pub nvlink_gb_s: f64,
    /// Accelerators of a fast domain.
    pub nvlink_domain: usize,
    /// Beyond the fast domain, each way, in 10^9 bytes a second.
    pub network_gb_s: f64,
}

/// The table, in order of age.
pub const GPUS: &[Gpu] = &[
    // NVIDIA A100 data sheet (A100 80GB SXM); DGX A100 data sheet: an HDR 200 Gb/s port a GPU.
    Gpu {
        name: "a100",
        bf16_tflops: 312.0,
        fp8_tflops: None,
        memory_gb: 80.0,
        memory_gb_s: 2039.0,
        nvlink_gb_s: 300.0,
        nvlink_domain: 8,
        network_gb_s: 25.0,
    },
    // NVIDIA H100 data sheet (H100 SXM, operations there with sparsity); DGX H100 data sheet: a
    // ConnectX-7 400 Gb/s port a GPU.
    Gpu {
        name: "h100",
        bf16_tflops: 989.5,
        fp8_tflops: Some(1979.0),
        memory_gb: 80.0,
        memory_gb_s: 3350.0,
        nvlink_gb_s: 450.0,
        nvlink_domain: 8,
        network_gb_s: 50.0,
    },
    // NVIDIA H200 data sheet (H200 SXM, operations there with sparsity); DGX H200 data sheet.
    Gpu {
        name: "h200",
        bf16_tflops: 989.5,
        fp8_tflops: Some(1979.0),
        memory_gb: 141.0,
        memory_gb_s: 4800.0,
        nvlink_gb_s: 450.0,
        nvlink_domain: 8,
        network_gb_s: 50.0,
    },
    // DGX B200 data sheet, an eighth of the system: 72 PFLOPS FP8 with sparsity (36 dense), 1440 GB,
    // 64 TB/s, 14.4 TB/s NVLink, eight 400 Gb/s ports. BF16 is half of FP8.
    Gpu {
        name: "b200",
        bf16_tflops: 2250.0,
        fp8_tflops: Some(4500.0),
        memory_gb: 180.0,
        memory_gb_s: 8000.0,
        nvlink_gb_s: 900.0,
        nvlink_domain: 8,
        network_gb_s: 50.0,
    },
    // NVIDIA GB200 NVL72 data sheet, one of 72: 720 PFLOPS FP8 and 360 PFLOPS BF16 with sparsity,
    // 13.4 TB and 576 TB/s of HBM3e, 130 TB/s NVLink; a ConnectX-7 400 Gb/s port a GPU.
    Gpu {
        name: "gb200",
        bf16_tflops: 2500.0,
        fp8_tflops: Some(5000.0),
        memory_gb: 186.0,
        memory_gb_s: 8000.0,
        nvlink_gb_s: 900.0,
        nvlink_domain: 72,
        network_gb_s: 50.0,
    },
];

impl Gpu {
    /// The accelerator of this name.
    pub fn named(name: &str) -> Option<&'static Self> {
        GPUS.iter().find(|gpu| gpu.name == name)
    }
}
