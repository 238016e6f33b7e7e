//! A whole cluster: members of the control plane over a real etcd, two nodes, and engines on both.

use std::time::Duration;

use reprise_client::Scope;

use crate::config::StartedWith;
use crate::content::small;
use crate::directory::{Numbers, snapshot};
use crate::host::Host;
use crate::{Agent, AgentConfig, ControlPlane, Engine, Etcd, Loading, Outcome, PATIENCE, World, wait_until};

/// Hash slots of the directory.
pub const SLOTS: u64 = 4096;

/// A node that is silent is not offered any more. Members know it after 1.5 s, so that an answer to the contrary that comes later is half
/// a second old, also on a busy machine.
const NOT_OFFERED_WITHIN: Duration = Duration::from_secs(2);

/// Members, nodes, and engines on these.
#[derive(Debug)]
pub struct Cluster {
    /// Where it is.
    pub world: World,
    /// What it stores in.
    pub etcd: Etcd,
    /// The control plane.
    pub members: Vec<ControlPlane>,
    /// The nodes, `first` and `second`.
    pub agents: Vec<Agent>,
}

/// Block numbers.
pub fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

impl Cluster {
    /// Three members and two nodes, whole.
    ///
    /// # Panics
    /// When it does not become that.
    pub fn start() -> Cluster {
        let world = World::new();
        let etcd = world.etcd();
        let endpoint = etcd.endpoint();
        let members = ["a", "b", "c"].map(|name| world.member(name, &endpoint)).into();
        Cluster::of(world, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK])
    }

    /// Members that have been started, and no nodes yet.
    ///
    /// # Panics
    /// When they do not share the slots.
    pub fn of(world: World, etcd: Etcd, members: Vec<ControlPlane>) -> Cluster {
        allow_absence(&world);
        let cluster = Cluster { world, etcd, members, agents: Vec::new() };
        cluster.wait_for_members(cluster.members.len());
        cluster
    }

    /// With the two nodes, each on a host; whole.
    ///
    /// # Panics
    /// When it does not become that.
    #[must_use]
    pub fn with_agents(self, hosts: [&Host; 2]) -> Cluster {
        self.with_started(hosts.map(|host| (host, StartedWith::default())))
    }

    /// With the two nodes, each on a host and started with something besides; whole.
    ///
    /// # Panics
    /// When it does not become that.
    #[must_use]
    pub fn with_started(mut self, agents: [(&Host, StartedWith); 2]) -> Cluster {
        for (node, (host, start)) in ["first", "second"].into_iter().zip(agents) {
            let agent = self.agent(node, host, start);
            self.agents.push(agent);
        }
        self.wait_until_whole(self.members.len());
        self
    }

    /// The usual one, whose first node holds the blocks below `count`, known to the second: the engine of each.
    ///
    /// # Panics
    /// When it does not become that.
    pub fn holding(count: u64) -> (Cluster, Engine, Engine) {
        Cluster::start().hold(count)
    }

    /// Saves the blocks below `count` on the first node: the engine of each.
    ///
    /// # Panics
    /// When the second does not come to know them.
    pub fn hold(self, count: u64) -> (Cluster, Engine, Engine) {
        let (saver, reader) = self.engines();
        saver.save_durably(&numbers(0..count));
        wait_for_sources(&reader, &numbers(0..count), PATIENCE);
        (self, saver, reader)
    }

    fn agent(&self, node: &str, host: &Host, start: StartedWith) -> Agent {
        let control_plane = self.members.iter().map(|member| member.address().to_owned()).collect();
        let config = AgentConfig { control_plane, host: host.clone(), ..AgentConfig::named(node) };
        self.world.agent_with(&config, start)
    }

    /// An engine of each node.
    ///
    /// # Panics
    /// When an agent takes none.
    pub fn engines(&self) -> (Engine, Engine) {
        (self.agents[0].engine(small()), self.agents[1].engine(small()))
    }

    /// Waits until so many members share all slots.
    ///
    /// # Panics
    /// When they do not.
    pub fn wait_for_members(&self, count: usize) {
        wait_until("members share the slots", PATIENCE, || {
            let parts = self.parts();
            (parts.len() == count && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS).then_some(())
        });
    }

    /// Waits until so many members have all inventories, and replicas are as the nodes' counters say.
    ///
    /// # Panics
    /// When they do not.
    pub fn wait_until_whole(&self, count: usize) {
        wait_until("every block is in the directory, once", PATIENCE, || {
            let parts = self.parts();
            let here = |agent: &Agent| {
                let counters = agent.admin().counters();
                counters.get("dram_blocks") + counters.get("nvme_blocks")
            };
            let expected: u64 = self.agents.iter().map(here).sum();
            let whole = parts.len() == count
                && parts.iter().all(|part| part.partial == 0)
                && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS
                && parts.iter().map(|part| part.replicas).sum::<u64>() == expected;
            whole.then_some(())
        });
    }

    /// Waits until so many members have all inventories, and compares what they hold with what the nodes have, key by key. Nothing
    /// may change meanwhile, and nothing else than the blocks of these numbers have been saved.
    ///
    /// # Panics
    /// When it is something else.
    pub fn assert_complete(&self, count: usize, engines: [&Engine; 2], saved: &[u64]) {
        self.wait_until_whole(count);
        let asked = self.members.iter().find(|member| member.is_running()).expect("a member runs");
        let (told, numbers) = (snapshot(asked), Numbers::of_all(saved));
        for (agent, engine) in self.agents.iter().zip(engines) {
            told.assert_is_had(agent, engine, &numbers, asked);
        }
    }

    /// Waits until no member offers a node to others.
    ///
    /// # Panics
    /// When one does for too long.
    pub fn wait_until_not_offered(&self, node: &str) {
        wait_until("nobody offers the silent node", NOT_OFFERED_WITHIN, || {
            self.members.iter().all(|member| member.offers(node) == Some(false)).then_some(())
        });
    }

    /// Of the members that answer and own anything.
    ///
    /// # Panics
    /// When one says what is no part.
    pub fn parts(&self) -> Vec<Part> {
        let part = |member: &ControlPlane| {
            let (code, body) = member.admin().get("/directory").ok()?;
            assert_eq!(code, 200, "{body}");
            let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            let number = |field: &str| body[field].as_u64().expect("a number");
            let [owned, partial, replicas] = ["slots_owned", "slots_partial", "replicas"].map(number);
            (owned > 0).then_some(Part { owned, partial, replicas })
        };
        self.members.iter().filter(|member| member.is_running()).filter_map(part).collect()
    }
}

