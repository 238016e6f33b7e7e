//! A whole cluster on one machine: control plane, name server and nodes ([`Node`]) with real pods.
//!
//! ```text
//!                     hub 10.77.0.1: etcd (loopback), API server, controller manager, scheduler, CoreDNS
//!   node1 10.77.0.11 ──┴── node2 10.77.0.12       pods 10.244.N.0/24, services 10.96.0.0/16, by plain routes
//! ```
//!
//! A program calls [`enter`] before it starts a cluster. The test itself runs on the hub and reaches pods by
//! their addresses. Nothing outside of the program's namespaces is touched.
//!
//! Invariants:
//! * everything ends with the handle and nothing is left behind: a leftover fails the test
//!   ([`super::leftovers`]). A killed program leaves control groups and a folder, which the next start
//!   removes;
//! * the logs of all programs are files in the cluster's folder, and are printed when a test fails.
//!
//! Deliberately absent: network policies (stored, not enforced), volumes other than a few folders a node,
//! load balancers.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::api::core::v1::{Node as NodeObject, ServiceAccount};
use kube::api::{Api, ListParams};
use kube::{Client, ResourceExt};
use reprise_testkit::cluster::cache_directory;

use super::certificates::User;
use super::image::Image;
use super::leftovers::Inventory;
use super::node::{Node, NodeIdentity, PAUSE};
use super::{ApiServer, cgroups, programs, users, volumes};
use crate::host::{self, Host, Network};
use crate::process::ChildProcess;
use crate::seed::print_line;
use crate::test_env::TestEnv;
use crate::wait::{PATIENCE, wait_until};

/// The image of the tests' own pods: `serve PORT`, `get HOST:PORT` (`e2e/src/bin/reprise-e2e-pod.rs`). Every
/// node has it from the start.
pub const POD: &str = "localhost/reprise-e2e/pod:1";

/// Path of the program in the image.
pub const POD_PROGRAM: &str = "/pod";

/// Maximum number of nodes, for which there are addresses.
const NODES_MAX: u8 = 9;

/// Bound from the start of nodes until all accept pods: some 10 s on two idle cores.
const READY_WITHIN: Duration = Duration::from_secs(300);

/// Silence after which a node is not ready. Its kubelet reports every 2 s.
const SILENT_SECONDS: u32 = 8;

/// The same with simulated nodes, whose kubelets report only once.
const SILENT_SECONDS_PLAYED: u32 = 86_400;

/// Calls per second of each controller with simulated nodes. The default of 20 would need 50 s to create a
/// pod on each of 1,000 nodes.
const CALLS_A_SECOND: &str = "300";

/// File that is locked while its cluster lives.
const OWNER: &str = "owner";

/// Objects that every cluster has.
const OBJECTS: &str = include_str!("../../kubernetes/objects.yaml");

/// The kinds of nodes in a cluster.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Population {
    /// Only real nodes, with kubelets that report every 2 s.
    Real,
    /// Real nodes, and many simulated ones ([`super::fleet`]).
    Simulated,
}

/// A running cluster. The fields are dropped in this order.
#[derive(Debug)]
pub struct Cluster {
    nodes: Vec<Node>,
    programs: Vec<ChildProcess>,
    server: ApiServer,
    network: Network,
    leftover_check: LeftoverCheck,
    _owner: File,
    env: TestEnv,
}

/// Checks on drop that nothing was left behind.
#[derive(Debug)]
struct LeftoverCheck {
    before: Inventory,
}

impl Drop for LeftoverCheck {
    fn drop(&mut self) {
        let leftovers = self.before.leftovers();
        if leftovers.is_empty() {
            return;
        }
        let text = format!("the cluster has left behind:\n  {}", leftovers.join("\n  "));
        // A second panic would abort the process and hide the first one.
        if std::thread::panicking() { print_line(&text) } else { panic!("{text}") }
    }
}

