use std::sync::{Arc, Mutex, PoisonError};

use burn::config::Config;
use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::{
    ConfigError, FeedForward, FeedForwardConfig, GroupedExperts, GroupedExpertsConfig, Router,
    RouterConfig, Routing,
};
use crate::ops::reshape;
use crate::parallel::{
    self, Balance, CombineOrder, ExpertParallel, ParallelError, ParallelLayer, ParallelOptions,
};

/// Configuration to create a [`Moe`] with [`init`](MoeConfig::init) or
/// [`init_parallel`](MoeConfig::init_parallel).
#[derive(Config, Debug)]
pub struct MoeConfig {
    /// The router, with the number of experts.
    pub router: RouterConfig,
    /// Width of an expert between its two products.
    pub d_hidden: usize,
    /// Experts that every token passes, computed as one of this many times the width.
    #[config(default = 0)]
    pub num_shared_experts: usize,
    /// Drops token copies beyond this factor times the mean load of an expert, those of later
    /// tokens first. Without it no copy is dropped.
    #[config(default = "None")]
    pub capacity_factor: Option<f64>,
    /// Seed of the experts' initial weights.
    #[config(default = 0)]
    pub seed: u64,
}

impl MoeConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        self.router.validate()?;
        ConfigError::check(self.d_hidden > 0, "d_hidden", self.d_hidden, "1 or more")?;
        match self.capacity_factor {
            Some(factor) => ConfigError::check(
                factor.is_finite() && factor > 0.0,
                "capacity_factor",
                factor,
                "a positive number, or none",
            ),
            None => Ok(()),
        }
    }

    /// Creates the layer with all experts on this rank.
    ///
    /// # Panics
    ///
    /// Panics when [`validate`](Self::validate) finds a fault.
    pub fn init(&self, device: &Device) -> Moe {
        let options = ParallelOptions {
            balance: Balance::None,
            combine: CombineOrder::Exact,
            ..Default::default()
        };
        ExpertParallel::solo(options)
            .and_then(|ep| self.init_parallel(&ep, 0, device))
            .unwrap_or_else(|error| panic!("MoeConfig: {error}"))
    }

    /// Creates this rank's part of the layer: its experts, and everything else.
    ///
    /// `layer` tells the layers of a model apart and must be the same on all ranks. Initial weights
    /// depend on the seeds alone, so the router and the shared experts start equal on all ranks.
    ///
    /// # Errors
    ///
    /// When [`validate`](Self::validate) finds a fault, or the ranks do not divide the experts.
    pub fn init_parallel(
        &self,
        ep: &Arc<ExpertParallel>,
        layer: u32,
        device: &Device,
    ) -> Result<Moe, ParallelError> {
        self.validate()?;
        let RouterConfig {
            d_model,
            num_experts,
            ..
        } = self.router;
        let local = ep.local_experts(num_experts)?;
        let experts = GroupedExpertsConfig::new(num_experts, d_model, self.d_hidden)
            .with_seed(self.seed)
            .init_shard(local, device);
        let shared = (self.num_shared_experts > 0).then(|| {
            FeedForwardConfig::new(d_model, self.d_hidden * self.num_shared_experts)
                .with_seed(self.seed)
                .init(device)
        });
        Ok(Moe {
            router: self.router.init(device),
            experts,
            shared,
            capacity_factor: self.capacity_factor,
            parallel: ParallelLayer::new(ep.clone(), layer, num_experts),
            load: LoadCounter::new(num_experts),
        })
    }
}

/// A mixture-of-experts feed-forward (DeepSeek-V3, arXiv 2412.19437, equation 12): a router chooses
/// a few of many experts for each token, shared experts take all. A drop-in for the feed-forward of
/// a transformer, on one rank or over many.
#[derive(Module, Debug)]
pub struct Moe {
    /// Chooses the experts.
    pub router: Router,
    /// The experts of this rank.
    pub experts: GroupedExperts,
    /// The experts that every token passes.
    pub shared: Option<FeedForward>,
    #[module(skip)]
    capacity_factor: Option<f64>,
    #[module(skip)]
    parallel: ParallelLayer,
    #[module(skip)]
    load: LoadCounter,
}

