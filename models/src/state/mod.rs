//! Checkpoints to continue a training run from: weights, the optimizer's state, and how far the run
//! is.
//!
//! A [`StateFolder`] holds the checkpoints of one run, each in a folder of its own:
//!
//! ```text
//! runs/a/step-00000012/manifest.json
//!                      rank-00000-of-00002.safetensors
//!                      rank-00001-of-00002.safetensors
//! ```
//!
//! Every rank writes one file: the experts that live on it, one by one under their global ids, and
//! its share of what all ranks hold, so that nothing is stored twice. With data parallelism, ranks
//! that hold the same experts share them out, too. A tensor is called
//! `model/PATH` or `optimizer/PATH/LEAF`; scalars of the optimizer are tensors without dimensions.
//! The types are those of training, to the bit. `history/NAME` holds [`RunState::history`].
//!
//! The manifest names each file with its size and checksum (XXH3, 128 bits). It is written last and
//! renamed into place, after everything else is on disk: a folder without manifest is not a
//! checkpoint, whatever else it holds, and the next save removes it. A complete checkpoint is never
//! written to. Each file says in its header of which run, step and rank it is, so that files that
//! were exchanged are found and named.
//!
//! On the ranks that saved it, in the same groups, a run continues bit by bit as if it had not been
//! interrupted; on another number of ranks or in other groups, up to the order of additions. No rank
//! has a state of its own to be kept: nothing random is drawn after the initial weights, learning
//! rates follow from the step, and what a rank reads of the data follows from the position, which is
//! of all ranks together and stands in the header of each file. The planners
//! `eplb` and `eplb-hierarchical` remember past loads, which is not kept: with them, too, the order
//! of additions may differ in the first steps.

mod collect;
mod disk;
mod error;
mod fill;
mod folder;
mod load;
mod manifest;
mod optimizer;
mod save;
mod shard;

pub use disk::{Disk, DiskFile, FileSystem};
pub use error::StateError;
pub use folder::StateFolder;
pub use load::{Loaded, SavedState};
pub use manifest::RunState;
pub use save::Snapshot;
