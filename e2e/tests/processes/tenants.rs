//! Several tenants: each keeps to its quotas on a node and to its own blocks, also when the agent was killed, and to its
//! budget in the whole cluster.

use std::process::Command;
use std::time::Duration;

use reprise_client::{Scope, Source};
use reprise_e2e::content::{device_slot_bytes, large};
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, Loading, PATIENCE, World, wait_until};
use reprise_policy::ByteSize;
use serde_json::Value;

/// Four regions of 8 MiB, of which B is sure of two; A may have 8 blocks in memory and 16 on the device, of about 60.
fn config() -> AgentConfig {
    let (dram, nvme) = (8 * large().slot_bytes(), 16 * device_slot_bytes(&large()));
    let tenants = format!(
        "[[tenants]]\nname = \"team-a\"\ndram = {{ limit = \"{dram}\" }}\nnvme = {{ limit = \"{nvme}\" }}\n\
         [[tenants]]\nname = \"team-b\"\ndram = {{ reserved = \"16MiB\" }}\n"
    );
    AgentConfig {
        arena: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        extra: tenants,
        ..AgentConfig::named("node")
    }
}

/// What `/status` says of a tenant.
fn status(agent: &Agent, tenant: &str) -> Value {
    let page = agent.admin().json("/status");
    let tenants = page["tenants"].as_array().expect("a list");
    tenants.iter().find(|one| one["name"] == tenant).expect("it is configured").clone()
}

fn used(agent: &Agent, tenant: &str, tier: &str) -> u64 {
    status(agent, tenant)[tier]["used"].as_u64().expect("a number")
}

#[test]
fn a_tenant_at_its_quotas_evicts_its_own_blocks_and_every_block_stays_its_tenants_over_a_kill() {
    let world = World::new();
    let mut agent = world.agent(&config());
    let of_b: Vec<u64> = (1000..1010).collect();
    let a = agent.engine_of(large(), "team-a");
    agent.engine_of(large(), "team-b").save_durably(&of_b);
    for start in (0..40).step_by(4) {
        a.save_durably(&(start..start + 4).collect::<Vec<u64>>());
    }
    agent.admin().wait_quiet(PATIENCE);
    assert_eq!(used(&agent, "team-a", "dram"), 8 * large().slot_bytes());
    assert_eq!(used(&agent, "team-a", "nvme"), 16 * device_slot_bytes(&large()));
    assert_eq!(used(&agent, "team-b", "nvme"), 10 * device_slot_bytes(&large()));
    assert!(a.matches(&[0], Scope::Local).is_empty(), "the oldest went");

    agent.kill();
    agent.start();
    assert_eq!(used(&agent, "team-a", "nvme"), 16 * device_slot_bytes(&large()));
    assert_eq!(used(&agent, "team-b", "nvme"), 10 * device_slot_bytes(&large()));
    let (a, b) = (agent.engine_of(large(), "team-a"), agent.engine_of(large(), "team-b"));
    let of_a: Vec<u64> = (24..40).collect();
    assert_eq!(a.matches(&of_a, Scope::Local), vec![Source::OwnNvme; 16]);
    b.load_all(&of_b, &Loading::LOCAL);
    a.load_all(&of_a[..8], &Loading::LOCAL);
    assert!(b.matches(&of_a, Scope::Local).is_empty() && a.matches(&of_b, Scope::Local).is_empty());
}

#[test]
fn a_tenant_whose_memory_is_all_in_use_waits_and_is_not_refused() {
    let world = World::new();
    let agent = world.agent(&config());
    let a = agent.engine_of(large(), "team-a");
    let held = a.reserve(8).expect("as many as it may have");
    let more = a.client().reserve(1, Duration::from_millis(50)).expect("not refused");
    assert!(more.is_empty());
    let b = agent.engine_of(large(), "team-b");
    assert_eq!(b.reserve(8).expect("others do not feel it").len(), 8);
    drop(held);
    assert_eq!(a.reserve(1).expect("room again").len(), 1);
}

/// Runs `reprise tenant`; what it prints.
fn tenant(member: &ControlPlane, arguments: &[&str]) -> Result<Value, String> {
    let mut command = Command::new(binary("reprise"));
    let output = command
        .args(["--json", "tenant", "--controlplane", member.address()])
        .args(arguments)
        .output()
        .expect("reprise can be run");
    let text = String::from_utf8_lossy(if output.status.success() { &output.stdout } else { &output.stderr });
    if output.status.success() {
        Ok(serde_json::from_str(&text).unwrap_or(Value::Null))
    } else {
        Err(text.into_owned())
    }
}

#[test]
fn a_budget_of_the_cluster_follows_the_work_and_is_never_exceeded() {
    let world = World::new();
    let member = world.control_plane(Store::Memory);
    let slot = device_slot_bytes(&large());
    let (one, two) = (24 * slot, 60 * slot);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (a, b) = (world.agent(&config("a")), world.agent(&config("b")));
    let engines = [a.engine_of(large(), "team-a"), b.engine_of(large(), "team-a")];
    let held = |agent: &Agent| used(agent, "team-a", "nvme");
    let save = |engine: usize, from: u64, count: u64| {
        for start in (from..from + count).step_by(4) {
            engines[engine].save(&(start..start + 4).collect::<Vec<u64>>()).expect("saved");
        }
    };
    // Without a budget a node takes what it has.
    save(0, 0, 40);
    a.admin().wait_quiet(PATIENCE);
    assert_eq!(held(&a), 40 * slot);
    let refused = tenant(&member, &["set", "team-a", "--nvme-reserved", "10TiB", "--nvme", "20TiB"]);
    assert!(refused.expect_err("nobody has so much").contains("add"), "it says what to do");
    tenant(&member, &["set", "team-a", "--nvme", &one.to_string()]).expect("set");
    let limit = |agent: &Agent| status(agent, "team-a")["nvme"]["limit"].as_u64();
    wait_until("both to follow their orders", PATIENCE, || {
        (held(&a) <= one && limit(&a)? + limit(&b)? <= one).then_some(())
    });

    // The other node gets what it wants as far as the first does not use it.
    let mut from = 1000;
    wait_until("bytes to move to the node that wants them", PATIENCE, || {
        save(1, from, 4);
        from += 4;
        // In this order: what the one gives up before it is looked at, the other cannot have had when it was.
        let of_b = held(&b);
        let of_a = held(&a);
        assert!(of_a + of_b <= one, "{of_a} and {of_b} of {one}");
        (of_b >= one / 3).then_some(())
    });
    let listed = tenant(&member, &["list"]).expect("listed");
    let ledger = &listed["tenants"][0]["ledger"];
    assert!(ledger["granted"]["nvme"].as_u64().expect("a number") <= one, "{listed}");
    assert_eq!(ledger["nodes"].as_array().map(Vec::len), Some(2));

    // A higher budget gives room, and a removed one leaves what the node allows by itself.
    tenant(&member, &["set", "team-a", "--nvme", &two.to_string()]).expect("set");
    wait_until("room for more", PATIENCE, || {
        save(1, from, 4);
        from += 4;
        (held(&a) + held(&b) > one + 4 * slot).then_some(())
    });
    tenant(&member, &["remove", "team-a"]).expect("removed");
    wait_until("the orders to end", PATIENCE, || limit(&b).is_none().then_some(()));
    assert!(tenant(&member, &["remove", "team-a"]).expect_err("it has none").contains("no budget"));
}
