//! A large cluster of small agents: how long it takes until members that know nothing know everything.
//!
//! Every agent is the production core with a few blocks, every member the production core; nothing breaks but what the scenario
//! breaks. Measured in simulated time: from the first start of everything, and again from the loss of all members' memory at
//! once, until every slot has an owner that knows all nodes' inventories. While no member is there every engine matches what its node
//! has, and finds it. Members and network take as much at once as comes;
//! the store writes one thing after the other.

use std::collections::BTreeSet;
use std::time::Duration;

use reprise_agent_core::event::{Request, Scope};
use reprise_policy::{BlockKey, SessionId, SlotSet};

use crate::engine::Asked;
use crate::network::Host;
use crate::setup::Setup;
use crate::trace::Recording;
use crate::world::World;

/// Looks at the directories so often.
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// Simulated time in which everything must have come to its end.
const TIME_MAX: Duration = Duration::from_secs(600);
/// Members come back so long after they were lost.
const RESTART_AFTER: Duration = Duration::from_millis(500);
/// Every node has noticed by then that no member is there: it beats four times a second.
const NOTICED_AFTER: Duration = Duration::from_millis(400);
/// Time in which committed blocks are written.
const WRITE_TIME: Duration = Duration::from_secs(2);

/// What is simulated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cluster {
    /// Agents, at most 65,535.
    pub nodes: usize,
    /// Members of the control plane, at least one.
    pub members: usize,
    /// Decides every delay.
    pub seed: u64,
}

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Measured {
    /// From the start of everything, with an empty store, until every directory is whole.
    pub first_start: Duration,
    /// From the moment at which all members are gone.
    pub rebuild: Duration,
    /// Registrations granted in the whole run.
    pub registrations: u64,
    /// Inventories asked for in the whole run.
    pub inventories: u64,
    /// Engines that matched blocks of their node while it reached no member, and found them.
    pub local_matches: u64,
    /// Replicas that the directories hold.
    pub replicas: u64,
    /// How many things happened.
    pub steps: u64,
    /// Digest of everything that happened: equal for equal clusters.
    pub digest: u64,
}

/// Plays a cluster from its first start to the rebuilding of all directories.
///
/// # Errors
/// In words, what has not come to its end within ten minutes of simulated time.
///
/// # Panics
/// An invariant does not hold.
pub fn scale(cluster: Cluster) -> Result<Measured, String> {
    let setup = Setup::large(cluster.nodes, cluster.members);
    let mut world = World::with(setup, cluster.seed, Recording::Digest);
    let first_start = world.measure("the first start")?;
    world.fill();
    let lost = world.now;
    (0..cluster.members).for_each(|member| world.kill_member(member));
    world.run_until(lost.after(NOTICED_AFTER));
    world.match_own();
    world.run_until(lost.after(RESTART_AFTER));
    (0..cluster.members).for_each(|member| world.start_member(member));
    let rebuild = RESTART_AFTER + world.measure("the rebuilding")?;
    let seen = |what: &str| world.seen.get(what).copied().unwrap_or_default();
    Ok(Measured {
        first_start,
        rebuild,
        registrations: seen("registrations"),
        inventories: seen("inventories"),
        local_matches: seen("local matches alone"),
        replicas: world.replicas_held(),
        steps: world.trace.steps(),
        digest: world.trace.digest(),
    })
}

impl World {
    /// Runs until every directory is whole.
    fn measure(&mut self, what: &str) -> Result<Duration, String> {
        let began = self.now;
        while self.now.since(began) < TIME_MAX {
            self.run_until(self.now.after(LOOK_EVERY));
            if self.is_whole() {
                return Ok(self.now.since(began));
            }
        }
        Err(format!("{what} takes longer than {TIME_MAX:?}"))
    }

    fn is_whole(&self) -> bool {
        let mut owned = 0;
        for member in 0..self.members.len() {
            let now = self.time(Host::Member(member));
            let Some(running) = self.members[member].as_ref() else { return false };
            let size = running.directory.size();
            let knows = size.nodes.len() == self.nodes.len() && size.slots_partial == 0;
            if running.certain_map(now).is_none() || !knows {
                return false;
            }
            owned += size.slots_owned;
        }
        owned == SlotSet::ALL.len() && self.replicas_known() == self.replicas_held()
    }

    fn replicas_known(&self) -> u64 {
        self.members.iter().flatten().map(|member| member.directory.size().replicas).sum()
    }

    fn replicas_held(&self) -> u64 {
        let processes = self.nodes.iter().filter_map(|node| node.process.as_ref());
        processes.map(|process| process.inventory.len() as u64).sum()
    }

    /// Every agent gets some blocks from an engine.
    fn fill(&mut self) {
        for node in 0..self.nodes.len() {
            self.open_session(node, 0);
            let session = self.seated(node);
            self.ask(node, session, Asked::Reserve(4), Request::Reserve { count: 4 });
        }
        self.run_until(self.now.after(LOOK_EVERY));
        for node in 0..self.nodes.len() {
            let session = self.seated(node);
            let engine = self.engine(node, session);
            let (tenant, layout) = (engine.tenant, engine.layout);
            let keys = self.some_keys(tenant, layout);
            self.commit(node, session, &keys);
        }
        self.run_until(self.now.after(WRITE_TIME));
    }

    /// Every engine asks for all that its node has; that it is answered in time, with all of it, is looked at whenever an engine asks.
    fn match_own(&mut self) {
        for node in 0..self.nodes.len() {
            let session = self.seated(node);
            let held = &self.process(node).inventory;
            let keys: BTreeSet<BlockKey> = held.iter().map(|(key, _)| *key).collect();
            let (keys, scope) = (Vec::from_iter(keys), Scope::Local);
            self.ask(node, session, Asked::Match(keys.clone(), scope), Request::Match { keys, scope });
        }
    }

    fn seated(&self, node: usize) -> SessionId {
        let process = self.nodes[node].process.as_ref().expect("nothing breaks");
        process.seats[0].expect("its engine has a session")
    }
}
