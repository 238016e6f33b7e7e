//! Saving: reserved slots, commits, and the write-back that makes blocks durable.
//!
//! ```text
//!  Reserve ──▶ reservation ──Commit──▶ unsaved record ──batch ended──▶ durable or lost ──▶ notice of the ticket
//!                 └─Abort, expiry, end of the session──▶ (free)
//! ```
//!
//! The owner names no other owner: it changes blocks through [`Cache`], and leaves no outcomes. Files call only
//! files before them in this order: `queue`, `tickets`, `slack`, `writeback`, `reservations`, `commits`, and
//! this one.

use std::collections::BTreeMap;

use reprise_policy::fair_order::Weights;
use reprise_policy::slack::WriteSlack;
use reprise_policy::{SessionId, Tick};

use crate::cache::{Cache, FrameState, TenantIndex};
use crate::counters::{Counters, SaveCounters};
use crate::settings::Settings;
use crate::slab::{Slab, SlabId};
use crate::timers::Timers;

mod commits;
mod queue;
mod reservations;
mod slack;
mod tickets;
mod writeback;

use reservations::{Reservation, ReservationGroup, Writer};
use tickets::TicketState;
use writeback::WriteBack;

/// Reserved slots, unsaved blocks, and the notices that wait for them.
#[derive(Debug)]
pub(crate) struct Save {
    sessions: BTreeMap<SessionId, Writer>,
    reservations: Slab<Reservation>,
    groups: Slab<ReservationGroup>,
    reserved_bytes: u64,
    tickets: Slab<TicketState>,
    /// Number of tickets whose clients wait for the notice.
    awaited_tickets: usize,
    writeback: WriteBack,
    /// Expiry of the groups of reservations.
    timers: Timers<SlabId>,
    counters: SaveCounters,
}

impl Save {
    /// Creates the owner, without sessions and blocks.
    pub(crate) fn new(weights: Weights<TenantIndex>) -> Save {
        Save {
            sessions: BTreeMap::new(),
            reservations: Slab::new(),
            groups: Slab::new(),
            reserved_bytes: 0,
            tickets: Slab::new(),
            awaited_tickets: 0,
            writeback: WriteBack::new(weights),
            timers: Timers::default(),
            counters: SaveCounters::default(),
        }
    }

    /// Adds a session without reservations and commits.
    pub(crate) fn open(&mut self, session: SessionId) {
        self.sessions.insert(session, Writer::default());
    }

    /// Records the slack for writes in the computation that a session has reported; `None`: its model has no
    /// profile.
    pub(crate) fn report_layer(&mut self, now: Tick, session: SessionId, slack: Option<WriteSlack>) {
        if self.sessions.contains_key(&session) {
            self.writeback.slack.report(now, session, slack);
        }
    }

    /// Closes a session: its reservations end, and its notices are not sent.
    pub(crate) fn close(&mut self, cache: &mut Cache, session: SessionId) {
        self.writeback.slack.remove(session);
        let Some(writer) = self.sessions.remove(&session) else { return };
        self.end_reservations(cache, &writer);
        cache.revoke_regions(writer.regions());
        self.drop_tickets(&writer.tickets);
    }

    /// Sessions that are open, for the audit.
    pub(crate) fn sessions(&self) -> impl Iterator<Item = SessionId> {
        self.sessions.keys().copied()
    }

    /// Time of the first deadline of a reservation.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Handles the first deadline, if it is due.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, now: Tick) {
        if let Some(group) = self.timers.pop_due(now) {
            self.expire_reservations(cache, group);
        }
    }

    /// Time of the next deadline or write.
    pub(crate) fn next_deadline(&self, settings: &Settings) -> Option<Tick> {
        [self.timers.next(), self.write_deadline(settings)].into_iter().flatten().min()
    }

    /// Sets the counters and gauges of saving.
    pub(crate) fn set_counters(&self, all: &mut Counters) {
        self.counters.copy_to(all);
        all.reserved_bytes = self.reserved_bytes;
        all.unsaved_bytes = self.writeback.unsaved_bytes();
        all.unsaved_blocks = self.writeback.unsaved_blocks() as u64;
        all.demoting_bytes = self.demoting_bytes();
        all.writeback_deferred_bytes = self.writeback.deferred_bytes();
    }

    /// Number of blocks that are not durable yet.
    pub(crate) fn unsaved_blocks(&self) -> usize {
        self.writeback.unsaved_blocks()
    }

    /// Checks the owner's invariants, and that the frames of its leases are in the states that it knows.
    pub(crate) fn audit(&self, cache: &Cache) -> Result<(), String> {
        self.audit_reservations(cache)?;
        self.audit_tickets()?;
        self.audit_writeback(cache)?;
        for session in self.writeback.slack.sessions() {
            ensure!(self.sessions.contains_key(&session), "session {session} has a report and is not open");
        }
        let (mut reserved, mut unsaved) = (0, 0);
        for (_, frame) in cache.frames() {
            match frame.state {
                FrameState::Reserved => reserved += 1,
                FrameState::Unsaved(_) => unsaved += 1,
                _ => {}
            }
        }
        let (reservations, records) = (self.reservations.len(), self.unsaved_blocks());
        ensure!(reserved == reservations, "{reserved} frames are reserved, for {reservations} reservations");
        ensure!(unsaved == records, "{unsaved} frames are unsaved, with {records} records");
        Ok(())
    }
}
