//! What a release is told while it runs, and what happens to its parts: a device that somebody removes, quotas of a tenant that change, a slack
//! profile, a tenant that names its pods, a request for queues that no node has. Each waits for agents and their reports, so they are waited for together; none of them has to do with another.

use std::fs;
use std::time::{Duration, Instant};

use reprise_client::{Scope, Source};
use reprise_e2e::content::{device_slot_bytes, layout_of};
use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part, Pod, example};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::{Engine, Loading, wait_until};
use serde_json::{Value, json};

use crate::chart::{ENGINES, condition, running};
use crate::chart_faults::{agent_of, engine_on};
use crate::chart_identities::a_tenant_names_its_pods;

/// Blocks on the device that is removed.
const KEPT: std::ops::Range<u64> = 310_000..310_100;

/// Blocks that the tenant saves before it has a budget, what it may have then, and what it may have in the end.
const SAVED: u64 = 100;
const FEW: u64 = 60;
const MORE: u64 = 240;

/// The tenant.
const TENANT: &str = "team-a";

/// The GPU that nodes are made to have.
const PRODUCT: &str = "NVIDIA H200";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// What is selected by [`crate::chart::SETTINGS`]: 60 µs of which 80% are used.
const PROFILE: &str = "
apiVersion: reprise.dev/v1alpha1
kind: SlackProfile
metadata: { name: measured, namespace: reprise, labels: { for: lab } }
spec:
  subject: { model: llama, gpuProduct: NVIDIA H200, engineVersion: vllm 0.33 }
  windows: [{ phase: Decode, minTokens: 0, maxTokens: 512, slackMicros: 60, maxIoSms: 4 }]
  usablePercent: 80
";

