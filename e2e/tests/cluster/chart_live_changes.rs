//! Changes of a running release: a device that is removed, quotas of a tenant, a slack profile, a tenant with
//! a namespace selector, and a request for queues that no node has. Each waits for agents and their reports.
//! They are independent, so they run concurrently.

use std::fs;
use std::time::{Duration, Instant};

use reprise_client::{Scope, Source};
use reprise_e2e::content::{device_slot_bytes, layout_of};
use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN, Pod, example};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::{Engine, LoadParams, wait_until};
use reprise_policy::TenantName;
use serde_json::{Value, json};

use crate::chart::{ENGINES, condition, running};
use crate::chart_faults::{agent_of, engine_on};
use crate::chart_identities::{BOUND_WITHIN, a_tenant_names_its_pods};

/// Blocks on the device that is removed.
const KEPT: std::ops::Range<u64> = 310_000..310_100;

/// Blocks that the tenant saves without a budget, its first budget in blocks, and its second one.
const SAVED: u64 = 100;
const FEW: u64 = 60;
const MORE: u64 = 240;

/// Name of the tenant with a budget.
const TENANT: &str = "team-a";

/// Model of the GPU that the nodes get.
const PRODUCT: &str = "NVIDIA H200";

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// A profile that [`crate::chart::SETTINGS`] selects: 60 µs, of which 80% are used.
const PROFILE: &str = "
apiVersion: reprise.dev/v1alpha1
kind: SlackProfile
metadata: { name: measured, namespace: reprise, labels: { for: lab } }
spec:
  subject: { model: llama, gpuProduct: NVIDIA H200, engineVersion: vllm 0.33 }
  measurement:
    stepTokens: 32
    iocbBytes: 1048576
    windows: [{ phase: Decode, minInputTokens: 0, maxInputTokens: 512, minPrefixTokens: 0, maxPrefixTokens: 65536,
                layerMicros: 90, slackMicros: 60, freeSms: 4 }]
    reads: [{ iocbs: 1, micros: 30, sms: 2 }]
    writes: [{ iocbs: 1, micros: 40, sms: 2 }]
  usablePercent: 80
";

pub(crate) fn are_applied(cluster: &mut Cluster) {
    let release = running(cluster);
    let cluster: &Cluster = cluster;
    std::thread::scope(|scope| {
        let changes = [
            scope.spawn(|| a_device_is_removed(cluster, release)),
            scope.spawn(|| a_budget_changes(cluster, release)),
            scope.spawn(|| a_profile_is_distributed(cluster, release)),
            scope.spawn(|| a_tenant_names_its_pods(cluster, release)),
            scope.spawn(|| queue_requests_are_rejected(cluster, release)),
        ];
        for change in changes {
            change.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        }
    });
    release.wait_until_ready();
}

fn wait_for(release: Release<'_>, object: &str, condition: &str) {
    release.kubectl(&["wait", object, &format!("--for=condition={condition}"), "--timeout=180s"]);
}

