//! `reprise admin` against a running agent: by tokens, keys, session and namespace.

use std::path::Path;
use std::process::{Command, Output};

use reprise_e2e::process::binary;
use reprise_e2e::{Agent, AgentConfig, PATIENCE, TestEnv, wait_until};
use reprise_policy::prefetch::{HINT_VERSION, Lookahead, LookaheadRequest};
use reprise_policy::{BlockKey, ByteSize, TenantName};
use reprise_testkit::engine::{self, Engine, EnginePath, EngineSettings};
use reprise_testkit::model::{self, SCALE_DEFAULT, hex};
use reprise_testkit::trace::{TOKENS_PER_HASH_ID, TraceRequest};
use serde_json::Value;

/// Hash ids of the prompt: eight blocks of 512 tokens.
pub(super) const PROMPT: std::ops::Range<u64> = 0..8;

/// Further blocks of the same chain.
const REST: std::ops::Range<u64> = 8..12;

pub(super) fn agent(env: &TestEnv) -> Agent {
    let extra = "[retention]\npermille = 500\nttl_max = \"1m\"\n".to_owned();
    env.agent(&AgentConfig { arena: ByteSize(64 << 20), extra, ..AgentConfig::named("node") })
}

/// Saves the blocks of the whole chain, with the reference engine.
pub(super) fn save(agent: &Agent) {
    let settings = EngineSettings {
        socket: agent.files().socket.clone(),
        layout: model::llama_3_8b_scaled(SCALE_DEFAULT).expect("valid"),
        tenant: TenantName::default_tenant(),
        path: EnginePath::Arena,
    };
    let mut engine = Engine::connect(&settings).expect("connects");
    let chain: Vec<u64> = (PROMPT.start..REST.end).collect();
    engine.run(&chain).expect("runs");
    assert_eq!(engine.await_durable().expect("durable"), chain.len() as u64);
}

/// Writes the tokens of the prompt, and a part of a block behind them.
fn write_tokens(path: &Path) {
    let mut tokens = [0; TOKENS_PER_HASH_ID];
    let mut all = Vec::new();
    for hash_id in PROMPT {
        TraceRequest::block_tokens(hash_id, &mut tokens);
        all.extend(tokens.iter().map(u32::to_string));
    }
    all.push("5".to_owned());
    std::fs::write(path, all.join(",")).expect("written");
}

fn output(agent: &Agent, arguments: &[&str]) -> Output {
    let mut command = Command::new(binary("reprise"));
    command.args(["--json", "admin"]).args(arguments).arg("--socket").arg(&agent.files().socket);
    command.output().expect("reprise can be run")
}

fn admin(agent: &Agent, arguments: &[&str]) -> Value {
    let output = output(agent, arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one object")
}

fn error(agent: &Agent, arguments: &[&str]) -> String {
    let output = output(agent, arguments);
    assert!(!output.status.success(), "{arguments:?} is refused");
    String::from_utf8(output.stderr).expect("text")
}

/// Numbers of blocks: affected, unchanged, refused, absent.
fn counts(report: &Value) -> [u64; 4] {
    ["affected", "unchanged", "refused", "absent"].map(|name| report[name].as_u64().expect("a number"))
}

#[test]
fn commands_pin_demote_prefetch_and_delete_blocks_and_report_counts() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    let file = env.folder().join("tokens");
    write_tokens(&file);
    let tokens = ["--tokens-file", file.to_str().expect("text")];
    let run = |action: &[&str]| admin(&agent, &[action, &tokens[..]].concat());

    let pinned = run(&["pin", "--ttl", "30s"]);
    assert_eq!((counts(&pinned), pinned["node"].as_str()), ([8, 0, 0, 0], Some("node")));
    assert_eq!(pinned["retention"]["blocks"], 8);
    let status = agent.admin().json("/status");
    assert_eq!(status["tenants"][0]["retention"]["blocks"], 8, "{status}");
    assert_eq!(agent.admin().metric("reprise_agent_tenant_retention_blocks", "default"), 8.0);

    let demoted = admin(&agent, &["demote", "--all-blocks"]);
    assert_eq!((counts(&demoted), demoted["pinned"].as_u64()), ([4, 0, 8, 0], Some(8)));
    assert_eq!(counts(&run(&["unpin"])), [8, 0, 0, 0]);
    assert_eq!(counts(&run(&["demote"])), [8, 0, 0, 0]);
    assert_eq!(agent.admin().counter("dram_blocks"), 0);

    assert_eq!(counts(&run(&["prefetch"])), [8, 0, 0, 0]);
    agent.admin().wait_for("dram_blocks", PATIENCE, |blocks| blocks == 8);
    assert_eq!(counts(&run(&["prefetch"])), [0, 8, 0, 0]);

    assert_eq!(counts(&run(&["delete"])), [8, 0, 0, 0]);
    assert_eq!(counts(&run(&["delete"])), [0, 0, 0, 8]);
    assert_eq!(counts(&admin(&agent, &["delete", "--all-blocks"])), [4, 0, 0, 0]);
    assert_eq!((agent.admin().counter("dram_blocks"), agent.admin().counter("nvme_blocks")), (0, 0));
}

