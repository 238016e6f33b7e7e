//! A Reprise cluster on this machine: one control plane, agents with a pool directory each.
//!
//! Started from the binaries beside this one, with configuration files written into one directory. Every
//! process says in one line of JSON on its standard output when it is ready and which ports it got. One command
//! at a time has a directory ([`directory`]), and its processes end with it: when the cluster is dropped, at an
//! interruption, or, after a SIGKILL, when the next command wants the directory.

mod directory;

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use reprise_policy::ByteSize;
use serde::{Deserialize, Serialize};

use crate::interrupt;
use directory::ClusterDirectory;
pub(crate) use directory::end_recorded;

/// How long a process may take until it is ready: formatting or recovering a pool and touching its arena.
const READY_WITHIN: Duration = Duration::from_secs(60);

/// How long a process may take to end after SIGTERM (it flushes what is not durable yet).
const STOP_WITHIN: Duration = Duration::from_secs(10);

/// File in the cluster's directory that says how to reach it.
const CLUSTER_FILE: &str = "cluster.json";

/// The control plane's configuration and log, in the cluster's directory.
const CONTROLPLANE_CONFIG: &str = "controlplane.toml";
const CONTROLPLANE_LOG: &str = "controlplane.log";

/// An agent's pool, in its folder.
const POOL_FILE: &str = "device-0.pool";

/// How to reach a running cluster; written by whoever starts one, read by `replay` and `status`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct ClusterFile {
    /// The control plane's gRPC address, `host:port`.
    pub(crate) controlplane: String,
    /// The control plane's admin address.
    pub(crate) controlplane_admin: String,
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
}

/// A running cluster; its processes are ended when it is dropped.
#[derive(Debug)]
pub(crate) struct Cluster {
    controlplane: Process,
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

/// A child process that has said that it is ready.
#[derive(Debug)]
struct Process {
    child: Child,
    ready: ReadyLine,
}

/// The line that a process prints when it is ready. Fields that a process has no use for are absent.
#[derive(Clone, Debug, Deserialize)]
struct ReadyLine {
    ready: bool,
    admin: String,
    #[serde(default)]
    grpc: String,
    #[serde(default)]
    socket: PathBuf,
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
}

impl Cluster {
    /// Starts a control plane and `count` agents with fresh data in `directory`.
    pub(crate) fn start(directory: &Path, count: usize, sizes: AgentSizes) -> anyhow::Result<Cluster> {
        let mut claimed = ClusterDirectory::claim(directory)?;
        interrupt::ends_cluster(directory)?;
        let config = directory.join(CONTROLPLANE_CONFIG);
        let store = directory.join("controlplane.redb");
        remove_if_there(&store)?;
        let text = format!(
            "listen = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\n\n[store]\nkind = \"embedded\"\npath = {}\n",
            quoted(&store)
        );
        fs::write(&config, text).with_context(|| format!("cannot write {}", config.display()))?;
        let controlplane =
            Process::start("reprise-controlplane", &config, &directory.join(CONTROLPLANE_LOG), &mut claimed)?;
        let mut cluster = Cluster { controlplane, agents: Vec::new(), directory: claimed };
        for index in 0..count {
            let agent = cluster.start_agent(&format!("node-{}", index + 1), sizes)?;
            cluster.agents.push(agent);
        }
        cluster.write_file()?;
        Ok(cluster)
    }

    /// How to reach the cluster.
    pub(crate) fn file(&self) -> ClusterFile {
        ClusterFile {
            controlplane: self.controlplane.ready.grpc.clone(),
            controlplane_admin: self.controlplane.ready.admin.clone(),
            agents: self.agents.iter().map(|agent| agent.addresses.clone()).collect(),
        }
    }

    /// The pool file of an agent.
    pub(crate) fn pool_path(&self, index: usize) -> PathBuf {
        self.directory.path().join(&self.agents[index].addresses.node).join(POOL_FILE)
    }

