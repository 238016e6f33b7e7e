//! Reprise on a cluster, installed by its chart as users install it: images from archives, a namespace, Helm.
//!
//! Pods are found by labels, and distinguished from their predecessors by uid. Every wait has a bound.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use k8s_openapi::ByteString;
use reprise_identity::authority::CERTIFICATE_VALID;
use reprise_identity::credentials::Files;
use reprise_identity::{Authority, Expected, Identity, Role};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::cluster::Cluster;
use super::programs;
use crate::admin::Admin;
use crate::process::ChildProcess;
use crate::tree;

/// Namespace of the installation.
pub const NAMESPACE: &str = "reprise";

/// Name of the release, and of the `KVCacheCluster` in its values.
pub const RELEASE: &str = "reprise";

/// Bound from applied objects to pods that serve, on a busy machine.
pub const PODS_WITHIN: Duration = Duration::from_secs(180);

/// The same bound as an argument of kubectl and Helm.
const TIMEOUT: &str = "--timeout=180s";

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(200);

/// Prefix of container ids.
const RUNTIME: &str = "containerd://";

/// Folder of containerd's OCI bundles, below the node's root.
const CONTAINERS: &str = "run/containerd/io.containerd.runtime.v2.task/k8s.io";

/// Namespace of the release, whose pods may mount directories of their nodes.
const NAMESPACES: &str = "
apiVersion: v1
kind: Namespace
metadata:
  name: reprise
  labels: { pod-security.kubernetes.io/enforce: privileged }
";

/// A component of the release, with a label selector for its pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Component {
    /// The operator's replicas.
    Operator,
    /// The agents, one on each node.
    Agents,
    /// The members of the control plane.
    Members,
    /// The members of etcd.
    Etcd,
}

/// A pod that is not terminating.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Name of the pod.
    pub name: String,
    /// Unique id of the pod.
    pub uid: String,
    /// Node of the pod.
    pub node: String,
    /// Image of the first container, as the spec names it.
    pub image: String,
    /// Id of the first container, current or last; empty before its first start.
    pub container: String,
    /// Whether the pod is ready.
    pub is_ready: bool,
}

/// Returns the ids of pods and of their containers, which change when a pod is replaced or a container
/// restarts. Readiness is left out: it may change for a moment without cause.
pub fn container_ids(pods: &[Pod]) -> Vec<(&str, &str)> {
    pods.iter().map(|pod| (pod.uid.as_str(), pod.container.as_str())).collect()
}

/// The release of Reprise on a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Release<'a> {
    cluster: &'a Cluster,
}

impl Component {
    fn selector(self) -> &'static str {
        match self {
            Component::Operator => "app.kubernetes.io/name=reprise-operator",
            Component::Agents => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=agent",
            Component::Members => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=control-plane",
            Component::Etcd => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=etcd",
        }
    }
}

/// Imports Reprise's images ([`programs::images`]) into all nodes.
///
/// # Panics
/// If they cannot be built, or a node refuses them.
pub fn import_images(cluster: &Cluster) {
    for archive in programs::images().unwrap_or_else(|error| panic!("{error}")) {
        cluster.import_image(&archive);
    }
}

