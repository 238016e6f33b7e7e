//! Questions to the directory, and `Match`, which asks one.
//!
//! A match is answered at once when this node has all of the chain, or when it may not look elsewhere. Otherwise a
//! question covers the first keys behind the local run that are not here, and when all of them are found, a second one the
//! rest: where a chain ends early, which most do at once, nobody looks for what is behind its end. What is here may change
//! until an answer comes, so the answer is built from the index as it is then.
//!
//! Without an answer, what was asked for is a miss: the runtime reports that in time, and if it does not, a timer of
//! the core's own ends the wait.

use std::time::Duration;

use reprise_policy::{BlockKey, SessionId, Tier};

use super::AgentCore;
use super::limits::{LOOKUP_GRACE, LOOKUPS_MAX, MATCH_FIRST_KEYS, MATCH_KEYS_MAX};
use super::shapes::ShapeId;
use super::slab::SlabId;
use super::timers::Timer;
use crate::effect::{Effect, LookupId, LossReason, Reply, Source};
use crate::event::{Replica, RequestId, Scope};

/// A question without an answer yet.
#[derive(Debug)]
pub(super) struct Lookup {
    purpose: Purpose,
    /// When the core gives up.
    expires: reprise_policy::Tick,
}

/// What is done with the answer.
#[derive(Debug)]
pub(super) enum Purpose {
    /// Answer a match.
    Match(WaitingMatch),
    /// Place blocks of a load.
    Load {
        /// The load.
        load: SlabId,
        /// Indices of its blocks, in the order of the question's keys.
        blocks: Vec<u32>,
        /// What a block is that nobody has.
        otherwise: LossReason,
    },
}

/// A match that waits for the directory.
#[derive(Debug)]
pub(super) struct WaitingMatch {
    session: SessionId,
    request: RequestId,
    shape: ShapeId,
    /// When both questions are to be answered.
    deadline: reprise_policy::Tick,
    /// Sources of the run that is known.
    sources: Vec<Source>,
    /// Keys behind it, as far as the question goes.
    rest: Vec<BlockKey>,
    /// Which of them were asked for.
    asked: Vec<u32>,
    /// Keys behind those.
    later: Vec<BlockKey>,
}

impl AgentCore {
    /// Says how many leading keys are available, and where.
    pub(super) fn match_keys(
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
        let Some(shape) = self.sessions.get(&session).map(|session| session.shape) else { return };
        self.counters.matches += 1;
        self.counters.match_keys += keys.len() as u64;
        let run = self.index.leading_run(&keys, shape);
        self.touch_chain(run.iter().map(|(entry, _)| *entry));
        let sources: Vec<Source> = run.into_iter().map(|(_, source)| source).collect();
        if sources.len() == keys.len() || scope == Scope::Local || self.lookups.len() >= LOOKUPS_MAX {
            return self.answer_match(session, request, sources);
        }
        let mut rest = keys.split_off(sources.len());
        let mut asked = self.not_here(&rest, shape);
        // The rest of a chain that has few more costs less than a second question.
        let later = match asked.get(MATCH_FIRST_KEYS) {
            Some(end) if asked.len() > 2 * MATCH_FIRST_KEYS => rest.split_off(*end as usize),
            _ => Vec::new(),
        };
        if !later.is_empty() {
            asked.truncate(MATCH_FIRST_KEYS);
        }
        let deadline = self.now.after(self.settings.lookup_timeout);
        self.ask_for_match(WaitingMatch { session, request, shape, deadline, sources, rest, asked, later });
    }

    /// Which of some keys are not on this node.
    fn not_here(&self, keys: &[BlockKey], shape: ShapeId) -> Vec<u32> {
        let is_absent = |(_, key): &(u32, &BlockKey)| self.source_here(key, shape).is_none();
        (0..).zip(keys).filter(is_absent).map(|(at, _)| at).collect()
    }

    fn ask_for_match(&mut self, waiting: WaitingMatch) {
        if waiting.asked.is_empty() {
            return self.finish_match(waiting, &[]);
        }
        let question = waiting.asked.iter().map(|at| waiting.rest[*at as usize]).collect();
        let timeout = waiting.deadline.since(self.now);
        self.ask_directory(question, Purpose::Match(waiting), timeout);
    }

