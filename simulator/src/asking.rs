//! Lookups of an agent: each key's question goes to the member that owns its slot, and the answers come together again.
//!
//! As `node-agent/src/directory/asking.rs`: a member that has a newer map than the one a question was routed by is asked for
//! it, and those keys are asked for once more; what nobody answers for is a miss.

use std::collections::BTreeMap;
use std::time::Duration;

use reprise_agent_core::effect::LookupId;
use reprise_agent_core::event::{Event, Replica};
use reprise_policy::{BlockKey, Epoch, Tick};

use crate::client::Purpose;
use crate::link::LinkId;
use crate::messages::{Answered, Request};
use crate::network::Host;
use crate::setup::CALL_TIMEOUT;
use crate::world::{Local, World};

/// Members asked for one key at the most.
const ATTEMPTS: u32 = 2;

/// A lookup that is under way.
#[derive(Debug)]
pub(crate) struct Asking {
    keys: Vec<BlockKey>,
    /// By the agent's clock.
    pub(crate) deadline: Tick,
    found: Vec<Vec<Replica>>,
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
    pub(crate) fn look_up(&mut self, node: usize, lookup: LookupId, keys: Vec<BlockKey>, time: Duration) {
        let deadline = self.time(Host::Node(node)).after(time);
        let client = self.client(node);
        if !client.is_connected() {
            return self.later(node, Duration::ZERO, Local::Event(Event::LookupFailed { lookup }));
        }
        let places: Vec<u32> = (0..keys.len() as u32).collect();
        let asking = Asking {
            found: vec![Vec::new(); keys.len()],
            keys,
            deadline,
            answered: false,
            attempt: 0,
            parts: 0,
            left: Vec::new(),
            routed: Epoch(0),
            newer: None,
        };
        client.lookups.insert(lookup, asking);
        self.count("lookups");
        self.ask_owners(node, lookup, &places);
    }

    /// Asks each owner of the keys at these places, all at once.
    fn ask_owners(&mut self, node: usize, lookup: LookupId, places: &[u32]) {
        let client = self.client(node);
        let asking = client.lookups.get_mut(&lookup).expect("it is under way");
        (asking.attempt, asking.newer) = (asking.attempt + 1, None);
        let mut by_owner: BTreeMap<LinkId, Vec<u32>> = BTreeMap::new();
        if let Some(routes) = &client.routes {
            asking.routed = routes.epoch();
            for place in places {
                if let Some(link) = routes.owner(&asking.keys[*place as usize]) {
                    by_owner.entry(link).or_default().push(*place);
                }
            }
        }
        by_owner.retain(|link, _| client.links.get(link).is_some_and(|link| link.up));
        asking.parts = by_owner.len();
        if by_owner.is_empty() {
            // Not while the core speaks.
            return self.later(node, Duration::ZERO, Local::LookupOver(lookup));
        }
        for (link, places) in by_owner {
            self.ask_owner(node, lookup, link, places);
        }
    }

    fn ask_owner(&mut self, node: usize, lookup: LookupId, link: LinkId, places: Vec<u32>) {
        let line = self.link_line(node, link);
        let now = self.time(Host::Node(node));
        let client = self.client(node);
        let (asking, granted) = (&client.lookups[&lookup], client.links[&link].granted);
        let keys = places.iter().map(|place| asking.keys[*place as usize]).collect();
        let (time, asking) = (asking.deadline.since(now), granted.map(|granted| granted.node));
        let of = Purpose::Lookup { lookup, link, places };
        self.call(node, (line, of), Request::Lookup { keys, asking }, time);
    }

    pub(crate) fn part_found(
        &mut self,
        node: usize,
        of: (LookupId, LinkId),
        places: &[u32],
        answered: Answered,
    ) {
        let (lookup, link) = of;
        let Some(asking) = self.client(node).lookups.get_mut(&lookup) else { return };
        assert_eq!(answered.found.len(), places.len(), "an answer for each key");
        asking.answered = true;
        asking.left.extend(answered.elsewhere.iter().map(|at| places[*at as usize]));
        if !answered.elsewhere.is_empty() && answered.map_epoch > asking.routed {
            asking.newer = Some(link);
        }
        for (place, replicas) in places.iter().zip(answered.found) {
            asking.found[*place as usize] = replicas;
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
        let Some(asking) = self.client(node).lookups.get_mut(&lookup) else { return };
        asking.parts -= 1;
        if asking.parts > 0 {
            return;
        }
        match asking.newer.filter(|_| !asking.left.is_empty()) {
            Some(link) => self.learn(node, lookup, link),
            None => self.lookup_over(node, lookup),
        }
    }

    /// Asks a member whose map is newer for it.
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

    /// The newer map is there.
    pub(crate) fn learned(&mut self, node: usize, lookup: LookupId) {
        let now = self.time(Host::Node(node));
        let Some(asking) = self.client(node).lookups.get_mut(&lookup) else { return };
        if asking.attempt >= ATTEMPTS || now >= asking.deadline {
            return self.lookup_over(node, lookup);
        }
        let left = std::mem::take(&mut asking.left);
        self.ask_owners(node, lookup, &left);
    }

    /// It has come to its end: the core gets what was found on nodes that can be reached.
    pub(crate) fn lookup_over(&mut self, node: usize, lookup: LookupId) {
        let Some(asking) = self.client(node).lookups.remove(&lookup) else { return };
        if !asking.answered {
            return self.apply(node, Event::LookupFailed { lookup });
        }
        let mut found = asking.found;
        let client = self.client(node);
        for replicas in &mut found {
            replicas.retain(|replica| client.host_of(replica.node).is_some());
        }
        self.apply(node, Event::Found { lookup, found });
    }
}
