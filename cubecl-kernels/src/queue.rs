//! Two grouped products in one persistent launch, one urgent and one in the background, as in
//! ExpertPlex's adaptive persistent kernel: between tiles, and only then, a cube reads a policy
//! word on the device and draws its next tile from the class that the word prefers.
//!
//! A use is a backward pass: data gradients are what other ranks wait for, weight gradients fill
//! the device's remaining time. When the word changes while the launch runs, urgent tiles start as
//! soon as the first cube finishes the tile it is on. Each class has its own counter, so every tile
//! is drawn once whatever the policy and however often it changes, and tiles do not share outputs,
//! so the results are bit for bit those of the two products run apart.
//!
//! The policy word is a `u32` at [`TileQueue::policy_word`]. [`TileQueue::set_policy`] writes it in
//! the order of the client's queue, so between launches; while a launch runs, another stream, another
//! kernel or a device that can write this memory may change it.

#[cfg(all(test, feature = "runtime"))]
mod tests;

use cubecl::{client::Client, ir::ElemType, ir::UIntKind, prelude::*, server::Handle};

use crate::{
    DeviceTensor, KernelError, check,
    matmul::{Fault, Prepared, Problem, TraceViewLaunch},
};

/// Which class of tiles a cube draws next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Policy {
    /// Urgent tiles while there are any, then background tiles.
    UrgentFirst = 0,
    /// Background tiles while there are any, then urgent tiles.
    BackgroundFirst = 1,
    /// No urgent tiles: their inputs are not there yet. Cubes leave when the background is done;
    /// another [`TileQueue::run`] under another policy draws the rest.
    BackgroundOnly = 2,
}

/// A class of tiles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[repr(u32)]
pub enum Class {
    /// Of the urgent problem.
    Urgent = 0,
    /// Of the background problem.
    Background = 1,
}

/// Two problems and, on the device, how far each has come.
#[derive(Debug)]
pub struct TileQueue {
    problems: [Prepared; 2],
    words: Words,
}

impl TileQueue {
    /// Queues two problems of one element type, of any kinds; nothing runs yet. Neither may write
    /// what the other reads or writes.
    ///
    /// # Errors
    /// [`KernelError::Dtype`] when the element types differ.
    pub fn new(
        client: &Client,
        urgent: Problem,
        background: Problem,
        policy: Policy,
    ) -> Result<Self, KernelError> {
        check::same_dtype("background", &background.lhs, &urgent.lhs)?;
        Ok(Self::prepare(
            client,
            urgent,
            background,
            policy,
            Fault::None,
        ))
    }

    fn prepare(
        client: &Client,
        urgent: Problem,
        background: Problem,
        policy: Policy,
        fault: Fault,
    ) -> Self {
        let words = Words::new(client);
        let problems = Prepared::pair(client, urgent, background, &words, fault);
        let queue = Self { problems, words };
        queue.set_policy(client, policy);
        queue
    }

    /// One persistent launch: draws tiles until the policy allows none. Does nothing when all
    /// tiles have run.
    pub fn run(&self, client: &Client) {
        let [urgent, background] = &self.problems;
        urgent.launch(client, Some(background), &self.words, None, Fault::None);
    }

    /// Changes the policy for the launches queued from now on.
    pub fn set_policy(&self, client: &Client, policy: Policy) {
        self.words.set_policy(client, policy);
    }

    /// The word that cubes read between tiles: one of [`Policy`]'s numbers, as `u32`.
    pub fn policy_word(&self) -> Handle {
        self.words.policy.handle().clone()
    }

    /// As [`run`](Self::run), and waits for the launch and tells which tiles it ran. For tests and
    /// debugging.
    ///
    /// # Errors
    /// [`KernelError::Read`] when the device fails.
    pub fn run_traced(&self, client: &Client, options: TraceOptions) -> Result<Trace, KernelError> {
        self.run_faulty(client, options, Fault::None)
    }

    fn run_faulty(
        &self,
        client: &Client,
        options: TraceOptions,
        fault: Fault,
    ) -> Result<Trace, KernelError> {
        let [urgent, background] = &self.problems;
        let totals = [urgent.read_total(client)?, background.read_total(client)?];
        let tiles = (totals[0] + totals[1]) as usize;
        // A broken queue may draw a tile more than once: room for what its test provokes.
        let room = 4 * tiles + 1024;
        let u32 = ElemType::UInt(UIntKind::U32);
        let counts = DeviceTensor::zeros(client, [room], u32);
        let order = DeviceTensor::zeros(client, [room], u32);
        let drawn = DeviceTensor::zeros(client, [1], u32);
        let (switch_after, switch_to) = match options.switch {
            Some((after, policy)) => (after, policy as u32),
            None => (0, 0),
        };
        let view = TraceViewLaunch::new(
            counts.arg(),
            order.arg(),
            drawn.arg(),
            totals[0],
            switch_after,
            switch_to,
            options.tiles_per_cube.unwrap_or(u32::MAX),
        );
        urgent.launch(client, Some(background), &self.words, Some(view), fault);
        let drawn = drawn.read::<u32>(client)?[0] as usize;
        let order = order.read::<u32>(client)?;
        Ok(Trace {
            counts: counts.read::<u32>(client)?[..tiles].to_vec(),
            order: order[..drawn.min(room)]
                .iter()
                .map(|&tile| match tile.checked_sub(totals[0]) {
                    None => (Class::Urgent, tile),
                    Some(tile) => (Class::Background, tile),
                })
                .collect(),
            tiles: totals,
        })
    }
}

