//! What the kernel becomes on an H100-class device, translated to CUDA here without one: that it
//! uses tensor cores for f16 and bf16. (That it computes the right numbers there needs the device:
//! run the tests with the feature `cuda`.)

use std::sync::Arc;

use cubecl::{
    Compiler, CubeKernel, define_kernel,
    ir::{DeviceIdentity, DeviceProperties, FloatKind, MemoryDeviceProperties, TargetProperties},
    prelude::*,
    profile::TimingMethod,
};
use cubecl_cpp::{
    cuda::{arch::CudaArchitecture, mma::CudaCmmaCompiler},
    shared::{CompilationOptions, CppCompiler, register_wmma_features},
    target::Cuda,
};

use super::super::{
    kernel::{Fault, persistent_kernel},
    launch::Prepared,
    problem::{Problem, Product, Sizes},
    tile::{TileSpec, Transfer},
};
use crate::{DeviceTensor, common, queue::Words};

/// What CubeCL's CUDA runtime tells of a device of compute capability 9.0.
pub(super) fn hopper() -> DeviceProperties {
    let arch = CudaArchitecture {
        version: 90,
        tensor_cores: true,
    };
    let hardware = cubecl::ir::HardwareProperties {
        load_width: 128,
        vector_register_count: None,
        plane_size_min: 32,
        plane_size_max: 32,
        max_bindings: 1024,
        max_shared_memory_size: 232_448,
        max_cube_count: (i32::MAX as u32, 65_535, 65_535),
        max_units_per_cube: 1024,
        max_cube_dim: (1024, 1024, 64),
        num_streaming_multiprocessors: Some(132),
        num_cpu_cores: None,
        last_level_cache_size: None,
        num_tensor_cores: Some(4),
        min_tensor_cores_dim: Some(8),
        max_vector_size: usize::MAX,
        cube_mma_reserved_shared_memory: 0,
    };
    let mut properties = DeviceProperties::new(
        Default::default(),
        MemoryDeviceProperties::new(1 << 34, 512),
        hardware,
        TimingMethod::Device,
        DeviceIdentity::default(),
    );
    cubecl_cpp::register_supported_types(&mut properties);
    let combinations = CudaCmmaCompiler::Cpp.supported_cmma_combinations(&arch);
    register_wmma_features(combinations, &mut properties);
    properties.features.copy_async = true;
    properties
}

/// Tiles that such a device may be tuned to.
fn candidates(problem: &Problem) -> Vec<TileSpec> {
    let properties = hopper();
    let vector = problem.vector_size(&properties);
    TileSpec::candidates(
        &properties,
        problem.lhs.dtype(),
        problem.mean_rows(),
        vector,
    )
}

/// CUDA source of the kernel that would run `problem`.
fn source(problem: Problem, spec: TileSpec) -> String {
    let client = common::client();
    let dtype = problem.lhs.dtype();
    let words = Words::new(&client);
    let prepared = Prepared::new(&client, problem, spec, &words, 0, Fault::None);
    let kernel = persistent_kernel::create_dummy_kernel(
        Arc::new(hopper()),
        Arc::new(TargetProperties::default()),
        CubeCount::new_1d(132),
        CubeDim::new_1d(spec.units() as u32),
        AddressType::U32,
        spec.vector,
        prepared.view(),
        None.into(),
        words.next.arg(),
        words.policy.arg(),
        None.into(),
        spec,
        Fault::None,
        [dtype, spec.staged(dtype)],
    );
    let definition = define_kernel(&kernel as &dyn CubeKernel).unwrap();
    let compiled = CppCompiler::<Cuda>::default()
        .compile(definition, &CompilationOptions::default())
        .unwrap();
    compiled.source
}

