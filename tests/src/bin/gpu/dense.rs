//! What grouped products are compared with: CubeK's matrix multiplication, of the version that Burn
//! uses. Burn's autotune chooses among the same routines.

use cubecl::{
    client::Client,
    ir::{ElemType, FloatKind},
    prelude::TensorBinding,
    server::Handle,
};
use cubecl_kernels::DeviceTensor;
use cubek::{
    matmul::{
        definition::MatmulElems,
        launch::launch_ref,
        multi_level::{
            Strategy as Routine,
            routines::TileSizeSelection,
            routines::batch::{
                double_unit::DoubleUnitSelectionArgs,
                ordered_double_buffering::OrderedSelectionArgs, simple::SimpleArgs,
                simple_unit::SimpleUnitSelectionArgs,
            },
        },
        routine::BlueprintStrategy::Inferred,
        strategy::Strategy,
    },
    std::InputBinding,
};
use half::bf16;

use crate::{
    device::{quietly, sync},
    measure::{Timing, seconds},
};

/// A matrix as it is multiplied; it may lie transposed in memory.
#[derive(Debug, Clone)]
pub struct Matrix {
    handle: Handle,
    dtype: ElemType,
    rows: usize,
    columns: usize,
    transposed: bool,
}

impl Matrix {
    /// `rows` by `columns` elements of a tensor, from element `start`.
    pub fn new(tensor: &DeviceTensor, start: usize, rows: usize, columns: usize) -> Self {
        let size = tensor.dtype().size();
        let after = tensor.len() - start - rows * columns;
        Self {
            // Buffers may be a little longer than their tensors.
            handle: tensor
                .handle()
                .clone()
                .offset_start((start * size) as u64)
                .offset_end((after * size) as u64),
            dtype: tensor.dtype(),
            rows,
            columns,
            transposed: false,
        }
    }

    /// The same memory, read the other way.
    pub fn transpose(self) -> Self {
        Self {
            rows: self.columns,
            columns: self.rows,
            transposed: !self.transposed,
            ..self
        }
    }

    /// The matrix on the host, as a function of row and column.
    fn read(&self, client: &Client) -> Result<impl Fn(usize, usize) -> f64, String> {
        let bytes = client
            .read_one(self.handle.clone())
            .map_err(|error| error.to_string())?;
        let (size, pitch) = match self.transposed {
            true => (self.dtype.size(), [1, self.rows]),
            false => (self.dtype.size(), [self.columns, 1]),
        };
        let dtype = self.dtype;
        Ok(move |row: usize, column: usize| {
            let start = (row * pitch[0] + column * pitch[1]) * size;
            let element = &bytes[start..start + size];
            match dtype {
                ElemType::Float(FloatKind::BF16) => {
                    f64::from(bf16::from_le_bytes([element[0], element[1]]))
                }
                _ => f64::from(f32::from_le_bytes([
                    element[0], element[1], element[2], element[3],
                ])),
            }
        })
    }

    fn binding(&self) -> TensorBinding {
        let strides = match self.transposed {
            true => [1, self.rows],
            false => [self.columns, 1],
        };
        TensorBinding {
            handle: self.handle.clone().binding(),
            strides: strides.into(),
            shape: [self.rows, self.columns].into(),
            tiling: Default::default(),
        }
    }
}

/// `out = left * right`.
#[derive(Debug, Clone)]
pub struct Dense {
    pub left: Matrix,
    pub right: Matrix,
    pub out: Matrix,
}

impl Dense {
    fn queue(&self, client: &Client, strategy: &Strategy) -> Result<(), String> {
        let input = |matrix: &Matrix| InputBinding::new(matrix.binding(), matrix.dtype);
        launch_ref(
            strategy,
            client,
            input(&self.left),
            input(&self.right),
            self.out.binding(),
            &mut MatmulElems::from_single_dtype(self.out.dtype),
        )
        .map_err(|error| format!("{error:?}"))
    }
}

