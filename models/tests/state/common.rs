//! Runs to be saved: of real training, and of steps with made-up gradients, whose result does not
//! depend on how many ranks there are.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::optim::{GradientsParams, ModuleOptimizer};
use burn::tensor::{DType, Device, Tensor, TensorData};
use burn_moe::comm::{Communicator, RankOptions, run_ranks};
use burn_moe::parallel::{ExpertParallel, Mesh, ParallelOptions};
use burn_moe_models::state::{RunState, SavedState, Snapshot, StateError, StateFolder};
use burn_moe_models::train::OptimizerConfig;
use burn_moe_models::{Decoder, ModelConfig};

pub const QUIET: &dyn Fn(u64, u64) = &|_, _| {};

pub fn config() -> ModelConfig {
    ModelConfig::named("smoke").unwrap()
}

pub fn device() -> Device {
    Device::flex().autodiff()
}

/// Groups of `ep` ranks that share the experts.
pub fn groups(world: Arc<dyn Communicator>, ep: usize) -> (Mesh, Arc<ExpertParallel>) {
    let mesh = Mesh::new(world, ep).unwrap();
    let ep = ExpertParallel::new(mesh.ep().clone(), ParallelOptions::default()).unwrap();
    (mesh, ep)
}

/// One group of all ranks.
pub fn parallel(world: Arc<dyn Communicator>) -> (Mesh, Arc<ExpertParallel>) {
    let size = world.size();
    groups(world, size)
}

pub fn state(run: &str, step: u64) -> RunState {
    RunState {
        run: run.into(),
        step,
        position: step * 4,
        settings: [("--lr".to_owned(), "0.01".to_owned())].into(),
        history: [(
            "loss".to_owned(),
            (0..step).map(|i| 1.0 / (i + 3) as f64).collect(),
        )]
        .into(),
    }
}

/// A rank of a run with made-up gradients.
pub struct Trainee {
    pub mesh: Mesh,
    pub model: Decoder,
    pub optimizer: ModuleOptimizer,
    pub state: RunState,
}

impl Trainee {
    pub fn new(comm: Arc<dyn Communicator>, run: &str, dtype: DType) -> Self {
        Self::new_in(parallel(comm), run, dtype)
    }

    pub fn new_in((mesh, ep): (Mesh, Arc<ExpertParallel>), run: &str, dtype: DType) -> Self {
        let model = config()
            .init(&ep, 5, &device())
            .unwrap()
            .map(&mut Cast(dtype));
        Self {
            optimizer: OptimizerConfig::default().init(&model).unwrap(),
            model,
            mesh,
            state: state(run, 0),
        }
    }

    pub fn load(comm: Arc<dyn Communicator>, path: &Path) -> Result<Self, StateError> {
        Self::load_in(parallel(comm), path)
    }

    pub fn load_in(
        (mesh, ep): (Mesh, Arc<ExpertParallel>),
        path: &Path,
    ) -> Result<Self, StateError> {
        let loaded = SavedState::open(path)?.load(&config(), &ep, &mesh, &device(), QUIET)?;
        let optimizer = OptimizerConfig::default().init(&loaded.model).unwrap();
        let restored = loaded.optimizer(optimizer)?;
        Ok(Self {
            mesh,
            model: restored.model,
            optimizer: restored.optimizer,
            state: restored.state,
        })
    }

    pub fn step(&mut self) {
        let mut made = MadeUp {
            path: Vec::new(),
            first_expert: self.mesh.local_experts(config().num_experts).unwrap().start,
            experts: false,
            step: self.state.step,
            grads: GradientsParams::new(),
        };
        self.model.visit(&mut made);
        self.model = self.optimizer.step(1e-2, self.model.clone(), made.grads);
        self.state = state(&self.state.run, self.state.step + 1);
    }

    pub fn save(&self, folder: &StateFolder) -> Result<(), StateError> {
        let snapshot = Snapshot {
            state: &self.state,
            config: &config(),
            model: &self.model,
            optimizer: &self.optimizer,
        };
        folder.save(snapshot, &self.mesh, QUIET).map(|_| ())
    }

    /// The bytes of every parameter, experts by their global ids.
    pub fn weights(&self) -> BTreeMap<String, Vec<u8>> {
        let mut dump = Dump {
            path: Vec::new(),
            first_expert: self.mesh.local_experts(config().num_experts).unwrap().start,
            experts: false,
            weights: BTreeMap::new(),
        };
        self.model.visit(&mut dump);
        dump.weights
    }
}

