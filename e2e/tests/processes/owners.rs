//! What one member decides alone goes on when that member is killed: a tenant's budget, which the owner of the tenant's hash slot shares
//! out, and a drain, whose blocks find their places with the owners of their slots while the owner of slot 0 balances pools.
//!
//! Three members over a real etcd; two of them are killed in the middle of a drain. Limits of nodes are added up only where no order came
//! between two looks at all of them, so that they held at one instant.

use reprise_client::Scope;
use reprise_e2e::cli::reprise;
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::{Agent, AgentConfig, Cluster, ControlPlane, Engine, PATIENCE, World, wait_until};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{ByteSize, Epoch, TenantName};
use serde_json::Value;

/// The members, in the order of a map.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Blocks of the node that leaves.
const BLOCKS: u64 = 200;

/// What is on other nodes when the owners are killed: one second's part of seven, at a mebibyte a second.
const GIVEN: u64 = 30;

/// Of an arena enough are left when a tenant without engines on a node takes one.
const REGION: ByteSize = ByteSize(2 << 20);

/// Who decides what, as positions of members.
#[derive(Clone, Copy, Debug)]
struct Owners {
    /// Of slot 0.
    balance: usize,
    /// Of the tenant's slot.
    ledger: usize,
    /// Of neither.
    other: usize,
}

/// A tenant of which another member than that of slot 0 keeps the ledger, by the map that `reprise status` shows.
fn tenant_and_owners(cluster: &Cluster) -> (TenantName, Owners) {
    let status = reprise(&cluster.members[0], &["status"]).remove(0);
    let members = status["members"].as_array().expect("a list");
    let names = members.iter().map(|member| member["name"].as_str().expect("a name"));
    let names: Vec<MemberName> = names.map(|name| MemberName::new(name).expect("a name")).collect();
    assert_eq!(names.iter().map(MemberName::as_str).collect::<Vec<_>>(), NAMES);
    let map = ShardMap::new(Epoch(1), names).expect("three members");
    let owner = |slot: u16| usize::from(map.owner(slot).expect("there are members").0);
    let balance = owner(0);
    let tenants = (0..).map(|number| format!("team-{number}").parse::<TenantName>().expect("a name"));
    let mut others = tenants.filter(|tenant| owner(tenant.hash_slot()) != balance);
    let tenant = others.next().expect("two thirds of all");
    let ledger = owner(tenant.hash_slot());
    (tenant, Owners { balance, ledger, other: 3 - balance - ledger })
}

/// The tenant's limit on a node, and which order that is of; `None` before there is one.
fn limit(agent: &Agent, tenant: &TenantName) -> Option<(u64, u64)> {
    let page = agent.admin().json("/status");
    let tenants = page["tenants"].as_array().expect("a list");
    let held = tenants.iter().find(|held| held["name"] == tenant.as_str())?;
    Some((held["grant_version"].as_u64()?, held["nvme"]["limit"].as_u64()?))
}

/// What all nodes may hold of the tenant at one instant; `None` while orders come.
fn limits(agents: &[Agent], tenant: &TenantName) -> Option<u64> {
    let look = || agents.iter().map(|agent| limit(agent, tenant)).collect::<Option<Vec<_>>>();
    let first = look()?;
    (look()? == first).then(|| first.iter().map(|(_, limit)| limit).sum())
}

/// Waits until the owner of the tenant's slot has its ledger, and says so to another member; that ledger.
fn ledger_of(owner: &str, asked: &ControlPlane) -> Value {
    wait_until("the owner to have the ledger", PATIENCE, || {
        let listed = reprise(asked, &["tenant", "list"]).remove(0);
        let ledger = listed["tenants"][0]["ledger"].clone();
        (ledger["member"] == owner).then_some(ledger)
    })
}

