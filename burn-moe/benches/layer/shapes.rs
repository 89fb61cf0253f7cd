//! Shapes, routing and weights, the same for all that are compared.

use burn::tensor::{Device, Tensor, TensorData};
use rand::rngs::StdRng;
use rand::seq::SliceRandom;
use rand::{RngExt, SeedableRng};

/// Sizes of a layer.
#[derive(Clone, Copy)]
pub struct Shape {
    pub name: &'static str,
    pub d_model: usize,
    pub d_hidden: usize,
    pub experts: usize,
    pub top_k: usize,
}

const SHAPES: [Shape; 3] = [
    Shape::new("S", 512, 256, 32, 4),
    Shape::new("M", 1024, 512, 64, 8),
    // An expert of DeepSeek-V3 at a quarter of its width, and a quarter of its experts.
    Shape::new("V", 1792, 512, 64, 8),
];

const TOKENS: [usize; 5] = [1, 16, 128, 512, 2048];

impl Shape {
    const fn new(
        name: &'static str,
        d_model: usize,
        d_hidden: usize,
        experts: usize,
        top_k: usize,
    ) -> Self {
        Self {
            name,
            d_model,
            d_hidden,
            experts,
            top_k,
        }
    }

    /// Gate, up and down of all experts: `[E, D, F]`, `[E, D, F]`, `[E, F, D]`.
    pub fn weights(&self) -> [Vec<f32>; 3] {
        let len = self.experts * self.d_model * self.d_hidden;
        let bound = |rows: usize| (rows as f32).sqrt().recip();
        [
            values(len, 1, bound(self.d_model)),
            values(len, 2, bound(self.d_model)),
            values(len, 3, bound(self.d_hidden)),
        ]
    }
}

/// The shapes to measure, each with its token counts.
pub fn cases(test: bool) -> Vec<(Shape, Vec<usize>)> {
    if test {
        return vec![(Shape::new("test", 32, 16, 8, 2), vec![1, 5])];
    }
    let chosen = |variable: &str, default: &str| {
        std::env::var(variable).unwrap_or_else(|_| default.to_string())
    };
    let shapes = chosen("BURN_MOE_SHAPES", "M");
    let tokens = chosen("BURN_MOE_TOKENS", "1,16,512");
    let tokens: Vec<usize> = match tokens.as_str() {
        "all" => TOKENS.to_vec(),
        list => list
            .split(',')
            .map(|count| count.parse().expect("BURN_MOE_TOKENS: counts, or all"))
            .collect(),
    };
    let shapes: Vec<Shape> = SHAPES
        .into_iter()
        .filter(|shape| shapes == "all" || shapes.split(',').any(|name| name == shape.name))
        .collect();
    assert!(!shapes.is_empty(), "BURN_MOE_SHAPES: of S, M, V, or all");
    shapes
        .into_iter()
        .map(|shape| (shape, tokens.clone()))
        .collect()
}

/// Tokens, the experts they chose and with which weights, and the gradient of the output.
pub struct Case {
    pub shape: Shape,
    pub tokens: usize,
    /// `[T, D]`
    pub x: Vec<f32>,
    /// `[T, K]`, each token's experts distinct, as evenly distributed as a random router's.
    pub ids: Vec<u32>,
    /// `[T, K]`
    pub weights: Vec<f32>,
    /// `[T, D]`
    pub grad: Vec<f32>,
}

impl Case {
    pub fn new(shape: &Shape, tokens: usize) -> Self {
        let mut rng = StdRng::seed_from_u64(4);
        let mut experts: Vec<u32> = (0..shape.experts as u32).collect();
        let ids = (0..tokens).flat_map(|_| {
            experts.shuffle(&mut rng);
            experts[..shape.top_k].to_vec()
        });
        Self {
            shape: *shape,
            tokens,
            ids: ids.collect(),
            x: values(tokens * shape.d_model, 5, 1.0),
            weights: values(tokens * shape.top_k, 6, 1.0),
            grad: values(tokens * shape.d_model, 7, 1.0),
        }
    }

    pub fn name(&self) -> String {
        format!("{}, {} tokens", self.shape.name, self.tokens)
    }

    /// Floating-point operations of the experts' products in the forward pass.
    pub fn flops(&self) -> f64 {
        let Shape {
            d_model, d_hidden, ..
        } = self.shape;
        6.0 * (self.ids.len() * d_model * d_hidden) as f64
    }

    /// By expert: its tokens, and the place of each in `ids`.
    pub fn rows_of_experts(&self) -> Vec<Vec<(i32, i32)>> {
        let mut rows = vec![Vec::new(); self.shape.experts];
        for (place, id) in self.ids.iter().enumerate() {
            rows[*id as usize].push(((place / self.shape.top_k) as i32, place as i32));
        }
        rows
    }
}

/// Random numbers within `bound`.
pub fn values(len: usize, seed: u64, bound: f32) -> Vec<f32> {
    let mut rng = StdRng::seed_from_u64(seed);
    (0..len).map(|_| rng.random_range(-bound..bound)).collect()
}

pub fn tensor<const D: usize>(values: Vec<f32>, shape: [usize; D], device: &Device) -> Tensor<D> {
    Tensor::from_data(TensorData::new(values, shape), device)
}