/// Builds and installs what clusters need, and runs this program again as root in its own namespaces, where
/// this function returns. Call it before anything else.
///
/// # Errors
/// What this machine lacks.
pub fn enter() -> Result<(), String> {
    if !host::is_in_own_namespaces() {
        programs::prepare()?;
    }
    host::enter_own_namespaces()
}

impl Cluster {
    /// Starts a cluster of real nodes, and waits until all accept pods.
    ///
    /// # Panics
    /// If it does not start, or [`enter`] was not called.
    pub fn start(nodes: u8) -> Cluster {
        Cluster::start_for(nodes, Population::Real)
    }

    /// Starts a cluster with `nodes` real nodes, and waits until these accept pods.
    ///
    /// # Panics
    /// Like [`Cluster::start`].
    pub fn start_for(nodes: u8, population: Population) -> Cluster {
        assert!((1..=NODES_MAX).contains(&nodes), "1 to {NODES_MAX} nodes");
        let started = Instant::now();
        remove_abandoned();
        let env = TestEnv::new();
        let name = name_of(env.folder());
        let owner = lock_folder(env.folder());
        let leftover_check = LeftoverCheck { before: Inventory::take(&name) };
        let mut network = Network::new();
        let hub = network.hub();
        let folder = env.folder().join("kubernetes");
        let server = ApiServer::start_in(&folder, hub.address());
        for log in super::logs_in(&folder) {
            env.watch_log(log);
        }
        let places: Vec<NodeIdentity> = (1..=nodes).map(|number| place(&mut network, number)).collect();
        connect(&network, &hub, &places);
        let start = |place: NodeIdentity| {
            let folder = env.folder().join(&place.name);
            Node::start(place, &name, folder, &server)
        };
        let nodes = places.into_iter().map(start).collect();
        let mut cluster =
            Cluster { nodes, programs: Vec::new(), server, network, leftover_check, _owner: owner, env };
        for node in &cluster.nodes {
            node.logs().into_iter().for_each(|log| cluster.env.watch_log(log));
        }
        cluster.server.write_kubeconfig(&User::ADMIN, &cluster.kubeconfig());
        // The programs need their roles when they start.
        cluster.apply(OBJECTS);
        cluster.start_programs(population);
        cluster.import_own_images();
        cluster.wait_until_ready();
        cluster.apply(&volumes::create(&cluster.nodes));
        print_line(&format!(
            "a cluster of {} nodes is ready after {:.1?}",
            cluster.nodes.len(),
            started.elapsed()
        ));
        cluster
    }

    /// Returns the folder of the cluster, which is removed with it.
    pub fn folder(&self) -> &Path {
        self.env.folder()
    }

    /// Returns the kubeconfig with all permissions.
    pub fn kubeconfig(&self) -> PathBuf {
        self.folder().join("admin.kubeconfig")
    }

    /// Returns the cluster's API server.
    pub fn server(&self) -> &ApiServer {
        &self.server
    }

    /// Returns a client with all permissions; used within [`Cluster::block_on`].
    pub fn client(&self) -> Client {
        self.server.admin()
    }

    /// Runs a future on the runtime to which the clients belong.
    pub fn block_on<F: Future>(&self, future: F) -> F::Output {
        self.server.block_on(future)
    }

