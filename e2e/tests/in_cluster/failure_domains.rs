//! Failure domains: further replicas of hot blocks go to another zone, by the zones in the nodes' specs.

use reprise_client::Scope;
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::small;
use reprise_e2e::control_plane::Store;
use reprise_e2e::{ApiServer, PATIENCE, TestEnv, wait_until};
use serde_json::{Value, json};

use crate::in_cluster::node::{Node, REPORTED_WITHIN, Setup, condition, file_claim, state};

/// Blocks that become hot in one zone layout.
const HOT_BLOCKS: u64 = 20;

/// Returns the spec of a node with a pool in this zone.
fn in_zone(zone: &str) -> Value {
    json!({ "claims": [file_claim("p1")], "failureDomain": zone })
}

/// Returns the failure domain of a node, as the member lists it.
fn listed_domain(member: &reprise_e2e::ControlPlane, name: &str) -> Option<String> {
    let nodes = member.admin().json("/nodes");
    let node = nodes.as_array()?.iter().find(|node| node["name"] == name)?.clone();
    node["failure_domain"].as_str().map(str::to_owned)
}

/// Applies a spec, and waits until the agent reports it and the member lists the zone.
fn move_to_zone(node: &Node<'_>, member: &reprise_e2e::ControlPlane, name: &str, zone: &str) {
    node.apply_and_wait("the pool is open and the node registered", in_zone(zone), |status| {
        state(status, "/p1-file") == Some("Open") && condition(status, "Connected").0 == "True"
    });
    wait_until("the member lists the zone", REPORTED_WITHIN, || {
        (listed_domain(member, name).as_deref() == Some(zone)).then_some(())
    });
    assert_eq!(node.agent.admin().json("/status")["node"]["failure_domain"], zone);
}

pub(crate) fn the_second_replica_of_a_hot_block_goes_to_another_zone(server: &ApiServer) {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let start = |name| {
        let env = TestEnv::new();
        env.allow("peer connection lost");
        let setup = Setup {
            control_plane: vec![member.address().to_owned()],
            // One peer read makes a block hot.
            extra: "[placement]\nhot_reads = 1\n".to_owned(),
            ..Setup::of(name)
        };
        Node::launch(server, env, &setup)
    };
    let (holder, left, right) = (start("zoned-holder"), start("zoned-left"), start("zoned-right"));
    move_to_zone(&holder, &member, "zoned-holder", "zone-a");
    let saver = holder.agent.engine(small());
    let (left_engine, right_engine) = (left.agent.engine(small()), right.agent.engine(small()));
    let durable = |node: &Node<'_>| node.agent.admin().counter("nvme_blocks");
    let everything = numbers(0..2 * HOT_BLOCKS);
    saver.save_durably(&everything);
    // In the second layout the two other nodes have changed their zones, while they run.
    for (layout, (left_zone, right_zone)) in
        [("zone-a", "zone-b"), ("zone-b", "zone-a")].into_iter().enumerate()
    {
        move_to_zone(&left, &member, "zoned-left", left_zone);
        move_to_zone(&right, &member, "zoned-right", right_zone);
        let (near, far) =
            if left_zone == "zone-a" { (&left_engine, &right_engine) } else { (&right_engine, &left_engine) };
        let (near_node, far_node) = if left_zone == "zone-a" { (&left, &right) } else { (&right, &left) };
        let first = layout as u64 * HOT_BLOCKS;
        let hot = numbers(first..first + HOT_BLOCKS);
        let before = (durable(near_node), durable(far_node));
        wait_for_sources(near, &hot, PATIENCE);
        wait_for_sources(far, &hot, PATIENCE);
        // The decision follows after a second. Both nodes hold the blocks in DRAM by then, so only the
        // zone distinguishes them.
        load_from_peer(far, &hot);
        load_from_peer(near, &hot);
        wait_until("every hot block to have a replica in the other zone", REPORTED_WITHIN, || {
            (durable(far_node) == before.1 + HOT_BLOCKS).then_some(())
        });
        assert_eq!(durable(near_node), before.0, "no block has a replica on the node of the same zone");
        assert_eq!(near.matches(&hot, Scope::Cluster).len(), hot.len());
    }
}
