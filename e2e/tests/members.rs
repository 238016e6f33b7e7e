//! Several members of the control plane over a real etcd: what the loss of any of them costs, and of etcd itself.
//!
//! Whatever happens, every byte that is loaded is compared, and in the end every block can be found again.

use std::time::{Duration, Instant};

use reprise_client::{BlockStatus, Scope, Source};
use reprise_e2e::content::small;
use reprise_e2e::{
    Agent, AgentConfig, ControlPlane, Engine, Etcd, Loading, Outcome, PATIENCE, Relay, World, wait_until,
};

/// A lease of a member lives so long without it: what etcd grants at the least.
const LEASE: Duration = Duration::from_secs(2);

/// Bound on what is a matter of three seconds: another of these tests may have both processors just then.
const FAILOVER_WITHIN: Duration = Duration::from_secs(10);

/// A node that is silent is not offered after 1.5 s; what a busy machine adds.
const NOT_OFFERED_WITHIN: Duration = Duration::from_secs(4);

const SLOTS: u64 = 4096;

/// Three members, two nodes, and engines on both.
struct Cluster {
    world: World,
    etcd: Etcd,
    members: Vec<ControlPlane>,
    agents: Vec<Agent>,
}

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

impl Cluster {
    fn start() -> Cluster {
        let world = World::new();
        allow_absence(&world);
        let etcd = world.etcd();
        let endpoint = etcd.endpoint();
        let members = ["a", "b", "c"].map(|name| world.member(name, &endpoint)).into();
        let mut cluster = Cluster { world, etcd, members, agents: Vec::new() };
        cluster.wait_for_members(3);
        for node in ["first", "second"] {
            let agent = cluster.agent(node);
            cluster.agents.push(agent);
        }
        cluster.wait_until_whole(3);
        cluster
    }

    /// One whose first node holds the blocks below `count`, known to the second: the engine of each.
    fn holding(count: u64) -> (Cluster, Engine, Engine) {
        let cluster = Cluster::start();
        let (saver, reader) = cluster.engines();
        saver.save_durably(&numbers(0..count));
        wait_for_sources(&reader, &numbers(0..count), PATIENCE);
        (cluster, saver, reader)
    }

    fn agent(&self, node: &str) -> Agent {
        let control_plane = self.members.iter().map(|member| member.address().to_owned()).collect();
        self.world.agent(&AgentConfig { control_plane, ..AgentConfig::named(node) })
    }

    fn engines(&self) -> (Engine, Engine) {
        (self.agents[0].engine(small()), self.agents[1].engine(small()))
    }

    /// Waits until so many members share all slots.
    fn wait_for_members(&self, count: usize) {
        wait_until("members share the slots", PATIENCE, || {
            let parts = self.parts();
            (parts.len() == count && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS).then_some(())
        });
    }

    /// Waits until so many members have all inventories, and replicas are as the nodes' counters say.
    fn wait_until_whole(&self, count: usize) {
        wait_until("every block is in the directory, once", PATIENCE, || {
            let parts = self.parts();
            let here = |agent: &Agent| {
                let counters = agent.admin().counters();
                counters.get("dram_blocks") + counters.get("nvme_blocks")
            };
            let expected: u64 = self.agents.iter().map(here).sum();
            let whole = parts.len() == count
                && parts.iter().all(|part| part.partial == 0)
                && parts.iter().map(|part| part.owned).sum::<u64>() == SLOTS
                && parts.iter().map(|part| part.replicas).sum::<u64>() == expected;
            whole.then_some(())
        });
    }

    /// Of the members that answer and own anything.
    fn parts(&self) -> Vec<Part> {
        let part = |member: &ControlPlane| {
            let (code, body) = member.admin().get("/directory").ok()?;
            assert_eq!(code, 200, "{body}");
            let body: serde_json::Value = serde_json::from_str(&body).expect("JSON");
            let number = |field: &str| body[field].as_u64().expect("a number");
            let [owned, partial, replicas] = ["slots_owned", "slots_partial", "replicas"].map(number);
            (owned > 0).then_some(Part { owned, partial, replicas })
        };
        self.members.iter().filter(|member| member.is_running()).filter_map(part).collect()
    }
}

