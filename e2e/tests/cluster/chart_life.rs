//! The life of a release: it is changed, taken back, and removed.

use std::time::Duration;

use reprise_e2e::kubernetes::engines::Said;
use reprise_e2e::kubernetes::release::{NAMESPACE, PODS_WITHIN, Part, Pod, RELEASE};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::wait_until;

use crate::chart::{ENGINES, SETTINGS, condition, running};

/// For how long a node is without an agent while another takes its place, at the most: half of it is the goal.
const OUTAGE_MAX: Duration = Duration::from_secs(10);

/// What is changed, and what agents are told.
const CHANGE: &str = "--set=cluster.cache.limits.loadDeadline=7s";
const CHANGED: &str = "load_deadline = \"7s\"";

/// The version of everything, another that is as good, and one that is too far from it. The images are the same.
const THIS: &str = env!("CARGO_PKG_VERSION");
const NEXT: &str = "0.2.0";
const FAR: &str = "0.4.0";

/// Definitions, which are all that stays.
const DEFINITIONS: [&str; 6] =
    ["cachenodes", "cachetenants", "gpuqueueallocations", "kvcacheclusters", "slackprofiles", "ssdpools"];

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(500);

/// Kinds in which nothing of ours may be left.
const OF_NAMESPACES: &str = "all,configmaps,secrets,serviceaccounts,persistentvolumeclaims,leases,roles,rolebindings,\
                             poddisruptionbudgets,networkpolicies,controllerrevisions,kvcacheclusters,slackprofiles,\
                             gpuqueueallocations";
const OF_THE_CLUSTER: &str = "clusterroles,clusterrolebindings,validatingadmissionpolicies,\
                              validatingadmissionpolicybindings,mutatingadmissionpolicies,\
                              mutatingadmissionpolicybindings,cachenodes,ssdpools,cachetenants";

pub(crate) fn changed_and_taken_back(cluster: &mut Cluster) {
    let release = running(cluster);
    let before = release.pods(Part::Agents);
    let moment = ENGINES.now(cluster);
    release.upgrade(&[SETTINGS, CHANGE]);
    let after = release.replaced(Part::Agents, &before, before.len());
    release.wait_until_ready();
    assert!(configuration(release).contains(CHANGED), "agents are told: {}", configuration(release));
    let first = revision(release);
    release.run(&[
        "rollback",
        RELEASE,
        &(first - 1).to_string(),
        "--namespace",
        NAMESPACE,
        "--wait",
        "--timeout=180s",
    ]);
    release.replaced(Part::Agents, &after, after.len());
    release.wait_until_ready();
    assert!(!configuration(release).contains(CHANGED), "and told otherwise: {}", configuration(release));
    wait_for_all_blocks(cluster);
    for (index, said) in ENGINES.since(cluster, &moment).into_iter().enumerate() {
        let said = said.expect("no engine has ended");
        say(&format!(
            "upgrade and rollback: engine {index} hit {:?}, opened {} sessions, and was without its block for {} ms at the most",
            said.hits, said.sessions, said.longest_outage_ms
        ));
        assert!(said.sessions >= 2, "its agent was replaced twice: {said:?}");
        assert!(Duration::from_millis(said.longest_outage_ms) <= OUTAGE_MAX, "{said:?}");
    }
}

