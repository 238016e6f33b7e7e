//! The trait of all engines.

use std::fmt;
use std::time::Duration;

use crate::error::IoError;
use crate::op::{Completion, Submission};
use crate::waker::Waker;

/// Moves pages between one device and memory, many operations at a time.
///
/// Operations may run and complete in any order; nothing orders two that are in flight together. Each accepted
/// submission comes back as exactly one [`Completion`]. An operation is started by the next
/// [`reap`](IoEngine::reap) at the latest: submit a batch, then reap.
///
/// Dropping an engine runs what was accepted to its end and discards the completions. Whoever wants to use the memory of
/// unfinished operations for something else asks [`close`](IoEngine::close) whether they have ended.
///
/// An engine is used by one thread, the one that first calls `submit` or `reap`; it may be opened on another.
pub trait IoEngine: Send {
    /// Operations that may be in flight at once.
    fn capacity(&self) -> usize;

    /// Operations accepted and not reaped yet.
    fn in_flight(&self) -> usize;

    /// Accepts an operation. One that breaks the rules of [`Op`](crate::Op) is accepted too, and completes with
    /// [`Invalid`](crate::IoErrorKind::Invalid).
    ///
    /// # Errors
    /// Gives the submission back when `capacity` operations are in flight: reap first.
    fn submit(&mut self, submission: Submission) -> Result<(), Submission>;

    /// Starts whatever was submitted and appends what completed to `out`.
    ///
    /// # Errors
    /// `Invalid` when called by a second thread, `Lost` when the engine itself no longer works. Operations in flight
    /// stay so; all that is left is to drop the engine.
    fn reap(&mut self, wait: Wait, out: &mut Vec<Completion>) -> Result<(), IoError>;

    /// A handle that makes a waiting [`reap`](IoEngine::reap) return.
    fn waker(&self) -> Waker;

    /// Drops the engine, and says whether the memory of what was in flight is at rest.
    fn close(self: Box<Self>) -> Closed;

    /// Which engine this is.
    fn kind(&self) -> EngineKind;
}

/// How long [`IoEngine::reap`] waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// Takes what is there. Does not consume a wake.
    No,
    /// Returns on a completion, on a wake or after this time, whichever is first; now and then for no reason.
    Until(Duration),
}

/// How an engine ended.
#[must_use = "memory of operations that have not ended must not be used again"]
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Closed {
    /// Every operation has ended: no memory is touched any more.
    Drained,
    /// Some operations could not be brought to an end. The engine has given up their spans without freeing the memory,
    /// and the device may still write to it at any time.
    Leaked,
}

/// Names an implementation of [`IoEngine`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum EngineKind {
    /// The kernel's submission and completion rings.
    IoUring,
    /// Positioned reads and writes on threads.
    Plain,
    /// A device in memory.
    Simulated,
}

impl fmt::Display for EngineKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            EngineKind::IoUring => "io_uring",
            EngineKind::Plain => "plain",
            EngineKind::Simulated => "simulated",
        })
    }
}
