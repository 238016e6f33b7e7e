//! A Reprise cluster on this machine: a control plane of one or more members, agents with a pool directory each.
//!
//! Started from the binaries beside this one, with configuration files written into one directory. Every
//! process says in one line of JSON on its standard output when it is ready and which ports it got. Several members share
//! an etcd, which is started with them ([`etcd`]). One command at a time has a directory ([`directory`]), and its
//! processes end with it: when the cluster is dropped, at an interruption, or, after a SIGKILL, when the next command
//! wants the directory.

mod configuration;
mod directory;
mod etcd;
mod member;
mod process;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Stdio};
use std::time::Instant;

use anyhow::Context;
use reprise_policy::ByteSize;
use serde::{Deserialize, Serialize};

use crate::config::Config;
use crate::interrupt;
use configuration::{AgentConfig, StoreChoice};
use directory::ClusterDirectory;
pub(crate) use directory::end_recorded;
use etcd::Etcd;
pub(crate) use member::MemberAddresses;
use member::{Member, all_registered};
pub(crate) use process::{Launch, binary as beside_this, stop};
use process::{Process, kill};

/// File in the cluster's directory that says how to reach it.
const CLUSTER_FILE: &str = "cluster.json";

/// An agent's pool, in its folder.
const POOL_FILE: &str = "device-0.pool";

/// How to reach a running cluster; written by whoever starts one, read by `replay` and `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClusterFile {
    /// URL of the etcd that the members share; none when there is one member with a store of its own.
    pub(crate) etcd: Option<String>,
    /// The members of the control plane; one at least.
    pub(crate) members: Vec<MemberAddresses>,
    /// The agents.
    pub(crate) agents: Vec<AgentAddresses>,
}

/// How to reach one agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AgentAddresses {
    /// Node name.
    pub(crate) node: String,
    /// Unix socket of local sessions.
    pub(crate) socket: PathBuf,
    /// Admin address, `host:port`.
    pub(crate) admin: String,
}

/// What every agent of a cluster gets.
#[derive(Clone, Copy, Debug)]
pub(crate) struct AgentSizes {
    /// DRAM arena.
    pub(crate) arena: ByteSize,
    /// NVMe pool.
    pub(crate) pool: ByteSize,
    /// What a node gives and takes a second so that blocks have replicas and nodes are filled evenly; none: the agent's default.
    pub(crate) moves: Option<ByteSize>,
}

/// The control plane of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ControlPlanes {
    /// One member, with its store in a file.
    Embedded,
    /// Members that share an etcd.
    Etcd {
        /// How many; at least one.
        members: usize,
    },
}

/// A running cluster; its processes are ended when it is dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    etcd: Option<Etcd>,
    members: Vec<Member>,
    agents: Vec<Agent>,
    /// Given up last.
    directory: ClusterDirectory,
}

#[derive(Debug)]
struct Agent {
    config: PathBuf,
    process: Process,
    addresses: AgentAddresses,
}

impl ClusterFile {
    /// Reads the file of the cluster in `directory`.
    pub(crate) fn read(directory: &Path) -> anyhow::Result<ClusterFile> {
        let path = directory.join(CLUSTER_FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!(
                "no running cluster found ({} cannot be read): start one with `reprise demo --hold`, or name the \
                 agents with --socket",
                path.display()
            )
        })?;
        serde_json::from_str(&text).with_context(|| format!("{} is not a cluster file", path.display()))
    }

    /// Where a command finds members of the control plane: at the address that it is given, or where those of the running
    /// cluster are, in its directory.
    ///
    /// # Errors
    /// No address, and no running cluster.
    pub(crate) fn members_of(
        address: Option<&String>,
        directory: Option<&Path>,
        config: &Config,
    ) -> anyhow::Result<Vec<String>> {
        match address {
            Some(address) => Ok(vec![address.clone()]),
            None => Ok(ClusterFile::read(&config.cluster.directory(directory))?.grpc_addresses()),
        }
    }

    /// Where the members' gRPC services are.
    pub(crate) fn grpc_addresses(&self) -> Vec<String> {
        self.members.iter().map(|member| member.grpc.clone()).collect()
    }
}

impl Cluster {
    /// Starts a control plane of one member and `count` agents with fresh data in `directory`.
    pub(crate) fn start(directory: &Path, count: usize, sizes: AgentSizes) -> anyhow::Result<Cluster> {
        let mut cluster = Cluster::start_controlplane(directory, ControlPlanes::Embedded)?;
        cluster.start_agents(count, sizes)?;
        Ok(cluster)
    }

    /// Starts a control plane without agents, with fresh data in `directory`; every member is registered.
    pub(crate) fn start_controlplane(directory: &Path, control: ControlPlanes) -> anyhow::Result<Cluster> {
        let claimed = ClusterDirectory::claim(directory)?;
        interrupt::ends_cluster(directory)?;
        let mut cluster = Cluster { etcd: None, members: Vec::new(), agents: Vec::new(), directory: claimed };
        match control {
            ControlPlanes::Embedded => {
                let store = directory.join("controlplane.redb");
                remove_if_there(&store)?;
                cluster.start_member("controlplane", &StoreChoice::Embedded(store))?;
            }
            ControlPlanes::Etcd { members } => {
                let etcd = cluster.etcd.insert(Etcd::start(&mut cluster.directory)?);
                let store = StoreChoice::Etcd(etcd.endpoint());
                for number in 1..=members {
                    cluster.start_member(&format!("controlplane-{number}"), &store)?;
                }
                all_registered(&cluster.file().members)?;
            }
        }
        cluster.write_file()?;
        Ok(cluster)
    }