/// Removes the pool's file on one node: the pool reports it, and the blocks on it are misses. Restores it:
/// all is as before.
fn a_device_is_removed(cluster: &Cluster, release: Release<'_>) {
    let node = &cluster.nodes()[1];
    let other = &cluster.nodes()[0];
    let kept: Vec<u64> = KEPT.collect();
    let engine = agent_of(cluster, 1).expect("the agent responds");
    engine.save_durably(&kept);
    let unaffected = engine_on(release, |node| node == other.name());
    let baseline = ENGINES.now(cluster);
    let agents = release.pods(Component::Agents);
    let (file, moved) =
        (node.root().join("var/lib/reprise-pool/pool"), node.root().join("var/lib/pool.moved"));
    fs::rename(&file, &moved).expect("the pool's file can be moved");
    let started = Instant::now();
    wait_for(release, "ssdp/lab", "Degraded");
    print_line(&format!(
        "a pool was degraded {:.1?} after its file was removed on one node",
        started.elapsed()
    ));
    let pool = release.object("ssdp", "lab");
    assert_eq!(condition(&pool, "Degraded").1, "DeviceFailed", "{pool:#}");
    assert_eq!(condition(&pool, "Ready").0, "False", "{pool:#}");
    assert_eq!(
        (&pool["status"]["devices"]["open"], &pool["status"]["devices"]["faulted"]),
        (&json!(1), &json!(1)),
        "{pool:#}"
    );
    let text = pool.to_string();
    assert!(
        text.contains(node.name()) && text.contains("is missing, and a blank one would hide that"),
        "the node and the reason: {pool:#}"
    );
    let cache_node = release.object("cachenode", node.name());
    assert_eq!(condition(&cache_node, "Degraded"), ("True", "DeviceFailed"), "{cache_node:#}");
    assert_eq!(
        condition(&cache_node, "AgentReady").0,
        "True",
        "the agent still serves blocks from memory: {cache_node:#}"
    );
    assert_eq!(condition(&release.object("cachenode", other.name()), "Degraded").0, "False");
    let sources = engine.matches(&kept, Scope::Local);
    assert!(!sources.contains(&Source::OwnNvme), "no block is on a device: {sources:?}");
    assert!(!file.exists(), "the agent creates no blank file");

    fs::rename(&moved, &file).expect("the pool's file can be moved back");
    wait_for(release, "ssdp/lab", "Degraded=false");
    wait_for(release, "ssdp/lab", "Ready");
    engine.trim();
    let sources = engine.load_all(&kept, &LoadParams::LOCAL);
    assert!(
        sources.iter().all(|source| *source == Source::OwnNvme),
        "the blocks are on the device as before: {sources:?}"
    );
    let ids = |pods: Vec<Pod>| -> Vec<String> { pods.into_iter().map(|pod| pod.container).collect() };
    assert_eq!(ids(release.pods(Component::Agents)), ids(agents), "no agent restarted");
    let counters = ENGINES.since(cluster, &baseline)[unaffected].clone();
    let counters = counters.expect("no engine restarted");
    assert_eq!(
        (counters.own_missed, counters.sessions),
        (0, 0),
        "the other node is not affected: {counters:?}"
    );
}

/// Applies the tenant, with a budget in blocks.
fn tenant(cluster: &Cluster, blocks: Option<u64>) {
    let slot = device_slot_bytes(&layout_of(1, 1));
    let budget = blocks.map(|blocks| json!({ "ssd": { "limit": (blocks * slot).to_string() } }));
    let object = json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheTenant", "metadata": { "name": TENANT },
        "spec": { "budget": budget, "deletionPolicy": "Purge" },
    });
    cluster.apply(&object.to_string());
}

/// Returns the tenant's blocks on the devices of all nodes, as their agents count them.
fn on_devices(release: Release<'_>) -> u64 {
    let of = |page: Value| {
        let tenants = page["tenants"].as_array().cloned().unwrap_or_default();
        let own = tenants.iter().find(|one| one["name"] == TENANT).map(|one| one["nvme"]["used"].clone());
        own.map_or(0, |used| used.as_u64().expect("a number of bytes"))
    };
    let pods = release.pods(Component::Agents);
    let bytes: u64 = pods.iter().map(|pod| of(release.admin(pod).json("/status"))).sum();
    bytes / device_slot_bytes(&layout_of(1, 1))
}

/// A tenant gets a budget, then a larger one, and is purged; agents apply each change within seconds.
fn a_budget_changes(cluster: &Cluster, release: Release<'_>) {
    // Only the first node: a concurrent test removes the second node's device, whose blocks would return
    // after the purge.
    let socket = cluster.nodes()[0].root().join("run/reprise/agent.sock");
    let name: TenantName = TENANT.parse().expect("a name");
    let connect = || Engine::connect_with_salt(&socket, layout_of(1, 1), &name);
    let refused = connect().expect_err("the tenant has no salt").to_string();
    assert!(refused.contains("create the CacheTenant 'team-a'"), "{refused}");
    tenant(cluster, None);
    let engine = wait_until("the kubelet to deliver the tenant's salt", BOUND_WITHIN, || connect().ok());
    let first: Vec<u64> = (0..SAVED).collect();
    engine.save_durably(&first);
    assert_eq!(on_devices(release), SAVED, "without a budget no block is evicted");
    tenant(cluster, Some(FEW));
    let started = Instant::now();
    let few = wait_until("nodes to evict the blocks beyond the budget", PODS_WITHIN, || {
        Some(on_devices(release)).filter(|blocks| *blocks <= FEW)
    });
    print_line(&format!(
        "a tenant's budget was enforced {:.1?} after it was written: {few} of {FEW} blocks",
        started.elapsed()
    ));
    for kind in ["BudgetApplied", "Ready"] {
        wait_for(release, &format!("ctenant/{TENANT}"), kind);
    }
    tenant(cluster, Some(MORE));
    let mut next = SAVED;
    let more = wait_until("the larger budget to be used", PODS_WITHIN, || {
        // A node whose grant is used up accepts them and evicts others.
        engine.save(&(next..next + 10).collect::<Vec<u64>>()).expect("blocks are accepted");
        next += 10;
        std::thread::sleep(PAUSE);
        let blocks = on_devices(release);
        assert!(blocks <= MORE, "the budget is never exceeded: {blocks}");
        (blocks > FEW).then_some(blocks)
    });
    print_line(&format!("and {more} of {MORE} blocks after the budget was raised"));
    drop(engine);
    // The deletion finishes when all nodes have reported that they have no block of the tenant.
    release.kubectl(&["delete", "ctenant", TENANT, "--timeout=180s"]);
    assert_eq!(on_devices(release), 0, "all blocks were purged");
    let engine = connect().expect("the salt of a deleted tenant stays");
    assert!(engine.matches(&first, Scope::Local).is_empty(), "no block is left in memory");
}

