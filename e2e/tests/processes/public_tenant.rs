//! The public tenant: other tenants read its blocks, on its node and from other nodes, and change nothing of it.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;

use reprise_client::{
    BlockAction, BlockCommand, BlockSelection, Client, CommitOptions, CommitStatus, ConnectOptions,
    LoadRequest, MatchOptions, Scope,
};
use reprise_e2e::control_plane::Store;
use reprise_e2e::{Agent, AgentConfig, PATIENCE, TestEnv, logs, wait_until};
use reprise_policy::session::Ranks;
use reprise_policy::{BlockKey, ByteSize, TenantName};
use reprise_testkit::configuration;
use reprise_testkit::engine::{self as reference, RequestOutcome};

use crate::processes::tenants::{prompts, reference_engine};

const DECLARATION: &str = "[[tenants]]\nname = \"prompts\"\npublic = true\n";

/// Log line of an agent that serves no block to a node of another tenant.
const REFUSED: &str = "refused blocks to a node that has no session and no blocks of their tenant";

fn tenant(name: &str) -> TenantName {
    name.parse().expect("a name")
}

/// Returns what a new engine of a tenant finds and saves of a prompt.
fn run(agent: &Agent, name: &str, prompt: &[u64]) -> RequestOutcome {
    // Readers need the salt of the public tenant on their node.
    configuration::provide_salt(&agent.files().socket, &tenant("prompts")).expect("the folder is the test's");
    let outcome = reference_engine(agent, &tenant(name)).run(prompt).expect("served");
    assert_eq!((outcome.mismatches, outcome.errors, outcome.lost), (0, 0, 0), "{outcome:?}");
    outcome
}

/// Hits on this node, hits on peers, and saved blocks.
fn summary(outcome: &RequestOutcome) -> (u64, u64, u64) {
    let hits = &outcome.hits;
    (hits.own_dram + hits.own_nvme, hits.peer_dram + hits.peer_nvme, outcome.saved)
}

fn client(agent: &Agent, name: &str) -> Client {
    let stated = reference::namespace(&prompts());
    configuration::provide_salt(&agent.files().socket, &tenant(name)).expect("the folder is the test's");
    let options = ConnectOptions::new(&agent.files().socket, stated, prompts()).tenant(tenant(name));
    Client::connect(options).expect("a session")
}

fn chain(name: &str, prompt: &[u64]) -> Vec<BlockKey> {
    let stated = reference::namespace(&prompts());
    reference::chain_keys(&stated.of_tenant(Some(&configuration::test_salt(&tenant(name)))), prompt)
}

fn with_inputs(prompt: &[u64]) -> MatchOptions {
    MatchOptions { scope: Scope::Cluster, position: Some(0), inputs: reference::chain_inputs(prompt) }
}

/// Names of the public tenants on the status page.
fn public_tenants(agent: &Agent) -> Vec<String> {
    let page = agent.admin().json("/status");
    let tenants = page["tenants"].as_array().expect("a list").iter();
    let public = tenants.filter(|tenant| tenant["public"] == true);
    public.map(|tenant| tenant["name"].as_str().expect("a name").to_owned()).collect()
}

fn imported(agent: &Agent) -> u64 {
    agent.admin().counter("imported_blocks")
}

