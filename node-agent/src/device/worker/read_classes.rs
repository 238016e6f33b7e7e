//! Reads of a device by class: those that something awaits, and those ahead of loads.

use std::collections::HashSet;

use reprise_agent_core::effect::{FillId, ReadClass};
use reprise_agent_core::event::FillUpdate;
use reprise_buffers::PageBufferPool;
use reprise_io::CloseOutcome;

use crate::device::reads::{PendingReads, PieceRead, Reads};
use crate::encryption::EncryptionKeys;

/// Reads of one class, and whether their [`Work::Piece`](super::Work::Piece) is in the queue.
pub(super) struct ClassReads {
    pub(super) reads: Reads,
    pub(super) queued: ReadsQueued,
}

/// Reads of both classes.
pub(super) struct ReadsByClass {
    awaited: ClassReads,
    prefetch: ClassReads,
    /// Whose turn it is, while awaited reads and promoted ones wait.
    turn: ReadClass,
}

impl ReadsByClass {
    pub(super) fn new(keys: &EncryptionKeys) -> ReadsByClass {
        let empty = || ClassReads { reads: Reads::with_keys(keys.clone()), queued: ReadsQueued::No };
        ReadsByClass { awaited: empty(), prefetch: empty(), turn: ReadClass::Prefetch }
    }

    /// Returns the next read of a rank, with the class whose batch it is of. Promoted reads ahead alternate with
    /// the reads of loads, so neither starves the other.
    pub(super) fn next(&mut self, rank: ReadClass, pages: &PageBufferPool) -> Option<(ReadClass, PieceRead)> {
        if rank == ReadClass::Prefetch {
            return self.prefetch.reads.next(pages).map(|read| (rank, read));
        }
        let turn = self.turn;
        let mut of = |class| match class {
            ReadClass::Awaited => self.awaited.reads.next(pages),
            ReadClass::Prefetch => self.prefetch.reads.next_promoted(pages),
        };
        let other = match turn {
            ReadClass::Awaited => ReadClass::Prefetch,
            ReadClass::Prefetch => ReadClass::Awaited,
        };
        let (class, read) = match of(turn) {
            Some(read) => (turn, read),
            None => (other, of(other)?),
        };
        self.turn = if class == turn { other } else { turn };
        Some((class, read))
    }

    pub(super) fn of(&mut self, class: ReadClass) -> &mut ClassReads {
        match class {
            ReadClass::Awaited => &mut self.awaited,
            ReadClass::Prefetch => &mut self.prefetch,
        }
    }

    /// Promotes reads ahead of these fills; returns whether any is being read.
    pub(super) fn promote(&mut self, fills: &HashSet<FillId>) -> bool {
        self.prefetch.reads.promote(fills)
    }

    pub(super) fn pending(&self) -> PendingReads {
        let (awaited, prefetch) = (self.awaited.reads.pending(), self.prefetch.reads.pending());
        PendingReads { pieces: awaited.pieces + prefetch.pieces, bytes: awaited.bytes + prefetch.bytes }
    }

    pub(super) fn take_updates(&mut self, updates: &mut Vec<(FillId, FillUpdate)>) {
        self.awaited.reads.take_updates(updates);
        self.prefetch.reads.take_updates(updates);
    }

    pub(super) fn fail_all(&mut self, closed: CloseOutcome) {
        self.awaited.reads.fail_all(closed);
        self.prefetch.reads.fail_all(closed);
    }
}

/// Whether [`Work::Piece`](super::Work::Piece) of a class is in the queue; it is queued at most once.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum ReadsQueued {
    Yes,
    No,
}
