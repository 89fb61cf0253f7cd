//! Every tile that a device may be tuned to is right, and all of them give the same bits: the tile
//! decides who computes an element, not in which order it is summed.

use cubecl::{client::Client, ir::FloatKind};
use half::{bf16, f16};

use super::{
    Tiling,
    launch::run_with,
    problem::{Problem, Product},
    tile::{Engine, TileSpec, Transfer},
    tune::MOST_CANDIDATES,
};
use crate::{
    DeviceTensor, ExpertWeights,
    common::{self, Value, grouped::Case},
};

mod cuda_source;

/// A case on the device, and its results by loops in f64.
struct Fixture<T> {
    client: Client,
    case: Case,
    x: DeviceTensor,
    grad: DeviceTensor,
    weights: ExpertWeights,
    offsets: DeviceTensor,
    data: [Vec<T>; 3],
}

impl<T: Value> Fixture<T> {
    fn new(case: Case) -> Self {
        let client = common::client();
        let (rows, experts, k, m) = (case.rows(), case.counts.len(), case.k, case.m);
        let shapes = [vec![rows, k], vec![experts, k, m], vec![rows, m]];
        let data = [0, 1, 2].map(|i| common::random_of(shapes[i].iter().product(), i as u64));
        let [x, w, grad] = [0, 1, 2]
            .map(|i| DeviceTensor::from_data(&client, &data[i], shapes[i].clone()).unwrap());
        let offsets = common::offsets(&case.counts);
        Self {
            x,
            grad,
            weights: ExpertWeights::new(w).unwrap(),
            offsets: DeviceTensor::from_data(&client, &offsets, [offsets.len()]).unwrap(),
            client,
            case,
            data,
        }
    }

    /// With zeros where results go.
    fn problem(&self, product: Product) -> Problem {
        let (client, weights, offsets) = (&self.client, &self.weights, &self.offsets);
        match product {
            Product::Forward => Problem::matmul(client, &self.x, weights, offsets),
            Product::SwiGlu => Problem::swiglu(client, &self.x, weights, offsets),
            Product::DataGrad => Problem::data_grad(client, &self.grad, weights, offsets),
            Product::WeightGrad => {
                let home = weights.home();
                let zeros = DeviceTensor::zeros(client, home.shape(), home.dtype());
                let out = ExpertWeights::new(zeros).unwrap();
                Problem::weight_grad(client, &self.x, &self.grad, offsets, &out)
            }
        }
        .unwrap()
    }

    /// The outputs, one after the other.
    fn outputs(&self, problem: &Problem) -> Vec<T> {
        let mut out = problem.output().read::<T>(&self.client).unwrap();
        if let Some(second) = problem.second_output() {
            out.extend(second.read::<T>(&self.client).unwrap());
        }
        out
    }

    fn expected(&self, product: Product) -> Vec<f64> {
        let [x, w, grad] = [0, 1, 2].map(|i| common::to_f64(&self.data[i]));
        match product {
            Product::Forward => self.case.forward_reference(&x, &w),
            Product::SwiGlu => {
                let mut hidden = self.case.forward_reference(&x, &w);
                hidden.extend(self.case.activation_reference(&hidden));
                hidden
            }
            Product::DataGrad => self.case.data_grad_reference(&grad, &w),
            Product::WeightGrad => self.case.weight_grad_reference(&x, &grad, 0.0),
        }
    }
}

const PRODUCTS: [Product; 4] = [
    Product::Forward,
    Product::SwiGlu,
    Product::DataGrad,
    Product::WeightGrad,
];

fn bits<T: Value>(values: &[T]) -> &[u8] {
    T::as_bytes(values)
}

/// Runs all products of the case with the first of `specs`, and the plain product and one other in
/// turn with the rest: each is a kernel to compile.
fn check_specs<T: Value>(case: Case, specs: &[TileSpec]) {
    let fixture = Fixture::<T>::new(case);
    for product in PRODUCTS {
        let expected = fixture.expected(product);
        let mut first: Option<Vec<T>> = None;
        let turn =
            |i: usize| i == 0 || product == Product::Forward || product == PRODUCTS[1 + i % 3];
        for (_, spec) in specs.iter().enumerate().filter(|(i, _)| turn(*i)) {
            let problem = fixture.problem(product);
            run_with(&fixture.client, &problem, *spec);
            let out = fixture.outputs(&problem);
            let what = format!("{product:?} of {:?} with {spec:?}", fixture.case);
            common::assert_close(&what, &out, &expected);
            let first = first.get_or_insert_with(|| out.clone());
            assert!(bits(first) == bits(&out), "bits of {what}");
        }
    }
}

