//! What may happen to a release: whatever is killed or away, engines keep what their node has, and everything converges.

use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope};
use reprise_e2e::content::{keys, layout_of};
use reprise_e2e::kubernetes::engines::Said;
use reprise_e2e::kubernetes::release::{PODS_WITHIN, Part};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::say;
use reprise_e2e::{Engine, Loading, wait_until};

use crate::chart::{ENGINES, running};
use crate::chart_life::{OUTAGE_MAX, wait_for_all_blocks};
use crate::faults::{a_pod_is_replaced, kill_node, restart_node, without_api_server};
use crate::pods::servers;

/// Blocks on a node whose agent is started again.
const BLOCKS: u64 = 100_000;

/// Blocks that are saved at once.
const BATCH: usize = 2_000;

/// Keys of one question.
const KEYS: usize = 8_000;

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

/// What both engines have said while something was done. None of their processes may have ended.
fn said_during(cluster: &mut Cluster, what: &str, fault: impl FnOnce(&mut Cluster)) -> [Said; 2] {
    running(cluster);
    let moment = ENGINES.now(cluster);
    fault(cluster);
    // A whole line of afterwards.
    std::thread::sleep(Duration::from_millis(2_500));
    let since = ENGINES.since(cluster, &moment);
    let said = since.map(|said| said.unwrap_or_else(|| panic!("an engine ended while {what}")));
    for (index, said) in said.iter().enumerate() {
        say(&format!(
            "{what}: engine {index} hit {:?}, missed {} of its own and {} of others'",
            said.hits, said.own_missed, said.others_missed
        ));
    }
    said
}

/// The same, for what must not cost a single local hit.
fn no_local_hit_fails(cluster: &mut Cluster, what: &str, fault: impl FnOnce(&mut Cluster)) {
    for said in said_during(cluster, what, fault) {
        assert_eq!((said.own_missed, said.sessions), (0, 0), "{what}: {said:?}");
        assert!(said.own_hits() > 0, "{what}: {said:?}");
    }
}

/// Which engine is on the node of which this is so.
pub(crate) fn engine_on(release: Release<'_>, is_it: impl Fn(&str) -> bool) -> usize {
    let engines = release.pods_of(ENGINES.namespace, "app=engine");
    engines.iter().position(|pod| is_it(&pod.node)).expect("one on each node")
}

/// A session with the agent of a node.
pub(crate) fn agent_of(cluster: &Cluster, node: usize) -> Result<Engine, ClientError> {
    Engine::connect(&cluster.nodes()[node].root().join("run/reprise/agent.sock"), layout_of(1, 1))
}

pub(crate) fn an_agent_comes_back(cluster: &mut Cluster) {
    let release = running(cluster);
    let lost = release.pods(Part::Agents).remove(0).node;
    let stays = engine_on(release, |node| node != lost);
    let said = said_during(cluster, "an agent's pod was deleted", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Part::Agents);
        let node = cluster.nodes().iter().find(|node| node.name() == before[0].node).expect("one of them");
        let socket = node.root().join("run/reprise/agent.sock");
        let connect = || Engine::connect(&socket, layout_of(1, 1));
        let engine = connect().expect("the test is root, whom agents let connect");
        let numbers: Vec<u64> = (0..BLOCKS).collect();
        let started = Instant::now();
        numbers.chunks(BATCH).for_each(|batch| engine.save_durably(batch));
        say(&format!("{BLOCKS} blocks were durable after {:.1?}", started.elapsed()));

        let started = Instant::now();
        release.kubectl(&["delete", "pod", &before[0].name, "--wait=false"]);
        let gone = wait_until("the old agent to end its sessions", PODS_WITHIN, || {
            engine.client().match_keys(&keys(&[0]), Scope::Local).is_err().then(Instant::now)
        });
        let sample: Vec<u64> = numbers.iter().copied().step_by(97).collect();
        let engine = wait_until("an agent that serves", PODS_WITHIN, || {
            let engine = connect().ok()?;
            let found = engine.client().match_keys(&keys(&sample), Scope::Local).ok()?;
            (found.len() == sample.len()).then_some(engine)
        });
        let (outage, all) = (gone.elapsed(), started.elapsed());
        say(&format!(
            "with {BLOCKS} blocks: the node served again {outage:.1?} after the old agent had left, {all:.1?} after kubectl delete"
        ));
        for part in numbers.chunks(KEYS) {
            assert_eq!(engine.matches(part, Scope::Local).len(), part.len(), "no durable block is lost");
        }
        engine.load_all(&sample, &Loading::LOCAL);
        release.replaced(Part::Agents, &before[..1], before.len());
        release.wait_until_ready();
        assert!(all <= OUTAGE_MAX, "the node did not serve for {outage:?}, {all:?} since kubectl delete");
    });
    let longest = said.iter().map(|said| said.longest_outage_ms).max().unwrap_or_default();
    say(&format!("the longest time in which an engine had not its own block: {longest} ms"));
    assert!(said[1 - stays].sessions > 0, "it had to open a new session: {said:?}");
    let well = &said[stays];
    assert_eq!((well.own_missed, well.sessions), (0, 0), "the other node is well: {said:?}");
    assert!(well.own_hits() > 0, "{said:?}");
}

