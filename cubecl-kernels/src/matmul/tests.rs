//! Every tile shape gives the same bits: the shape decides who computes an element, not in which
//! order it is summed.

use super::{
    launch::run_with,
    problem::Problem,
    tile::{Engine, TileSpec},
};
use crate::{DeviceTensor, ExpertWeights};

#[path = "../../tests/common/mod.rs"]
mod common;
mod cuda_source;

fn specs(vector: usize, units: usize) -> Vec<TileSpec> {
    let mut specs = Vec::new();
    for buffers in [1, 2] {
        for depth in [8, 16] {
            for (vectors_m, vectors_n) in [(1, 2), (2, 4)] {
                specs.push(TileSpec {
                    vector,
                    depth,
                    buffers,
                    engine: Engine::Registers {
                        units_m: 1,
                        units_n: units,
                        vectors_m,
                        vectors_n,
                    },
                });
            }
        }
    }
    specs
}

#[test]
fn tile_shapes_do_not_change_bits() {
    let client = common::client();
    let units = client.properties().hardware.max_units_per_cube.min(8) as usize;
    let (counts, k, m) = ([9, 0, 30, 4], 24, 40);
    let rows = counts.iter().sum::<usize>();
    let tensor = |shape: &[usize], seed| {
        let data = common::random(shape.iter().product(), seed);
        DeviceTensor::from_data(&client, &data, shape).unwrap()
    };
    let weights = ExpertWeights::new(tensor(&[4, k, m], 1)).unwrap();
    let (x, grad) = (tensor(&[rows, k], 2), tensor(&[rows, m], 3));
    let offsets = common::offsets(&counts);
    let offsets = DeviceTensor::from_data(&client, &offsets, [5]).unwrap();
    // Expert 1 has no rows; fresh zeros make its block comparable.
    let target = || ExpertWeights::new(DeviceTensor::zeros(&client, [4, k, m], x.dtype())).unwrap();
    let make: [&dyn Fn() -> Problem; 4] = [
        &|| Problem::matmul(&client, &x, &weights, &offsets).unwrap(),
        &|| Problem::swiglu(&client, &x, &weights, &offsets).unwrap(),
        &|| Problem::data_grad(&client, &grad, &weights, &offsets).unwrap(),
        &|| Problem::weight_grad(&client, &x, &grad, &offsets, &target()).unwrap(),
    ];
    for make in make {
        let mut first: Option<Vec<f32>> = None;
        for vector in [1, 4] {
            for spec in specs(vector, units) {
                let problem = make();
                run_with(&client, &problem, spec);
                let mut out = problem.output().read::<f32>(&client).unwrap();
                if let Some(second) = problem.second_output() {
                    out.extend(second.read::<f32>(&client).unwrap());
                }
                let first = first.get_or_insert_with(|| out.clone());
                assert!(*first == out, "{spec:?} differs");
            }
        }
    }
}
