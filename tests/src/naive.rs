//! A mixture-of-experts layer as plain loops over tokens, in f64: the reference for everything.

use burn_moe::layer::{Moe, MoeConfig, RouterConfig, ScoreFunction};

use crate::values;

/// Sizes and weights of a layer without router.
pub struct NaiveExperts<'a> {
    /// Width of the tokens.
    pub d_model: usize,
    /// Width of an expert.
    pub d_hidden: usize,
    /// `[E, d_model, 2 * d_hidden]`
    pub gate_up: &'a [f64],
    /// `[E, d_hidden, d_model]`
    pub down: &'a [f64],
}

impl NaiveExperts<'_> {
    /// Output of one expert for one token.
    pub fn expert(&self, expert: usize, x: &[f64]) -> Vec<f64> {
        let (d, f) = (self.d_model, self.d_hidden);
        let gate_up = &self.gate_up[expert * d * 2 * f..(expert + 1) * d * 2 * f];
        let down = &self.down[expert * f * d..(expert + 1) * f * d];
        let product = |column: usize| (0..d).map(|i| x[i] * gate_up[i * 2 * f + column]).sum();
        let activated: Vec<f64> = (0..f)
            .map(|j| {
                let gate: f64 = product(j);
                let up: f64 = product(f + j);
                gate / (1.0 + (-gate).exp()) * up
            })
            .collect();
        (0..d)
            .map(|i| (0..f).map(|j| activated[j] * down[j * d + i]).sum())
            .collect()
    }

    /// Weighted sum of each token's experts: `x [T, D]`, `ids` and `weights` `[T, K]`.
    pub fn forward(&self, x: &[f64], ids: &[usize], weights: &[f64], k: usize) -> Vec<f64> {
        let mut out = vec![0.0; x.len()];
        for (token, (x, out)) in x
            .chunks(self.d_model)
            .zip(out.chunks_mut(self.d_model))
            .enumerate()
        {
            for copy in token * k..(token + 1) * k {
                for (out, y) in out.iter_mut().zip(self.expert(ids[copy], x)) {
                    *out += weights[copy] * y;
                }
            }
        }
        out
    }
}

/// The derivative of `f` for every element of `x`, by central differences.
pub fn finite_differences(x: &[f64], f: impl Fn(&[f64]) -> f64) -> Vec<f64> {
    let step = 1e-5;
    let mut x = x.to_vec();
    (0..x.len())
        .map(|i| {
            let kept = x[i];
            x[i] = kept + step;
            let above = f(&x);
            x[i] = kept - step;
            let below = f(&x);
            x[i] = kept;
            (above - below) / (2.0 * step)
        })
        .collect()
}

/// The router of DeepSeek-V3, GLM-4.5, Qwen3 and Mixtral, one token and one expert at a time.
#[derive(Debug, Clone)]
pub struct NaiveRouter {
    /// Sizes and settings.
    pub config: RouterConfig,
    /// `[D, E]`
    pub gate: Vec<f64>,
    /// `[E]`; zeros when there is none.
    pub bias: Vec<f64>,
}

/// What [`NaiveRouter`] decides.
#[derive(Debug, Clone, Default)]
pub struct NaiveRouting {
    /// `[T, E]`
    pub logits: Vec<f64>,
    /// `[T, E]`
    pub scores: Vec<f64>,
    /// `[T, K]`
    pub ids: Vec<usize>,
    /// `[T, K]`
    pub weights: Vec<f64>,
}

impl NaiveRouter {
    /// `x`: `[T, D]`
    pub fn route(&self, x: &[f64]) -> NaiveRouting {
        self.route_to(x, |_, scores| self.choose(scores))
    }

