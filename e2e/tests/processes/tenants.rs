//! Several tenants: each keeps to its quotas on a node and to its own blocks, also after a kill of the agent,
//! and to its budget in the cluster.

use std::process::Command;
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::Duration;

use reprise_buffers::{Arena, ArenaConfig, HugePolicy};
use reprise_client::{Client, ConnectOptions, LoadRequest, Scope, Source};
use reprise_e2e::cli::Events;
use reprise_e2e::cluster::load_from_peer;
use reprise_e2e::content::{device_slot_bytes, key, large};
use reprise_e2e::control_plane::Store;
use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, ControlPlane, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_policy::peer::{FetchBlock, FetchId, FetchRequest, FillError, FillId, FillUpdate, PeerEvent};
use reprise_policy::{ArenaSlot, BlockKey, ByteSize, Layout, RegionId, TenantName, TenantSalt, prefix_hash};
use reprise_testkit::configuration;
use reprise_testkit::engine::{self as reference, EnginePath, EngineSettings};
use reprise_testkit::model::{self, SCALE_DEFAULT};
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

/// Returns the session of the reference engine of a tenant with an agent.
pub(crate) fn reference_engine(agent: &Agent, tenant: &TenantName) -> reference::Engine {
    let socket = agent.files().socket.clone();
    configuration::provide_salt(&socket, tenant).expect("the folder is the test's");
    let path = EnginePath::Arena;
    let settings = EngineSettings { socket, layout: prompts(), tenant: tenant.clone(), path };
    reference::Engine::connect(&settings).expect("a session")
}

pub(crate) fn prompts() -> Layout {
    model::llama_3_8b_scaled(SCALE_DEFAULT).expect("valid")
}

#[test]
fn a_tenant_that_knows_prompts_and_name_of_another_one_finds_none_of_its_blocks() {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let config = |name: &str| AgentConfig {
        arena: ByteSize(32 << 20),
        control_plane: vec![member.address().to_owned()],
        ..AgentConfig::named(name)
    };
    let (mut first, second) = (env.agent(&config("first")), env.agent(&config("second")));
    let [attacker, victim] = ["team-a", "team-b"].map(|name| name.parse::<TenantName>().expect("a name"));
    let prompt: Vec<u64> = (1..=6).collect();
    let mut owner = reference_engine(&first, &victim);
    assert_eq!(owner.run(&prompt).expect("served").saved, 6);
    assert_eq!(owner.await_durable().expect("durable"), 6);

    let stated = reference::namespace(&prompts());
    let keys = reference::chain_keys(&stated.of_tenant(Some(&configuration::test_salt(&victim))), &prompt);
    let guesses = [
        // The key derivation of tenants without a salt, and those with what the attacker knows in place of the salt.
        stated,
        stated.of_tenant(Some(&TenantSalt::new(prefix_hash::none_hash("another salt")))),
        stated.of_tenant(Some(&configuration::test_salt(&attacker))),
    ];
    let attack = |agent: &Agent| {
        configuration::provide_salt(&agent.files().socket, &attacker).expect("the folder is the test's");
        let options = ConnectOptions::new(&agent.files().socket, stated, prompts());
        let client = Client::connect(options.tenant(attacker.clone())).expect("a session");
        // Even the keys themselves, which only the salt yields, find nothing in a session of another tenant.
        let guessed = guesses.iter().map(|namespace| reference::chain_keys(namespace, &prompt));
        for keys in guessed.chain([keys.clone()]) {
            assert!(client.match_keys(&keys, Scope::Local).expect("answered").is_empty());
            let request = LoadRequest { deadline: PATIENCE, ..LoadRequest::new(keys) };
            let load = client.load(&request).expect("answered");
            assert!(load.blocks().iter().all(|block| !block.is_ok()), "{:?}", load.blocks());
        }
    };
    // Sessions of the victim hit the blocks, also on another node and after a restart of the agent.
    let hit = |agent: &Agent| {
        let mut engine = reference_engine(agent, &victim);
        let chain = keys.clone();
        let client = Client::connect(
            ConnectOptions::new(&agent.files().socket, stated, prompts()).tenant(victim.clone()),
        )
        .expect("a session");
        wait_until("the directory has the blocks", PATIENCE, || {
            (client.match_keys(&chain, Scope::Cluster).expect("answered").len() == chain.len()).then_some(())
        });
        let outcome = engine.run(&prompt).expect("served");
        let hits = outcome.hits;
        let found = hits.own_dram + hits.own_nvme + hits.peer_dram + hits.peer_nvme;
        assert_eq!((found, outcome.saved, outcome.mismatches), (6, 0, 0), "{outcome:?}");
    };
    hit(&first);
    attack(&first);
    hit(&second);
    attack(&second);
    // A router that reads events finds the prompt with the salt only.
    let events = Events::start(member.address(), &[]);
    let lines = events.read_until("current");
    events.end();
    let has = |key: &BlockKey| lines.iter().any(|line| line["key"] == key.to_string());
    assert!(keys.iter().all(has), "{lines:?}");
    for namespace in &guesses {
        assert!(!reference::chain_keys(namespace, &prompt).iter().any(has), "{lines:?}");
    }
    drop(owner);
    env.allow("peer connection lost");
    env.allow("node is silent");
    env.allow("live node registered from another address");
    first.kill();
    first.start();
    hit(&first);
    attack(&first);
}
