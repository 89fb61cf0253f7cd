//! Synthetic loads of a wanted imbalance at any scale, after the generator of UltraEP's own solver test: ranks are hot by
//! a Zipf law, and so are the experts of a rank; tokens choose `k` different experts.

use burn_moe::balance::{LoadMatrix, Placement};

/// What to generate.
#[derive(Debug, Clone, Copy)]
pub struct Synthetic {
    pub ranks: usize,
    pub experts: usize,
    pub top_k: usize,
    pub tokens_per_rank: u32,
    /// Wanted max/mean of the ranks' loads without balancing.
    pub imbalance: f64,
}

/// Hotness among the experts of a rank: the i-th has weight `i^-4`, as in UltraEP's test.
const LOCAL_ALPHA: f64 = 4.0;

impl Synthetic {
    /// Micro-batches without end. Their counts are drawn around the expected ones with the variance that sampling has.
    pub fn loads(self, seed: u64) -> impl Iterator<Item = LoadMatrix> {
        let chosen = self.chosen();
        let mut random = SplitMix(seed);
        std::iter::repeat_with(move || self.load(&chosen, &mut random))
    }

    fn load(&self, chosen: &[f64], random: &mut SplitMix) -> LoadMatrix {
        let tokens = f64::from(self.tokens_per_rank);
        let mut load = LoadMatrix::new(self.ranks, self.experts);
        for source in 0..self.ranks {
            let noisy: Vec<f64> = chosen
                .iter()
                .map(|p| {
                    let deviation = (tokens * p * (1.0 - p)).sqrt();
                    (tokens * p + deviation * random.normal()).max(0.0)
                })
                .collect();
            // Rounded running sums keep each source's total exact: every token chooses `top_k` experts.
            let scale = tokens * self.top_k as f64 / noisy.iter().sum::<f64>();
            let (mut sum, mut before) = (0.0, 0);
            for (count, x) in load.row_mut(source).iter_mut().zip(noisy) {
                sum += x * scale;
                let until = sum.round() as u64;
                *count = (until - before) as u32;
                before = until;
            }
        }
        load
    }

    /// The probability of each expert to be among a token's choices, at the exponent that gives the wanted imbalance.
    fn chosen(&self) -> Vec<f64> {
        let placement = Placement::contiguous(self.experts, self.ranks);
        let (mut low, mut high) = (0.0, 8.0);
        for _ in 0..40 {
            let alpha = (low + high) / 2.0;
            if self.imbalance_of(&self.inclusion(&placement, alpha), &placement) < self.imbalance {
                low = alpha;
            } else {
                high = alpha;
            }
        }
        self.inclusion(&placement, high)
    }

    fn imbalance_of(&self, chosen: &[f64], placement: &Placement) -> f64 {
        let rank = |r| {
            placement
                .experts_of(r)
                .iter()
                .map(|&e| chosen[e as usize])
                .sum::<f64>()
        };
        let max = (0..self.ranks).map(rank).fold(0.0, f64::max);
        max * self.ranks as f64 / self.top_k as f64
    }

    /// Choosing `k` experts without replacement by weight is a race of exponential clocks stopped when `k` rang: expert
    /// `e` is in with probability about `1 - exp(-t * w[e])`, where `t` makes these sum to `k`.
    fn inclusion(&self, placement: &Placement, alpha: f64) -> Vec<f64> {
        let mut weights = vec![0.0; self.experts];
        for rank in 0..self.ranks {
            for (i, &e) in placement.experts_of(rank).iter().enumerate() {
                weights[e as usize] =
                    (rank as f64 + 1.0).powf(-alpha) * (i as f64 + 1.0).powf(-LOCAL_ALPHA);
            }
        }
        let included = |t: f64| weights.iter().map(move |w| 1.0 - (-t * w).exp());
        let (mut low, mut high) = (0.0f64, 1.0f64);
        while included(high).sum::<f64>() < self.top_k as f64 && high < 1e12 {
            high *= 2.0;
        }
        for _ in 0..60 {
            let t = (low + high) / 2.0;
            if included(t).sum::<f64>() < self.top_k as f64 {
                low = t;
            } else {
                high = t;
            }
        }
        included(high).collect()
    }
}

/// A small generator that gives the same numbers everywhere.
struct SplitMix(u64);

impl SplitMix {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in (0, 1].
    fn uniform(&mut self) -> f64 {
        ((self.next() >> 11) + 1) as f64 / (1u64 << 53) as f64
    }

    /// Normal with mean 0 and deviation 1 (Box-Muller).
    fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.uniform().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.uniform()).cos()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use burn_moe::balance::{Plan, imbalance};

    #[test]
    fn loads_have_the_wanted_imbalance_and_count_every_choice() {
        for (ranks, experts, wanted) in [(64, 256, 1.5), (64, 256, 3.0), (100, 256, 2.0)] {
            let synthetic = Synthetic {
                ranks,
                experts,
                top_k: 8,
                tokens_per_rank: 8192,
                imbalance: wanted,
            };
            let placement = Placement::contiguous(experts, ranks);
            let load = synthetic.loads(7).next().unwrap();
            let mut rank_load = Vec::new();
            Plan::default().rank_load(&load, &placement, &mut rank_load);
            let got = imbalance(&rank_load);
            assert!(
                (got / wanted - 1.0).abs() < 0.02,
                "wanted {wanted}, got {got}"
            );
            for source in 0..ranks {
                let choices: u32 = load.row(source).iter().sum();
                assert_eq!(choices, 8192 * 8);
            }
        }
    }
}