/// A member's part of the directory.
#[derive(Debug)]
struct Part {
    owned: u64,
    partial: u64,
    replicas: u64,
}

/// What is said when members, etcd or nodes go and come back.
fn allow_absence(world: &World) {
    for words in [
        "cannot register with the control plane",
        "the control plane is gone",
        "the members of the control plane cannot be followed",
        "this member cannot be registered now",
        "the registration of this member is lost",
        "the registration could not be given back",
        "another member is registered under this name",
        "a node cannot be registered now",
        "node is silent",
        "peer connection lost",
    ] {
        world.allow(words);
    }
}

fn wait_for_sources(engine: &Engine, numbers: &[u64], within: Duration) {
    wait_until("the directory knows all blocks", within, || {
        let found = engine.matches(numbers, Scope::Cluster);
        (found.len() == numbers.len()).then_some(())
    });
}

fn load_from_peer(engine: &Engine, numbers: &[u64]) {
    let sources = engine.load_all(numbers, &Loading::CLUSTER);
    assert_eq!(sources.len(), numbers.len());
}

#[test]
fn a_member_that_is_killed_costs_its_part_for_seconds_and_comes_back_for_it() {
    let (mut cluster, saver, reader) = Cluster::holding(200);

    cluster.members[0].kill();
    let killed = Instant::now();
    // What is known to the others is found all the while, and nothing hangs.
    let (outcomes, took) = reader.timed_load(&numbers(0..20), &Loading::CLUSTER);
    assert!(took < LEASE, "a load beside a dead member took {took:?}");
    assert!(outcomes.iter().any(|outcome| outcome.is_right()), "two thirds are known to others");
    wait_for_sources(&reader, &numbers(0..200), FAILOVER_WITHIN);
    println!("all is found again {:?} after the kill", killed.elapsed());
    load_from_peer(&reader, &numbers(0..100));
    cluster.wait_until_whole(2);

    saver.save_durably(&numbers(200..300));
    cluster.members[0].restart();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..300), PATIENCE);
    load_from_peer(&reader, &numbers(100..300));
}

#[test]
fn a_member_that_pauses_is_fenced_and_serves_again_with_what_happened_meanwhile() {
    let (cluster, saver, reader) = Cluster::holding(100);
    cluster.members[1].pause();
    wait_for_sources(&reader, &numbers(0..100), FAILOVER_WITHIN);
    saver.save_durably(&numbers(100..200));
    wait_for_sources(&reader, &numbers(0..200), FAILOVER_WITHIN);
    cluster.members[1].resume();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    load_from_peer(&reader, &numbers(0..200));
}

#[test]
fn all_members_killed_at_once_know_everything_again_from_the_agents() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.members.iter_mut().for_each(ControlPlane::kill);
    // Local hits go on; what is elsewhere is a miss, and soon.
    assert_eq!(saver.load_all(&numbers(0..100), &Loading::CLUSTER), vec![Source::OwnDram; 100]);
    let (outcomes, took) = reader.timed_load(&numbers(0..10), &Loading::CLUSTER);
    assert_eq!(outcomes, vec![Outcome::Missing(BlockStatus::Miss); 10]);
    assert!(took < LEASE, "a miss without a control plane took {took:?}");
    cluster.members.iter_mut().for_each(ControlPlane::restart);
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

#[test]
fn an_agent_that_is_silent_is_not_offered_and_serves_again_when_it_goes_on() {
    let (cluster, _saver, reader) = Cluster::holding(50);
    cluster.agents[0].freeze();
    wait_until("nobody offers the silent node", NOT_OFFERED_WITHIN, || {
        cluster.members.iter().all(|member| member.offers("first") == Some(false)).then_some(())
    });
    assert!(reader.matches(&numbers(0..50), Scope::Cluster).is_empty());
    cluster.agents[0].thaw();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    load_from_peer(&reader, &numbers(0..50));
}