impl<'a> Release<'a> {
    /// Returns the release of a cluster, which may not be installed yet.
    pub fn of(cluster: &'a Cluster) -> Release<'a> {
        Release { cluster }
    }

    /// Returns whether Helm knows the release.
    pub fn is_installed(self) -> bool {
        self.cluster.helm(&["status", RELEASE, "--namespace", NAMESPACE]).is_ok()
    }

    /// Creates the namespace and runs `helm install --wait`. The nodes must have the images.
    ///
    /// # Panics
    /// If Helm fails.
    pub fn install(self, more: &[&str]) -> String {
        self.cluster.apply(NAMESPACES);
        self.helm("install", more)
    }

    /// Runs `helm upgrade --wait` with the values of the installation and further arguments.
    ///
    /// # Panics
    /// If Helm fails.
    pub fn upgrade(self, more: &[&str]) -> String {
        self.helm("upgrade", more)
    }

    /// Starts `helm upgrade --wait` and returns without waiting, so that the caller can watch its effects.
    ///
    /// # Panics
    /// If Helm cannot be run.
    pub fn begin_upgrade(self, more: &[&str]) -> ChildProcess {
        let mut command = self.cluster.helm_command();
        // Errors go to the test's output.
        command.args(arguments("upgrade", more)).stdin(Stdio::null()).stdout(Stdio::null());
        ChildProcess::spawn(command)
    }

    /// Starts `helm rollback --wait` to a revision and returns without waiting.
    ///
    /// # Panics
    /// If Helm cannot be run.
    pub fn begin_rollback(self, revision: &str) -> ChildProcess {
        let mut command = self.cluster.helm_command();
        command.args(["rollback", RELEASE, revision, "--namespace", NAMESPACE, "--wait", TIMEOUT]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        ChildProcess::spawn(command)
    }

    fn helm(self, command: &str, more: &[&str]) -> String {
        let all = arguments(command, more);
        self.run(&all.iter().map(String::as_str).collect::<Vec<&str>>())
    }

    /// Runs `helm test` and returns its output with the logs of its pods.
    ///
    /// # Panics
    /// If Helm fails.
    pub fn test(self) -> String {
        let mut command = self.cluster.helm_command();
        command.args(["test", RELEASE, "--namespace", NAMESPACE, TIMEOUT]);
        let output = command.output().expect("Helm can be run");
        // Helm prints the pods' logs to standard error.
        let text = [output.stdout, output.stderr].concat();
        let output_text = String::from_utf8_lossy(&text).into_owned();
        assert!(output.status.success(), "helm test: {output_text}\n{}", self.state());
        output_text
    }

    /// Runs Helm, which must succeed.
    ///
    /// # Panics
    /// If Helm fails: with its output, the pods and their events.
    pub fn run(self, arguments: &[&str]) -> String {
        self.cluster
            .helm(arguments)
            .unwrap_or_else(|error| panic!("helm {}: {error}\n{}", arguments.join(" "), self.state()))
    }

    /// Runs kubectl in the namespace of the release.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn kubectl(self, arguments: &[&str]) -> String {
        let mut all = vec!["--namespace", NAMESPACE];
        all.extend(arguments);
        self.cluster.kubectl(&all)
    }

    /// Returns an object of the namespace, or of cluster scope.
    ///
    /// # Panics
    /// If the object does not exist.
    pub fn object(self, kind: &str, name: &str) -> Value {
        let json = self.kubectl(&["get", kind, name, "--output=json"]);
        serde_json::from_str(&json).expect("kubectl prints JSON")
    }

    /// Waits until the cluster and its pool are ready and nothing is progressing.
    ///
    /// # Panics
    /// If that does not happen in time: with the state of everything.
    pub fn wait_until_ready(self) {
        let cluster = format!("kvcc/{RELEASE}");
        for (object, condition) in
            [(cluster.as_str(), "Ready"), (cluster.as_str(), "Progressing=false"), ("ssdp/lab", "Ready")]
        {
            let condition_flag = format!("--for=condition={condition}");
            let waited = self.cluster.try_kubectl(&[
                "--namespace",
                NAMESPACE,
                "wait",
                object,
                &condition_flag,
                TIMEOUT,
            ]);
            if let Err(error) = waited {
                panic!("{object} is not {condition}: {error}\n{}", self.state());
            }
        }
    }

    /// Returns the pods of a component, sorted by name.
    pub fn pods(self, part: Component) -> Vec<Pod> {
        self.pods_of(NAMESPACE, part.selector())
    }

    /// Returns the pods in a namespace with these labels, sorted by name.
    ///
    /// # Panics
    /// If kubectl fails.
    pub fn pods_of(self, namespace: &str, selector: &str) -> Vec<Pod> {
        let json = self.cluster.kubectl(&[
            "--namespace",
            namespace,
            "get",
            "pods",
            &format!("--selector={selector}"),
            "--output=json",
        ]);
        let list: Value = serde_json::from_str(&json).expect("kubectl prints JSON");
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let is_ready = |pod: &Value| {
            let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
            let ready = |condition: &Value| condition["type"] == "Ready" && condition["status"] == "True";
            conditions.into_iter().any(ready)
        };
        let pods = list["items"].as_array().expect("a list has items").iter();
        let pods = pods.filter(|pod| pod["metadata"]["deletionTimestamp"].is_null());
        let pod = |pod: &Value| Pod {
            name: text(&pod["metadata"]["name"]),
            uid: text(&pod["metadata"]["uid"]),
            node: text(&pod["spec"]["nodeName"]),
            image: text(&pod["spec"]["containers"][0]["image"]),
            container: text(&pod["status"]["containerStatuses"][0]["containerID"]).replace(RUNTIME, ""),
            is_ready: is_ready(pod),
        };
        let mut pods: Vec<Pod> = pods.map(pod).collect();
        pods.sort_by(|one, other| one.name.cmp(&other.name));
        pods
    }

    /// Kills all processes of pods and deletes the pods. The processes are killed first, since a kubelet that
    /// sees the deletion would let them terminate gracefully.
    ///
    /// # Panics
    /// If the pods have no processes, or kubectl fails.
    pub fn kill(self, pods: &[Pod]) {
        let processes = processes_of(pods);
        assert!(processes.len() >= pods.len(), "pods that run have processes: {pods:?}");
        for process in processes {
            // Fails if the process has exited by itself, which is fine.
            let _ = kill_process(process, Signal::KILL);
        }
        let mut arguments = vec!["delete", "pod", "--grace-period=0", "--force"];
        arguments.extend(pods.iter().map(|pod| pod.name.as_str()));
        self.kubectl(&arguments);
    }

    /// Kills all processes of the pods' first containers, like a crash. The kubelets restart these
    /// containers.
    ///
    /// # Panics
    /// If they have no processes.
    pub fn crash(self, pods: &[Pod]) {
        let processes = processes_in(&pods.iter().map(|pod| pod.container.clone()).collect::<Vec<String>>());
        assert!(processes.len() >= pods.len(), "containers that run have processes: {pods:?}");
        for process in processes {
            let _ = kill_process(process, Signal::KILL);
        }
    }

    /// Returns the OCI configuration that the runtime received for a pod's first container: the settings in
    /// effect.
    ///
    /// # Panics
    /// If the container does not run.
    pub fn runtime_config(self, pod: &Pod) -> Value {
        let node =
            self.cluster.nodes().iter().find(|node| node.name() == pod.node).expect("a node of the cluster");
        let file = node.root().join(CONTAINERS).join(&pod.container).join("config.json");
        let text = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        serde_json::from_slice(&text).expect("OCI's configuration is JSON")
    }

    /// Returns the admin port of a pod, for a client with the certificate of an admin if the pod has one.
    ///
    /// # Panics
    /// If the pod has no admin port, or no address.
    pub fn admin(self, pod: &Pod) -> Admin {
        let node = pod.node.clone();
        let pod = self.object("pod", &pod.name);
        let ports = pod["spec"]["containers"][0]["ports"].as_array().into_iter().flatten();
        let port = ports.into_iter().find(|port| port["name"] == "admin");
        let port = &port.expect("all components have one")["containerPort"];
        let address = pod["status"]["podIP"].as_str().expect("a pod that runs has an address");
        let admin = Admin::at(&format!("{address}:{port}"));
        let role = match pod["metadata"]["labels"]["app.kubernetes.io/component"].as_str() {
            Some("agent") => Role::Agent(node),
            Some("control-plane") => Role::Member,
            _ => return admin,
        };
        match self.certificates(&Role::Admin) {
            Some(folder) => admin.with_certificates(folder, Expected::Role(role)),
            None => admin,
        }
    }

    /// Issues a certificate with the key of the installation's authority, and returns the folder of its files; `None` if
    /// the installation has no certificates.
    ///
    /// # Panics
    /// If the authority cannot be used.
    pub fn certificates(self, role: &Role) -> Option<PathBuf> {
        let name = format!("{RELEASE}-ca");
        let secret = self.kubectl(&["get", "secret", &name, "--ignore-not-found", "--output=json"]);
        let secret: Value = serde_json::from_str(secret.trim()).ok()?;
        let text = |entry: &str| {
            let bytes: ByteString = serde_json::from_value(secret["data"][entry].clone()).expect("an entry");
            String::from_utf8(bytes.0).expect("PEM")
        };
        let authority = Authority::load(&text("tls.crt"), &text("tls.key")).expect("an authority");
        let identity = Identity::new(&format!("{RELEASE}.{NAMESPACE}"), role.clone()).expect("valid names");
        let issued = authority.issue(&identity, CERTIFICATE_VALID).expect("a valid period");
        let folder = self.cluster.folder().join("certificates").join(role.to_string());
        fs::create_dir_all(&folder).expect("the folder is writable");
        let files = Files {
            authorities: authority.certificate().as_bytes().to_vec(),
            certificate: issued.certificate.into_bytes(),
            key: issued.key.into_bytes(),
        };
        files.write(&folder).expect("the folder is writable");
        Some(folder)
    }

    /// Mounts a list of one GPU, in the format of NVIDIA's driver, into the first container of a pod; nodes
    /// of tests have no GPUs. The mount ends with the container.
    ///
    /// # Panics
    /// If the container does not run, or the mount fails.
    pub fn fake_gpu(self, pod: &Pod, product: &str, uuid: &str) {
        let processes = processes_in(std::slice::from_ref(&pod.container));
        let process = processes.first().expect("a container that runs has processes").as_raw_nonzero();
        let mut mount = Command::new("mount");
        mount.args(["--namespace", &process.to_string(), "-t", "tmpfs", "none", "/proc/driver"]);
        let output = mount.output().expect("mount can be run");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let folder =
            PathBuf::from(format!("/proc/{process}/root")).join("proc/driver/nvidia/gpus/0000:19:00.0");
        fs::create_dir_all(&folder).expect("the tmpfs is new and writable");
        let text = format!("Model: \t\t {product}\nGPU UUID: \t {uuid}\n");
        fs::write(folder.join("information"), text).expect("the tmpfs is writable");
    }

    /// Returns the peak memory of the largest process of these pods, in bytes.
    ///
    /// # Panics
    /// If none of them runs.
    pub fn peak_bytes(self, pods: &[Pod]) -> u64 {
        let peak = |process: Pid| {
            let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        };
        let peaks = processes_of(pods).into_iter().filter_map(peak);
        peaks.max().expect("pods that run have processes") * 1024
    }

    /// Waits until `count` pods of a component are ready and none of them is in `gone`. Returns the pods.
    ///
    /// # Panics
    /// If that does not happen in time.
    pub fn wait_until_replaced(self, part: Component, gone: &[Pod], count: usize) -> Vec<Pod> {
        let gone: BTreeSet<&str> = gone.iter().map(|pod| pod.uid.as_str()).collect();
        let started = Instant::now();
        loop {
            let pods = self.pods(part);
            let is_replacement = |pod: &Pod| pod.is_ready && !gone.contains(pod.uid.as_str());
            if pods.len() == count && pods.iter().all(is_replacement) {
                return pods;
            }
            assert!(started.elapsed() < PODS_WITHIN, "{part:?} are not replaced: {pods:?}\n{}", self.state());
            std::thread::sleep(PAUSE);
        }
    }

    /// Returns the state of the release for diagnosis: objects, pods, events and logs.
    pub fn state(self) -> String {
        let run = |arguments: &[&str]| match self.cluster.try_kubectl(arguments) {
            Ok(output) | Err(output) => format!("$ kubectl {}\n{output}", arguments.join(" ")),
        };
        let mut texts = vec![
            run(&["get", "reprise", "--all-namespaces"]),
            run(&["get", "pods,pvc", "--all-namespaces", "--output=wide"]),
            run(&["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"]),
            run(&["--namespace", NAMESPACE, "describe", "kvcc"]),
            run(&["get", "cachenodes", "--output=yaml"]),
        ];
        for part in [Component::Operator, Component::Agents, Component::Members, Component::Etcd] {
            let selector = format!("--selector={}", part.selector());
            for previous in ["--previous=true", "--previous=false"] {
                texts.push(run(&[
                    "--namespace",
                    NAMESPACE,
                    "logs",
                    &selector,
                    previous,
                    "--prefix",
                    "--tail=40",
                ]));
            }
        }
        texts.join("\n")
    }
}

/// Returns Helm's arguments to install or upgrade the release: the values of `examples/lab.yaml`, and further
/// arguments.
fn arguments(command: &str, more: &[&str]) -> Vec<String> {
    let chart = tree().join("charts/reprise");
    let values = chart.join("examples/lab.yaml");
    let text = |path: PathBuf| path.to_str().expect("trees are UTF-8").to_owned();
    let (chart, values) = (text(chart), text(values));
    let all = [command, RELEASE, &chart, "--namespace", NAMESPACE, "--values", &values, "--wait", TIMEOUT];
    all.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
}

/// Returns the processes in the control groups of pods, whose names contain the pods' uids.
fn processes_of(pods: &[Pod]) -> Vec<Pid> {
    processes_in(&pods.iter().map(|pod| format!("/pod{}/", pod.uid)).collect::<Vec<String>>())
}

/// Returns the processes in control groups whose names contain one of these texts.
fn processes_in(groups: &[String]) -> Vec<Pid> {
    assert!(groups.iter().all(|group| !group.is_empty()), "an empty text would match every group");
    let all = fs::read_dir("/proc").expect("processes are listed").flatten();
    let process = |entry: fs::DirEntry| {
        let id: i32 = entry.file_name().to_str()?.parse().ok()?;
        let of = fs::read_to_string(entry.path().join("cgroup")).ok()?;
        if groups.iter().any(|group| of.contains(group)) { Pid::from_raw(id) } else { None }
    };
    all.filter_map(process).collect()
}

/// Returns the text of an example of the chart.
///
/// # Panics
/// If the example does not exist.
pub fn example(name: &str) -> String {
    let path = tree().join("charts/reprise/examples").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
