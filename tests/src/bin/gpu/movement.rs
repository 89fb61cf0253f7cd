//! Times of everything that is no product: router, sort, permute, and streaming copies.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
};
use cubecl_kernels::{
    DeviceTensor, copy,
    matmul::swiglu_backward,
    router::{self, RouterOptions, ScoreFunction, TopK},
    rows, sort,
};

use crate::{
    measure::{Timing, fill, plain_copy, seconds},
    report::{Kind, Peer, Row},
};

/// Sizes of a layer.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub tokens: usize,
    pub d_model: usize,
    pub d_expert: usize,
    pub router: TopK,
    pub experts: usize,
    /// Experts that are copied, of as many as are copied from.
    pub copied: [usize; 2],
}

impl Sizes {
    /// DeepSeek-V3.
    pub const FULL: Self = Self {
        tokens: 4096,
        d_model: 7168,
        d_expert: 2048,
        router: TopK {
            k: 8,
            groups: 8,
            kept_groups: 4,
        },
        experts: 256,
        copied: [8, 32],
    };

    pub const QUICK: Self = Self {
        tokens: 50,
        d_model: 64,
        d_expert: 32,
        router: TopK {
            k: 4,
            groups: 4,
            kept_groups: 2,
        },
        experts: 16,
        copied: [2, 4],
    };
}

/// All rows; a kernel that fails gives its message instead.
pub fn measure(
    client: &Client,
    timing: Timing,
    sizes: Sizes,
    kind: FloatKind,
    more_time: &dyn Fn() -> bool,
) -> Vec<Result<Row, String>> {
    let bench = match Bench::new(client, timing, sizes, kind) {
        Ok(bench) => bench,
        Err(error) => return vec![Err(error)],
    };
    let kernels: [(&str, Kernel); 7] = [
        ("route", Bench::route),
        ("sort_by_expert", Bench::sort),
        ("gather_rows (permute)", Bench::permute),
        ("sum_rows (unpermute)", Bench::unpermute),
        ("sum_rows_backward", Bench::unpermute_backward),
        ("scatter_add_rows", Bench::permute_backward),
        ("swiglu_backward", Bench::activation_backward),
    ];
    let mut found = Vec::new();
    for (name, kernel) in kernels {
        found.push(match more_time() {
            true => kernel(&bench).map_err(|error| format!("{name}: {error}")),
            false => Err(format!("{name}: no time left")),
        });
    }
    for cubes in bench.copying_cubes() {
        found.push(match more_time() {
            true => bench.copy(cubes).map_err(|error| format!("copy: {error}")),
            false => Err(format!("copy with {cubes} cubes: no time left")),
        });
    }
    found
}

/// How a kernel is measured.
type Kernel = fn(&Bench) -> Result<Row, String>;

struct Bench {
    client: Client,
    timing: Timing,
    sizes: Sizes,
    kind: FloatKind,
    /// `[T, D]`.
    x: DeviceTensor,
    /// `[T, K]`, f32.
    weights: DeviceTensor,
    /// `[T * K]`: experts, and where each sorted copy comes from and goes to.
    ids: DeviceTensor,
    source: DeviceTensor,
    place: DeviceTensor,
}

impl Bench {
    fn new(client: &Client, timing: Timing, sizes: Sizes, kind: FloatKind) -> Result<Self, String> {
        let (tokens, k) = (sizes.tokens, sizes.router.k);
        let copies = tokens * k;
        // Spread over experts as a hash spreads them.
        let ids: Vec<u32> = (0..copies as u32)
            .map(|copy| (copy.wrapping_mul(0x9E37_79B1) >> 16) % sizes.experts as u32)
            .collect();
        let mut order: Vec<u32> = (0..copies as u32).collect();
        order.sort_by_key(|copy| ids[*copy as usize]);
        let source: Vec<u32> = order.iter().map(|copy| copy / k as u32).collect();
        let mut place = vec![0; copies];
        for (row, copy) in order.iter().enumerate() {
            place[*copy as usize] = row as u32;
        }
        let words = |values: &[u32], shape: &[usize]| {
            DeviceTensor::from_data(client, values, shape).map_err(|e| e.to_string())
        };
        Ok(Self {
            client: client.clone(),
            timing,
            sizes,
            kind,
            x: fill(client, &[tokens, sizes.d_model], kind, 1),
            weights: fill(client, &[tokens, k], FloatKind::F32, 2),
            ids: words(&ids, &[tokens, k])?,
            source: words(&source, &[copies])?,
            place: words(&place, &[tokens, k])?,
        })
    }

    fn copies(&self) -> usize {
        self.sizes.tokens * self.sizes.router.k
    }

    fn dtype(&self) -> ElemType {
        ElemType::Float(self.kind)
    }

