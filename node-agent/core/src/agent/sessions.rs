//! Sessions: the resources of an engine, which end with its connection.
//!
//! A session lists everything that it holds (reservations, loads, tickets, lookups), so that closing it costs
//! time in proportion to that. Fills that it started continue, because their blocks may serve others.

use std::collections::BTreeSet;

use reprise_policy::{SessionId, Tick};

use super::AgentCore;
use super::frames::FrameIndex;
use super::limits::{INDEX_RESERVE_MAX, PROGRESS_ENTRIES, SESSIONS_MAX};
use super::size_class::SizeClassId;
use super::slab::SlabId;
use crate::effect::{Access, Effect, ProgressEntry, RegionId, Reply};
use crate::event::{RequestId, SessionOpened};

/// State of an open session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) size_class: SizeClassId,
    /// Reservations of the session; each stores its position here.
    pub(super) reservations: Vec<SlabId>,
    /// Commits with blocks that are neither durable nor lost yet.
    pub(super) tickets: BTreeSet<SlabId>,
    /// Number of commits so far.
    pub(super) commits: u64,
    /// Load of each entry of the progress page.
    loads: [Option<SlabId>; PROGRESS_ENTRIES],
    readable: RegionSet,
    writable: RegionSet,
}

/// Slot that an engine fills.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) session: SessionId,
    pub(super) frame: FrameIndex,
    /// Position in the session's list of reservations.
    pub(super) position: u32,
    /// Group of the `Reserve` call that created it.
    pub(super) group: SlabId,
}

/// Reservations of one `Reserve` call, which expire together.
#[derive(Debug)]
pub(super) struct ReservationGroup {
    pub(super) session: SessionId,
    /// Number of reservations that have not ended.
    pub(super) open: u32,
    pub(super) expires: Tick,
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
    pub(super) fn free_entry(&self) -> Option<ProgressEntry> {
        self.loads.iter().position(Option::is_none).map(|entry| ProgressEntry(entry as u16))
    }

    pub(super) fn set_load(&mut self, entry: ProgressEntry, load: Option<SlabId>) {
        self.loads[usize::from(entry.0)] = load;
    }

    /// Iterates the session's loads.
    pub(super) fn loads(&self) -> impl Iterator<Item = SlabId> {
        self.loads.iter().flatten().copied()
    }
}

impl AgentCore {
    /// Opens a session. Beyond the limits it is not opened, and its requests are answered with `Busy`.
    pub(super) fn open_session(&mut self, opened: &SessionOpened) {
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&opened.session) {
            return;
        }
        let Some(size_class) = self.intern(opened.tenant, opened.layout) else { return };
        self.size_classes.hold(size_class);
        let slot_bytes = self.size_classes.get(size_class).slot_bytes;
        let blocks_possible = (self.devices.usage().capacity_bytes + self.arena.bytes()) / slot_bytes;
        self.index.reserve(blocks_possible.min(INDEX_RESERVE_MAX) as usize);
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
    pub(super) fn close_session(&mut self, id: SessionId) {
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
        self.size_classes.release(session.size_class);
    }

    /// Sends the reply to a request.
    pub(super) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Returns those regions of the frames that the session has not received with this access before.
    pub(super) fn grants(
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
            .map(|frame| self.frames.get(frame).place.region)
            .filter(|region| granted.insert(*region))
            .map(|region| (self.arena.region_id(region), access))
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
