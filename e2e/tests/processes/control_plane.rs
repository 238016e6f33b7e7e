//! Agents without their control plane: local hits go on, misses stay quick, and whoever comes back learns everything
//! again from the agents.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, Engine, Loading, Outcome, PATIENCE, World, wait_until};

/// A restarted directory knows all blocks again: backoff of the agents, registration, inventory.
const REBUILT_WITHIN: Duration = Duration::from_secs(5);

/// What a look-up may take that nobody answers, and what a busy machine adds.
const MISS_WITHIN: Duration = Duration::from_millis(500 + 1500);

fn agent(world: &World, node: &str, plane: &str) -> Agent {
    world.agent(&AgentConfig { control_plane: vec![plane.to_owned()], ..AgentConfig::named(node) })
}

/// What agents say when the control plane goes and comes back.
fn allow_absence(world: &World) {
    world.allow("the control plane is gone");
    world.allow("cannot register with the control plane");
    world.allow("registration lost");
}

fn wait_for_sources(engine: &Engine, numbers: &[u64], sources: &[Source], within: Duration) {
    wait_until("the directory knows all blocks", within, || {
        let found = engine.matches(numbers, Scope::Cluster);
        (found.len() == numbers.len() && found.iter().all(|source| sources.contains(source))).then_some(())
    });
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn rebuilt_after_a_kill(store: Store) {
    let world = World::new();
    allow_absence(&world);
    let mut plane = world.control_plane(store);
    let first = agent(&world, "first", plane.address());
    let second = agent(&world, "second", plane.address());
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    saver.save_durably(&numbers(0..100));
    wait_for_sources(&reader, &numbers(0..100), &[Source::PeerDram], PATIENCE);
    saver.trim();
    saver.save_durably(&numbers(100..150));

    plane.kill();
    // Local hits go on, from DRAM and disk, and so do saves.
    assert_eq!(saver.load_all(&numbers(100..150), &Loading::CLUSTER), vec![Source::OwnDram; 50]);
    assert_eq!(saver.load_all(&numbers(0..50), &Loading::CLUSTER), vec![Source::OwnNvme; 50]);
    saver.save_durably(&numbers(150..200));
    // A block that is not here is a miss, and soon.
    let (outcomes, took) = reader.timed_load(&numbers(0..10), &Loading::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    assert!(took < MISS_WITHIN, "a miss without a control plane took {took:?}");
    let asked = Instant::now();
    assert!(reader.matches(&numbers(0..10), Scope::Cluster).is_empty());
    assert!(asked.elapsed() < MISS_WITHIN, "a match without a control plane took {:?}", asked.elapsed());

    plane.restart();
    let all = numbers(0..200);
    wait_for_sources(&reader, &all, &[Source::PeerDram, Source::PeerNvme], REBUILT_WITHIN);
    let sources = reader.load_all(&all, &Loading::CLUSTER);
    assert!(
        sources.iter().all(|source| matches!(source, Source::PeerDram | Source::PeerNvme)),
        "{sources:?}"
    );
    let directory = plane.admin().json("/directory");
    assert!(directory["keys"].as_u64().is_some_and(|keys| keys >= 200), "{directory}");
}

#[test]
fn a_killed_control_plane_costs_peer_hits_only_and_is_rebuilt_from_the_agents() {
    rebuilt_after_a_kill(Store::Embedded);
}

#[test]
fn a_control_plane_that_has_forgotten_everything_is_rebuilt_from_the_agents() {
    rebuilt_after_a_kill(Store::Memory);
}

#[test]
fn an_agent_starts_without_its_control_plane_and_joins_when_it_is_there() {
    let world = World::new();
    allow_absence(&world);
    let mut plane = world.control_plane(Store::Embedded);
    let address = plane.address().to_owned();
    plane.kill();
    let mut first = agent(&world, "first", &address);
    let saver = first.engine(small());
    saver.save_durably(&numbers(0..20));
    drop(saver);
    first.kill();
    first.start();
    first.engine(small()).load_all(&numbers(0..20), &Loading::CLUSTER);
    let second = agent(&world, "second", &address);
    let reader = second.engine(small());
    assert!(reader.matches(&numbers(0..20), Scope::Cluster).is_empty());
    plane.restart();
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerDram, Source::PeerNvme], REBUILT_WITHIN);
    reader.load_all(&numbers(0..20), &Loading::CLUSTER);
}

#[test]
fn a_node_that_comes_back_under_its_name_keeps_its_number_and_its_blocks() {
    let world = World::new();
    allow_absence(&world);
    world.allow("node is silent");
    world.allow("peer connection lost");
    // Its ports are others after a restart.
    world.allow("address");
    let plane = world.control_plane(Store::Embedded);
    let mut first = agent(&world, "first", plane.address());
    let second = agent(&world, "second", plane.address());
    let reader = second.engine(small());
    let number = |plane: &ControlPlane| {
        let nodes = plane.admin().json("/nodes");
        let found = nodes.as_array().expect("a list").iter().find(|node| node["name"] == "first").cloned();
        found.map(|node| (node["node"].as_u64(), node["epoch"].as_u64()))
    };
    first.engine(small()).save_durably(&numbers(0..20));
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerDram], PATIENCE);
    let (before, epoch) = number(&plane).expect("registered");
    // At once, before anybody has found out that it was dead.
    first.kill();
    first.start();
    wait_for_sources(&reader, &numbers(0..20), &[Source::PeerNvme], PATIENCE);
    reader.load_all(&numbers(0..20), &Loading::CLUSTER);
    let (after, later) = number(&plane).expect("registered");
    assert_eq!(before, after);
    assert!(later > epoch, "{later:?} does not fence {epoch:?}");
}

#[test]
fn blocks_that_are_evicted_or_lost_leave_the_directory() {
    let world = World::new();
    let plane = world.control_plane(Store::Embedded);
    let pool = reprise_policy::ByteSize(8 << 20);
    let first = world.agent(&AgentConfig {
        control_plane: vec![plane.address().to_owned()],
        pool: Some(pool),
        ..AgentConfig::named("first")
    });
    // The first node to register is node 1.
    wait_until("the first agent is known", PATIENCE, || plane.offers("first")?.then_some(()));
    let second = agent(&world, "second", plane.address());
    let saver = first.engine(small());
    for some in numbers(0..1000).chunks(100) {
        saver.save_durably(some);
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
    // What the directory offers can be had.
    let reader = second.engine(small());
    let offered: Vec<u64> = numbers(0..1000)
        .into_iter()
        .filter(|number| !reader.matches(&[*number], Scope::Cluster).is_empty())
        .collect();
    assert!(!offered.is_empty());
    for some in offered.chunks(100) {
        reader.load_all(some, &Loading::CLUSTER);
    }
}