/// The cluster with three nodes, and an engine of the tenant on each.
fn with_nodes(cluster: &mut Cluster, tenant: &TenantName) -> Vec<Engine> {
    let control_plane: Vec<String> =
        cluster.members.iter().map(|member| member.address().to_owned()).collect();
    for node in ["first", "second", "third"] {
        let agent = cluster.world.agent(&AgentConfig {
            control_plane: control_plane.clone(),
            region: REGION,
            extra: "[placement]\nbandwidth = \"1MiB\"\n".to_owned(),
            ..AgentConfig::named(node)
        });
        cluster.agents.push(agent);
    }
    cluster.wait_until_whole(3);
    cluster.agents.iter().map(|agent| agent.engine_of(small(), tenant.as_str())).collect()
}

#[test]
fn a_drain_ends_and_a_budget_holds_when_the_members_that_decide_are_killed_on_the_way() {
    let world = World::new();
    let etcd = world.etcd();
    let endpoint = etcd.endpoint();
    let members = NAMES.map(|name| world.member(name, &endpoint)).into();
    let mut cluster = Cluster::of(world, etcd, members);
    let (tenant, owners) = tenant_and_owners(&cluster);
    println!("{tenant:?}: {owners:?}");
    let engines = with_nodes(&mut cluster, &tenant);
    // Of four times as much as the node holds, what it does not use is enough for the others.
    let budget = 4 * BLOCKS * device_slot_bytes(&small());
    let set = ["tenant", "set", tenant.as_str(), "--nvme", &budget.to_string()];
    reprise(&cluster.members[owners.other], &set);
    let held = |cluster: &Cluster| limits(&cluster.agents, &tenant);
    wait_until("every node to follow its order", PATIENCE, || held(&cluster).filter(|sum| *sum <= budget));
    ledger_of(NAMES[owners.ledger], &cluster.members[owners.other]);

    for start in (0..BLOCKS).step_by(50) {
        engines[0].save_durably(&numbers(start..start + 50));
    }
    reprise(&cluster.members[owners.other], &["drain", "first"]);
    let given = |cluster: &Cluster| {
        cluster.agents[1..].iter().map(|agent| agent.admin().counter("nvme_blocks")).sum::<u64>()
    };
    wait_until("some blocks to be given away", PATIENCE, || (given(&cluster) >= GIVEN).then_some(()));
    cluster.members[owners.ledger].kill();
    cluster.members[owners.balance].kill();
    let halfway = given(&cluster);
    assert!(halfway < BLOCKS, "the drain is not over yet");

    // One member decides everything; then the others come back for their parts.
    wait_until("one member to have all slots, and more blocks to be given away", PATIENCE, || {
        held(&cluster).iter().for_each(|sum| assert!(*sum <= budget, "{sum} of {budget}"));
        let owned: u64 = cluster.parts().iter().map(|part| part.owned).sum();
        (owned == SLOTS && given(&cluster) > halfway).then_some(())
    });
    cluster.members[owners.ledger].restart();
    cluster.members[owners.balance].restart();
    wait_until("the node to be drained", 2 * PATIENCE, || {
        held(&cluster).iter().for_each(|sum| assert!(*sum <= budget, "{sum} of {budget}"));
        let placement = cluster.agents[0].admin().json("/status")["placement"].clone();
        (placement["mode"] == "draining" && placement["drained"] == true).then_some(())
    });
    reprise(&cluster.members[owners.ledger], &["drain", "first", "--wait=60s"]);
    cluster.wait_until_whole(3);
    let sum = wait_until("orders to rest", PATIENCE, || held(&cluster));
    assert!(sum <= budget, "{sum} of {budget}");
    let ledger = ledger_of(NAMES[owners.ledger], &cluster.members[owners.balance]);
    assert!(ledger["granted"]["nvme"].as_u64().is_some_and(|granted| granted <= budget), "{ledger}");

    // The node leaves, and nothing is lost with it.
    cluster.agents[0].kill();
    cluster.wait_until_not_offered("first");
    wait_for_sources(&engines[2], &numbers(0..BLOCKS), PATIENCE);
    load_from_peer(&engines[2], &numbers(0..BLOCKS));
    assert!(!engines[1].matches(&[0], Scope::Cluster).is_empty());
}
