//! The environment of all simulated processes: time and the schedule, the hosts with their clocks, the network, and the
//! record of the run.
//!
//! Steps of a process get the environment and their own process, and nothing else: everything that they need from other
//! processes arrives in messages. Checks read the whole simulation, between steps.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use reprise_policy::shards::ShardMap;
use reprise_policy::{Epoch, Tick};

use crate::clock::Clock;
use crate::hosts::Hosts;
use crate::membership::MemberStep;
use crate::memory::Tag;
use crate::messages::Message;
use crate::names::member_name;
use crate::network::{Host, Network};
use crate::observation::Observation;
use crate::queue::Queue;
use crate::rng::Rng;
use crate::setup::Setup;
use crate::simulation::{Action, AgentStep};
use crate::timed::Timed;
use crate::trace::{Recording, Trace};

/// The environment; see the module.
#[derive(Debug)]
pub(crate) struct Environment {
    pub(crate) setup: Setup,
    pub(crate) now: Tick,
    pub(crate) rng: Rng,
    /// Draws the changes of failure domains, which only some simulations have. All others are independent of it.
    pub(crate) domains: Rng,
    /// Draws the reports of engines about their layers, which only some simulations have.
    pub(crate) layers: Option<Rng>,
    pub(crate) queue: Queue<Action>,
    pub(crate) trace: Trace,
    pub(crate) network: Network<Message>,
    pub(crate) hosts: Hosts,
    /// Shard maps, which all processes compute with equal results.
    maps: BTreeMap<(Epoch, Vec<usize>), Arc<ShardMap>>,
    /// Number of contents that blocks have had.
    contents: Tag,
    /// The faults have ended.
    pub(crate) calm: bool,
    /// Number of occurrences by name.
    pub(crate) seen: BTreeMap<&'static str, u64>,
    /// Hardware whose times the simulation has; `None`: random delays.
    pub(crate) timed: Option<Box<Timed>>,
    /// Observations that the checks have not seen yet.
    pub(crate) observations: Vec<Observation>,
}

impl Environment {
    pub(crate) fn new(setup: Setup, mut rng: Rng, recording: Recording) -> Environment {
        let clock = Clock::draw(Tick(0), &mut rng);
        Environment {
            now: Tick(0),
            rng,
            domains: Rng::new(0),
            layers: None,
            queue: Queue::new(),
            trace: Trace::new(recording),
            network: Network::new(),
            hosts: Hosts::new(setup.nodes, setup.members, clock),
            maps: BTreeMap::new(),
            contents: 0,
            calm: false,
            seen: BTreeMap::new(),
            timed: None,
            observations: Vec::new(),
            setup,
        }
    }

    /// Returns content that no block has had yet.
    pub(crate) fn new_content(&mut self) -> Tag {
        self.contents += 1;
        self.contents
    }

    /// Schedules an action after a delay.
    pub(crate) fn after(&mut self, delay: Duration, action: Action) {
        self.queue.push(self.now.after(delay), action);
    }

    /// Schedules a step of a node's running process, by its clock.
    pub(crate) fn later(&mut self, node: usize, delay: Duration, what: AgentStep) {
        let host = Host::Node(node);
        let (at, life) = (self.in_time(host, delay), self.host(host).life);
        self.queue.push(at, Action::Agent { node, life, what });
    }

    /// Schedules a step of a node's running process, when its clock shows `shown`.
    pub(crate) fn at(&mut self, node: usize, shown: Tick, what: AgentStep) {
        let host = Host::Node(node);
        let (at, life) = (self.when(host, shown), self.host(host).life);
        self.queue.push(at, Action::Agent { node, life, what });
    }

    /// Schedules a step of a member's running process, by its clock.
    pub(crate) fn member_later(&mut self, member: usize, delay: Duration, what: MemberStep) {
        let host = Host::Member(member);
        let (at, life) = (self.in_time(host, delay), self.host(host).life);
        self.queue.push(at, Action::Member { member, life, what });
    }

    /// Returns the shard map of these members.
    pub(crate) fn map_of(&mut self, epoch: Epoch, members: impl Iterator<Item = usize>) -> Arc<ShardMap> {
        let members: Vec<usize> = members.collect();
        let make = |members: &[usize]| ShardMap::new(epoch, members.iter().copied().map(member_name));
        let known = self.maps.entry((epoch, members.clone()));
        known.or_insert_with(|| Arc::new(make(&members).expect("member names are unique"))).clone()
    }

    pub(crate) fn count(&mut self, what: &'static str) {
        *self.seen.entry(what).or_default() += 1;
    }
}