    /// Starts agents named `node-1` and on.
    pub(crate) fn start_agents(&mut self, count: usize, sizes: AgentSizes) -> anyhow::Result<()> {
        for _ in 0..count {
            let agent = self.start_agent(&format!("node-{}", self.agents.len() + 1), sizes)?;
            self.agents.push(agent);
        }
        self.write_file()
    }

    /// How to reach the cluster.
    pub(crate) fn file(&self) -> ClusterFile {
        ClusterFile {
            etcd: self.etcd.as_ref().map(Etcd::endpoint),
            members: self.members.iter().map(Member::addresses).collect(),
            agents: self.agents.iter().map(|agent| agent.addresses.clone()).collect(),
        }
    }

    /// The cluster's directory.
    pub(crate) fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Starts a process beside the cluster's own: recorded, so that it ends with them whatever happens.
    pub(crate) fn spawn(&mut self, launch: &Launch<'_>) -> anyhow::Result<Child> {
        launch.spawn(Stdio::null(), &mut self.directory)
    }

    /// Where etcd tells its metrics, `host:port`.
    pub(crate) fn etcd_metrics(&self) -> Option<String> {
        self.etcd.as_ref().map(Etcd::metrics)
    }

    /// The pool file of an agent.
    pub(crate) fn pool_path(&self, index: usize) -> PathBuf {
        self.directory.path().join(&self.agents[index].addresses.node).join(POOL_FILE)
    }

    /// Ends an agent with SIGKILL: nothing of it gets a chance to tidy up.
    pub(crate) fn kill_agent(&mut self, index: usize) -> anyhow::Result<()> {
        kill(&mut self.agents[index].process.child)
    }

    /// Starts a killed agent again on the pool it left behind; returns the seconds until it was ready.
    pub(crate) fn restart_agent(&mut self, index: usize) -> anyhow::Result<f64> {
        let started = Instant::now();
        let agent = &mut self.agents[index];
        let log = self.directory.path().join(format!("{}.log", agent.addresses.node));
        agent.process = Process::start("reprise-agent", &agent.config, &log, &mut self.directory)?;
        agent.addresses.admin = agent.process.ready.admin.clone();
        self.write_file()?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// The processes of the agents.
    pub(crate) fn agent_pids(&self) -> impl Iterator<Item = u32> {
        self.agents.iter().map(|agent| agent.process.child.id())
    }

    /// The process of a member of the control plane.
    pub(crate) fn member_pid(&self, index: usize) -> u32 {
        self.members[index].pid()
    }

    /// Ends a member of the control plane with SIGKILL.
    pub(crate) fn kill_member(&mut self, index: usize) -> anyhow::Result<()> {
        self.members[index].kill()
    }

    /// Starts a killed member again where it was, on the store that it left behind.
    pub(crate) fn restart_member(&mut self, index: usize) -> anyhow::Result<()> {
        self.members[index].restart(&mut self.directory)?;
        self.write_file()
    }

    /// Waits until every member is registered and knows all others.
    pub(crate) fn members_know_each_other(&self) -> anyhow::Result<()> {
        all_registered(&self.file().members)
    }

    fn start_member(&mut self, name: &str, store: &StoreChoice) -> anyhow::Result<()> {
        let member = Member::start(name, store, &mut self.directory)?;
        self.members.push(member);
        Ok(())
    }

    fn start_agent(&mut self, node: &str, sizes: AgentSizes) -> anyhow::Result<Agent> {
        let home = self.directory.path().join(node);
        fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
        let pool = home.join(POOL_FILE);
        remove_if_there(&pool)?;
        let members = self.members.iter().map(|member| member.addresses().grpc).collect();
        let text = AgentConfig { node, home: &home, pool: &pool, sizes, members }.text();
        let config = self.directory.path().join(format!("{node}.toml"));
        fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
        let log = self.directory.path().join(format!("{node}.log"));
        let process = Process::start("reprise-agent", &config, &log, &mut self.directory)?;
        let addresses = AgentAddresses {
            node: node.to_owned(),
            socket: process.ready.socket.clone(),
            admin: process.ready.admin.clone(),
        };
        Ok(Agent { config, process, addresses })
    }

    fn write_file(&self) -> anyhow::Result<()> {
        let path = self.directory.path().join(CLUSTER_FILE);
        let text = serde_json::to_string_pretty(&self.file()).context("encoding the cluster file")?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            stop(&mut agent.process.child);
        }
        for index in 0..self.agents.len() {
            // Pools are large and of no use to anyone once the cluster is gone.
            drop(fs::remove_file(self.pool_path(index)));
        }
        self.members.iter_mut().for_each(Member::stop);
        self.etcd.iter_mut().for_each(Etcd::stop);
        // All have ended: this removes the files that say how to reach them.
        drop(end_recorded(self.directory.path()));
        interrupt::ends_only_this();
    }
}

/// Where this machine's clusters, downloads and builds live: `$REPRISE_CACHE`, else `~/.cache/reprise`.
pub(crate) fn cache_directory() -> PathBuf {
    let home =
        || std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from).join(".cache/reprise");
    std::env::var_os("REPRISE_CACHE").map_or_else(home, PathBuf::from)
}

fn remove_if_there(path: &Path) -> anyhow::Result<()> {
    was_there(fs::remove_file(path)).with_context(|| format!("cannot remove {}", path.display()))
}

fn remove_directory_if_there(path: &Path) -> anyhow::Result<()> {
    was_there(fs::remove_dir_all(path)).with_context(|| format!("cannot remove {}", path.display()))
}

fn was_there(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