/// The candidates for experts of each of these mean numbers of rows.
fn check_candidates<T: Value>(mean_rows: &[usize]) {
    let client = common::client();
    if !common::supports::<T>(&client) {
        return;
    }
    // Larger than any tile in rows and columns, and smaller than any; ends within a tile.
    let case = Case::new([150, 0, 3, 1], 40, 272);
    let vector = Fixture::<T>::new(case.clone())
        .problem(Product::Forward)
        .vector_size(client.properties());
    let mut specs = Vec::new();
    for mean_rows in mean_rows {
        let more = TileSpec::candidates(client.properties(), T::cube_type(), *mean_rows, vector);
        for spec in more {
            if !specs.contains(&spec) {
                specs.push(spec);
            }
        }
    }
    check_specs::<T>(case, &specs);
}

#[test]
fn candidates_agree_in_f32() {
    check_candidates::<f32>(&[1000, 60, 30, 1]);
}

/// The kernels of both 16-bit types are the same but for the type: one of them will do.
#[test]
fn candidates_agree_in_16_bits() {
    if common::supports::<bf16>(&common::client()) {
        check_candidates::<bf16>(&[1000]);
    } else {
        check_candidates::<f16>(&[1000]);
    }
}

/// Vectors, depths, register blocks and numbers of stages that differ. (The activation is close, but
/// not the same to the bit: a runtime may compute `exp` of vectors of different widths differently.)
#[test]
fn unusual_tiles_are_right() {
    let units = common::client()
        .properties()
        .hardware
        .max_units_per_cube
        .min(8) as usize;
    for (vector, depth, buffers, vectors_m, vectors_n) in
        [(1, 8, 1, 2, 2), (4, 8, 1, 1, 4), (2, 8, 2, 2, 2)]
    {
        let spec = TileSpec {
            vector,
            depth,
            buffers,
            transfer: Transfer::Registers,
            engine: Engine::Registers {
                units_m: 1,
                units_n: units,
                vectors_m,
                vectors_n,
            },
        };
        check_specs::<f32>(Case::new([9, 0, 5, 2], 16, 24), &[spec]);
    }
}

/// Stages filled ahead of the one that is computed, with plain copies: fewer steps than stages, and more.
#[test]
fn stages_filled_ahead_are_right() {
    let units = common::client()
        .properties()
        .hardware
        .max_units_per_cube
        .min(8) as usize;
    for buffers in [2, 4] {
        let spec = TileSpec {
            vector: 1,
            depth: 8,
            buffers,
            transfer: Transfer::Ahead {
                asynchronous: false,
            },
            engine: Engine::Registers {
                units_m: 1,
                units_n: units,
                vectors_m: 2,
                vectors_n: 2,
            },
        };
        check_specs::<f32>(Case::new([9, 0, 50, 2], 44, 26), &[spec]);
    }
}

/// Measuring leaves the result that any tile gives, at once and when the choice has been made.
#[test]
fn tuned_products_have_the_bits_of_fixed_ones() {
    let fixture = Fixture::<f32>::new(Case::new([5, 0, 200, 91], 32, 48));
    for product in PRODUCTS {
        let fixed = fixture.problem(product);
        assert!(
            fixed.candidates(&fixture.client).len() > 1,
            "nothing to measure"
        );
        fixed.run(&fixture.client, Tiling::Fixed);
        let fixed = fixture.outputs(&fixed);
        common::assert_close("fixed", &fixed, &fixture.expected(product));
        for _ in 0..2 {
            let tuned = fixture.problem(product);
            tuned.run(&fixture.client, Tiling::Tuned);
            assert!(fixture.outputs(&tuned) == fixed, "{product:?}");
        }
    }
}

/// What is tuned on any device: as many candidates as there are places for, each once, all of one
/// vector and one kind of arithmetic, within the device's limits.
#[test]
fn candidates_differ_in_shape_alone() {
    let client = common::client();
    for properties in [client.properties().clone(), cuda_source::hopper()] {
        let hardware = &properties.hardware;
        for kind in [FloatKind::F32, FloatKind::F16, FloatKind::BF16] {
            let dtype = cubecl::ir::ElemType::Float(kind);
            for mean_rows in [0, 16, 17, 64, 65, 100_000] {
                for vector in [1, 2, 4, 8] {
                    let specs = TileSpec::candidates(&properties, dtype, mean_rows, vector);
                    assert!((1..=MOST_CANDIDATES).contains(&specs.len()), "{specs:?}");
                    for (i, spec) in specs.iter().enumerate() {
                        assert!(!specs[..i].contains(spec), "{spec:?} twice");
                        assert_eq!(spec.vector, vector);
                        assert_eq!(spec.uses_fragments(), specs[0].uses_fragments());
                        assert!(spec.units() <= hardware.max_units_per_cube as usize);
                    }
                }
            }
        }
    }
}