pub(crate) fn are_followed(cluster: &mut Cluster) {
    let release = running(cluster);
    let cluster: &Cluster = cluster;
    std::thread::scope(|scope| {
        let parts = [
            scope.spawn(|| a_device_is_removed(cluster, release)),
            scope.spawn(|| a_quota_changes(cluster, release)),
            scope.spawn(|| a_profile_comes(cluster, release)),
            scope.spawn(|| a_tenant_names_its_pods(cluster, release)),
            scope.spawn(|| queues_are_refused_in_words(cluster, release)),
        ];
        for part in parts {
            part.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    release.wait_until_ready();
}

fn wait_for(release: Release<'_>, object: &str, condition: &str) {
    release.kubectl(&["wait", object, &format!("--for=condition={condition}"), "--timeout=180s"]);
}

/// The pool's file of one node goes: the pool says so, the node's blocks on it are misses, and all is as before when it is back.
fn a_device_is_removed(cluster: &Cluster, release: Release<'_>) {
    let node = &cluster.nodes()[1];
    let other = &cluster.nodes()[0];
    let kept: Vec<u64> = KEPT.collect();
    let engine = agent_of(cluster, 1).expect("it serves");
    engine.save_durably(&kept);
    let well = engine_on(release, |node| node == other.name());
    let moment = ENGINES.now(cluster);
    let agents = release.pods(Part::Agents);
    let (file, away) = (node.root().join("var/lib/reprise-pool/pool"), node.root().join("var/lib/pool.away"));
    fs::rename(&file, &away).expect("it is a file of the node");
    let started = Instant::now();
    wait_for(release, "ssdp/lab", "Degraded");
    say(&format!("a pool was degraded {:.1?} after its file was removed on one node", started.elapsed()));
    let pool = release.object("ssdp", "lab");
    assert_eq!(condition(&pool, "Degraded").1, "DeviceFailed", "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "False", "{pool:#}");
    assert_eq!(
        (&pool["status"]["devices"]["open"], &pool["status"]["devices"]["faulted"]),
        (&json!(1), &json!(1)),
        "{pool:#}"
    );
    let words = pool.to_string();
    assert!(
        words.contains(node.name()) && words.contains("is not there, and a blank one would hide that"),
        "which, and why: {pool:#}"
    );
    let told = release.object("cachenode", node.name());
    assert_eq!(condition(&told, "Degraded"), ("True", "DeviceFailed"), "{told:#}");
    assert_eq!(condition(&told, "AgentReady").0, "True", "it serves what is in memory: {told:#}");
    assert_eq!(condition(&release.object("cachenode", other.name()), "Degraded").0, "False");
    let there = engine.matches(&kept, Scope::Local);
    assert!(!there.contains(&Source::OwnNvme), "nothing is on a device: {there:?}");
    assert!(!file.exists(), "no blank one hides that");

    fs::rename(&away, &file).expect("back to where it was");
    wait_for(release, "ssdp/lab", "Degraded=false");
    wait_for(release, "ssdp/lab", "Ready");
    engine.trim();
    let sources = engine.load_all(&kept, &Loading::LOCAL);
    assert!(sources.iter().all(|source| *source == Source::OwnNvme), "they are on it as before: {sources:?}");
    let ids = |pods: Vec<Pod>| -> Vec<String> { pods.into_iter().map(|pod| pod.container).collect() };
    assert_eq!(ids(release.pods(Part::Agents)), ids(agents), "no agent has started anew");
    let said = ENGINES.since(cluster, &moment)[well].clone();
    let said = said.expect("no engine has ended");
    assert_eq!((said.own_missed, said.sessions), (0, 0), "the other node is well: {said:?}");
}

fn tenant(cluster: &Cluster, blocks: u64) {
    let bytes = blocks * device_slot_bytes(&layout_of(1, 1));
    let object = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": TENANT },
        "spec": { "budget": { "ssd": { "limit": bytes.to_string() } }, "deletionPolicy": "Purge" },
    });
    cluster.apply(&object.to_string());
}

/// Blocks of the tenant on the devices of all nodes, as their agents count them.
fn on_devices(release: Release<'_>) -> u64 {
    let of = |page: Value| {
        let tenants = page["tenants"].as_array().cloned().unwrap_or_default();
        let own = tenants.iter().find(|one| one["name"] == TENANT).map(|one| one["nvme"]["used"].clone());
        own.map_or(0, |used| used.as_u64().expect("a number of bytes"))
    };
    let pods = release.pods(Part::Agents);
    let bytes: u64 = pods.iter().map(|pod| of(release.admin(pod).json("/status"))).sum();
    bytes / device_slot_bytes(&layout_of(1, 1))
}

/// A tenant gets a budget, a larger one, and is purged; agents follow each within seconds.
fn a_quota_changes(cluster: &Cluster, release: Release<'_>) {
    // The device of the second node is away just now, and what lies on it would come back after the purge.
    let socket = cluster.nodes()[0].root().join("run/reprise/agent.sock");
    let connect = || Engine::connect_as(&socket, layout_of(1, 1), TENANT).expect("agents believe names");
    let engine = connect();
    let first: Vec<u64> = (0..SAVED).collect();
    engine.save_durably(&first);
    assert_eq!(on_devices(release), SAVED, "without a budget all are there");
    tenant(cluster, FEW);
    let started = Instant::now();
    let few = wait_until("nodes to evict what is beyond the budget", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        Some(on_devices(release)).filter(|blocks| *blocks <= FEW)
    });
    say(&format!(
        "a tenant's budget was met {:.1?} after it was written: {few} of {FEW} blocks",
        started.elapsed()
    ));
    for kind in ["BudgetApplied", "Ready"] {
        wait_for(release, &format!("ctenant/{TENANT}"), kind);
    }
    tenant(cluster, MORE);
    let mut next = SAVED;
    let more = wait_until("the larger budget to be used", PODS_WITHIN, || {
        // A node whose share is used up takes them and evicts others.
        engine.save(&(next..next + 10).collect::<Vec<u64>>()).expect("blocks are taken");
        next += 10;
        std::thread::sleep(PAUSE);
        let blocks = on_devices(release);
        assert!(blocks <= MORE, "never beyond it: {blocks}");
        (blocks > FEW).then_some(blocks)
    });
    say(&format!("and {more} of {MORE} blocks after it was raised"));
    drop(engine);
    // It goes when all nodes have said that they have nothing of it.
    release.kubectl(&["delete", "ctenant", TENANT, "--timeout=180s"]);
    assert_eq!(on_devices(release), 0, "all was purged");
    assert!(connect().matches(&first, Scope::Local).is_empty(), "nor is it in memory");
}

/// A profile goes to the nodes whose agents see its GPU, one after the other, and both acknowledge it.
fn a_profile_comes(cluster: &Cluster, release: Release<'_>) {
    let agents = release.pods(Part::Agents);
    for (index, agent) in agents.iter().enumerate() {
        release.play_gpu(agent, PRODUCT, &format!("GPU-0a1b{index}"));
    }
    let micros = |agent: &Pod| {
        let (code, page) =
            release.admin(agent).get("/slack/measured/Decode/9").expect("an agent that serves answers");
        let page: Value = serde_json::from_str(&page).unwrap_or_default();
        (code == 200).then(|| page["micros"].clone())
    };
    assert!(agents.iter().all(|agent| micros(agent).is_none()), "nobody has it yet");
    cluster.apply(PROFILE);
    let started = Instant::now();
    let profile = wait_until("both nodes to have acknowledged the profile", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let profile = release.object("slack", "measured");
        (profile["status"]["nodes"] == json!({ "target": 2, "applied": 2, "failed": 0 })).then_some(profile)
    });
    say(&format!("a slack profile was in effect on both nodes after {:.1?}", started.elapsed()));
    for kind in ["Accepted", "Valid", "Distributed", "Active"] {
        wait_for(release, "slack/measured", kind);
    }
    let digest = &profile["status"]["digest"];
    assert!(digest.as_str().is_some_and(|digest| digest.starts_with("sha256:")), "{profile:#}");
    for agent in &agents {
        let node = release.object("cachenode", &agent.node);
        assert_eq!(node["status"]["gpus"][0]["product"], PRODUCT, "{node:#}");
        let told = &node["status"]["applied"]["profiles"][0];
        assert_eq!((&told["name"], &told["digest"]), (&json!("measured"), digest), "{node:#}");
        assert_eq!(micros(agent), Some(json!(48)), "80% of the window");
    }
    release.kubectl(&["delete", "slackprofile", "measured"]);
    wait_until("both nodes to work by it no more", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        agents.iter().all(|agent| micros(agent).is_none()).then_some(())
    });
}

