//! Several tenants: each keeps to its quotas on a node and to its own blocks, also after a kill of the agent,
//! and to its budget in the cluster.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_client::{Scope, Source};
use reprise_e2e::cluster::load_from_peer;
use reprise_e2e::content::{device_slot_bytes, key, large};
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillError, FillId, FillUpdate, PeerEvent};
use reprise_policy::{ArenaSlot, ByteSize, RegionId};
use reprise_transport::{EventSink, TcpSettings, TcpTransport, Transport, TransportEvent};
use serde_json::Value;

/// Four regions of 8 MiB. `team-a` may use 8 blocks of DRAM and 16 of NVMe, out of about 60; `team-b`
/// reserves two regions.
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

/// Returns the entry of a tenant in `/status`.
fn status(agent: &Agent, tenant: &str) -> Value {
    let page = agent.admin().json("/status");
    let tenants = page["tenants"].as_array().expect("a list");
    tenants.iter().find(|one| one["name"] == tenant).expect("the tenant is configured").clone()
}

fn used(agent: &Agent, tenant: &str, tier: &str) -> u64 {
    status(agent, tenant)[tier]["used"].as_u64().expect("a number")
}

#[test]
fn a_tenant_at_its_quotas_evicts_only_its_own_blocks_and_tenants_survive_a_kill() {
    let env = TestEnv::new();
    let mut agent = env.agent(&config());
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
    assert!(a.matches(&[0], Scope::Local).is_empty(), "the oldest block is evicted");

    agent.kill();
    agent.start();
    assert_eq!(used(&agent, "team-a", "nvme"), 16 * device_slot_bytes(&large()));
    assert_eq!(used(&agent, "team-b", "nvme"), 10 * device_slot_bytes(&large()));
    let (a, b) = (agent.engine_of(large(), "team-a"), agent.engine_of(large(), "team-b"));
    let of_a: Vec<u64> = (24..40).collect();
    assert_eq!(a.matches(&of_a, Scope::Local), vec![Source::OwnNvme; 16]);
    b.load_all(&of_b, &LoadParams::LOCAL);
    a.load_all(&of_a[..8], &LoadParams::LOCAL);
    assert!(b.matches(&of_a, Scope::Local).is_empty() && a.matches(&of_b, Scope::Local).is_empty());
}

#[test]
fn a_tenant_at_its_memory_quota_waits_instead_of_getting_an_error() {
    let env = TestEnv::new();
    let agent = env.agent(&config());
    let a = agent.engine_of(large(), "team-a");
    let held = a.reserve(8).expect("the quota allows 8 blocks");
    let more = a.client().reserve(1, Duration::from_millis(50)).expect("no error");
    assert!(more.is_empty());
    let b = agent.engine_of(large(), "team-b");
    assert_eq!(b.reserve(8).expect("other tenants are not affected").len(), 8);
    drop(held);
    assert_eq!(a.reserve(1).expect("released slots can be reserved").len(), 1);
}

/// Descriptors of the memory files of an agent's regions, as a process keeps them that received them once.
fn regions(agent: &mut Agent) -> Vec<File> {
    let folder = format!("/proc/{}/fd", agent.running().id());
    let entries =
        std::fs::read_dir(folder).expect("the agent runs").map(|entry| entry.expect("an entry").path());
    let is_region = |path: &PathBuf| {
        std::fs::read_link(path).is_ok_and(|to| to.to_string_lossy().starts_with("/memfd:reprise-region"))
    };
    entries.filter(is_region).map(|path| File::open(path).expect("a descriptor")).collect()
}

/// Number of files with any byte that is not zero.
fn with_data(files: &[File]) -> usize {
    let has_data = |file: &&File| {
        let mut bytes = vec![0; file.metadata().expect("its size").len() as usize];
        file.read_exact_at(&mut bytes, 0).expect("readable");
        bytes.iter().any(|byte| *byte != 0)
    };
    files.iter().filter(has_data).count()
}

