//! Sessions: the resources of an engine, which end with its connection.
//!
//! A session lists everything that it holds (reservations, loads, tickets, lookups), so that closing it costs
//! time in proportion to that. Fills that it started continue, because their blocks may serve others.

use reprise_policy::SessionId;

use crate::agent::AgentCore;
use crate::cache::{FrameIndex, SizeClassId};
use crate::effect::{Access, Effect, ProgressEntry, RegionId, Reply};
use crate::event::{RequestId, SessionOpened};
use crate::limits::{PROGRESS_ENTRIES, SESSIONS_MAX};
use crate::regions::RegionSet;
use crate::slab::SlabId;

/// State of an open session.
#[derive(Debug)]
pub(crate) struct Session {
    pub(crate) size_class: SizeClassId,
    /// Load of each entry of the progress page.
    loads: [Option<SlabId>; PROGRESS_ENTRIES],
    readable: RegionSet,
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
        let Some(size_class) = self.cache.open(opened.tenant, opened.layout) else { return };
        let session = Session { size_class, loads: [None; PROGRESS_ENTRIES], readable: RegionSet::default() };
        self.sessions.insert(opened.session, session);
        self.save.open(opened.session);
    }

    /// Closes a session and releases everything that it holds.
    pub(crate) fn close_session(&mut self, id: SessionId) {
        let Some(session) = self.sessions.remove(&id) else { return };
        for load in session.loads() {
            self.end_load(load);
        }
        self.save.close(&mut self.cache, id);
        self.cancel_match_lookups(id);
        self.cache.release_size_class(session.size_class);
    }

    /// Sends the reply to a request.
    pub(crate) fn reply(&mut self, session: SessionId, request: RequestId, reply: Reply) {
        self.emit(Effect::Reply { session, request, reply });
    }

    /// Returns those regions of the frames that the session has not received for reading before.
    pub(crate) fn grants(
        &mut self,
        session: SessionId,
        frames: impl Iterator<Item = FrameIndex>,
    ) -> Vec<(RegionId, Access)> {
        let Some(session) = self.sessions.get_mut(&session) else { return Vec::new() };
        self.cache.new_regions(frames, Access::ReadOnly, &mut session.readable)
    }
}
