//! Lookups of an agent: the production code decides which member is asked for which keys
//! ([`OwnerQuery`]). Here are its calls.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/owner_query.rs` and `lookup.rs`.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::{Event, Replica};
use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::{BlockKey, NodeId, Tick};

use crate::calls::Purpose;
use crate::environment::Environment;
use crate::link::{Link, LinkId};
use crate::links::Links;
use crate::messages::{LookupAnswer, Request};
use crate::network::Host;
use crate::outcomes::Outcomes;
use crate::setup::CALL_TIMEOUT;
use crate::simulation::AgentStep;

/// The lookups of one agent.
#[derive(Debug)]
pub(crate) struct Lookups {
    node: usize,
    pub(crate) pending: BTreeMap<LookupId, PendingLookup>,
}

/// A lookup in progress.
#[derive(Debug)]
pub(crate) struct PendingLookup {
    query: OwnerQuery<LinkId, Vec<Replica>>,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
}

/// What follows an answer or a failure.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Progress {
    Waits,
    Ends,
}

impl Lookups {
    pub(crate) fn new(node: usize) -> Lookups {
        Lookups { node, pending: BTreeMap::new() }
    }

    pub(crate) fn start(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (lookup, keys): (LookupId, Vec<BlockKey>),
        time: Duration,
    ) {
        let deadline = env.time(Host::Node(self.node)).after(time);
        if !links.is_connected() {
            return env.later(self.node, Duration::ZERO, AgentStep::Event(Event::LookupFailed { lookup }));
        }
        let query = OwnerQuery::new(keys, Vec::new());
        self.pending.insert(lookup, PendingLookup { query, deadline });
        env.count("lookups");
        if !self.ask_owners(env, links, lookup) {
            // Deferred, because the core is still executing effects.
            env.later(self.node, Duration::ZERO, AgentStep::LookupOver(lookup));
        }
    }

    /// Sends a request to each owner of the keys; returns whether there are any.
    fn ask_owners(&mut self, env: &mut Environment, links: &mut Links, lookup: LookupId) -> bool {
        let now = env.time(Host::Node(self.node));
        let pending = self.pending.get_mut(&lookup).expect("the lookup is in progress");
        let parts = links.ask_owners(&mut pending.query, Link::is_up);
        let is_asked = !parts.is_empty();
        for (link, part) in parts {
            let keys = pending.query.keys_of(&part);
            let requester = links.links[&link].granted().map(|granted| granted.node);
            let of = Purpose::Lookup { lookup, link, part };
            let time = pending.deadline.since(now);
            links.call(env, (link, of), Request::Lookup { keys, requester }, time);
        }
        is_asked
    }

    pub(crate) fn part_found(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (lookup, link, part): (LookupId, LinkId, &Part),
        answered: LookupAnswer,
    ) -> Progress {
        if !answered.elsewhere.is_empty() {
            env.count("redirects");
        }
        let Some(pending) = self.pending.get_mut(&lookup) else { return Progress::Waits };
        let LookupAnswer { found, elsewhere, map_epoch, .. } = answered;
        assert_eq!(found.len(), part.indices.len(), "an answer for each key");
        pending.query.answer(link, part, PartAnswer { answers: found, elsewhere, map_epoch });
        self.advance(env, links, lookup)
    }

    pub(crate) fn part_failed(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (lookup, part): (LookupId, &Part),
    ) -> Progress {
        env.count("lookup parts unanswered");
        let Some(pending) = self.pending.get_mut(&lookup) else { return Progress::Waits };
        pending.query.fail(part);
        self.advance(env, links, lookup)
    }

    fn advance(&mut self, env: &mut Environment, links: &mut Links, lookup: LookupId) -> Progress {
        match self.pending[&lookup].query.next() {
            Next::Wait => Progress::Waits,
            Next::FetchMap(link) => self.learn(env, links, (lookup, link)),
            Next::Finish => Progress::Ends,
        }
    }

    /// Requests the newer map of a member.
    fn learn(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (lookup, link): (LookupId, LinkId),
    ) -> Progress {
        let now = env.time(Host::Node(self.node));
        let time = self.pending[&lookup].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !links.links.contains_key(&link) {
            return Progress::Ends;
        }
        env.count("maps learned");
        links.call(env, (link, Purpose::Learn { lookup }), Request::Members, time);
        Progress::Waits
    }

    /// Handles the arrival of the newer map.
    pub(crate) fn learned(&mut self, env: &mut Environment, links: &mut Links, lookup: LookupId) -> Progress {
        let now = env.time(Host::Node(self.node));
        let Some(pending) = self.pending.get(&lookup) else { return Progress::Waits };
        let is_over = now >= pending.deadline || !self.ask_owners(env, links, lookup);
        if is_over { Progress::Ends } else { Progress::Waits }
    }

    /// Ends the lookup: the core gets the replicas on reachable nodes.
    pub(crate) fn end(
        &mut self,
        lookup: LookupId,
        is_reachable: impl Fn(NodeId) -> bool,
        out: &mut Outcomes,
    ) {
        let Some(pending) = self.pending.remove(&lookup) else { return };
        let Some(mut found) = pending.query.finish() else {
            return out.event(Event::LookupFailed { lookup });
        };
        found.iter_mut().for_each(|replicas| replicas.retain(|replica| is_reachable(replica.node)));
        out.event(Event::LookupAnswered { lookup, found });
    }
}
