//! AdamW with master weights against a loop in f64.
#![cfg(feature = "autodiff")]

use burn::module::{Module, Param};
use burn::optim::{
    AdamWConfig, GradientsParams, ModuleOptimizer, Optimizer, RecordState, StateSink, StateSource,
};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_moe_models::train::{Accumulator, MasterAdamW, MasterAdamWState, OptimizerConfig};

#[derive(Module, Debug)]
struct Model {
    matrix: Param<Tensor<2>>,
    vector: Param<Tensor<1>>,
}

const SHAPE: [usize; 2] = [3, 4];

fn tensor<const D: usize>(values: &[f64], shape: [usize; D], dtype: DType) -> Tensor<D> {
    let values: Vec<f32> = values.iter().map(|v| *v as f32).collect();
    Tensor::from_data(TensorData::new(values, shape), (&Device::flex(), dtype))
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().iter().collect()
}

/// Numbers between -1 and 1, exact in bf16.
fn numbers(len: usize, seed: usize) -> Vec<f64> {
    (0..len)
        .map(|i| ((i * 37 + seed * 101) % 129) as f64 / 64.0 - 1.0)
        .collect()
}

impl Model {
    fn new(dtype: DType) -> Self {
        let matrix = tensor(&numbers(12, 1), SHAPE, dtype).autodiff();
        let vector = tensor(&numbers(4, 2), [4], dtype).autodiff();
        Self {
            matrix: Param::from_tensor(matrix.require_grad()),
            vector: Param::from_tensor(vector.require_grad()),
        }
    }

    fn grads(&self, step: usize, dtype: DType) -> GradientsParams {
        let mut grads = GradientsParams::new();
        let scale = 1.0 / (1 << (step % 5)) as f64;
        let scaled = |values: Vec<f64>| values.iter().map(|v| v * scale).collect::<Vec<_>>();
        let matrix = scaled(numbers(12, 10 + step));
        grads.register(self.matrix.id, tensor(&matrix, SHAPE, dtype));
        let vector = scaled(numbers(4, 50 + step));
        grads.register(self.vector.id, tensor(&vector, [4], dtype));
        grads
    }
}

/// The algorithm of the paper, with decoupled weight decay.
struct Reference {
    weights: Vec<f64>,
    moments: [Vec<f64>; 2],
    decay: f64,
    step: i32,
}

impl Reference {
    fn new(weights: Vec<f64>, decay: f64) -> Self {
        let zeros = vec![0.0; weights.len()];
        Self {
            weights,
            moments: [zeros.clone(), zeros],
            decay,
            step: 0,
        }
    }

    fn step(&mut self, lr: f64, grads: &[f64]) {
        self.step += 1;
        let [first, second] = &mut self.moments;
        for (i, grad) in grads.iter().enumerate() {
            first[i] = 0.9 * first[i] + 0.1 * grad;
            second[i] = 0.999 * second[i] + 0.001 * grad * grad;
            let m = first[i] / (1.0 - 0.9f64.powi(self.step));
            let v = second[i] / (1.0 - 0.999f64.powi(self.step));
            self.weights[i] -= lr * self.decay * self.weights[i];
            self.weights[i] -= lr * m / (v.sqrt() + 1e-5);
        }
    }
}

fn optimizer(model: &Model) -> ModuleOptimizer {
    let config = OptimizerConfig {
        weight_decay: 0.3,
        ..Default::default()
    };
    config.init(model).unwrap()
}

/// Largest distance from the reference.
fn furthest(got: Vec<f64>, want: &[f64]) -> f64 {
    assert_eq!(got.len(), want.len());
    let distances = got.iter().zip(want).map(|(a, b)| (a - b).abs());
    distances.fold(0.0, f64::max)
}

/// The matrix decays, the vector does not.
#[test]
fn steps_are_those_of_the_paper() {
    for dtype in [DType::F32, DType::F64] {
        let mut model = Model::new(dtype);
        let mut optimizer = optimizer(&model);
        let mut matrix = Reference::new(numbers(12, 1), 0.3);
        let mut vector = Reference::new(numbers(4, 2), 0.0);
        for step in 0..40 {
            let grads = model.grads(step, dtype);
            matrix.step(0.01, &values(grads.get::<2>(model.matrix.id).unwrap()));
            vector.step(0.01, &values(grads.get::<1>(model.vector.id).unwrap()));
            model = optimizer.step(0.01, model, grads);
            let off = furthest(values(model.matrix.val()), &matrix.weights)
                .max(furthest(values(model.vector.val()), &vector.weights));
            assert!(off < 2e-6, "step {step}: {off:e}");
        }
        assert_eq!(model.matrix.val().dtype(), dtype);
        assert!(model.matrix.is_require_grad());
    }
}

