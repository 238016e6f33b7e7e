//! Agents without their control plane: local hits continue, misses stay fast, and a control plane that
//! returns gets its whole state from the agents.

use std::time::Duration;

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{
    Agent, AgentConfig, ControlPlane, Engine, LoadParams, Outcome, PATIENCE, TestEnv, fast_call, wait_until,
};

/// Bound on a lookup without a response, and the delays of a busy machine.
const MISS_WITHIN: Duration = Duration::from_millis(500 + 1500);

fn agent(env: &TestEnv, node: &str, plane: &str) -> Agent {
    env.agent(&AgentConfig { control_plane: vec![plane.to_owned()], ..AgentConfig::named(node) })
}

/// Allows the agents' log lines about the loss and the return of the control plane.
fn allow_absence(env: &TestEnv) {
    env.allow("the control plane is unreachable");
    env.allow("cannot register with the control plane");
}

fn wait_for_sources(engine: &Engine, numbers: &[u64], sources: &[Source], within: Duration) {
    wait_until("the directory has all blocks", within, || {
        let found = engine.matches(numbers, Scope::Cluster);
        (found.len() == numbers.len() && found.iter().all(|source| sources.contains(source))).then_some(())
    });
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn assert_rebuilt_after_a_kill(store: Store) {
    let env = TestEnv::new();
    allow_absence(&env);
    let mut plane = env.control_plane(store);
    let first = agent(&env, "first", plane.address());
    let second = agent(&env, "second", plane.address());
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    saver.save_durably(&numbers(0..100));
    wait_for_sources(&reader, &numbers(0..100), &[Source::PeerDram], PATIENCE);
    saver.trim();
    saver.save_durably(&numbers(100..150));

    plane.kill();
    // Local hits continue from DRAM and NVMe, and saves as well.
    assert_eq!(saver.load_all(&numbers(100..150), &LoadParams::CLUSTER), vec![Source::OwnDram; 50]);
    assert_eq!(saver.load_all(&numbers(0..50), &LoadParams::CLUSTER), vec![Source::OwnNvme; 50]);
    saver.save_durably(&numbers(150..200));
    // Blocks of other nodes are misses, without delay.
    fast_call("a miss without a control plane", MISS_WITHIN, || {
        let outcomes = reader.load(&numbers(0..10), &LoadParams::CLUSTER).expect("a load");
        assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    });
    fast_call("a match without a control plane", MISS_WITHIN, || {
        assert!(reader.matches(&numbers(0..10), Scope::Cluster).is_empty());
    });

    plane.restart();
    let all = numbers(0..200);
    wait_for_sources(&reader, &all, &[Source::PeerDram, Source::PeerNvme], PATIENCE);
    let sources = reader.load_all(&all, &LoadParams::CLUSTER);
    assert!(
        sources.iter().all(|source| matches!(source, Source::PeerDram | Source::PeerNvme)),
        "{sources:?}"
    );
    let directory = plane.admin().json("/directory");
    assert!(directory["keys"].as_u64().is_some_and(|keys| keys >= 200), "{directory}");
}

#[test]
fn a_killed_control_plane_costs_only_peer_hits_and_is_rebuilt_from_the_agents() {
    assert_rebuilt_after_a_kill(Store::Embedded);
}

#[test]
fn a_control_plane_without_a_store_is_rebuilt_from_the_agents() {
    assert_rebuilt_after_a_kill(Store::Memory);
}

#[test]
fn an_agent_starts_without_its_control_plane_and_registers_later() {
    let env = TestEnv::new();
    allow_absence(&env);
    let mut plane = env.control_plane(Store::Embedded);
    let address = plane.address().to_owned();
    plane.kill();
    let mut first = agent(&env, "first", &address);
    let saver = first.engine(small());
    saver.save_durably(&numbers(0..20));
    drop(saver);
    first.kill();
    first.start();
    first.engine(small()).load_all(&numbers(0..20), &LoadParams::CLUSTER);
    let second = agent(&env, "second", &address);
    let reader = second.engine(small());
    assert!(reader.matches(&numbers(0..20), Scope::Cluster).is_empty());
    plane.restart();
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerDram, Source::PeerNvme], PATIENCE);
    reader.load_all(&numbers(0..20), &LoadParams::CLUSTER);
}

#[test]
fn a_node_that_returns_with_the_same_name_keeps_its_number_and_blocks() {
    let env = TestEnv::new();
    allow_absence(&env);
    env.allow("node is silent");
    env.allow("peer connection lost");
    // A restarted agent has other ports.
    env.allow("address");
    let plane = env.control_plane(Store::Embedded);
    let mut first = agent(&env, "first", plane.address());
    let second = agent(&env, "second", plane.address());
    let reader = second.engine(small());
    let number = |plane: &ControlPlane| {
        let nodes = plane.admin().json("/nodes");
        let found = nodes.as_array().expect("a list").iter().find(|node| node["name"] == "first").cloned();
        found.map(|node| (node["node"].as_u64(), node["epoch"].as_u64()))
    };
    first.engine(small()).save_durably(&numbers(0..20));
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerDram], PATIENCE);
    let (before, epoch) = number(&plane).expect("registered");
    // Restarted before its silence is noticed.
    first.kill();
    first.start();
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerNvme], PATIENCE);
    reader.load_all(&numbers(0..20), &LoadParams::CLUSTER);
    let (after, later) = number(&plane).expect("registered");
    assert_eq!(before, after);
    assert!(later > epoch, "epoch {later:?} does not fence {epoch:?}");
}

#[test]
fn evicted_and_lost_blocks_are_removed_from_the_directory() {
    let env = TestEnv::new();
    let plane = env.control_plane(Store::Embedded);
    let pool = reprise_policy::ByteSize(8 << 20);
    let first = env.agent(&AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        pool: Some(pool),
        ..AgentConfig::named("first")
    });
    // The first node to register is node 1.
    wait_until("the first agent is known", PATIENCE, || plane.offers("first")?.then_some(()));
    let second = agent(&env, "second", plane.address());
    let saver = first.engine(small());
    for batch in numbers(0..1000).chunks(100) {
        saver.save_durably(batch);
    }
    first.admin().wait_quiet(PATIENCE);
    let counters = first.admin().counters();
    let nodes = wait_until("the directory has caught up", PATIENCE, || {
        let directory = plane.admin().json("/directory");
        let node = directory["nodes"].as_array()?.iter().find(|node| node["node"] == 1)?.clone();
        let same = node["dram"].as_u64() == Some(counters.get("dram_blocks"))
            && node["nvme"].as_u64() == Some(counters.get("nvme_blocks"));
        same.then_some(node)
    });
    assert!(nodes["nvme"].as_u64().is_some_and(|blocks| blocks < 200), "{nodes}");
    // Every block that the directory offers can be loaded.
    let reader = second.engine(small());
    let offered: Vec<u64> = numbers(0..1000)
        .into_iter()
        .filter(|number| !reader.matches(&[*number], Scope::Cluster).is_empty())
        .collect();
    assert!(!offered.is_empty());
    for batch in offered.chunks(100) {
        reader.load_all(batch, &LoadParams::CLUSTER);
    }
}