/// The four products, of two experts with `rows` rows. Made by hand, because the client's device
/// need not have the element type.
fn problems(dtype: ElemType, rows: usize) -> [Problem; 4] {
    let client = common::client();
    let (k, m) = (256, 128);
    let sizes = Sizes {
        rows: 2 * rows,
        inner: k,
        outer: m,
        home: 2,
        experts: 2,
    };
    let x = DeviceTensor::empty(&client, [2 * rows, k], dtype);
    let grad = DeviceTensor::empty(&client, [2 * rows, m], dtype);
    let weights = DeviceTensor::empty(&client, [2, k, m], dtype);
    let activation = DeviceTensor::empty(&client, [2 * rows, m / 2], dtype);
    let offsets = [0, rows as u32, 2 * rows as u32];
    let offsets = DeviceTensor::from_data(&client, &offsets, [3]).unwrap();
    [
        (Product::Forward, &x, &weights, &grad, None),
        (Product::SwiGlu, &x, &weights, &grad, Some(activation)),
        (Product::DataGrad, &grad, &weights, &x, None),
        (Product::WeightGrad, &x, &grad, &weights, None),
    ]
    .map(|(product, lhs, rhs, out, out_second)| Problem {
        product,
        lhs: lhs.clone(),
        rhs: rhs.clone(),
        rhs_replicas: None,
        out: out.clone(),
        out_second,
        offsets: offsets.clone(),
        sizes,
    })
}

/// Each tile once with the plain product, and each other product with the fixed tiles: translating
/// takes a second.
fn selection(kind: FloatKind, rows: &[usize]) -> Vec<(Problem, TileSpec)> {
    let mut selected: Vec<(Problem, TileSpec)> = Vec::new();
    for rows in rows {
        for problem in problems(ElemType::Float(kind), *rows) {
            let specs = candidates(&problem);
            let count = match problem.product {
                Product::Forward => specs.len(),
                _ => 1,
            };
            for spec in specs.into_iter().take(count) {
                let seen = |(other, with): &(Problem, TileSpec)| {
                    other.product == problem.product && *with == spec
                };
                if !selected.iter().any(seen) {
                    selected.push((problem.clone(), spec));
                }
            }
        }
    }
    selected
}

fn check_tensor_cores(kernels: Vec<(Problem, TileSpec)>, element: &str) {
    for (problem, spec) in kernels {
        assert!(spec.uses_fragments(), "{spec:?}");
        let source = source(problem, spec);
        for wanted in [
            format!("wmma::fragment<nvcuda::wmma::matrix_a, 16, 16, 16, {element}"),
            format!("wmma::fragment<nvcuda::wmma::matrix_b, 16, 16, 16, {element}"),
            "wmma::fragment<nvcuda::wmma::accumulator, 16, 16, 16, float".into(),
            "wmma::mma_sync".into(),
        ] {
            assert!(source.contains(&wanted), "no {wanted} in\n{source}");
        }
        for wanted in [
            "cp.async.cg.shared",
            "cp.async.commit_group",
            "cp.async.wait_group",
        ] {
            let copies = spec.transfer != Transfer::Registers;
            assert_eq!(source.contains(wanted), copies, "{wanted} in\n{source}");
        }
    }
}

/// The same kernel with another type: the fixed tile of one product will do.
#[test]
fn f16_multiplies_on_tensor_cores() {
    let [problem, ..] = problems(ElemType::Float(FloatKind::F16), 64);
    let spec = candidates(&problem)[0];
    check_tensor_cores(vec![(problem, spec)], "__half");
}

#[test]
fn bf16_multiplies_on_tensor_cores() {
    let kernels = selection(FloatKind::BF16, &[16, 512]);
    check_tensor_cores(kernels, "__nv_bfloat16");
}

/// f32 has no exact tensor cores: registers, and vectors of 16 bytes.
#[test]
fn f32_multiplies_in_registers_with_vector_loads() {
    for (problem, spec) in selection(FloatKind::F32, &[512]) {
        assert!(!spec.uses_fragments());
        let source = source(problem, spec);
        assert!(!source.contains("mma_sync"));
        assert!(source.contains("fma"), "no fma in\n{source}");
        assert!(source.contains("float_4"), "no vectors in\n{source}");
    }
}
