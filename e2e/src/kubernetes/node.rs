//! A node of a cluster: containerd, kubelet and kube-proxy on a host of the test's network, in namespaces of their own.
//!
//! ```text
//! test ── nsenter/unshare ── first process (machine.rs) ─┬─ containerd ── shims ── pods
//!                                                        ├─ kubelet
//!                                                        └─ kube-proxy
//! ```
//!
//! A kill takes the first process and with it everything on the node, as when its power fails; what is on its disk stays, so images
//! are there after a restart, and pods are not.

use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use super::cgroups::Cgroups;
use super::machine::{FOLDER, PROGRAMS, Plan, Service};
use super::{ApiServer, programs, users};
use crate::host::Host;
use crate::process::{Running, binary, pause};
use crate::wait::{PATIENCE, wait_until};

/// Where a kubelet asks for pods.
const RUNTIME: &str = "/run/containerd/containerd.sock";

/// What holds a pod's namespaces.
pub(super) const PAUSE: &str = "localhost/reprise-e2e/pause:1";

/// From a start to a containerd that takes images.
const RUNTIME_WITHIN: Duration = Duration::from_secs(60);

/// What a node has that depends on who it is.
#[derive(Clone, Debug)]
pub(super) struct Place {
    /// Its name.
    pub(super) name: String,
    /// Its host.
    pub(super) host: Host,
    /// The third part of its pods' addresses.
    pub(super) number: u8,
}

/// A node that runs, or was killed and can be started again.
#[derive(Debug)]
pub struct Node {
    place: Place,
    cluster: String,
    folder: PathBuf,
    running: Option<Machine>,
}

/// The processes of a node. In the order in which they end: what runs, then the groups it ran in.
#[derive(Debug)]
struct Machine {
    outer: Running,
    /// The first process, as the test sees it.
    first: Pid,
    _cgroups: Cgroups,
}

impl Place {
    /// Addresses of its pods.
    pub(super) fn pods(&self) -> String {
        format!("10.244.{}.0/24", self.number)
    }
}

impl Node {
    /// Writes the configuration of a node and starts it; the API server need not be there yet.
    pub(super) fn start(place: Place, cluster: &str, folder: PathBuf, server: &ApiServer) -> Node {
        fs::create_dir_all(&folder).expect("a folder can be made");
        configure(&place, &folder, server);
        let mut node = Node { place, cluster: cluster.to_owned(), folder, running: None };
        node.restart();
        node
    }

    /// As the cluster calls it.
    pub fn name(&self) -> &str {
        &self.place.name
    }

    /// Where it is reached.
    pub fn address(&self) -> Ipv4Addr {
        self.place.host.address()
    }

    pub(super) fn host(&self) -> &Host {
        &self.place.host
    }

    /// Its file system, seen from the test: what is `/var/lib/x` there is `var/lib/x` here.
    ///
    /// # Panics
    /// When it does not run.
    pub fn root(&self) -> PathBuf {
        PathBuf::from(format!("/proc/{}/root", self.machine().first.as_raw_nonzero()))
    }

    /// Runs a program as if on the node: its files, its network, its processes.
    ///
    /// # Panics
    /// When it does not run.
    pub fn command(&self, program: &str) -> Command {
        let mut command = Command::new("nsenter");
        let first = self.machine().first.as_raw_nonzero().to_string();
        command.args(["--target", &first, "--mount", "--net", "--pid", "--uts", "--ipc", "--", program]);
        command
    }

    /// What a command line begins with that is run as [`Node::command`] runs programs, outside of the namespaces of a program that
    /// the machine knows as `process`.
    ///
    /// # Panics
    /// When it does not run.
    pub fn enter_from(&self, process: u32) -> String {
        let first = self.machine().first.as_raw_nonzero();
        // With the mounts of that program comes its list of processes, in which the node's first one has this number.
        format!(
            "nsenter --target {process} --net --mount -- \
             nsenter --target {first} --mount --net --pid --uts --ipc --"
        )
    }

    /// SIGKILL to everything on it.
    ///
    /// # Panics
    /// When it does not run.
    pub fn kill(&mut self) {
        drop(self.running.take().expect("the node runs"));
    }

    /// Starts it, as after a power cut.
    ///
    /// # Panics
    /// When it runs, or does not start.
    pub fn restart(&mut self) {
        assert!(self.running.is_none(), "the node does not run");
        let cgroups = Cgroups::make(&self.cluster, self.name()).unwrap_or_else(|words| panic!("{words}"));
        let plan = self.folder.join("plan.json");
        let text = serde_json::to_vec_pretty(&self.plan(&cgroups)).expect("a plan is JSON");
        fs::write(&plan, text).expect("a file of one's own can be written");
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
        let outer = Running::spawn(command);
        let first = wait_until("the node's first process", PATIENCE, || {
            children(outer.id()).into_iter().find(|(_, command)| command.contains("reprise-e2e-node"))
        });
        self.running = Some(Machine { outer, first: first.0, _cgroups: cgroups });
    }

    /// SIGSTOP to its kubelet: pods go on, and nobody is told.
    ///
    /// # Panics
    /// When there is none.
    pub fn pause_kubelet(&self) {
        pause(self.kubelet());
    }

    /// SIGCONT to its kubelet.
    ///
    /// # Panics
    /// When there is none.
    pub fn resume_kubelet(&self) {
        kill_process(self.kubelet(), Signal::CONT).expect("a process that is there takes signals");
    }

