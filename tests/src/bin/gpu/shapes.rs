//! Expert layers of published models, and how their rows fall on experts.

use rand::{SeedableRng, rngs::StdRng, seq::SliceRandom};
use serde::Serialize;

/// Experts of one rank, and the rows they get.
#[derive(Debug, Clone, Serialize)]
pub struct Case {
    pub name: &'static str,
    /// `D`.
    pub d_model: usize,
    /// `F`.
    pub d_expert: usize,
    /// `K` of top-k: each token has so many rows.
    pub top_k: usize,
    /// Rows of each expert.
    pub counts: Vec<usize>,
}

impl Case {
    fn new(
        name: &'static str,
        [d_model, d_expert]: [usize; 2],
        [experts, top_k]: [usize; 2],
        rows: usize,
    ) -> Self {
        Self {
            name,
            d_model,
            d_expert,
            top_k,
            counts: uneven(experts, rows),
        }
    }

    /// What a GPU is measured on: a rank's experts while a prompt is read, and few rows as in
    /// generation.
    pub fn all() -> Vec<Self> {
        vec![
            // 32 of 256 experts: expert parallelism over 8 GPUs.
            Self::new("DeepSeek-V3, 32 experts", [7168, 2048], [32, 8], 16384),
            Self::new("GLM-4.5-Air, 32 experts", [4096, 1408], [32, 8], 16384),
            Self::new("Qwen3-30B-A3B, 128 experts", [2048, 768], [128, 8], 32768),
            Self::new(
                "DeepSeek-V3, 32 experts, few rows",
                [7168, 2048],
                [32, 8],
                256,
            ),
        ]
    }

    /// To see the program work on any device.
    pub fn quick() -> Vec<Self> {
        vec![
            Self::new("small", [64, 32], [8, 2], 96),
            Self::new("small, few rows", [64, 32], [8, 2], 6),
        ]
    }

    /// `N`.
    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    pub fn experts(&self) -> usize {
        self.counts.len()
    }

    /// Experts that have rows.
    pub fn busy(&self) -> usize {
        self.counts.iter().filter(|count| **count > 0).count()
    }

    /// The most loaded expert's rows over the mean.
    pub fn imbalance(&self) -> f64 {
        let most = self.counts.iter().max().copied().unwrap_or(0);
        (most * self.experts()) as f64 / self.rows().max(1) as f64
    }
}

/// `rows` over `experts`: the `i`-th busiest gets a share of `i^-0.7`, one in sixteen none; in an
/// order that is the same in every run.
fn uneven(experts: usize, rows: usize) -> Vec<usize> {
    let busy = experts - experts / 16;
    let shares: Vec<f64> = (1..=busy).map(|i| (i as f64).powf(-0.7)).collect();
    let sum: f64 = shares.iter().sum();
    let mut counts: Vec<usize> = shares
        .iter()
        .map(|share| (share / sum * rows as f64) as usize)
        .collect();
    // What rounding down left over.
    let left = rows - counts.iter().sum::<usize>();
    for i in 0..left {
        counts[i % busy] += 1;
    }
    counts.resize(experts, 0);
    counts.shuffle(&mut StdRng::seed_from_u64(7));
    counts
}
