//! Lookups of an agent: the production code decides which member is asked for which keys, and what follows an answer
//! ([`OwnerQuery`]). Here are its calls.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::{Event, Replica};
use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::{BlockKey, NodeId, Tick};

use crate::calls::Purpose;
use crate::environment::Environment;
use crate::link::{Link, LinkId};
use crate::links::{Links, Progress};
use crate::messages::{LookupAnswer, Request};
use crate::network::Host;
use crate::outcomes::Outcomes;
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
        if self.ask(env, links, lookup) == Progress::Ends {
            // Deferred, because the core is still executing effects.
            env.later(self.node, Duration::ZERO, AgentStep::LookupOver(lookup));
        }
    }

    /// Starts an attempt with the current map.
    fn ask(&mut self, env: &mut Environment, links: &mut Links, lookup: LookupId) -> Progress {
        let pending = self.pending.get_mut(&lookup).expect("the lookup is in progress");
        let next = links.ask(&mut pending.query, Link::is_up);
        self.carry_out(env, links, lookup, next)
    }

    fn carry_out(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        lookup: LookupId,
        next: Next<LinkId>,
    ) -> Progress {
        let pending = &self.pending[&lookup];
        let time = pending.deadline.since(env.time(Host::Node(self.node)));
        match next {
            Next::Send(parts) => {
                for (link, part) in parts {
                    let keys = pending.query.keys_of(&part);
                    let requester = links.links[&link].granted().map(|granted| granted.node);
                    let of = Purpose::Lookup { lookup, link, part };
                    links.call(env, (link, of), Request::Lookup { keys, requester }, time);
                }
                Progress::Waits
            }
            Next::Wait => Progress::Waits,
            Next::FetchMap(link) => {
                let progress = links.fetch_map(env, (link, Purpose::Learn { lookup }), time);
                if progress == Progress::Waits {
                    env.count("maps learned");
                }
                progress
            }
            Next::Finish => Progress::Ends,
        }
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
        let next = pending.query.answer(link, part, PartAnswer { answers: found, elsewhere, map_epoch });
        self.carry_out(env, links, lookup, next)
    }

    pub(crate) fn part_failed(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (lookup, part): (LookupId, &Part),
    ) -> Progress {
        env.count("lookup parts unanswered");
        let Some(pending) = self.pending.get_mut(&lookup) else { return Progress::Waits };
        let next = pending.query.fail(part);
        self.carry_out(env, links, lookup, next)
    }

    /// Handles the arrival of a newer map. One that arrives at the deadline counts as not fetched.
    pub(crate) fn learned(&mut self, env: &mut Environment, links: &mut Links, lookup: LookupId) -> Progress {
        let now = env.time(Host::Node(self.node));
        let Some(pending) = self.pending.get(&lookup) else { return Progress::Waits };
        if now >= pending.deadline { Progress::Ends } else { self.ask(env, links, lookup) }
    }

    /// Ends the lookup: the core gets the replicas on reachable nodes.
    pub(crate) fn end(
        &mut self,
        lookup: LookupId,
        is_reachable: impl Fn(NodeId) -> bool,
        out: &mut Outcomes,
    ) {
        let Some(pending) = self.pending.remove(&lookup) else { return };
        out.event(match pending.query.finish(is_reachable) {
            Some(found) => Event::LookupAnswered { lookup, found },
            None => Event::LookupFailed { lookup },
        });
    }
}
