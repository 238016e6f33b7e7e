//! Agents that drive an NVMe controller themselves. The controller is emulated, with a file as its namespace.

use rand::RngExt;
use reprise_client::{Scope, Source};
use reprise_e2e::content::large;
use reprise_e2e::control_plane::Store;
use reprise_e2e::seed::seeded;
use reprise_e2e::{Agent, AgentConfig, LoadParams, PATIENCE, TestEnv, wait_until};
use reprise_policy::ByteSize;

/// Exit code of an agent whose device cannot be used.
const DEVICE: i32 = 2;

/// Number of kills of the agent.
const KILLS: usize = 4;

/// Returns an agent's configuration with an emulated controller of 128 MiB.
fn emulated(env: &TestEnv, node: &str) -> AgentConfig {
    let file = env.folder().join(format!("{node}.nvme"));
    let device = format!("[[pool.devices]]\nemulated = \"{}\"\nbytes = \"128MiB\"", file.display());
    AgentConfig {
        arena: ByteSize(64 << 20),
        region: ByteSize(32 << 20),
        pool: None,
        extra: device,
        ..AgentConfig::named(node)
    }
}

fn assert_states_the_emulation(agent: &Agent) {
    let device = agent.admin().json("/status")["devices"][0].clone();
    assert_eq!(device["io_engine"], "user-nvme-emulated", "{device}");
    let controller = &device["controller"];
    assert_eq!(controller["emulated"], true, "{device}");
    assert_eq!((&controller["namespace"], &controller["queue_pairs"]), (&1.into(), &64.into()), "{device}");
    assert!(controller["serial"].as_str().is_some_and(|serial| serial.starts_with("EMU-")), "{device}");
    assert_eq!(
        agent.admin().metric("reprise_agent_device_info", "io_engine=\"user-nvme-emulated\"") as u64,
        1
    );
}

#[test]
fn blocks_on_an_emulated_controller_survive_kills_and_are_served_to_a_peer() {
    let env = TestEnv::new();
    env.require("this NVMe controller is EMULATED");
    for words in [
        "peer connection lost",
        "cannot fetch blocks from a peer",
        "node is silent",
        "registered from another address",
    ] {
        env.allow(words);
    }
    let plane = env.control_plane(Store::Embedded);
    let member = vec![plane.address().to_owned()];
    let config = AgentConfig { control_plane: member.clone(), ..emulated(&env, "emulated") };
    let mut agent = env.agent(&config);
    let peer = AgentConfig { control_plane: member, pool: Some(ByteSize(96 << 20)), ..config.clone() };
    let peer = env.agent(&AgentConfig { node: "peer".to_owned(), extra: String::new(), ..peer });
    assert_states_the_emulation(&agent);
    let mut rng = seeded("user_nvme");
    let mut durable: Vec<u64> = Vec::new();
    for round in 0..KILLS as u64 {
        let engine = agent.engine(large());
        let new: Vec<u64> = (100 * round..100 * round + rng.random_range(2..8)).collect();
        engine.save_durably(&new);
        durable.extend(&new);
        engine.trim();
        assert_eq!(engine.load_all(&durable, &LoadParams::LOCAL), vec![Source::OwnNvme; durable.len()]);
        // These may be on their way to the device when the agent is killed.
        let committed = engine.save(&[100 * round + 50, 100 * round + 51]);
        committed.unwrap_or_else(|error| panic!("cannot save: {error}"));
        std::thread::sleep(std::time::Duration::from_millis(rng.random_range(0..30)));
        agent.kill();
        agent.start();
        let found = agent.engine(large()).matches(&durable, Scope::Local);
        assert_eq!(found.len(), durable.len(), "durable blocks are found after the kill");
    }
    let reader = peer.engine(large());
    wait_until("the directory has all blocks", PATIENCE, || {
        (reader.matches(&durable, Scope::Cluster).len() == durable.len()).then_some(())
    });
    let (first, others) = durable.split_first().expect("each round saves blocks");
    // The peer learns the address of the restarted agent a little later.
    wait_until("the peer reaches the agent", PATIENCE, || {
        reader.load(&[*first], &LoadParams::CLUSTER).ok()?[0].is_verified().then_some(())
    });
    let sources = reader.load_all(others, &LoadParams::CLUSTER);
    assert!(sources.iter().all(|source| *source == Source::PeerNvme), "{sources:?}");
    assert_states_the_emulation(&agent);
    agent.stop();
}

#[test]
fn a_controller_that_cannot_be_opened_is_refused_with_the_remedy() {
    let env = TestEnv::new();
    env.allow("cannot use pool device");
    for (device, words) in [
        (
            "pci = \"ffff:ff:1f.7\"",
            ["pci:ffff:ff:1f.7", "no function is at the PCI address", "reprise doctor"],
        ),
        (
            "emulated = \"/nowhere/disk\"\nbytes = \"64MiB\"",
            ["emulated:/nowhere/disk", "opening", "No such file"],
        ),
    ] {
        let extra = format!("[[pool.devices]]\n{device}");
        let config = AgentConfig { pool: None, extra, ..AgentConfig::named("node") };
        env.refusal(&config).assert_reports(DEVICE, &words);
    }
}
