//! Placement requests of an agent: the production code decides which member is asked for which keys, and what follows
//! an answer ([`OwnerQuery`]). Here are its calls.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{PlaceId, PlacementReason};
use reprise_agent_core::event::{Event, Placement};
use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::{BlockKey, Epoch, NodeId, Tick};

use crate::calls::Purpose;
use crate::environment::Environment;
use crate::link::{Link, LinkId};
use crate::links::{Links, Progress};
use crate::messages::{PlacementAnswer, PlacementRequest, Request};
use crate::network::Host;
use crate::outcomes::{Follow, Outcomes};
use crate::simulation::AgentStep;

/// The placement requests of one agent.
#[derive(Debug)]
pub(crate) struct PlacementRequests {
    node: usize,
    pub(crate) pending: BTreeMap<PlaceId, PendingPlacement>,
}

/// A placement request in progress.
#[derive(Debug)]
pub(crate) struct PendingPlacement {
    query: OwnerQuery<LinkId, Placement>,
    slot_bytes: u64,
    reason: PlacementReason,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
}

impl PlacementRequests {
    pub(crate) fn new(node: usize) -> PlacementRequests {
        PlacementRequests { node, pending: BTreeMap::new() }
    }

    pub(crate) fn start(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (place, keys, slot_bytes, reason): (PlaceId, Vec<BlockKey>, u64, PlacementReason),
        time: Duration,
    ) {
        let deadline = env.time(Host::Node(self.node)).after(time);
        let query = OwnerQuery::new(keys, Placement::Unanswered);
        self.pending.insert(place, PendingPlacement { query, slot_bytes, reason, deadline });
        env.count("questions of places");
        if self.ask(env, links, place) == Progress::Ends {
            // Deferred, because the core is still executing effects.
            env.later(self.node, Duration::ZERO, AgentStep::PlaceOver(place));
        }
    }

    /// Starts an attempt with the current map.
    fn ask(&mut self, env: &mut Environment, links: &mut Links, place: PlaceId) -> Progress {
        let pending = self.pending.get_mut(&place).expect("the request is in progress");
        let can_ask = |link: &Link| link.is_up() && link.granted().is_some();
        let next = links.ask(&mut pending.query, can_ask);
        self.carry_out(env, links, place, next)
    }

    fn carry_out(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        place: PlaceId,
        next: Next<LinkId>,
    ) -> Progress {
        let pending = &self.pending[&place];
        let time = pending.deadline.since(env.time(Host::Node(self.node)));
        match next {
            Next::Send(parts) => {
                for (link, part) in parts {
                    let granted = links.links[&link].granted().expect("only a registered link is asked");
                    let (holder, epoch) = (granted.node, granted.epoch);
                    let keys = pending.query.keys_of(&part);
                    let PendingPlacement { slot_bytes, reason, .. } = *pending;
                    let request = PlacementRequest { holder, epoch, keys, slot_bytes, reason };
                    let of = Purpose::Place { place, link, epoch, part };
                    links.call(env, (link, of), Request::Place(Arc::new(request)), time);
                }
                Progress::Waits
            }
            Next::Wait => Progress::Waits,
            Next::FetchMap(link) => links.fetch_map(env, (link, Purpose::LearnOfPlaces { place }), time),
            Next::Finish => Progress::Ends,
        }
    }

    /// Handles a member's answer to a part; `None`: it knows a newer registration.
    pub(crate) fn part_placed(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (place, link, epoch, part): (PlaceId, LinkId, Epoch, &Part),
        (answer, out): (Option<PlacementAnswer>, &mut Outcomes),
    ) -> Progress {
        let Some(PlacementAnswer { answers, elsewhere, map_epoch }) = answer else {
            links.fence(env, link, epoch, out);
            return self.part_failed(env, links, (place, part));
        };
        let Some(pending) = self.pending.get_mut(&place) else { return Progress::Waits };
        assert_eq!(answers.len(), part.indices.len(), "an answer for each key");
        let next = pending.query.answer(link, part, PartAnswer { answers, elsewhere, map_epoch });
        self.carry_out(env, links, place, next)
    }

    pub(crate) fn part_failed(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (place, part): (PlaceId, &Part),
    ) -> Progress {
        let Some(pending) = self.pending.get_mut(&place) else { return Progress::Waits };
        let next = pending.query.fail(part);
        self.carry_out(env, links, place, next)
    }

    /// Handles the arrival of a newer map. One that arrives at the deadline counts as not fetched.
    pub(crate) fn learned(&mut self, env: &mut Environment, links: &mut Links, place: PlaceId) -> Progress {
        let now = env.time(Host::Node(self.node));
        let Some(pending) = self.pending.get(&place) else { return Progress::Waits };
        if now >= pending.deadline { Progress::Ends } else { self.ask(env, links, place) }
    }

    /// Ends the request: the core gets the placements on reachable nodes.
    pub(crate) fn end(&mut self, place: PlaceId, is_reachable: impl Fn(NodeId) -> bool, out: &mut Outcomes) {
        let Some(PendingPlacement { query, reason, .. }) = self.pending.remove(&place) else { return };
        let keys = query.keys().to_vec();
        let Some(answers) = query.finish(is_reachable) else {
            out.next.push(Follow::Refused("refused in calm: unanswered"));
            return out.event(Event::PlaceFailed { place });
        };
        if answers.iter().any(|answer| matches!(answer, Placement::NoCapacity | Placement::Unanswered)) {
            out.next.push(Follow::Refused("refused in calm: nowhere"));
        }
        let enough = keys.iter().zip(&answers).filter(|(_, answer)| **answer == Placement::Enough);
        let enough: BTreeSet<BlockKey> = enough.map(|(key, _)| *key).collect();
        let answer = Event::PlaceAnswered { place, answers };
        out.next.push(match reason {
            PlacementReason::Move(to) => Follow::MoveAnswered { to, enough, answer },
            PlacementReason::Hot | PlacementReason::Drain => Follow::Event(answer),
        });
    }
}
