//! The life of a release: a version that is refused, and its end.

use std::time::Duration;

use reprise_e2e::kubernetes::engines::Said;
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Part, RELEASE, runs};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::wait_until;
use serde_json::json;

use crate::chart::{ENGINES, SETTINGS, condition, running};

/// For how long a node is without an agent while another takes its place, at the most: four times the goal, since other tests use the same cores. What
/// it takes is said.
pub(crate) const OUTAGE_MAX: Duration = Duration::from_secs(20);

/// The version of everything, and one that is too far from it and from the next.
const THIS: &str = env!("CARGO_PKG_VERSION");
const FAR: &str = "0.4.0";

/// Everything but what is said, and what the file of values says, is as it was.
const REUSE: &str = "--reuse-values";

/// Definitions, which are all that stays.
const DEFINITIONS: [&str; 6] =
    ["cachenodes", "cachetenants", "gpuqueueallocations", "kvcacheclusters", "slackprofiles", "ssdpools"];

/// What a node says of its agent, while it has one.
pub(crate) const AGENT_READY: &str = "reprise.dev/AgentReady";

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// Kinds in which nothing of ours may be left.
const OF_NAMESPACES: &str = "all,configmaps,secrets,serviceaccounts,persistentvolumeclaims,leases,roles,rolebindings,\
                             poddisruptionbudgets,networkpolicies,controllerrevisions,kvcacheclusters,slackprofiles,\
                             gpuqueueallocations";
const OF_THE_CLUSTER: &str = "clusterroles,clusterrolebindings,validatingadmissionpolicies,\
                              validatingadmissionpolicybindings,mutatingadmissionpolicies,\
                              mutatingadmissionpolicybindings,cachenodes,ssdpools,cachetenants,persistentvolumes";

pub(crate) fn too_far(cluster: &mut Cluster) {
    let release = running(cluster);
    let serves = version(release);
    assert_eq!(serves, THIS, "members have said what they are");
    // Nothing is touched, and it says what to go through.
    let (agents, members) = (release.pods(Part::Agents), release.pods(Part::Members));
    let as_it_is = tags(agents[0].image.rsplit(':').next().expect("an image has a tag"));
    let far = tags(FAR);
    release.upgrade(&[REUSE, SETTINGS, &far[0], &far[1]]);
    let refused = wait_until("the cluster to refuse it", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "False").then_some(cluster)
    });
    assert_eq!(condition(&refused, "Accepted").1, "VersionSkew");
    let as_before = |what: &str| {
        assert_eq!(runs(&release.pods(Part::Agents)), runs(&agents), "{what}");
        assert_eq!(runs(&release.pods(Part::Members)), runs(&members), "{what}");
    };
    as_before("no pod is touched");
    assert_eq!(version(release), serves, "it says what runs, not what was asked for");
    release.upgrade(&[REUSE, SETTINGS, &as_it_is[0], &as_it_is[1]]);
    wait_until("the cluster to accept it again", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "True").then_some(())
    });
    release.wait_until_ready();
    as_before("what is wanted again is what runs");
    wait_for_all_blocks(cluster);
}

/// The version that members run, as the cluster says.
pub(crate) fn version(release: Release<'_>) -> String {
    let cluster = release.object("kvcc", RELEASE);
    cluster["status"]["versions"]["controlPlane"].as_str().unwrap_or_default().to_owned()
}

/// What makes agents and members those of another version.
pub(crate) fn tags(version: &str) -> [String; 2] {
    [format!("--set=images.agent.tag={version}"), format!("--set=images.controlPlane.tag={version}")]
}

/// Waits until both engines find all blocks.
pub(crate) fn wait_for_all_blocks(cluster: &Cluster) {
    wait_until("engines that find all blocks", PODS_WITHIN, || {
        let moment = ENGINES.now(cluster);
        std::thread::sleep(Duration::from_secs(2));
        let since = ENGINES.since(cluster, &moment);
        let is_well = |said: &Option<Said>| {
            said.as_ref().is_some_and(|said| said.own_hits() > 0 && said.own_missed + said.others_missed == 0)
        };
        since.iter().all(is_well).then_some(())
    });
}

/// Cluster and pool are deleted while engines use them: both say so, and nothing is taken from the engines.
fn what_engines_use_stays(cluster: &Cluster, release: Release<'_>) {
    let (agents, moment) = (release.pods(Part::Agents), ENGINES.now(cluster));
    for (kind, name) in [("ssdp", "lab"), ("kvcc", RELEASE)] {
        release.kubectl(&["delete", kind, name, "--wait=false"]);
    }
    for (kind, name) in [("ssdp", "lab"), ("kvcc", RELEASE)] {
        let waits = wait_until(&format!("{kind} {name} to wait for engines"), PODS_WITHIN, || {
            std::thread::sleep(PAUSE);
            let object = release.object(kind, name);
            let conditions = object["status"]["conditions"].as_array()?;
            conditions.iter().find(|condition| condition["type"] == "DeletionBlocked").cloned()
        });
        assert_eq!((&waits["status"], &waits["reason"]), (&json!("True"), &json!("InUse")), "{waits}");
        let words = waits["message"].as_str().unwrap_or_default();
        for node in cluster.nodes() {
            assert!(words.contains(node.name()), "{} has an engine: {words}", node.name());
        }
    }
    std::thread::sleep(Duration::from_secs(3));
    for said in ENGINES.since(cluster, &moment) {
        let said = said.expect("no engine has ended");
        assert_eq!((said.own_missed, said.others_missed, said.sessions), (0, 0, 0), "{said:?}");
        assert!(said.own_hits() > 0, "{said:?}");
    }
    assert_eq!(runs(&release.pods(Part::Agents)), runs(&agents), "no agent is touched");
}

pub(crate) fn removed(cluster: &mut Cluster) {
    let release = running(cluster);
    what_engines_use_stays(cluster, release);
    ENGINES.stop(cluster);
    // What the release has applied goes first, by its hook: cluster, pool, and all that is made of them.
    release.run(&["uninstall", RELEASE, "--namespace", NAMESPACE, "--wait", "--timeout=180s"]);
    let left = || {
        let in_namespace = release.kubectl(&["get", OF_NAMESPACES, "--output=name", "--ignore-not-found"]);
        let elsewhere = cluster.kubectl(&["get", OF_THE_CLUSTER, "--output=name", "--ignore-not-found"]);
        // What every namespace has.
        let every = ["configmap/kube-root-ca.crt", "serviceaccount/default"];
        let in_namespace = in_namespace.lines().filter(|name| !every.contains(name));
        let elsewhere = elsewhere.lines().filter(|name| name.contains("reprise"));
        in_namespace.chain(elsewhere).map(str::to_owned).collect::<Vec<String>>()
    };
    let give_up = std::time::Instant::now() + PODS_WITHIN;
    while !left().is_empty() && std::time::Instant::now() < give_up {
        std::thread::sleep(PAUSE);
    }
    assert_eq!(left(), Vec::<String>::new(), "nothing is left but definitions");
    let nodes = cluster.kubectl(&["get", "nodes", "--output=json"]);
    assert!(!nodes.contains(AGENT_READY), "nor does a node speak of an agent: {nodes}");
    let definitions = cluster.kubectl(&["get", "customresourcedefinitions", "--output=name"]);
    for name in DEFINITIONS {
        assert!(definitions.contains(&format!("/{name}.reprise.dev")), "{name} stays: {definitions}");
    }
    for node in cluster.nodes() {
        let pool = node.root().join("var/lib/reprise-pool/pool");
        assert!(pool.exists(), "blocks stay on {}, as deletionPolicy says", node.name());
    }
}
