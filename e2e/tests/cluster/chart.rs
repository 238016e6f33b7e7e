//! The chart on two real nodes: every component becomes ready, and blocks move between the nodes.
//!
//! The release stays installed for the following tests; each of them installs it if it is missing.

use std::time::{Duration, Instant};

use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN, container_ids, import_images};
use reprise_e2e::kubernetes::{Cluster, Engines, Release, Workers};
use reprise_e2e::seed::print_line;
use reprise_e2e::wait_until;
use serde_json::Value;

use crate::chart_rollback::assert_reported_io_engine;
use crate::chart_uninstall::AGENT_READY;

/// The engines of these tests run as root, which every agent accepts.
pub(crate) const ENGINES: Engines<'static> = Engines::new("default", 0);
pub(crate) const WORKERS: Workers<'static> = Workers::new("default", 0);

/// Room for 100,000 small blocks on each node: a device has one entry per 64 KiB (docs/FORMAT.md).
/// Rebalancing is off, so that blocks stay on the node where the tests expect them. Slack profiles with the
/// label `for: lab` are distributed. Pods in namespaces with the label `engines: yes` get the socket if they
/// request it. The operator may read the Secrets of cluster `trio`, which a test creates.
pub(crate) const SETTINGS: &str = r#"--set-json=pools.lab.directory.size="7Gi",cluster.cache.placement.bandwidth="0",cluster.slackProfiles.matchLabels.for="lab",rbac.injection=true,cluster.injection.mode="AdmissionPolicy",cluster.injection.namespaceSelector.matchLabels.engines="yes",rbac.clusters=[{"namespace":"reprise","name":"trio"}]"#;

/// Label whose value is the failure domain of a node, by default.
const ZONE: &str = "topology.kubernetes.io/zone";

/// Bound from a node's label to the member that lists its failure domain. Agents read their spec by a watch.
const ZONE_WITHIN: Duration = Duration::from_secs(30);

/// Bound from `helm install` to blocks that both nodes have exchanged.
const FIRST_HIT_WITHIN: Duration = Duration::from_secs(60);

/// Returns the release with running engines. Installs the release and starts the engines if needed.
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

/// Returns the status and the reason of an object's condition.
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
    let output = release.test();
    let hit = started.elapsed();
    print_line(&format!(
        "images imported in {imported:.1?}; helm install --wait took {installed:.1?}, everything was ready after {ready:.1?}, and \
         two nodes had exchanged blocks after {hit:.1?}"
    ));
    for node in cluster.nodes() {
        let took_part = output.lines().any(|line| line.contains(&format!("on node {}: saved", node.name())));
        assert!(took_part, "{} did not take part: {output}", node.name());
    }
    assert_eq!(output.matches(", durable").count(), 2, "both blocks are on devices: {output}");
    assert_eq!(output.matches("peer ").count(), 2, "both came from the other node: {output}");
    assert!(hit <= FIRST_HIT_WITHIN, "the first blocks took {hit:?}");
}

pub(crate) fn all_components_are_ready(cluster: &mut Cluster) {
    let release = running(cluster);
    let nodes: Vec<String> = cluster.nodes().iter().map(|node| node.name().to_owned()).collect();
    for (component, count) in
        [(Component::Operator, 2), (Component::Members, 2), (Component::Etcd, 1), (Component::Agents, 2)]
    {
        let pods = release.pods(component);
        assert!(pods.len() == count && pods.iter().all(|pod| pod.is_ready), "{component:?}: {pods:?}");
        let mut on: Vec<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
        on.sort_unstable();
        on.dedup();
        assert_eq!(on.len(), count, "{component:?} are on different nodes: {pods:?}");
    }
    let kvcc = release.object("kvcc", "reprise");
    for kind in ["Accepted", "EtcdReady", "ControlPlaneReady", "AgentsReady", "PoolsBound", "Ready"] {
        assert_eq!(condition(&kvcc, kind).0, "True", "{kind}");
    }
    assert_eq!(condition(&kvcc, "Degraded").0, "False");
    assert_eq!(kvcc["status"]["versions"]["agentMin"], env!("CARGO_PKG_VERSION"));
    let pool = release.object("ssdp", "lab");
    assert_eq!(condition(&pool, "Ready").0, "True");
    assert_eq!(pool["status"]["devices"]["open"], 2, "{pool:#}");
    // Whether the runtime's default profile allows io_uring depends on the machine. The reported I/O engine
    // must match.
    assert_reported_io_engine(release);
    for node in &nodes {
        let cache_node = release.object("cachenode", node);
        for kind in ["AgentReady", "Connected", "DevicesReady", "ConfigurationApplied"] {
            assert_eq!(condition(&cache_node, kind).0, "True", "{kind}: {cache_node:#}");
        }
        assert_eq!(condition(&release.object("node", node), AGENT_READY).0, "True");
    }
}

