//! An upgrade under load: every agent and every member is replaced by another version while engines work on
//! both nodes. It delays requests, but fails none and corrupts no byte, and the blocks on devices are found
//! afterwards. The new agents may not use io_uring: they read blocks with another I/O engine that were
//! written with io_uring.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use reprise_client::Scope;
use reprise_e2e::content::keys;
use reprise_e2e::kubernetes::check_pods::REQUESTS_A_SECOND;
use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN, Pod, RELEASE, import_images};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::process::ChildProcess;
use reprise_e2e::seed::print_line;
use reprise_e2e::{Engine, LoadParams};
use serde_json::json;

use crate::chart::{ENGINES, SETTINGS, WORKERS, condition, running};
use crate::chart_faults::agent_of;
use crate::chart_rollback::{WITHOUT_IO_URING, assert_reported_io_engine, write_profile_without_io_uring};
use crate::chart_uninstall::{OUTAGE_MAX, tags, version, wait_for_all_blocks};

/// The current version, and another one for which the same images get another tag.
const THIS: &str = env!("CARGO_PKG_VERSION");
const NEXT: &str = "0.2.0";

/// Variable with the archives of an older commit's images; see `make e2e-skew`.
pub(crate) const OLDER: &str = "REPRISE_OLDER_IMAGES";

/// Blocks that are saved before on each node, and not again: node `n` has those from `KEPT_FROM + n × KEPT`
/// on.
const KEPT: u64 = 1_000;
const KEPT_FROM: u64 = 200_000;

/// Bound on the time that an engine is without its block. The agents of another version are replaced once more when
/// the Job applies the cluster's spec, and a node whose agent is still starting then waits for two agents.
const TWO_OUTAGES_MAX: Duration = OUTAGE_MAX.saturating_mul(2);

/// Time in which a worker prints at least one complete line.
const AFTERWARDS: Duration = Duration::from_millis(2_500);

/// A node that is polled through a session with its agent.
struct WatchedNode {
    node: usize,
    session: Option<Engine>,
    /// Number of sessions that have ended.
    lost: u32,
}

impl WatchedNode {
    /// Returns whether the node's agent responds and has the first kept block.
    fn serves(&mut self, cluster: &Cluster) -> bool {
        if self.session.is_none() {
            self.session = agent_of(cluster, self.node).ok();
        }
        let Some(engine) = &self.session else { return false };
        let found = engine.client().match_keys(&keys(&kept(self.node)[..1]), Scope::Local);
        match found {
            Ok(found) => found.len() == 1,
            Err(_) => {
                self.session = None;
                self.lost += 1;
                false
            }
        }
    }
}

/// Returns the blocks that a node's device has before the upgrade.
fn kept(node: usize) -> Vec<u64> {
    let first = KEPT_FROM + node as u64 * KEPT;
    (first..first + KEPT).collect()
}

pub(crate) fn under_load(cluster: &mut Cluster) {
    let release = running(cluster);
    tag_images(cluster);
    write_profile_without_io_uring(cluster);
    start_load(cluster);
    let next = tags(NEXT);
    let change = || release.begin_upgrade(&[SETTINGS, &next[0], &next[1], WITHOUT_IO_URING]);
    change_under_load(cluster, release, "another version", change);
    assert_eq!(version(release), THIS, "the reported version is that of the processes, not the image's tag");
    assert_reported_io_engine(release);
    let pool = release.object("ssdp", "lab");
    assert_eq!(
        condition(&pool, "EngineFallback"),
        ("True", "EngineUnavailable"),
        "io_uring is not allowed: {pool:#}"
    );
    WORKERS.stop(cluster);
}

