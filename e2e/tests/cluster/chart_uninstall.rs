//! A version skew that is rejected, and the uninstall of a release.

use std::time::Duration;

use reprise_e2e::kubernetes::check_pods::EngineCounters;
use reprise_e2e::kubernetes::release::{Component, NAMESPACE, PODS_WITHIN, RELEASE, container_ids};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::wait_until;
use serde_json::json;

use crate::chart::{ENGINES, SETTINGS, condition, running};

/// Bound on the time that a node has no agent while it is replaced: four times the goal, since other tests
/// use the same cores. The tests print the actual time.
pub(crate) const OUTAGE_MAX: Duration = Duration::from_secs(20);

/// The current version, and one that is too far from it.
const THIS: &str = env!("CARGO_PKG_VERSION");
const FAR: &str = "0.4.0";

/// Keeps all values except those on the command line and in the file of values.
const REUSE: &str = "--reuse-values";

/// Definitions, which stay after an uninstall.
const DEFINITIONS: [&str; 6] =
    ["cachenodes", "cachetenants", "gpuqueueallocations", "kvcacheclusters", "slackprofiles", "ssdpools"];

/// Condition of a node about its agent, set while it has one.
pub(crate) const AGENT_READY: &str = "reprise.dev/AgentReady";

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// Kinds of objects of which none may remain after an uninstall.
const OF_NAMESPACES: &str = "all,configmaps,secrets,serviceaccounts,persistentvolumeclaims,leases,roles,rolebindings,\
                             poddisruptionbudgets,networkpolicies,controllerrevisions,kvcacheclusters,slackprofiles,\
                             gpuqueueallocations";
const OF_THE_CLUSTER: &str = "clusterroles,clusterrolebindings,validatingadmissionpolicies,\
                              validatingadmissionpolicybindings,mutatingadmissionpolicies,\
                              mutatingadmissionpolicybindings,cachenodes,ssdpools,cachetenants,persistentvolumes";

pub(crate) fn version_skew(cluster: &mut Cluster) {
    let release = running(cluster);
    let serves = version(release);
    assert_eq!(serves, THIS, "members report their version");
    // The upgrade is rejected, the condition gives the reason, and no pod is replaced.
    let (agents, members) = (release.pods(Component::Agents), release.pods(Component::Members));
    let as_it_is = tags(agents[0].image.rsplit(':').next().expect("an image has a tag"));
    let far = tags(FAR);
    release.upgrade(&[REUSE, SETTINGS, &far[0], &far[1]]);
    let refused = wait_until("the cluster to reject the version", PODS_WITHIN, || {
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "False").then_some(cluster)
    });
    assert_eq!(condition(&refused, "Accepted").1, "VersionSkew");
    let assert_unchanged = |what: &str| {
        assert_eq!(container_ids(&release.pods(Component::Agents)), container_ids(&agents), "{what}");
        assert_eq!(container_ids(&release.pods(Component::Members)), container_ids(&members), "{what}");
    };
    assert_unchanged("no pod is replaced");
    assert_eq!(version(release), serves, "the status has the running version, not the requested one");
    release.upgrade(&[REUSE, SETTINGS, &as_it_is[0], &as_it_is[1]]);
    wait_until("the cluster to accept it again", PODS_WITHIN, || {
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "True").then_some(())
    });
    release.wait_until_ready();
    assert_unchanged("the requested version is the running one");
    wait_for_all_blocks(cluster);
}

/// Returns the version of the members, from the cluster's status.
pub(crate) fn version(release: Release<'_>) -> String {
    let cluster = release.object("kvcc", RELEASE);
    cluster["status"]["versions"]["controlPlane"].as_str().unwrap_or_default().to_owned()
}

/// Returns Helm arguments that select another version of agents and members.
pub(crate) fn tags(version: &str) -> [String; 2] {
    [format!("--set=images.agent.tag={version}"), format!("--set=images.controlPlane.tag={version}")]
}