    /// Gives its containerd the images of an archive.
    ///
    /// # Panics
    /// When it does not take them.
    pub fn import_image(&self, archive: &Path) {
        let socket = self.runtime();
        let mut import = Command::new("ctr");
        import.arg("--address").arg(socket).args(["--namespace", "k8s.io", "images", "import"]).arg(archive);
        let Output { status, stderr, .. } = import.output().expect("ctr comes with containerd");
        let said = String::from_utf8_lossy(&stderr);
        assert!(status.success(), "{} does not take {}: {said}", self.name(), archive.display());
    }

    /// Waits until containerd listens.
    fn runtime(&self) -> PathBuf {
        let socket = self.root().join(RUNTIME.trim_start_matches('/'));
        wait_until(&format!("containerd of {}", self.name()), RUNTIME_WITHIN, || {
            UnixStream::connect(&socket).ok()
        });
        socket
    }

    /// Its logs.
    pub(super) fn logs(&self) -> Vec<PathBuf> {
        ["node", "containerd", "kubelet", "kube-proxy"]
            .map(|name| self.folder.join(format!("{name}.log")))
            .to_vec()
    }

    fn machine(&self) -> &Machine {
        self.running.as_ref().expect("the node runs")
    }

    fn kubelet(&self) -> Pid {
        let first = self.machine().first.as_raw_nonzero().get().unsigned_abs();
        let kubelet = children(first).into_iter().find(|(_, command)| command.contains("/kubelet-"));
        kubelet.expect("the node has a kubelet").0
    }

    fn plan(&self, cgroups: &Cgroups) -> Plan {
        let kubelet = self.folder.join("kubelet.json");
        let text = fs::read(&kubelet).expect("written when the node was made");
        let mut settings: serde_json::Value = serde_json::from_slice(&text).expect("as it was written");
        settings["cgroupRoot"] = json!(cgroups.root());
        fs::write(&kubelet, settings.to_string()).expect("a file of one's own can be written");
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
                        // A limit of the whole machine, which is not ours to set.
                        "--conntrack-max-per-core=0".to_owned(),
                    ],
                    None,
                ),
            ],
        }
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        // As long as it is there, so is the first process's number.
        if self.outer.is_alive() {
            // All on the node ends with the first process, and who waited for it once that is so; else its handle kills it.
            let _ = kill_process(self.first, Signal::KILL);
            let _ = self.outer.wait(PATIENCE);
        }
    }
}

/// Children of a process: their ids and command lines.
fn children(parent: u32) -> Vec<(Pid, String)> {
    let all = fs::read_dir("/proc").expect("processes are listed").flatten();
    let look = |entry: fs::DirEntry| {
        let id: i32 = entry.file_name().to_str()?.parse().ok()?;
        let status = fs::read_to_string(entry.path().join("status")).ok()?;
        let above = status.lines().find_map(|line| line.strip_prefix("PPid:"))?;
        let command = fs::read(entry.path().join("cmdline")).ok()?;
        let command = String::from_utf8_lossy(&command).replace('\0', " ");
        (above.trim().parse() == Ok(parent)).then_some((Pid::from_raw(id)?, command))
    };
    all.filter_map(look).collect()
}

/// Writes what its programs read.
fn configure(place: &Place, folder: &Path, server: &ApiServer) {
    let write = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::create_dir_all(file.parent().expect("in the folder")).expect("a folder can be made");
        fs::write(file, text).expect("a file of one's own can be written");
    };
    let issued = server.authority.server(&place.name, &[place.host.address().into()], &[&place.name]);
    for (from, to) in [
        (issued.certificate, "kubelet.crt"),
        (issued.key, "kubelet.key"),
        (server.authority.file("ca.crt"), "ca.crt"),
    ] {
        fs::copy(from, folder.join(to)).expect("a file of one's own can be copied");
    }
    let name = users::of_node(&place.name);
    server.write_kubeconfig(&users::kubelet(&name), &folder.join("kubelet.kubeconfig"));
    server.write_kubeconfig(&users::PROXY, &folder.join("proxy.kubeconfig"));
    write("kubelet.json", &kubelet().to_string());
    write("containerd.toml", &containerd());
    write("network/10-pods.conflist", &network(place).to_string());
    // Pods that ask for the node's names get none.
    write("resolv.conf", "");
}

/// What kubelets are told. They say often that they live, so that a node that does not is found in seconds.
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
        // Machines with control groups of version 1 are machines too.
        "failCgroupV1": false,
        "failSwapOn": false,
        "evictionHard": { "memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%" },
        // Images cannot be pulled again.
        "imageGCHighThresholdPercent": 100,
        "nodeStatusUpdateFrequency": "2s",
        // Pods see a ConfigMap that has changed within this, not within a minute.
        "syncFrequency": "10s",
        "nodeLeaseDurationSeconds": 8,
        // Its default is a folder of the machine.
        "volumePluginDir": "/var/lib/kubelet/plugins-of-volumes",
        "clusterDNS": ["10.96.0.10"],
        "clusterDomain": "cluster.local",
        "resolvConf": format!("{FOLDER}/resolv.conf"),
    })
}

/// What containerds are told. `restrict_oom_score_adj`: without CAP_SYS_RESOURCE runc cannot lower the value, and fails.
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

/// How pods get their network: a cable to the node for each, so that what one sends to another passes the node's rules.
fn network(place: &Place) -> serde_json::Value {
    json!({
        "cniVersion": "1.0.0",
        "name": "pods",
        "plugins": [
            { "type": "ptp", "ipam": {
                "type": "host-local",
                // Gone after a boot, as the pods are.
                "dataDir": "/run/addresses",
                "ranges": [[{ "subnet": place.pods() }]],
                "routes": [{ "dst": "0.0.0.0/0" }],
            } },
            { "type": "portmap", "capabilities": { "portMappings": true } },
        ],
    })
}
