//! Reprise cluster on this machine: a control plane of one or more members, and agents with a pool directory
//! each.
//!
//! The binaries are next to this one; configuration files are written into one directory. Every process
//! prints one line of JSON with its ports when it is ready. Several members share an etcd ([`crate::etcd`]). Only
//! one command at a time uses a directory ([`work_directory`]), and its processes end with it: when the
//! cluster is dropped, at an interruption, or, after a SIGKILL, when the next command claims the directory.

mod member;
mod process;
mod work_directory;

use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::Context;
use reprise_identity::{Expected, Role, Security};
use reprise_policy::ByteSize;
use serde::{Deserialize, Serialize};

use crate::certificates::Certificates;
use crate::configuration::{AgentConfig, StoreChoice};
use crate::etcd::{self, Etcd};
use crate::http::Client;
use crate::interrupt;
use crate::process::ChildProcess;
pub use member::MemberAddresses;
use member::{Member, all_registered};
use process::Process;
pub use process::STOP_WITHIN;
use work_directory::WorkDirectory;
pub use work_directory::end_recorded;

/// File in the cluster's directory with its addresses.
const CLUSTER_FILE: &str = "cluster.json";

/// Name of an agent's pool file, in its folder.
const POOL_FILE: &str = "device-0.pool";

/// Maximum size of a region of an agent's arena.
const REGION_BYTES_MAX: u64 = 64 << 20;

/// Queue pairs that an emulated controller lends: those of the node's engine, and as many for its next session, which
/// may begin before the pairs of the last one are deleted.
const QUEUE_PAIRS: u32 = 8;

/// Addresses of a running cluster; written at its start, read by `replay` and `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ClusterFile {
    /// URL of the etcd that the members share; none with a single member, which has its own store.
    pub etcd: Option<String>,
    /// Members of the control plane; at least one.
    pub members: Vec<MemberAddresses>,
    /// The agents.
    pub agents: Vec<AgentAddresses>,
    /// Folder with the certificates of an administrator; none if connections are plain.
    #[serde(default)]
    pub tls: Option<PathBuf>,
}

/// Addresses of one agent.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AgentAddresses {
    /// Node name.
    pub node: String,
    /// Unix socket of local sessions.
    pub socket: PathBuf,
    /// Admin address, `host:port`.
    pub admin: String,
}

/// Sizes of every agent of a cluster.
#[derive(Clone, Copy, Debug)]
pub struct AgentSizes {
    /// DRAM arena.
    pub arena: ByteSize,
    /// NVMe pool.
    pub pool: ByteSize,
    /// Bytes per second that a node may send and receive for replicas and balance; none: the agent's default.
    pub moves: Option<ByteSize>,
}

/// Device of every agent's pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PoolDevice {
    /// A file.
    #[default]
    File,
    /// A controller that the agent emulates on a file. Engines may drive queue pairs of it and access its extents.
    EmulatedController,
}

/// Connections between the processes of a cluster.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Connections {
    /// Without certificates.
    #[default]
    Plain,
    /// TLS with an authority of the cluster's own.
    Tls,
}

/// Control plane of a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlPlanes {
    /// One member, with its store in a file.
    Embedded,
    /// Members that share an etcd.
    Etcd {
        /// Number of members; at least one.
        members: usize,
    },
}

/// Running cluster; its processes are ended when it is dropped.
#[derive(Debug)]
pub struct Cluster {
    etcd: Option<Etcd>,
    members: Vec<Member>,
    agents: Vec<Agent>,
    /// Further settings of agents, in TOML.
    agent_settings: String,
    /// Certificates of the processes; none if connections are plain.
    certificates: Option<Certificates>,
    /// Released last.
    directory: WorkDirectory,
}

#[derive(Debug)]
struct Agent {
    config: PathBuf,
    sizes: AgentSizes,
    device: PoolDevice,
    process: Process,
    addresses: AgentAddresses,
}

impl ClusterFile {
    /// Reads the file of the cluster in `directory`.
    pub fn read(directory: &Path) -> anyhow::Result<ClusterFile> {
        let path = directory.join(CLUSTER_FILE);
        let text = fs::read_to_string(&path).with_context(|| {
            format!(
                "no running cluster found (cannot read {}): start one with `reprise demo --hold`, or pass the \
                 agents with --socket",
                path.display()
            )
        })?;
        serde_json::from_str(&text).with_context(|| format!("invalid cluster file {}", path.display()))
    }