    /// Asks the directory; the caller has seen that there is room for a question more.
    pub(super) fn ask_directory(&mut self, keys: Vec<BlockKey>, purpose: Purpose, timeout: Duration) {
        let expires = self.now.after(timeout).after(LOOKUP_GRACE);
        self.counters.lookups += 1;
        self.counters.lookup_keys += keys.len() as u64;
        let id = self.lookups.insert(Lookup { purpose, expires });
        self.timers.set(expires, Timer::Lookup(id));
        self.emit(Effect::Lookup { lookup: LookupId(id.0), keys, timeout });
    }

    /// The directory has answered: replicas of each key, in the question's order.
    pub(super) fn found(&mut self, id: SlabId, found: Vec<Vec<Replica>>) {
        let Some(lookup) = self.lookups.remove(id) else { return };
        self.timers.clear(lookup.expires, Timer::Lookup(id));
        match lookup.purpose {
            Purpose::Match(waiting) => self.finish_match(waiting, &found),
            Purpose::Load { load, blocks, otherwise } => {
                self.place_found(load, &blocks, found, otherwise);
            }
        }
    }

    /// The directory will not answer.
    pub(super) fn lookup_failed(&mut self, id: SlabId) {
        if self.lookups.get(id).is_some() {
            self.counters.lookup_failures += 1;
            self.found(id, Vec::new());
        }
    }

    /// A session has gone: nobody waits for its matches.
    pub(super) fn forget_match_lookups(&mut self, session: SessionId) {
        let of_session = |lookup: &Lookup| match &lookup.purpose {
            Purpose::Match(waiting) => waiting.session == session,
            Purpose::Load { .. } => false,
        };
        let gone: Vec<SlabId> =
            self.lookups.iter().filter(|(_, lookup)| of_session(lookup)).map(|(id, _)| id).collect();
        for id in gone {
            self.forget_lookup(id);
        }
    }

    fn forget_lookup(&mut self, id: SlabId) {
        if let Some(lookup) = self.lookups.remove(id) {
            self.timers.clear(lookup.expires, Timer::Lookup(id));
        }
    }

    fn finish_match(&mut self, waiting: WaitingMatch, found: &[Vec<Replica>]) {
        let WaitingMatch { session, request, shape, deadline, mut sources, rest, asked, later } = waiting;
        let known = sources.len();
        let mut answers = asked.iter().zip(found).peekable();
        for (at, key) in (0..).zip(&rest) {
            let answer = answers.next_if(|(asked, _)| **asked == at);
            let elsewhere = || answer.and_then(|(_, replicas)| best_source(replicas));
            let Some(source) = self.source_here(key, shape).or_else(elsewhere) else { break };
            sources.push(source);
        }
        let is_whole = sources.len() == known + rest.len();
        if !is_whole || later.is_empty() || self.lookups.len() >= LOOKUPS_MAX || deadline <= self.now {
            return self.answer_match(session, request, sources);
        }
        let asked = self.not_here(&later, shape);
        let waiting = WaitingMatch {
            session,
            request,
            shape,
            deadline,
            sources,
            rest: later,
            asked,
            later: Vec::new(),
        };
        self.ask_for_match(waiting);
    }

    fn answer_match(&mut self, session: SessionId, request: RequestId, sources: Vec<Source>) {
        self.counters.matched(&sources);
        self.reply(session, request, Reply::Matched { sources });
    }

    /// Where on this node a block of a shape is readable.
    fn source_here(&self, key: &BlockKey, shape: ShapeId) -> Option<Source> {
        self.index.find(key).and_then(|entry| self.index.entry(entry).source(shape))
    }
}

/// The source of the replica that arrives soonest.
fn best_source(replicas: &[Replica]) -> Option<Source> {
    replicas.iter().map(|replica| peer_source(replica.tier)).min()
}

/// What a block is that came from a tier of a peer.
pub(super) fn peer_source(tier: Tier) -> Source {
    match tier {
        Tier::Dram => Source::PeerDram,
        Tier::Nvme => Source::PeerNvme,
    }
}

#[cfg(test)]
mod tests {
    use reprise_policy::NodeId;
    use reprise_policy::routing::LoadClass;

    use super::*;

    #[test]
    fn a_replica_in_dram_counts_before_one_on_nvme() {
        let replica = |tier| Replica { node: NodeId(1), tier, load: LoadClass::default() };
        assert_eq!(best_source(&[]), None);
        assert_eq!(best_source(&[replica(Tier::Nvme), replica(Tier::Dram)]), Some(Source::PeerDram));
        assert_eq!(best_source(&[replica(Tier::Nvme)]), Some(Source::PeerNvme));
    }
}