    /// The same with chosen experts, `choose(token, scores)`.
    pub fn route_to(
        &self,
        x: &[f64],
        choose: impl Fn(usize, &[f64]) -> Vec<usize>,
    ) -> NaiveRouting {
        let RouterConfig {
            d_model,
            num_experts,
            ..
        } = self.config;
        let mut all = NaiveRouting::default();
        for (token, x) in x.chunks(d_model).enumerate() {
            let logits: Vec<f64> = (0..num_experts)
                .map(|e| {
                    (0..d_model)
                        .map(|i| x[i] * self.gate[i * num_experts + e])
                        .sum()
                })
                .collect();
            let scores = scores(self.config.score_function, &logits);
            let ids = choose(token, &scores);
            let mut weights: Vec<f64> = ids.iter().map(|id| scores[*id]).collect();
            if self.config.norm_topk_prob {
                let sum = weights.iter().sum::<f64>() + 1e-20;
                weights.iter_mut().for_each(|w| *w /= sum);
            }
            weights
                .iter_mut()
                .for_each(|w| *w *= self.config.routed_scaling_factor);
            all.logits.extend(logits);
            all.scores.extend(scores);
            all.ids.extend(ids);
            all.weights.extend(weights);
        }
        all
    }

    /// The experts of one token, best first.
    fn choose(&self, scores: &[f64]) -> Vec<usize> {
        let config = &self.config;
        let biased: Vec<f64> = scores.iter().zip(&self.bias).map(|(s, b)| s + b).collect();
        let size = config.num_experts / config.n_group;
        let group_scores: Vec<f64> = biased
            .chunks(size)
            .map(|group| best_first(group).iter().take(2).map(|e| group[*e]).sum())
            .collect();
        let groups = best_first(&group_scores);
        let kept = &groups[..config.topk_group];
        best_first(&biased)
            .into_iter()
            .filter(|expert| kept.contains(&(expert / size)))
            .take(config.top_k)
            .collect()
    }

    /// How far the weakest chosen expert of each token is from the strongest one not chosen, and
    /// likewise for groups: where this is small, rounding may decide.
    pub fn margins(&self, routing: &NaiveRouting) -> Vec<f64> {
        let config = &self.config;
        let size = config.num_experts / config.n_group;
        let tokens = routing.scores.chunks(config.num_experts);
        tokens
            .zip(routing.ids.chunks(config.top_k))
            .map(|(scores, ids)| {
                let biased: Vec<f64> = scores.iter().zip(&self.bias).map(|(s, b)| s + b).collect();
                let mut groups: Vec<f64> = biased
                    .chunks(size)
                    .map(|group| best_first(group).iter().take(2).map(|e| group[*e]).sum())
                    .collect();
                groups.sort_by(|a, b| b.total_cmp(a));
                let between_groups = match config.topk_group < config.n_group {
                    true => groups[config.topk_group - 1] - groups[config.topk_group],
                    false => f64::INFINITY,
                };
                // The order among the chosen counts too.
                let sorted: Vec<f64> = best_first(&biased).iter().map(|e| biased[*e]).collect();
                let between_experts = sorted.windows(2).map(|pair| pair[0] - pair[1]);
                let last = ids
                    .iter()
                    .map(|id| biased[*id])
                    .fold(f64::INFINITY, f64::min);
                between_experts
                    .zip(&sorted)
                    .filter(|(_, better)| **better >= last)
                    .map(|(margin, _)| margin)
                    .fold(between_groups, f64::min)
            })
            .collect()
    }
}

/// Positions in falling order of value, equal ones in rising order of position.
fn best_first(values: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..values.len()).collect();
    // Stable; and unlike `total_cmp` it takes -0 and 0 for equal.
    order.sort_by(|a, b| {
        values[*b]
            .partial_cmp(&values[*a])
            .expect("values are not NaN")
    });
    order
}

fn scores(function: ScoreFunction, logits: &[f64]) -> Vec<f64> {
    match function {
        ScoreFunction::Sigmoid => logits.iter().map(|l| 1.0 / (1.0 + (-l).exp())).collect(),
        ScoreFunction::Softmax => {
            let max = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exp: Vec<f64> = logits.iter().map(|l| (l - max).exp()).collect();
            let sum: f64 = exp.iter().sum();
            exp.iter().map(|e| e / sum).collect()
        }
    }
}

/// A whole layer: router, experts, shared experts.
#[derive(Debug, Clone)]
pub struct NaiveMoe {
    /// Chooses the experts.
    pub router: NaiveRouter,
    /// Width of an expert.
    pub d_hidden: usize,
    /// `[E, D, 2F]`
    pub gate_up: Vec<f64>,
    /// `[E, F, D]`
    pub down: Vec<f64>,
    /// `[D, 2S]` and `[S, D]`; empty when there are no shared experts.
    pub shared: (Vec<f64>, Vec<f64>),
    /// Copies that an expert takes are limited to this times the mean.
    pub capacity_factor: Option<f64>,
}

