//! Reprise on a cluster, installed by its chart as people install it: images from archives, a namespace, Helm.
//!
//! Pods are looked at by their labels, and told from those that were there before by their unique ids. Every wait has a bound.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use super::cluster::Cluster;
use super::programs;
use crate::admin::Admin;
use crate::process::Running;
use crate::tree;

/// Where it is installed.
pub const NAMESPACE: &str = "reprise";

/// The release, and the `KVCacheCluster` of its values.
pub const RELEASE: &str = "reprise";

/// From objects that were applied to pods that serve, on a machine that is busy.
pub const PODS_WITHIN: Duration = Duration::from_secs(180);

/// As long, as kubectl and Helm are told.
const TIMEOUT: &str = "--timeout=180s";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

/// What the ids of containers begin with.
const RUNTIME: &str = "containerd://";

/// Where containerd keeps what it has told runc of a container, below the node's root.
const CONTAINERS: &str = "run/containerd/io.containerd.runtime.v2.task/k8s.io";

/// A namespace whose pods may mount directories of their nodes.
const NAMESPACES: &str = "
apiVersion: v1
kind: Namespace
metadata:
  name: reprise
  labels: { pod-security.kubernetes.io/enforce: privileged }
";

/// A part of the release, by which its pods are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Replicas of the operator.
    Operator,
    /// One on each node.
    Agents,
    /// The control plane's.
    Members,
    /// The store's.
    Etcd,
}

/// A pod that is not about to end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pod {
    /// Its name.
    pub name: String,
    /// Which of those that had the name it is.
    pub uid: String,
    /// The node that it is on.
    pub node: String,
    /// The image of its first container, as it was asked for.
    pub image: String,
    /// Which container of that image runs, or ran last, as the runtime calls it; empty before the first.
    pub container: String,
    /// Whether it serves.
    pub is_ready: bool,
}

/// What runs of pods, by which it is known whether any was replaced or started anew: their ids and those of their containers. Whether they are
/// ready may change for a moment when nothing has happened to them.
pub fn runs(pods: &[Pod]) -> Vec<(&str, &str)> {
    pods.iter().map(|pod| (pod.uid.as_str(), pod.container.as_str())).collect()
}

/// Reprise on a cluster.
#[derive(Clone, Copy, Debug)]
pub struct Release<'a> {
    cluster: &'a Cluster,
}

impl Part {
    fn selector(self) -> &'static str {
        match self {
            Part::Operator => "app.kubernetes.io/name=reprise-operator",
            Part::Agents => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=agent",
            Part::Members => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=control-plane",
            Part::Etcd => "app.kubernetes.io/name=reprise,app.kubernetes.io/component=etcd",
        }
    }
}

/// Gives all nodes Reprise's images ([`programs::images`]).
///
/// # Panics
/// When they cannot be built, or a node does not take them.
pub fn import_images(cluster: &Cluster) {
    for archive in programs::images().unwrap_or_else(|error| panic!("{error}")) {
        cluster.import_image(&archive);
    }
}