/// The example's requests for queues: of a pool that nobody has, and of one without devices.
fn queues_are_refused_in_words(cluster: &Cluster, release: Release<'_>) {
    let here = example("resources/queues.yaml")
        .replace("namespace: inference", "namespace: reprise")
        .replace("nodeName: worker-1", &format!("nodeName: {}", cluster.nodes()[0].name()));
    let (first, second) = here.split_once("\n---\n").expect("there are two of them");
    cluster.apply(first);
    cluster.apply(&second.replace("name: nvme", "name: lab"));
    let refused = |name: &str| {
        wait_for(release, &format!("gqa/{name}"), "Accepted=false");
        let object = release.object("gqa", name);
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let accepted = conditions.into_iter().find(|condition| condition["type"] == "Accepted");
        assert!(object["status"]["allocations"].as_array().is_none_or(Vec::is_empty), "{object:#}");
        accepted.expect("it was waited for")
    };
    let (nobodys, directory) = (refused("prefill-0"), refused("prefill-1"));
    assert_eq!(nobodys["reason"], "ReferenceNotFound", "{nobodys}");
    assert!(nobodys.to_string().contains("nvme"), "which: {nobodys}");
    assert_eq!(directory["reason"], "InvalidSpec", "{directory}");
    assert!(directory.to_string().contains("devices"), "what it needs: {directory}");
    release.kubectl(&["delete", "gqa", "--all", "--timeout=60s"]);
}