impl NaiveMoe {
    /// The layer with the values that `moe` has.
    pub fn of(config: &MoeConfig, moe: &Moe) -> Self {
        let bias = match &moe.router.bias {
            Some(bias) => values(&bias.val()),
            None => vec![0.0; config.router.num_experts],
        };
        Self {
            router: NaiveRouter {
                config: config.router.clone(),
                gate: values(&moe.router.gate.val()),
                bias,
            },
            d_hidden: config.d_hidden,
            gate_up: values(&moe.experts.gate_up.val()),
            down: values(&moe.experts.down.val()),
            shared: match &moe.shared {
                Some(shared) => (values(&shared.gate_up.val()), values(&shared.down.val())),
                None => Default::default(),
            },
            capacity_factor: config.capacity_factor,
        }
    }

    /// `x`: `[T, D]`
    pub fn forward(&self, x: &[f64]) -> Vec<f64> {
        let routing = self.router.route(x);
        self.forward_routed(x, &routing)
    }

    /// The same with experts and weights given.
    pub fn forward_routed(&self, x: &[f64], routing: &NaiveRouting) -> Vec<f64> {
        let (d_model, k) = (self.router.config.d_model, self.router.config.top_k);
        let kept = self.kept(&routing.ids);
        let weights: Vec<f64> = routing
            .weights
            .iter()
            .zip(kept)
            .map(|(weight, kept)| if kept { *weight } else { 0.0 })
            .collect();
        let experts = NaiveExperts {
            d_model,
            d_hidden: self.d_hidden,
            gate_up: &self.gate_up,
            down: &self.down,
        };
        let mut out = experts.forward(x, &routing.ids, &weights, k);
        if !self.shared.0.is_empty() {
            let shared = NaiveExperts {
                d_model,
                d_hidden: self.shared.1.len() / d_model,
                gate_up: &self.shared.0,
                down: &self.shared.1,
            };
            for (out, x) in out.chunks_mut(d_model).zip(x.chunks(d_model)) {
                for (out, y) in out.iter_mut().zip(shared.expert(0, x)) {
                    *out += y;
                }
            }
        }
        out
    }

    /// Which copies stay: an expert takes copies in the order of the tokens until it is full.
    pub fn kept(&self, ids: &[usize]) -> Vec<bool> {
        let experts = self.router.config.num_experts;
        let capacity = match self.capacity_factor {
            Some(factor) => (ids.len() as f64 * factor / experts as f64).ceil() as usize,
            None => usize::MAX,
        };
        let mut taken = vec![0; experts];
        ids.iter()
            .map(|id| {
                taken[*id] += 1;
                taken[*id] <= capacity
            })
            .collect()
    }
}

/// DeepSeek-V3's balancing loss of each sequence (arXiv 2412.19437, equations 17 to 20), averaged.
pub fn sequence_balancing(
    routing: &NaiveRouting,
    experts: usize,
    k: usize,
    sequence_length: usize,
) -> f64 {
    let sequences = routing.ids.len() / k / sequence_length;
    let mut loss = 0.0;
    for sequence in 0..sequences {
        let tokens = sequence * sequence_length..(sequence + 1) * sequence_length;
        for expert in 0..experts {
            let (mut count, mut score) = (0.0, 0.0);
            for token in tokens.clone() {
                let ids = &routing.ids[token * k..(token + 1) * k];
                count += f64::from(ids.contains(&expert));
                let scores = &routing.scores[token * experts..(token + 1) * experts];
                score += scores[expert] / scores.iter().sum::<f64>();
            }
            let length = sequence_length as f64;
            loss += experts as f64 / (k as f64 * length) * count * (score / length);
        }
    }
    loss / sequences as f64
}

/// Router z-loss (ST-MoE, arXiv 2202.08906, equation 5).
pub fn router_z(routing: &NaiveRouting, experts: usize) -> f64 {
    let tokens = routing.logits.chunks(experts);
    let count = tokens.len() as f64;
    tokens
        .map(|logits| logits.iter().map(|l| l.exp()).sum::<f64>().ln().powi(2))
        .sum::<f64>()
        / count
}
