//! Requests that have begun, as engines list them: their blocks have the eviction class of their state.
//!
//! ```text
//!  listed ──▶ Running ⇄ Preempted ──missing in a list, session closed──▶ (removed)
//!                │           │
//!                └──listed for too long──▶ Expired ──missing in a list──▶ (removed)
//!  no hint for a time: all requests of the session are removed
//! ```
//!
//! The class of a block is derived from the requests that list it and never stored. So a block has its own class again
//! when its requests end, also if their engine died.
//!
//! Invariants:
//! * A session has at most [`BEGUN_KEYS_MAX`] keys, and [`LOOKAHEAD_TRACKED_MAX`] requests.
//! * A hint changes at most [`BEGUN_CHANGES_MAX`] blocks that it does not name, or those of one request.
//! * Classes change the order within a tenant only.
//!
//! Out of scope: reads ahead of waiting requests, which are another owner's.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::mem::replace;

use reprise_policy::eviction::listed::ListedBy;
use reprise_policy::prefetch::{BegunRequest, Lookahead, RequestState};
use reprise_policy::{BlockKey, SessionId, Tick};

use crate::cache::{Cache, RankClasses, SizeClassId};
use crate::context::Caller;
use crate::counters::{BegunCounters, Counters};
use crate::limits::{
    BEGUN_CHANGES_MAX, BEGUN_KEYS_MAX, BEGUN_LISTED_MAX, BEGUN_SILENCE_MAX, LOOKAHEAD_TRACKED_MAX,
};
use crate::timers::Timers;

/// Requests of all sessions that have begun.
#[derive(Debug, Default)]
pub(crate) struct Begun {
    sessions: BTreeMap<SessionId, Requests>,
    timers: Timers<SessionId>,
    counters: BegunCounters,
}

/// Requests of a session.
#[derive(Debug)]
struct Requests {
    requests: BTreeMap<u64, Listed>,
    /// Number of lists so far.
    lists: u64,
    /// Keys of all requests.
    keys: usize,
    /// Time of the session's timer.
    due: Tick,
}

/// A request that has begun.
#[derive(Debug)]
struct Listed {
    state: RequestState,
    /// Its blocks; none after it has expired.
    blocks: Vec<Option<(BlockKey, SizeClassId)>>,
    /// Number of the last list that names it.
    list: u64,
    /// Time at which it expires.
    expires: Tick,
    is_expired: bool,
}

/// What a list may still change.
struct Budget {
    changes: usize,
    is_used: bool,
}

impl Begun {
    /// Time of the first deadline.
    pub(crate) fn first_due(&self) -> Option<Tick> {
        self.timers.next()
    }

    /// Sets the counters and gauges.
    pub(crate) fn set_counters(&self, cache: &Cache, all: &mut Counters) {
        self.counters.copy_to(all);
        all.begun_requests = self.sessions.values().map(|session| session.requests.len() as u64).sum();
        all.begun_blocks = cache.listed_blocks() as u64;
    }

    /// Applies a checked hint, and takes the list of requests that have begun from it. Returns the number of requests
    /// that were ignored.
    pub(crate) fn hint(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        (caller, hint): (Caller, &mut Lookahead),
    ) -> u32 {
        let session = caller.session;
        let list = hint.begun.take();
        if let Some(known) = self.sessions.get_mut(&session) {
            let due = now.after(BEGUN_SILENCE_MAX);
            self.timers.clear(replace(&mut known.due, due), session);
            self.timers.set(due, session);
        }
        let Some(list) = list else { return 0 };
        let classes = cache.rank_classes(caller.size_class, hint.ranks);
        let mut budget = Budget { changes: BEGUN_CHANGES_MAX, is_used: false };
        if !list.is_empty() && !self.sessions.contains_key(&session) {
            let due = now.after(BEGUN_SILENCE_MAX);
            self.timers.set(due, session);
            let requests = Requests { requests: BTreeMap::new(), lists: 0, keys: 0, due };
            self.sessions.insert(session, requests);
        }
        let Some(known) = self.sessions.get_mut(&session) else { return 0 };
        known.lists += 1;
        // First, because it makes room for others.
        let named: BTreeSet<u64> = list.iter().map(|listed| listed.request).collect();
        self.counters.begun_class_changes += known.end_unlisted(cache, &named, &mut budget);
        let ignored = list.into_iter().map(|listed| {
            u32::from(!known.list(cache, (listed, &classes), (now, &mut self.counters), &mut budget))
        });
        let ignored = ignored.sum();
        self.counters.begun_ignored_requests += u64::from(ignored);
        if known.requests.is_empty() {
            self.timers.clear(known.due, session);
            self.sessions.remove(&session);
        }
        ignored
    }

    /// Ends the requests of a session.
    pub(crate) fn close(&mut self, cache: &mut Cache, session: SessionId) {
        let Some(known) = self.sessions.remove(&session) else { return };
        self.timers.clear(known.due, session);
        for mut listed in known.requests.into_values() {
            self.counters.begun_class_changes += listed.truncate(cache, 0);
        }
    }