    /// Returns the addresses of the members' gRPC services.
    pub fn grpc_addresses(&self) -> Vec<String> {
        self.members.iter().map(|member| member.grpc.clone()).collect()
    }

    /// Returns how a command connects to the processes: as an administrator, if they have certificates.
    pub fn security(&self) -> anyhow::Result<Security> {
        let Some(folder) = &self.tls else { return Ok(Security::Plain) };
        Security::read(folder).with_context(|| format!("cannot use the certificates in {}", folder.display()))
    }

    /// Fetches a page of an agent, as an administrator if the processes have certificates.
    pub fn page(&self, agent: &AgentAddresses, path: &str) -> anyhow::Result<String> {
        let expected = Expected::Role(Role::Agent(agent.node.clone()));
        Client::new(self.security()?, expected).get(&agent.admin, path)
    }
}

impl Cluster {
    /// Starts a control plane of one member and `count` agents with fresh data in `directory`.
    pub fn start(directory: &Path, count: usize, sizes: AgentSizes) -> anyhow::Result<Cluster> {
        let mut cluster = Cluster::start_controlplane(directory, ControlPlanes::Embedded)?;
        cluster.start_agents(count, sizes)?;
        Ok(cluster)
    }

    /// Starts a control plane without agents, with fresh data in `directory`; every member is registered.
    pub fn start_controlplane(directory: &Path, control: ControlPlanes) -> anyhow::Result<Cluster> {
        Cluster::start_connected(directory, control, Connections::Plain)
    }

    /// Like [`start_controlplane`](Cluster::start_controlplane), with TLS or without it.
    pub fn start_connected(
        directory: &Path,
        control: ControlPlanes,
        connections: Connections,
    ) -> anyhow::Result<Cluster> {
        let claimed = WorkDirectory::claim(directory)?;
        interrupt::stop_cluster(directory)?;
        let mut cluster = Cluster {
            etcd: None,
            members: Vec::new(),
            agents: Vec::new(),
            agent_settings: String::new(),
            certificates: match connections {
                Connections::Plain => None,
                Connections::Tls => Some(Certificates::create(&directory.join("certificates"))?),
            },
            directory: claimed,
        };
        if let Some(certificates) = &cluster.certificates {
            certificates.issue(&Role::Admin)?;
        }
        match control {
            ControlPlanes::Embedded => {
                let store = directory.join("controlplane.redb");
                remove_if_exists(&store)?;
                cluster.start_member("controlplane", &StoreChoice::Embedded(store))?;
            }
            ControlPlanes::Etcd { members } => {
                let setup = etcd::Setup::on_loopback(&etcd::binary(), directory);
                let data = directory.join(etcd::DATA);
                let etcd = Etcd::try_start(setup, |command| cluster.spawn(command, &data))?;
                let store = StoreChoice::Etcd(etcd.endpoint());
                cluster.etcd = Some(etcd);
                for number in 1..=members {
                    cluster.start_member(&format!("controlplane-{number}"), &store)?;
                }
                cluster.await_membership()?;
            }
        }
        cluster.write_file()?;
        Ok(cluster)
    }

    /// Adds settings in TOML, with dotted keys, for agents that start from now on.
    pub fn configure_agents(&mut self, settings: &str) {
        self.agent_settings.push_str(settings);
        self.agent_settings.push('\n');
    }

    /// Starts agents named `node-1` and so on, with pool files.
    pub fn start_agents(&mut self, count: usize, sizes: AgentSizes) -> anyhow::Result<()> {
        self.start_agents_on(PoolDevice::File, count, sizes)
    }

    /// Starts agents named `node-1` and so on, with the given kind of device.
    pub fn start_agents_on(
        &mut self,
        device: PoolDevice,
        count: usize,
        sizes: AgentSizes,
    ) -> anyhow::Result<()> {
        for _ in 0..count {
            let agent = self.start_agent(&format!("node-{}", self.agents.len() + 1), (sizes, device))?;
            self.agents.push(agent);
        }
        self.write_file()
    }