pub(crate) fn failure_domains_follow_labels(cluster: &mut Cluster) {
    let release = running(cluster);
    let members = release.pods(Component::Members);
    let listed = |node: &str| {
        let nodes = release.admin(&members[0]).json("/nodes");
        let listed = nodes.as_array().into_iter().flatten().find(|listed| listed["name"] == node);
        listed.map(|listed| listed["failure_domain"].as_str().unwrap_or_default().to_owned())
    };
    let wait_listed = |node: &str, zone: &str| {
        wait_until("the member lists the zone of the node", ZONE_WITHIN, || {
            (listed(node).as_deref() == Some(zone)).then_some(())
        });
        let cache_node = release.object("cachenode", node);
        assert_eq!(cache_node["spec"]["failureDomain"].as_str().unwrap_or_default(), zone, "{cache_node:#}");
    };
    let agents = release.pods(Component::Agents);
    for (node, zone) in [("node1", "zone-a"), ("node2", "zone-b")] {
        cluster.kubectl(&["label", "node", node, &format!("{ZONE}={zone}")]);
        wait_listed(node, zone);
    }
    for node in ["node1", "node2"] {
        cluster.kubectl(&["label", "node", node, &format!("{ZONE}-")]);
        wait_listed(node, "");
    }
    let now = release.pods(Component::Agents);
    assert_eq!(container_ids(&now), container_ids(&agents), "agents continue to run");
}

pub(crate) fn permissions_of_agents(cluster: &mut Cluster) {
    let release = running(cluster);
    let agents = release.pods(Component::Agents);
    let pod = release.object("pod", &agents[0].name);
    let spec = &pod["spec"];
    for shared in ["hostNetwork", "hostPID", "hostIPC"] {
        assert!(spec[shared].is_null() || spec[shared] == false, "{shared}: {spec:#}");
    }
    let security = &spec["containers"][0]["securityContext"];
    assert_eq!(security["capabilities"]["drop"][0], "ALL", "{security}");
    assert_eq!(security["readOnlyRootFilesystem"], true);
    assert!(security["privileged"].is_null() || security["privileged"] == false);
    // With its own token, the agent's account may not write the status of the other node.
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
            // kubectl would otherwise use the administrator's certificate instead of the token.
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
    let refused = write(other).expect_err("the policy rejects it");
    assert!(refused.contains("may write the CacheNode of that name only"), "{refused}");
    write(&agents[0].node).unwrap_or_else(|error| panic!("cannot write its own node: {error}"));
}

pub(crate) fn engines_hit_everywhere(cluster: &mut Cluster) {
    running(cluster);
    let baseline = ENGINES.now(cluster);
    let enough = wait_until("hits of both engines", PODS_WITHIN, || {
        let since = ENGINES.since(cluster, &baseline);
        let [Some(one), Some(other)] = since else { return None };
        (one.all_hits() > 100 && other.all_hits() > 100).then_some([one, other])
    });
    for counters in &enough {
        assert_eq!((counters.own_missed, counters.others_missed), (0, 0), "{enough:?}");
    }
    let first = ENGINES.first_loads(cluster);
    let is_from_the_other = |places: &Vec<String>| places.len() == 1 && places[0].starts_with("peer ");
    assert!(first.iter().all(is_from_the_other), "each other's block came from the other node: {first:?}");
    print_line(&format!(
        "two engines found each other's block at {first:?}, and then hits by tier: {:?} and {:?}",
        enough[0].hits, enough[1].hits
    ));
}