pub(crate) fn operators_are_killed(cluster: &mut Cluster) {
    no_local_hit_fails(cluster, "both operators were killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Part::Operator);
        release.kill(&before);
        release.kubectl(&["delete", "configmap", "reprise-connection"]);
        release.replaced(Part::Operator, &before, before.len());
        wait_until_made_anew(release);
        release.wait_until_ready();
    });
}

/// Waits until the operator has made again what was deleted.
fn wait_until_made_anew(release: Release<'_>) {
    wait_until("what was deleted to be made anew", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let names = release.kubectl(&["get", "configmaps", "--output=name"]);
        names.contains("reprise-connection").then_some(())
    });
}

/// Members' pods, and how often each was restarted: a member that finds another store than it had ends.
fn members(release: Release<'_>) -> String {
    let each = "--output=jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].restartCount}{\"\\n\"}{end}";
    release.kubectl(&["get", "pods", "--selector=app.kubernetes.io/component=control-plane", each])
}

pub(crate) fn etcd_is_killed(cluster: &mut Cluster) {
    let before = members(running(cluster));
    no_local_hit_fails(cluster, "etcd was killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Part::Etcd);
        release.kill(&before);
        release.replaced(Part::Etcd, &before, before.len());
        release.wait_until_ready();
    });
    assert_eq!(members(Release::of(cluster)), before, "it is the store that members had");
    // It has its data, and takes more.
    say(&Release::of(cluster).test());
}

pub(crate) fn a_member_is_killed(cluster: &mut Cluster) {
    no_local_hit_fails(cluster, "a member of the control plane was killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Part::Members);
        release.kill(&before[..1]);
        release.replaced(Part::Members, &before[..1], before.len());
        release.wait_until_ready();
    });
    Release::of(cluster).test();
}

pub(crate) fn the_api_server_is_away(cluster: &mut Cluster) {
    let servers = servers(cluster);
    no_local_hit_fails(cluster, "the API server was away for 30 s", |cluster| {
        without_api_server(cluster, &servers);
        // Kubernetes' own controllers and ours find the server again in a time of their own, so they are waited for together.
        let cluster: &Cluster = cluster;
        std::thread::scope(|scope| {
            let replaced = scope.spawn(|| a_pod_is_replaced(cluster, &servers));
            ours_go_on(Release::of(cluster));
            replaced.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        Release::of(cluster).wait_until_ready();
    });
}

/// What conditions say may be from before: agents report anew, and the operator sees and does something.
fn ours_go_on(release: Release<'_>) {
    let (started, before) = (Instant::now(), reports(release));
    release.kubectl(&["delete", "configmap", "reprise-connection"]);
    wait_until_made_anew(release);
    let operator = started.elapsed();
    wait_until("all agents to report again", PODS_WITHIN, || {
        std::thread::sleep(PAUSE);
        let now = reports(release);
        (now.len() == before.len() && now.iter().all(|report| !before.contains(report))).then_some(())
    });
    say(&format!(
        "the operator worked again {operator:.1?} later, and all agents had reported after {:.1?}",
        started.elapsed()
    ));
}

/// When the agent of each node has reported last.
fn reports(release: Release<'_>) -> Vec<String> {
    let each = "--output=jsonpath={range .items[*]}{.metadata.name} {.status.lastUpdated}{\"\\n\"}{end}";
    release.kubectl(&["get", "cachenodes", each]).lines().map(str::to_owned).collect()
}

pub(crate) fn a_node_is_killed(cluster: &mut Cluster) {
    let release = running(cluster);
    // Etcd's volume is on its node; here it is the other one that goes.
    let etcd = release.pods(Part::Etcd).remove(0).node;
    let lost = cluster.nodes().iter().position(|node| node.name() != etcd).expect("there are two");
    let lost_name = cluster.nodes()[lost].name().to_owned();
    let stays = engine_on(release, |node| node == etcd);
    // Nobody saves these again.
    let kept: Vec<u64> = (BLOCKS..BLOCKS + 1_000).collect();
    agent_of(cluster, lost).expect("it serves").save_durably(&kept);
    let moment = ENGINES.now(cluster);
    let killed = kill_node(cluster, lost);
    std::thread::sleep(Duration::from_secs(5));
    let said = ENGINES.since(cluster, &moment)[stays].clone().expect("its node is well");
    assert_eq!((said.own_missed, said.sessions), (0, 0), "{said:?}");
    assert!(said.own_hits() > 0, "{said:?}");
    restart_node(cluster, &killed);
    let started = Instant::now();
    wait_for_all_blocks(cluster);
    say(&format!(
        "{lost_name} was killed; both engines had all blocks {:.1?} after it was ready again",
        started.elapsed()
    ));
    let engine = agent_of(cluster, lost).expect("it serves again");
    assert_eq!(engine.matches(&kept, Scope::Local).len(), kept.len(), "no durable block is lost");
    engine.load_all(&kept, &Loading::LOCAL);
    Release::of(cluster).wait_until_ready();
    let said = ENGINES.since(cluster, &moment)[stays].clone().expect("its node was well all the time");
    assert_eq!((said.own_missed, said.sessions), (0, 0), "{said:?}");
    assert!(said.own_hits() > 0, "{said:?}");
}
