//! Where replicas go: hot blocks get a second one, a draining node gives away what only it has, full nodes give to empty ones.
//!
//! Every byte that is loaded is compared, also from nodes that were given their blocks.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use reprise_client::{Scope, Source};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::{device_slot_bytes, key, small};
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, Loading, PATIENCE, World, wait_until};
use reprise_policy::ByteSize;
use serde_json::Value;

/// Time for blocks to move: reports, questions and offers are about a second apart.
const MOVED_WITHIN: Duration = Duration::from_secs(60);

/// Of an arena enough are left when a tenant without engines on a node takes one.
const REGION: ByteSize = ByteSize(2 << 20);

struct Nodes {
    world: World,
    member: ControlPlane,
    agents: Vec<Agent>,
}

impl Nodes {
    fn start(names: &[&str], pools: &[ByteSize]) -> Nodes {
        let world = World::new();
        let member = world.control_plane(Store::Memory);
        let start = |(name, pool): (&&str, &ByteSize)| {
            let control_plane = vec![member.address().to_owned()];
            world.agent(&AgentConfig {
                control_plane,
                pool: Some(*pool),
                region: REGION,
                ..AgentConfig::named(name)
            })
        };
        let agents = names.iter().zip(pools).map(start).collect();
        Nodes { world, member, agents }
    }

    /// Runs a command about a node.
    fn reprise(&self, arguments: &[&str]) -> Output {
        reprise(&self.member, arguments)
    }

    fn run(&self, arguments: &[&str]) -> String {
        run(&self.member, arguments)
    }

    /// Blocks on the devices of a node.
    fn durable(&self, node: usize) -> u64 {
        self.agents[node].admin().counter("nvme_blocks")
    }
}

/// Runs a command.
fn reprise(member: &ControlPlane, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).args(["--controlplane", member.address()]);
    command.output().expect("reprise can be run")
}

fn run(member: &ControlPlane, arguments: &[&str]) -> String {
    let output = reprise(member, arguments);
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {said}");
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

/// Waits until so many nodes have a block; why each of them has it, as `reprise explain` says.
fn reasons(member: &ControlPlane, number: u64, nodes: usize) -> BTreeMap<String, String> {
    wait_until("the directory to know who has the block", PATIENCE, || {
        let said = run(member, &["--json", "explain", &key(number).to_string()]);
        let block: Value = serde_json::from_str(&said).expect("one object");
        let replicas = block["replicas"].as_array().expect("a list");
        let reason = |replica: &Value| {
            Some((replica["node"].as_str()?.to_owned(), replica["why"].as_str()?.to_owned()))
        };
        let reasons: BTreeMap<String, String> = replicas.iter().filter_map(reason).collect();
        (reasons.len() == nodes).then_some(reasons)
    })
}

/// Checks that a node has a block for a reason.
fn assert_reason(reasons: &BTreeMap<String, String>, node: &str, reason: &str) {
    assert!(reasons.get(node).is_some_and(|said| said.contains(reason)), "{node}, {reason}: {reasons:?}");
}

#[test]
fn a_drained_node_can_leave_and_nothing_is_lost() {
    let pool = ByteSize(64 << 20);
    let mut nodes = Nodes::start(&["first", "second", "third"], &[pool; 3]);
    nodes.world.allow("node is silent");
    nodes.world.allow("peer connection lost");
    nodes.world.allow("registered from another address while alive");
    let (saver, reader) = (nodes.agents[0].engine(small()), nodes.agents[1].engine(small()));
    saver.save_durably(&numbers(0..200));
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    nodes.run(&["cordon", "third"]);
    let said = nodes.run(&["drain", "first", "--wait=60s"]);
    assert!(said.contains("first"), "{said}");
    assert!(nodes.run(&["status"]).contains("draining"));
    assert_eq!((nodes.durable(0), nodes.durable(1), nodes.durable(2)), (200, 200, 0), "it goes where it may");
    let reasons = reasons(&nodes.member, 0, 2);
    assert_reason(&reasons, "first", "saved by an engine");
    assert_reason(&reasons, "second", "its node drains");

    // What is saved on a draining node is given away as well.
    saver.save_durably(&numbers(200..220));
    wait_until("new blocks to be given away", MOVED_WITHIN, || (nodes.durable(1) == 220).then_some(()));
    nodes.agents[0].kill();
    nodes.agents[1].kill();
    nodes.agents[1].start();
    wait_until("nobody offers the node that has left", PATIENCE, || {
        (nodes.member.offers("first") == Some(false)).then_some(())
    });
    let reader = nodes.agents[2].engine(small());
    wait_for_sources(&reader, &numbers(0..220), PATIENCE);
    load_from_peer(&reader, &numbers(0..220));

    // It comes back as what it was, and is taken back.
    nodes.agents[0].start();
    wait_until("the node to know its mode", PATIENCE, || {
        (nodes.agents[0].admin().json("/status")["placement"]["mode"] == "draining").then_some(())
    });
    nodes.run(&["uncordon", "first"]);
    nodes.run(&["uncordon", "third"]);
    wait_until("the node to hear of it", PATIENCE, || {
        (nodes.agents[0].admin().json("/status")["placement"]["mode"] == "active").then_some(())
    });
}

#[test]
fn a_drain_with_nowhere_to_go_says_so() {
    let pool = ByteSize(64 << 20);
    let nodes = Nodes::start(&["first", "second"], &[pool; 2]);
    nodes.agents[0].engine(small()).save_durably(&numbers(0..20));
    nodes.run(&["cordon", "second"]);
    nodes.run(&["drain", "first"]);
    wait_until("the node to find nobody for its blocks", MOVED_WITHIN, || {
        (nodes.agents[0].admin().json("/status")["placement"]["nowhere_blocks"] == 20).then_some(())
    });
    let output = nodes.reprise(&["drain", "first", "--wait=1s"]);
    assert!(!output.status.success());
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(said.contains("first is not drained"), "{said}");
    let unknown = nodes.reprise(&["cordon", "nobody"]);
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("nobody"));
}

