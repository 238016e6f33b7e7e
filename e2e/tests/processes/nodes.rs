//! Nodes under several members over a real etcd: one that pauses for long, and one that is killed.
//!
//! What only it has is not offered within two seconds, hits of others go on, and when it is back the directory is what the nodes
//! have, key by key.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::seed::say;
use reprise_e2e::{Agent, Cluster, Engine, Loading, Outcome, PATIENCE, wait_until};

/// Longer than a member waits until a silent node must register anew (`membership.forget_after`), with what a member's clock may be late.
const PAUSE: Duration = Duration::from_secs(10);

/// A load of what cannot be had: the look-up's time, and what a busy machine adds.
const MISS_WITHIN: Duration = Duration::from_secs(2);

/// The epoch of a node's registration with each member.
fn epochs(cluster: &Cluster, node: &str) -> Vec<u64> {
    let of = |page: &serde_json::Value| {
        let nodes = page.as_array().expect("a list of nodes");
        let found = nodes.iter().find(|found| found["name"] == node).expect("it is registered");
        found["epoch"].as_u64().expect("a number")
    };
    cluster.members.iter().map(|member| of(&member.admin().json("/nodes"))).collect()
}

/// A counter of an agent's link to the control plane.
fn counter(agent: &Agent, name: &str) -> u64 {
    let (_, text) = agent.admin().get("/metrics").expect("the metrics are served");
    let name = format!("reprise_agent_directory_{name}_total ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.unwrap_or_else(|| panic!("no {name}")).parse().expect("a number")
}

/// A cluster in which the node in this place has the first hundred blocks alone, and the other one ten of its own; the engines of both.
struct Subject {
    cluster: Cluster,
    /// In the order of the nodes.
    engines: [Engine; 2],
    silent: usize,
}

/// The nodes' names.
const NODES: [&str; 2] = ["first", "second"];

impl Subject {
    fn new(silent: usize) -> Subject {
        let cluster = Cluster::start();
        let engines = <[Engine; 2]>::from(cluster.engines());
        let subject = Subject { cluster, engines, silent };
        subject.silent().save_durably(&alone());
        wait_for_sources(subject.other(), &alone(), PATIENCE);
        subject.other().save_durably(&of_the_other());
        subject.assert_complete();
        subject
    }

    /// The engine on the node that becomes silent.
    fn silent(&self) -> &Engine {
        &self.engines[self.silent]
    }

    fn other(&self) -> &Engine {
        &self.engines[1 - self.silent]
    }

    fn name(&self) -> &'static str {
        NODES[self.silent]
    }

    fn agent(&self) -> &Agent {
        &self.cluster.agents[self.silent]
    }

    /// Nobody is sent to the silent node, and the other one has its own blocks all the while.
    fn assert_others_go_on(&self) {
        assert!(self.other().matches(&alone(), Scope::Cluster).is_empty());
        let sources = self.other().load_all(&of_the_other(), &Loading::CLUSTER);
        assert_eq!(sources, vec![Source::OwnDram; of_the_other().len()]);
    }

    /// The directory is what the nodes have, and each loads what the other one has.
    fn assert_complete(&self) {
        let [first, second] = &self.engines;
        self.cluster.assert_complete(3, [first, second], &[alone(), of_the_other()].concat());
    }

    fn assert_fenced(&self, before: &[u64]) {
        let after = epochs(&self.cluster, self.name());
        assert!(after.iter().zip(before).all(|(after, before)| after > before), "{after:?} fence {before:?}");
    }
}

/// What only the silent node has.
fn alone() -> Vec<u64> {
    numbers(0..100)
}

fn of_the_other() -> Vec<u64> {
    numbers(1000..1010)
}

