//! A cluster of processes: members of the control plane over a real etcd, two nodes, and engines on both.

use std::time::Duration;

use reprise_client::Scope;

use crate::content::small;
use crate::directory::{BlockNumbers, snapshot};
use crate::host::Host;
use crate::process::LaunchOptions;
use crate::{
    Agent, AgentConfig, ControlPlane, Engine, Etcd, LoadParams, Outcome, PATIENCE, TestEnv, wait_until,
};

/// Hash slots of the directory.
pub const SLOTS: u64 = 4096;

/// Members, nodes, and the engines on the nodes.
#[derive(Debug)]
pub struct Cluster {
    /// The test environment with all files and logs.
    pub env: TestEnv,
    /// The store of the members.
    pub etcd: Etcd,
    /// Members of the control plane.
    pub members: Vec<ControlPlane>,
    /// The nodes, `first` and `second`.
    pub agents: Vec<Agent>,
}

/// Returns the block numbers of a range.
pub fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

impl Cluster {
    /// Starts three members and two nodes, and waits until the directory is complete.
    ///
    /// # Panics
    /// If the directory does not become complete.
    pub fn start() -> Cluster {
        let env = TestEnv::new();
        let etcd = env.etcd();
        let endpoint = etcd.endpoint();
        let members = ["a", "b", "c"].map(|name| env.member(name, &endpoint)).into();
        Cluster::of(env, etcd, members).with_agents([&Host::LOOPBACK, &Host::LOOPBACK])
    }

    /// Returns a cluster of running members, without nodes.
    ///
    /// # Panics
    /// If the members do not share all slots.
    pub fn of(env: TestEnv, etcd: Etcd, members: Vec<ControlPlane>) -> Cluster {
        allow_absence(&env);
        let cluster = Cluster { env, etcd, members, agents: Vec::new() };
        cluster.wait_for_members(cluster.members.len());
        cluster
    }

    /// Adds the two nodes, each on a host, and waits until the directory is complete.
    ///
    /// # Panics
    /// If the directory does not become complete.
    #[must_use]
    pub fn with_agents(self, hosts: [&Host; 2]) -> Cluster {
        self.with_launch_options(hosts.map(|host| (host, LaunchOptions::default())))
    }

    /// Adds the two nodes, each on a host and with launch options, and waits until the directory is complete.
    ///
    /// # Panics
    /// If the directory does not become complete.
    #[must_use]
    pub fn with_launch_options(mut self, agents: [(&Host, LaunchOptions); 2]) -> Cluster {
        for (node, (host, start)) in ["first", "second"].into_iter().zip(agents) {
            let agent = self.agent(node, host, start);
            self.agents.push(agent);
        }
        self.wait_until_complete(self.members.len());
        self
    }

    /// Starts a cluster and saves the blocks below `count` on the first node. Returns an engine of each node.
    ///
    /// # Panics
    /// If the cluster does not start, or the second node does not find the blocks.
    pub fn with_blocks(count: u64) -> (Cluster, Engine, Engine) {
        Cluster::start().save_blocks(count)
    }

    /// Saves the blocks below `count` on the first node. Returns an engine of each node.
    ///
    /// # Panics
    /// If the second node does not find the blocks.
    pub fn save_blocks(self, count: u64) -> (Cluster, Engine, Engine) {
        let (saver, reader) = self.engines();
        saver.save_durably(&numbers(0..count));
        wait_for_sources(&reader, &numbers(0..count), PATIENCE);
        (self, saver, reader)
    }

    fn agent(&self, node: &str, host: &Host, start: LaunchOptions) -> Agent {
        let control_plane = self.members.iter().map(|member| member.address().to_owned()).collect();
        let config = AgentConfig { control_plane, host: host.clone(), ..AgentConfig::named(node) };
        self.env.agent_with(&config, start)
    }

    /// Opens an engine session with each node.
    ///
    /// # Panics
    /// If an agent refuses the session.
    pub fn engines(&self) -> (Engine, Engine) {
        (self.agents[0].engine(small()), self.agents[1].engine(small()))
    }

    /// Waits until exactly `count` members share all slots.
    ///
    /// # Panics
    /// If that does not happen in time.
    pub fn wait_for_members(&self, count: usize) {
        wait_until("members share the slots", PATIENCE, || {
            let parts = self.parts();
            (parts.len() == count && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS).then_some(())
        });
    }

