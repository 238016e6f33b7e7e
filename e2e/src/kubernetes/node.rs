//! A node of a cluster: containerd, kubelet and kube-proxy on a host of the test's network, in their own
//! namespaces.
//!
//! ```text
//! test ── nsenter/unshare ── init process (node_init.rs) ─┬─ containerd ── shims ── pods
//!                                                         ├─ kubelet
//!                                                         └─ kube-proxy
//! ```
//!
//! A kill ends the init process and with it everything on the node, like a power failure. The disk stays:
//! after a restart the images are there, and the pods are not.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::cgroups::Cgroups;
use super::node_init::{FOLDER, PROGRAMS, Plan, Service};
use super::{ApiServer, programs, users};
use crate::host::Host;
use crate::process::{ChildProcess, binary, pause};
use crate::wait::{PATIENCE, wait_until};

/// Socket of the container runtime.
const RUNTIME: &str = "/run/containerd/containerd.sock";

/// Image of the container that holds a pod's namespaces.
pub(super) const PAUSE: &str = "localhost/reprise-e2e/pause:1";

/// Bound from a start until containerd accepts images.
const RUNTIME_WITHIN: Duration = Duration::from_secs(60);

/// Name, host and number of a node.
#[derive(Clone, Debug)]
pub(super) struct NodeIdentity {
    /// Name of the node in the cluster.
    pub(super) name: String,
    /// Its host in the test's network.
    pub(super) host: Host,
    /// The third byte of its pods' addresses.
    pub(super) number: u8,
}

/// A node that runs, or that was killed and can be started again.
#[derive(Debug)]
pub struct Node {
    place: NodeIdentity,
    cluster: String,
    folder: PathBuf,
    running: Option<NodeProcesses>,
}

/// The processes of a node. The fields are dropped in this order: first the processes, then their control
/// groups.
#[derive(Debug)]
struct NodeProcesses {
    outer: ChildProcess,
    /// The init process, as the test sees it.
    first: Pid,
    _cgroups: Cgroups,
}

impl NodeIdentity {
    /// Returns the address range of its pods.
    pub(super) fn pods(&self) -> String {
        format!("10.244.{}.0/24", self.number)
    }
}

impl Node {
    /// Writes the configuration of a node and starts it. The API server may start later.
    pub(super) fn start(place: NodeIdentity, cluster: &str, folder: PathBuf, server: &ApiServer) -> Node {
        fs::create_dir_all(&folder).expect("a folder can be created");
        configure(&place, &folder, server);
        let mut node = Node { place, cluster: cluster.to_owned(), folder, running: None };
        node.restart();
        node
    }

    /// Returns the node's name in the cluster.
    pub fn name(&self) -> &str {
        &self.place.name
    }

    /// Returns the node's address.
    pub fn address(&self) -> Ipv4Addr {
        self.place.host.address()
    }

    pub(super) fn host(&self) -> &Host {
        &self.place.host
    }

