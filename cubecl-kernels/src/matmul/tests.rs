//! Every tile shape gives the same sums, bit for bit: the shape decides who computes an element, not
//! in which order it is summed. (The activation is left out: a runtime may compute `exp` of vectors
//! of different widths differently.)

use super::{
    launch::run_with,
    problem::Problem,
    tile::{Engine, TileSpec},
};
use crate::{DeviceTensor, ExpertWeights, common};

mod cuda_source;

/// Vectors, depths, register blocks and numbers of stages that differ.
fn specs(units: usize) -> [TileSpec; 3] {
    [(1, 8, 1, 4, 2), (4, 8, 1, 1, 2), (4, 16, 2, 2, 4)].map(
        |(vector, depth, buffers, vectors_m, vectors_n)| TileSpec {
            vector,
            depth,
            buffers,
            engine: Engine::Registers {
                units_m: 1,
                units_n: units,
                vectors_m,
                vectors_n,
            },
        },
    )
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
        for spec in specs(units) {
            let problem = make();
            run_with(&client, &problem, spec);
            let out = problem.output().read::<f32>(&client).unwrap();
            let first = first.get_or_insert_with(|| out.clone());
            assert!(*first == out, "{:?} with {spec:?}", problem.product);
        }
    }
}
