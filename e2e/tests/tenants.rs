//! Several tenants of one agent: each keeps to its quotas and to its own blocks, also when the agent was killed.

use std::time::Duration;

use reprise_client::{Scope, Source};
use reprise_e2e::content::{device_slot_bytes, large};
use reprise_e2e::{Agent, AgentConfig, Loading, PATIENCE, World};
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
