//! A mixture-of-experts layer as plain loops over tokens, in f64: the reference for everything.

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