#[test]
fn without_etcd_hits_go_on_and_when_it_is_back_so_does_everything_else() {
    let (mut cluster, saver, reader) = Cluster::holding(100);
    cluster.etcd.kill();
    load_from_peer(&reader, &numbers(0..50));
    // The members' leases run out: from then on none of them is sure of anything.
    wait_until("nobody is sure of its slots", PATIENCE, || {
        reader.matches(&numbers(50..100), Scope::Cluster).is_empty().then_some(())
    });
    assert_eq!(reader.load_all(&numbers(0..50), &Loading::CLUSTER), vec![Source::OwnDram; 50]);
    saver.save_durably(&numbers(100..150));
    cluster.etcd.restart();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
    load_from_peer(&reader, &numbers(0..150));
}

#[test]
fn an_etcd_that_pauses_is_waited_for() {
    let (cluster, saver, reader) = Cluster::holding(50);
    cluster.etcd.pause();
    wait_until("nobody is sure of its slots", PATIENCE, || {
        reader.matches(&numbers(0..50), Scope::Cluster).is_empty().then_some(())
    });
    saver.save_durably(&numbers(50..100));
    assert_eq!(saver.load_all(&numbers(0..100), &Loading::CLUSTER), vec![Source::OwnDram; 100]);
    cluster.etcd.resume();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
}

#[test]
fn members_whose_etcd_was_emptied_end_and_their_next_processes_begin_anew() {
    let (mut cluster, _saver, reader) = Cluster::holding(100);
    cluster.world.require("the store was emptied or replaced");
    cluster.etcd.kill();
    cluster.etcd.wipe();
    cluster.etcd.restart();
    for member in &mut cluster.members {
        member.wait_for_end();
        member.restart();
    }
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    load_from_peer(&reader, &numbers(0..100));
    // Numbers are given out anew, each to one node.
    let nodes = cluster.members[0].admin().json("/nodes");
    let mut given: Vec<u64> = nodes
        .as_array()
        .expect("a list")
        .iter()
        .map(|node| node["node"].as_u64().expect("a number"))
        .collect();
    given.sort_unstable();
    assert_eq!(given, [1, 2]);
}

#[test]
fn a_member_that_cannot_reach_etcd_answers_for_nothing_and_the_others_take_over() {
    let world = World::new();
    allow_absence(&world);
    let etcd = world.etcd();
    let endpoint = etcd.endpoint();
    let relay = Relay::to(&etcd.address());
    let behind = format!("http://{}", relay.address());
    let members =
        vec![world.member("a", &endpoint), world.member("b", &endpoint), world.member("c", &behind)];
    let mut cluster = Cluster { world, etcd, members, agents: Vec::new() };
    cluster.wait_for_members(3);
    for node in ["first", "second"] {
        let agent = cluster.agent(node);
        cluster.agents.push(agent);
    }
    cluster.wait_until_whole(3);
    let (saver, reader) = cluster.engines();
    saver.save_durably(&numbers(0..100));
    wait_for_sources(&reader, &numbers(0..100), PATIENCE);
    relay.cut();
    // Its own lease runs out on its own clock; the others have its slots as soon as etcd has seen that too.
    wait_until("the others have all slots", FAILOVER_WITHIN, || {
        let owned: Vec<u64> = cluster.parts().iter().map(|part| part.owned).collect();
        (owned.len() >= 2 && owned[..2].iter().sum::<u64>() == SLOTS).then_some(())
    });
    wait_for_sources(&reader, &numbers(0..100), FAILOVER_WITHIN);
    load_from_peer(&reader, &numbers(0..100));
    saver.save_durably(&numbers(100..150));
    relay.mend();
    cluster.wait_until_whole(3);
    wait_for_sources(&reader, &numbers(0..150), PATIENCE);
}