#[test]
fn a_node_that_restarts_before_its_engines_can_be_drained_of_the_blocks_of_every_tenant() {
    let mut nodes = Nodes::start(&["first", "second"], &[ByteSize(64 << 20); 2]);
    nodes.world.allow("node is silent");
    nodes.world.allow("peer connection lost");
    nodes.world.allow("registered from another address while alive");
    nodes.agents[0].engine_of(small(), "team-a").save_durably(&numbers(0..20));
    nodes.agents[0].engine_of(small(), "team-b").save_durably(&numbers(20..40));
    nodes.agents[0].kill();
    nodes.agents[0].start();
    nodes.run(&["drain", "first", "--wait=60s"]);
    assert_eq!(nodes.durable(1), 40);
    let reasons = reasons(&nodes.member, 0, 2);
    assert_reason(&reasons, "first", "found on a device");
    assert_reason(&reasons, "second", "its node drains");
    nodes.agents[0].kill();
    let other = nodes.agents[1].engine_of(small(), "team-b");
    assert_eq!(other.load_all(&numbers(20..40), &Loading::LOCAL).len(), 20, "as its tenant's");
}

#[test]
fn a_block_that_others_keep_reading_gets_a_second_replica() {
    let world = World::new();
    world.allow("node is silent");
    world.allow("peer connection lost");
    let member = world.control_plane(Store::Memory);
    let start = |name| {
        let control_plane = vec![member.address().to_owned()];
        let extra = "[placement]\nhot_reads = 1\n".to_owned();
        world.agent(&AgentConfig { control_plane, extra, region: REGION, ..AgentConfig::named(name) })
    };
    let (mut first, second) = (start("first"), start("second"));
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    saver.save_durably(&numbers(0..50));
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    load_from_peer(&reader, &numbers(0..10));
    let durable = |agent: &Agent| agent.admin().counter("nvme_blocks");
    wait_until("what was read to be durable twice", MOVED_WITHIN, || (durable(&second) == 10).then_some(()));
    assert_eq!(durable(&first), 50, "the first keeps its own");
    let of_hot = reasons(&member, 0, 2);
    assert_reason(&of_hot, "first", "saved by an engine");
    assert_reason(&of_hot, "second", "peers kept reading it");
    assert_reason(&reasons(&member, 20, 1), "first", "saved by an engine");
    first.kill();
    reader.trim(); // local loads ask nobody
    assert_eq!(reader.load_all(&numbers(0..10), &Loading::LOCAL), vec![Source::OwnNvme; 10]);
}

#[test]
fn full_nodes_give_to_empty_ones_and_every_block_is_still_there_once() {
    let slot = device_slot_bytes(&small());
    let pool = ByteSize((500 * slot).next_multiple_of(4 << 20) + (8 << 20));
    let nodes = Nodes::start(&["first", "second"], &[pool; 2]);
    let (saver, reader) = (nodes.agents[0].engine(small()), nodes.agents[1].engine(small()));
    for start in (0..300).step_by(50) {
        saver.save_durably(&numbers(start..start + 50));
    }
    wait_for_sources(&reader, &numbers(0..300), PATIENCE);
    wait_until("pools to be about as full", MOVED_WITHIN, || {
        (nodes.durable(1) >= 90 && nodes.durable(0) + nodes.durable(1) == 300).then_some(())
    });
    let all = reader.matches(&numbers(0..300), Scope::Cluster).len();
    assert_eq!(all, 300);
    load_from_peer(&reader, &numbers(0..150));
    load_from_peer(&saver, &numbers(150..300));
}