    /// Runs kubectl and returns its output.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn kubectl(&self, arguments: &[&str]) -> String {
        self.try_kubectl(arguments).unwrap_or_else(|error| panic!("kubectl {}: {error}", arguments.join(" ")))
    }

    /// Runs kubectl and returns its output.
    ///
    /// # Errors
    /// Standard error of kubectl, if it fails.
    pub fn try_kubectl(&self, arguments: &[&str]) -> Result<String, String> {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        result(command.args(arguments).output().expect("kubectl can be run"))
    }

    /// Starts kubectl and returns without waiting, so that the caller can watch its effects. Errors go to the
    /// test's output.
    ///
    /// # Panics
    /// If kubectl cannot be run.
    pub fn begin_kubectl(&self, arguments: &[&str]) -> ChildProcess {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        command.args(arguments).stdin(Stdio::null()).stdout(Stdio::null());
        ChildProcess::spawn(command)
    }

    /// Applies objects in YAML by server-side apply.
    ///
    /// # Panics
    /// If the server refuses an object.
    pub fn apply(&self, objects: &str) {
        let mut command = self.command(&programs::kubernetes("kubectl"));
        command.args(["apply", "--server-side", "--filename=-"]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("kubectl can be run");
        let mut input = child.stdin.take().expect("piped above");
        // kubectl reads its whole input before it writes; the exit status reports a failure.
        let _ = input.write_all(objects.as_bytes());
        drop(input);
        let output = child.wait_with_output().expect("kubectl can be waited for");
        result(output).unwrap_or_else(|error| panic!("kubectl apply: {error}"));
    }

    /// Runs Helm and returns its output.
    ///
    /// # Errors
    /// Standard error of Helm, if it fails.
    pub fn helm(&self, arguments: &[&str]) -> Result<String, String> {
        result(self.helm_command().args(arguments).output().expect("Helm can be run"))
    }

    /// Returns a Helm command that ignores the user's configuration.
    pub fn helm_command(&self) -> Command {
        let mut command = self.command(&programs::helm());
        for home in ["CACHE", "CONFIG", "DATA"] {
            command.env(format!("HELM_{home}_HOME"), self.folder().join("helm-files"));
        }
        command
    }

    /// Returns a command whose environment leads to this cluster.
    pub fn command(&self, program: &Path) -> Command {
        let mut command = Command::new(program);
        // The default cache of kubectl is in the user's home.
        command.env("KUBECONFIG", self.kubeconfig()).env("KUBECACHEDIR", self.folder().join("kubectl-files"));
        command
    }

    /// Returns the tools for manual use: kubectl and Helm.
    pub fn tools(&self) -> [(&'static str, PathBuf); 2] {
        [("kubectl", programs::kubernetes("kubectl")), ("helm", programs::helm())]
    }

    /// Imports an archive of images into all nodes.
    ///
    /// # Panics
    /// If a node refuses it.
    pub fn import_image(&self, archive: &Path) {
        std::thread::scope(|scope| {
            for node in &self.nodes {
                scope.spawn(|| node.import_image(archive));
            }
        });
    }

    /// Returns the real nodes.
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the node at an index, to inject a fault.
    pub fn node(&mut self, index: usize) -> &mut Node {
        &mut self.nodes[index]
    }

    /// Cuts the link of a node: it reaches nothing outside, and its own pods reach each other.
    pub fn cut_link(&self, index: usize) {
        self.network.unplug(self.nodes[index].host());
    }

    /// Restores the link of a node.
    pub fn heal_link(&self, index: usize) {
        self.network.plug(self.nodes[index].host());
    }

    /// Sends SIGKILL to the API server.
    pub fn stop_api_server(&mut self) {
        self.server.kill();
    }

    /// Starts the API server again.
    pub fn start_api_server(&mut self) {
        self.server.restart();
    }

    /// Returns whether the node has the condition `Ready`.
    pub fn is_ready(&self, node: &Node) -> bool {
        self.ready_nodes().iter().any(|name| name == node.name())
    }

    /// Waits until all nodes accept pods.
    ///
    /// # Panics
    /// If they do not in time.
    pub fn wait_until_ready(&self) {
        wait_until("all nodes to be ready", READY_WITHIN, || {
            (self.ready_nodes().len() == self.nodes.len() && self.has_default_account()).then_some(())
        });
    }

    /// Lists what the running cluster has created: processes, mounts, networks, control groups.
    pub fn inventory(&self) -> Vec<String> {
        self.leftover_check.before.leftovers()
    }

    /// Prints the ends of all logs and the error of a test that has just panicked.
    pub fn show_failure(&self, test: &str) {
        self.env.show_failure(test);
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

    /// Returns whether the default service account exists. The server refuses pods before that.
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
            // The default is a folder of the machine.
            .arg(format!("--flex-volume-plugin-dir={}", self.folder().join("volumes").display()))
            .arg("--node-monitor-period=1s")
            .arg(match population {
                Population::Real => format!("--node-monitor-grace-period={SILENT_SECONDS}s"),
                Population::Simulated => format!("--node-monitor-grace-period={SILENT_SECONDS_PLAYED}s"),
            });
        if population == Population::Simulated {
            manager.args(["--kube-api-qps", CALLS_A_SECOND, "--kube-api-burst", CALLS_A_SECOND]);
        }
        let mut scheduler = Command::new(programs::kubernetes("kube-scheduler"));
        scheduler.arg(config(&users::SCHEDULER, "scheduler.kubeconfig")).arg("--leader-elect=false");
        let mut names = Command::new(programs::coredns());
        config(&users::NAMES, "coredns.kubeconfig");
        let corefile = self.folder().join("Corefile");
        fs::write(&corefile, self.corefile()).expect("the cluster's folder is writable");
        names.arg("-conf").arg(corefile);
        for (name, command) in [("controller-manager", manager), ("scheduler", scheduler), ("coredns", names)]
        {
            let running = self.spawn(name, command);
            self.programs.push(running);
        }
    }

    /// Returns the configuration of CoreDNS, which resolves services and pods and no outside names.
    fn corefile(&self) -> String {
        let config = self.folder().join("coredns.kubeconfig");
        format!(
            ".:53 {{\n  ready 127.0.0.1:8181\n  errors\n  cache 5\n  kubernetes cluster.local in-addr.arpa {{\n    \
             kubeconfig {}\n    ttl 5\n  }}\n}}\n",
            config.display()
        )
    }

    /// Starts a program that belongs to the cluster. Its log is printed when a test fails.
    pub(super) fn spawn(&self, name: &str, mut command: Command) -> ChildProcess {
        let file = self.folder().join(format!("{name}.log"));
        self.env.watch_log(file.clone());
        let log = File::options().create(true).append(true).open(file).expect("a log can be written");
        let again = log.try_clone().expect("a descriptor can be copied");
        command.stdin(Stdio::null()).stdout(again).stderr(log);
        ChildProcess::spawn(command)
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

/// Returns the name of a cluster, which is derived from its folder.
fn name_of(folder: &Path) -> String {
    folder.file_name().expect("a folder").to_string_lossy().replace('-', "")
}

fn place(network: &mut Network, number: u8) -> NodeIdentity {
    NodeIdentity { name: format!("node{number}"), host: network.host(), number }
}

/// Adds routes from every host to the pods of all nodes.
fn connect(network: &Network, hub: &Host, places: &[NodeIdentity]) {
    for place in places {
        network.route(&place.host, "default", hub);
        network.route(hub, &place.pods(), &place.host);
        for other in places.iter().filter(|other| other.number != place.number) {
            network.route(&place.host, &other.pods(), &other.host);
        }
    }
}

/// Marks a folder as used until the file is closed.
fn lock_folder(folder: &Path) -> File {
    let new = folder.join("owner.new");
    let file = File::create(&new).expect("the cluster's folder is writable");
    file.lock().expect("the file is new");
    // Other processes must not see the file before it is locked.
    fs::rename(new, folder.join(OWNER)).expect("the file can be renamed");
    file
}

/// Removes the leftovers of clusters whose programs were killed.
fn remove_abandoned() {
    let folders = cache_directory().join("e2e");
    let is_alive = |cluster: &str| {
        let owner = File::open(folders.join(cluster).join(OWNER));
        owner.is_ok_and(|owner| owner.try_lock().is_err())
    };
    cgroups::remove_abandoned(is_alive);
    for entry in fs::read_dir(&folders).into_iter().flatten().flatten() {
        let is_cluster = entry.path().join(OWNER).exists();
        if is_cluster && !is_alive(&entry.file_name().to_string_lossy()) {
            // A folder that cannot be removed does no harm.
            let _ = fs::remove_dir_all(entry.path());
        }
    }
}

fn result(output: Output) -> Result<String, String> {
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).into_owned();
    if output.status.success() { Ok(text(output.stdout)) } else { Err(text(output.stderr)) }
}
