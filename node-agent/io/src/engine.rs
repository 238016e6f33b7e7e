//! The trait of all I/O engines.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use reprise_buffers::Region;

use crate::error::IoError;
use crate::op::{Completion, Submission};
use crate::waker::Waker;

/// Moves pages between one device and memory, many operations at a time.
///
/// Operations may run and complete in any order; two operations in flight are not ordered. Each accepted
/// submission results in exactly one [`Completion`]. An operation starts with the next
/// [`reap`](IoEngine::reap) at the latest: submit a batch, then reap.
///
/// Dropping an engine completes the accepted operations and discards the completions. To reuse the memory of
/// unfinished operations, call [`close`](IoEngine::close) and check that they have ended.
///
/// Only one thread may use an engine, the one that first calls `submit` or `reap`; another thread may open
/// it.
pub trait IoEngine: Send {
    /// Returns the maximum number of operations in flight.
    fn capacity(&self) -> usize;

    /// Returns the number of accepted operations that were not reaped yet.
    fn in_flight(&self) -> usize;

    /// Accepts an operation. An operation that violates the rules of [`Op`](crate::Op) is accepted too, and
    /// completes with [`Invalid`](crate::IoErrorKind::Invalid).
    ///
    /// # Errors
    /// Returns the submission when `capacity` operations are in flight: reap first.
    fn submit(&mut self, submission: Submission) -> Result<(), Submission>;

    /// Starts submitted operations and appends completed ones to `out`.
    ///
    /// # Errors
    /// `Invalid` when called by a second thread, `Lost` when the engine itself no longer works. Operations in
    /// flight remain in flight; drop the engine.
    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError>;

    /// Ends the registration of a region's memory, before the region is renewed. No operation on the region is in
    /// flight. Engines that register no memory do nothing.
    fn release_region(&mut self, region: u16) {
        let _ = region;
    }

    /// Registers the new memory of a region, unless it is registered. Operations may use unregistered memory too.
    fn add_region(&mut self, region: &Arc<Region>) {
        let _ = region;
    }

    /// Returns a handle that makes a waiting [`reap`](IoEngine::reap) return.
    fn waker(&self) -> Waker;

    /// Drops the engine and reports whether the memory of unfinished operations can be reused.
    fn close(self: Box<Self>) -> CloseOutcome;

    /// Returns the implementation of this engine.
    fn kind(&self) -> EngineKind;
}

/// How long [`IoEngine::reap`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Takes available completions. Does not consume a wake.
    No,
    /// Returns on a completion, on a wake or after this time, whichever is first; spurious returns are
    /// possible.
    Until(Duration),
}

/// Result of a call of [`IoEngine::close`].
#[must_use = "memory of operations that have not ended must not be used again"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CloseOutcome {
    /// Every operation has ended: the device no longer accesses their memory.
    Drained,
    /// Some operations could not be ended. The engine has leaked their spans, because the device may still
    /// write to the memory.
    Leaked,
}

/// Identifies an implementation of [`IoEngine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// The kernel's submission and completion rings.
    IoUring,
    /// Positioned reads and writes on threads.
    Plain,
    /// A driver in user space that has the whole controller.
    UserNvme,
    /// A device in memory.
    Simulated,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineKind::IoUring => "io_uring",
            EngineKind::Plain => "plain",
            EngineKind::UserNvme => "user-nvme",
            EngineKind::Simulated => "simulated",
        })
    }
}