/// Waits until both engines find all blocks without a miss.
pub(crate) fn wait_for_all_blocks(cluster: &Cluster) {
    wait_until("engines that find all blocks", PODS_WITHIN, || {
        let baseline = ENGINES.now(cluster);
        std::thread::sleep(Duration::from_secs(2));
        let since = ENGINES.since(cluster, &baseline);
        let is_healthy = |counters: &Option<EngineCounters>| {
            counters.as_ref().is_some_and(|one| one.own_hits() > 0 && one.own_missed + one.others_missed == 0)
        };
        since.iter().all(is_healthy).then_some(())
    });
}

/// Deletes a pool while engines use it. It must report that it is in use, and engines keep their hits.
fn assert_deletion_waits_for_engines(cluster: &Cluster, release: Release<'_>) {
    let (agents, baseline) = (release.pods(Component::Agents), ENGINES.now(cluster));
    release.kubectl(&["delete", "ssdp", "lab", "--wait=false"]);
    let waits = wait_until("the pool to wait for engines", PODS_WITHIN, || {
        let pool = release.object("ssdp", "lab");
        let conditions = pool["status"]["conditions"].as_array()?;
        conditions.iter().find(|condition| condition["type"] == "DeletionBlocked").cloned()
    });
    assert_eq!((&waits["status"], &waits["reason"]), (&json!("True"), &json!("InUse")), "{waits}");
    let message = waits["message"].as_str().unwrap_or_default();
    for node in cluster.nodes() {
        assert!(message.contains(node.name()), "{} has an engine: {message}", node.name());
    }
    std::thread::sleep(Duration::from_secs(3));
    for counters in ENGINES.since(cluster, &baseline) {
        let counters = counters.expect("no engine restarted");
        assert_eq!(
            (counters.own_missed, counters.others_missed, counters.sessions),
            (0, 0, 0),
            "{counters:?}"
        );
        assert!(counters.own_hits() > 0, "{counters:?}");
    }
    assert_eq!(
        container_ids(&release.pods(Component::Agents)),
        container_ids(&agents),
        "no agent is replaced"
    );
}

pub(crate) fn removed(cluster: &mut Cluster) {
    let release = running(cluster);
    assert_deletion_waits_for_engines(cluster, release);
    ENGINES.stop(cluster);
    // The release's hook deletes first what the release has applied: cluster, pool, and their objects.
    release.run(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    let remaining = || {
        let in_namespace = release.kubectl(&["get", OF_NAMESPACES, "--output=name", "--ignore-not-found"]);
        let elsewhere = cluster.kubectl(&["get", OF_THE_CLUSTER, "--output=name", "--ignore-not-found"]);
        // Objects that every namespace has.
        let every = ["configmap/kube-root-ca.crt", "serviceaccount/default"];
        let in_namespace = in_namespace.lines().filter(|name| !every.contains(name));
        let elsewhere = elsewhere.lines().filter(|name| name.contains("reprise"));
        in_namespace.chain(elsewhere).map(str::to_owned).collect::<Vec<String>>()
    };
    let deadline = std::time::Instant::now() + PODS_WITHIN;
    while !remaining().is_empty() && std::time::Instant::now() < deadline {
        std::thread::sleep(PAUSE);
    }
    assert_eq!(remaining(), Vec::<String>::new(), "only definitions remain");
    let nodes = cluster.kubectl(&["get", "nodes", "--output=json"]);
    assert!(!nodes.contains(AGENT_READY), "no node has the agent's condition: {nodes}");
    let definitions = cluster.kubectl(&["get", "customresourcedefinitions", "--output=name"]);
    for name in DEFINITIONS {
        assert!(definitions.contains(&format!("/{name}.reprise.dev")), "{name} stays: {definitions}");
    }
    for node in cluster.nodes() {
        let pool = node.root().join("var/lib/reprise-pool/pool");
        assert!(pool.exists(), "blocks stay on {}, according to deletionPolicy", node.name());
    }
}
