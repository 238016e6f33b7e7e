//! `Match`: how many leading blocks of a chain are available, and where.
//!
//! A match is answered at once if this node has the whole chain, or if its scope is local. Otherwise a first
//! lookup covers the first keys behind the local run that are missing here. Only if all of them are found, a
//! second lookup covers the rest. Most chains end early, so the rest is rarely looked up. The blocks on this
//! node may change in the meantime, so the answer is built from the index after the lookup.
//!
//! A match of all ranks is a match of a chain of parts: those of a block follow each other, so the leading run of parts
//! has all parts of its leading blocks.
//!
//! A block that is not under its own key counts if it can be copied from a public tenant. The directory is asked for both
//! keys.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, Layout};

use crate::cache::{Cache, RankClasses};
use crate::context::{Caller, Context};
use crate::effect::{Reply, Source};
use crate::event::{PublicKeys, Ranks, Replica, Scope};
use crate::limits::{LOOKUPS_MAX, MATCH_FIRST_KEYS, MATCH_KEYS_MAX};
use crate::load::Loads;
use crate::load::lookups::{Purpose, WaitingMatch};

/// Match of a session.
#[derive(Debug)]
pub(crate) struct MatchRequest {
    pub(crate) keys: Vec<BlockKey>,
    pub(crate) ranks: Ranks,
    pub(crate) position: Option<u32>,
    pub(crate) scope: Scope,
    pub(crate) public: Option<PublicKeys>,
}

/// Where the blocks of a match are on this node: under their own keys, or under those of a public tenant.
struct LocalSearch<'a> {
    cache: &'a Cache,
    classes: &'a RankClasses,
    public: Option<(&'a PublicKeys, Vec<Layout>)>,
}

impl<'a> LocalSearch<'a> {
    fn new(
        cache: &'a Cache,
        (caller, ranks): (Caller, Ranks),
        classes: &'a RankClasses,
        public: Option<&'a PublicKeys>,
    ) -> LocalSearch<'a> {
        let public = public.map(|public| (public, cache.rank_layouts(caller.size_class, ranks)));
        LocalSearch { cache, classes, public }
    }

    /// Source of the key at a position of the match on this node.
    fn source(&self, key: &BlockKey, position: usize) -> Option<Source> {
        let class = self.classes.at(position);
        let own = class.and_then(|class| self.cache.local_source(key, class));
        own.or_else(|| {
            let (public, layouts) = self.public.as_ref()?;
            let layout = &layouts[position % layouts.len()];
            self.cache.public_source(public.keys.get(position)?, (public.tenant, layout))
        })
    }

    /// Returns the indices of those keys that are not on this node. The first key has this position in the match.
    fn missing(&self, keys: &[BlockKey], first: usize) -> Vec<u32> {
        let is_absent = |(at, key): &(u32, &BlockKey)| self.source(key, first + *at as usize).is_none();
        (0..).zip(keys).filter(is_absent).map(|(at, _)| at).collect()
    }
}

impl Loads {
    /// Handles a `Match` of a session.
    pub(crate) fn match_keys(
        &mut self,
        cache: &mut Cache,
        cx: &mut Context,
        caller: Caller,
        MatchRequest { mut keys, ranks, position, scope, public }: MatchRequest,
    ) {
        if keys.len() > MATCH_KEYS_MAX {
            let text = format!("{} keys in one match: send at most {MATCH_KEYS_MAX}", keys.len());
            return cx.reply(caller, Reply::BadRequest(text));
        }
        let classes = cache.rank_classes(caller.size_class, ranks);
        if !keys.len().is_multiple_of(classes.ranks()) {
            let (keys, ranks) = (keys.len(), classes.ranks());
            let text = format!("{keys} keys in a match of {ranks} ranks: send {ranks} keys for each block");
            return cx.reply(caller, Reply::BadRequest(text));
        }
        self.counters.matches += 1;
        self.counters.match_keys += keys.len() as u64;
        let run = cache.leading_run(&keys, &classes);
        let (entries, mut sources): (Vec<EntryIndex>, Vec<Source>) = run.into_iter().unzip();
        cache.touch_matched(&entries, classes.ranks(), position);
        let public = public.filter(|public| self.public_tenant == Some(public.tenant));
        let search = LocalSearch::new(cache, (caller, ranks), &classes, public.as_ref());
        if search.public.is_some() {
            let rest = keys.iter().enumerate().skip(sources.len());
            sources.extend(rest.map_while(|(position, key)| search.source(key, position)));
        }
        if sources.len() == keys.len() || scope == Scope::Local || self.lookups.len() >= LOOKUPS_MAX {
            return self.answer_match(cx, caller, sources, &classes);
        }
        let mut rest = keys.split_off(sources.len());
        let mut queried = search.missing(&rest, sources.len());
        // For a short rest, one larger lookup is cheaper than a second one.
        let later = match queried.get(MATCH_FIRST_KEYS) {
            Some(end) if queried.len() > 2 * MATCH_FIRST_KEYS => rest.split_off(*end as usize),
            _ => Vec::new(),
        };
        if !later.is_empty() {
            queried.truncate(MATCH_FIRST_KEYS);
        }
        let deadline = cx.now.after(cx.settings.lookup_timeout);
        let waiting =
            WaitingMatch { caller, classes, deadline, sources, rest, queried, later, public, ranks };
        self.query_for_match(cache, cx, waiting);
    }