    fn row(
        &self,
        kernel: &str,
        dtype: ElemType,
        bytes: usize,
        mut queue: impl FnMut() -> Result<(), cubecl_kernels::KernelError>,
    ) -> Result<Row, String> {
        let Sizes {
            tokens,
            d_model,
            experts,
            router,
            ..
        } = self.sizes;
        let seconds = seconds(&self.client, self.timing, || {
            queue().map_err(|error| error.to_string())
        })?;
        Ok(Row {
            case: format!(
                "{tokens} tokens of {d_model}, top {} of {experts}",
                router.k
            ),
            dtype: dtype.to_string(),
            kernel: kernel.into(),
            kind: Kind::Movement,
            seconds,
            flops: None,
            bytes: bytes as f64,
            peers: Vec::new(),
        })
    }

    fn route(&self) -> Result<Row, String> {
        let (tokens, experts) = (self.sizes.tokens, self.sizes.experts);
        let logits = fill(&self.client, &[tokens, experts], FloatKind::F32, 3);
        let bias = fill(&self.client, &[experts], FloatKind::F32, 4);
        let options = RouterOptions {
            score_function: ScoreFunction::Sigmoid,
            top_k: self.sizes.router,
            normalize: true,
            scaling_factor: 2.5,
        };
        // Logits in, scores out and in again; ids and weights out.
        let bytes = 4 * (3 * tokens * experts + 2 * self.copies());
        self.row("route", ElemType::Float(FloatKind::F32), bytes, || {
            router::route(&self.client, &logits, Some(&bias), &options).map(drop)
        })
    }

    fn sort(&self) -> Result<Row, String> {
        let bytes = 2 * 4 * self.copies();
        self.row("sort_by_expert", self.ids.dtype(), bytes, || {
            sort::sort_by_expert(&self.client, &self.ids, self.sizes.experts).map(drop)
        })
    }

    fn permute(&self) -> Result<Row, String> {
        let bytes = 2 * self.copies() * self.sizes.d_model * self.dtype().size();
        self.row("gather_rows (permute)", self.dtype(), bytes, || {
            rows::gather_rows(&self.client, &self.x, &self.source, self.dtype()).map(drop)
        })
    }

    fn unpermute(&self) -> Result<Row, String> {
        let y = self.sorted_rows();
        let bytes = (self.copies() + self.sizes.tokens) * self.sizes.d_model * self.dtype().size();
        self.row("sum_rows (unpermute)", self.dtype(), bytes, || {
            rows::sum_rows(&self.client, &y, &self.place, &self.weights).map(drop)
        })
    }

    fn unpermute_backward(&self) -> Result<Row, String> {
        let y = self.sorted_rows();
        // The gradient is read for each copy, in both kernels.
        let bytes = 4 * self.copies() * self.sizes.d_model * self.dtype().size();
        self.row("sum_rows_backward", self.dtype(), bytes, || {
            rows::sum_rows_backward(&self.client, &self.x, &y, &self.place, &self.weights).map(drop)
        })
    }

    fn permute_backward(&self) -> Result<Row, String> {
        let grad = self.sorted_rows();
        let bytes = (self.copies() + self.sizes.tokens) * self.sizes.d_model * self.dtype().size();
        self.row("scatter_add_rows", self.dtype(), bytes, || {
            rows::scatter_add_rows(&self.client, &grad, &self.source, self.sizes.tokens).map(drop)
        })
    }

    fn activation_backward(&self) -> Result<Row, String> {
        let (copies, width) = (self.copies(), self.sizes.d_expert);
        let hidden = fill(&self.client, &[copies, 2 * width], self.kind, 6);
        let grad = fill(&self.client, &[copies, width], self.kind, 7);
        let bytes = 5 * copies * width * self.dtype().size();
        self.row("swiglu_backward", self.dtype(), bytes, || {
            swiglu_backward(&self.client, &hidden, &grad).map(drop)
        })
    }

    fn sorted_rows(&self) -> DeviceTensor {
        fill(
            &self.client,
            &[self.copies(), self.sizes.d_model],
            self.kind,
            5,
        )
    }

    /// A few cubes, beside which others can compute, and as many as the device has processors.
    fn copying_cubes(&self) -> Vec<u32> {
        let hardware = &self.client.properties().hardware;
        match hardware.num_streaming_multiprocessors {
            Some(processors) => vec![8, 16, 32, processors],
            None => vec![4],
        }
    }

    fn copy(&self, cubes: u32) -> Result<Row, String> {
        let Sizes {
            d_model,
            d_expert,
            copied: [copied, experts],
            ..
        } = self.sizes;
        let size = d_model * 2 * d_expert;
        let weights = fill(&self.client, &[experts, size], self.kind, 8);
        let all: Vec<usize> = (0..copied).map(|i| i * experts / copied).collect();
        let bytes = 2 * copied * size * self.dtype().size();
        let name = format!("gather_experts, {cubes} cubes");
        let row = self.row(&name, self.dtype(), bytes, || {
            copy::gather_experts(&self.client, &weights, &all, cubes).map(drop)
        })?;
        let [from, to] = [9, 10].map(|seed| fill(&self.client, &[copied, size], self.kind, seed));
        let plain = seconds(&self.client, self.timing, || {
            plain_copy(&self.client, &from, &to);
            Ok(())
        })?;
        Ok(Row {
            case: format!("{copied} experts of {d_model} x {}", 2 * d_expert),
            peers: vec![Peer::new("plain copy", plain)],
            ..row
        })
    }
}
