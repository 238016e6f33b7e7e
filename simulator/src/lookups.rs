//! Lookups of an agent: each key is looked up at the member that owns its slot, and the answers are combined.
//!
//! As `node-agent/src/directory/lookup.rs`. If a member has a newer map than the one that routed the request,
//! the agent requests that map and looks up those keys once more. Keys without an answer are misses.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::{Event, Replica};
use reprise_policy::{BlockKey, Epoch, Tick};

use crate::client::Purpose;
use crate::link::LinkId;
use crate::messages::{LookupAnswer, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::simulation::{AgentStep, Simulation};

/// Maximum number of members that are asked about one key.
const ATTEMPTS: u32 = 2;

/// A lookup in progress.
#[derive(Debug)]
pub(crate) struct PendingLookup {
    keys: Vec<BlockKey>,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
    found: Vec<Vec<Replica>>,
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
    pub(crate) fn start_lookup(
        &mut self,
        node: usize,
        lookup: LookupId,
        keys: Vec<BlockKey>,
        time: Duration,
    ) {
        let deadline = self.time(Host::Node(node)).after(time);
        let client = self.client(node);
        if !client.is_connected() {
            return self.later(node, Duration::ZERO, AgentStep::Event(Event::LookupFailed { lookup }));
        }
        let places: Vec<u32> = (0..keys.len() as u32).collect();
        let pending = PendingLookup {
            found: vec![Vec::new(); keys.len()],
            keys,
            deadline,
            answered: false,
            attempt: 0,
            parts: 0,
            rerouted: Vec::new(),
            routed: Epoch(0),
            newer: None,
        };
        client.lookups.insert(lookup, pending);
        self.count("lookups");
        self.ask_owners(node, lookup, &places);
    }

    /// Sends a request to each owner of the keys at these indices.
    fn ask_owners(&mut self, node: usize, lookup: LookupId, places: &[u32]) {
        let client = self.client(node);
        let pending = client.lookups.get_mut(&lookup).expect("the lookup is in progress");
        (pending.attempt, pending.newer) = (pending.attempt + 1, None);
        let mut by_owner: BTreeMap<LinkId, Vec<u32>> = BTreeMap::new();
        if let Some(routes) = &client.routes {
            pending.routed = routes.epoch();
            for place in places {
                if let Some(link) = routes.owner(&pending.keys[*place as usize]) {
                    by_owner.entry(link).or_default().push(*place);
                }
            }
        }
        by_owner.retain(|link, _| client.links.get(link).is_some_and(|link| link.up));
        pending.parts = by_owner.len();
        if by_owner.is_empty() {
            // Deferred, because the core is still executing effects.
            return self.later(node, Duration::ZERO, AgentStep::LookupOver(lookup));
        }
        for (link, places) in by_owner {
            self.ask_owner(node, lookup, link, places);
        }
    }

    fn ask_owner(&mut self, node: usize, lookup: LookupId, link: LinkId, places: Vec<u32>) {
        let line = self.link_line(node, link);
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let (pending, granted) = (&client.lookups[&lookup], client.links[&link].granted);
        let keys = places.iter().map(|place| pending.keys[*place as usize]).collect();
        let (time, requester) = (pending.deadline.since(now), granted.map(|granted| granted.node));
        let of = Purpose::Lookup { lookup, link, places };
        self.call(node, (line, of), Request::Lookup { keys, requester }, time);
    }

    pub(crate) fn part_found(
        &mut self,
        node: usize,
        of: (LookupId, LinkId),
        places: &[u32],
        answered: LookupAnswer,
    ) {
        let (lookup, link) = of;
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        assert_eq!(answered.found.len(), places.len(), "an answer for each key");
        pending.answered = true;
        pending.rerouted.extend(answered.elsewhere.iter().map(|at| places[*at as usize]));
        if !answered.elsewhere.is_empty() && answered.map_epoch > pending.routed {
            pending.newer = Some(link);
        }
        for (place, replicas) in places.iter().zip(answered.found) {
            pending.found[*place as usize] = replicas;
        }
        if !answered.elsewhere.is_empty() {
            self.count("redirects");
        }
        self.part_over(node, lookup);
    }

    pub(crate) fn part_failed(&mut self, node: usize, lookup: LookupId) {
        self.count("lookup parts unanswered");
        self.part_over(node, lookup);
    }

    fn part_over(&mut self, node: usize, lookup: LookupId) {
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        pending.parts -= 1;
        if pending.parts > 0 {
            return;
        }
        match pending.newer.filter(|_| !pending.rerouted.is_empty()) {
            Some(link) => self.learn(node, lookup, link),
            None => self.lookup_over(node, lookup),
        }
    }

    /// Requests the newer map of a member.
    fn learn(&mut self, node: usize, lookup: LookupId, link: LinkId) {
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let time = client.lookups[&lookup].deadline.since(now).min(CALL_TIMEOUT);
        if time.is_zero() || !client.links.contains_key(&link) {
            return self.lookup_over(node, lookup);
        }
        self.count("maps learned");
        let line = self.link_line(node, link);
        self.call(node, (line, Purpose::Learn { lookup }), Request::Members, time);
    }

    /// Handles the arrival of the newer map.
    pub(crate) fn learned(&mut self, node: usize, lookup: LookupId) {
        let now = self.time(Host::Node(node));
        let Some(pending) = self.client(node).lookups.get_mut(&lookup) else { return };
        if pending.attempt >= ATTEMPTS || now >= pending.deadline {
            return self.lookup_over(node, lookup);
        }
        let rerouted = std::mem::take(&mut pending.rerouted);
        self.ask_owners(node, lookup, &rerouted);
    }

    /// Ends the lookup: the core gets the replicas on reachable nodes.
    pub(crate) fn lookup_over(&mut self, node: usize, lookup: LookupId) {
        let Some(pending) = self.client(node).lookups.remove(&lookup) else { return };
        if !pending.answered {
            return self.apply(node, Event::LookupFailed { lookup });
        }
        let mut found = pending.found;
        let client = self.client(node);
        for replicas in &mut found {
            replicas.retain(|replica| client.host_of(replica.node).is_some());
        }
        self.apply(node, Event::LookupAnswered { lookup, found });
    }
}
