//! Sessions: the resources of an engine, which end with its connection.
//!
//! A session lists everything that it holds (reservations, loads, tickets, lookups), so that closing it costs
//! time in proportion to that. Fills that it started continue, because their blocks may serve others.

use std::collections::BTreeSet;

use reprise_policy::{SessionId, Tick};

use crate::agent::AgentCore;
use crate::cache::{FrameIndex, SizeClassId};
use crate::effect::{Access, Effect, ProgressEntry, RegionId, Reply};
use crate::event::{RequestId, SessionOpened};
use crate::limits::{INDEX_RESERVE_MAX, PROGRESS_ENTRIES, SESSIONS_MAX};
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
    /// Load of each entry of the progress page.
    loads: [Option<SlabId>; PROGRESS_ENTRIES],
    readable: RegionSet,
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

/// Set of regions, by position in the arena.
#[derive(Debug, Default)]
struct RegionSet {
    words: Vec<u64>,
}

impl RegionSet {
    /// Adds a region; returns whether it is new.
    fn insert(&mut self, region: u16) -> bool {
        let (word, bit) = (usize::from(region / 64), 1 << (region % 64));
        if self.words.len() <= word {
            self.words.resize(word + 1, 0);
        }
        let before = self.words[word];
        self.words[word] |= bit;
        before & bit == 0
    }
}

impl Session {
    /// Returns a progress entry that is not in use.
    pub(crate) fn free_entry(&self) -> Option<ProgressEntry> {
        self.loads.iter().position(Option::is_none).map(|entry| ProgressEntry(entry as u16))
    }

    pub(crate) fn set_load(&mut self, entry: ProgressEntry, load: Option<SlabId>) {
        self.loads[usize::from(entry.0)] = load;
    }

    /// Iterates the session's loads.
    pub(crate) fn loads(&self) -> impl Iterator<Item = SlabId> {
        self.loads.iter().flatten().copied()
    }
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
            loads: [None; PROGRESS_ENTRIES],
            readable: RegionSet::default(),
            writable: RegionSet::default(),
        };
        self.sessions.insert(opened.session, session);
    }

    /// Closes a session and releases everything that it holds.
    pub(crate) fn close_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        for load in session.loads() {
            self.end_load(load);
        }
        for reservation in &session.reservations {
            let reservation = self.reservations.remove(*reservation).expect("listed reservations live");
            self.leave_group(reservation.group);
            self.free_slot(reservation.frame);
        }
        for ticket in &session.tickets {
            self.tickets.remove(*ticket);
        }
        self.cancel_match_lookups(id);
        self.extents.close(context!(self), id);
        self.cache.sizes.release(session.size_class);
    }

    /// Sends the reply to a request.
    pub(crate) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Returns those regions of the frames that the session has not received with this access before.
    pub(crate) fn grants(
        &mut self,
        session: SessionId,
        access: Access,
        frames: impl Iterator<Item = FrameIndex>,
    ) -> Vec<(RegionId, Access)> {
        let Some(session) = self.sessions.get_mut(&session) else { return Vec::new() };
        let granted = match access {
            Access::ReadOnly => &mut session.readable,
            Access::ReadWrite => &mut session.writable,
        };
        frames
            .map(|frame| self.cache.frames.get(frame).place.region)
            .filter(|region| granted.insert(*region))
            .map(|region| (self.cache.arena.region_id(region), access))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_is_new_to_a_set_once() {
        let mut set = RegionSet::default();
        assert!(set.insert(3));
        assert!(!set.insert(3));
        assert!(set.insert(3000));
        assert!(!set.insert(3000));
        assert!(set.insert(2));
    }
}
