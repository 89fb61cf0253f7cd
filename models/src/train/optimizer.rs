use burn::module::{Module, ModuleVisitor, Param, ParamGroup};
use burn::optim::{AdamWConfig, ModuleOptimizer};
use burn::tensor::Tensor;
use burn_moe::layer::ConfigError;

use super::MasterAdamW;

/// Settings of the optimizer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct OptimizerConfig {
    /// Decay of the first moment.
    pub beta_1: f32,
    /// Decay of the second moment.
    pub beta_2: f32,
    /// Added to the root of the second moment.
    pub epsilon: f32,
    /// Share of a weight, times the learning rate, that it loses in a step. Vectors (norms, biases)
    /// lose nothing.
    pub weight_decay: f32,
}

/// The defaults of Burn's `AdamWConfig`.
impl Default for OptimizerConfig {
    fn default() -> Self {
        Self {
            beta_1: 0.9,
            beta_2: 0.999,
            epsilon: 1e-5,
            weight_decay: 1e-4,
        }
    }
}

impl OptimizerConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        for (field, beta) in [("beta_1", self.beta_1), ("beta_2", self.beta_2)] {
            let allowed = (0.0..1.0).contains(&beta);
            ConfigError::check(allowed, field, beta, "from 0 on, less than 1")?;
        }
        for (field, value) in [
            ("epsilon", self.epsilon),
            ("weight_decay", self.weight_decay),
        ] {
            let allowed = value.is_finite() && value >= 0.0;
            ConfigError::check(allowed, field, value, "0 or more")?;
        }
        Ok(())
    }

    /// [`MasterAdamW`] for `module`, whose vectors get no weight decay.
    ///
    /// # Errors
    ///
    /// When [`validate`](Self::validate) finds a fault.
    pub fn init<M: Module>(&self, module: &M) -> Result<ModuleOptimizer, ConfigError> {
        self.validate()?;
        let adamw = |weight_decay| {
            let config = AdamWConfig::new()
                .with_beta_1(self.beta_1)
                .with_beta_2(self.beta_2)
                .with_epsilon(self.epsilon)
                .with_weight_decay(weight_decay);
            MasterAdamW::new(config.build())
        };
        let mut vectors = Vectors::default();
        module.visit(&mut vectors);
        let group = ParamGroup::from_paths(vectors.paths);
        let all = ModuleOptimizer::from(adamw(self.weight_decay));
        Ok(all.with_group(group, adamw(0.0), None))
    }
}

/// Collects the paths of vectors, spelled as `ModuleOptimizer` does. Paths rather than ids, so that
/// groups are found again after a record is loaded.
#[derive(Default)]
struct Vectors {
    path: Vec<String>,
    paths: Vec<String>,
}

impl ModuleVisitor for Vectors {
    fn enter_module(&mut self, name: &str, _container: &str) {
        self.path.push(name.into());
    }

    fn exit_module(&mut self, _name: &str, _container: &str) {
        self.path.pop();
    }

    fn visit_float<const D: usize>(&mut self, _param: &Param<Tensor<D>>) {
        if D == 1 {
            self.paths.push(self.path.join("."));
        }
    }
}