    /// Ends an agent with SIGKILL: nothing of it gets a chance to tidy up.
    pub(crate) fn kill_agent(&mut self, index: usize) -> anyhow::Result<()> {
        let child = &mut self.agents[index].process.child;
        child.kill().context("killing an agent")?;
        child.wait().context("waiting for a killed agent")?;
        Ok(())
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

    /// The control plane's process.
    pub(crate) fn controlplane_pid(&self) -> u32 {
        self.controlplane.child.id()
    }

    /// Ends the control plane with SIGKILL and starts it again on the store it left behind.
    pub(crate) fn restart_controlplane(&mut self) -> anyhow::Result<()> {
        self.controlplane.child.kill().context("killing the control plane")?;
        self.controlplane.child.wait().context("waiting for the killed control plane")?;
        let path = self.directory.path();
        let (config, log) = (path.join(CONTROLPLANE_CONFIG), path.join(CONTROLPLANE_LOG));
        self.controlplane = Process::start("reprise-controlplane", &config, &log, &mut self.directory)?;
        self.write_file()
    }

    fn start_agent(&mut self, node: &str, sizes: AgentSizes) -> anyhow::Result<Agent> {
        let home = self.directory.path().join(node);
        fs::create_dir_all(&home).with_context(|| format!("cannot create {}", home.display()))?;
        let pool = home.join(POOL_FILE);
        remove_if_there(&pool)?;
        let socket = home.join("agent.sock");
        let config = self.directory.path().join(format!("{node}.toml"));
        // One engine a node, which may have all that engines may have.
        let text = format!(
            "[node]\nname = \"{node}\"\n\n[session]\nsocket = {socket}\n\n[arena]\nbytes = \"{arena}\"\nregion_bytes = \
             \"{region}\"\n\n[pool]\ndevices = [{{ path = {pool}, bytes = \"{bytes}\" }}]\n\n[cache]\narena_session_permille = 1000\n\n[peers]\nlisten = \
             \"127.0.0.1:0\"\n\n[controlplane]\naddress = \"{controlplane}\"\n\n[admin]\nlisten = \
             \"127.0.0.1:0\"\n",
            socket = quoted(&socket),
            arena = sizes.arena,
            region = ByteSize(sizes.arena.0.min(64 << 20)),
            pool = quoted(&pool),
            bytes = sizes.pool,
            controlplane = self.controlplane.ready.grpc,
        );
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
            agent.process.stop();
        }
        for index in 0..self.agents.len() {
            // Pools are large and of no use to anyone once the cluster is gone.
            drop(fs::remove_file(self.pool_path(index)));
        }
        self.controlplane.stop();
        // All have ended: this removes the files that say how to reach them.
        drop(end_recorded(self.directory.path()));
        interrupt::ends_only_this();
    }
}

impl Process {
    fn start(
        program: &str,
        config: &Path,
        log: &Path,
        directory: &mut ClusterDirectory,
    ) -> anyhow::Result<Process> {
        let file = fs::File::options()
            .create(true)
            .append(true)
            .open(log)
            .with_context(|| format!("cannot write {}", log.display()))?;
        let path = binary(program)?;
        let held_off = interrupt::hold_off();
        let mut child = Command::new(&path)
            .arg("--config")
            .arg(config)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .stderr(file)
            .spawn()
            .with_context(|| format!("cannot start {}", path.display()))?;
        directory.record(child.id(), program, config)?;
        drop(held_off);
        let output = child.stdout.take().expect("piped above");
        let (sender, receiver) = mpsc::sync_channel(1);
        // The thread ends with the line or with the process.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line).map(|_| line);
            drop(sender.send(read));
        });
        let line = receiver.recv_timeout(READY_WITHIN);
        let ready = match line {
            Ok(Ok(line)) => serde_json::from_str::<ReadyLine>(&line).ok().filter(|ready| ready.ready),
            Ok(Err(_)) | Err(_) => None,
        };
        let Some(ready) = ready else {
            drop(child.kill());
            drop(child.wait());
            bail!("{program} did not become ready; the end of its log {}:\n{}", log.display(), tail(log));
        };
        Ok(Process { child, ready })
    }

    /// Asks the process to end, and ends it when it does not.
    fn stop(&mut self) {
        if matches!(self.child.try_wait(), Ok(Some(_))) {
            return;
        }
        terminate(&self.child);
        let give_up = Instant::now() + STOP_WITHIN;
        while Instant::now() < give_up {
            if matches!(self.child.try_wait(), Ok(Some(_))) {
                return;
            }
            std::thread::sleep(Duration::from_millis(10));
        }
        drop(self.child.kill());
        drop(self.child.wait());
    }
}

/// Where this machine's clusters, downloads and builds live: `$REPRISE_CACHE`, else `~/.cache/reprise`.
pub(crate) fn cache_directory() -> PathBuf {
    let home =
        || std::env::var_os("HOME").map_or_else(std::env::temp_dir, PathBuf::from).join(".cache/reprise");
    std::env::var_os("REPRISE_CACHE").map_or_else(home, PathBuf::from)
}

/// A binary beside this one.
pub(crate) fn binary(program: &str) -> anyhow::Result<PathBuf> {
    let own = std::env::current_exe().context("cannot find this program's own file")?;
    let path = own.with_file_name(program);
    if !path.exists() {
        bail!("{} is missing: build the whole workspace (`cargo build --release`)", path.display());
    }
    Ok(path)
}

fn terminate(child: &Child) {
    let pid = rustix::process::Pid::from_child(child);
    if let Err(error) = rustix::process::kill_process(pid, rustix::process::Signal::TERM) {
        tracing::debug!(%error, "a process to be ended was gone");
    }
}

fn remove_if_there(path: &Path) -> anyhow::Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        _ => Ok(()),
    }
}

/// A path as a TOML string.
fn quoted(path: &Path) -> String {
    toml::Value::String(path.to_string_lossy().into_owned()).to_string()
}

fn tail(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(15)..].join("\n")
}
