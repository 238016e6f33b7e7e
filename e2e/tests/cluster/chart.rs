//! The chart on two real nodes: everything that it brings becomes ready, and blocks go around between the nodes.
//!
//! The release stays for the tests that follow; each of them makes sure that it is there.

use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part, import_images};
use reprise_e2e::kubernetes::{Cluster, Engines, Release, Workers};
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;
use serde_json::Value;

use crate::chart_changed::engines_are_told_as_allowed;
use crate::chart_life::AGENT_READY;

/// The engines of these tests run as root, whom every agent lets connect.
pub(crate) const ENGINES: Engines<'static> = Engines { namespace: "default", user: 0 };
pub(crate) const WORKERS: Workers<'static> = Workers { namespace: "default", user: 0 };

/// Room for 100,000 small blocks on each node: a device has an entry for each 64 KiB of it (docs/FORMAT.md). And they stay where tests
/// look for them: a node that has much more than the other would give it some. Slack profiles with this label are brought to nodes.
/// Pods of namespaces with this label get the socket when they ask for it.
pub(crate) const SETTINGS: &str = r#"--set-json=pools.lab.directory.size="7Gi",cluster.cache.placement.bandwidth="0",cluster.slackProfiles.matchLabels.for="lab",rbac.injection=true,cluster.injection.mode="AdmissionPolicy",cluster.injection.namespaceSelector.matchLabels.engines="yes""#;

/// From `helm install` to blocks that have gone around.
const FIRST_HIT_WITHIN: Duration = Duration::from_secs(60);

/// Installs it where that has not been done, and starts engines: as it is from now on.
pub(crate) fn running(cluster: &Cluster) -> Release<'_> {
    let release = Release::of(cluster);
    if !release.is_installed() {
        import_images(cluster);
        release.install(&[SETTINGS]);
        release.wait_until_ready();
    }
    if cluster.try_kubectl(&["get", "statefulset", "engine"]).is_err() {
        ENGINES.start(cluster);
    }
    release
}

/// The condition of an object: its status and its reason.
pub(crate) fn condition<'a>(object: &'a Value, kind: &str) -> (&'a str, &'a str) {
    let conditions = object["status"]["conditions"].as_array().into_iter().flatten();
    let found = conditions.into_iter().find(|condition| condition["type"] == kind);
    let found = found.unwrap_or_else(|| panic!("no condition {kind}: {object:#}"));
    (found["status"].as_str().unwrap_or_default(), found["reason"].as_str().unwrap_or_default())
}

pub(crate) fn first_hit(cluster: &mut Cluster) {
    let started = Instant::now();
    import_images(cluster);
    let imported = started.elapsed();
    let release = Release::of(cluster);
    let started = Instant::now();
    release.install(&[SETTINGS]);
    let installed = started.elapsed();
    release.wait_until_ready();
    let ready = started.elapsed();
    let said = release.test();
    let hit = started.elapsed();
    say(&format!(
        "images imported in {imported:.1?}; helm install --wait took {installed:.1?}, all was ready after {ready:.1?}, and blocks \
         had gone around between two nodes after {hit:.1?}"
    ));
    for node in cluster.nodes() {
        let told = said.lines().any(|line| line.contains(&format!("of node {}: saved", node.name())));
        assert!(told, "{} says that it took part: {said}", node.name());
    }
    assert_eq!(said.matches(", durable").count(), 2, "both blocks are on devices: {said}");
    assert_eq!(said.matches("peer ").count(), 2, "both came from the other node: {said}");
    assert!(hit <= FIRST_HIT_WITHIN, "the first blocks took {hit:?}");
}

