//! Placement of replicas: hot blocks get a second replica, a draining node copies blocks that only it has,
//! and full nodes move blocks to empty ones.
//!
//! Every loaded byte is compared, also on nodes that received copies.

use std::collections::BTreeMap;
use std::process::{Command, Output};
use std::time::Duration;

use reprise_client::{Scope, Source};
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::{device_slot_bytes, key, small};
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_policy::ByteSize;
use serde_json::Value;

/// Bound on the movement of blocks: reports, requests and offers are about a second apart.
const MOVED_WITHIN: Duration = Duration::from_secs(60);

/// A small region, so that regions are left for a tenant that has no engines on a node yet.
const REGION: ByteSize = ByteSize(2 << 20);

struct Nodes {
    env: TestEnv,
    member: ControlPlane,
    agents: Vec<Agent>,
}

impl Nodes {
    fn start(names: &[&str], pools: &[ByteSize]) -> Nodes {
        let env = TestEnv::new();
        let member = env.control_plane(Store::Memory);
        let start = |(name, pool): (&&str, &ByteSize)| {
            let control_plane = vec![member.address().to_owned()];
            env.agent(&AgentConfig {
                control_plane,
                pool: Some(*pool),
                region: REGION,
                ..AgentConfig::named(name)
            })
        };
        let agents = names.iter().zip(pools).map(start).collect();
        Nodes { env, member, agents }
    }

    /// Runs `reprise` against the member, and returns its output.
    fn reprise(&self, arguments: &[&str]) -> Output {
        reprise(&self.member, arguments)
    }

    fn run(&self, arguments: &[&str]) -> String {
        run(&self.member, arguments)
    }

    /// Returns the number of blocks on the devices of a node.
    fn durable(&self, node: usize) -> u64 {
        self.agents[node].admin().counter("nvme_blocks")
    }
}

/// Runs `reprise` against a member, and returns its output.
fn reprise(member: &ControlPlane, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary("reprise"));
    command.args(arguments).args(["--controlplane", member.address()]);
    command.output().expect("reprise can be run")
}

fn run(member: &ControlPlane, arguments: &[&str]) -> String {
    let output = reprise(member, arguments);
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{arguments:?} failed: {stderr}");
    String::from_utf8(output.stdout).expect("output is UTF-8")
}

/// Waits until a block has this number of replicas. Returns the reason of each by node, from `reprise
/// explain`.
fn reasons(member: &ControlPlane, number: u64, nodes: usize) -> BTreeMap<String, String> {
    wait_until("the directory to have all replicas of the block", PATIENCE, || {
        let json = run(member, &["--json", "explain", &key(number).to_string()]);
        let block: Value = serde_json::from_str(&json).expect("one object");
        let replicas = block["replicas"].as_array().expect("a list");
        let reason = |replica: &Value| {
            Some((replica["node"].as_str()?.to_owned(), replica["why"].as_str()?.to_owned()))
        };
        let reasons: BTreeMap<String, String> = replicas.iter().filter_map(reason).collect();
        (reasons.len() == nodes).then_some(reasons)
    })
}

/// Checks the reason for which a node has a block.
fn assert_reason(reasons: &BTreeMap<String, String>, node: &str, reason: &str) {
    assert!(reasons.get(node).is_some_and(|text| text.contains(reason)), "{node}, {reason}: {reasons:?}");
}

#[test]
fn a_drained_node_can_be_stopped_without_losing_blocks() {
    let pool = ByteSize(64 << 20);
    let mut nodes = Nodes::start(&["first", "second", "third"], &[pool; 3]);
    nodes.env.allow("node is silent");
    nodes.env.allow("peer connection lost");
    nodes.env.allow("live node registered from another address");
    let (saver, reader) = (nodes.agents[0].engine(small()), nodes.agents[1].engine(small()));
    saver.save_durably(&numbers(0..200));
    wait_for_sources(&reader, &numbers(0..200), PATIENCE);
    nodes.run(&["cordon", "third"]);
    let output = nodes.run(&["drain", "first", "--wait=60s"]);
    assert!(output.contains("first"), "{output}");
    assert!(nodes.run(&["status"]).contains("draining"));
    assert_eq!(
        (nodes.durable(0), nodes.durable(1), nodes.durable(2)),
        (200, 200, 0),
        "blocks are copied to active nodes only"
    );
    let reasons = reasons(&nodes.member, 0, 2);
    assert_reason(&reasons, "first", "saved by an engine");
    assert_reason(&reasons, "second", "its node is draining");

    // Blocks saved on a draining node are copied as well.
    saver.save_durably(&numbers(200..220));
    wait_until("new blocks to be copied", MOVED_WITHIN, || (nodes.durable(1) == 220).then_some(()));
    nodes.agents[0].kill();
    nodes.agents[1].kill();
    nodes.agents[1].start();
    wait_until("the stopped node is not offered", PATIENCE, || {
        (nodes.member.offers("first") == Some(false)).then_some(())
    });
    let reader = nodes.agents[2].engine(small());
    wait_for_sources(&reader, &numbers(0..220), PATIENCE);
    load_from_peer(&reader, &numbers(0..220));

    // The node restarts in the mode `draining`, and is then activated again.
    nodes.agents[0].start();
    wait_until("the node to apply its mode", PATIENCE, || {
        (nodes.agents[0].admin().json("/status")["placement"]["mode"] == "draining").then_some(())
    });
    nodes.run(&["uncordon", "first"]);
    nodes.run(&["uncordon", "third"]);
    wait_until("the node to become active", PATIENCE, || {
        (nodes.agents[0].admin().json("/status")["placement"]["mode"] == "active").then_some(())
    });
}

