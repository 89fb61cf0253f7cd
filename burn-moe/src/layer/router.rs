use burn::config::Config;
use burn::module::{Module, Param};
use burn::tensor::activation::{sigmoid, softmax};
use burn::tensor::{DType, Device, Int, Tensor, TensorData, s};

use super::ConfigError;
use super::init::{Drawn, draw, lazy_wide};
use crate::ops::{TopK, gather_rows, select_experts, sum_rows};

/// How the router turns logits into scores.
#[derive(Config, Debug, Copy, PartialEq, Eq)]
pub enum ScoreFunction {
    /// Over all experts; scores of a token sum to 1 (Mixtral, Qwen3-MoE).
    Softmax,
    /// Of each expert by itself (DeepSeek-V3, GLM-4.5).
    Sigmoid,
}

/// Configuration to create a [`Router`] with [`init`](RouterConfig::init).
#[derive(Config, Debug)]
pub struct RouterConfig {
    /// Width of the tokens.
    pub d_model: usize,
    /// Experts to choose from.
    pub num_experts: usize,
    /// Experts per token.
    pub top_k: usize,
    /// Scores from logits.
    #[config(default = "ScoreFunction::Sigmoid")]
    pub score_function: ScoreFunction,
    /// Groups of experts, in order of their ids; 1 means no groups.
    #[config(default = 1)]
    pub n_group: usize,
    /// Groups that a token may choose from.
    #[config(default = 1)]
    pub topk_group: usize,
    /// Whether the weights of a token's experts are divided by their sum.
    #[config(default = true)]
    pub norm_topk_prob: bool,
    /// Factor on the weights, after normalisation.
    #[config(default = 1.0)]
    pub routed_scaling_factor: f64,
    /// Whether a bias that only counts for the selection balances the load without an auxiliary
    /// loss (DeepSeek-V3).
    #[config(default = true)]
    pub selection_bias: bool,
    /// Seed of the gate's initial values.
    #[config(default = 0)]
    pub seed: u64,
}

impl RouterConfig {
    /// Checks every field.
    ///
    /// # Errors
    ///
    /// Names the first field whose value is not allowed.
    pub fn validate(&self) -> Result<(), ConfigError> {
        let Self {
            num_experts,
            top_k,
            n_group,
            topk_group,
            ..
        } = *self;
        ConfigError::check(self.d_model > 0, "d_model", self.d_model, "1 or more")?;
        ConfigError::check(num_experts > 0, "num_experts", num_experts, "1 or more")?;
        ConfigError::check(
            n_group > 0 && num_experts.is_multiple_of(n_group),
            "n_group",
            n_group,
            format!("a divisor of num_experts ({num_experts})"),
        )?;
        ConfigError::check(
            (1..=n_group).contains(&topk_group),
            "topk_group",
            topk_group,
            format!("1 to n_group ({n_group})"),
        )?;
        let candidates = num_experts / n_group * topk_group;
        ConfigError::check(
            (1..=candidates).contains(&top_k),
            "top_k",
            top_k,
            format!("1 to the number of experts in the kept groups ({candidates})"),
        )?;
        ConfigError::check(
            self.routed_scaling_factor.is_finite(),
            "routed_scaling_factor",
            self.routed_scaling_factor,
            "a finite number",
        )
    }

    /// Creates the router. Its parameters are f32 where the device's default type is narrower.
    ///
    /// # Panics
    ///
    /// Panics when [`validate`](Self::validate) finds a fault.
    pub fn init(&self, device: &Device) -> Router {
        self.validate()
            .unwrap_or_else(|error| panic!("RouterConfig: {error}"));
        let Self {
            d_model,
            num_experts,
            seed,
            ..
        } = *self;
        Router {
            gate: lazy_wide([d_model, num_experts], device, move || {
                draw(seed, Drawn::Gate, d_model, num_experts)
            }),
            bias: self.selection_bias.then(|| {
                lazy_wide([num_experts], device, move || vec![0.0; num_experts])
                    .set_require_grad(false)
            }),
            score_function: self.score_function,
            top_k: TopK {
                k: self.top_k,
                groups: self.n_group,
                kept_groups: self.topk_group,
            },
            norm_topk_prob: self.norm_topk_prob,
            routed_scaling_factor: self.routed_scaling_factor,
        }
    }
}

