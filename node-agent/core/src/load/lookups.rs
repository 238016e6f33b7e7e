//! Lookups in the directory, for loads and matches.
//!
//! Without an answer from the directory, the keys count as misses. The runtime reports a timeout; if it fails
//! to do so, a timer of the core ends the wait.

use std::time::Duration;

use reprise_policy::{BlockKey, SessionId, Tick};

use crate::cache::RankClasses;
use crate::context::{Caller, Context};
use crate::effect::{Effect, LookupId, LossReason, Source};
use crate::event::{PublicKeys, Ranks};
use crate::limits::LOOKUP_GRACE;
use crate::load::{LoadTimer, Loads};
use crate::slab::SlabId;

/// Lookup that is in flight.
#[derive(Debug)]
pub(super) struct Lookup {
    purpose: Purpose,
    /// Time at which the core stops waiting.
    expires: Tick,
}

/// Use of a lookup's answer.
#[derive(Debug)]
pub(super) enum Purpose {
    /// Complete a match with it.
    Match(WaitingMatch),
    /// Fetch blocks of a load.
    Load {
        /// Load that needs the blocks.
        load: SlabId,
        /// Indices of its blocks, in the order of the lookup's keys. Public keys of the first of them follow.
        blocks: Vec<u32>,
        /// Reason to report for blocks without a replica.
        otherwise: LossReason,
    },
}

/// Match that waits for a lookup.
#[derive(Debug)]
pub(super) struct WaitingMatch {
    pub(super) caller: Caller,
    /// Size classes of its keys.
    pub(super) classes: RankClasses,
    /// Deadline of both lookups together.
    pub(super) deadline: Tick,
    /// Sources of the leading run found so far.
    pub(super) sources: Vec<Source>,
    /// Keys after that run that this lookup covers.
    pub(super) rest: Vec<BlockKey>,
    /// Indices of the keys in `rest` that were looked up. Public keys of the first of them follow.
    pub(super) queried: Vec<u32>,
    /// Keys after `rest`, for a second lookup.
    pub(super) later: Vec<BlockKey>,
    /// Keys of the leading blocks of a public tenant.
    pub(super) public: Option<PublicKeys>,
    /// Ranks of the keys.
    pub(super) ranks: Ranks,
}

impl Loads {
    /// Sends a lookup to the directory; the caller has checked
    /// [`LOOKUPS_MAX`](crate::limits::LOOKUPS_MAX).
    pub(super) fn query_directory(
        &mut self,
        cx: &mut Context,
        keys: Vec<BlockKey>,
        purpose: Purpose,
        timeout: Duration,
    ) {
        let expires = cx.now.after(timeout).after(LOOKUP_GRACE);
        self.counters.lookups += 1;
        self.counters.lookup_keys += keys.len() as u64;
        let id = self.lookups.insert(Lookup { purpose, expires });
        self.timers.set(expires, LoadTimer::Lookup(id));
        cx.emit(Effect::Lookup { lookup: LookupId(id.0), keys, timeout });
    }

    /// Removes a lookup that was answered or is no longer needed.
    pub(super) fn end_lookup(&mut self, id: SlabId) -> Option<Purpose> {
        let lookup = self.lookups.remove(id)?;
        self.timers.clear(lookup.expires, LoadTimer::Lookup(id));
        Some(lookup.purpose)
    }

    /// Cancels the matches of a session that has ended.
    pub(super) fn cancel_matches(&mut self, session: SessionId) {
        let of_session = |lookup: &Lookup| match &lookup.purpose {
            Purpose::Match(waiting) => waiting.caller.session == session,
            Purpose::Load { .. } => false,
        };
        let gone: Vec<SlabId> =
            self.lookups.iter().filter(|(_, lookup)| of_session(lookup)).map(|(id, _)| id).collect();
        for id in gone {
            self.end_lookup(id);
        }
    }
}
