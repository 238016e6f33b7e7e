//! Placement requests of an agent, to the members that own the keys' slots; they are routed like lookups.
//!
//! As `node-agent/src/directory/placement.rs`: keys without an answer are reported as unanswered, and the
//! agent requests the map of a member with a newer one once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{PlaceId, PlaceReason};
use reprise_agent_core::event::{Event, Placement};
use reprise_policy::{BlockKey, Epoch, Tick};

use crate::client::Purpose;
use crate::link::LinkId;
use crate::messages::{PlacementAnswer, PlacementRequest, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::simulation::{AgentStep, Simulation};

/// Maximum number of members that are asked about one key.
const ATTEMPTS: u32 = 2;

/// A placement request in progress.
#[derive(Debug)]
pub(crate) struct PendingPlacement {
    keys: Vec<BlockKey>,
    slot_bytes: u64,
    reason: PlaceReason,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
    answers: Vec<Placement>,
    answered: bool,
    attempt: u32,
    /// Number of parts without an answer.
    parts: usize,
    /// Indices of keys whose owner has changed.
    rerouted: Vec<u32>,
    /// Epoch of the map that routed the request last, and the member with a newer one.
    routed: Epoch,
    newer: Option<LinkId>,
}

impl Simulation {
    pub(crate) fn start_placement(
        &mut self,
        node: usize,
        place: PlaceId,
        (keys, slot_bytes, reason): (Vec<BlockKey>, u64, PlaceReason),
        time: Duration,
    ) {
        let deadline = self.time(Host::Node(node)).after(time);
        let places: Vec<u32> = (0..keys.len() as u32).collect();
        let pending = PendingPlacement {
            answers: vec![Placement::Unanswered; keys.len()],
            keys,
            slot_bytes,
            reason,
            deadline,
            answered: false,
            attempt: 0,
            parts: 0,
            rerouted: Vec::new(),
            routed: Epoch(0),
            newer: None,
        };
        self.client(node).placements.insert(place, pending);
        self.count("questions of places");
        self.ask_placers(node, place, &places);
    }

    /// Sends a request to each owner of the keys at these indices.
    fn ask_placers(&mut self, node: usize, place: PlaceId, places: &[u32]) {
        let client = self.client(node);
        let pending = client.placements.get_mut(&place).expect("the request is in progress");
        (pending.attempt, pending.newer) = (pending.attempt + 1, None);
        let mut by_owner: BTreeMap<LinkId, Vec<u32>> = BTreeMap::new();
        if let Some(routes) = &client.routes {
            pending.routed = routes.epoch();
            for at in places {
                if let Some(link) = routes.owner(&pending.keys[*at as usize]) {
                    by_owner.entry(link).or_default().push(*at);
                }
            }
        }
        by_owner
            .retain(|link, _| client.links.get(link).is_some_and(|link| link.up && link.granted.is_some()));
        pending.parts = by_owner.len();
        if by_owner.is_empty() {
            // Deferred, because the core is still executing effects.
            return self.later(node, Duration::ZERO, AgentStep::PlaceOver(place));
        }
        for (link, places) in by_owner {
            self.ask_placer(node, place, link, places);
        }
    }

    fn ask_placer(&mut self, node: usize, place: PlaceId, link: LinkId, places: Vec<u32>) {
        let line = self.link_line(node, link);
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let granted = client.links[&link].granted.expect("only a registered link sends requests");
        let pending = &client.placements[&place];
        let keys = places.iter().map(|at| pending.keys[*at as usize]).collect();
        let (slot_bytes, reason) = (pending.slot_bytes, pending.reason);
        let request =
            PlacementRequest { holder: granted.node, epoch: granted.epoch, keys, slot_bytes, reason };
        let time = pending.deadline.since(now);
        let of = Purpose::Place { place, link, epoch: granted.epoch, places };
        self.call(node, (line, of), Request::Place(Arc::new(request)), time);
    }

    /// Handles a member's answer to a part; `None`: it knows a newer registration.
    pub(crate) fn part_placed(
        &mut self,
        node: usize,
        of: (PlaceId, LinkId, Epoch),
        places: &[u32],
        answer: Option<PlacementAnswer>,
    ) {
        let (place, link, epoch) = of;
        let Some(answer) = answer else {
            self.lose_registration(node, link, epoch);
            return self.place_part_over(node, place);
        };
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        assert_eq!(answer.answers.len(), places.len(), "an answer for each key");
        pending.answered = true;
        for (at, answer) in places.iter().zip(answer.answers) {
            pending.answers[*at as usize] = answer;
        }
        for at in &answer.elsewhere {
            pending.rerouted.push(places[*at as usize]);
            pending.answers[places[*at as usize] as usize] = Placement::Unanswered;
        }
        if !answer.elsewhere.is_empty() && answer.map_epoch > pending.routed {
            pending.newer = Some(link);
        }
        self.place_part_over(node, place);
    }

    pub(crate) fn place_part_over(&mut self, node: usize, place: PlaceId) {
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        pending.parts -= 1;
        if pending.parts > 0 {
            return;
        }
        match pending.newer.filter(|_| !pending.rerouted.is_empty() && pending.attempt < ATTEMPTS) {
            Some(link) => self.learn_of_places(node, place, link),
            None => self.place_over(node, place),
        }
    }

    /// Requests the newer map of a member.
    fn learn_of_places(&mut self, node: usize, place: PlaceId, link: LinkId) {
        let now = self.time(Host::Node(node));
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
        let now = self.time(Host::Node(node));
        let Some(pending) = self.client(node).placements.get_mut(&place) else { return };
        if now >= pending.deadline {
            return self.place_over(node, place);
        }
        let rerouted = std::mem::take(&mut pending.rerouted);
        self.ask_placers(node, place, &rerouted);
    }

    /// Ends the request. A node without a known address cannot get offers.
    pub(crate) fn place_over(&mut self, node: usize, place: PlaceId) {
        let Some(pending) = self.client(node).placements.remove(&place) else { return };
        if !pending.answered {
            self.note_refusal(node, "refused in calm: unanswered");
            return self.apply(node, Event::PlaceFailed { place });
        }
        let client = self.client(node);
        let mut answers = pending.answers;
        for answer in &mut answers {
            if matches!(answer, Placement::To(to) if client.host_of(*to).is_none()) {
                *answer = Placement::Unanswered;
            }
        }
        if answers.iter().any(|answer| matches!(answer, Placement::NoCapacity | Placement::Unanswered)) {
            self.note_refusal(node, "refused in calm: nowhere");
        }
        let enough = pending.keys.iter().zip(&answers).filter(|(_, answer)| **answer == Placement::Enough);
        let enough: BTreeSet<BlockKey> = enough.map(|(key, _)| *key).collect();
        self.placed(node, pending.reason, &enough, Event::PlaceAnswered { place, answers });
    }
}
