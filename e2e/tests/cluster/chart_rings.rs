//! Queue pairs of a `GPUQueueAllocation` for engines with rings in pods. Their numbers appear in `kubectl get gqa`,
//! and vanish with the pod.
//!
//! The nodes have no NVMe controller, so the agents emulate one on the file of their pool. The agents' image is the
//! one of users; only the engine's image is of the tests.

use std::collections::BTreeSet;
use std::fs;
use std::time::Instant;

use reprise_client::Source;
use reprise_e2e::kubernetes::release::{Component, NAMESPACE, PODS_WITHIN, Pod, container_ids};
use reprise_e2e::kubernetes::{Cluster, Image, Release, programs};
use reprise_e2e::seed::print_line;
use reprise_e2e::{LoadParams, wait_until};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::chart::{condition, running};
use crate::chart_faults::agent_of;
use crate::chart_rollback::assert_reported_io_engine;

/// Number of the first block, which no other test uses.
const FIRST: u64 = 500_000;

/// Blocks of the first engine; each later one saves as many more.
const BLOCKS: u64 = 64;

/// Objects of a block.
const OBJECTS: u64 = 2;

/// Queue pairs of the allocation.
const PAIRS: usize = 4;

/// Name of the allocation, and prefix of pods.
const NAME: &str = "rings";

/// Name of the engine's image.
const IMAGE: &str = "localhost/reprise-e2e/rings:1";

/// Name of the engine's backend: it states that no GPU drives the rings.
const BACKEND: &str = "gpu-queue-emulated";

/// Exit code of a process that was killed: 128 + SIGKILL.
const KILLED: u64 = 137;

/// A line that an engine prints after it has compared every byte of a load.
#[derive(Debug, Deserialize)]
struct Report {
    backend: String,
    queues: Vec<u16>,
    generations: Vec<u64>,
    saved: u64,
    existed: u64,
    verified: u64,
    contexts: u64,
    bytes_read: u64,
    bytes_written: u64,
}

/// How the pod of an engine ends.
#[derive(Clone, Copy, Debug)]
enum End {
    /// Deleted with a grace period: the engine returns its queue pairs.
    Deleted,
    /// Its process is killed, and the pod stays.
    Killed,
    /// Deleted by force, without a grace period.
    DeletedByForce,
}

pub(crate) fn queues_appear_and_vanish_with_the_pod(cluster: &mut Cluster) {
    let release = running(cluster);
    let cluster: &Cluster = cluster;
    import_engine(cluster);
    let agents = release.pods(Component::Agents);
    let pool = release.object("ssdp", "lab")["spec"].clone();
    set_engine(release, "UserNvme", "None");
    for node in cluster.nodes() {
        wait_for_emulation(release, node.name());
    }
    release.kubectl(&["wait", "ssdp/lab", "--for=condition=Ready", "--timeout=180s"]);

    let [node, other] = [0, 1].map(|index| cluster.nodes()[index].name());
    cluster.apply(&allocation(node));
    release.kubectl(&["wait", &format!("gqa/{NAME}"), "--for=condition=Allocated", "--timeout=180s"]);
    assert_eq!(printed(release), ["True", "False", ""]);
    let agent = agents.iter().find(|agent| agent.node == node).expect("an agent on each node");
    cluster.apply(&pod("rings-refused", other, BLOCKS));

    let mut generation = 0;
    for (index, end) in (1..).zip([End::Deleted, End::Killed, End::DeletedByForce]) {
        generation = engine_comes_and_ends(cluster, agent, (index, end), generation);
    }
    blocks_are_right_on_both_nodes(cluster);
    wait_until("the engine without an allocation to end", PODS_WITHIN, || {
        exit_code(release, "rings-refused")
    });
    let refused = release.kubectl(&["logs", "rings-refused"]);
    assert!(refused.contains("create a GPUQueueAllocation"), "{other} has no allocation: {refused}");

    release.kubectl(&["delete", "gqa", NAME, "--timeout=60s"]);
    release.kubectl(&["delete", "pod", "rings-refused", "--now"]);
    let text = |field: &str| pool[field].as_str().unwrap_or_default().to_owned();
    set_engine(release, &text("engine"), &text("fallbackEngine"));
    assert_reported_io_engine(release);
    release.wait_until_ready();
    let now = release.pods(Component::Agents);
    assert_eq!(container_ids(&now), container_ids(&agents), "a change of the engine restarts no agent");
}

