//! Faults that a test puts on a simulated device.

use std::num::NonZeroU32;
use std::ops::Range;

use crate::error::{IoError, IoErrorKind};
use crate::op::Op;
use crate::simulated::random::Random;

/// What goes wrong, where, how often.
#[derive(Clone, Debug)]
pub struct Fault {
    /// What.
    pub kind: FaultKind,
    /// Bytes of the device; a transfer that touches one of them is hit. Syncs are hit whatever the range.
    pub range: Range<u64>,
    /// How often.
    pub trigger: Trigger,
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// Reads fail with `Media`; part of the memory has been written by then.
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
    /// [`SimulatedDevice::let_go`](crate::simulated::SimulatedDevice::let_go).
    Hang,
    /// Writes succeed but change nothing: a lost write, for checks of generations.
    LostWrite,
}

/// How often a fault hits the operations that it could hit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Trigger {
    /// Every time.
    Always,
    /// This many times, then never again.
    Times(u32),
    /// By chance, once in this many.
    OneIn(NonZeroU32),
}

impl Fault {
    /// A fault of the whole device, every time.
    pub fn everywhere(kind: FaultKind) -> Fault {
        Fault { kind, range: 0..u64::MAX, trigger: Trigger::Always }
    }

    /// A fault of a range, every time.
    pub fn at(kind: FaultKind, range: Range<u64>) -> Fault {
        Fault { kind, range, trigger: Trigger::Always }
    }

    /// Whether it hits an operation; a limited fault is used up by that.
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
    /// What the operation ends with; `None` when it seems to succeed, or does not end.
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