pub(crate) fn all_is_there(cluster: &mut Cluster) {
    let release = running(cluster);
    let nodes: Vec<String> = cluster.nodes().iter().map(|node| node.name().to_owned()).collect();
    for (part, count) in [(Part::Operator, 2), (Part::Members, 2), (Part::Etcd, 1), (Part::Agents, 2)] {
        let pods = release.pods(part);
        assert!(pods.len() == count && pods.iter().all(|pod| pod.is_ready), "{part:?}: {pods:?}");
        let mut on: Vec<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
        on.sort_unstable();
        on.dedup();
        assert_eq!(on.len(), count, "{part:?} are on nodes of their own: {pods:?}");
    }
    let whole = release.object("kvcc", "reprise");
    for kind in ["Accepted", "EtcdReady", "ControlPlaneReady", "AgentsReady", "PoolsBound", "Ready"] {
        assert_eq!(condition(&whole, kind).0, "True", "{kind}");
    }
    assert_eq!(condition(&whole, "Degraded").0, "False");
    assert_eq!(whole["status"]["versions"]["agentMin"], env!("CARGO_PKG_VERSION"));
    let pool = release.object("ssdp", "lab");
    assert_eq!(condition(&pool, "Ready").0, "True");
    assert_eq!(pool["status"]["devices"]["open"], 2, "{pool:#}");
    // Whether the runtime's own profile allows io_uring is not ours to say; that its consequence is told is.
    engines_are_told_as_allowed(release);
    for node in &nodes {
        let cache_node = release.object("cachenode", node);
        for kind in ["AgentReady", "Connected", "DevicesReady", "ConfigurationApplied"] {
            assert_eq!(condition(&cache_node, kind).0, "True", "{kind}: {cache_node:#}");
        }
        assert_eq!(condition(&release.object("node", node), AGENT_READY).0, "True");
    }
}

pub(crate) fn what_agents_may(cluster: &mut Cluster) {
    let release = running(cluster);
    let agents = release.pods(Part::Agents);
    let pod = release.object("pod", &agents[0].name);
    let spec = &pod["spec"];
    for shared in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(spec[shared].is_null() || spec[shared] == false, "{shared}: {spec:#}");
    }
    let security = &spec["containers"][0]["securityContext"];
    assert_eq!(security["capabilities"]["drop"][0], "ALL", "{security}");
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert!(security["privileged"].is_null() || security["privileged"] == false);
    // Its own account, with its own token, may not write what is said of the other node.
    let other = if agents[0].node == "node1" { "node2" } else { "node1" };
    let token = release.kubectl(&[
        "create",
        "token",
        "reprise-agent",
        "--bound-object-kind=Pod",
        &format!("--bound-object-name={}", agents[0].name),
    ]);
    let patch = r#"{"status":{"observedGeneration":99}}"#;
    let write = |node: &str| {
        let token = format!("--token={}", token.trim());
        cluster.try_kubectl(&[
            &token,
            // The administrator's certificate would say more than the token.
            "--kubeconfig=/dev/null",
            &format!("--server={}", cluster.server().url()),
            "--insecure-skip-tls-verify",
            "patch",
            "cachenode",
            node,
            "--subresource=status",
            "--type=merge",
            "--dry-run=server",
            &format!("--patch={patch}"),
        ])
    };
    let refused = write(other).expect_err("the policy refuses it");
    assert!(refused.contains("may write the CacheNode of that name only"), "{refused}");
    write(&agents[0].node).unwrap_or_else(|said| panic!("its own it may: {said}"));
}

pub(crate) fn engines_hit_everywhere(cluster: &mut Cluster) {
    running(cluster);
    let moment = ENGINES.now(cluster);
    let enough = wait_until("hits of both engines", PODS_WITHIN, || {
        std::thread::sleep(Duration::from_millis(500));
        let since = ENGINES.since(cluster, &moment);
        let [Some(one), Some(other)] = since else { return None };
        (one.all_hits() > 100 && other.all_hits() > 100).then_some([one, other])
    });
    for said in &enough {
        assert_eq!((said.own_missed, said.others_missed), (0, 0), "{enough:?}");
    }
    let first = ENGINES.first_loads(cluster);
    let is_from_the_other = |places: &Vec<String>| places.len() == 1 && places[0].starts_with("peer ");
    assert!(first.iter().all(is_from_the_other), "each other's block came from the other node: {first:?}");
    say(&format!(
        "two engines found each other's block at {first:?}, and then hits by tier: {:?} and {:?}",
        enough[0].hits, enough[1].hits
    ));
}