pub(crate) fn another_version(cluster: &mut Cluster) {
    let release = running(cluster);
    for node in cluster.nodes() {
        for image in ["reprise-agent", "reprise-controlplane"] {
            let (from, to) = (format!("localhost/{image}:{THIS}"), format!("localhost/{image}:{NEXT}"));
            let mut tag = node.command("ctr");
            tag.args(["--namespace", "k8s.io", "images", "tag", "--force", &from, &to]);
            let said = tag.output().expect("ctr comes with containerd");
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        }
    }
    let (agents, members) = (release.pods(Part::Agents), release.pods(Part::Members));
    let moment = ENGINES.now(cluster);
    let tags = |agent: &str, members: &str| {
        [format!("--set=images.agent.tag={agent}"), format!("--set=images.controlPlane.tag={members}")]
    };
    let next = tags(NEXT, NEXT);
    release.upgrade(&[SETTINGS, &next[0], &next[1]]);
    let is_new = |pod: &Pod, before: &[Pod]| before.iter().all(|old| old.uid != pod.uid);
    wait_until("all pods to run the other version", PODS_WITHIN, || {
        let (now_agents, now_members) = (release.pods(Part::Agents), release.pods(Part::Members));
        let serving = now_agents.iter().filter(|pod| pod.is_ready).count();
        assert!(serving + 1 >= agents.len(), "one node at a time: {now_agents:?}");
        let is_done = |now: &[Pod], before: &[Pod]| {
            now.len() == before.len() && now.iter().all(|pod| pod.is_ready && is_new(pod, before))
        };
        (is_done(&now_agents, &agents) && is_done(&now_members, &members)).then_some(())
    });
    release.wait_until_ready();
    wait_until("the cluster to say which version it runs", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        (release.object("kvcc", RELEASE)["status"]["versions"]["controlPlane"] == NEXT).then_some(())
    });
    wait_for_all_blocks(cluster);
    for (index, said) in ENGINES.since(cluster, &moment).into_iter().enumerate() {
        let said = said.expect("no engine has ended: not a byte was wrong");
        say(&format!(
            "another version: engine {index} hit {:?}, and was without its block for {} ms at the most",
            said.hits, said.longest_outage_ms
        ));
        assert!(Duration::from_millis(said.longest_outage_ms) <= OUTAGE_MAX, "{said:?}");
    }

    // Two minor versions further: nothing is touched, and it says what to go through.
    let (agents, members) = (release.pods(Part::Agents), release.pods(Part::Members));
    let far = tags(FAR, FAR);
    release.upgrade(&[SETTINGS, &far[0], &far[1]]);
    let refused = wait_until("the cluster to refuse it", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "False").then_some(cluster)
    });
    assert_eq!(condition(&refused, "Accepted").1, "VersionSkew");
    assert_eq!(
        (release.pods(Part::Agents), release.pods(Part::Members)),
        (agents.clone(), members.clone()),
        "no pod is touched"
    );
    assert_eq!(
        refused["status"]["versions"]["controlPlane"], NEXT,
        "it says what runs, not what was asked for"
    );
    let this = tags(THIS, THIS);
    release.upgrade(&[SETTINGS, &this[0], &this[1]]);
    wait_until("the cluster to accept it again", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let cluster = release.object("kvcc", RELEASE);
        (condition(&cluster, "Accepted").0 == "True").then_some(())
    });
    release.replaced(Part::Agents, &agents, agents.len());
    release.replaced(Part::Members, &members, members.len());
    release.wait_until_ready();
    wait_for_all_blocks(cluster);
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

/// What agents read.
fn configuration(release: Release<'_>) -> String {
    release.object("configmap", "reprise-agent")["data"]["agent.toml"].as_str().unwrap_or_default().to_owned()
}

fn revision(release: Release<'_>) -> u32 {
    let said = release.run(&["status", RELEASE, "--namespace", NAMESPACE, "--output=json"]);
    let status: serde_json::Value = serde_json::from_str(&said).expect("Helm says JSON");
    status["version"]
        .as_u64()
        .and_then(|version| u32::try_from(version).ok())
        .expect("a release has a revision")
}

pub(crate) fn removed(cluster: &mut Cluster) {
    let release = running(cluster);
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
    let definitions = cluster.kubectl(&["get", "customresourcedefinitions", "--output=name"]);
    for name in DEFINITIONS {
        assert!(definitions.contains(&format!("/{name}.reprise.dev")), "{name} stays: {definitions}");
    }
    for node in cluster.nodes() {
        let pool = node.root().join("var/lib/reprise-pool/pool");
        assert!(pool.exists(), "blocks stay on {}, as deletionPolicy says", node.name());
    }
}
