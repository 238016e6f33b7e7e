//! Device operations in flight, and the sharing of syncs.
//!
//! At most one sync is in flight. Whoever wants one waits for the next that starts, so that several batches and the
//! journal share it; a sync that is running already may have begun before the write it should cover was done.

use std::collections::BTreeMap;

use super::journal::JournalPart;
use super::{BatchId, OpToken, PageNumber};

/// What an operation in flight is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// A block of a batch.
    Block {
        /// The batch.
        batch: BatchId,
        /// The slot.
        page: PageNumber,
    },
    /// Pages of the journal.
    Journal(JournalPart),
    /// A sync.
    Sync,
}

/// Who waits for a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// A batch whose blocks are written.
    Batch(BatchId),
    /// The journal.
    Journal(JournalPart),
}

/// Operations in flight by token.
#[derive(Debug, Default)]
pub(super) struct Operations {
    next: u64,
    in_flight: BTreeMap<OpToken, Purpose>,
}

impl Operations {
    /// Names a new operation.
    pub(super) fn begin(&mut self, purpose: Purpose) -> OpToken {
        let token = OpToken(self.next);
        self.next += 1;
        self.in_flight.insert(token, purpose);
        token
    }

    /// Takes an operation that was reported done.
    ///
    /// # Panics
    /// When it was reported before, or never existed: the runtime reports every operation once.
    pub(super) fn end(&mut self, token: OpToken) -> Purpose {
        self.in_flight.remove(&token).expect("the runtime reports every operation once")
    }
}

/// Who waits for syncs.
#[derive(Debug, Default)]
pub(super) struct SyncGate {
    waiting: Vec<Waiter>,
    running: Option<Vec<Waiter>>,
}

impl SyncGate {
    /// Waits for the next sync.
    pub(super) fn wait(&mut self, waiter: Waiter) {
        self.waiting.push(waiter);
    }

    /// Whether a sync should start now; if so it is taken to have started.
    pub(super) fn start(&mut self) -> Option<Purpose> {
        if self.running.is_some() || self.waiting.is_empty() {
            return None;
        }
        self.running = Some(std::mem::take(&mut self.waiting));
        Some(Purpose::Sync)
    }

    /// The running sync is done; returns those who waited for it.
    pub(super) fn finish(&mut self) -> Vec<Waiter> {
        self.running.take().expect("a sync was running")
    }

    /// Nobody waits any more: the device is lost.
    pub(super) fn abandon(&mut self) {
        self.waiting.clear();
        self.running = None;
    }
}