pub type AnyError = Box<dyn std::error::Error + Send + Sync>;

/// An error as a rank hands it over: a lost rank as such, so that the rank that failed is told.
pub fn of_rank(error: StateError) -> AnyError {
    match error {
        StateError::Comm(error) => error.into(),
        error => error.into(),
    }
}

/// Runs `f` on each rank and joins the weights that they return.
pub fn on_ranks(
    ranks: usize,
    f: impl Fn(Arc<dyn Communicator>) -> BTreeMap<String, Vec<u8>> + Sync,
) -> BTreeMap<String, Vec<u8>> {
    let mut all = BTreeMap::new();
    for weights in run_ranks(ranks, RankOptions::default(), f).unwrap() {
        for (name, bytes) in weights {
            if let Some(other) = all.insert(name.clone(), bytes.clone()) {
                assert_eq!(other, bytes, "{name} differs between ranks");
            }
        }
    }
    all
}

/// `steps` steps without interruption.
pub fn unbroken(ranks: usize, steps: u64, dtype: DType) -> BTreeMap<String, Vec<u8>> {
    on_ranks(ranks, |comm| {
        let mut trainee = Trainee::new(comm, "a", dtype);
        (0..steps).for_each(|_| trainee.step());
        trainee.weights()
    })
}

/// Saves step `steps` of a new run, on `ranks` ranks, as well as each step in `also`.
pub fn saved(folder: &StateFolder, run: &str, ranks: usize, steps: &[u64]) {
    run_ranks(ranks, RankOptions::default(), |comm| {
        let mut trainee = Trainee::new(comm, run, DType::F32);
        for step in 1..=*steps.last().unwrap() {
            trainee.step();
            if steps.contains(&step) {
                trainee.save(folder).unwrap();
            }
        }
    })
    .unwrap();
}

/// Makes parameters of another type.
struct Cast(DType);

impl ModuleMapper for Cast {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let dtype = self.0;
        param.map(|tensor| {
            let requires_grad = tensor.is_require_grad();
            let narrow = tensor.inner().cast(dtype).autodiff();
            narrow.set_require_grad(requires_grad)
        })
    }
}

/// Gradients that depend on the parameter's name, the expert's id, the element and the step.
struct MadeUp {
    path: Vec<String>,
    first_expert: usize,
    experts: bool,
    step: u64,
    grads: GradientsParams,
}

impl ModuleVisitor for MadeUp {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.into());
        self.experts |= container.ends_with("GroupedExperts");
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.pop();
        self.experts &= !container.ends_with("GroupedExperts");
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        // As router biases have none. Some parameters get none in some steps.
        if !param.is_require_grad() || (self.path.len() + self.step as usize).is_multiple_of(5) {
            return;
        }
        let shape = param.lazy_shape();
        let each = match self.experts {
            true => shape[1..].iter().product(),
            false => shape.num_elements(),
        };
        let name: usize = self.path.join(".").bytes().map(usize::from).sum();
        let values = (0..shape.num_elements()).map(|i| {
            let expert = if self.experts {
                self.first_expert + i / each
            } else {
                0
            };
            let mixed = name * 31 + expert * 7919 + i % each * 17 + self.step as usize * 101;
            (mixed % 257) as f32 / 512.0 - 0.25
        });
        let data = TensorData::new(values.collect::<Vec<_>>(), shape);
        let value = param.val().inner();
        let grad = Tensor::<D>::from_data(data, (&value.device(), value.dtype()));
        self.grads.register(param.id, grad);
    }
}

struct Dump {
    path: Vec<String>,
    first_expert: usize,
    experts: bool,
    weights: BTreeMap<String, Vec<u8>>,
}

impl ModuleVisitor for Dump {
    fn enter_module(&mut self, name: &str, container: &str) {
        self.path.push(name.into());
        self.experts |= container.ends_with("GroupedExperts");
    }

    fn exit_module(&mut self, _name: &str, container: &str) {
        self.path.pop();
        self.experts &= !container.ends_with("GroupedExperts");
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let name = self.path.join(".");
        let data = param.val().inner().into_data();
        let name = format!("{name} {:?}", data.dtype());
        if !self.experts {
            self.weights.insert(name, data.as_bytes().to_vec());
            return;
        }
        let each = data.as_bytes().len() / data.shape()[0];
        for (i, bytes) in data.as_bytes().chunks_exact(each).enumerate() {
            let name = format!("{name} of {}", self.first_expert + i);
            self.weights.insert(name, bytes.to_vec());
        }
    }
}