    /// Waits until `count` members have all inventories, and the number of replicas equals the blocks that
    /// the nodes count.
    ///
    /// # Panics
    /// If that does not happen in time.
    pub fn wait_until_complete(&self, count: usize) {
        wait_until("every block is in the directory exactly once", PATIENCE, || {
            let parts = self.parts();
            let block_count = |agent: &Agent| {
                let counters = agent.admin().counters();
                counters.get("dram_blocks") + counters.get("nvme_blocks")
            };
            let expected: u64 = self.agents.iter().map(block_count).sum();
            let is_complete = parts.len() == count
                && parts.iter().all(|part| part.partial == 0)
                && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS
                && parts.iter().map(|part| part.replicas).sum::<u64>() == expected;
            is_complete.then_some(())
        });
    }

    /// Waits until `count` members have all inventories, and compares the directory with the nodes' blocks,
    /// key by key. Meanwhile nothing may change, and only the blocks of these numbers may have been saved.
    ///
    /// # Panics
    /// If the directory and the nodes differ.
    pub fn assert_complete(&self, count: usize, engines: [&Engine; 2], saved: &[u64]) {
        self.wait_until_complete(count);
        let member = self.members.iter().find(|member| member.is_running()).expect("a member runs");
        let (snapshot, numbers) = (snapshot(member), BlockNumbers::of_all(saved));
        for (agent, engine) in self.agents.iter().zip(engines) {
            snapshot.assert_matches_agent(agent, engine, &numbers, member);
        }
    }

    /// Waits until no member offers the node to others.
    ///
    /// # Panics
    /// If a member still offers it after the bound.
    pub fn wait_until_not_offered(&self, node: &str) {
        wait_until("no member offers the silent node", PATIENCE, || {
            self.members.iter().all(|member| member.offers(node) == Some(false)).then_some(())
        });
    }

    /// Returns the share of each member that responds and owns slots.
    ///
    /// # Panics
    /// If a response is malformed.
    pub fn parts(&self) -> Vec<DirectoryShare> {
        let part = |member: &ControlPlane| {
            let (code, body) = member.admin().get("/directory").ok()?;
            assert_eq!(code, 200, "{body}");
            let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            let number = |field: &str| body[field].as_u64().expect("a number");
            let [owned, partial, replicas] = ["slots_owned", "slots_partial", "replicas"].map(number);
            (owned > 0).then_some(DirectoryShare { owned, partial, replicas })
        };
        self.members.iter().filter(|member| member.is_running()).filter_map(part).collect()
    }
}

/// A member's share of the directory.
#[derive(Debug)]
pub struct DirectoryShare {
    /// Hash slots that it owns.
    pub owned: u64,
    /// Owned slots for which the inventory of a node is incomplete.
    pub partial: u64,
    /// Replicas in its slots.
    pub replicas: u64,
}

/// Allows the log lines that members and agents write when a member, etcd or a node disappears and returns.
fn allow_absence(env: &TestEnv) {
    for words in [
        "cannot register with the control plane",
        "the control plane is unreachable",
        "cannot register this member",
        "registration of this member lost",
        "cannot release the registration",
        "another member is registered under this name",
        "cannot write to the store",
        "cannot follow the store",
        "node is silent",
        "peer connection lost",
    ] {
        env.allow(words);
    }
}

/// Waits until an engine's agent finds a source for every block.
///
/// # Panics
/// If it does not within the bound.
pub fn wait_for_sources(engine: &Engine, numbers: &[u64], within: Duration) {
    wait_until("the directory has all blocks", within, || {
        let found = engine.matches(numbers, Scope::Cluster);
        (found.len() == numbers.len()).then_some(())
    });
}

/// Loads blocks from any source in the cluster, and compares them. Retries blocks that are missing: on a busy machine,
/// node numbers and replicas may not have reached every member yet, and a fetch may exceed its deadline.
///
/// # Panics
/// If a block is still missing after the bound, or is corrupt.
pub fn load_from_peer(engine: &Engine, numbers: &[u64]) {
    wait_until("all blocks are loaded", PATIENCE, || {
        let outcomes = engine.load(numbers, &LoadParams::CLUSTER).ok()?;
        assert!(!outcomes.contains(&Outcome::Corrupt), "a copy is corrupt");
        outcomes.iter().all(|outcome| outcome.is_verified()).then_some(())
    });
}
