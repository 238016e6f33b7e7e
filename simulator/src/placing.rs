//! Questions of an agent where further replicas of blocks go: to the members that own the keys' slots, as lookups go.
//!
//! As `node-agent/src/directory/placing.rs`: what nobody answers is said to be unanswered, and a member whose map is newer is
//! asked for it once.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use reprise_agent_core::effect::{PlaceId, PlaceReason};
use reprise_agent_core::event::{Event, Placement};
use reprise_policy::{BlockKey, Epoch, Tick};

use crate::client::Purpose;
use crate::link::LinkId;
use crate::messages::{PlaceAnswer, PlaceQuestion, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::world::{Local, World};

/// Members asked about one key at the most.
const ATTEMPTS: u32 = 2;

/// A question that is under way.
#[derive(Debug)]
pub(crate) struct Placing {
    keys: Vec<BlockKey>,
    slot_bytes: u64,
    reason: PlaceReason,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
    answers: Vec<Placement>,
    answered: bool,
    attempt: u32,
    /// Parts that are not answered.
    parts: usize,
    /// Places of keys that were another's.
    left: Vec<u32>,
    /// The map by which it was routed last, and who has a newer one.
    routed: Epoch,
    newer: Option<LinkId>,
}

impl World {
    pub(crate) fn ask_where(
        &mut self,
        node: usize,
        place: PlaceId,
        (keys, slot_bytes, reason): (Vec<BlockKey>, u64, PlaceReason),
        time: Duration,
    ) {
        let deadline = self.time(Host::Node(node)).after(time);
        let places: Vec<u32> = (0..keys.len() as u32).collect();
        let placing = Placing {
            answers: vec![Placement::Unanswered; keys.len()],
            keys,
            slot_bytes,
            reason,
            deadline,
            answered: false,
            attempt: 0,
            parts: 0,
            left: Vec::new(),
            routed: Epoch(0),
            newer: None,
        };
        self.client(node).placings.insert(place, placing);
        self.count("questions of places");
        self.ask_placers(node, place, &places);
    }

    /// Asks each owner of the keys at these places, all at once.
    fn ask_placers(&mut self, node: usize, place: PlaceId, places: &[u32]) {
        let client = self.client(node);
        let placing = client.placings.get_mut(&place).expect("it is under way");
        (placing.attempt, placing.newer) = (placing.attempt + 1, None);
        let mut by_owner: BTreeMap<LinkId, Vec<u32>> = BTreeMap::new();
        if let Some(routes) = &client.routes {
            placing.routed = routes.epoch();
            for at in places {
                if let Some(link) = routes.owner(&placing.keys[*at as usize]) {
                    by_owner.entry(link).or_default().push(*at);
                }
            }
        }
        by_owner
            .retain(|link, _| client.links.get(link).is_some_and(|link| link.up && link.granted.is_some()));
        placing.parts = by_owner.len();
        if by_owner.is_empty() {
            // Not while the core speaks.
            return self.later(node, Duration::ZERO, Local::PlaceOver(place));
        }
        for (link, places) in by_owner {
            self.ask_placer(node, place, link, places);
        }
    }

    fn ask_placer(&mut self, node: usize, place: PlaceId, link: LinkId, places: Vec<u32>) {
        let line = self.link_line(node, link);
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let granted = client.links[&link].granted.expect("only who is registered asks");
        let placing = &client.placings[&place];
        let keys = places.iter().map(|at| placing.keys[*at as usize]).collect();
        let (slot_bytes, reason) = (placing.slot_bytes, placing.reason);
        let question = PlaceQuestion { holder: granted.node, epoch: granted.epoch, keys, slot_bytes, reason };
        let time = placing.deadline.since(now);
        let of = Purpose::Place { place, link, epoch: granted.epoch, places };
        self.call(node, (line, of), Request::Place(Arc::new(question)), time);
    }

    /// A member has answered its part; `None`: it knows a newer registration.
    pub(crate) fn part_placed(
        &mut self,
        node: usize,
        of: (PlaceId, LinkId, Epoch),
        places: &[u32],
        answer: Option<PlaceAnswer>,
    ) {
        let (place, link, epoch) = of;
        let Some(answer) = answer else {
            self.lose_registration(node, link, epoch);
            return self.place_part_over(node, place);
        };
        let Some(placing) = self.client(node).placings.get_mut(&place) else { return };
        assert_eq!(answer.answers.len(), places.len(), "an answer for each key");
        placing.answered = true;
        for (at, answer) in places.iter().zip(answer.answers) {
            placing.answers[*at as usize] = answer;
        }
        for at in &answer.elsewhere {
            placing.left.push(places[*at as usize]);
            placing.answers[places[*at as usize] as usize] = Placement::Unanswered;
        }
        if !answer.elsewhere.is_empty() && answer.map_epoch > placing.routed {
            placing.newer = Some(link);
        }
        self.place_part_over(node, place);
    }

    pub(crate) fn place_part_over(&mut self, node: usize, place: PlaceId) {
        let Some(placing) = self.client(node).placings.get_mut(&place) else { return };
        placing.parts -= 1;
        if placing.parts > 0 {
            return;
        }
        match placing.newer.filter(|_| !placing.left.is_empty() && placing.attempt < ATTEMPTS) {
            Some(link) => self.learn_of_places(node, place, link),
            None => self.place_over(node, place),
        }
    }

    /// Asks a member whose map is newer for it.
    fn learn_of_places(&mut self, node: usize, place: PlaceId, link: LinkId) {
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let time = client.placings[&place].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !client.links.contains_key(&link) {
            return self.place_over(node, place);
        }
        let line = self.link_line(node, link);
        self.call(node, (line, Purpose::LearnOfPlaces { place }), Request::Members, time);
    }

    /// The newer map is there.
    pub(crate) fn learned_of_places(&mut self, node: usize, place: PlaceId) {
        let now = self.time(Host::Node(node));
        let Some(placing) = self.client(node).placings.get_mut(&place) else { return };
        if now >= placing.deadline {
            return self.place_over(node, place);
        }
        let left = std::mem::take(&mut placing.left);
        self.ask_placers(node, place, &left);
    }

    /// It has come to its end. A node whose address is not known can be offered nothing.
    pub(crate) fn place_over(&mut self, node: usize, place: PlaceId) {
        let Some(placing) = self.client(node).placings.remove(&place) else { return };
        if !placing.answered {
            self.note_refusal(node, "refused in calm: unanswered");
            return self.apply(node, Event::PlaceFailed { place });
        }
        let client = self.client(node);
        let mut answers = placing.answers;
        for answer in &mut answers {
            if matches!(answer, Placement::To(to) if client.host_of(*to).is_none()) {
                *answer = Placement::Unanswered;
            }
        }
        if answers.iter().any(|answer| matches!(answer, Placement::Nowhere | Placement::Unanswered)) {
            self.note_refusal(node, "refused in calm: nowhere");
        }
        let enough = placing.keys.iter().zip(&answers).filter(|(_, answer)| **answer == Placement::Enough);
        let enough: BTreeSet<BlockKey> = enough.map(|(key, _)| *key).collect();
        self.placed(node, placing.reason, &enough, Event::Placed { place, answers });
    }
}