/// Chooses the experts of each token and their weights.
///
/// Scores, selection and weights are computed in f32 when the model is narrower, as the routers
/// of DeepSeek-V3 and GLM-4.5 do (DeepSeek-V3, arXiv 2412.19437, equations 12 to 16).
#[derive(Module, Debug)]
pub struct Router {
    /// `[d_model, num_experts]`
    pub gate: Param<Tensor<2>>,
    /// `[num_experts]`: added to the scores for the selection, never to the weights. Has no
    /// gradient; [`update_bias`](Router::update_bias) moves it.
    pub bias: Option<Param<Tensor<1>>>,
    #[module(skip)]
    score_function: ScoreFunction,
    #[module(skip)]
    top_k: TopK,
    #[module(skip)]
    norm_topk_prob: bool,
    #[module(skip)]
    routed_scaling_factor: f64,
}

/// What the router decides for `T` tokens.
#[derive(Debug, Clone)]
pub struct Routing {
    /// `[T, K]`, best first.
    pub ids: Tensor<2, Int>,
    /// `[T, K]`, f32 (f64 in an f64 model); differentiable.
    pub weights: Tensor<2>,
    /// `[T, E]`, after the score function, without bias.
    pub scores: Tensor<2>,
    /// `[T, E]`
    pub logits: Tensor<2>,
}

/// Rows from which on the logits of a token have the same bits however many tokens there are. The
/// `gemm` crate, which Burn's CPU backends use, computes a single row in another order than many,
/// and cuts depths over 512 in other places when neither rows nor columns are more than 64.
fn least_rows(d_model: usize, num_experts: usize) -> usize {
    if d_model > 512 && num_experts <= 64 {
        65
    } else {
        2
    }
}

/// Added to the sum of the weights before dividing by it, as in DeepSeek's code.
const NORM_EPSILON: f64 = 1e-20;

impl Router {
    /// Chooses experts for each token.
    ///
    /// # Shapes
    ///
    /// - `x`: `[tokens, d_model]`
    pub fn forward(&self, x: Tensor<2>) -> Routing {
        self.route(x, |scores| match &self.bias {
            Some(bias) => {
                let bias = bias.val().inner().cast(scores.dtype());
                select_experts(scores, bias, self.top_k)
            }
            None => {
                let bias = Tensor::zeros([scores.dims()[1]], (&scores.device(), scores.dtype()));
                select_experts(scores, bias, self.top_k)
            }
        })
    }

    /// Forced balanced routing, for measurements: copy `i` of the batch, counted from
    /// `first_copy`, goes to expert `i * stride mod E`, so that every expert gets as many as every
    /// other, whatever the scores. The stride has no factor in common with `E` and is about 0.618
    /// `E`: a token's experts lie far apart, on as many ranks as those of a trained router, so that
    /// dispatch costs what it costs with real routing. The weights are the router's for these
    /// experts.
    ///
    /// # Shapes
    ///
    /// - `x`: `[tokens, d_model]`
    pub fn forward_balanced(&self, x: Tensor<2>, first_copy: usize) -> Routing {
        self.route(x, |scores| {
            let [tokens, experts] = scores.dims();
            let k = self.top_k.k;
            let stride = spreading_stride(experts);
            let ids: Vec<i32> = (0..tokens * k)
                .map(|copy| ((first_copy + copy) % experts * stride % experts) as i32)
                .collect();
            Tensor::from_data(TensorData::new(ids, [tokens, k]), &scores.device())
        })
    }

