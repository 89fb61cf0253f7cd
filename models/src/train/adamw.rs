use burn::optim::{
    AdamW, AdamWState, AdaptiveMomentumState, LearningRate, Optimizer, RecordState, StateSink,
    StateSource,
};
use burn::tensor::{Device, Tensor, TensorData};

use super::accumulate::wide;

/// [`AdamW`] (arXiv 1711.05101) with f32 master weights and moments for parameters that are
/// narrower (arXiv 1710.03740, section 3.1): steps too small for the parameter's type add up in the
/// master weight, and the parameter is that, rounded. A parameter of f32 or f64 is its own master.
///
/// The master weight is part of the optimizer's state, and so of its records. It is made from the
/// parameter at the first step; a parameter that is replaced later by other means needs a new state.
#[derive(Clone)]
pub struct MasterAdamW(AdamW);

impl MasterAdamW {
    /// AdamW as configured.
    pub fn new(adamw: AdamW) -> Self {
        Self(adamw)
    }
}

impl Optimizer for MasterAdamW {
    type State<const D: usize> = MasterAdamWState<D>;

    fn step<const D: usize>(
        &self,
        lr: LearningRate,
        tensor: Tensor<D>,
        grad: Tensor<D>,
        state: Option<Self::State<D>>,
    ) -> (Tensor<D>, Option<Self::State<D>>) {
        let dtype = tensor.dtype();
        let (master, state) = match state {
            Some(state) => (state.master, Some(AdamWState::new(state.momentum))),
            None => (None, None),
        };
        let master = master.unwrap_or_else(|| wide(tensor));
        let grad = grad.cast(master.dtype());
        let (master, state) = self.0.step(lr, master, grad, state);
        let narrow = master.dtype() != dtype;
        let state = state.map(|state| MasterAdamWState {
            master: narrow.then(|| master.clone()),
            momentum: state.momentum,
        });
        (master.cast(dtype), state)
    }

    fn to_device<const D: usize>(state: Self::State<D>, device: &Device) -> Self::State<D> {
        MasterAdamWState {
            master: state.master.map(|master| master.to_device(device)),
            momentum: state.momentum.to_device(device),
        }
    }
}

/// What [`MasterAdamW`] keeps of one parameter.
#[derive(Clone)]
pub struct MasterAdamWState<const D: usize> {
    /// The parameter in f32, if it is narrower.
    pub master: Option<Tensor<D>>,
    /// Moments, and the number of steps.
    pub momentum: AdaptiveMomentumState<D>,
}

/// Written out rather than derived: a derived one reads tensors in the device's default type, which
/// is the narrow one when the model is narrow.
impl<const D: usize> RecordState for MasterAdamWState<D> {
    fn state_flatten(&self, prefix: &str, out: &mut StateSink) {
        let Self { master, momentum } = self;
        out.push_scalar(prefix, "time", momentum.time.into());
        out.push_tensor(prefix, "moment_1", momentum.moment_1.to_data());
        out.push_tensor(prefix, "moment_2", momentum.moment_2.to_data());
        for (leaf, tensor) in [("max_moment_2", &momentum.max_moment_2), ("master", master)] {
            if let Some(tensor) = tensor {
                out.push_tensor(prefix, leaf, tensor.to_data());
            }
        }
    }

    fn state_unflatten(prefix: &str, src: &mut StateSource, device: &Device) -> Option<Self> {
        let time = src.take_scalar(prefix, "time")?.try_into().ok()?;
        let tensor = |data: TensorData| {
            let dtype = data.dtype();
            Tensor::from_data(data, (device, dtype))
        };
        let mut take = |leaf| src.take_tensor(prefix, leaf).map(tensor);
        let mut momentum = AdaptiveMomentumState::new(time, take("moment_1")?, take("moment_2")?);
        momentum.max_moment_2 = take("max_moment_2");
        Some(Self {
            master: take("master"),
            momentum,
        })
    }
}