impl<'a> Release<'a> {
    /// Of a cluster, whether it is installed or not.
    pub fn of(cluster: &'a Cluster) -> Release<'a> {
        Release { cluster }
    }

    /// Whether Helm knows it.
    pub fn is_installed(self) -> bool {
        self.cluster.helm(&["status", RELEASE, "--namespace", NAMESPACE]).is_ok()
    }

    /// Makes its namespace, and runs `helm install --wait`. Images must be there.
    ///
    /// # Panics
    /// When Helm fails.
    pub fn install(self, more: &[&str]) -> String {
        self.cluster.apply(NAMESPACES);
        self.helm("install", more)
    }

    /// `helm upgrade --wait`, by the same values and others.
    ///
    /// # Panics
    /// When Helm fails.
    pub fn upgrade(self, more: &[&str]) -> String {
        self.helm("upgrade", more)
    }

    /// The same, begun: whoever waits for its end sees what happens meanwhile.
    ///
    /// # Panics
    /// When Helm cannot be run.
    pub fn begin_upgrade(self, more: &[&str]) -> Running {
        let mut command = self.cluster.helm_command();
        // What it says of a failure is for the test's own output.
        command.args(arguments("upgrade", more)).stdin(Stdio::null()).stdout(Stdio::null());
        Running::spawn(command)
    }

    /// `helm rollback --wait` to a revision, begun.
    ///
    /// # Panics
    /// When Helm cannot be run.
    pub fn begin_rollback(self, revision: &str) -> Running {
        let mut command = self.cluster.helm_command();
        command.args(["rollback", RELEASE, revision, "--namespace", NAMESPACE, "--wait", TIMEOUT]);
        command.stdin(Stdio::null()).stdout(Stdio::null());
        Running::spawn(command)
    }

    fn helm(self, command: &str, more: &[&str]) -> String {
        let all = arguments(command, more);
        self.run(&all.iter().map(String::as_str).collect::<Vec<&str>>())
    }

    /// `helm test`, and what its pods have said.
    ///
    /// # Panics
    /// When Helm fails.
    pub fn test(self) -> String {
        let mut command = self.cluster.helm_command();
        command.args(["test", RELEASE, "--namespace", NAMESPACE, TIMEOUT]);
        let output = command.output().expect("Helm can be run");
        // What pods have said is where Helm logs.
        let text = [output.stdout, output.stderr].concat();
        let said = String::from_utf8_lossy(&text).into_owned();
        assert!(output.status.success(), "helm test: {said}\n{}", self.state());
        said
    }

    /// Helm must do it.
    ///
    /// # Panics
    /// When it does not: with what it says, the pods and their events.
    pub fn run(self, arguments: &[&str]) -> String {
        self.cluster
            .helm(arguments)
            .unwrap_or_else(|said| panic!("helm {}: {said}\n{}", arguments.join(" "), self.state()))
    }

    /// Runs kubectl in its namespace.
    ///
    /// # Panics
    /// When it fails.
    pub fn kubectl(self, arguments: &[&str]) -> String {
        let mut all = vec!["--namespace", NAMESPACE];
        all.extend(arguments);
        self.cluster.kubectl(&all)
    }

    /// An object of its namespace, or of none.
    ///
    /// # Panics
    /// When there is none.
    pub fn object(self, kind: &str, name: &str) -> Value {
        let said = self.kubectl(&["get", kind, name, "--output=json"]);
        serde_json::from_str(&said).expect("kubectl says JSON")
    }

    /// Waits until the cluster, its pool and what it runs are as wanted, and nothing is under way.
    ///
    /// # Panics
    /// When that is not so in time: with the state of everything.
    pub fn wait_until_ready(self) {
        let cluster = format!("kvcc/{RELEASE}");
        for (object, condition) in
            [(cluster.as_str(), "Ready"), (cluster.as_str(), "Progressing=false"), ("ssdp/lab", "Ready")]
        {
            let wanted = format!("--for=condition={condition}");
            let waited =
                self.cluster.try_kubectl(&["--namespace", NAMESPACE, "wait", object, &wanted, TIMEOUT]);
            if let Err(said) = waited {
                panic!("{object} is not {condition}: {said}\n{}", self.state());
            }
        }
    }

    /// Pods of a part, by name.
    pub fn pods(self, part: Part) -> Vec<Pod> {
        self.pods_of(NAMESPACE, part.selector())
    }

    /// Pods by a namespace and labels, by name.
    ///
    /// # Panics
    /// When kubectl fails.
    pub fn pods_of(self, namespace: &str, selector: &str) -> Vec<Pod> {
        let said = self.cluster.kubectl(&[
            "--namespace",
            namespace,
            "get",
            "pods",
            &format!("--selector={selector}"),
            "--output=json",
        ]);
        let list: Value = serde_json::from_str(&said).expect("kubectl says JSON");
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

    /// SIGKILL to all processes of pods, which are deleted at once. A kubelet that is told of such a deletion would let them end in their time.
    ///
    /// # Panics
    /// When they have no processes, or the API server does not do it.
    pub fn kill(self, pods: &[Pod]) {
        let processes = processes_of(pods);
        assert!(processes.len() >= pods.len(), "pods that run have processes: {pods:?}");
        for process in processes {
            // One that has ended by itself is gone as well.
            let _ = kill_process(process, Signal::KILL);
        }
        let mut arguments = vec!["delete", "pod", "--grace-period=0", "--force"];
        arguments.extend(pods.iter().map(|pod| pod.name.as_str()));
        self.kubectl(&arguments);
    }

    /// SIGKILL to all processes of the first containers of pods, as a crash; their kubelets start the same pods' containers again.
    ///
    /// # Panics
    /// When they have no processes.
    pub fn crash(self, pods: &[Pod]) {
        let processes = processes_in(&pods.iter().map(|pod| pod.container.clone()).collect::<Vec<String>>());
        assert!(processes.len() >= pods.len(), "containers that run have processes: {pods:?}");
        for process in processes {
            let _ = kill_process(process, Signal::KILL);
        }
    }

    /// What the runtime has been told of a pod's first container, as OCI says it: what is in effect, whatever asked for it.
    ///
    /// # Panics
    /// When the container does not run.
    pub fn runtime_config(self, pod: &Pod) -> Value {
        let node = self.cluster.nodes().iter().find(|node| node.name() == pod.node).expect("one of them");
        let file = node.root().join(CONTAINERS).join(&pod.container).join("config.json");
        let text = fs::read(&file).unwrap_or_else(|error| panic!("{}: {error}", file.display()));
        serde_json::from_slice(&text).expect("OCI's configuration is JSON")
    }

    /// The admin port of a pod.
    ///
    /// # Panics
    /// When it has none, or no address.
    pub fn admin(self, pod: &Pod) -> Admin {
        let pod = self.object("pod", &pod.name);
        let ports = pod["spec"]["containers"][0]["ports"].as_array().into_iter().flatten();
        let port = ports.into_iter().find(|port| port["name"] == "admin");
        let port = &port.expect("all parts have one")["containerPort"];
        Admin::at(&format!(
            "{}:{port}",
            pod["status"]["podIP"].as_str().expect("a pod that runs has an address")
        ))
    }

    /// Lays a list of one GPU, as NVIDIA's driver writes it, over what the first container of a pod sees; nodes of tests have none. It
    /// goes with the container.
    ///
    /// # Panics
    /// When the container does not run, or its files cannot be mounted over.
    pub fn play_gpu(self, pod: &Pod, product: &str, uuid: &str) {
        let processes = processes_in(std::slice::from_ref(&pod.container));
        let process = processes.first().expect("a container that runs has processes").as_raw_nonzero();
        let mut mount = Command::new("mount");
        mount.args(["--namespace", &process.to_string(), "-t", "tmpfs", "none", "/proc/driver"]);
        let output = mount.output().expect("mount is there");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let folder =
            PathBuf::from(format!("/proc/{process}/root")).join("proc/driver/nvidia/gpus/0000:19:00.0");
        fs::create_dir_all(&folder).expect("it is in memory, and new");
        let text = format!("Model: \t\t {product}\nGPU UUID: \t {uuid}\n");
        fs::write(folder.join("information"), text).expect("it takes files");
    }

    /// The most memory that a process of these pods has had, in bytes.
    ///
    /// # Panics
    /// When none of them runs.
    pub fn peak_bytes(self, pods: &[Pod]) -> u64 {
        let peak = |process: Pid| {
            let status = fs::read_to_string(format!("/proc/{}/status", process.as_raw_nonzero())).ok()?;
            let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
            line.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()
        };
        let peaks = processes_of(pods).into_iter().filter_map(peak);
        peaks.max().expect("pods that run have processes") * 1024
    }

    /// Waits until so many pods of a part serve, and none of these is among them; who they are.
    ///
    /// # Panics
    /// When that is not so in time.
    pub fn replaced(self, part: Part, gone: &[Pod], count: usize) -> Vec<Pod> {
        let gone: BTreeSet<&str> = gone.iter().map(|pod| pod.uid.as_str()).collect();
        let started = Instant::now();
        loop {
            let pods = self.pods(part);
            let is_well = |pod: &Pod| pod.is_ready && !gone.contains(pod.uid.as_str());
            if pods.len() == count && pods.iter().all(is_well) {
                return pods;
            }
            assert!(started.elapsed() < PODS_WITHIN, "{part:?} are not replaced: {pods:?}\n{}", self.state());
            std::thread::sleep(PAUSE);
        }
    }

    /// Everything that somebody would look at who wonders what is wrong.
    pub fn state(self) -> String {
        let look = |arguments: &[&str]| match self.cluster.try_kubectl(arguments) {
            Ok(said) | Err(said) => format!("$ kubectl {}\n{said}", arguments.join(" ")),
        };
        let mut texts = vec![
            look(&["get", "reprise", "--all-namespaces"]),
            look(&["get", "pods,pvc", "--all-namespaces", "--output=wide"]),
            look(&["get", "events", "--all-namespaces", "--sort-by=.lastTimestamp"]),
            look(&["--namespace", NAMESPACE, "describe", "kvcc"]),
            look(&["get", "cachenodes", "--output=yaml"]),
        ];
        for part in [Part::Operator, Part::Agents, Part::Members, Part::Etcd] {
            let selector = format!("--selector={}", part.selector());
            for previous in ["--previous=true", "--previous=false"] {
                texts.push(look(&[
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

/// What Helm is told to install or change the release, by the values of the laboratory and others.
fn arguments(command: &str, more: &[&str]) -> Vec<String> {
    let chart = tree().join("charts/reprise");
    let values = chart.join("examples/lab.yaml");
    let text = |path: PathBuf| path.to_str().expect("trees are UTF-8").to_owned();
    let (chart, values) = (text(chart), text(values));
    let all = [command, RELEASE, &chart, "--namespace", NAMESPACE, "--values", &values, "--wait", TIMEOUT];
    all.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
}

/// Processes in the control groups of pods, which are named after them.
fn processes_of(pods: &[Pod]) -> Vec<Pid> {
    processes_in(&pods.iter().map(|pod| format!("/pod{}/", pod.uid)).collect::<Vec<String>>())
}

/// Processes in control groups that have one of these in their names.
fn processes_in(groups: &[String]) -> Vec<Pid> {
    assert!(groups.iter().all(|group| !group.is_empty()), "nothing is part of every name");
    let all = fs::read_dir("/proc").expect("processes are listed").flatten();
    let process = |entry: fs::DirEntry| {
        let id: i32 = entry.file_name().to_str()?.parse().ok()?;
        let of = fs::read_to_string(entry.path().join("cgroup")).ok()?;
        if groups.iter().any(|group| of.contains(group)) { Pid::from_raw(id) } else { None }
    };
    all.filter_map(process).collect()
}

/// Text of an example of the chart.
///
/// # Panics
/// When there is none.
pub fn example(name: &str) -> String {
    let path = tree().join("charts/reprise/examples").join(name);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}
