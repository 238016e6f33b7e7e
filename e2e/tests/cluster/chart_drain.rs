//! A node that is drained by `kubectl drain`: disruption budgets hold, pods move to the other node, and
//! blocks that only this node has are copied to the other one before the node can be switched off.

use std::fs;
use std::time::Instant;

use reprise_client::Scope;
use reprise_e2e::kubernetes::release::{Component, NAMESPACE, PODS_WITHIN, Pod, container_ids};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::{LoadParams, wait_until};

use crate::chart::{ENGINES, condition};
use crate::chart_faults::agent_of;
use crate::chart_rollback::changed;
use crate::chart_uninstall::wait_for_all_blocks;

/// Blocks that only the drained node has.
const KEPT: std::ops::Range<u64> = 300_000..300_200;

pub(crate) fn by_kubectl(cluster: &mut Cluster) {
    let release = changed(cluster);
    // etcd's volume ties its pod to a node, so the other node is drained.
    let remaining = release.pods(Component::Etcd).remove(0).node;
    let position = |is: bool| cluster.nodes().iter().position(|node| (node.name() == remaining) == is);
    let (at, other) = (position(false).expect("a second node"), position(true).expect("etcd's node"));
    let node = cluster.nodes()[at].name().to_owned();
    let kept: Vec<u64> = KEPT.collect();
    agent_of(cluster, at).expect("the agent responds").save_durably(&kept);
    let other_agent = agent_of(cluster, other).expect("the agent responds");
    assert!(other_agent.matches(&kept, Scope::Local).is_empty(), "the blocks are not copied yet");
    let engine =
        release.pods_of(ENGINES.namespace, "app=engine").iter().position(|pod| pod.node == remaining);
    let baseline = ENGINES.now(cluster);
    let agents = release.pods(Component::Agents);

    let started = Instant::now();
    drain(cluster, release, &node);
    let drained = started.elapsed();
    for component in [Component::Members, Component::Operator] {
        let pods = release.wait_until_replaced(component, &[], 2);
        assert!(pods.iter().all(|pod| pod.node == remaining), "{component:?} have moved: {pods:?}");
    }
    let moved = started.elapsed();
    release.kubectl(&["wait", &format!("cachenode/{node}"), "--for=condition=Drained", "--timeout=180s"]);
    print_line(&format!(
        "kubectl drain of {node} took {drained:.1?}; all movable pods had moved after {moved:.1?}, and the blocks after {:.1?}",
        started.elapsed()
    ));
    let cache_node = release.object("cachenode", &node);
    assert_eq!(cache_node["status"]["drain"]["nowhereBlocks"], 0, "{cache_node:#}");
    assert_eq!(other_agent.matches(&kept, Scope::Local).len(), kept.len(), "the other node has the blocks");
    other_agent.load_all(&kept, &LoadParams::LOCAL);
    let now = release.pods(Component::Agents);
    assert_eq!(
        container_ids(&now),
        container_ids(&agents),
        "agents stay, since engines of the node may return"
    );
    agent_of(cluster, at).expect("the agent serves during the drain").load_all(&kept, &LoadParams::LOCAL);
    let engine = engine.expect("an engine on each node");
    let counters = ENGINES.since(cluster, &baseline)[engine].clone().expect("its node was not drained");
    assert_eq!((counters.own_missed, counters.sessions), (0, 0), "{counters:?}");
    assert!(counters.own_hits() > 0, "{counters:?}");

    // Both members are on one node now. The disruption budget lets only one of them go at a time.
    let members = release.pods(Component::Members);
    evict(cluster, &members[0]).unwrap_or_else(|error| panic!("cannot evict the first member: {error}"));
    let refused = evict(cluster, &members[1]).expect_err("the budget allows one eviction");
    assert!(refused.contains("disruption budget"), "{refused}");
    cluster.kubectl(&["uncordon", &node]);
    release.wait_until_replaced(Component::Members, &members[..1], members.len());
    wait_until("the node to be used again", PODS_WITHIN, || {
        let cache_node = release.object("cachenode", &node);
        (cache_node["spec"]["mode"] == "Active" && condition(&cache_node, "Cordoned").0 == "False")
            .then_some(())
    });
    release.wait_until_ready();
    wait_for_all_blocks(cluster);
}

/// Drains a node, and polls that budgets hold meanwhile: one of two members and one of two operators is
/// ready.
fn drain(cluster: &Cluster, release: Release<'_>, node: &str) {
    // Members have their certificate in a volume in memory, which is made again.
    let volumes = "--delete-emptydir-data";
    let mut drain = cluster.begin_kubectl(&["drain", node, "--ignore-daemonsets", volumes, "--timeout=180s"]);
    let mut polls = 0_u32;
    while drain.is_alive() {
        for component in [Component::Members, Component::Operator] {
            let pods = release.pods(component);
            assert!(pods.iter().any(|pod| pod.is_ready), "{component:?}: none of {pods:?} is ready");
        }
        polls += 1;
    }
    let ended = drain.wait(PODS_WITHIN);
    assert!(ended.is_some_and(|status| status.success()), "kubectl drain: {ended:?}\n{}", release.state());
    assert!(polls > 0, "the drain was polled");
    let remaining = cluster.kubectl(&[
        "get",
        "pods",
        "--all-namespaces",
        "--output=name",
        &format!("--field-selector=spec.nodeName={node},status.phase=Running"),
    ]);
    let of_all_nodes = ["reprise-agent-", "reprise-seccomp-", "server-"];
    let others: Vec<&str> = remaining
        .lines()
        .filter(|name| !of_all_nodes.iter().any(|kind| name.starts_with(&format!("pod/{kind}"))))
        .collect();
    assert!(others.is_empty(), "only DaemonSet pods remain: {others:?}");
}

/// Requests the eviction of a pod, as `kubectl drain` does.
fn evict(cluster: &Cluster, pod: &Pod) -> Result<String, String> {
    let name = &pod.name;
    let file = cluster.folder().join("eviction.json");
    let eviction = serde_json::json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name, "namespace": NAMESPACE },
    });
    fs::write(&file, eviction.to_string()).expect("the cluster's folder is writable");
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction");
    cluster.try_kubectl(&["create", "--raw", &path, &format!("--filename={}", file.display())])
}