/// A member's part of the directory.
#[derive(Debug)]
pub struct Part {
    /// Slots of its own.
    pub owned: u64,
    /// Of those, slots of which a node's inventory is not whole.
    pub partial: u64,
    /// Replicas that it knows.
    pub replicas: u64,
}

/// What is said when members, etcd or nodes go and come back.
fn allow_absence(world: &World) {
    for words in [
        "cannot register with the control plane",
        "the control plane is gone",
        "this member cannot be registered now",
        "the registration of this member is lost",
        "the registration could not be given back",
        "another member is registered under this name",
        "the store cannot be changed now",
        "the store cannot be followed",
        "node is silent",
        "peer connection lost",
    ] {
        world.allow(words);
    }
}

/// Waits until an engine's agent knows where all blocks are.
///
/// # Panics
/// When it does not in time.
pub fn wait_for_sources(engine: &Engine, numbers: &[u64], within: Duration) {
    wait_until("the directory knows all blocks", within, || {
        let found = engine.matches(numbers, Scope::Cluster);
        (found.len() == numbers.len()).then_some(())
    });
}

/// As [`load_from_peer`], when who has which number, and where, may not have reached everybody: a block that is not found where it was
/// looked for is asked for again.
///
/// # Panics
/// When one does not come for too long, or is damaged.
pub fn load_from_peer_in_time(engine: &Engine, numbers: &[u64]) {
    wait_until("all blocks come", PATIENCE, || {
        let outcomes = engine.load(numbers, &Loading::CLUSTER).ok()?;
        assert!(!outcomes.contains(&Outcome::Detected), "a copy was damaged");
        outcomes.iter().all(|outcome| outcome.is_right()).then_some(())
    });
}

/// Loads blocks, wherever they are, and compares them.
///
/// # Panics
/// When one does not come.
pub fn load_from_peer(engine: &Engine, numbers: &[u64]) {
    let sources = engine.load_all(numbers, &Loading::CLUSTER);
    assert_eq!(sources.len(), numbers.len());
}