/// Starts an engine, checks its queue pairs and its work, ends it, and waits until its queue pairs are gone. Returns
/// their generation.
fn engine_comes_and_ends(cluster: &Cluster, agent: &Pod, (index, end): (u64, End), generation: u64) -> u64 {
    let release = Release::of(cluster);
    let name = format!("rings-{index}");
    let started = Instant::now();
    cluster.apply(&pod(&name, &agent.node, index * BLOCKS));
    let report = wait_until("two loads of the engine", PODS_WITHIN, || {
        if let Some(code) = exit_code(release, &name) {
            panic!("the engine exited with {code}: {}", release.kubectl(&["logs", &name]));
        }
        let log = cluster.try_kubectl(&["--namespace", NAMESPACE, "logs", &name]).unwrap_or_default();
        log.lines().filter_map(|line| serde_json::from_str::<Report>(line).ok()).nth(1)
    });
    assert_work(&report, index);
    assert!(report.generations[0] > generation, "{report:?} after generation {generation}");
    let (least, last) = (report.queues.first().expect("some"), report.queues.last().expect("some"));
    assert_eq!(report.queues.len(), PAIRS, "{report:?}");
    let numbers = format!("{least}-{last}");
    wait_printed(release, ["True", "True", &numbers]);
    let appeared = started.elapsed();
    let status = release.object("gqa", NAME)["status"].clone();
    let granted = &status["allocations"][0];
    assert_eq!(granted["queues"], json!(report.queues), "{status:#}");
    assert_eq!(granted["generation"], report.generations[0], "{status:#}");
    let page = release.admin(agent).json("/status");
    let grants = page["queue_grants"].as_array().expect("a list");
    assert_eq!(grants.len(), 1, "{grants:#?}");
    // In the order of creation, which is not that of the numbers.
    let created: BTreeSet<u64> =
        grants[0]["queues"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
    assert_eq!(json!(created), json!(report.queues), "{grants:#?}");
    assert_eq!(grants[0]["allocation"], format!("{NAMESPACE}/{NAME}"));

    let ended = Instant::now();
    match end {
        End::Deleted => {
            release.kubectl(&["delete", "pod", &name, "--grace-period=30"]);
        }
        End::Killed => {
            let pods = release.pods_of(NAMESPACE, &format!("app={name}"));
            release.crash(&pods);
            let code = wait_until("the process to end", PODS_WITHIN, || exit_code(release, &name));
            assert_eq!(code, KILLED);
        }
        End::DeletedByForce => {
            release.kubectl(&["delete", "pod", &name, "--grace-period=0", "--force"]);
        }
    }
    wait_printed(release, ["True", "False", ""]);
    print_line(&format!(
        "queues {numbers} were printed {appeared:.1?} after the start of {name}, and vanished {:.1?} after it was {end:?}",
        ended.elapsed()
    ));
    assert_released(release, agent, index);
    if let End::Killed = end {
        release.kubectl(&["delete", "pod", &name, "--now"]);
    }
    report.generations[0]
}

/// Checks that an engine has moved all its blocks with rings. Each block has a header page, and objects of one page.
fn assert_work(report: &Report, index: u64) {
    let page = reprise_policy::layout::PAGE_BYTES;
    let blocks = index * BLOCKS;
    assert_eq!(report.backend, BACKEND);
    assert_eq!(
        (report.saved, report.existed),
        (BLOCKS, blocks - BLOCKS),
        "earlier blocks are durable: {report:?}"
    );
    assert_eq!(report.verified, 2 * blocks, "two loads: {report:?}");
    let (written, read) = (blocks * OBJECTS, report.verified * (OBJECTS + 1));
    assert_eq!((report.bytes_written, report.bytes_read), (written * page, read * page), "{report:?}");
    assert!(report.contexts >= PAIRS as u64 && report.contexts <= written + read, "{report:?}");
}

/// Checks that the controller has confirmed the deletion of all queue pairs, after this number of grants.
fn assert_released(release: Release<'_>, agent: &Pod, grants: u64) {
    let status = release.object("gqa", NAME)["status"].clone();
    assert!(status["queues"].is_null() && status["allocations"][0]["queues"].is_null(), "{status:#}");
    let object = json!({ "status": status });
    assert_eq!(condition(&object, "Programmed"), ("False", "NotRequested"), "{object:#}");
    let admin = release.admin(agent);
    assert_eq!(admin.json("/status")["queue_grants"], json!([]));
    let counters = ["created_total", "unconfirmed_total", "revoked_total"];
    let counters = counters.map(|name| admin.metric(&format!("reprise_agent_queue_grants_{name}"), ""));
    assert_eq!(counters, [grants as f64, 0.0, 0.0], "created, not confirmed, revoked");
    assert_eq!(admin.metric("reprise_agent_queue_pairs_granted", ""), 0.0);
}

/// Loads the blocks through the arena on their node, and through its agent on the other node, and compares every byte.
fn blocks_are_right_on_both_nodes(cluster: &Cluster) {
    let numbers: Vec<u64> = (FIRST..FIRST + 3 * BLOCKS).collect();
    let own = agent_of(cluster, 0).expect("the agent responds");
    own.trim();
    let sources = own.load_all(&numbers, &LoadParams::LOCAL);
    assert!(sources.iter().all(|source| *source == Source::OwnNvme), "rings wrote the device: {sources:?}");
    let other = agent_of(cluster, 1).expect("the agent responds");
    let sources = other.load_all(&numbers, &LoadParams::CLUSTER);
    assert_eq!(sources.len(), numbers.len());
}

/// Returns ALLOCATED, PROGRAMMED and QUEUES of the allocation, as `kubectl get gqa` prints them.
fn printed(release: Release<'_>) -> [String; 3] {
    let text = release.kubectl(&["get", "gqa", NAME]);
    let (header, row) = text.trim_end().split_once('\n').expect("a header and a row");
    // Empty cells are blank, so a cell lies below its heading.
    let cell = |heading: &str| {
        let begin = header.find(heading).unwrap_or_else(|| panic!("no column {heading}: {text}"));
        let next = header[begin + heading.len()..].trim_start();
        let end = if next.is_empty() { row.len() } else { header.len() - next.len() };
        row.get(begin..end.min(row.len())).unwrap_or_default().trim().to_owned()
    };
    ["ALLOCATED", "PROGRAMMED", "QUEUES"].map(cell)
}

fn wait_printed(release: Release<'_>, wanted: [&str; 3]) {
    wait_until(&format!("kubectl get gqa to print {wanted:?}"), PODS_WITHIN, || {
        (printed(release) == wanted).then_some(())
    });
}

/// Returns the exit code of a pod's process, if it has exited.
fn exit_code(release: Release<'_>, name: &str) -> Option<u64> {
    let pod = release.object("pod", name);
    pod["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"].as_u64()
}

/// Changes the engine of the pool, which restarts no agent and keeps its blocks.
fn set_engine(release: Release<'_>, engine: &str, fallback: &str) {
    let patch = json!({ "spec": { "engine": engine, "fallbackEngine": fallback } }).to_string();
    release.kubectl(&["patch", "ssdp", "lab", "--type=merge", "--patch", &patch]);
}

/// Waits until the node reports the emulated controller and its queue pairs.
fn wait_for_emulation(release: Release<'_>, node: &str) {
    wait_until(&format!("{node} to emulate a controller"), PODS_WITHIN, || {
        let status = release.object("cachenode", node)["status"].clone();
        let (device, controller) = (&status["devices"][0], &status["controllers"][0]);
        let is_open = device["engine"] == "UserNvme" && device["state"] == "Open";
        (is_open && controller["pool"] == "lab").then(|| {
            assert_eq!(device["emulated"], true, "the status states the emulation: {status:#}");
        })
    });
}

fn import_engine(cluster: &Cluster) {
    let folder = cluster.folder();
    let files = programs::rings(folder);
    let files: Vec<(&str, _)> = files.iter().map(|(inside, file)| (inside.as_str(), file.clone())).collect();
    let archive = folder.join("rings.tar");
    Image { name: IMAGE, entrypoint: &["/bin/rings"], files: &files }.write(&archive);
    cluster.import_image(&archive);
    fs::remove_file(archive).expect("the archive can be removed");
}

fn allocation(node: &str) -> String {
    let spec = json!({
        "nodeName": node, "gpuUuid": "GPU-0123abcd-0000-1111-2222-333344445555", "poolRef": { "name": "lab" },
        "queuePairs": PAIRS, "depth": 64,
    });
    json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "GPUQueueAllocation",
        "metadata": { "name": NAME, "namespace": NAMESPACE }, "spec": spec,
    })
    .to_string()
}