/// Upgrades from an older commit to this one under load, and rolls back. `e2e/skew/build.sh` has built the
/// older commit as the previous minor version.
pub(crate) fn from_an_older_version(cluster: &mut Cluster) {
    let release = Release::of(cluster);
    let cluster: &Cluster = cluster;
    import_images(cluster);
    let archives = older_images();
    let named = archives[0].file_stem().and_then(|name| name.to_str()).expect("archives have names");
    let older = named.rsplit('-').next().expect("the name ends with a version").to_owned();
    archives.iter().for_each(|archive| cluster.import_image(archive));
    let old = tags(&older);
    release.install(&[SETTINGS, &old[0], &old[1]]);
    release.wait_until_ready();
    ENGINES.start(cluster);
    let assert_version = |wanted: &str| {
        let object = release.object("kvcc", RELEASE);
        let versions = &object["status"]["versions"];
        assert_eq!(
            (version(release).as_str(), &versions["agentMin"]),
            (wanted, &json!(wanted)),
            "{versions}"
        );
        assert_eq!(condition(&object, "Compatible").0, "True", "{object:#}");
    };
    assert_version(&older);
    start_load(cluster);
    change_under_load(cluster, release, "from an older version", || release.begin_upgrade(&[SETTINGS]));
    assert_version(THIS);
    change_under_load(cluster, release, "back to the older version", || release.begin_rollback("1"));
    assert_version(&older);
    WORKERS.stop(cluster);
}

/// Returns the archives of agent and member that `e2e/skew/build.sh` has printed.
fn older_images() -> Vec<PathBuf> {
    let printed = std::env::var(OLDER).expect("`make e2e-skew` sets the variable");
    let paths = printed.lines().filter_map(|line| line.split("  ").next()).map(PathBuf::from);
    paths
        .filter(|path| ["agent", "controlplane"].iter().any(|part| path.to_string_lossy().contains(part)))
        .collect()
}

/// Saves the kept blocks on each node, and starts the workers.
fn start_load(cluster: &Cluster) {
    for node in 0..cluster.nodes().len() {
        agent_of(cluster, node).expect("the agent responds").save_durably(&kept(node));
    }
    WORKERS.start(cluster);
}

/// Replaces every agent and member while workers and engines run, and checks their counters.
fn change_under_load(
    cluster: &Cluster,
    release: Release<'_>,
    what: &str,
    begin: impl FnOnce() -> ChildProcess,
) {
    let (workers, engines) = (WORKERS.now(cluster), ENGINES.now(cluster));
    let started = Instant::now();
    replace_all(cluster, release, begin);
    release.wait_until_ready();
    wait_for_all_blocks(cluster);
    let lasted = started.elapsed();
    for (index, served) in WORKERS.since(cluster, &workers).into_iter().enumerate() {
        let served = served.expect("no worker restarted");
        print_line(&format!("{what}: {lasted:.1?} under load: worker {index} {served:?}"));
        assert_eq!((served.wrong_words, served.failed), (0, 0), "{served:?}");
        assert!(served.sessions >= 1, "its agent was replaced: {served:?}");
        assert!(served.saved > 0 && served.hits_from("own ") > 0, "{served:?}");
        let expected = lasted.as_secs() * REQUESTS_A_SECOND;
        assert!(served.requests >= expected / 2, "at least half of {expected} requests: {served:?}");
    }
    for (index, counters) in ENGINES.since(cluster, &engines).into_iter().enumerate() {
        let counters = counters.expect("no engine exited because of a wrong byte");
        print_line(&format!(
            "{what}: engine {index} hit {:?}, and was without its block for at most {} ms",
            counters.hits, counters.longest_outage_ms
        ));
        assert!(Duration::from_millis(counters.longest_outage_ms) <= TWO_OUTAGES_MAX, "{counters:?}");
    }
    nothing_is_lost(cluster);
}