/// The node with this place pauses while it loads from the other one.
fn assert_pause_costs_time_alone(silent: usize) {
    let subject = Subject::new(silent);
    let (before, node) = (epochs(&subject.cluster, subject.name()), subject.agent());
    let [registrations, inventories] =
        ["registrations", "inventories_wanted"].map(|name| counter(node, name));

    // Its own question to the others is under way, or its answer: it ends when it goes on.
    let asking = subject.silent().clone();
    let loading = std::thread::spawn(move || asking.timed_load(&of_the_other(), &Loading::CLUSTER));
    node.freeze();
    let frozen = Instant::now();
    subject.cluster.wait_until_not_offered(subject.name());
    say(&format!("nobody offers the node {:?} after it has stopped", frozen.elapsed()));
    // Each member forgets what the node has announced: the directory has what the other one does.
    let forgotten = PAUSE.saturating_sub(frozen.elapsed());
    wait_until("all members to forget the node", forgotten, || {
        subject.assert_others_go_on();
        let replicas: u64 = subject.cluster.parts().iter().map(|part| part.replicas).sum();
        (replicas == 2 * of_the_other().len() as u64).then_some(())
    });
    say(&format!("forgotten after {:?}", frozen.elapsed()));
    wait_until("the pause to be over", PATIENCE, || {
        subject.assert_others_go_on();
        (frozen.elapsed() >= PAUSE).then_some(())
    });
    node.thaw();

    let (outcomes, took) = loading.join().expect("a load ends");
    say(&format!("a load under way: {took:?}"));
    let missed = |outcome: &Outcome| matches!(outcome, Outcome::Missing(_));
    assert!(outcomes.iter().all(|outcome| outcome.is_right() || missed(outcome)), "{outcomes:?}");
    subject.cluster.wait_until_whole(3);
    wait_for_sources(subject.other(), &alone(), PATIENCE);
    subject.assert_fenced(&before);
    assert!(counter(node, "registrations") >= registrations + 3, "with each member");
    assert!(counter(node, "inventories_wanted") > inventories, "and announced all it has");
    subject.assert_complete();
    load_from_peer(subject.other(), &alone());
    load_from_peer(subject.silent(), &of_the_other());
    let own = subject.silent().load_all(&alone(), &Loading::LOCAL);
    assert_eq!(own.len(), alone().len(), "its own engine's session goes on");
}

#[test]
fn a_node_that_pauses_for_ten_seconds_is_fenced_announces_everything_anew_and_serves_again() {
    assert_pause_costs_time_alone(0);
}

#[test]
fn the_other_node_that_pauses_is_fenced_as_well_and_serves_again() {
    assert_pause_costs_time_alone(1);
}

#[test]
fn whichever_node_is_killed_is_not_offered_and_comes_back_with_its_durable_blocks() {
    for silent in [0, 1] {
        let mut subject = Subject::new(silent);
        let before = epochs(&subject.cluster, subject.name());
        subject.cluster.agents[silent].kill();
        let killed = Instant::now();
        subject.cluster.wait_until_not_offered(subject.name());
        println!("nobody offers the node {:?} after it was killed", killed.elapsed());
        subject.assert_others_go_on();
        let (outcomes, took) = subject.other().timed_load(&numbers(0..10), &Loading::CLUSTER);
        assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
        assert!(took < MISS_WITHIN, "a miss took {took:?}");

        subject.cluster.agents[silent].start();
        subject.engines[silent] = subject.agent().engine(small());
        assert_eq!(subject.silent().matches(&alone(), Scope::Local), vec![Source::OwnNvme; alone().len()]);
        wait_for_sources(subject.other(), &alone(), PATIENCE);
        subject.assert_fenced(&before);
        subject.assert_complete();
        load_from_peer(subject.other(), &alone());
    }
}

#[test]
fn both_nodes_killed_at_once_come_back_with_all_durable_blocks() {
    let mut subject = Subject::new(0);
    subject.cluster.agents.iter_mut().for_each(Agent::kill);
    NODES.iter().for_each(|node| subject.cluster.wait_until_not_offered(node));
    subject.cluster.agents.iter_mut().for_each(Agent::start);
    subject.engines = <[Engine; 2]>::from(subject.cluster.engines());
    wait_for_sources(subject.other(), &alone(), PATIENCE);
    wait_for_sources(subject.silent(), &of_the_other(), PATIENCE);
    subject.assert_complete();
    load_from_peer(subject.other(), &alone());
    load_from_peer(subject.silent(), &of_the_other());
}