#[test]
fn pins_expire_by_themselves() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    assert_eq!(counts(&admin(&agent, &["pin", "--ttl", "200ms", "--all-blocks"])), [12, 0, 0, 0]);
    agent.admin().wait_for("retention_expired_blocks", PATIENCE, |blocks| blocks == 12);
    assert_eq!(agent.admin().counter("retention_pinned_blocks"), 0);
}

#[test]
fn session_and_its_namespace_select_the_blocks_of_an_engine() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    admin(&agent, &["demote", "--all-blocks"]);
    let layout = model::llama_3_8b_scaled(SCALE_DEFAULT).expect("valid");
    let chain: Vec<u64> = PROMPT.collect();
    let namespace = engine::namespace(&layout);
    let keys: Vec<BlockKey> = engine::chain_keys(&namespace, &chain);
    let options = reprise_client::ConnectOptions::new(&agent.files().socket, namespace, layout);
    let client = reprise_client::Client::connect(options.client_name("waiting")).expect("connects");
    let waiting = LookaheadRequest { request: 1, iterations: 60, confidence: 1000, keys: keys.clone() };
    let iteration = std::time::Duration::from_millis(20);
    let hint =
        Lookahead { version: HINT_VERSION, iteration, requests: vec![waiting], ..Lookahead::default() };
    client.report_lookahead(&hint).expect("accepted");

    let sessions = agent.admin().json("/status")["sessions"].clone();
    let sessions = sessions.as_array().expect("a list");
    let own = sessions.iter().find(|session| session["client"] == "waiting").expect("the session");
    assert_eq!(own["layout"].as_str(), Some(hex(&layout.encode()).as_str()));
    let number = own["session"].as_u64().expect("a number").to_string();
    assert_eq!(counts(&admin(&agent, &["pin", "--ttl", "30s", "--session", &number])), [8, 0, 0, 0]);

    // The namespace and layout of the status page, as for any engine.
    let (namespace, encoded) =
        (own["namespace"].as_str().expect("text"), own["layout"].as_str().expect("text"));
    let key = keys[0].to_string();
    let one = ["unpin", "--key", &key, "--namespace", namespace, "--layout", encoded];
    assert_eq!(counts(&admin(&agent, &one)), [1, 0, 0, 0]);
    wait_until("one pin has ended", PATIENCE, || {
        (agent.admin().counter("retention_pinned_blocks") == 7).then_some(())
    });
}

#[test]
fn invalid_commands_are_refused_with_the_remedy() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    for (arguments, words) in [
        (&["pin", "--ttl", "2m", "--all-blocks"][..], "retention.ttl_max"),
        (&["pin", "--ttl", "0s", "--all-blocks"], "retention.ttl_max"),
        (&["prefetch", "--session", "999"], "session 999 of this tenant does not exist"),
        (&["delete", "--tokens", "1,2,3"], "less than one block"),
        (&["prefetch", "--from-peers", "--all-blocks"], "--from-peers needs keys"),
        (&["delete"], "required"),
        (&["delete", "--key", "12"], "32 hexadecimal digits"),
    ] {
        let text = error(&agent, arguments);
        assert!(text.contains(words), "{arguments:?}: {text}");
    }
    assert_eq!(agent.admin().counter("nvme_blocks"), 12, "nothing was deleted");
}

#[test]
fn other_namespace_with_the_same_layout_deletes_nothing() {
    let env = TestEnv::new();
    let agent = agent(&env);
    save(&agent);
    let layout = hex(&model::llama_3_8b_scaled(SCALE_DEFAULT).expect("valid").encode());
    let other = "77".repeat(32);
    let delete = ["delete", "--all-blocks", "--namespace", &other, "--layout", &layout];
    assert!(error(&agent, &delete).contains("another namespace"));
    assert_eq!(agent.admin().counter("nvme_blocks"), 12);
    assert_eq!(counts(&admin(&agent, &["delete", "--all-blocks"])), [12, 0, 0, 0]);
}
