//! Placement requests of an agent: the production code decides which member is asked for which keys
//! ([`OwnerQuery`]). Here are its calls.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{PlaceId, PlacementReason};
use reprise_agent_core::event::{Event, Placement};
use reprise_agent_core::owner_query::{Next, OwnerQuery, Part, PartAnswer};
use reprise_policy::{BlockKey, Epoch, Tick};

use crate::client::{Purpose, ask_owners};
use crate::link::{Link, LinkId};
use crate::messages::{PlacementAnswer, PlacementRequest, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::simulation::{AgentStep, Simulation};

/// A placement request in progress.
#[derive(Debug)]
pub(crate) struct PendingPlacement {
    query: OwnerQuery<LinkId, Placement>,
    slot_bytes: u64,
    reason: PlacementReason,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
}

impl Simulation {
    pub(crate) fn start_placement(
        &mut self,
        node: usize,
        place: PlaceId,
        (keys, slot_bytes, reason): (Vec<BlockKey>, u64, PlacementReason),
        time: Duration,
    ) {
        let deadline = self.env.time(Host::Node(node)).after(time);
        let query = OwnerQuery::new(keys, Placement::Unanswered);
        let pending = PendingPlacement { query, slot_bytes, reason, deadline };
        self.client(node).placements.insert(place, pending);
        self.env.count("questions of places");
        if !self.ask_placers(node, place) {
            // Deferred, because the core is still executing effects.
            self.env.later(node, Duration::ZERO, AgentStep::PlaceOver(place));
        }
    }

    /// Sends a request to each owner of the keys; returns whether there are any.
    fn ask_placers(&mut self, node: usize, place: PlaceId) -> bool {
        let client = self.client(node);
        let pending = client.placements.get_mut(&place).expect("the request is in progress");
        let is_up = |link: &Link| link.is_up() && link.granted().is_some();
        let parts = ask_owners(client.members.routes().map(|routes| &**routes), &mut pending.query, |link| {
            client.links.get(&link).is_some_and(is_up)
        });
        let is_asked = !parts.is_empty();
        for (link, part) in parts {
            self.ask_placer(node, place, link, part);
        }
        is_asked
    }

    fn ask_placer(&mut self, node: usize, place: PlaceId, link: LinkId, part: Part) {
        let line = self.link_line(node, link);
        let now = self.env.time(Host::Node(node));
        let client = self.client(node);
        let granted = client.links[&link].granted().expect("only a registered link sends requests");
        let pending = &client.placements[&place];
        let keys = pending.query.keys_of(&part);
        let (slot_bytes, reason) = (pending.slot_bytes, pending.reason);
        let request =
            PlacementRequest { holder: granted.node, epoch: granted.epoch, keys, slot_bytes, reason };
        let time = pending.deadline.since(now);
        let of = Purpose::Place { place, link, epoch: granted.epoch, part };
        self.call(node, (line, of), Request::Place(Arc::new(request)), time);
    }

    /// Handles a member's answer to a part; `None`: it knows a newer registration.
    pub(crate) fn part_placed(
        &mut self,
        node: usize,
        (place, link, epoch): (PlaceId, LinkId, Epoch),
        part: &Part,
        answer: Option<PlacementAnswer>,
    ) {
        let Some(PlacementAnswer { answers, elsewhere, map_epoch }) = answer else {
            self.fence(node, link, epoch);
            return self.place_part_over(node, place, part);
        };
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        assert_eq!(answers.len(), part.indices.len(), "an answer for each key");
        pending.query.answer(link, part, PartAnswer { answers, elsewhere, map_epoch });
        self.advance_placement(node, place);
    }

    pub(crate) fn place_part_over(&mut self, node: usize, place: PlaceId, part: &Part) {
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        pending.query.fail(part);
        self.advance_placement(node, place);
    }

    fn advance_placement(&mut self, node: usize, place: PlaceId) {
        match self.client(node).placements[&place].query.next() {
            Next::Wait => {}
            Next::FetchMap(link) => self.learn_of_places(node, place, link),
            Next::Finish => self.place_over(node, place),
        }
    }

    /// Requests the newer map of a member.
    fn learn_of_places(&mut self, node: usize, place: PlaceId, link: LinkId) {
        let now = self.env.time(Host::Node(node));
        let client = self.client(node);
        let time = client.placements[&place].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !client.links.contains_key(&link) {
            return self.place_over(node, place);
        }
        let line = self.link_line(node, link);
        self.call(node, (line, Purpose::LearnOfPlaces { place }), Request::Members, time);
    }

    /// Handles the arrival of the newer map.
    pub(crate) fn learned_of_places(&mut self, node: usize, place: PlaceId) {
        let now = self.env.time(Host::Node(node));
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        if now >= pending.deadline || !self.ask_placers(node, place) {
            self.place_over(node, place);
        }
    }

    /// Ends the request. A node without a known address cannot get offers.
    pub(crate) fn place_over(&mut self, node: usize, place: PlaceId) {
        let Some(PendingPlacement { query, reason, .. }) = self.client(node).placements.remove(&place) else {
            return;
        };
        let keys = query.keys().to_vec();
        let Some(mut answers) = query.finish() else {
            self.note_refusal(node, "refused in calm: unanswered");
            return self.apply(node, Event::PlaceFailed { place });
        };
        let client = self.client(node);
        for answer in &mut answers {
            if matches!(answer, Placement::To(to) if client.host_of(*to).is_none()) {
                *answer = Placement::Unanswered;
            }
        }
        if answers.iter().any(|answer| matches!(answer, Placement::NoCapacity | Placement::Unanswered)) {
            self.note_refusal(node, "refused in calm: nowhere");
        }
        let enough = keys.iter().zip(&answers).filter(|(_, answer)| **answer == Placement::Enough);
        let enough: BTreeSet<BlockKey> = enough.map(|(key, _)| *key).collect();
        self.placed(node, reason, &enough, Event::PlaceAnswered { place, answers });
    }
}