#[test]
fn public_prompt_is_read_by_other_tenants_until_it_is_withdrawn() {
    let env = TestEnv::new();
    let member = env.control_plane(Store::Memory);
    let config = |name: &str, extra: &str| AgentConfig {
        arena: ByteSize(64 << 20),
        control_plane: vec![member.address().to_owned()],
        extra: extra.to_owned(),
        ..AgentConfig::named(name)
    };
    let (mut first, second) =
        (env.agent(&config("first", DECLARATION)), env.agent(&config("second", DECLARATION)));
    let prompt: Vec<u64> = (1..=6).collect();
    assert_eq!(summary(&run(&first, "prompts", &prompt)), (0, 0, 6), "the owner saves it");
    first.admin().wait_quiet(PATIENCE);
    assert_eq!(public_tenants(&first), ["prompts"]);

    // On the node, in front of an own question. The second request finds the reader's own copies.
    let question: Vec<u64> = (1..=8).collect();
    assert_eq!(summary(&run(&first, "team-a", &question)), (6, 0, 2));
    assert_eq!(imported(&first), 6);
    assert_eq!(summary(&run(&first, "team-a", &question)), (8, 0, 0));
    assert_eq!(imported(&first), 6);

    // From the device.
    let owner = client(&first, "prompts");
    assert_eq!(owner.public_tenant(), None, "its own blocks need no copies");
    first.admin().wait_quiet(PATIENCE);
    owner.trim().expect("trimmed");
    assert_eq!(summary(&run(&first, "team-b", &prompt)), (6, 0, 0));
    assert_eq!(imported(&first), 12);

    // From the other node.
    configuration::provide_salt(&second.files().socket, &tenant("prompts"))
        .expect("the folder is the test's");
    let reader = client(&second, "team-c");
    assert_eq!(reader.public_tenant(), Some("prompts"));
    let own = chain("team-c", &prompt);
    wait_until("the directory has the blocks", PATIENCE, || {
        let sources = reader.match_keys(&own, with_inputs(&prompt)).expect("answered");
        (sources.len() == 6).then_some(())
    });
    assert!(reader.match_keys(&own, Scope::Cluster).expect("answered").is_empty(), "without inputs");
    assert_eq!(summary(&run(&second, "team-c", &prompt)), (0, 6, 0));
    assert_eq!(imported(&second), 6);

    // Other tenants stay invisible, also with the same calls and the inputs of their prompt.
    let private: Vec<u64> = (101..=104).collect();
    assert_eq!(summary(&run(&first, "team-d", &private)), (0, 0, 4));
    let reader = client(&first, "team-a");
    let guessed = chain("team-a", &private);
    assert!(reader.match_keys(&guessed, with_inputs(&private)).expect("answered").is_empty());
    let load = LoadRequest { inputs: reference::chain_inputs(&private), ..LoadRequest::new(guessed) };
    assert!(reader.load(&load).expect("answered").blocks().iter().all(|block| !block.is_ok()));

    // Even with the public keys, which it cannot derive, a reader changes nothing.
    let public = chain("prompts", &prompt);
    assert!(reader.match_keys(&public, Scope::Cluster).expect("answered").is_empty());
    let mut slots = reader.reserve(6, PATIENCE).expect("answered");
    slots.iter_mut().for_each(|slot| slot.checksum_written().expect("checksums of any content"));
    let items = slots.into_iter().zip(public.clone()).collect();
    let commit = reader.commit(items, CommitOptions::default()).expect("answered");
    assert!(commit.statuses.iter().all(|status| *status == CommitStatus::BadItem), "{commit:?}");
    for action in [BlockAction::Delete, BlockAction::Demote] {
        let selection = BlockSelection::Keys(public.clone());
        let report = reader.manage_blocks(&BlockCommand { action, selection, ranks: Ranks::Own });
        let report = report.expect("answered");
        assert_eq!((report.counts.affected, report.counts.absent), (0, 6), "{action:?}: {report:?}");
    }
    assert_eq!(owner.match_keys(&public, Scope::Local).expect("answered").len(), 6);
    drop((owner, reader));

    // A reader of the other node, where the tenant is still public, gets nothing from this one.
    env.allow("peer connection lost");
    env.allow("node is silent");
    env.allow("cannot fetch blocks from a peer");
    env.allow("live node registered from another address");
    env.require(REFUSED);
    first.stop();
    let withdrawn = config("first", "[[tenants]]\nname = \"prompts\"\n").text(first.files());
    std::fs::write(&first.files().config, withdrawn).expect("written");
    first.start();
    assert_eq!(client(&first, "team-e").public_tenant(), None);
    assert_eq!(summary(&run(&first, "team-e", &prompt)), (0, 0, 6));
    assert_eq!(imported(&first), 0);
    assert_eq!(summary(&run(&first, "prompts", &prompt)), (6, 0, 0), "the owner has its blocks");
    let before = imported(&second);
    let own = chain("team-f", &prompt);
    let reader = client(&second, "team-f");
    wait_until("the directory has the blocks again", PATIENCE, || {
        let sources = reader.match_keys(&own, with_inputs(&prompt)).expect("answered");
        (sources.len() == 6).then_some(())
    });
    // Until the connection to the restarted agent is open, a load fails without a refusal.
    let load = LoadRequest { inputs: reference::chain_inputs(&prompt), ..LoadRequest::new(own) };
    wait_until("the node refuses the blocks", PATIENCE, || {
        let load = reader.load(&load).expect("answered");
        assert!(load.blocks().iter().all(|block| !block.is_ok()), "{:?}", load.blocks());
        logs::read(&first.files().log).contains(REFUSED).then_some(())
    });
    assert_eq!(imported(&second), before);

    // The owner gets the same blocks from there.
    let owner = client(&second, "prompts");
    wait_until("the directory has the blocks of the owner", PATIENCE, || {
        let sources = owner.match_keys(&public, Scope::Cluster).expect("answered");
        (sources.len() == 6).then_some(())
    });
    assert_eq!(summary(&run(&second, "prompts", &prompt)), (0, 6, 0));
}

#[test]
fn blocks_of_a_public_tenant_with_a_key_are_not_copied_for_other_tenants() {
    let env = TestEnv::new();
    env.require("sessions of this node cannot read blocks of the public tenant");
    let (keys, file) = (env.folder().join("keys"), env.folder().join("keys/prompts"));
    fs::create_dir_all(&keys).expect("the folder is the test's");
    fs::write(&file, "1".repeat(64)).expect("the folder is the test's");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("the file is the test's");
    let extra = format!("[encryption]\nkeys = \"{}\"\n{DECLARATION}", keys.display());
    let agent = env.agent(&AgentConfig { arena: ByteSize(64 << 20), extra, ..AgentConfig::named("node") });
    let prompt: Vec<u64> = (1..=6).collect();
    assert_eq!(summary(&run(&agent, "prompts", &prompt)), (0, 0, 6));
    assert_eq!(client(&agent, "team-a").public_tenant(), None);
    assert_eq!(summary(&run(&agent, "team-a", &prompt)), (0, 0, 6), "the reader saves its own blocks");
    assert_eq!(imported(&agent), 0);
}