#[test]
fn memory_passes_to_another_tenant_out_of_reach_of_old_descriptors_and_blocks_stay_on_nvme() {
    let env = TestEnv::new();
    // Four regions of 8 MiB, without quotas.
    let config = AgentConfig { extra: String::new(), ..config() };
    let mut agent = env.agent(&config);
    let (of_a, of_b): (Vec<u64>, Vec<u64>) = ((0..28).collect(), (1000..1024).collect());
    let a = agent.engine_of(large(), "team-a");
    for part in of_a.chunks(4) {
        a.save_durably(part);
    }
    let old = regions(&mut agent);
    assert_eq!(with_data(&old), old.len(), "the tenant fills the memory");
    drop(a);
    wait_until("the session has ended", PATIENCE, || {
        agent.admin().json("/status")["sessions"].as_array().is_some_and(Vec::is_empty)
    });

    let b = agent.engine_of(large(), "team-b");
    for part in of_b.chunks(4) {
        b.save_durably(part);
        b.load_all(part, &LoadParams::LOCAL);
    }
    b.load_all(&of_b, &LoadParams::LOCAL);
    assert!(agent.admin().counter("regions_renewed") >= 2, "{:?}", agent.admin().counters());
    let new = regions(&mut agent);
    assert!(with_data(&new) > 0, "descriptors of the new memory show its bytes");
    let renewed = agent.admin().counter("regions_renewed") as usize;
    let unchanged = old.len() - 2 * renewed;
    assert_eq!(with_data(&old), unchanged, "the writable and the read-only descriptor of each passed region");

    let a = agent.engine_of(large(), "team-a");
    assert_eq!(a.matches(&of_a, Scope::Local).len(), of_a.len(), "no durable block is lost");
    for part in of_a.chunks(4) {
        a.load_all(part, &LoadParams::LOCAL);
    }
    b.load_all(&of_b[..4], &LoadParams::LOCAL);
    assert_eq!(agent.admin().counter("corrupt_blocks"), 0);
}

/// Runs `reprise tenant` and returns its output, or its error.
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
fn a_cluster_budget_follows_the_load_and_is_never_exceeded() {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let slot = device_slot_bytes(&large());
    let (one, two) = (24 * slot, 60 * slot);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (a, b) = (env.agent(&config("a")), env.agent(&config("b")));
    let engines = [a.engine_of(large(), "team-a"), b.engine_of(large(), "team-a")];
    let held = |agent: &Agent| used(agent, "team-a", "nvme");
    let save = |engine: usize, from: u64, count: u64| {
        for start in (from..from + count).step_by(4) {
            engines[engine].save(&(start..start + 4).collect::<Vec<u64>>()).expect("the blocks are saved");
        }
    };
    // Without a budget, a node may use its whole pool.
    save(0, 0, 40);
    a.admin().wait_quiet(PATIENCE);
    assert_eq!(held(&a), 40 * slot);
    let refused = tenant(&member, &["set", "team-a", "--nvme-reserved", "10TiB", "--nvme", "20TiB"]);
    assert!(refused.expect_err("the nodes have less").contains("add"), "the error names the remedy");
    tenant(&member, &["set", "team-a", "--nvme", &one.to_string()]).expect("set");
    let limit = |agent: &Agent| status(agent, "team-a")["nvme"]["limit"].as_u64();
    wait_until("both nodes to apply their grants", PATIENCE, || {
        (held(&a) <= one && limit(&a)? + limit(&b)? <= one).then_some(())
    });

    // The budget moves to the second node as far as the first one does not use it.
    let mut from = 1000;
    wait_until("the budget to move to the node that saves", PATIENCE, || {
        save(1, from, 4);
        from += 4;
        // `b` is read first: bytes that `a` has released before its own read cannot be in the earlier value
        // of `b`.
        let of_b = held(&b);
        let of_a = held(&a);
        assert!(of_a + of_b <= one, "{of_a} and {of_b} of {one}");
        (of_b >= one / 3).then_some(())
    });
    let listed = tenant(&member, &["list"]).expect("the budgets are listed");
    let ledger = &listed["tenants"][0]["ledger"];
    assert!(ledger["granted"]["nvme"].as_u64().expect("a number") <= one, "{listed}");
    assert_eq!(ledger["nodes"].as_array().map(Vec::len), Some(2));

    // A higher budget makes room, and without a budget the node's own limits apply.
    tenant(&member, &["set", "team-a", "--nvme", &two.to_string()]).expect("set");
    wait_until("room for more", PATIENCE, || {
        save(1, from, 4);
        from += 4;
        (held(&a) + held(&b) > one + 4 * slot).then_some(())
    });
    tenant(&member, &["remove", "team-a"]).expect("removed");
    wait_until("the grants to end", PATIENCE, || limit(&b).is_none().then_some(()));
    assert!(
        tenant(&member, &["remove", "team-a"]).expect_err("the budget was removed").contains("no budget")
    );
}

