//! Placement requests of an agent: the production code decides which member is asked for which keys
//! ([`OwnerQuery`]). Here are its calls.
//!
//! The outputs are carried out in the order of `node-agent/src/directory/owner_query.rs` and `placement.rs`.

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
use crate::links::Links;
use crate::lookups::Progress;
use crate::messages::{PlacementAnswer, PlacementRequest, Request};
use crate::network::Host;
use crate::outcomes::{Follow, Outcomes};
use crate::setup::CALL_TIMEOUT;
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
        if !self.ask_owners(env, links, place) {
            // Deferred, because the core is still executing effects.
            env.later(self.node, Duration::ZERO, AgentStep::PlaceOver(place));
        }
    }

    /// Sends a request to each owner of the keys; returns whether there are any.
    fn ask_owners(&mut self, env: &mut Environment, links: &mut Links, place: PlaceId) -> bool {
        let now = env.time(Host::Node(self.node));
        let pending = self.pending.get_mut(&place).expect("the request is in progress");
        let is_up = |link: &Link| link.is_up() && link.granted().is_some();
        let parts = links.ask_owners(&mut pending.query, is_up);
        let is_asked = !parts.is_empty();
        let (slot_bytes, reason) = (pending.slot_bytes, pending.reason);
        for (link, part) in parts {
            let granted = links.links[&link].granted().expect("only a registered link sends requests");
            let keys = pending.query.keys_of(&part);
            let request =
                PlacementRequest { holder: granted.node, epoch: granted.epoch, keys, slot_bytes, reason };
            let time = pending.deadline.since(now);
            let of = Purpose::Place { place, link, epoch: granted.epoch, part };
            links.call(env, (link, of), Request::Place(Arc::new(request)), time);
        }
        is_asked
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
        pending.query.answer(link, part, PartAnswer { answers, elsewhere, map_epoch });
        self.advance(env, links, place)
    }

    pub(crate) fn part_failed(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (place, part): (PlaceId, &Part),
    ) -> Progress {
        let Some(pending) = self.pending.get_mut(&place) else { return Progress::Waits };
        pending.query.fail(part);
        self.advance(env, links, place)
    }

    fn advance(&mut self, env: &mut Environment, links: &mut Links, place: PlaceId) -> Progress {
        match self.pending[&place].query.next() {
            Next::Wait => Progress::Waits,
            Next::FetchMap(link) => self.learn(env, links, (place, link)),
            Next::Finish => Progress::Ends,
        }
    }

    /// Requests the newer map of a member.
    fn learn(
        &mut self,
        env: &mut Environment,
        links: &mut Links,
        (place, link): (PlaceId, LinkId),
    ) -> Progress {
        let now = env.time(Host::Node(self.node));
        let time = self.pending[&place].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !links.links.contains_key(&link) {
            return Progress::Ends;
        }
        links.call(env, (link, Purpose::LearnOfPlaces { place }), Request::Members, time);
        Progress::Waits
    }

    /// Handles the arrival of the newer map.
    pub(crate) fn learned(&mut self, env: &mut Environment, links: &mut Links, place: PlaceId) -> Progress {
        let now = env.time(Host::Node(self.node));
        let Some(pending) = self.pending.get(&place) else { return Progress::Waits };
        let is_over = now >= pending.deadline || !self.ask_owners(env, links, place);
        if is_over { Progress::Ends } else { Progress::Waits }
    }

    /// Ends the request. A node without a known address cannot get offers.
    pub(crate) fn end(&mut self, place: PlaceId, is_reachable: impl Fn(NodeId) -> bool, out: &mut Outcomes) {
        let Some(PendingPlacement { query, reason, .. }) = self.pending.remove(&place) else { return };
        let keys = query.keys().to_vec();
        let Some(mut answers) = query.finish() else {
            out.next.push(Follow::Refused("refused in calm: unanswered"));
            return out.event(Event::PlaceFailed { place });
        };
        for answer in &mut answers {
            if matches!(answer, Placement::To(to) if !is_reachable(*to)) {
                *answer = Placement::Unanswered;
            }
        }
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
