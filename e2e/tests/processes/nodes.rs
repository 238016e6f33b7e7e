//! Nodes under several members over a real etcd: a node that pauses for long, and a node that is killed.
//!
//! Members stop offering the node's blocks, and hits of other blocks continue. When the
//! node is back, the directory matches the nodes key by key.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::seed::print_line;
use reprise_e2e::{Agent, Cluster, Engine, LoadParams, Outcome, PATIENCE, fast_call, wait_until};

/// Longer than the silence after which a node must register again (`membership.forget_after`), plus a timer's
/// delay.
const PAUSE: Duration = Duration::from_secs(10);

/// Bound on a load of unavailable blocks, which is a lookup.
const MISS_WITHIN: Duration = Duration::from_secs(2);

/// Returns the epoch of a node's registration with each member.
fn epochs(cluster: &Cluster, node: &str) -> Vec<u64> {
    let of = |page: &serde_json::Value| {
        let nodes = page.as_array().expect("a list of nodes");
        let found = nodes.iter().find(|found| found["name"] == node).expect("the node is registered");
        found["epoch"].as_u64().expect("a number")
    };
    cluster.members.iter().map(|member| of(&member.admin().json("/nodes"))).collect()
}

/// Returns a counter of an agent's connection to the control plane.
fn counter(agent: &Agent, name: &str) -> u64 {
    let (_, text) = agent.admin().get("/metrics").expect("the metrics are served");
    let name = format!("reprise_agent_directory_{name}_total ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name}")).parse().expect("a number")
}

/// A cluster in which only the node under test has the first hundred blocks, and only the other node has ten
/// others.
struct Fixture {
    cluster: Cluster,
    /// Engines in the order of the nodes.
    engines: [Engine; 2],
    tested: usize,
}

/// Names of the nodes, in order.
const NODES: [&str; 2] = ["first", "second"];

impl Fixture {
    fn new(tested: usize) -> Fixture {
        let cluster = Cluster::start();
        let engines = <[Engine; 2]>::from(cluster.engines());
        let fixture = Fixture { cluster, engines, tested };
        fixture.engine().save_durably(&own_blocks());
        wait_for_sources(fixture.other(), &own_blocks(), PATIENCE);
        fixture.other().save_durably(&others_blocks());
        fixture.assert_complete();
        fixture
    }

    /// Returns the engine on the node under test.
    fn engine(&self) -> &Engine {
        &self.engines[self.tested]
    }

    fn other(&self) -> &Engine {
        &self.engines[1 - self.tested]
    }

    fn name(&self) -> &'static str {
        NODES[self.tested]
    }

    fn agent(&self) -> &Agent {
        &self.cluster.agents[self.tested]
    }

    /// Checks that the node's blocks are not offered, and that the other node has its own.
    fn assert_other_node_continues(&self) {
        assert!(self.other().matches(&own_blocks(), Scope::Cluster).is_empty());
        let sources = self.other().load_all(&others_blocks(), &LoadParams::CLUSTER);
        assert_eq!(sources, vec![Source::OwnDram; others_blocks().len()]);
    }

    /// Checks that the directory matches the blocks of both nodes.
    fn assert_complete(&self) {
        let [first, second] = &self.engines;
        self.cluster.assert_complete(3, [first, second], &[own_blocks(), others_blocks()].concat());
    }

    fn assert_fenced(&self, before: &[u64]) {
        let after = epochs(&self.cluster, self.name());
        assert!(
            after.iter().zip(before).all(|(after, before)| after > before),
            "epochs {after:?} do not fence {before:?}"
        );
    }
}

/// Returns the blocks that only the node under test has.
fn own_blocks() -> Vec<u64> {
    numbers(0..100)
}

fn others_blocks() -> Vec<u64> {
    numbers(1000..1010)
}