/// A profile is distributed to the nodes whose agents report its GPU, and both acknowledge it.
fn a_profile_is_distributed(cluster: &Cluster, release: Release<'_>) {
    let agents = release.pods(Component::Agents);
    for (index, agent) in agents.iter().enumerate() {
        release.fake_gpu(agent, PRODUCT, &format!("GPU-0a1b{index}"));
    }
    let micros = |agent: &Pod| {
        let (code, page) =
            release.admin(agent).get("/slack/measured/Decode/9/64").expect("the agent responds");
        let page: Value = serde_json::from_str(&page).unwrap_or_default();
        (code == 200).then(|| page["micros"].clone())
    };
    assert!(agents.iter().all(|agent| micros(agent).is_none()), "no agent has the profile yet");
    cluster.apply(PROFILE);
    let started = Instant::now();
    let profile = wait_until("both nodes to acknowledge the profile", PODS_WITHIN, || {
        let profile = release.object("slack", "measured");
        (profile["status"]["nodes"] == json!({ "target": 2, "applied": 2, "failed": 0 })).then_some(profile)
    });
    print_line(&format!("a slack profile was in effect on both nodes after {:.1?}", started.elapsed()));
    for kind in ["Accepted", "Valid", "Distributed", "Active"] {
        wait_for(release, "slack/measured", kind);
    }
    let digest = &profile["status"]["digest"];
    assert!(digest.as_str().is_some_and(|digest| digest.starts_with("sha256:")), "{profile:#}");
    for agent in &agents {
        let node = release.object("cachenode", &agent.node);
        assert_eq!(node["status"]["gpus"][0]["product"], PRODUCT, "{node:#}");
        let applied = &node["status"]["applied"]["profiles"][0];
        assert_eq!((&applied["name"], &applied["digest"]), (&json!("measured"), digest), "{node:#}");
        assert_eq!(micros(agent), Some(json!(48)), "80% of the window");
    }
    release.kubectl(&["delete", "slackprofile", "measured"]);
    wait_until("both nodes to drop the profile", PODS_WITHIN, || {
        agents.iter().all(|agent| micros(agent).is_none()).then_some(())
    });
}

/// The example's requests for queues are rejected: one names a pool that no node has, one a pool without
/// devices.
fn queue_requests_are_rejected(cluster: &Cluster, release: Release<'_>) {
    let adapted = example("resources/queues.yaml")
        .replace("namespace: inference", "namespace: reprise")
        .replace("nodeName: worker-1", &format!("nodeName: {}", cluster.nodes()[0].name()));
    let (first, second) = adapted.split_once("\n---\n").expect("two objects");
    cluster.apply(first);
    cluster.apply(&second.replace("name: nvme", "name: lab"));
    let refused = |name: &str| {
        wait_for(release, &format!("gqa/{name}"), "Accepted=false");
        let object = release.object("gqa", name);
        let conditions = object["status"]["conditions"].as_array().cloned().unwrap_or_default();
        let accepted = conditions.into_iter().find(|condition| condition["type"] == "Accepted");
        assert!(object["status"]["allocations"].as_array().is_none_or(Vec::is_empty), "{object:#}");
        accepted.expect("the condition was waited for")
    };
    let (missing_pool, directory) = (refused("prefill-0"), refused("prefill-1"));
    assert_eq!(missing_pool["reason"], "ReferenceNotFound", "{missing_pool}");
    assert!(missing_pool.to_string().contains("nvme"), "the pool's name: {missing_pool}");
    assert_eq!(directory["reason"], "InvalidSpec", "{directory}");
    assert!(directory.to_string().contains("devices"), "the requirement: {directory}");
    release.kubectl(&["delete", "gqa", "--all", "--timeout=60s"]);
}