/// The weights are the f64 reference rounded to bf16, after steps that are all too small for bf16:
/// rounding after each of them would have left the weights where they were.
#[test]
fn small_steps_are_not_lost_in_bf16() {
    let lr = 2e-5;
    let mut model = Model::new(DType::BF16);
    let mut optimizer = optimizer(&model);
    let mut matrix = Reference::new(numbers(12, 1), 0.3);
    let before = values(model.matrix.val());
    for _ in 0..400 {
        let grads = model.grads(0, DType::BF16);
        matrix.step(lr, &values(grads.get::<2>(model.matrix.id).unwrap()));
        model = optimizer.step(lr, model, grads);
    }
    assert_eq!(model.matrix.val().dtype(), DType::BF16);
    let after = values(model.matrix.val());
    let mut moved = 0;
    for ((got, want), before) in after.iter().zip(&matrix.weights).zip(&before) {
        // Half of the distance between neighbours in bf16.
        let half = 2f64.powi(want.abs().log2().floor() as i32 - 8);
        assert!((got - want).abs() <= half * 1.001, "{got} {want}");
        // A step of `lr` is less than half of that distance for these.
        moved += usize::from(before.abs() > 0.02 && got != before);
    }
    assert!(moved >= 8, "{moved} of 12 weights moved");

    // Without master weights, in the same number of steps.
    let mut plain = Model::new(DType::BF16);
    let adamw = AdamWConfig::new().with_weight_decay(0.3);
    let mut optimizer = adamw.init();
    for _ in 0..400 {
        let grads = plain.grads(0, DType::BF16);
        plain = optimizer.step(lr, plain, grads);
    }
    let stalled = values(plain.matrix.val());
    let far = |(now, before): (&f64, &f64)| before.abs() > 0.02 && now != before;
    let moved = stalled
        .iter()
        .zip(&before)
        .filter(|pair| far(*pair))
        .count();
    assert_eq!(moved, 0, "{moved} weights moved without master weights");
}

/// A loss that pure bf16 cannot bring down: the target lies closer than bf16's steps are large
/// compared with the learning rate.
#[test]
fn bf16_keeps_improving() {
    let target = 1.25;
    let lr = 1e-3;
    let run = |master: bool| {
        let mut model = Model::new(DType::BF16);
        model.matrix = model.matrix.map(|matrix| matrix.ones_like().require_grad());
        let mut optimizer = match master {
            true => OptimizerConfig::default().init(&model).unwrap(),
            false => AdamWConfig::new().init(),
        };
        for _ in 0..300 {
            let loss = (model.matrix.val() - target).square().sum();
            let grads = GradientsParams::from_grads(loss.backward(), &model);
            model = optimizer.step(lr, model, grads);
        }
        (values(model.matrix.val())[0] - target).abs()
    };
    let (with, without) = (run(true), run(false));
    assert!(with < 0.25 / 4.0, "{with}");
    assert_eq!(without, 0.25, "stays at 1");
}

/// A record holds master weights and moments to the bit, whatever the device's default type.
#[test]
fn records_continue() {
    for dtype in [DType::BF16, DType::F32, DType::F64] {
        let mut model = Model::new(dtype);
        let mut first = optimizer(&model);
        for step in 0..5 {
            let grads = model.grads(step, dtype);
            model = first.step(1e-3, model, grads);
        }
        let bytes = first.into_bytes().unwrap();
        let mut second = optimizer(&model).from_bytes(bytes).unwrap();
        let mut other = model.clone();
        for step in 5..9 {
            let grads = model.grads(step, dtype);
            model = first.step(1e-3, model, grads);
            let grads = other.grads(step, dtype);
            other = second.step(1e-3, other, grads);
        }
        assert_eq!(values(model.matrix.val()), values(other.matrix.val()));
        assert_eq!(values(model.vector.val()), values(other.vector.val()));
        // What rounding of the parameter may hide.
        let adamw = MasterAdamW::new(AdamWConfig::new().build());
        let weights = tensor(&numbers(12, 1), SHAPE, dtype);
        let grad = tensor(&numbers(12, 2), SHAPE, dtype);
        let (_, state) = adamw.step(1e-3, weights, grad, None);
        let state = state.unwrap();
        assert_eq!(state.master.is_some(), dtype == DType::BF16);
        let mut sink = StateSink::default();
        state.state_flatten("p", &mut sink);
        let mut source = StateSource::new(sink.scalars.into_iter().collect());
        for (name, data) in sink.tensors {
            source.insert_tensor(name, data);
        }
        let device = Device::flex();
        let read = MasterAdamWState::<2>::state_unflatten("p", &mut source, &device).unwrap();
        let data = |state: MasterAdamWState<2>| {
            let momentum = state.momentum;
            let moments = [momentum.moment_1, momentum.moment_2].map(|moment| moment.into_data());
            (
                state.master.map(|master| master.into_data()),
                moments,
                momentum.time,
            )
        };
        assert_eq!(data(read), data(state));
    }
}

#[test]
fn sums_of_bf16_gradients_are_f32() {
    let model = Model::new(DType::BF16);
    let mut accumulator = Accumulator::default();
    let mut want = vec![0.0; 12];
    for step in 0..64 {
        let grads = model.grads(step, DType::BF16);
        let grad = values(grads.get::<2>(model.matrix.id).unwrap());
        want.iter_mut()
            .zip(grad)
            .for_each(|(sum, grad)| *sum += grad);
        accumulator.add(grads, &model);
    }
    let sum = accumulator.take().get::<2>(model.matrix.id).unwrap();
    assert_eq!(sum.dtype(), DType::F32);
    // These numbers add up without rounding in f32, not in bf16.
    assert_eq!(values(sum), want);
    assert!(accumulator.take().is_empty());
}

#[test]
fn faults_are_named() {
    let model = Model::new(DType::F32);
    let refused = |config: OptimizerConfig| config.init(&model).err().map(|error| error.field);
    let default = OptimizerConfig::default();
    let beta_1 = 1.0;
    assert_eq!(
        refused(OptimizerConfig { beta_1, ..default }),
        Some("beta_1")
    );
    let beta_2 = -0.1;
    assert_eq!(
        refused(OptimizerConfig { beta_2, ..default }),
        Some("beta_2")
    );
    let epsilon = f32::NAN;
    assert_eq!(
        refused(OptimizerConfig { epsilon, ..default }),
        Some("epsilon")
    );
    let weight_decay = -1.0;
    let decay = OptimizerConfig {
        weight_decay,
        ..default
    };
    assert_eq!(refused(decay), Some("weight_decay"));
    assert_eq!(refused(default), None);
}