    /// Returns the addresses of the cluster.
    pub fn file(&self) -> ClusterFile {
        ClusterFile {
            etcd: self.etcd.as_ref().map(Etcd::endpoint),
            members: self.members.iter().map(Member::addresses).collect(),
            agents: self.agents.iter().map(|agent| agent.addresses.clone()).collect(),
            tls: self.certificates.as_ref().map(|certificates| certificates.folder_of(&Role::Admin)),
        }
    }

    /// Returns how commands connect to the processes.
    pub fn security(&self) -> anyhow::Result<Security> {
        self.file().security()
    }

    /// Returns the cluster's directory.
    pub fn path(&self) -> &Path {
        self.directory.path()
    }

    /// Starts an additional process, recorded so that it always ends with the cluster's own processes.
    /// `argument`, a path, identifies it among processes of the same program.
    pub fn spawn(&mut self, command: Command, argument: &Path) -> anyhow::Result<ChildProcess> {
        let program = Path::new(command.get_program()).file_name().unwrap_or_default().to_owned();
        self.directory.recorded(&program.to_string_lossy(), argument, || {
            let child = ChildProcess::try_spawn(command)?;
            Ok((child.id(), child))
        })
    }

    /// Returns the address of etcd's metrics, `host:port`.
    pub fn etcd_metrics(&self) -> Option<String> {
        self.etcd.as_ref().map(Etcd::metrics)
    }

    /// Returns the pool file of an agent.
    pub fn pool_path(&self, index: usize) -> PathBuf {
        self.directory.path().join(&self.agents[index].addresses.node).join(POOL_FILE)
    }

    /// Ends an agent with SIGKILL.
    pub fn kill_agent(&mut self, index: usize) {
        self.agents[index].process.child.kill();
    }

    /// Configures the size of an agent's pool for its next start: a pool may grow.
    pub fn configure_pool(&mut self, index: usize, bytes: ByteSize) -> anyhow::Result<()> {
        let agent = &mut self.agents[index];
        agent.sizes.pool = bytes;
        let (node, settings) = (agent.addresses.node.clone(), (agent.sizes, agent.device));
        self.write_config(&node, settings).map(drop)
    }

    /// Restarts a killed agent on its pool; returns the seconds until it was ready.
    pub fn restart_agent(&mut self, index: usize) -> anyhow::Result<f64> {
        let started = Instant::now();
        let agent = &mut self.agents[index];
        let log = self.directory.path().join(format!("{}.log", agent.addresses.node));
        agent.process = Process::start("reprise-agent", &agent.config, &log, &mut self.directory)?;
        agent.addresses.admin = agent.process.ready.admin.clone();
        self.write_file()?;
        Ok(started.elapsed().as_secs_f64())
    }

    /// Returns the process ids of the agents.
    pub fn agent_pids(&self) -> impl Iterator<Item = u32> {
        self.agents.iter().map(|agent| agent.process.child.id())
    }

    /// Returns the process id of a member of the control plane.
    pub fn member_pid(&self, index: usize) -> u32 {
        self.members[index].pid()
    }

    /// Ends a member of the control plane with SIGKILL.
    pub fn kill_member(&mut self, index: usize) {
        self.members[index].kill();
    }

    /// Restarts a killed member on its address and store.
    pub fn restart_member(&mut self, index: usize) -> anyhow::Result<()> {
        self.members[index].restart(&mut self.directory)?;
        self.write_file()
    }

    /// Waits until every member is registered and knows all others.
    pub fn await_membership(&self) -> anyhow::Result<()> {
        all_registered(&self.file().members, &self.security()?)
    }

    fn start_member(&mut self, name: &str, store: &StoreChoice) -> anyhow::Result<()> {
        let tls = self.certificates_of(&Role::Member)?;
        let member = Member::start(name, (store, tls.as_deref()), &mut self.directory)?;
        self.members.push(member);
        Ok(())
    }