/// How [`TileQueue::run_traced`] interferes with the launch it watches.
#[derive(Debug, Clone, Copy, Default)]
pub struct TraceOptions {
    /// After so many draws the policy word changes, as if somebody outside had written it.
    pub switch: Option<(u32, Policy)>,
    /// A cube leaves after so many tiles, so that others take over even where cubes run one after
    /// another. Tiles may be left over.
    pub tiles_per_cube: Option<u32>,
}

/// What a launch did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Trace {
    /// Number of urgent and of background tiles.
    pub tiles: [u32; 2],
    /// How often each tile ran in this launch: urgent tiles, then background tiles.
    pub counts: Vec<u32>,
    /// Tiles in the order they were drawn.
    pub order: Vec<(Class, u32)>,
}

/// The words in device memory that cubes share. Counters and policy are two buffers, because the
/// policy may be written from elsewhere.
#[derive(Debug, Clone)]
pub(crate) struct Words {
    /// The next tile of each class.
    pub next: DeviceTensor,
    pub policy: DeviceTensor,
}

impl Words {
    /// Counters are zeroed when the problems are prepared.
    pub fn new(client: &Client) -> Self {
        let u32 = ElemType::UInt(UIntKind::U32);
        Self {
            next: DeviceTensor::empty(client, [2], u32),
            policy: DeviceTensor::empty(client, [1], u32),
        }
    }

    fn set_policy(&self, client: &Client, policy: Policy) {
        // SAFETY: the buffer holds a word.
        unsafe {
            set_policy_kernel::launch_unchecked(
                client,
                CubeCount::new_single(),
                CubeDim::new_single(),
                self.policy.arg(),
                policy as u32,
            );
        }
    }
}

#[cube(launch_unchecked)]
fn set_policy_kernel(word: &[Atomic<u32>], policy: u32) {
    word[0].store(policy);
}

/// Stands for no tile in what [`draw`] gives.
pub(crate) const NONE: u32 = 2;
pub(crate) const URGENT: u32 = Class::Urgent as u32;
pub(crate) const BACKGROUND: u32 = Class::Background as u32;
const URGENT_FIRST: u32 = Policy::UrgentFirst as u32;
const BACKGROUND_FIRST: u32 = Policy::BackgroundFirst as u32;

/// The next tile under the policy: its class ([`NONE`]: leave) and its number.
#[cube]
pub(crate) fn draw(
    next: &[Atomic<u32>],
    policy: &[Atomic<u32>],
    urgent: u32,
    background: u32,
    #[comptime] fault: Fault,
) -> (u32, u32) {
    let policy = policy[0].load();
    let mut class = NONE.runtime();
    let mut tile = 0u32;
    if policy == URGENT_FIRST {
        tile = take(next, URGENT, urgent, fault);
        if tile < urgent {
            class = URGENT;
        }
    }
    if class == NONE {
        tile = take(next, BACKGROUND, background, fault);
        if tile < background {
            class = BACKGROUND;
        }
    }
    if class == NONE && policy == BACKGROUND_FIRST {
        tile = take(next, URGENT, urgent, fault);
        if tile < urgent {
            class = URGENT;
        }
    }
    (class, tile)
}

/// The next tile of a class; `total` or more when there is none left.
#[cube]
pub(crate) fn take(next: &[Atomic<u32>], class: u32, total: u32, #[comptime] fault: Fault) -> u32 {
    let mut tile = total;
    // Without this look, a counter would grow with every draw of the other class.
    if next[class as usize].load() < total {
        tile = fault_tile(next[class as usize].fetch_add(1), fault);
    }
    tile
}

/// What a broken queue makes of the number it drew.
#[cube]
fn fault_tile(tile: u32, #[comptime] fault: Fault) -> u32 {
    match comptime!(fault) {
        Fault::None | Fault::WrongPrefix => tile,
        Fault::Repeats => tile / 2,
        Fault::Skips => tile * 2,
    }
}