    fn query_for_match(&mut self, cache: &Cache, cx: &mut Context, waiting: WaitingMatch) {
        if waiting.queried.is_empty() {
            return self.finish_match(cache, cx, waiting, &[]);
        }
        let own = waiting.queried.iter().map(|at| waiting.rest[*at as usize]);
        let public = waiting.public.as_ref().map_or(&[][..], |public| &public.keys[..]);
        let known = waiting.sources.len();
        let of_public = |at: &u32| public.get(known + *at as usize).copied();
        let keys = own.chain(waiting.queried.iter().map_while(of_public)).collect();
        let timeout = waiting.deadline.since(cx.now);
        self.query_directory(cx, keys, Purpose::Match(waiting), timeout);
    }

    /// Handles the directory's answer for a match.
    pub(super) fn finish_match(
        &mut self,
        cache: &Cache,
        cx: &mut Context,
        waiting: WaitingMatch,
        found: &[Vec<Replica>],
    ) {
        let WaitingMatch { caller, classes, deadline, mut sources, rest, queried, later, public, ranks } =
            waiting;
        let public = public.filter(|public| self.public_tenant == Some(public.tenant));
        let search = LocalSearch::new(cache, (caller, ranks), &classes, public.as_ref());
        let known = sources.len();
        let mut answers = queried.iter().enumerate().peekable();
        for (at, key) in (0..).zip(&rest) {
            let answer = answers.next_if(|(_, queried)| **queried == at).map(|(answer, _)| answer);
            let replicas = |answer: usize| found.get(answer).and_then(|replicas| best_source(replicas));
            let elsewhere = || {
                let answer = answer?;
                let of_public = public.as_ref().and_then(|_| replicas(queried.len() + answer));
                replicas(answer).or(of_public)
            };
            let Some(source) = search.source(key, sources.len()).or_else(elsewhere) else { break };
            sources.push(source);
        }
        let is_whole = sources.len() == known + rest.len();
        if !is_whole || later.is_empty() || self.lookups.len() >= LOOKUPS_MAX || deadline <= cx.now {
            return self.answer_match(cx, caller, sources, &classes);
        }
        let queried = search.missing(&later, sources.len());
        let (rest, later) = (later, Vec::new());
        let waiting =
            WaitingMatch { caller, classes, deadline, sources, rest, queried, later, public, ranks };
        self.query_for_match(cache, cx, waiting);
    }

    /// Answers with the sources of a leading run of keys. A block counts if the run has its keys of all ranks, and is
    /// as far away as the farthest of its parts.
    fn answer_match(
        &mut self,
        cx: &mut Context,
        caller: Caller,
        mut sources: Vec<Source>,
        classes: &RankClasses,
    ) {
        if classes.ranks() > 1 {
            let blocks = sources.chunks_exact(classes.ranks());
            sources = blocks.filter_map(|parts| parts.iter().max().copied()).collect();
        }
        self.counters.matched(&sources);
        cx.reply(caller, Reply::Matched { sources });
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
