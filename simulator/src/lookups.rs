//! Lookups of an agent: the production code decides which member is asked for which keys
//! ([`OwnerQuery`]). Here are its calls.

use std::time::Duration;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::{Event, Replica};
use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::{BlockKey, Tick};

use crate::client::{Purpose, ask_owners};
use crate::link::{Link, LinkId};
use crate::messages::{LookupAnswer, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::simulation::{AgentStep, Simulation};

/// A lookup in progress.
#[derive(Debug)]
pub(crate) struct PendingLookup {
    query: OwnerQuery<LinkId, Vec<Replica>>,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
}

impl Simulation {
    pub(crate) fn start_lookup(
        &mut self,
        node: usize,
        lookup: LookupId,
        keys: Vec<BlockKey>,
        time: Duration,
    ) {
        let deadline = self.env.time(Host::Node(node)).after(time);
        let client = self.client(node);
        if !client.is_connected() {
            return self.env.later(node, Duration::ZERO, AgentStep::Event(Event::LookupFailed { lookup }));
        }
        let query = OwnerQuery::new(keys, Vec::new());
        client.lookups.insert(lookup, PendingLookup { query, deadline });
        self.env.count("lookups");
        if !self.ask_owners(node, lookup) {
            // Deferred, because the core is still executing effects.
            self.env.later(node, Duration::ZERO, AgentStep::LookupOver(lookup));
        }
    }

    /// Sends a request to each owner of the keys; returns whether there are any.
    fn ask_owners(&mut self, node: usize, lookup: LookupId) -> bool {
        let client = self.client(node);
        let pending = client.lookups.get_mut(&lookup).expect("the lookup is in progress");
        let parts = ask_owners(client.members.routes().map(|routes| &**routes), &mut pending.query, |link| {
            client.links.get(&link).is_some_and(Link::is_up)
        });
        let is_asked = !parts.is_empty();
        for (link, part) in parts {
            self.ask_owner(node, lookup, link, part);
        }
        is_asked
    }

    fn ask_owner(&mut self, node: usize, lookup: LookupId, link: LinkId, part: Part) {
        let line = self.link_line(node, link);
        let now = self.env.time(Host::Node(node));
        let client = self.client(node);
        let (pending, granted) = (&client.lookups[&lookup], client.links[&link].granted());
        let keys = pending.query.keys_of(&part);
        let (time, requester) = (pending.deadline.since(now), granted.map(|granted| granted.node));
        let of = Purpose::Lookup { lookup, link, part };
        self.call(node, (line, of), Request::Lookup { keys, requester }, time);
    }

    pub(crate) fn part_found(
        &mut self,
        node: usize,
        (lookup, link): (LookupId, LinkId),
        part: &Part,
        answered: LookupAnswer,
    ) {
        if !answered.elsewhere.is_empty() {
            self.env.count("redirects");
        }
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        let LookupAnswer { found, elsewhere, map_epoch, .. } = answered;
        assert_eq!(found.len(), part.indices.len(), "an answer for each key");
        pending.query.answer(link, part, PartAnswer { answers: found, elsewhere, map_epoch });
        self.advance_lookup(node, lookup);
    }

    pub(crate) fn part_failed(&mut self, node: usize, lookup: LookupId, part: &Part) {
        self.env.count("lookup parts unanswered");
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        pending.query.fail(part);
        self.advance_lookup(node, lookup);
    }

    fn advance_lookup(&mut self, node: usize, lookup: LookupId) {
        match self.client(node).lookups[&lookup].query.next() {
            Next::Wait => {}
            Next::FetchMap(link) => self.learn(node, lookup, link),
            Next::Finish => self.lookup_over(node, lookup),
        }
    }

    /// Requests the newer map of a member.
    fn learn(&mut self, node: usize, lookup: LookupId, link: LinkId) {
        let now = self.env.time(Host::Node(node));
        let client = self.client(node);
        let time = client.lookups[&lookup].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !client.links.contains_key(&link) {
            return self.lookup_over(node, lookup);
        }
        self.env.count("maps learned");
        let line = self.link_line(node, link);
        self.call(node, (line, Purpose::Learn { lookup }), Request::Members, time);
    }

    /// Handles the arrival of the newer map.
    pub(crate) fn learned(&mut self, node: usize, lookup: LookupId) {
        let now = self.env.time(Host::Node(node));
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        if now >= pending.deadline || !self.ask_owners(node, lookup) {
            self.lookup_over(node, lookup);
        }
    }

    /// Ends the lookup: the core gets the replicas on reachable nodes.
    pub(crate) fn lookup_over(&mut self, node: usize, lookup: LookupId) {
        let client = self.client(node);
        let Some(pending) = client.lookups.remove(&lookup) else { return };
        let Some(mut found) = pending.query.finish() else {
            return self.apply(node, Event::LookupFailed { lookup });
        };
        for replicas in &mut found {
            replicas.retain(|replica| client.host_of(replica.node).is_some());
        }
        self.apply(node, Event::LookupAnswered { lookup, found });
    }
}