#[test]
fn a_drain_without_a_target_reports_the_remaining_blocks() {
    let pool = ByteSize(64 << 20);
    let nodes = Nodes::start(&["first", "second"], &[pool; 2]);
    nodes.agents[0].engine(small()).save_durably(&numbers(0..20));
    nodes.run(&["cordon", "second"]);
    nodes.run(&["drain", "first"]);
    wait_until("the node to find no target for its blocks", MOVED_WITHIN, || {
        (nodes.agents[0].admin().json("/status")["placement"]["nowhere_blocks"] == 20).then_some(())
    });
    let output = nodes.reprise(&["drain", "first", "--wait=1s"]);
    assert!(!output.status.success());
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(stderr.contains("first is not drained"), "{stderr}");
    let unknown = nodes.reprise(&["cordon", "unknown"]);
    assert!(!unknown.status.success());
    assert!(String::from_utf8_lossy(&unknown.stderr).contains("unknown"));
}

#[test]
fn a_restarted_node_without_engines_can_be_drained_of_all_tenants_blocks() {
    let mut nodes = Nodes::start(&["first", "second"], &[ByteSize(64 << 20); 2]);
    nodes.env.allow("node is silent");
    nodes.env.allow("peer connection lost");
    nodes.env.allow("live node registered from another address");
    nodes.agents[0].engine_of(small(), "team-a").save_durably(&numbers(0..20));
    nodes.agents[0].engine_of(small(), "team-b").save_durably(&numbers(20..40));
    nodes.agents[0].kill();
    nodes.agents[0].start();
    nodes.run(&["drain", "first", "--wait=60s"]);
    assert_eq!(nodes.durable(1), 40);
    let reasons = reasons(&nodes.member, 0, 2);
    assert_reason(&reasons, "first", "found on a device");
    assert_reason(&reasons, "second", "its node is draining");
    nodes.agents[0].kill();
    let other = nodes.agents[1].engine_of(small(), "team-b");
    assert_eq!(
        other.load_all(&numbers(20..40), &LoadParams::LOCAL).len(),
        20,
        "the copies belong to the same tenant"
    );
}

#[test]
fn a_block_that_peers_keep_reading_gets_a_second_replica() {
    let env = TestEnv::new();
    env.allow("node is silent");
    env.allow("peer connection lost");
    let member = env.control_plane(Store::Memory);
    let start = |name| {
        let control_plane = vec![member.address().to_owned()];
        let extra = "[placement]\nhot_reads = 1\n".to_owned();
        env.agent(&AgentConfig { control_plane, extra, region: REGION, ..AgentConfig::named(name) })
    };
    let (mut first, second) = (start("first"), start("second"));
    let (saver, reader) = (first.engine(small()), second.engine(small()));
    saver.save_durably(&numbers(0..50));
    wait_for_sources(&reader, &numbers(0..50), PATIENCE);
    load_from_peer(&reader, &numbers(0..10));
    let durable = |agent: &Agent| agent.admin().counter("nvme_blocks");
    wait_until("the blocks that were read to have a second replica", MOVED_WITHIN, || {
        (durable(&second) == 10).then_some(())
    });
    assert_eq!(durable(&first), 50, "the first node keeps its replicas");
    let of_hot = reasons(&member, 0, 2);
    assert_reason(&of_hot, "first", "saved by an engine");
    assert_reason(&of_hot, "second", "peers read it often");
    assert_reason(&reasons(&member, 20, 1), "first", "saved by an engine");
    first.kill();
    reader.trim(); // so that the loads read NVMe
    assert_eq!(reader.load_all(&numbers(0..10), &LoadParams::LOCAL), vec![Source::OwnNvme; 10]);
}

#[test]
fn full_nodes_move_blocks_to_empty_ones_and_every_block_keeps_one_replica() {
    let slot = device_slot_bytes(&small());
    let pool = ByteSize((500 * slot).next_multiple_of(4 << 20) + (8 << 20));
    let nodes = Nodes::start(&["first", "second"], &[pool; 2]);
    let (saver, reader) = (nodes.agents[0].engine(small()), nodes.agents[1].engine(small()));
    for start in (0..300).step_by(50) {
        saver.save_durably(&numbers(start..start + 50));
    }
    wait_for_sources(&reader, &numbers(0..300), PATIENCE);
    wait_until("pools to be about equally full", MOVED_WITHIN, || {
        (nodes.durable(1) >= 90 && nodes.durable(0) + nodes.durable(1) == 300).then_some(())
    });
    let all = reader.matches(&numbers(0..300), Scope::Cluster).len();
    assert_eq!(all, 300);
    load_from_peer(&reader, &numbers(0..150));
    load_from_peer(&saver, &numbers(150..300));
}