/// The fastest of some routines for products that are queued together, and its seconds. A routine
/// whose result is wrong does not count.
pub fn fastest(
    client: &Client,
    timing: Timing,
    products: &[Dense],
    strategies: &[Strategy],
) -> Result<(f64, Strategy), String> {
    let first = products.first().ok_or("no products")?;
    let sample = Sample::of(client, first)?;
    let mut best: Option<(f64, &Strategy)> = None;
    let mut refused = Vec::new();
    for strategy in strategies {
        // A routine refuses what it cannot do, with an error or in a panic.
        let measured = quietly(|| {
            let time = seconds(client, timing, || {
                products
                    .iter()
                    .try_for_each(|product| product.queue(client, strategy))
            })?;
            sample.check(client, &first.out).map(|()| time)
        })
        .and_then(|measured| measured);
        match measured {
            Ok(time) if best.is_none_or(|(least, _)| time < least) => {
                best = Some((time, strategy));
            }
            Ok(_) => {}
            Err(error) => {
                // What failed on the device would otherwise be told by the next wait.
                let _ = sync(client);
                let line = error.lines().next().unwrap_or_default();
                refused.push(format!("{strategy}: {line}"));
            }
        }
    }
    best.map(|(time, strategy)| (time, strategy.clone()))
        .ok_or_else(|| refused.join("; "))
}

/// Some elements of a product, computed in f64.
struct Sample(Vec<Element>);

struct Element {
    row: usize,
    column: usize,
    value: f64,
    /// What rounding is measured by: the root of the sum of squares of what is added up.
    scale: f64,
}

impl Sample {
    fn of(client: &Client, product: &Dense) -> Result<Self, String> {
        let (left, right) = (product.left.read(client)?, product.right.read(client)?);
        let (rows, columns) = (product.out.rows, product.out.columns);
        let element = |[row, column]: [usize; 2]| {
            let terms = || (0..product.left.columns).map(|i| left(row, i) * right(i, column));
            Element {
                row,
                column,
                value: terms().sum(),
                scale: terms().map(|term| term * term).sum::<f64>().sqrt(),
            }
        };
        let places = [[0, 0], [rows / 2, columns / 2], [rows - 1, columns - 1]];
        Ok(Self(places.map(element).into()))
    }

    fn check(&self, client: &Client, out: &Matrix) -> Result<(), String> {
        let out = out.read(client)?;
        for element in &self.0 {
            let found = out(element.row, element.column);
            // Room for the rounding of bf16; a wrong element is off by about the scale.
            let off = (found - element.value).abs();
            if off.is_nan() || off > 0.02 * element.scale.max(element.value.abs()) {
                return Err(format!("wrong: {found} where {} is right", element.value));
            }
        }
        Ok(())
    }
}

/// Routines that compute in the type of the operands: tensor cores for 16-bit types, plain units for
/// f32, whose tensor cores would round operands to 10 bits.
pub fn routines(client: &Client, kind: FloatKind) -> Vec<Strategy> {
    let tile_size = TileSizeSelection::MaxTileSize;
    let units = [
        Routine::SimpleUnit(Inferred(SimpleUnitSelectionArgs { tile_size })),
        Routine::DoubleUnit(Inferred(DoubleUnitSelectionArgs { tile_size })),
    ];
    if client.properties().hardware.num_cpu_cores.is_some() {
        return vec![Routine::Gemm(Default::default()).into(), Strategy::Auto];
    }
    if kind == FloatKind::F32 {
        return units.map(Strategy::from).into();
    }
    let ordered = || OrderedSelectionArgs {
        partition_k: Some(2),
        row_count: Some(8),
        rows_per_plane: Some(2),
        ..Default::default()
    };
    let rows = || SimpleArgs {
        multi_rows: true,
        ..Default::default()
    };
    [
        Routine::SimpleCyclicMma(Inferred(rows())),
        Routine::DoubleCyclicMma(Default::default()),
        Routine::OrderedDoubleMma(Inferred(ordered())),
        Routine::SpecializedCyclicMma(Default::default()),
        Routine::SimpleTmaMma(Inferred(rows())),
        Routine::SpecializedTmaMma(Default::default()),
    ]
    .into_iter()
    .map(Strategy::from)
    .chain([Strategy::Auto])
    .collect()
}
