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
//! * A hint adds at most [`BEGUN_ADDED_MAX`] blocks and changes at most [`BEGUN_CHANGES_MAX`] others, each from the last
//!   block of a request to its first. The next hint of the session continues.
//! * The end of a session, and its silence, change all of its blocks, at most [`BEGUN_KEYS_MAX`].
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
    BEGUN_ADDED_MAX, BEGUN_CHANGES_MAX, BEGUN_KEYS_MAX, BEGUN_LISTED_MAX, BEGUN_SILENCE_MAX,
    LOOKAHEAD_TRACKED_MAX,
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
    /// State in the last list that names it.
    wanted: RequestState,
    /// State of its blocks, without the first ones that a change has not reached yet.
    state: RequestState,
    /// Number of these first blocks: they have the other state.
    unchanged: usize,
    /// Its blocks; they end after it has expired.
    blocks: Vec<Option<(BlockKey, SizeClassId)>>,
    /// Number of the last list that names it.
    list: u64,
    /// Time at which it expires.
    expires: Tick,
    is_expired: bool,
}

/// What a hint may still change.
struct Budget {
    added: usize,
    changes: usize,
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
        let mut budget = Budget { added: BEGUN_ADDED_MAX, changes: BEGUN_CHANGES_MAX };
        let Some(list) = list else {
            if let Some(known) = self.sessions.get_mut(&session) {
                self.counters.begun_class_changes += known.resume(cache, &mut budget);
            }
            self.remove_empty(session);
            return 0;
        };
        let classes = cache.rank_classes(caller.size_class, hint.ranks);
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
        let changes = known.end(cache, |request, _| !named.contains(&request), &mut budget);
        self.counters.begun_class_changes += changes;
        let ignored = list.into_iter().map(|listed| {
            u32::from(!known.list(cache, (listed, &classes), (now, &mut self.counters), &mut budget))
        });
        let ignored = ignored.sum();
        self.counters.begun_ignored_requests += u64::from(ignored);
        self.remove_empty(session);
        ignored
    }

    /// Removes a session without requests.
    fn remove_empty(&mut self, session: SessionId) {
        if let Some(known) = self.sessions.get(&session)
            && known.requests.is_empty()
        {
            self.timers.clear(known.due, session);
            self.sessions.remove(&session);
        }
    }

    /// Ends the requests of a session.
    pub(crate) fn close(&mut self, cache: &mut Cache, session: SessionId) {
        let Some(known) = self.sessions.remove(&session) else { return };
        self.timers.clear(known.due, session);
        let mut budget = BEGUN_KEYS_MAX;
        for mut listed in known.requests.into_values() {
            self.counters.begun_class_changes += listed.truncate(cache, 0, &mut budget);
        }
    }

    /// Ends the requests of the first session that has been silent for too long.
    pub(crate) fn fire_timer(&mut self, cache: &mut Cache, now: Tick) {
        let Some(session) = self.timers.pop_due(now) else { return };
        let expires = |known: &Requests| {
            let expiring =
                known.requests.values().filter(|listed| !listed.is_expired && listed.list == known.lists);
            expiring.count()
        };
        let expired = self.sessions.get(&session).map_or(0, expires);
        self.counters.begun_expired_requests += expired as u64;
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
                ensure!(request.unchanged <= request.blocks.len(), "{} blocks change", request.unchanged);
                for (number, block) in request.blocks.iter().enumerate() {
                    if let Some(block) = block {
                        listed.entry(*block).or_default().add(request.state_of(number));
                    }
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
            Entry::Vacant(new) => new.insert(Listed::new(state, now)),
        };
        if replace(&mut known.list, list) == list {
            return false;
        }
        known.wanted = state;
        if !known.is_expired && known.expires <= now {
            known.is_expired = true;
            counters.begun_expired_requests += 1;
        }
        let before = known.blocks.len();
        counters.begun_class_changes += known.resume(cache, budget);
        let others = self.keys - before;
        // A request whose keys are missing is ignored even without new ones, so that they travel again.
        let is_known = first <= known.blocks.len() && !(keys.is_empty() && known.blocks.is_empty());
        let is_applied = known.is_expired
            || is_known && {
                let room = BEGUN_KEYS_MAX - others;
                let keys = keys.into_iter().zip(classes.cycle());
                let keys = keys.map(|(key, class)| Some((key, class?))).collect();
                let (changes, is_applied) = known.replace_from(cache, first, (keys, room), budget);
                counters.begun_class_changes += changes;
                is_applied
            };
        self.keys = others + known.blocks.len();
        is_applied
    }

    /// Continues what the last hint could not change.
    fn resume(&mut self, cache: &mut Cache, budget: &mut Budget) -> u64 {
        let list = self.lists;
        let mut changes = self.end(cache, |_, listed| listed.list != list, budget);
        for listed in self.requests.values_mut() {
            self.keys -= listed.blocks.len();
            changes += listed.resume(cache, budget);
            self.keys += listed.blocks.len();
        }
        changes
    }

    /// Ends requests as far as the budget allows. Returns the number of blocks whose class has changed.
    fn end(&mut self, cache: &mut Cache, ends: impl Fn(u64, &Listed) -> bool, budget: &mut Budget) -> u64 {
        let mut changes = 0;
        let keys = &mut self.keys;
        self.requests.retain(|request, listed| {
            if !ends(*request, listed) {
                return true;
            }
            *keys -= listed.blocks.len();
            changes += listed.truncate(cache, 0, &mut budget.changes);
            *keys += listed.blocks.len();
            !listed.blocks.is_empty()
        });
        changes
    }
}