/// Checks the effects of a pause of a node that is loading from the other one.
fn assert_pause_only_costs_time(tested: usize) {
    let fixture = Fixture::new(tested);
    let (before, node) = (epochs(&fixture.cluster, fixture.name()), fixture.agent());
    let [registrations, inventories] =
        ["registrations", "inventories_wanted"].map(|name| counter(node, name));

    // The load's request or its response is in flight during the pause. The load must end afterwards.
    let loader = fixture.engine().clone();
    let loading = std::thread::spawn(move || loader.timed_load(&others_blocks(), &LoadParams::CLUSTER));
    node.freeze();
    let frozen = Instant::now();
    fixture.cluster.wait_until_not_offered(fixture.name());
    print_line(&format!("no member offers the node {:?} after it was paused", frozen.elapsed()));
    // Each member forgets the node's replicas: the directory has only those of the other node.
    wait_until("all members to forget the node", PATIENCE, || {
        fixture.assert_other_node_continues();
        let replicas: u64 = fixture.cluster.parts().iter().map(|part| part.replicas).sum();
        (replicas == 2 * others_blocks().len() as u64).then_some(())
    });
    print_line(&format!("replicas forgotten after {:?}", frozen.elapsed()));
    wait_until("the pause to be over", PATIENCE, || {
        fixture.assert_other_node_continues();
        (frozen.elapsed() >= PAUSE).then_some(())
    });
    node.thaw();

    let (outcomes, took) = loading.join().expect("a load ends");
    print_line(&format!("the load in flight took: {took:?}"));
    let is_missing = |outcome: &Outcome| matches!(outcome, Outcome::Missing(_));
    assert!(outcomes.iter().all(|outcome| outcome.is_verified() || is_missing(outcome)), "{outcomes:?}");
    fixture.cluster.wait_until_complete(3);
    wait_for_sources(fixture.other(), &own_blocks(), PATIENCE);
    fixture.assert_fenced(&before);
    assert!(counter(node, "registrations") >= registrations + 3, "the node registers with each member");
    assert!(counter(node, "inventories_wanted") > inventories, "the node sends its inventory");
    fixture.assert_complete();
    load_from_peer(fixture.other(), &own_blocks());
    load_from_peer(fixture.engine(), &others_blocks());
    let own = fixture.engine().load_all(&own_blocks(), &LoadParams::LOCAL);
    assert_eq!(own.len(), own_blocks().len(), "the session of its engine continues");
}

#[test]
fn a_node_that_pauses_for_ten_seconds_is_fenced_and_sends_its_inventory_again() {
    assert_pause_only_costs_time(0);
}

#[test]
fn the_second_node_is_fenced_after_a_pause_and_serves_again() {
    assert_pause_only_costs_time(1);
}

#[test]
fn a_killed_node_is_not_offered_and_returns_with_its_durable_blocks() {
    for tested in [0, 1] {
        let mut fixture = Fixture::new(tested);
        let before = epochs(&fixture.cluster, fixture.name());
        fixture.cluster.agents[tested].kill();
        let killed = Instant::now();
        fixture.cluster.wait_until_not_offered(fixture.name());
        println!("no member offers the node {:?} after it was killed", killed.elapsed());
        fixture.assert_other_node_continues();
        fast_call("a miss", MISS_WITHIN, || {
            let outcomes = fixture.other().load(&numbers(0..10), &LoadParams::CLUSTER).expect("a load");
            assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
        });

        fixture.cluster.agents[tested].start();
        fixture.engines[tested] = fixture.agent().engine(small());
        assert_eq!(
            fixture.engine().matches(&own_blocks(), Scope::Local),
            vec![Source::OwnNvme; own_blocks().len()]
        );
        wait_for_sources(fixture.other(), &own_blocks(), PATIENCE);
        fixture.assert_fenced(&before);
        fixture.assert_complete();
        load_from_peer(fixture.other(), &own_blocks());
    }
}

#[test]
fn both_nodes_killed_at_once_return_with_all_durable_blocks() {
    let mut fixture = Fixture::new(0);
    fixture.cluster.agents.iter_mut().for_each(Agent::kill);
    NODES.iter().for_each(|node| fixture.cluster.wait_until_not_offered(node));
    fixture.cluster.agents.iter_mut().for_each(Agent::start);
    fixture.engines = <[Engine; 2]>::from(fixture.cluster.engines());
    wait_for_sources(fixture.other(), &own_blocks(), PATIENCE);
    wait_for_sources(fixture.engine(), &others_blocks(), PATIENCE);
    fixture.assert_complete();
    load_from_peer(fixture.other(), &own_blocks());
    load_from_peer(fixture.engine(), &others_blocks());
}
