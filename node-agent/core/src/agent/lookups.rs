//! Lookups in the directory, and `Match`, which uses them.
//!
//! A match is answered at once if this node has the whole chain, or if its scope is local. Otherwise a first
//! lookup covers the first keys behind the local run that are missing here. Only if all of them are found, a
//! second lookup covers the rest. Most chains end early, so the rest is rarely looked up. The blocks on this
//! node may change in the meantime, so the answer is built from the index after the lookup.
//!
//! Without an answer from the directory, the keys count as misses. The runtime reports a timeout; if it fails
//! to do so, a timer of the core ends the wait.

use std::time::Duration;

use reprise_policy::{BlockKey, SessionId};

use crate::agent::{AgentCore, Timer};
use crate::cache::SizeClassId;
use crate::effect::{Effect, LookupId, LossReason, Reply, Source};
use crate::event::{Replica, RequestId, Scope};
use crate::limits::{LOOKUP_GRACE, LOOKUPS_MAX, MATCH_FIRST_KEYS, MATCH_KEYS_MAX};
use crate::slab::SlabId;

/// Lookup that is in flight.
#[derive(Debug)]
pub(crate) struct Lookup {
    purpose: Purpose,
    /// Time at which the core stops waiting.
    expires: reprise_policy::Tick,
}

/// Use of a lookup's answer.
#[derive(Debug)]
pub(crate) enum Purpose {
    /// Complete a match with it.
    Match(WaitingMatch),
    /// Fetch blocks of a load.
    Load {
        /// Load that needs the blocks.
        load: SlabId,
        /// Indices of its blocks, in the order of the lookup's keys.
        blocks: Vec<u32>,
        /// Reason to report for blocks without a replica.
        otherwise: LossReason,
    },
}

/// Match that waits for a lookup.
#[derive(Debug)]
pub(crate) struct WaitingMatch {
    session: SessionId,
    request: RequestId,
    size_class: SizeClassId,
    /// Deadline of both lookups together.
    deadline: reprise_policy::Tick,
    /// Sources of the leading run found so far.
    sources: Vec<Source>,
    /// Keys after that run that this lookup covers.
    rest: Vec<BlockKey>,
    /// Indices of the keys in `rest` that were looked up.
    queried: Vec<u32>,
    /// Keys after `rest`, for a second lookup.
    later: Vec<BlockKey>,
}

impl AgentCore {
    /// Handles a `Match`: how many leading blocks are available, and where.
    pub(crate) fn match_keys(
        &mut self,
        session: SessionId,
        request: RequestId,
        mut keys: Vec<BlockKey>,
        scope: Scope,
    ) {
        if keys.len() > MATCH_KEYS_MAX {
            let text = format!("{} keys in one match: send at most {MATCH_KEYS_MAX}", keys.len());
            return self.reply(session, request, Reply::BadRequest(text));
        }
        let Some(size_class) = self.sessions.get(&session).map(|session| session.size_class) else { return };
        self.counters.matches += 1;
        self.counters.match_keys += keys.len() as u64;
        let run = self.cache.index.leading_run(&keys, size_class);
        self.cache.touch_chain(run.iter().map(|(entry, _)| *entry));
        let sources: Vec<Source> = run.into_iter().map(|(_, source)| source).collect();
        if sources.len() == keys.len() || scope == Scope::Local || self.lookups.len() >= LOOKUPS_MAX {
            return self.answer_match(session, request, sources);
        }
        let mut rest = keys.split_off(sources.len());
        let mut queried = self.missing_keys(&rest, size_class);
        // For a short rest, one larger lookup is cheaper than a second one.
        let later = match queried.get(MATCH_FIRST_KEYS) {
            Some(end) if queried.len() > 2 * MATCH_FIRST_KEYS => rest.split_off(*end as usize),
            _ => Vec::new(),
        };
        if !later.is_empty() {
            queried.truncate(MATCH_FIRST_KEYS);
        }
        let deadline = self.now.after(self.settings.lookup_timeout);
        self.query_for_match(WaitingMatch {
            session,
            request,
            size_class,
            deadline,
            sources,
            rest,
            queried,
            later,
        });
    }

    /// Returns the indices of those keys that are not on this node.
    fn missing_keys(&self, keys: &[BlockKey], size_class: SizeClassId) -> Vec<u32> {
        let is_absent = |(_, key): &(u32, &BlockKey)| self.cache.local_source(key, size_class).is_none();
        (0..).zip(keys).filter(is_absent).map(|(at, _)| at).collect()
    }