/// Output of a [`Moe`], with what the auxiliary losses need.
#[derive(Debug, Clone)]
pub struct MoeOutput {
    /// `[T, D]`
    pub output: Tensor<2>,
    /// The router's decisions for these tokens.
    pub routing: Routing,
}

impl Moe {
    /// Applies the layer. With expert parallelism all ranks must call it, even without tokens.
    ///
    /// # Shapes
    ///
    /// - `x` and result: `[..., d_model]`
    ///
    /// # Panics
    ///
    /// Panics when the last dimension is not `d_model`; unwinds with a
    /// [`CommError`](crate::comm::CommError) when a rank is lost or too late.
    pub fn forward<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let shape = x.shape();
        let width = shape[D - 1];
        let rows = shape.num_elements() / width.max(1);
        let flat = reshape(x, [rows, width]);
        reshape(self.forward_routed(flat).output, shape)
    }

    /// [`forward`](Moe::forward) for flat tokens, with the routing.
    ///
    /// # Shapes
    ///
    /// - `x` and output: `[tokens, d_model]`
    pub fn forward_routed(&self, x: Tensor<2>) -> MoeOutput {
        let [tokens, _] = x.dims();
        let ep = &self.parallel.ep;
        // All ranks take part in the exchanges of the backward pass, also one whose tokens are
        // constants, such as an empty slice of something.
        #[cfg(feature = "autodiff")]
        let x = if x.is_autodiff() && !x.is_tracked() {
            x.require_grad()
        } else {
            x
        };
        let routing = match ep.options().balance {
            Balance::Ideal => {
                let first = ep.comm().rank() * tokens * self.router.top_k();
                self.router.forward_balanced(x.clone(), first)
            }
            Balance::None | Balance::Exact => self.router.forward(x.clone()),
        };
        // The one read-back of the layer: where the copies go is decided on the host.
        let ids: Vec<u32> = routing.ids.to_data().iter::<u32>().collect();
        let (output, load) = parallel::forward(
            &self.parallel,
            &self.experts,
            x.clone(),
            &ids,
            routing.weights.clone(),
            self.capacity_factor,
        );
        if x.is_autodiff() {
            self.load.add(&load);
        }
        let output = match &self.shared {
            Some(shared) => output + shared.forward(x),
            None => output,
        };
        MoeOutput { output, routing }
    }

    /// Takes the load that the next [`update_bias`](Self::update_bias) would use: token copies of each
    /// expert, over the ranks that share the experts. With data parallelism, the biases of all
    /// replicas of the model stay equal when each gets the sum over all by [`add_load`](Self::add_load).
    pub fn take_load(&self) -> Vec<u64> {
        self.load.take()
    }

    /// Adds to the load that the next [`update_bias`](Self::update_bias) uses, one count for each expert.
    pub fn add_load(&self, load: &[u64]) {
        self.load.add(load);
    }

    /// Moves the router's selection bias against the load of the forward passes (with autodiff)
    /// since the last call; see [`Router::update_bias`]. All ranks that share the experts move it
    /// alike.
    pub fn update_bias(&mut self, speed: f64) {
        self.router.update_bias(&self.load.take(), speed);
    }
}

/// Token copies of each expert over all ranks since the last bias update. A clone counts for itself.
#[derive(Debug)]
struct LoadCounter(Mutex<Vec<u64>>);

impl LoadCounter {
    fn new(experts: usize) -> Self {
        Self(Mutex::new(vec![0; experts]))
    }

    fn add(&self, load: &[u64]) {
        for (sum, load) in self.lock().iter_mut().zip(load) {
            *sum += load;
        }
    }

    fn take(&self) -> Vec<u64> {
        let mut load = self.lock();
        let zeros = vec![0; load.len()];
        std::mem::replace(&mut *load, zeros)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Clone for LoadCounter {
    fn clone(&self) -> Self {
        Self(Mutex::new(self.lock().clone()))
    }
}
