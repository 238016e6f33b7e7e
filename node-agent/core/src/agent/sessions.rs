//! Sessions: the resources of an engine, which end with its connection.
//!
//! A session lists everything that it holds, so that closing it costs time in proportion to that. Fills that it started continue, because their blocks may serve others.

use std::collections::BTreeSet;

use reprise_policy::{SessionId, Tick};

use crate::agent::AgentCore;
use crate::cache::{FrameIndex, SizeClassId};
use crate::effect::{Access, Effect, RegionId, Reply};
use crate::event::{RequestId, SessionOpened};
use crate::limits::{INDEX_RESERVE_MAX, SESSIONS_MAX};
use crate::regions::RegionSet;
use crate::slab::SlabId;

/// State of an open session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) size_class: SizeClassId,
    /// Reservations of the session; each stores its position here.
    pub(crate) reservations: Vec<SlabId>,
    /// Commits with blocks that are neither durable nor lost yet.
    pub(crate) tickets: BTreeSet<SlabId>,
    /// Number of commits so far.
    pub(crate) commits: u64,
    writable: RegionSet,
}

/// Slot that an engine fills.
#[derive(Debug)]
pub(crate) struct Reservation {
    pub(crate) session: SessionId,
    pub(crate) frame: FrameIndex,
    /// Position in the session's list of reservations.
    pub(crate) position: u32,
    /// Group of the `Reserve` call that created it.
    pub(crate) group: SlabId,
}

/// Reservations of one `Reserve` call, which expire together.
#[derive(Debug)]
pub(crate) struct ReservationGroup {
    pub(crate) session: SessionId,
    /// Number of reservations that have not ended.
    pub(crate) open: u32,
    pub(crate) expires: Tick,
}

impl AgentCore {
    /// Opens a session. Beyond the limits it is not opened, and its requests are answered with `Busy`.
    pub(crate) fn open_session(&mut self, opened: &SessionOpened) {
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&opened.session) {
            return;
        }
        let Some(size_class) = self.cache.intern(opened.tenant, opened.layout) else { return };
        self.cache.sizes.hold(size_class);
        let slot_bytes = self.cache.sizes.get(size_class).slot_bytes;
        let blocks_possible =
            (self.cache.devices.usage().capacity_bytes + self.cache.arena.bytes()) / slot_bytes;
        self.cache.index.reserve(blocks_possible.min(INDEX_RESERVE_MAX) as usize);
        let session = Session {
            size_class,
            reservations: Vec::new(),
            tickets: BTreeSet::new(),
            commits: 0,
            writable: RegionSet::default(),
        };
        self.sessions.insert(opened.session, session);
        self.load.open(opened.session);
    }

    /// Closes a session and releases everything that it holds.
    pub(crate) fn close_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        self.load.close(&mut self.cache, id);
        for reservation in &session.reservations {
            let reservation = self.reservations.remove(*reservation).expect("listed reservations live");
            self.leave_group(reservation.group);
            self.free_slot(reservation.frame);
        }
        for ticket in &session.tickets {
            self.tickets.remove(*ticket);
        }
        self.cache.sizes.release(session.size_class);
    }

    /// Sends the reply to a request.
    pub(crate) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Returns those regions of the frames that the session has not received with write access before.
    pub(crate) fn grants(
        &mut self,
        session: SessionId,
        frames: impl Iterator<Item = FrameIndex>,
    ) -> Vec<(RegionId, Access)> {
        let Some(session) = self.sessions.get_mut(&session) else { return Vec::new() };
        self.cache.new_regions(frames, Access::ReadWrite, &mut session.writable)
    }
}
