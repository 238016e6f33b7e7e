//! A whole cluster on one machine: control plane, name server and nodes ([`Node`]) with real pods.
//!
//! ```text
//!                     hub 10.77.0.1: etcd (loopback), API server, controller manager, scheduler, CoreDNS
//!   node1 10.77.0.11 ──┴── node2 10.77.0.12       pods 10.244.N.0/24, services 10.96.0.0/16, by plain routes
//! ```
//!
//! A program that wants one calls [`enter`] first. The test itself is on the hub: it reaches pods by their addresses, and what runs outside
//! of the program's namespaces is not touched.
//!
//! Invariants:
//! * everything ends with the handle, and nothing is left behind: what was not there before fails the test
//!   ([`super::leftovers`]). A program that is killed leaves control groups and a folder; the next start removes them;
//! * the logs of all programs are files in the cluster's folder, and shown when a test fails.
//!
//! Deliberately absent: network policies (they are stored and not enforced), volumes beyond a few folders a node, load balancers.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node as NodeObject, ServiceAccount};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};

use super::certificates::User;
use super::image::Image;
use super::leftovers::Inventory;
use super::node::{Node, PAUSE, Place};
use super::{ApiServer, cgroups, programs, users, volumes};
use crate::host::{self, Host, Network};
use crate::process::Running;
use crate::seed::say;
use crate::wait::{PATIENCE, wait_until};
use crate::world::{self, World};

/// The image of the tests' own pods: `serve PORT`, `get HOST:PORT` (`e2e/src/bin/reprise-e2e-pod.rs`). On every node from
/// the start.
pub const POD: &str = "localhost/reprise-e2e/pod:1";

/// The program in it.
pub const POD_PROGRAM: &str = "/pod";

/// Nodes that fit into the addresses that are given away.
const NODES_MAX: u8 = 9;

/// From the start of nodes until all of them take pods: some 10 s on two cores that do nothing else.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// A node that is silent for this long is not ready. Its kubelet says every 2 s that it lives.
const SILENT_SECONDS: u32 = 8;

/// The same where most nodes are played by somebody who says once that they are ready.
const SILENT_SECONDS_PLAYED: u32 = 86_400;

/// Calls a second that each controller may make where there are many nodes; the default of 20 would make a pod of each of 1,000 nodes in 50 s.
const CALLS_A_SECOND: &str = "300";

/// Locked as long as its cluster lives.
const OWNER: &str = "owner";

/// What every cluster has.
const OBJECTS: &str = include_str!("../../kubernetes/objects.yaml");

/// Which nodes a cluster is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Population {
    /// Its own, with kubelets that say every 2 s that they live.
    Own,
    /// Besides many that are played ([`super::fleet`]).
    Played,
}

/// A cluster. In the order in which it ends.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    programs: Vec<Running>,
    server: ApiServer,
    network: Network,
    end: End,
    _owner: File,
    world: World,
}

/// Looks what has been left behind.
#[derive(Debug)]
struct End {
    before: Inventory,
}

impl Drop for End {
    fn drop(&mut self) {
        let left = self.before.leftovers();
        if left.is_empty() {
            return;
        }
        let text = format!("the cluster has left behind:\n  {}", left.join("\n  "));
        // A second panic would hide the first.
        if std::thread::panicking() { say(&text) } else { panic!("{text}") }
    }
}

/// Makes ready all that clusters are made of, and runs this program again as root of namespaces of its own, where it returns. To be
/// called before anything else.
///
/// # Errors
/// What this machine lacks, in words.
pub fn enter() -> Result<(), String> {
    if !host::is_in_own_namespaces() {
        programs::prepare()?;
    }
    host::enter_own_namespaces()
}

impl Cluster {
    /// Starts one, and waits until all its nodes take pods.
    ///
    /// # Panics
    /// When it does not start, or [`enter`] has not been called.
    pub fn start(nodes: u8) -> Cluster {
        Cluster::start_for(nodes, Population::Own)
    }