/// Returns a pod with an engine, which needs the agent's socket only.
fn pod(name: &str, node: &str, blocks: u64) -> String {
    let arguments = ["/run/reprise/agent.sock", &FIRST.to_string(), &blocks.to_string(), &PAIRS.to_string()];
    let container = json!({
        "name": "engine", "image": IMAGE, "imagePullPolicy": "Never", "args": arguments,
        "securityContext": {
            "readOnlyRootFilesystem": true, "allowPrivilegeEscalation": false, "capabilities": { "drop": ["ALL"] },
        },
        "resources": { "requests": { "cpu": "10m", "memory": "32Mi" }, "limits": { "memory": "128Mi" } },
        "volumeMounts": [{ "name": "reprise", "mountPath": "/run/reprise", "readOnly": true }],
    });
    let spec = json!({
        "nodeSelector": { "kubernetes.io/hostname": node },
        "restartPolicy": "Never",
        "automountServiceAccountToken": false,
        "securityContext": { "runAsUser": 0, "runAsGroup": 0, "seccompProfile": { "type": "RuntimeDefault" } },
        "containers": [container],
        "volumes": [{ "name": "reprise", "hostPath": { "path": "/run/reprise", "type": "Directory" } }],
    });
    json!({
        "apiVersion": "v1", "kind": "Pod",
        "metadata": { "name": name, "namespace": NAMESPACE, "labels": { "app": name } }, "spec": spec,
    })
    .to_string()
}
