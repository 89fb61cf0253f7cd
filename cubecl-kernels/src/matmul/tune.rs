//! Which tile a product uses: chosen from what the device says of itself, or measured on it.

use core::fmt::Display;

use cubecl::{
    AutotuneKey,
    client::Client,
    device::DeviceId,
    ir::ElemType,
    tune::{LocalTuner, Tunable, TunableSet, TuneGroup, local_tuner},
};
use serde::{Deserialize, Serialize};

use super::{
    launch::run_with,
    problem::{Problem, Product},
    tile::TileSpec,
};

/// Which shape of tiles a product uses. Shapes differ in speed alone: each element is added up in
/// the same order in all of them, so results are the same to the bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Tiling {
    /// The shape that suits what the device says of itself, and the mean number of rows of an
    /// expert. The same in every run.
    Fixed,
    /// The fastest shape, by CubeCL's autotune. The first product of its kind (element type,
    /// sizes, rows and mean rows to a power of two) measures all shapes that the device can run,
    /// and so takes seconds; in between, outputs hold what the shapes measured wrote, which is the
    /// result. On a device with a single shape there is nothing to measure.
    Tuned,
    /// The shape of this number among those the device can run, of which there are
    /// [`shapes`](Problem::shapes): to compare or check them. 0 is the fixed one.
    Shape(usize),
}

/// [`Tuned`](Tiling::Tuned) with the feature `autotune`, else [`Fixed`](Tiling::Fixed).
impl Default for Tiling {
    fn default() -> Self {
        if cfg!(feature = "autotune") {
            Self::Tuned
        } else {
            Self::Fixed
        }
    }
}

impl Problem {
    /// How many shapes of tiles this product can run with.
    pub fn shapes(&self, client: &Client) -> usize {
        self.candidates(client).len()
    }

    /// Queues the product; nothing when it has no outputs.
    ///
    /// # Panics
    ///
    /// Panics for a [`Tiling::Shape`] that is not below [`shapes`](Self::shapes).
    pub fn run(&self, client: &Client, tiling: Tiling) {
        if self.is_empty() {
            return;
        }
        let candidates = self.candidates(client);
        match tiling {
            Tiling::Tuned if candidates.len() > 1 => run_tuned(client, self.clone()),
            Tiling::Fixed | Tiling::Tuned => run_with(client, self, candidates[0]),
            Tiling::Shape(number) => run_with(client, self, candidates[number]),
        }
    }

    /// Tiles that the problem can run with, the fixed one first.
    pub(crate) fn candidates(&self, client: &Client) -> Vec<TileSpec> {
        let properties = client.properties();
        let (dtype, vector) = (self.lhs.dtype(), self.vector_size(properties));
        TileSpec::candidates(properties, dtype, self.mean_rows(), vector)
    }
}

/// Problems that share a measurement, and [`candidates`](Problem::candidates).
#[derive(AutotuneKey, Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
struct Key {
    product: Product,
    dtype: ElemType,
    inner: usize,
    outer: usize,
    experts: usize,
    #[autotune(anchor)]
    rows: usize,
    /// A power of two, beyond which candidates do not change.
    mean_rows: usize,
    candidates: usize,
}

impl Key {
    fn of(client: &Client, problem: &Problem) -> Self {
        let sizes = problem.sizes;
        Self::new(
            problem.product,
            problem.lhs.dtype(),
            sizes.inner,
            sizes.outer,
            sizes.experts,
            sizes.rows,
            problem.mean_rows().next_power_of_two().clamp(16, 128),
            problem.candidates(client).len(),
        )
    }
}

/// The device that is measured.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct TunedDevice {
    runtime: &'static str,
    id: DeviceId,
}

impl Display for TunedDevice {
    fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
        let DeviceId { type_id, index_id } = self.id;
        write!(f, "device-{type_id}-{index_id}-{}", self.runtime)
    }
}

static TUNER: LocalTuner<Key, TunedDevice> = local_tuner!("grouped-matmul");

/// Most candidates of any device.
pub(super) const MOST_CANDIDATES: usize = 10;

type Inputs = (Client, Problem);

fn run_tuned(client: &Client, problem: Problem) {
    let device = TunedDevice {
        runtime: client.name(),
        id: client.service_id().device,
    };
    let set = TUNER.init(&device, tunables);
    TUNER.execute(&device, client, set, (client.clone(), problem));
}

/// The candidates by their number, which is what a result is kept by: which tile that is follows
/// from the key. Candidates write the same outputs, so they are measured on the caller's.
fn tunables() -> TunableSet<Key, Inputs, ()> {
    let mut set =
        TunableSet::new_cloning_inputs(|(client, problem): &Inputs| Key::of(client, problem));
    let group = TuneGroup::new("tiles", |_: &Key| 0);
    for number in 0..MOST_CANDIDATES {
        // Results may be kept on disk, and another version may have other candidates.
        let name = format!("{} tile {number}", env!("CARGO_PKG_VERSION"));
        let tunable = Tunable::new(&name, move |(client, problem): Inputs| {
            let candidates = problem.candidates(&client);
            let spec = candidates.get(number).ok_or("there is no such tile")?;
            run_with(&client, &problem, *spec);
            Ok::<(), &str>(())
        });
        set = set.with(tunable.group(
            &group,
            move |key: &Key| {
                if number < key.candidates { 0 } else { -1 }
            },
        ));
    }
    set
}