/// Tags the images of agents and members with the other version, on all nodes.
fn tag_images(cluster: &Cluster) {
    for node in cluster.nodes() {
        for image in ["reprise-agent", "reprise-controlplane"] {
            let (from, to) = (format!("localhost/{image}:{THIS}"), format!("localhost/{image}:{NEXT}"));
            let mut tag = node.command("ctr");
            tag.args(["--namespace", "k8s.io", "images", "tag", "--force", &from, &to]);
            let output = tag.output().expect("ctr can be run");
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
}

/// Runs the upgrade, and polls the nodes like an engine and the pods meanwhile: at most one agent and one
/// member may be down at a time.
fn replace_all(cluster: &Cluster, release: Release<'_>, begin: impl FnOnce() -> ChildProcess) {
    let (agents, members) = (release.pods(Component::Agents), release.pods(Component::Members));
    let mut nodes: Vec<WatchedNode> =
        (0..cluster.nodes().len()).map(|node| WatchedNode { node, session: None, lost: 0 }).collect();
    assert!(nodes.iter_mut().all(|node| node.serves(cluster)), "all nodes serve before the upgrade");
    let mut helm = begin();
    let started = Instant::now();
    let mut polls = 0_u32;
    loop {
        let down: Vec<usize> =
            nodes.iter_mut().filter_map(|node| (!node.serves(cluster)).then_some(node.node)).collect();
        assert!(down.len() <= 1, "more than one node is down: {down:?}");
        let now_agents = one_at_a_time(release, Component::Agents, agents.len());
        let now_members = one_at_a_time(release, Component::Members, members.len());
        polls += 1;
        // The cluster's own spec changes last, which may replace the agents once more.
        let is_done = are_new(&now_agents, &agents) && are_new(&now_members, &members);
        if is_done && down.is_empty() && !helm.is_alive() && !progresses(release) {
            break;
        }
        assert!(started.elapsed() < PODS_WITHIN, "pods are not replaced\n{}", release.state());
    }
    let ended = helm.wait(PODS_WITHIN);
    assert!(ended.is_some_and(|status| status.success()), "helm: {ended:?}\n{}", release.state());
    assert!(nodes.iter().all(|node| node.lost > 0), "every agent has ended a session");
    print_line(&format!(
        "agents and members were replaced within {:.1?}, during {polls} polls",
        started.elapsed()
    ));
}

/// Returns whether the operator is still applying the cluster's spec.
fn progresses(release: Release<'_>) -> bool {
    let cluster = release.object("kvcc", RELEASE);
    let is_current = cluster["status"]["observedGeneration"] == cluster["metadata"]["generation"];
    !is_current || condition(&cluster, "Progressing").0 != "False"
}

/// Returns the pods of a component, of which at most one may be down.
fn one_at_a_time(release: Release<'_>, component: Component, before: usize) -> Vec<Pod> {
    let pods = release.pods(component);
    let ready = pods.iter().filter(|pod| pod.is_ready).count();
    assert!(ready + 1 >= before, "more than one pod is down: {pods:?}");
    pods
}

/// Returns whether all pods are ready, and none of them existed before.
fn are_new(now: &[Pod], before: &[Pod]) -> bool {
    let is_new = |pod: &Pod| pod.is_ready && before.iter().all(|old| old.uid != pod.uid);
    now.len() == before.len() && now.iter().all(is_new)
}

/// Checks that the blocks on devices are found where they were, with the right bytes, and that workers miss
/// none of the blocks on their node's device.
fn nothing_is_lost(cluster: &Cluster) {
    let baseline = WORKERS.now(cluster);
    for node in 0..cluster.nodes().len() {
        let engine = agent_of(cluster, node).expect("the agent responds");
        let kept = kept(node);
        assert_eq!(engine.matches(&kept, Scope::Local).len(), kept.len(), "no durable block is lost");
        engine.load_all(&kept, &LoadParams::LOCAL);
    }
    std::thread::sleep(AFTERWARDS);
    for served in WORKERS.since(cluster, &baseline) {
        let served = served.expect("no worker restarted");
        assert_eq!((served.kept_missed, served.failed, served.wrong_words), (0, 0, 0), "{served:?}");
        assert!(served.hits_from("own ") > 0 && served.saved > 0, "{served:?}");
    }
}
