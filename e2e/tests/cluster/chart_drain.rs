//! A node that is drained as people drain nodes, `kubectl drain`: budgets of disruptions hold, what can run elsewhere does, and the blocks that
//! only this node has are on the other before anybody needs to switch it off.

use std::fs;
use std::time::{Duration, Instant};

use reprise_client::Scope;
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Part, Pod, runs};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::{Loading, wait_until};

use crate::chart::{ENGINES, condition};
use crate::chart_changed::changed;
use crate::chart_faults::agent_of;
use crate::chart_life::wait_for_all_blocks;

/// Blocks that only the node has which is drained.
const KEPT: std::ops::Range<u64> = 300_000..300_200;

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

pub(crate) fn by_kubectl(cluster: &mut Cluster) {
    let release = changed(cluster);
    // Etcd's volume is on its node, so it could not go.
    let stays = release.pods(Part::Etcd).remove(0).node;
    let position = |is: bool| cluster.nodes().iter().position(|node| (node.name() == stays) == is);
    let (at, other) = (position(false).expect("there are two"), position(true).expect("it is one of them"));
    let node = cluster.nodes()[at].name().to_owned();
    let kept: Vec<u64> = KEPT.collect();
    agent_of(cluster, at).expect("it serves").save_durably(&kept);
    let there = agent_of(cluster, other).expect("it serves");
    assert!(there.matches(&kept, Scope::Local).is_empty(), "nobody has given them away yet");
    let engine = release.pods_of(ENGINES.namespace, "app=engine").iter().position(|pod| pod.node == stays);
    let moment = ENGINES.now(cluster);
    let agents = release.pods(Part::Agents);

    let started = Instant::now();
    drain(cluster, release, &node);
    let drained = started.elapsed();
    for part in [Part::Members, Part::Operator] {
        let pods = release.replaced(part, &[], 2);
        assert!(pods.iter().all(|pod| pod.node == stays), "{part:?} have moved: {pods:?}");
    }
    let moved = started.elapsed();
    release.kubectl(&["wait", &format!("cachenode/{node}"), "--for=condition=Drained", "--timeout=180s"]);
    say(&format!(
        "kubectl drain of {node} took {drained:.1?}; all that could go had moved after {moved:.1?}, and the cache after {:.1?}",
        started.elapsed()
    ));
    let told = release.object("cachenode", &node);
    assert_eq!(told["status"]["drain"]["nowhereBlocks"], 0, "{told:#}");
    assert_eq!(there.matches(&kept, Scope::Local).len(), kept.len(), "the other node has them");
    there.load_all(&kept, &Loading::LOCAL);
    let now = release.pods(Part::Agents);
    assert_eq!(runs(&now), runs(&agents), "agents stay: engines of the node may come back first");
    agent_of(cluster, at).expect("it serves all the time").load_all(&kept, &Loading::LOCAL);
    let engine = engine.expect("one on each node");
    let said = ENGINES.since(cluster, &moment)[engine].clone().expect("nobody drained its node");
    assert_eq!((said.own_missed, said.sessions), (0, 0), "{said:?}");
    assert!(said.own_hits() > 0, "{said:?}");

    // Both members are on one node now. They do not leave it together.
    let members = release.pods(Part::Members);
    evict(cluster, &members[0]).unwrap_or_else(|said| panic!("one may go: {said}"));
    let refused = evict(cluster, &members[1]).expect_err("two may not");
    assert!(refused.contains("disruption budget"), "{refused}");
    cluster.kubectl(&["uncordon", &node]);
    release.replaced(Part::Members, &members[..1], members.len());
    wait_until("the node to be used again", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let told = release.object("cachenode", &node);
        (told["spec"]["mode"] == "Active" && condition(&told, "Cordoned").0 == "False").then_some(())
    });
    release.wait_until_ready();
    wait_for_all_blocks(cluster);
}

/// Drains a node, and looks all the time that budgets hold: of two members and of two operators one serves.
fn drain(cluster: &Cluster, release: Release<'_>, node: &str) {
    let mut drain = cluster.begin_kubectl(&["drain", node, "--ignore-daemonsets", "--timeout=180s"]);
    let mut looks = 0_u32;
    while drain.is_alive() {
        for part in [Part::Members, Part::Operator] {
            let pods = release.pods(part);
            assert!(
                pods.iter().any(|pod| pod.is_ready),
                "{part:?}: one at a time, and none of {pods:?} serves"
            );
        }
        looks += 1;
    }
    let ended = drain.wait(PODS_WITHIN);
    assert!(ended.is_some_and(|status| status.success()), "kubectl drain: {ended:?}\n{}", release.state());
    assert!(looks > 0, "somebody has looked");
    let left = cluster.kubectl(&[
        "get",
        "pods",
        "--all-namespaces",
        "--output=name",
        &format!("--field-selector=spec.nodeName={node},status.phase=Running"),
    ]);
    let of_all_nodes = ["reprise-agent-", "reprise-seccomp-", "server-"];
    let others: Vec<&str> = left
        .lines()
        .filter(|name| !of_all_nodes.iter().any(|kind| name.starts_with(&format!("pod/{kind}"))))
        .collect();
    assert!(others.is_empty(), "only what is on every node is there: {others:?}");
}

/// Asks for what `kubectl drain` asks for of each pod.
fn evict(cluster: &Cluster, pod: &Pod) -> Result<String, String> {
    let name = &pod.name;
    let file = cluster.folder().join("eviction.json");
    let eviction = serde_json::json!({
        "apiVersion": "policy/v1", "kind": "Eviction", "metadata": { "name": name, "namespace": NAMESPACE },
    });
    fs::write(&file, eviction.to_string()).expect("a folder of one's own takes files");
    let path = format!("/api/v1/namespaces/{NAMESPACE}/pods/{name}/eviction");
    cluster.try_kubectl(&["create", "--raw", &path, &format!("--filename={}", file.display())])
}
