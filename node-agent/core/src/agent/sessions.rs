//! Sessions: what an engine holds, and what of it ends with its connection.
//!
//! Everything that a session holds (reservations, loads, tickets, questions to the directory) is listed in it, so
//! that its death costs what it held. Fills that it caused go on: what they bring may serve others.

use std::collections::BTreeSet;

use reprise_policy::{SessionId, Tick};

use super::AgentCore;
use super::frames::FrameIndex;
use super::limits::{INDEX_RESERVE_MAX, PROGRESS_ENTRIES, SESSIONS_MAX};
use super::shapes::ShapeId;
use super::slab::SlabId;
use crate::effect::{Access, Effect, ProgressEntry, RegionId, Reply};
use crate::event::{RequestId, SessionOpened};

/// An open session.
#[derive(Debug)]
pub(super) struct Session {
    pub(super) shape: ShapeId,
    /// Its reservations; each knows its position here.
    pub(super) reservations: Vec<SlabId>,
    /// Its commits whose blocks have not come to their end.
    pub(super) tickets: BTreeSet<SlabId>,
    /// Commits so far.
    pub(super) commits: u64,
    /// Load of each entry of its progress page.
    loads: [Option<SlabId>; PROGRESS_ENTRIES],
    readable: RegionSet,
    writable: RegionSet,
}

/// A slot that an engine fills.
#[derive(Debug)]
pub(super) struct Reservation {
    pub(super) session: SessionId,
    pub(super) frame: FrameIndex,
    /// Position in the session's list.
    pub(super) position: u32,
    /// The call that made it.
    pub(super) group: SlabId,
}

/// What one `Reserve` gave: it ends together.
#[derive(Debug)]
pub(super) struct ReservationGroup {
    pub(super) session: SessionId,
    /// Reservations that have not ended.
    pub(super) open: u32,
    pub(super) expires: Tick,
}

/// A set of regions, by position in the arena.
#[derive(Debug, Default)]
struct RegionSet {
    words: Vec<u64>,
}

impl RegionSet {
    /// Adds a region; whether it was not there.
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
    /// A progress entry that no load has.
    pub(super) fn free_entry(&self) -> Option<ProgressEntry> {
        self.loads.iter().position(Option::is_none).map(|entry| ProgressEntry(entry as u16))
    }

    pub(super) fn set_load(&mut self, entry: ProgressEntry, load: Option<SlabId>) {
        self.loads[usize::from(entry.0)] = load;
    }

    /// Its loads.
    pub(super) fn loads(&self) -> impl Iterator<Item = SlabId> {
        self.loads.iter().flatten().copied()
    }
}

impl AgentCore {
    /// An engine has connected. A session beyond the limits is not opened; its requests are answered `Busy`.
    pub(super) fn open_session(&mut self, opened: &SessionOpened) {
        if self.sessions.len() >= SESSIONS_MAX || self.sessions.contains_key(&opened.session) {
            return;
        }
        let Some(shape) = self.intern(opened.tenant, opened.layout) else { return };
        self.shapes.hold(shape);
        let slot_bytes = self.shapes.get(shape).slot_bytes;
        let blocks_possible = (self.devices.usage().capacity_bytes + self.arena.bytes()) / slot_bytes;
        self.index.reserve(blocks_possible.min(INDEX_RESERVE_MAX) as usize);
        let session = Session {
            shape,
            reservations: Vec::new(),
            tickets: BTreeSet::new(),
            commits: 0,
            loads: [None; PROGRESS_ENTRIES],
            readable: RegionSet::default(),
            writable: RegionSet::default(),
        };
        self.sessions.insert(opened.session, session);
    }

    /// A connection has ended: everything that was its session's is given back.
    pub(super) fn close_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        for load in session.loads() {
            self.end_load(load);
        }
        for reservation in &session.reservations {
            let reservation = self.reservations.remove(*reservation).expect("listed reservations live");
            self.leave_group(reservation.group);
            self.give_back_slot(reservation.frame);
        }
        for ticket in &session.tickets {
            self.tickets.remove(*ticket);
        }
        self.forget_match_lookups(id);
        self.shapes.release(session.shape);
    }

    /// Answers a request.
    pub(super) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Of these frames' regions, those that the session has not been granted with this access yet.
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
    fn a_region_is_new_to_a_session_once() {
        let mut set = RegionSet::default();
        assert!(set.insert(3));
        assert!(!set.insert(3));
        assert!(set.insert(3000));
        assert!(!set.insert(3000));
        assert!(set.insert(2));
    }
}