    /// Starts one with so many nodes of its own, and waits until these take pods.
    ///
    /// # Panics
    /// As [`Cluster::start`].
    pub fn start_for(nodes: u8, population: Population) -> Cluster {
        assert!((1..=NODES_MAX).contains(&nodes), "1 to {NODES_MAX} nodes");
        let started = Instant::now();
        remove_abandoned();
        let world = World::new();
        let name = name_of(world.folder());
        let owner = own(world.folder());
        let end = End { before: Inventory::take(&name) };
        let mut network = Network::new();
        let hub = network.hub();
        let folder = world.folder().join("kubernetes");
        let server = ApiServer::start_in(&folder, hub.address());
        for log in super::logs_in(&folder) {
            world.watch_log(log);
        }
        let places: Vec<Place> = (1..=nodes).map(|number| place(&mut network, number)).collect();
        connect(&network, &hub, &places);
        let start = |place: Place| {
            let folder = world.folder().join(&place.name);
            Node::start(place, &name, folder, &server)
        };
        let nodes = places.into_iter().map(start).collect();
        let mut cluster = Cluster { nodes, programs: Vec::new(), server, network, end, _owner: owner, world };
        for node in &cluster.nodes {
            node.logs().into_iter().for_each(|log| cluster.world.watch_log(log));
        }
        cluster.server.write_kubeconfig(&User::ADMIN, &cluster.kubeconfig());
        // Rights come before who needs them.
        cluster.apply(OBJECTS);
        cluster.start_programs(population);
        cluster.import_own_images();
        cluster.wait_until_ready();
        cluster.apply(&volumes::lay_down(&cluster.nodes));
        say(&format!("a cluster of {} nodes is ready after {:.1?}", cluster.nodes.len(), started.elapsed()));
        cluster
    }

    /// Where its files are, and those of whoever uses it. It is gone with the cluster.
    pub fn folder(&self) -> &Path {
        self.world.folder()
    }

