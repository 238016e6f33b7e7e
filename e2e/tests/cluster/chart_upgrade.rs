//! An upgrade under load: every agent and every member of the control plane is replaced by one of another version while engines work on both
//! nodes. It costs them time, and neither a request nor a byte; what was on devices before is found afterwards. The new agents may not use
//! io_uring: they open by another engine what was written by the first.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use reprise_client::Scope;
use reprise_e2e::content::keys;
use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part, Pod, RELEASE, import_images};
use reprise_e2e::kubernetes::requests::REQUESTS_A_SECOND;
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::process::Running;
use reprise_e2e::seed::say;
use reprise_e2e::{Engine, Loading};
use serde_json::json;

use crate::chart::{ENGINES, SETTINGS, WORKERS, condition, running};
use crate::chart_changed::{WITHOUT_IO_URING, engines_are_told_as_allowed, lay_down_without_io_uring};
use crate::chart_faults::agent_of;
use crate::chart_life::{OUTAGE_MAX, tags, version, wait_for_all_blocks};

/// The version of everything, and another that is as good: the images are the same.
const THIS: &str = env!("CARGO_PKG_VERSION");
const NEXT: &str = "0.2.0";

/// Where the images of an older commit are, if there are some; see `make e2e-skew`.
pub(crate) const OLDER: &str = "REPRISE_OLDER_IMAGES";

/// Blocks that are saved on each node before, and by nobody else: of node `n` those from `KEPT_FROM + n × KEPT` on.
const KEPT: u64 = 1_000;
const KEPT_FROM: u64 = 200_000;

/// A whole line of afterwards.
const AFTERWARDS: Duration = Duration::from_millis(2_500);

/// What serves on a node, seen by a session with it.
struct Watched {
    node: usize,
    session: Option<Engine>,
    /// Sessions that have ended.
    lost: u32,
}