    /// Returns its root directory, as the test sees it: the node's `/var/lib/x` is `var/lib/x` below it.
    ///
    /// # Panics
    /// If the node does not run.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.machine().first.as_raw_nonzero()))
    }

    /// Returns a command that runs on the node, with its files, network and processes.
    ///
    /// # Panics
    /// If the node does not run.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let first = self.machine().first.as_raw_nonzero().to_string();
        command.args(["--target", &first, "--mount", "--net", "--pid", "--uts", "--ipc", "--", program]);
        command
    }

    /// Returns the beginning of a command line that runs like [`Node::command`], from outside of the
    /// namespaces of a program with the process id `process` on the machine.
    ///
    /// # Panics
    /// If the node does not run.
    pub fn enter_from(&self, process: u32) -> String {
        let first = self.machine().first.as_raw_nonzero();
        // The first nsenter also enters the mounts, and with them the /proc in which `first` is valid.
        format!(
            "nsenter --target {process} --net --mount -- \
             nsenter --target {first} --mount --net --pid --uts --ipc --"
        )
    }

    /// Sends SIGKILL to everything on the node.
    ///
    /// # Panics
    /// If the node does not run.
    pub fn kill(&mut self) {
        drop(self.running.take().expect("the node runs"));
    }

    /// Starts the node, as after a power failure.
    ///
    /// # Panics
    /// If it runs already, or does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "the node does not run");
        let cgroups = Cgroups::make(&self.cluster, self.name()).unwrap_or_else(|words| panic!("{words}"));
        let plan = self.folder.join("plan.json");
        let text = serde_json::to_vec_pretty(&self.plan(&cgroups)).expect("a plan is JSON");
        fs::write(&plan, text).expect("the node's folder is writable");
        let log = fs::File::options().create(true).append(true).open(self.folder.join("node.log"));
        let mut command = Command::new("nsenter");
        command
            .arg(format!("--net={}", self.place.host.namespace().display()))
            .args([
                "unshare",
                "--mount",
                "--propagation",
                "private",
                "--pid",
                "--mount-proc",
                "--uts",
                "--ipc",
            ])
            .args(["--fork", "--kill-child"])
            .arg(binary("reprise-e2e-node"))
            .arg(plan)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log.expect("a log can be written"));
        let outer = ChildProcess::spawn(command);
        let first = wait_until("the node's first process", PATIENCE, || {
            children(outer.id()).into_iter().find(|(_, command)| command.contains("reprise-e2e-node"))
        });
        self.running = Some(NodeProcesses { outer, first: first.0, _cgroups: cgroups });
    }

    /// Sends SIGSTOP to the kubelet: pods continue, and the API server gets no reports.
    ///
    /// # Panics
    /// If the node has no kubelet.
    pub fn pause_kubelet(&self) {
        pause(self.kubelet());
    }

    /// Sends SIGCONT to the kubelet.
    ///
    /// # Panics
    /// If the node has no kubelet.
    pub fn resume_kubelet(&self) {
        kill_process(self.kubelet(), Signal::CONT).expect("the kubelet can be signalled");
    }

    /// Imports an archive of images into the node's containerd.
    ///
    /// # Panics
    /// If the import fails.
    pub fn import_image(&self, archive: &Path) {
        let socket = self.runtime();
        let mut import = Command::new("ctr");
        import.arg("--address").arg(socket).args(["--namespace", "k8s.io", "images", "import"]).arg(archive);
        let Output { status, stderr, .. } = import.output().expect("ctr can be run");
        let stderr = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{} cannot import {}: {stderr}", self.name(), archive.display());
    }

    /// Waits until containerd listens, and returns its socket.
    fn runtime(&self) -> PathBuf {
        let socket = self.root().join(RUNTIME.trim_start_matches('/'));
        wait_until(&format!("containerd of {}", self.name()), RUNTIME_WITHIN, || {
            UnixStream::connect(&socket).ok()
        });
        socket
    }

    /// Returns the logs of the node's programs.
    pub(super) fn logs(&self) -> Vec<PathBuf> {
        ["node", "containerd", "kubelet", "kube-proxy"]
            .map(|name| self.folder.join(format!("{name}.log")))
            .to_vec()
    }

    fn machine(&self) -> &NodeProcesses {
        self.running.as_ref().expect("the node runs")
    }

    fn kubelet(&self) -> Pid {
        let first = self.machine().first.as_raw_nonzero().get().unsigned_abs();
        let kubelet = children(first).into_iter().find(|(_, command)| command.contains("/kubelet-"));
        kubelet.expect("the node has a kubelet").0
    }

    fn plan(&self, cgroups: &Cgroups) -> Plan {
        let kubelet = self.folder.join("kubelet.json");
        let text = fs::read(&kubelet).expect("written when the node was created");
        let mut settings: serde_json::Value = serde_json::from_slice(&text).expect("valid JSON");
        settings["cgroupRoot"] = json!(cgroups.root());
        fs::write(&kubelet, settings.to_string()).expect("the node's folder is writable");
        let program = |name: &str| {
            let path = programs::kubernetes(name);
            format!("{PROGRAMS}/{}", path.file_name().expect("a file").to_string_lossy())
        };
        let name = self.name();
        let service = |name: &str, command: &[String], socket: Option<&str>| Service {
            name: name.to_owned(),
            command: command.to_vec(),
            socket: socket.map(PathBuf::from),
        };
        Plan {
            folder: self.folder.clone(),
            programs: programs::kubernetes("kubelet").parent().expect("a folder").to_owned(),
            services: vec![
                service(
                    "containerd",
                    &["containerd".to_owned(), format!("--config={FOLDER}/containerd.toml")],
                    Some(RUNTIME),
                ),
                service(
                    "kubelet",
                    &[
                        program("kubelet"),
                        format!("--config={FOLDER}/kubelet.json"),
                        format!("--kubeconfig={FOLDER}/kubelet.kubeconfig"),
                        format!("--hostname-override={name}"),
                        format!("--node-ip={}", self.address()),
                    ],
                    None,
                ),
                service(
                    "kube-proxy",
                    &[
                        program("kube-proxy"),
                        format!("--kubeconfig={FOLDER}/proxy.kubeconfig"),
                        format!("--hostname-override={name}"),
                        "--proxy-mode=nftables".to_owned(),
                        "--cluster-cidr=10.244.0.0/16".to_owned(),
                        // This limit applies to the whole machine, whose settings must not change.
                        "--conntrack-max-per-core=0".to_owned(),
                    ],
                    None,
                ),
            ],
        }
    }
}

