//! Nodes under several members over a real etcd: one that pauses for long, and one that is killed.
//!
//! What only it has is not offered within two seconds, hits of others go on, and when it is back the directory is what the nodes
//! have, key by key.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
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

/// Nobody is sent to the silent node, and a node has its own blocks all the while.
fn assert_others_go_on(reader: &Engine, own: &[u64], of_the_silent: &[u64]) {
    assert!(reader.matches(of_the_silent, Scope::Cluster).is_empty());
    assert_eq!(reader.load_all(own, &Loading::CLUSTER), vec![Source::OwnDram; own.len()]);
}

#[test]
fn a_node_that_pauses_for_ten_seconds_is_fenced_announces_everything_anew_and_serves_again() {
    let (cluster, saver, reader) = Cluster::holding(100);
    let (own, all) = (numbers(1000..1010), [numbers(0..100), numbers(1000..1010)].concat());
    reader.save_durably(&own);
    cluster.assert_complete(3, [&saver, &reader], &all);
    let (before, node) = (epochs(&cluster, "first"), &cluster.agents[0]);
    let [registrations, inventories] =
        ["registrations", "inventories_wanted"].map(|name| counter(node, name));

    node.freeze();
    let frozen = Instant::now();
    cluster.wait_until_not_offered("first");
    println!("nobody offers the node {:?} after it has stopped", frozen.elapsed());
    // Each member forgets what the node has announced: the directory has what the other one does.
    let forgotten = PAUSE.saturating_sub(frozen.elapsed());
    wait_until("all members to forget the node", forgotten, || {
        assert_others_go_on(&reader, &own, &numbers(0..100));
        let replicas: u64 = cluster.parts().iter().map(|part| part.replicas).sum();
        (replicas == 2 * own.len() as u64).then_some(())
    });
    println!("forgotten after {:?}", frozen.elapsed());
    wait_until("the pause to be over", PATIENCE, || {
        assert_others_go_on(&reader, &own, &numbers(0..100));
        (frozen.elapsed() >= PAUSE).then_some(())
    });
    node.thaw();

    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    let after = epochs(&cluster, "first");
    assert!(after.iter().zip(&before).all(|(after, before)| after > before), "{after:?} fence {before:?}");
    assert!(counter(node, "registrations") >= registrations + 3, "with each member");
    assert!(counter(node, "inventories_wanted") > inventories, "and announced all it has");
    cluster.assert_complete(3, [&saver, &reader], &all);
    load_from_peer(&reader, &numbers(0..100));
    assert_eq!(
        saver.load_all(&numbers(0..100), &Loading::LOCAL).len(),
        100,
        "its own engine's session goes on"
    );
}

#[test]
fn a_node_that_is_killed_is_not_offered_and_comes_back_with_its_durable_blocks() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    let own = numbers(1000..1010);
    reader.save_durably(&own);
    cluster.wait_until_whole(3);
    let before = epochs(&cluster, "first");
    drop(saver);
    cluster.agents[0].kill();
    let killed = Instant::now();
    cluster.wait_until_not_offered("first");
    println!("nobody offers the node {:?} after it was killed", killed.elapsed());
    assert_others_go_on(&reader, &own, &numbers(0..100));
    let (outcomes, took) = reader.timed_load(&numbers(0..10), &Loading::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    assert!(took < MISS_WITHIN, "a miss took {took:?}");

    cluster.agents[0].start();
    let (saver, _) = cluster.engines();
    assert_eq!(saver.matches(&numbers(0..100), Scope::Local), vec![Source::OwnNvme; 100]);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    let after = epochs(&cluster, "first");
    assert!(after.iter().zip(&before).all(|(after, before)| after > before), "{after:?} fence {before:?}");
    cluster.assert_complete(3, [&saver, &reader], &[numbers(0..100), own].concat());
    load_from_peer(&reader, &numbers(0..100));
}