#[test]
fn a_tenant_cannot_load_blocks_of_another_one_from_a_peer_even_with_their_keys() {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(32 << 20),
        pool: Some(ByteSize(160 << 20)),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (first, second) = (env.agent(&config("first")), env.agent(&config("second")));
    let numbers: Vec<u64> = (0..6).collect();
    let owner = first.engine_of(large(), "team-a");
    owner.save_durably(&numbers);
    // Three of them are on NVMe only.
    owner.trim();
    owner.load_all(&numbers[..3], &LoadParams::LOCAL);
    let (thief, colleague) = (second.engine_of(large(), "team-b"), second.engine_of(large(), "team-a"));
    wait_until("the directory has all blocks", PATIENCE, || {
        (colleague.matches(&numbers, Scope::Cluster).len() == numbers.len()).then_some(())
    });
    let outcomes = thief.load(&numbers, &LoadParams::CLUSTER).expect("the load ends");
    assert!(outcomes.iter().all(|outcome| !outcome.is_verified()), "{outcomes:?}");
    load_from_peer(&colleague, &numbers);
}

/// Requests a block from an agent as a node of this name; returns its last update.
fn fetch(name: &str, from: &str, tenant: &str) -> FillUpdate {
    let bytes = large().slot_bytes();
    let config = ArenaConfig { bytes, region_bytes: bytes, huge: HugePolicy::Never };
    let arena = Arc::new(Arena::new(&config).expect("memory for a block"));
    let (sender, updates) = channel();
    let sink: EventSink = Arc::new(move |event| {
        if let TransportEvent::Peer(PeerEvent::Fill { update, .. }) = event {
            // The test may have ended.
            let _ = sender.send(update);
        }
    });
    let settings = TcpSettings::new(([127, 0, 0, 1], 0).into(), name);
    let transport = TcpTransport::bind(settings, arena, sink).expect("a port of loopback is free");
    let into = ArenaSlot { region: RegionId(0), offset: 0, bytes };
    let request = FetchRequest {
        fetch: FetchId(1),
        tenant: tenant.parse().expect("a name"),
        layout: large(),
        deadline: PATIENCE,
        blocks: vec![FetchBlock { fill: FillId(1), key: key(1), into }],
    };
    transport.fetch(from, request).expect("the request is valid");
    loop {
        match updates.recv_timeout(PATIENCE).expect("the request ends") {
            FillUpdate::Layers { layers, .. } if layers < large().layers() => {}
            last => return last,
        }
    }
}

#[test]
fn a_node_gets_blocks_of_the_tenants_that_it_acts_for_only() {
    let env = TestEnv::new();
    env.allow("refused blocks to a node");
    let member = env.control_plane(Store::Memory);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(32 << 20),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (first, second) = (env.agent(&config("first")), env.agent(&config("second")));
    first.engine_of(large(), "team-a").save(&[1]).expect("the block is saved");
    let address = wait_until("the agents to know each other", PATIENCE, || {
        let page = second.admin().json("/status");
        let peer = page["peers"]["nodes"].as_array()?.iter().find(|peer| peer["name"] == "first")?.clone();
        peer["endpoints"][0]["address"].as_str().map(str::to_owned)
    });
    let refused = FillUpdate::Failed(FillError::Absent);
    assert_eq!(fetch("second", &address, "team-a"), refused, "it has no session of the tenant");
    assert_eq!(fetch("unknown", &address, "team-a"), refused, "it is not in the cluster");
    let session = second.engine_of(large(), "team-a");
    let whole = fetch("second", &address, "team-a");
    assert!(matches!(whole, FillUpdate::Layers { .. }), "{whole:?}");
    assert_eq!(fetch("second", &address, "team-b"), refused, "the block is not of this tenant");
    drop(session);
}
