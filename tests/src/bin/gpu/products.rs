//! Times of the grouped products of an expert layer, and of what else could compute them.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use cubecl_kernels::{
    DeviceTensor, ExpertWeights,
    matmul::{Problem, Tiling},
};

use crate::{
    common,
    dense::{Dense, Matrix, fastest, routines},
    measure::{Timing, fill, seconds},
    report::{Kind, Peer, Row},
    shapes::Case,
};

/// The four products of a layer that are measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Product {
    /// Gate and up with the activation, in one pass.
    SwiGlu,
    /// Down.
    Plain,
    /// Of gate and up, for the rows.
    DataGrad,
    /// Of gate and up, for the weights.
    WeightGrad,
}

impl Product {
    pub const ALL: [Self; 4] = [Self::SwiGlu, Self::Plain, Self::DataGrad, Self::WeightGrad];

    /// Also what `benches/grouped_mm.py` calls it.
    pub fn name(self) -> &'static str {
        match self {
            Self::SwiGlu => "swiglu",
            Self::Plain => "plain",
            Self::DataGrad => "data_grad",
            Self::WeightGrad => "weight_grad",
        }
    }

    /// `K` and `M` of the weights.
    fn weights(self, case: &Case) -> [usize; 2] {
        match self {
            Self::Plain => [case.d_expert, case.d_model],
            _ => [case.d_model, 2 * case.d_expert],
        }
    }

    fn flops(self, case: &Case) -> f64 {
        let [k, m] = self.weights(case);
        2.0 * case.rows() as f64 * (k * m) as f64
    }

    /// Bytes that are read or written at least once; weights of experts without rows are not.
    fn bytes(self, case: &Case, size: usize) -> f64 {
        let [k, m] = self.weights(case);
        let activation = match self {
            Self::SwiGlu => m / 2,
            _ => 0,
        };
        ((case.rows() * (k + m + activation) + case.busy() * k * m) * size) as f64
    }
}

/// Tensors of one case in one type.
pub struct Tensors {
    client: Client,
    case: Case,
    kind: FloatKind,
    offsets: DeviceTensor,
}

impl Tensors {
    pub fn new(client: &Client, case: &Case, kind: FloatKind) -> Result<Self, String> {
        let offsets = common::offsets(&case.counts);
        Ok(Self {
            client: client.clone(),
            case: case.clone(),
            kind,
            offsets: DeviceTensor::from_data(client, &offsets, [offsets.len()])
                .map_err(|error| error.to_string())?,
        })
    }

    fn fill(&self, shape: &[usize], seed: u32) -> DeviceTensor {
        fill(&self.client, shape, self.kind, seed)
    }

    /// Measures a product, and with `peers` what it is compared with. Its tensors are freed after.
    pub fn measure(&self, timing: Timing, product: Product, peers: bool) -> Result<Row, String> {
        let (client, case) = (&self.client, &self.case);
        let [k, m] = product.weights(case);
        let (rows, experts) = (case.rows(), case.experts());
        let weights = self.fill(&[experts, k, m], 1);
        let expert_weights = ExpertWeights::new(weights.clone()).map_err(|e| e.to_string())?;
        let offsets = &self.offsets;
        let problem = match product {
            Product::SwiGlu => {
                let x = self.fill(&[rows, k], 2);
                Problem::swiglu(client, &x, &expert_weights, offsets)
            }
            Product::Plain => {
                let x = self.fill(&[rows, k], 2);
                Problem::matmul(client, &x, &expert_weights, offsets)
            }
            Product::DataGrad => {
                let grad = self.fill(&[rows, m], 2);
                Problem::data_grad(client, &grad, &expert_weights, offsets)
            }
            Product::WeightGrad => {
                let (x, grad) = (self.fill(&[rows, k], 2), self.fill(&[rows, m], 3));
                Problem::weight_grad(client, &x, &grad, offsets, &expert_weights)
            }
        }
        .map_err(|error| error.to_string())?;
        let time = |tiling| {
            seconds(client, timing, || {
                problem.run(client, tiling);
                Ok(())
            })
        };
        let fixed = time(Tiling::Fixed)?;
        let tuned = time(Tiling::Tuned)?;
        let mut row = Row {
            case: case.name.into(),
            dtype: ElemType::Float(self.kind).to_string(),
            kernel: product.name().into(),
            kind: Kind::Product,
            seconds: tuned,
            flops: Some(product.flops(case)),
            bytes: product.bytes(case, ElemType::Float(self.kind).size()),
            peers: vec![Peer::new("fixed tile", fixed)],
        };
        if peers {
            self.add_peers(timing, product, &weights, &mut row);
        }
        Ok(row)
    }

    /// One dense product of as many operations, and one dense product after the other for each
    /// expert. Both compute the product alone, without SwiGLU's activation.
    fn add_peers(&self, timing: Timing, product: Product, weights: &DeviceTensor, row: &mut Row) {
        let (client, case) = (&self.client, &self.case);
        let [k, m] = product.weights(case);
        let rows = case.rows();
        let x = self.fill(&[rows, k], 4);
        let grad = self.fill(&[rows, m], 5);
        // Rows `start ..` of the operands, with the weights of `expert`.
        let dense = |expert: usize, start: usize, count: usize| {
            let x = Matrix::new(&x, start * k, count, k);
            let w = Matrix::new(weights, expert * k * m, k, m);
            let grad = Matrix::new(&grad, start * m, count, m);
            let (left, right, out) = match product {
                Product::SwiGlu | Product::Plain => (x, w, grad),
                Product::DataGrad => (grad, w.transpose(), x),
                Product::WeightGrad => (x.transpose(), grad, w),
            };
            Dense { left, right, out }
        };
        let strategies = routines(client, self.kind);
        let whole = fastest(client, timing, &[dense(0, 0, rows)], &strategies);
        let (time, strategy) = match whole {
            Ok(found) => found,
            Err(error) => {
                row.peers.push(Peer::refused("dense", error));
                return;
            }
        };
        row.peers
            .push(Peer::new("dense", time).with(strategy.to_string()));
        let mut start = 0;
        let mut each = Vec::new();
        for (expert, &count) in case.counts.iter().enumerate() {
            if count > 0 {
                each.push(dense(expert, start, count));
            }
            start += count;
        }
        // What is fastest for all rows at once need not take an expert's few.
        let looped = fastest(client, timing, &each, std::slice::from_ref(&strategy))
            .or_else(|_| fastest(client, timing, &each, &strategies));
        row.peers.push(match looped {
            Ok((time, strategy)) => Peer::new("loop", time).with(strategy.to_string()),
            Err(error) => Peer::refused("loop", error),
        });
    }
}