impl Drop for NodeProcesses {
    fn drop(&mut self) {
        // While the outer process is alive, `first` cannot have been reused.
        if self.outer.is_alive() {
            // All processes end with the init process, and then the outer one exits. Otherwise its handle
            // kills it.
            let _ = kill_process(self.first, Signal::KILL);
            let _ = self.outer.wait(PATIENCE);
        }
    }
}

/// Returns the children of a process: their ids and command lines.
fn children(parent: u32) -> Vec<(Pid, String)> {
    let all = fs::read_dir("/proc").expect("processes are listed").flatten();
    let child = |entry: fs::DirEntry| {
        let id: i32 = entry.file_name().to_str()?.parse().ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let above = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        let command = fs::read(entry.path().join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        (above.trim().parse() == Ok(parent)).then_some((Pid::from_raw(id)?, command))
    };
    all.filter_map(child).collect()
}

/// Writes the configuration files of a node's programs.
fn configure(place: &NodeIdentity, folder: &Path, server: &ApiServer) {
    let write = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().expect("in the folder")).expect("a folder can be created");
        fs::write(file, text).expect("the node's folder is writable");
    };
    let issued = server.authority.server(&place.name, &[place.host.address().into()], &[&place.name]);
    for (from, to) in [
        (issued.certificate, "kubelet.crt"),
        (issued.key, "kubelet.key"),
        (server.authority.file("ca.crt"), "ca.crt"),
    ] {
        fs::copy(from, folder.join(to)).expect("the node's folder is writable");
    }
    let name = users::of_node(&place.name);
    server.write_kubeconfig(&users::kubelet(&name), &folder.join("kubelet.kubeconfig"));
    server.write_kubeconfig(&users::PROXY, &folder.join("proxy.kubeconfig"));
    write("kubelet.json", &kubelet().to_string());
    write("containerd.toml", &containerd());
    write("network/10-pods.conflist", &network(place).to_string());
    // Pods that use the node's resolver get no name server.
    write("resolv.conf", "");
}

/// Returns the kubelet's configuration. It reports often, so that a silent node is detected within seconds.
fn kubelet() -> serde_json::Value {
    json!({
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "authentication": {
            "anonymous": { "enabled": false },
            "webhook": { "enabled": true },
            "x509": { "clientCAFile": format!("{FOLDER}/ca.crt") },
        },
        "authorization": { "mode": "Webhook" },
        "tlsCertFile": format!("{FOLDER}/kubelet.crt"),
        "tlsPrivateKeyFile": format!("{FOLDER}/kubelet.key"),
        "containerRuntimeEndpoint": format!("unix://{RUNTIME}"),
        "cgroupDriver": "cgroupfs",
        // Test machines may have control groups of version 1.
        "failCgroupV1": false,
        "failSwapOn": false,
        "evictionHard": { "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%" },
        // Images cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        // A pod sees a changed ConfigMap within this time instead of a minute.
        "syncFrequency": "10s",
        "nodeLeaseDurationSeconds": 8,
        // The default is a folder of the machine.
        "volumePluginDir": "/var/lib/kubelet/plugins-of-volumes",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "resolvConf": format!("{FOLDER}/resolv.conf"),
    })
}

/// Returns containerd's configuration. Without CAP_SYS_RESOURCE, runc fails unless `restrict_oom_score_adj`
/// is set.
fn containerd() -> String {
    let plugins = programs::plugins();
    format!(
        r#"version = 2
root = "/var/lib/containerd"
state = "/run/containerd"
[grpc]
address = "{RUNTIME}"
[plugins."io.containerd.internal.v1.opt"]
path = "/var/lib/containerd/opt"
[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{PAUSE}"
restrict_oom_score_adj = true
[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{plugins}"
conf_dir = "{FOLDER}/network"
"#
    )
}

/// Returns the CNI configuration: point-to-point links, so that all traffic between pods passes the node's
/// rules.
fn network(place: &NodeIdentity) -> serde_json::Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            { "type": "ptp", "ipam": {
                "type": "host-local",
                // Empty after a start, like the node's pods.
                "dataDir": "/run/addresses",
                "ranges": [[{ "subnet": place.pods() }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            } },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    })
}