impl Listed {
    fn new(state: RequestState, now: Tick) -> Listed {
        Listed {
            wanted: state,
            state,
            unchanged: 0,
            blocks: Vec::new(),
            list: 0,
            expires: now.after(BEGUN_LISTED_MAX),
            is_expired: false,
        }
    }

    /// State of a block.
    fn state_of(&self, number: usize) -> RequestState {
        match self.state {
            RequestState::Running if number < self.unchanged => RequestState::Preempted,
            RequestState::Preempted if number < self.unchanged => RequestState::Running,
            state => state,
        }
    }

    /// Changes the state of the request to the wanted one, or ends its blocks if it has expired, as far as the budget
    /// allows. A change that has begun ends before the next one begins.
    fn resume(&mut self, cache: &mut Cache, budget: &mut Budget) -> u64 {
        if self.is_expired {
            return self.truncate(cache, 0, &mut budget.changes);
        }
        let mut changes = 0;
        loop {
            let rest = self.unchanged - take(&mut budget.changes, self.unchanged);
            // From the last block to the first: a block that is evicted later enters its class later.
            for number in (rest..self.unchanged).rev() {
                let before = self.state_of(number);
                if let Some(block) = self.blocks[number] {
                    changes += u64::from(cache.list_block(block, Some(before), Some(self.state)));
                }
            }
            self.unchanged = rest;
            if rest > 0 || self.state == self.wanted {
                return changes;
            }
            (self.state, self.unchanged) = (self.wanted, self.blocks.len());
        }
    }

    /// Replaces the blocks from a number on, unless they begin with the same ones. Returns the number of blocks whose
    /// class has changed, and whether all are listed: there may be no room for them, or no budget.
    fn replace_from(
        &mut self,
        cache: &mut Cache,
        first: usize,
        (blocks, room): (Vec<Option<(BlockKey, SizeClassId)>>, usize),
        budget: &mut Budget,
    ) -> (u64, bool) {
        let same = blocks.iter().zip(&self.blocks[first..]).take_while(|(new, known)| new == known).count();
        let (first, new) = (first + same, &blocks[same..]);
        if new.is_empty() {
            return (0, true);
        }
        if first + new.len() > room {
            return (0, false);
        }
        let mut changes = self.truncate(cache, first, &mut budget.changes);
        if self.blocks.len() > first {
            return (changes, false);
        }
        let added = take(&mut budget.added, new.len());
        for block in new[..added].iter().rev().flatten() {
            changes += u64::from(cache.list_block(*block, None, Some(self.state)));
        }
        self.blocks.extend(&new[..added]);
        (changes, added == new.len())
    }

    /// Ends the blocks from a number on, as far as a budget allows.
    fn truncate(&mut self, cache: &mut Cache, first: usize, budget: &mut usize) -> u64 {
        let mut changes = 0;
        for _ in 0..take(budget, self.blocks.len() - first) {
            let state = self.state_of(self.blocks.len() - 1);
            if let Some(block) = self.blocks.pop().flatten() {
                changes += u64::from(cache.list_block(block, Some(state), None));
            }
        }
        self.unchanged = self.unchanged.min(self.blocks.len());
        changes
    }
}

/// Takes up to a number from a budget; returns how many.
fn take(budget: &mut usize, wanted: usize) -> usize {
    let taken = wanted.min(*budget);
    *budget -= taken;
    taken
}
