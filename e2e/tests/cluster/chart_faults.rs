//! Faults of an installed release: engines keep the hits on their own node, and everything converges.

use std::time::{Duration, Instant};

use reprise_client::{ClientError, Scope};
use reprise_e2e::content::{keys, layout_of};
use reprise_e2e::kubernetes::check_pods::EngineCounters;
use reprise_e2e::kubernetes::release::{Component, PODS_WITHIN};
use reprise_e2e::kubernetes::{Cluster, Release};
use reprise_e2e::seed::print_line;
use reprise_e2e::{Engine, LoadParams, wait_until};

use crate::chart::{ENGINES, running};
use crate::chart_uninstall::{OUTAGE_MAX, wait_for_all_blocks};
use crate::faults::{a_pod_is_replaced, kill_node, restart_node, without_api_server};
use crate::pods::servers;

/// Number of blocks on a node whose agent is recreated.
const BLOCKS: u64 = 100_000;

/// Blocks of one save.
const BATCH: usize = 2_000;

/// Keys of one match.
const KEYS: usize = 8_000;

/// Returns the counters of both engines during a fault. Neither may restart.
fn counters_during(
    cluster: &mut Cluster,
    what: &str,
    fault: impl FnOnce(&mut Cluster),
) -> [EngineCounters; 2] {
    running(cluster);
    let baseline = ENGINES.now(cluster);
    fault(cluster);
    // Engines print at least one complete line in this time.
    std::thread::sleep(Duration::from_millis(2_500));
    let since = ENGINES.since(cluster, &baseline);
    let counters = since.map(|one| one.unwrap_or_else(|| panic!("an engine restarted while {what}")));
    for (index, engine) in counters.iter().enumerate() {
        print_line(&format!(
            "{what}: engine {index} hit {:?}, missed its own block {} times and the other's {} times",
            engine.hits, engine.own_missed, engine.others_missed
        ));
    }
    counters
}

/// Checks that a fault costs no local hit.
fn no_local_hit_fails(cluster: &mut Cluster, what: &str, fault: impl FnOnce(&mut Cluster)) {
    for counters in counters_during(cluster, what, fault) {
        assert_eq!((counters.own_missed, counters.sessions), (0, 0), "{what}: {counters:?}");
        assert!(counters.own_hits() > 0, "{what}: {counters:?}");
    }
}

/// Returns the index of the engine whose node satisfies a condition.
pub(crate) fn engine_on(release: Release<'_>, is_it: impl Fn(&str) -> bool) -> usize {
    let engines = release.pods_of(ENGINES.namespace, "app=engine");
    engines.iter().position(|pod| is_it(&pod.node)).expect("an engine on each node")
}

/// Opens a session with the agent of a node.
pub(crate) fn agent_of(cluster: &Cluster, node: usize) -> Result<Engine, ClientError> {
    Engine::connect(&cluster.nodes()[node].root().join("run/reprise/agent.sock"), layout_of(1, 1))
}

pub(crate) fn an_agent_is_deleted(cluster: &mut Cluster) {
    let release = running(cluster);
    let affected = release.pods(Component::Agents).remove(0).node;
    let unaffected = engine_on(release, |node| node != affected);
    let counters = counters_during(cluster, "an agent's pod was deleted", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Component::Agents);
        let node =
            cluster.nodes().iter().find(|node| node.name() == before[0].node).expect("a node of the cluster");
        let socket = node.root().join("run/reprise/agent.sock");
        let connect = || Engine::connect(&socket, layout_of(1, 1));
        let engine = connect().expect("the test runs as root, which agents accept");
        let numbers: Vec<u64> = (0..BLOCKS).collect();
        let started = Instant::now();
        numbers.chunks(BATCH).for_each(|batch| engine.save_durably(batch));
        print_line(&format!("{BLOCKS} blocks were durable after {:.1?}", started.elapsed()));

        let started = Instant::now();
        release.kubectl(&["delete", "pod", &before[0].name, "--wait=false"]);
        let ended = wait_until("the old agent to end its sessions", PODS_WITHIN, || {
            engine.client().match_keys(&keys(&[0]), Scope::Local).is_err().then(Instant::now)
        });
        let sample: Vec<u64> = numbers.iter().copied().step_by(97).collect();
        let engine = wait_until("an agent that serves", PODS_WITHIN, || {
            let engine = connect().ok()?;
            let found = engine.client().match_keys(&keys(&sample), Scope::Local).ok()?;
            (found.len() == sample.len()).then_some(engine)
        });
        let (outage, all) = (ended.elapsed(), started.elapsed());
        print_line(&format!(
            "with {BLOCKS} blocks: the node served again {outage:.1?} after the old agent had exited, {all:.1?} after kubectl delete"
        ));
        for part in numbers.chunks(KEYS) {
            assert_eq!(engine.matches(part, Scope::Local).len(), part.len(), "no durable block is lost");
        }
        engine.load_all(&sample, &LoadParams::LOCAL);
        release.wait_until_replaced(Component::Agents, &before[..1], before.len());
        release.wait_until_ready();
        assert!(all <= OUTAGE_MAX, "the node did not serve for {outage:?}, {all:?} since kubectl delete");
    });
    let longest = counters.iter().map(|one| one.longest_outage_ms).max().unwrap_or_default();
    print_line(&format!("the longest time without an engine's own block: {longest} ms"));
    assert!(counters[1 - unaffected].sessions > 0, "the affected engine opens a new session: {counters:?}");
    let other = &counters[unaffected];
    assert_eq!((other.own_missed, other.sessions), (0, 0), "the other node is not affected: {counters:?}");
    assert!(other.own_hits() > 0, "{counters:?}");
}