    /// Ends the requests of the first session that has been silent for too long.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, now: Tick) {
        let Some(session) = self.timers.pop_due(now) else { return };
        let requests = self.sessions.get(&session).map_or(0, |known| known.requests.len());
        self.counters.begun_expired_requests += requests as u64;
        self.close(cache, session);
    }

    /// Checks the invariants. Costs time in proportion to the listed blocks.
    pub(crate) fn audit<'a>(
        &self,
        cache: &Cache,
        sessions: impl Iterator<Item = &'a SessionId>,
    ) -> Result<(), String> {
        let open: Vec<&SessionId> = sessions.collect();
        let mut listed: BTreeMap<(BlockKey, SizeClassId), ListedBy> = BTreeMap::new();
        for (session, known) in &self.sessions {
            ensure!(open.contains(&session), "{session:?} is closed and lists requests");
            let keys: usize = known.requests.values().map(|listed| listed.blocks.len()).sum();
            ensure!(keys == known.keys && keys <= BEGUN_KEYS_MAX, "{keys} keys, {} counted", known.keys);
            for request in known.requests.values() {
                for block in request.blocks.iter().flatten() {
                    listed.entry(*block).or_default().add(request.state);
                }
            }
        }
        ensure!(self.timers.len() == self.sessions.len(), "each session has a timer");
        ensure!(listed.len() == cache.listed_blocks(), "{} listed blocks", cache.listed_blocks());
        for ((key, class), by) in listed {
            let known = cache.listed_by(&key, class);
            ensure!(known == by, "{key} is listed by {by:?}, the cache knows {known:?}");
        }
        Ok(())
    }
}

impl Requests {
    /// Adds or updates a listed request; `false` if it is ignored.
    fn list(
        &mut self,
        cache: &mut Cache,
        (begun, classes): (BegunRequest, &RankClasses),
        (now, counters): (Tick, &mut BegunCounters),
        budget: &mut Budget,
    ) -> bool {
        let BegunRequest { request, state, first, keys } = begun;
        let (tracked, list, first) = (self.requests.len(), self.lists, first as usize);
        let known = match self.requests.entry(request) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(_) if keys.is_empty() || first > 0 || tracked >= LOOKAHEAD_TRACKED_MAX => {
                return false;
            }
            Entry::Vacant(new) => {
                let expires = now.after(BEGUN_LISTED_MAX);
                new.insert(Listed { state, blocks: Vec::new(), list: 0, expires, is_expired: false })
            }
        };
        if replace(&mut known.list, list) == list {
            return false;
        }
        let before = known.blocks.len();
        if !known.is_expired && known.expires <= now {
            known.is_expired = true;
            counters.begun_expired_requests += 1;
            counters.begun_class_changes += known.truncate(cache, 0);
        }
        if known.is_expired {
            self.keys -= before - known.blocks.len();
            return true;
        }
        counters.begun_class_changes += known.change_state(cache, state, budget);
        let is_applied = keys.is_empty() || {
            let fits =
                first <= before && self.keys - (before - first.min(before)) + keys.len() <= BEGUN_KEYS_MAX;
            if fits {
                counters.begun_class_changes += known.replace_from(cache, first, keys, classes);
            }
            fits
        };
        self.keys = self.keys + known.blocks.len() - before;
        is_applied
    }

    /// Ends the requests that a list does not name, as far as the budget allows. Returns the number of blocks whose class
    /// has changed.
    fn end_unlisted(&mut self, cache: &mut Cache, named: &BTreeSet<u64>, budget: &mut Budget) -> u64 {
        let mut changes = 0;
        let keys = &mut self.keys;
        self.requests.retain(|request, listed| {
            let ends = !named.contains(request) && budget.admits(listed.blocks.len());
            if ends {
                *keys -= listed.blocks.len();
                changes += listed.truncate(cache, 0);
            }
            !ends
        });
        changes
    }
}

impl Listed {
    /// Changes the state of the request, as far as the budget allows.
    fn change_state(&mut self, cache: &mut Cache, state: RequestState, budget: &mut Budget) -> u64 {
        if self.state == state || !budget.admits(self.blocks.len()) {
            return 0;
        }
        let before = replace(&mut self.state, state);
        // From the last block to the first: a block that is evicted later enters its class later.
        let blocks = self.blocks.iter().rev().flatten();
        blocks.map(|block| u64::from(cache.list_block(*block, Some(before), Some(state)))).sum()
    }

    /// Replaces the blocks from a number on.
    fn replace_from(
        &mut self,
        cache: &mut Cache,
        first: usize,
        keys: Vec<BlockKey>,
        classes: &RankClasses,
    ) -> u64 {
        let mut changes = self.truncate(cache, first);
        let keys = keys.into_iter().zip(classes.cycle());
        self.blocks.extend(keys.map(|(key, class)| Some((key, class?))));
        for block in self.blocks[first..].iter().rev().flatten() {
            changes += u64::from(cache.list_block(*block, None, Some(self.state)));
        }
        changes
    }

    /// Ends the blocks from a number on.
    fn truncate(&mut self, cache: &mut Cache, first: usize) -> u64 {
        let (state, ended) = (self.state, self.blocks.drain(first..));
        ended.rev().flatten().map(|block| u64::from(cache.list_block(block, Some(state), None))).sum()
    }
}

impl Budget {
    /// Whether a number of blocks may be changed: the rest of the budget, or those of one request.
    fn admits(&mut self, blocks: usize) -> bool {
        let admits = blocks <= self.changes || !self.is_used;
        if admits {
            self.changes = self.changes.saturating_sub(blocks);
            self.is_used = self.is_used || blocks > 0;
        }
        admits
    }
}