    /// Moves the selection bias against the load (DeepSeek-V3, section 2.1.2): up by `speed` for
    /// experts with less than the mean load, down for those with more. Without bias, does nothing.
    ///
    /// # Panics
    ///
    /// Panics when `load` does not have one value an expert.
    pub fn update_bias(&mut self, load: &[u64], speed: f64) {
        let Some(bias) = self.bias.take() else { return };
        let experts = bias.lazy_shape()[0];
        assert_eq!(load.len(), experts, "load must have one value an expert");
        let total: u64 = load.iter().sum();
        let step: Vec<f32> = load
            .iter()
            .map(|load| match (load * experts as u64).cmp(&total) {
                std::cmp::Ordering::Less => speed as f32,
                std::cmp::Ordering::Equal => 0.0,
                std::cmp::Ordering::Greater => -speed as f32,
            })
            .collect();
        self.bias = Some(bias.map(|bias| {
            let data = TensorData::new(step, [experts]);
            let step = Tensor::<1>::from_data(data, (&bias.device(), bias.dtype()));
            (bias + step).detach().set_require_grad(false)
        }));
    }

    /// Experts per token.
    pub fn top_k(&self) -> usize {
        self.top_k.k
    }

    /// Experts to choose from.
    pub fn num_experts(&self) -> usize {
        self.gate.lazy_shape()[1]
    }

    fn route(&self, x: Tensor<2>, select: impl FnOnce(Tensor<2>) -> Tensor<2, Int>) -> Routing {
        let [tokens, d_model] = x.dims();
        let dtype = match x.dtype() {
            DType::F64 => DType::F64,
            _ => DType::F32,
        };
        let x = x.cast(dtype);
        // Small matrix products take other paths, with other bits.
        let least = least_rows(d_model, self.num_experts());
        let x = if tokens < least { padded(x, least) } else { x };
        let logits = x.matmul(self.gate.val().cast(dtype));
        let scores = match self.score_function {
            ScoreFunction::Softmax => softmax(logits.clone(), 1),
            ScoreFunction::Sigmoid => sigmoid(logits.clone()),
        };
        let ids = select(scores.clone().inner());
        let weights = scores
            .clone()
            .gather(1, ids.clone().to_device(&scores.device()));
        let weights = if self.norm_topk_prob {
            let sum = weights.clone().sum_dim(1) + NORM_EPSILON;
            weights / sum
        } else {
            weights
        };
        let weights = weights * self.routed_scaling_factor;
        let routing = Routing {
            ids,
            weights,
            scores,
            logits,
        };
        if tokens < least {
            routing.truncated(tokens)
        } else {
            routing
        }
    }
}

impl Routing {
    /// The first `tokens` tokens. Burn's `slice` leaves the graph when nothing is left of a tensor;
    /// a gather of no rows does not.
    fn truncated(self, tokens: usize) -> Self {
        let rows = Tensor::arange(0..tokens as i64, &self.ids.device());
        let first = |x| gather_rows(x, rows.clone());
        Self {
            ids: self.ids.slice(s![0..tokens]),
            weights: first(self.weights),
            scores: first(self.scores),
            logits: first(self.logits),
        }
    }
}

/// `x [T, D]` with zeros behind it, `[rows, D]`. Burn's `cat` leaves out an empty tensor, and with it
/// the graph; an empty batch must have the graph of a full one, since every rank takes part in the
/// exchanges of the backward pass, in the same order.
fn padded(x: Tensor<2>, rows: usize) -> Tensor<2> {
    let [tokens, _] = x.dims();
    let index = (0..rows).map(|row| if row < tokens { row as i32 } else { -1 });
    let index = TensorData::new(index.collect::<Vec<_>>(), [rows, 1]);
    let index = Tensor::from_data(index, &x.device());
    let ones = Tensor::ones([rows, 1], (&x.device(), x.dtype()));
    sum_rows(x, index, ones)
}

/// The number nearest above 0.618 `experts` that has no factor in common with it.
fn spreading_stride(experts: usize) -> usize {
    let common = |mut a: usize, mut b: usize| {
        while b != 0 {
            (a, b) = (b, a % b);
        }
        a
    };
    (experts * 618 / 1000..)
        .find(|stride| common(*stride, experts) == 1)
        .unwrap_or(1)
}