pub(crate) fn operators_are_killed(cluster: &mut Cluster) {
    no_local_hit_fails(cluster, "both operators were killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Component::Operator);
        release.kill(&before);
        release.kubectl(&["delete", "configmap", "reprise-connection"]);
        release.wait_until_replaced(Component::Operator, &before, before.len());
        wait_until_recreated(release);
        release.wait_until_ready();
    });
}

/// Waits until the operator has recreated the deleted ConfigMap.
fn wait_until_recreated(release: Release<'_>) {
    wait_until("the deleted ConfigMap to be recreated", PODS_WITHIN, || {
        let names = release.kubectl(&["get", "configmaps", "--output=name"]);
        names.contains("reprise-connection").then_some(())
    });
}

/// Returns the members' pods with their restart counts: a member exits if its store was replaced.
fn members(release: Release<'_>) -> String {
    let each = "--output=jsonpath={range .items[*]}{.metadata.uid} {.status.containerStatuses[*].restartCount}{\"\\n\"}{end}";
    release.kubectl(&["get", "pods", "--selector=app.kubernetes.io/component=control-plane", each])
}

pub(crate) fn etcd_is_killed(cluster: &mut Cluster) {
    let before = members(running(cluster));
    no_local_hit_fails(cluster, "etcd was killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Component::Etcd);
        release.kill(&before);
        release.wait_until_replaced(Component::Etcd, &before, before.len());
        release.wait_until_ready();
    });
    assert_eq!(members(Release::of(cluster)), before, "members keep their store");
    // etcd has its data and accepts writes.
    print_line(&Release::of(cluster).test());
}

pub(crate) fn a_member_is_killed(cluster: &mut Cluster) {
    no_local_hit_fails(cluster, "a member of the control plane was killed", |cluster| {
        let release = Release::of(cluster);
        let before = release.pods(Component::Members);
        release.kill(&before[..1]);
        release.wait_until_replaced(Component::Members, &before[..1], before.len());
        release.wait_until_ready();
    });
    Release::of(cluster).test();
}

pub(crate) fn the_api_server_is_down(cluster: &mut Cluster) {
    let servers = servers(cluster);
    no_local_hit_fails(cluster, "the API server was down for 30 s", |cluster| {
        without_api_server(cluster, &servers);
        // Both kinds of controllers reconnect after their own backoff, so the waits run concurrently.
        let cluster: &Cluster = cluster;
        std::thread::scope(|scope| {
            let replaced = scope.spawn(|| a_pod_is_replaced(cluster, &servers));
            assert_operator_and_agents_continue(Release::of(cluster));
            replaced.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        });
        Release::of(cluster).wait_until_ready();
    });
}

/// Checks that agents report again and that the operator acts, since conditions may be stale.
fn assert_operator_and_agents_continue(release: Release<'_>) {
    let (started, before) = (Instant::now(), reports(release));
    release.kubectl(&["delete", "configmap", "reprise-connection"]);
    wait_until_recreated(release);
    let operator = started.elapsed();
    wait_until("all agents to report again", PODS_WITHIN, || {
        let now = reports(release);
        (now.len() == before.len() && now.iter().all(|report| !before.contains(report))).then_some(())
    });
    print_line(&format!(
        "the operator worked again {operator:.1?} later, and all agents had reported after {:.1?}",
        started.elapsed()
    ));
}

/// Returns the time of the last report of each node's agent.
fn reports(release: Release<'_>) -> Vec<String> {
    let each = "--output=jsonpath={range .items[*]}{.metadata.name} {.status.lastUpdated}{\"\\n\"}{end}";
    release.kubectl(&["get", "cachenodes", each]).lines().map(str::to_owned).collect()
}

pub(crate) fn a_node_is_killed(cluster: &mut Cluster) {
    let release = running(cluster);
    // etcd's volume is on its node, so the other node is killed.
    let etcd = release.pods(Component::Etcd).remove(0).node;
    let lost = cluster.nodes().iter().position(|node| node.name() != etcd).expect("a second node");
    let lost_name = cluster.nodes()[lost].name().to_owned();
    let unaffected = engine_on(release, |node| node == etcd);
    // Blocks that are not saved again.
    let kept: Vec<u64> = (BLOCKS..BLOCKS + 1_000).collect();
    agent_of(cluster, lost).expect("the agent responds").save_durably(&kept);
    let baseline = ENGINES.now(cluster);
    let killed = kill_node(cluster, lost);
    std::thread::sleep(Duration::from_secs(5));
    let counters = ENGINES.since(cluster, &baseline)[unaffected].clone().expect("its node is not affected");
    assert_eq!((counters.own_missed, counters.sessions), (0, 0), "{counters:?}");
    assert!(counters.own_hits() > 0, "{counters:?}");
    restart_node(cluster, &killed);
    let started = Instant::now();
    wait_for_all_blocks(cluster);
    print_line(&format!(
        "{lost_name} was killed; both engines had all blocks {:.1?} after it was ready again",
        started.elapsed()
    ));
    let engine = agent_of(cluster, lost).expect("the agent responds again");
    assert_eq!(engine.matches(&kept, Scope::Local).len(), kept.len(), "no durable block is lost");
    engine.load_all(&kept, &LoadParams::LOCAL);
    Release::of(cluster).wait_until_ready();
    let counters =
        ENGINES.since(cluster, &baseline)[unaffected].clone().expect("its node was never affected");
    assert_eq!((counters.own_missed, counters.sessions), (0, 0), "{counters:?}");
    assert!(counters.own_hits() > 0, "{counters:?}");
}
