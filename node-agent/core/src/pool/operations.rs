//! Device operations in flight, and shared syncs.
//!
//! At most one sync is in flight. A batch or journal write that needs a sync waits for the next one to start,
//! so that several of them share it. A running sync does not count: it may have started before the write had
//! ended.

use std::collections::BTreeMap;

use super::journal::JournalPart;
use super::{BatchId, OpToken, PageNumber};

/// Purpose of an operation in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Purpose {
    /// Write of a block of a batch.
    Block {
        /// Batch of the block.
        batch: BatchId,
        /// Slot of the block.
        page: PageNumber,
    },
    /// Write of journal pages.
    Journal(JournalPart),
    /// Sync of the device.
    Sync,
}

/// Party that waits for a sync.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waiter {
    /// Batch whose blocks were written.
    Batch(BatchId),
    /// Journal, for a group or a bank switch.
    Journal(JournalPart),
}

/// Operations in flight, by token.
#[derive(Debug, Default)]
pub(super) struct Operations {
    next: u64,
    in_flight: BTreeMap<OpToken, Purpose>,
}

impl Operations {
    /// Registers a new operation and returns its token.
    pub(super) fn begin(&mut self, purpose: Purpose) -> OpToken {
        let token = OpToken(self.next);
        self.next += 1;
        self.in_flight.insert(token, purpose);
        token
    }

    /// Removes an operation that was reported done.
    ///
    /// # Panics
    /// If it was reported before or never existed: the runtime reports every operation once.
    pub(super) fn end(&mut self, token: OpToken) -> Purpose {
        self.in_flight.remove(&token).expect("the runtime reports every operation once")
    }
}

/// Parties that wait for the next or the running sync.
#[derive(Debug, Default)]
pub(super) struct SyncGate {
    waiting: Vec<Waiter>,
    running: Option<Vec<Waiter>>,
}

impl SyncGate {
    /// Adds a waiter for the next sync.
    pub(super) fn wait(&mut self, waiter: Waiter) {
        self.waiting.push(waiter);
    }

    /// Starts a sync if one is needed and none is running.
    pub(super) fn start(&mut self) -> Option<Purpose> {
        if self.running.is_some() || self.waiting.is_empty() {
            return None;
        }
        self.running = Some(std::mem::take(&mut self.waiting));
        Some(Purpose::Sync)
    }

    /// Ends the running sync; returns its waiters.
    pub(super) fn finish(&mut self) -> Vec<Waiter> {
        self.running.take().expect("a sync was running")
    }

    /// Drops all waiters, because the device is lost.
    pub(super) fn abandon(&mut self) {
        self.waiting.clear();
        self.running = None;
    }
}