    /// The file by which programs talk to it as who may do everything.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder().join("admin.kubeconfig")
    }

    /// Its API server.
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// A client of who may do everything; used within [`Cluster::block_on`].
    pub fn client(&self) -> Client {
        self.server.admin()
    }

    /// Runs what talks to it.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.server.block_on(future)
    }

    /// Runs kubectl, and gives what it says.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments).unwrap_or_else(|said| panic!("kubectl {}: {said}", arguments.join(" ")))
    }

    /// Runs kubectl.
    ///
    /// # Errors
    /// What it says when it fails.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        result(command.args(arguments).output().expect("kubectl can be run"))
    }

    /// Runs kubectl, begun: whoever waits for its end sees what happens meanwhile. What it says of a failure is for the test's own output.
    ///
    /// # Panics
    /// When it cannot be run.
    pub fn begin_kubectl(&self, arguments: &[&str]) -> Running {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        Running::spawn(command)
    }

    /// Applies objects, in YAML, by server-side apply.
    ///
    /// # Panics
    /// When they are refused.
    pub fn apply(&self, objects: &str) {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        command.args(["apply", "--server-side", "--filename=-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("kubectl can be run");
        let mut input = child.stdin.take().expect("piped above");
        // It reads all of it before it writes; a failure is told by its end.
        let _ = input.write_all(objects.as_bytes());
        drop(input);
        let output = child.wait_with_output().expect("one's own child can be waited for");
        result(output).unwrap_or_else(|said| panic!("kubectl apply: {said}"));
    }

    /// Runs Helm.
    ///
    /// # Errors
    /// What it says when it fails.
    pub fn helm(&self, arguments: &[&str]) -> Result<String, String> {
        result(self.helm_command().args(arguments).output().expect("Helm can be run"))
    }

    /// Helm, with nothing of the user's own configuration.
    pub fn helm_command(&self) -> Command {
        let mut command = self.command(&programs::helm());
        for home in ["CACHE", "CONFIG", "DATA"] {
            command.env(format!("HELM_{home}_HOME"), self.folder().join("helm-files"));
        }
        command
    }

    /// A program that talks to this cluster when it is told by the environment.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        // Discovered kinds are kept by kubectl in a folder of the user's, else.
        command.env("KUBECONFIG", self.kubeconfig()).env("KUBECACHEDIR", self.folder().join("kubectl-files"));
        command
    }

    /// The programs that people look around with: kubectl and Helm.
    pub fn tools(&self) -> [(&'static str, PathBuf); 2] {
        [("kubectl", programs::kubernetes("kubectl")), ("helm", programs::helm())]
    }

    /// Gives all nodes the images of an archive.
    ///
    /// # Panics
    /// When a node does not take them.
    pub fn import_image(&self, archive: &Path) {
        std::thread::scope(|scope| {
            for node in &self.nodes {
                scope.spawn(|| node.import_image(archive));
            }
        });
    }

    /// Its nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// A node, from 0 on, to do something to it.
    pub fn node(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// Pulls the cable of a node: it reaches nobody, and its own pods reach each other.
    pub fn cut_link(&self, index: usize) {
        self.network.unplug(self.nodes[index].host());
    }

    /// Puts the cable of a node in again.
    pub fn heal_link(&self, index: usize) {
        self.network.plug(self.nodes[index].host());
    }

    /// SIGKILL to the API server.
    pub fn stop_api_server(&mut self) {
        self.server.kill();
    }

    /// Starts the API server again.
    pub fn start_api_server(&mut self) {
        self.server.restart();
    }

    /// Whether the cluster says that a node takes pods.
    pub fn is_ready(&self, node: &Node) -> bool {
        self.ready_nodes().iter().any(|name| name == node.name())
    }

    /// Waits until all nodes take pods.
    ///
    /// # Panics
    /// When they do not.
    pub fn wait_until_ready(&self) {
        wait_until("all nodes to be ready", READY_WITHIN, || {
            std::thread::sleep(Duration::from_millis(100));
            (self.ready_nodes().len() == self.nodes.len() && self.has_default_account()).then_some(())
        });
    }

    /// What it would leave behind if it ended now, with nothing of it ended: processes, mounts, networks, control groups.
    pub fn inventory(&self) -> Vec<String> {
        self.end.before.leftovers()
    }

    /// Prints the ends of all logs and the error of a test that has just panicked.
    pub fn show_failure(&self, test: &str) {
        self.world.show_failure(test);
    }

    fn ready_nodes(&self) -> Vec<String> {
        let nodes: Api<NodeObject> = Api::all(self.client());
        let list = self.block_on(async {
            tokio::time::timeout(PATIENCE, nodes.list(&ListParams::default())).await.ok()?.ok()
        });
        let is_ready = |node: &NodeObject| {
            let conditions = node.status.as_ref().and_then(|status| status.conditions.as_ref());
            let mut conditions = conditions.into_iter().flatten();
            conditions.any(|condition| condition.type_ == "Ready" && condition.status == "True")
        };
        list.into_iter().flatten().filter(is_ready).map(|node| node.name_any()).collect()
    }

    /// Pods are refused before it is there.
    fn has_default_account(&self) -> bool {
        let accounts: Api<ServiceAccount> = Api::default_namespaced(self.client());
        self.block_on(accounts.get_opt("default")).is_ok_and(|found| found.is_some())
    }

    fn start_programs(&mut self, population: Population) {
        let keys = |name: &str| self.server.authority.file(name).display().to_string();
        let config = |user: &User<'_>, name: &str| {
            let file = self.folder().join(name);
            self.server.write_kubeconfig(user, &file);
            format!("--kubeconfig={}", file.display())
        };
        let mut manager = Command::new(programs::kubernetes("kube-controller-manager"));
        manager
            .arg(config(&users::CONTROLLER_MANAGER, "controller-manager.kubeconfig"))
            .arg(format!("--service-account-private-key-file={}", keys("accounts.key")))
            .arg(format!("--root-ca-file={}", keys("ca.crt")))
            .args(["--use-service-account-credentials=true", "--leader-elect=false"])
            // Its default is a folder of the machine.
            .arg(format!("--flex-volume-plugin-dir={}", self.folder().join("volumes").display()))
            .arg("--node-monitor-period=1s")
            .arg(match population {
                Population::Own => format!("--node-monitor-grace-period={SILENT_SECONDS}s"),
                Population::Played => format!("--node-monitor-grace-period={SILENT_SECONDS_PLAYED}s"),
            });
        if population == Population::Played {
            manager.args(["--kube-api-qps", CALLS_A_SECOND, "--kube-api-burst", CALLS_A_SECOND]);
        }
        let mut scheduler = Command::new(programs::kubernetes("kube-scheduler"));
        scheduler.arg(config(&users::SCHEDULER, "scheduler.kubeconfig")).arg("--leader-elect=false");
        let mut names = Command::new(programs::coredns());
        config(&users::NAMES, "coredns.kubeconfig");
        let corefile = self.folder().join("Corefile");
        fs::write(&corefile, self.corefile()).expect("a file of one's own can be written");
        names.arg("-conf").arg(corefile);
        for (name, command) in [("controller-manager", manager), ("scheduler", scheduler), ("coredns", names)]
        {
            let running = self.spawn(name, command);
            self.programs.push(running);
        }
    }

    /// Names of services and pods; for names outside of the cluster there is nobody to ask.
    fn corefile(&self) -> String {
        let config = self.folder().join("coredns.kubeconfig");
        format!(
            ".:53 {{\n  ready 127.0.0.1:8181\n  errors\n  cache 5\n  kubernetes cluster.local in-addr.arpa {{\n    \
             kubeconfig {}\n    ttl 5\n  }}\n}}\n",
            config.display()
        )
    }

    /// A program that belongs to the cluster; its log is shown when a test fails.
    pub(super) fn spawn(&self, name: &str, mut command: Command) -> Running {
        let file = self.folder().join(format!("{name}.log"));
        self.world.watch_log(file.clone());
        let log = File::options().create(true).append(true).open(file).expect("a log can be written");
        let again = log.try_clone().expect("a descriptor can be copied");
        command.stdin(Stdio::null()).stdout(again).stderr(log);
        Running::spawn(command)
    }

    fn import_own_images(&self) {
        let program = programs::pod();
        let files = [(POD_PROGRAM, program)];
        for (name, entrypoint) in [(PAUSE, &[POD_PROGRAM, "pause"][..]), (POD, &[POD_PROGRAM][..])] {
            let archive = self.folder().join("image.tar");
            Image { name, entrypoint, files: &files }.write(&archive);
            self.import_image(&archive);
        }
    }
}

/// A cluster's name is that of its folder.
fn name_of(folder: &Path) -> String {
    folder.file_name().expect("a folder").to_string_lossy().replace('-', "")
}

fn place(network: &mut Network, number: u8) -> Place {
    Place { name: format!("node{number}"), host: network.host(), number }
}

/// Routes to the pods of all nodes, from everywhere.
fn connect(network: &Network, hub: &Host, places: &[Place]) {
    for place in places {
        network.route(&place.host, "default", hub);
        network.route(hub, &place.pods(), &place.host);
        for other in places.iter().filter(|other| other.number != place.number) {
            network.route(&place.host, &other.pods(), &other.host);
        }
    }
}

/// Marks a folder as used until the file is closed.
fn own(folder: &Path) -> File {
    let new = folder.join("owner.new");
    let file = File::create(&new).expect("a folder of one's own takes files");
    file.lock().expect("nobody else has it");
    // Seen by others only when it is locked.
    fs::rename(new, folder.join(OWNER)).expect("a file of one's own can be renamed");
    file
}

/// Removes what clusters have left whose programs were killed.
fn remove_abandoned() {
    let folders = world::cache().join("e2e");
    let is_alive = |cluster: &str| {
        let owner = File::open(folders.join(cluster).join(OWNER));
        owner.is_ok_and(|owner| owner.try_lock().is_err())
    };
    cgroups::remove_abandoned(is_alive);
    for entry in fs::read_dir(&folders).into_iter().flatten().flatten() {
        let is_ones = entry.path().join(OWNER).exists();
        if is_ones && !is_alive(&entry.file_name().to_string_lossy()) {
            // What cannot be removed is no worse than before.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn result(output: Output) -> Result<String, String> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}