    fn start_agent(
        &mut self,
        node: &str,
        (sizes, device): (AgentSizes, PoolDevice),
    ) -> anyhow::Result<Agent> {
        let home = self.directory.path().join(node);
        fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
        remove_if_exists(&home.join(POOL_FILE))?;
        let config = self.write_config(node, (sizes, device))?;
        let log = self.directory.path().join(format!("{node}.log"));
        let process = Process::start("reprise-agent", &config, &log, &mut self.directory)?;
        let addresses = AgentAddresses {
            node: node.to_owned(),
            socket: process.ready.socket.clone(),
            admin: process.ready.admin.clone(),
        };
        Ok(Agent { config, sizes, device, process, addresses })
    }

    /// Writes the configuration of an agent; returns its path.
    fn write_config(&self, node: &str, (sizes, device): (AgentSizes, PoolDevice)) -> anyhow::Result<PathBuf> {
        let pool = self.directory.path().join(node).join(POOL_FILE);
        let socket = self.directory.path().join(node).join("agent.sock");
        let moves = sizes.moves.map(|bytes| format!("placement.bandwidth = \"{bytes}\"\n"));
        let tls = self.certificates_of(&Role::Agent(node.to_owned()))?;
        let config = AgentConfig {
            node,
            socket: &socket,
            address: Ipv4Addr::LOCALHOST,
            arena: sizes.arena,
            region: ByteSize(sizes.arena.0.min(REGION_BYTES_MAX)),
            pool: Some((&pool, sizes.pool)),
            control_plane: self.members.iter().map(|member| member.addresses().grpc).collect(),
            tls: tls.as_deref(),
        };
        let (moves, more) = (moves.unwrap_or_default(), &self.agent_settings);
        let device = device.settings(&pool, sizes.pool);
        let text = config.text(&format!("pool.reserve_bytes = \"64MiB\"\n{device}{moves}{more}"));
        let path = self.directory.path().join(format!("{node}.toml"));
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(path)
    }

    /// Returns the certificates of a role that the caller simulates.
    pub fn security_of(&self, role: &Role) -> anyhow::Result<Security> {
        let Some(folder) = self.certificates_of(role)? else { return Ok(Security::Plain) };
        Ok(Security::read(&folder)?)
    }

    /// Issues a certificate, if connections have them; returns its folder.
    fn certificates_of(&self, role: &Role) -> anyhow::Result<Option<PathBuf>> {
        self.certificates.as_ref().map(|certificates| certificates.issue(role)).transpose()
    }

    fn write_file(&self) -> anyhow::Result<()> {
        let path = self.directory.path().join(CLUSTER_FILE);
        let text = serde_json::to_string_pretty(&self.file()).context("encoding the cluster file")?;
        fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))
    }
}

impl PoolDevice {
    /// Returns the settings of an agent that replace those of a pool file.
    fn settings(self, file: &Path, bytes: ByteSize) -> String {
        match self {
            PoolDevice::File => String::new(),
            PoolDevice::EmulatedController => format!(
                "pool.devices = [{{ emulated = {}, bytes = \"{bytes}\" }}]\n\
                 session.extents = true\n\
                 session.queue_pairs = {QUEUE_PAIRS}\n",
                toml::Value::from(file.to_string_lossy().into_owned())
            ),
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        for agent in &mut self.agents {
            agent.process.child.stop(STOP_WITHIN);
        }
        for index in 0..self.agents.len() {
            // Pools are large and not useful without the cluster.
            drop(fs::remove_file(self.pool_path(index)));
        }
        self.members.iter_mut().for_each(Member::stop);
        self.etcd.iter_mut().for_each(|etcd| etcd.running().stop(STOP_WITHIN));
        // All processes have ended: remove the files with their addresses.
        drop(end_recorded(self.directory.path()));
        interrupt::exit_only();
    }
}

/// Returns the directory of clusters, downloads and builds: `$REPRISE_CACHE`, or `~/.cache/reprise`.
pub fn cache_directory() -> PathBuf {
    let home =
        || std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from).join(".cache/reprise");
    std::env::var_os("REPRISE_CACHE").map_or_else(home, PathBuf::from)
}

fn remove_if_exists(path: &Path) -> anyhow::Result<()> {
    ignore_not_found(fs::remove_file(path)).with_context(|| format!("cannot remove {}", path.display()))
}

fn ignore_not_found(removed: std::io::Result<()>) -> std::io::Result<()> {
    match removed {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}
