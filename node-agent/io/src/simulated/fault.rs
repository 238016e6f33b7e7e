//! Faults that a test injects into a simulated device.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::error::{IoError, IoErrorKind};
use crate::op::Op;
use crate::simulated::random::Random;

/// A fault: kind, place and frequency.
#[derive(Clone, Debug)]
pub struct Fault {
    /// Kind of the fault.
    pub kind: FaultKind,
    /// Byte range of the device; a transfer that overlaps it is affected. Syncs are always affected.
    pub range: Range<u64>,
    /// Frequency of the fault.
    pub trigger: Trigger,
}

/// Kind of a fault.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Reads fail with `Media`, after a part of the memory was written.
    ReadError,
    /// Writes fail with `Media`; any of their sectors may have changed.
    WriteError,
    /// Writes fail with `NoSpace`.
    Full,
    /// Syncs fail with `Lost`, and make nothing durable.
    SyncError,
    /// Transfers fail with `Busy`, and change nothing.
    Busy,
    /// Everything fails with `Lost`.
    Gone,
    /// Transfers never end: they stay in flight, and their engine leaks them when it is closed. See
    /// [`SimulatedDevice::release_hung`](crate::simulated::SimulatedDevice::release_hung).
    Hang,
    /// Writes succeed but change nothing: a lost write, for checks of generations.
    LostWrite,
}

/// Frequency of a fault among the matching operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Affects every matching operation.
    Always,
    /// This many operations, then none.
    Times(u32),
    /// Randomly, with probability 1 in this many.
    OneIn(NonZeroU32),
}

impl Fault {
    /// Creates a fault of the whole device that always triggers.
    pub fn everywhere(kind: FaultKind) -> Fault {
        Fault { kind, range: 0..u64::MAX, trigger: Trigger::Always }
    }

    /// Creates a fault of a range that always triggers.
    pub fn at(kind: FaultKind, range: Range<u64>) -> Fault {
        Fault { kind, range, trigger: Trigger::Always }
    }

    /// Decides whether the fault affects an operation; counts down a limited fault.
    pub(crate) fn hits(&mut self, op: &Op, random: &mut Random) -> bool {
        let concerns = match (self.kind, op) {
            (FaultKind::Gone, _) => true,
            (FaultKind::SyncError, Op::Sync) => true,
            (FaultKind::Hang | FaultKind::Busy, Op::Read { .. } | Op::Write { .. }) => self.touches(op),
            (FaultKind::ReadError, Op::Read { .. }) => self.touches(op),
            (FaultKind::WriteError | FaultKind::Full | FaultKind::LostWrite, Op::Write { .. }) => {
                self.touches(op)
            }
            _ => false,
        };
        concerns
            && match &mut self.trigger {
                Trigger::Always => true,
                Trigger::Times(0) => false,
                Trigger::Times(left) => {
                    *left -= 1;
                    true
                }
                Trigger::OneIn(count) => random.one_in(u64::from(count.get())),
            }
    }

    fn touches(&self, op: &Op) -> bool {
        op.offset() < self.range.end && self.range.start < op.offset() + op.bytes()
    }
}

impl FaultKind {
    /// Error of the operation; `None` when it seems to succeed, or does not end.
    pub(crate) fn error(self) -> Option<IoError> {
        let kind = match self {
            FaultKind::ReadError | FaultKind::WriteError => IoErrorKind::Media,
            FaultKind::Full => IoErrorKind::NoSpace,
            FaultKind::SyncError | FaultKind::Gone => IoErrorKind::Lost,
            FaultKind::Busy => IoErrorKind::Busy,
            FaultKind::LostWrite | FaultKind::Hang => return None,
        };
        Some(IoError::new(kind, "simulated fault"))
    }
}