    fn query_for_match(&mut self, waiting: WaitingMatch) {
        if waiting.queried.is_empty() {
            return self.finish_match(waiting, &[]);
        }
        let keys = waiting.queried.iter().map(|at| waiting.rest[*at as usize]).collect();
        let timeout = waiting.deadline.since(self.now);
        self.query_directory(keys, Purpose::Match(waiting), timeout);
    }

    /// Sends a lookup to the directory; the caller has checked [`LOOKUPS_MAX`].
    pub(crate) fn query_directory(&mut self, keys: Vec<BlockKey>, purpose: Purpose, timeout: Duration) {
        let expires = self.now.after(timeout).after(LOOKUP_GRACE);
        self.counters.lookups += 1;
        self.counters.lookup_keys += keys.len() as u64;
        let id = self.lookups.insert(Lookup { purpose, expires });
        self.timers.set(expires, Timer::Lookup(id));
        self.emit(Effect::Lookup { lookup: LookupId(id.0), keys, timeout });
    }

    /// Handles the directory's answer: replicas of each key, in the lookup's order.
    pub(crate) fn lookup_answered(&mut self, id: SlabId, found: Vec<Vec<Replica>>) {
        let Some(lookup) = self.lookups.remove(id) else { return };
        self.timers.clear(lookup.expires, Timer::Lookup(id));
        match lookup.purpose {
            Purpose::Match(waiting) => self.finish_match(waiting, &found),
            Purpose::Load { load, blocks, otherwise } => {
                self.attach_found(load, &blocks, found, otherwise);
            }
        }
    }

    /// Handles a lookup that failed or timed out.
    pub(crate) fn lookup_failed(&mut self, id: SlabId) {
        if self.lookups.get(id).is_some() {
            self.counters.lookup_failures += 1;
            self.lookup_answered(id, Vec::new());
        }
    }

    /// Cancels the matches of a session that has ended.
    pub(crate) fn cancel_match_lookups(&mut self, session: SessionId) {
        let of_session = |lookup: &Lookup| match &lookup.purpose {
            Purpose::Match(waiting) => waiting.session == session,
            Purpose::Load { .. } => false,
        };
        let gone: Vec<SlabId> =
            self.lookups.iter().filter(|(_, lookup)| of_session(lookup)).map(|(id, _)| id).collect();
        for id in gone {
            self.cancel_lookup(id);
        }
    }

    fn cancel_lookup(&mut self, id: SlabId) {
        if let Some(lookup) = self.lookups.remove(id) {
            self.timers.clear(lookup.expires, Timer::Lookup(id));
        }
    }

    fn finish_match(&mut self, waiting: WaitingMatch, found: &[Vec<Replica>]) {
        let WaitingMatch { session, request, size_class, deadline, mut sources, rest, queried, later } =
            waiting;
        let known = sources.len();
        let mut answers = queried.iter().zip(found).peekable();
        for (at, key) in (0..).zip(&rest) {
            let answer = answers.next_if(|(queried, _)| **queried == at);
            let elsewhere = || answer.and_then(|(_, replicas)| best_source(replicas));
            let Some(source) = self.cache.local_source(key, size_class).or_else(elsewhere) else { break };
            sources.push(source);
        }
        let is_whole = sources.len() == known + rest.len();
        if !is_whole || later.is_empty() || self.lookups.len() >= LOOKUPS_MAX || deadline <= self.now {
            return self.answer_match(session, request, sources);
        }
        let queried = self.missing_keys(&later, size_class);
        let waiting = WaitingMatch {
            session,
            request,
            size_class,
            deadline,
            sources,
            rest: later,
            queried,
            later: Vec::new(),
        };
        self.query_for_match(waiting);
    }

    fn answer_match(&mut self, session: SessionId, request: RequestId, sources: Vec<Source>) {
        self.counters.matched(&sources);
        self.reply(session, request, Reply::Matched { sources });
    }
}

/// Returns the source of the replica with the fastest tier.
fn best_source(replicas: &[Replica]) -> Option<Source> {
    replicas.iter().map(|replica| Source::of_peer(replica.tier)).min()
}

#[cfg(test)]
mod tests {
    use reprise_policy::routing::LoadClass;
    use reprise_policy::{NodeId, Tier};

    use super::*;

    #[test]
    fn prefers_replica_in_dram_over_nvme() {
        let replica = |tier| Replica { node: NodeId(1), tier, load: LoadClass::default() };
        assert_eq!(best_source(&[]), None);
        assert_eq!(best_source(&[replica(Tier::Nvme), replica(Tier::Dram)]), Some(Source::PeerDram));
        assert_eq!(best_source(&[replica(Tier::Nvme)]), Some(Source::PeerNvme));
    }
}
