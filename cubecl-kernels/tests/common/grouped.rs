//! Grouped products as loops in f64.

/// Experts with `counts` rows, weights `[counts.len(), k, m]`, the last `replicas` of them in the
/// second buffer.
#[derive(Debug, Clone)]
pub struct Case {
    pub counts: Vec<usize>,
    pub replicas: usize,
    pub k: usize,
    pub m: usize,
}

impl Case {
    pub fn new(counts: impl Into<Vec<usize>>, k: usize, m: usize) -> Self {
        let counts = counts.into();
        Self {
            counts,
            replicas: 0,
            k,
            m,
        }
    }

    pub fn rows(&self) -> usize {
        self.counts.iter().sum()
    }

    /// For each row of each expert: `visit(expert, row)`.
    fn for_rows(&self, mut visit: impl FnMut(usize, usize)) {
        let mut row = 0;
        for (expert, &count) in self.counts.iter().enumerate() {
            for _ in 0..count {
                visit(expert, row);
                row += 1;
            }
        }
    }

    pub fn forward_reference(&self, x: &[f64], w: &[f64]) -> Vec<f64> {
        let (k, m) = (self.k, self.m);
        let mut out = vec![0.0; self.rows() * m];
        self.for_rows(|expert, row| {
            for i in 0..k {
                for j in 0..m {
                    out[row * m + j] += x[row * k + i] * w[(expert * k + i) * m + j];
                }
            }
        });
        out
    }

    pub fn data_grad_reference(&self, grad: &[f64], w: &[f64]) -> Vec<f64> {
        let (k, m) = (self.k, self.m);
        let mut out = vec![0.0; self.rows() * k];
        self.for_rows(|expert, row| {
            for i in 0..k {
                for j in 0..m {
                    out[row * k + i] += grad[row * m + j] * w[(expert * k + i) * m + j];
                }
            }
        });
        out
    }

    /// Experts without rows have `untouched`.
    pub fn weight_grad_reference(&self, x: &[f64], grad: &[f64], untouched: f64) -> Vec<f64> {
        let (k, m) = (self.k, self.m);
        let area = k * m;
        let mut out = vec![untouched; self.counts.len() * area];
        for (expert, &count) in self.counts.iter().enumerate() {
            if count > 0 {
                out[expert * area..(expert + 1) * area].fill(0.0);
            }
        }
        self.for_rows(|expert, row| {
            for i in 0..k {
                for j in 0..m {
                    out[(expert * k + i) * m + j] += x[row * k + i] * grad[row * m + j];
                }
            }
        });
        out
    }

    /// Of hidden values `[N, m]`, gate first.
    pub fn activation_reference(&self, hidden: &[f64]) -> Vec<f64> {
        let f = self.m / 2;
        let row_of =
            |row: &[f64]| -> Vec<f64> { (0..f).map(|i| swiglu(row[i], row[f + i])).collect() };
        hidden.chunks_exact(self.m).flat_map(row_of).collect()
    }
}

/// The activation of a gate and an up value.
pub fn swiglu(gate: f64, up: f64) -> f64 {
    gate / (1.0 + (-gate).exp()) * up
}
