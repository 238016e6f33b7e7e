//! Decisions of a single member survive its kill: a tenant's budget, which the owner of the tenant's hash
//! slot grants to nodes, and a drain, whose blocks are placed by the owners of their slots while the owner of
//! slot 0 balances pools.
//!
//! Two of three members over a real etcd are killed during a drain. The limits of nodes are added up only if
//! two reads of all of them are equal, so that they held at one instant.

use reprise_client::Scope;
use reprise_e2e::cli::reprise;
use reprise_e2e::cluster::{SLOTS, load_from_peer, numbers, wait_for_sources};
use reprise_e2e::content::{device_slot_bytes, small};
use reprise_e2e::{Agent, AgentConfig, Cluster, ControlPlane, Engine, PATIENCE, TestEnv, wait_until};
use reprise_policy::shards::{MemberName, ShardMap};
use reprise_policy::{ByteSize, Epoch, TenantName};
use serde_json::Value;

/// Names of the members, in the order of the shard map.
const NAMES: [&str; 3] = ["a", "b", "c"];

/// Number of blocks on the node that is drained.
const BLOCKS: u64 = 200;

/// Blocks on other nodes when the owners are killed: about one of seven seconds at 1 MiB/s.
const COPIED: u64 = 30;

/// A small region, so that regions are left for a tenant that has no engines on a node yet.
const REGION: ByteSize = ByteSize(2 << 20);

/// Members that own the decisions, as indices.
#[derive(Clone, Copy, Debug)]
struct Owners {
    /// Owner of slot 0, which balances pools.
    balance: usize,
    /// Owner of the tenant's slot, which has its ledger.
    ledger: usize,
    /// Owner of neither of these slots.
    other: usize,
}

/// Returns a tenant whose ledger is not with the owner of slot 0, according to the map in `reprise status`.
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

/// Returns the version and the NVMe limit of the tenant's grant on a node; `None` before the first grant.
fn limit(agent: &Agent, tenant: &TenantName) -> Option<(u64, u64)> {
    let page = agent.admin().json("/status");
    let tenants = page["tenants"].as_array().expect("a list");
    let entry = tenants.iter().find(|entry| entry["name"] == tenant.as_str())?;
    Some((entry["grant_version"].as_u64()?, entry["nvme"]["limit"].as_u64()?))
}

/// Returns the sum of the tenant's limits on all nodes at one instant; `None` while grants change.
fn limits(agents: &[Agent], tenant: &TenantName) -> Option<u64> {
    let read = || agents.iter().map(|agent| limit(agent, tenant)).collect::<Option<Vec<_>>>();
    let first = read()?;
    (read()? == first).then(|| first.iter().map(|(_, limit)| limit).sum())
}

/// Waits until another member reports that the owner of the tenant's slot has its ledger. Returns the ledger.
fn ledger_of(owner: &str, member: &ControlPlane) -> Value {
    wait_until("the owner to have the ledger", PATIENCE, || {
        let listed = reprise(member, &["tenant", "list"]).remove(0);
        let ledger = listed["tenants"][0]["ledger"].clone();
        (ledger["member"] == owner).then_some(ledger)
    })
}

/// Adds three nodes to the cluster. Returns an engine of the tenant on each.
fn with_nodes(cluster: &mut Cluster, tenant: &TenantName) -> Vec<Engine> {
    let control_plane: Vec<String> =
        cluster.members.iter().map(|member| member.address().to_owned()).collect();
    for node in ["first", "second", "third"] {
        let agent = cluster.env.agent(&AgentConfig {
            control_plane: control_plane.clone(),
            region: REGION,
            extra: "[placement]\nbandwidth = \"1MiB\"\n".to_owned(),
            ..AgentConfig::named(node)
        });
        cluster.agents.push(agent);
    }
    cluster.wait_until_complete(3);
    cluster.agents.iter().map(|agent| agent.engine_of(small(), tenant.as_str())).collect()
}

#[test]
fn a_drain_completes_and_a_budget_holds_when_the_deciding_members_are_killed() {
    let env = TestEnv::new();
    let etcd = env.etcd();
    let endpoint = etcd.endpoint();
    let members = NAMES.map(|name| env.member(name, &endpoint)).into();
    let mut cluster = Cluster::of(env, etcd, members);
    let (tenant, owners) = tenant_and_owners(&cluster);
    println!("{tenant:?}: {owners:?}");
    let engines = with_nodes(&mut cluster, &tenant);
    // Four times the blocks of the node, so that the budget that it leaves unused is enough for the others.
    let budget = 4 * BLOCKS * device_slot_bytes(&small());
    let set = ["tenant", "set", tenant.as_str(), "--nvme", &budget.to_string()];
    reprise(&cluster.members[owners.other], &set);
    let granted = |cluster: &Cluster| limits(&cluster.agents, &tenant);
    wait_until("every node to apply its grant", PATIENCE, || granted(&cluster).filter(|sum| *sum <= budget));
    ledger_of(NAMES[owners.ledger], &cluster.members[owners.other]);

    for start in (0..BLOCKS).step_by(50) {
        engines[0].save_durably(&numbers(start..start + 50));
    }
    reprise(&cluster.members[owners.other], &["drain", "first"]);
    let copied = |cluster: &Cluster| {
        cluster.agents[1..].iter().map(|agent| agent.admin().counter("nvme_blocks")).sum::<u64>()
    };
    wait_until("some blocks to be copied", PATIENCE, || (copied(&cluster) >= COPIED).then_some(()));
    cluster.members[owners.ledger].kill();
    cluster.members[owners.balance].kill();
    let halfway = copied(&cluster);
    assert!(halfway < BLOCKS, "the drain is not complete yet");

    // One member decides everything. Then the others return for their slots.
    wait_until("one member to own all slots, and further blocks to be copied", PATIENCE, || {
        granted(&cluster).iter().for_each(|sum| assert!(*sum <= budget, "{sum} of {budget}"));
        let owned: u64 = cluster.parts().iter().map(|part| part.owned).sum();
        (owned == SLOTS && copied(&cluster) > halfway).then_some(())
    });
    cluster.members[owners.ledger].restart();
    cluster.members[owners.balance].restart();
    wait_until("the node to be drained", 2 * PATIENCE, || {
        granted(&cluster).iter().for_each(|sum| assert!(*sum <= budget, "{sum} of {budget}"));
        let placement = cluster.agents[0].admin().json("/status")["placement"].clone();
        (placement["mode"] == "draining" && placement["drained"] == true).then_some(())
    });
    reprise(&cluster.members[owners.ledger], &["drain", "first", "--wait=60s"]);
    cluster.wait_until_complete(3);
    let sum = wait_until("stable grants", PATIENCE, || granted(&cluster));
    assert!(sum <= budget, "{sum} of {budget}");
    let ledger = ledger_of(NAMES[owners.ledger], &cluster.members[owners.balance]);
    assert!(ledger["granted"]["nvme"].as_u64().is_some_and(|granted| granted <= budget), "{ledger}");

    // The drained node stops, and no block is lost.
    cluster.agents[0].kill();
    cluster.wait_until_not_offered("first");
    wait_for_sources(&engines[2], &numbers(0..BLOCKS), PATIENCE);
    load_from_peer(&engines[2], &numbers(0..BLOCKS));
    assert!(!engines[1].matches(&[0], Scope::Cluster).is_empty());
}
