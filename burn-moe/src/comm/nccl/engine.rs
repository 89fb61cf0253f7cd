//! The seam between what is sent when and what moves the bytes: NCCL, or memory in tests.

use super::plan::Way;

/// A transfer at its place in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Placed {
    /// The rank at the other end, as the engine numbers ranks.
    pub peer: usize,
    /// In which direction.
    pub way: Way,
    /// First byte.
    pub address: u64,
    /// How many.
    pub bytes: usize,
}

/// One rank's end of a way between devices on which all ranks do the same things in the same order.
///
/// Nothing here waits for another rank. Errors are texts: the engine's own.
pub(crate) trait Engine: Send + Sync {
    /// Begins `transfers`, all at once, behind those of earlier calls. Not before [`settled`](Self::settled) says so may
    /// the next call come.
    ///
    /// # Safety
    ///
    /// Until a [`mark`](Self::mark) set after this call is [`passed`](Self::passed), or [`abort`](Self::abort) has
    /// returned, the memory must be there, and nobody may write what is sent or touch what is received.
    unsafe fn start(&self, transfers: &[Placed]) -> Result<(), String>;

    /// Whether what was started has been handed to the device.
    fn settled(&self) -> Result<bool, String>;

    /// A mark behind everything that was started.
    fn mark(&self) -> Result<u64, String>;

    /// Whether everything before the mark is done.
    fn passed(&self, mark: u64) -> Result<bool, String>;

    /// Gives up everything that is under way. Does nothing the second time.
    fn abort(&self);

    /// Ends it in peace, when nothing is under way.
    fn close(&self);
}