impl Watched {
    /// Whether there is an agent that has the node's first kept block.
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

/// Blocks that are on a node's device before.
fn kept(node: usize) -> Vec<u64> {
    let first = KEPT_FROM + node as u64 * KEPT;
    (first..first + KEPT).collect()
}

pub(crate) fn under_load(cluster: &mut Cluster) {
    let release = running(cluster);
    tag_images(cluster);
    lay_down_without_io_uring(cluster);
    begin_load(cluster);
    let next = tags(NEXT);
    let change = || release.begin_upgrade(&[SETTINGS, &next[0], &next[1], WITHOUT_IO_URING]);
    change_under_load(cluster, release, "another version", change);
    assert_eq!(version(release), THIS, "what runs is what processes say, whatever their image is called");
    engines_are_told_as_allowed(release);
    let pool = release.object("ssdp", "lab");
    assert_eq!(
        condition(&pool, "EngineFallback"),
        ("True", "EngineUnavailable"),
        "io_uring is forbidden: {pool:#}"
    );
    WORKERS.stop(cluster);
}

/// Two commits of this project beside each other, of which one is made to be a minor version older than the other (`e2e/skew/build.sh`): from the older one to this
/// one, and back.
pub(crate) fn from_an_older_one(cluster: &mut Cluster) {
    let release = Release::of(cluster);
    let cluster: &Cluster = cluster;
    import_images(cluster);
    let archives = older_images();
    let named = archives[0].file_stem().and_then(|name| name.to_str()).expect("archives have names");
    let older = named.rsplit('-').next().expect("they end with a version").to_owned();
    archives.iter().for_each(|archive| cluster.import_image(archive));
    let old = tags(&older);
    release.install(&[SETTINGS, &old[0], &old[1]]);
    release.wait_until_ready();
    ENGINES.start(cluster);
    let runs = |wanted: &str| {
        let object = release.object("kvcc", RELEASE);
        let versions = &object["status"]["versions"];
        assert_eq!(
            (version(release).as_str(), &versions["agentMin"]),
            (wanted, &json!(wanted)),
            "{versions}"
        );
        assert_eq!(condition(&object, "Compatible").0, "True", "{object:#}");
    };
    runs(&older);
    begin_load(cluster);
    change_under_load(cluster, release, "from an older one", || release.begin_upgrade(&[SETTINGS]));
    runs(THIS);
    change_under_load(cluster, release, "back to the older one", || release.begin_rollback("1"));
    runs(&older);
    WORKERS.stop(cluster);
}

/// The archives that `e2e/skew/build.sh` has printed.
fn older_images() -> Vec<PathBuf> {
    let said = std::env::var(OLDER).expect("whoever asks for this test says where they are");
    let paths = said.lines().filter_map(|line| line.split("  ").next()).map(PathBuf::from);
    paths
        .filter(|path| ["agent", "controlplane"].iter().any(|part| path.to_string_lossy().contains(part)))
        .collect()
}

/// Blocks that nobody saves again, and workers.
fn begin_load(cluster: &Cluster) {
    for node in 0..cluster.nodes().len() {
        agent_of(cluster, node).expect("it serves").save_durably(&kept(node));
    }
    WORKERS.start(cluster);
}

/// Has every agent and member replaced while workers and engines work, and looks at what it cost them.
fn change_under_load(cluster: &Cluster, release: Release<'_>, what: &str, begin: impl FnOnce() -> Running) {
    let (working, engines) = (WORKERS.now(cluster), ENGINES.now(cluster));
    let began = Instant::now();
    replace_all(cluster, release, begin);
    release.wait_until_ready();
    wait_for_all_blocks(cluster);

    let lasted = began.elapsed();
    for (index, served) in WORKERS.since(cluster, &working).into_iter().enumerate() {
        let served = served.expect("no worker has ended");
        say(&format!("{what}: {lasted:.1?} under load: worker {index} {served:?}"));
        assert_eq!((served.wrong_words, served.failed), (0, 0), "{served:?}");
        assert!(served.sessions >= 1, "its agent was replaced: {served:?}");
        assert!(served.saved > 0 && served.hits_from("own ") > 0, "{served:?}");
        let asked = lasted.as_secs() * REQUESTS_A_SECOND;
        assert!(served.requests >= asked / 2, "half of {asked} at the least, all the time: {served:?}");
    }
    for (index, said) in ENGINES.since(cluster, &engines).into_iter().enumerate() {
        let said = said.expect("no engine has ended: not a byte was wrong");
        say(&format!(
            "{what}: engine {index} hit {:?}, and was without its block for {} ms at the most",
            said.hits, said.longest_outage_ms
        ));
        assert!(Duration::from_millis(said.longest_outage_ms) <= OUTAGE_MAX, "{said:?}");
    }
    nothing_is_lost(cluster);
}

/// Gives the images of agents and members the other version's name, on all nodes.
fn tag_images(cluster: &Cluster) {
    for node in cluster.nodes() {
        for image in ["reprise-agent", "reprise-controlplane"] {
            let (from, to) = (format!("localhost/{image}:{THIS}"), format!("localhost/{image}:{NEXT}"));
            let mut tag = node.command("ctr");
            tag.args(["--namespace", "k8s.io", "images", "tag", "--force", &from, &to]);
            let said = tag.output().expect("ctr comes with containerd");
            assert!(said.status.success(), "{}", String::from_utf8_lossy(&said.stderr));
        }
    }
}

/// Upgrades, and looks all the time at the nodes, as an engine does, and at pods: never is more than one agent away, nor more than one member.
fn replace_all(cluster: &Cluster, release: Release<'_>, begin: impl FnOnce() -> Running) {
    let (agents, members) = (release.pods(Part::Agents), release.pods(Part::Members));
    let mut nodes: Vec<Watched> =
        (0..cluster.nodes().len()).map(|node| Watched { node, session: None, lost: 0 }).collect();
    assert!(nodes.iter_mut().all(|node| node.serves(cluster)), "all is well before");
    let mut helm = begin();
    let started = Instant::now();
    let mut looks = 0_u32;
    loop {
        let away: Vec<usize> =
            nodes.iter_mut().filter_map(|node| (!node.serves(cluster)).then_some(node.node)).collect();
        assert!(away.len() <= 1, "one node at a time, and none of {away:?} serves");
        let now_agents = one_at_a_time(release, Part::Agents, agents.len());
        let now_members = one_at_a_time(release, Part::Members, members.len());
        looks += 1;
        // What the cluster itself is to be comes last, and may replace agents once more.
        let is_done = are_new(&now_agents, &agents) && are_new(&now_members, &members);
        if is_done && away.is_empty() && !helm.is_alive() && !progresses(release) {
            break;
        }
        assert!(started.elapsed() < PODS_WITHIN, "not all is replaced\n{}", release.state());
    }
    let ended = helm.wait(PODS_WITHIN);
    assert!(ended.is_some_and(|status| status.success()), "helm: {ended:?}\n{}", release.state());
    assert!(nodes.iter().all(|node| node.lost > 0), "all agents have ended their sessions");
    say(&format!("agents and members were replaced within {:.1?}, seen by {looks} looks", started.elapsed()));
}

/// Whether the cluster is still made what it is to be.
fn progresses(release: Release<'_>) -> bool {
    let cluster = release.object("kvcc", RELEASE);
    let is_current = cluster["status"]["observedGeneration"] == cluster["metadata"]["generation"];
    !is_current || condition(&cluster, "Progressing").0 != "False"
}

/// Pods of a part, of which one may be away.
fn one_at_a_time(release: Release<'_>, part: Part, before: usize) -> Vec<Pod> {
    let pods = release.pods(part);
    let ready = pods.iter().filter(|pod| pod.is_ready).count();
    assert!(ready + 1 >= before, "one pod at a time: {pods:?}");
    pods
}

/// Whether pods serve, as many as before and none of those.
fn are_new(now: &[Pod], before: &[Pod]) -> bool {
    let is_new = |pod: &Pod| pod.is_ready && before.iter().all(|old| old.uid != pod.uid);
    now.len() == before.len() && now.iter().all(is_new)
}

/// All blocks that were on devices before are found where they were, every byte right, and workers miss nothing of their own.
fn nothing_is_lost(cluster: &Cluster) {
    let settled = WORKERS.now(cluster);
    for node in 0..cluster.nodes().len() {
        let engine = agent_of(cluster, node).expect("it serves");
        let kept = kept(node);
        assert_eq!(engine.matches(&kept, Scope::Local).len(), kept.len(), "no durable block is lost");
        engine.load_all(&kept, &Loading::LOCAL);
    }
    std::thread::sleep(AFTERWARDS);
    for served in WORKERS.since(cluster, &settled) {
        let served = served.expect("no worker has ended");
        assert_eq!((served.kept_missed, served.failed, served.wrong_words), (0, 0, 0), "{served:?}");
        assert!(served.hits_from("own ") > 0 && served.saved > 0, "{served:?}");
    }
}
