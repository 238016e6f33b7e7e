//! One agent and its interfaces: its ports, its socket, the layers of a load, and responses to unknown
//! requests.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use prost::Message;
use reprise_client::{ClientError, LoadRequest, Scope, Source};
use reprise_e2e::content::{keys, layout_of, small};
use reprise_e2e::engine::object_bytes;
use reprise_e2e::process::binary;
use reprise_e2e::raw::RawSession;
use reprise_e2e::{AgentConfig, LoadParams, PATIENCE, TestEnv};
use reprise_policy::ByteSize;
use reprise_proto::local::{self, FailureKind, request, response};
use reprise_testkit::kv_function::mismatches;

fn numbers(range: std::ops::Range<u64>) -> Vec<u64> {
    range.collect()
}

fn without_pool() -> AgentConfig {
    AgentConfig { pool: None, ..AgentConfig::named("node") }
}

#[test]
fn prints_the_default_configuration_and_nothing_else() {
    let output = Command::new(binary("reprise-agent"))
        .arg("--print-default-config")
        .output()
        .expect("the agent can be run");
    assert!(output.status.success() && output.stderr.is_empty());
    let text = String::from_utf8(output.stdout).expect("text");
    assert!(text.contains("[arena]") && text.contains("segment_bytes"), "{text}");
}

#[test]
fn a_running_agent_is_healthy_and_ready_and_reports_its_status() {
    let (_env, agent) = TestEnv::with_agent("node");
    for (path, body) in [("/healthz", "ok\n"), ("/readyz", "ready\n")] {
        assert_eq!(agent.admin().get(path).expect("a response"), (200, body.to_owned()));
    }
    let engine = agent.engine(small());
    let status = agent.admin().json("/status");
    assert_eq!(status["node"]["name"], "node");
    assert_eq!(status["arena"]["bytes"], 16 << 20);
    assert_eq!(status["devices"][0]["formatted"], true);
    assert_eq!(status["sessions"][0]["client"], "e2e");
    assert_eq!(status["sessions"][0]["pid"], std::process::id());
    assert_eq!(status["controlplane"]["stand_alone"], true);
    drop(engine);
    agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 0);
}

#[test]
fn metrics_count_the_work_of_engines() {
    let (_env, agent) = TestEnv::with_agent("node");
    let (engine, blocks) = (agent.engine(small()), numbers(0..20));
    engine.save_durably(&blocks);
    engine.load_all(&blocks, &LoadParams::LOCAL);
    assert_eq!(engine.trim(), 20);
    engine.load_all(&blocks, &LoadParams::LOCAL);
    let (code, text) = agent.admin().get("/metrics").expect("a response");
    assert_eq!(code, 200);
    for line in [
        "reprise_agent_committed_blocks_total 20",
        "reprise_agent_hit_blocks_own_dram_total 20",
        "reprise_agent_hit_blocks_own_nvme_total 20",
        "reprise_agent_nvme_blocks 20",
        "reprise_agent_stored_blocks_total 20",
        "reprise_agent_phase_seconds_count{phase=\"commit\"} 1",
        "reprise_agent_phase_seconds_count{phase=\"load_first_layer\"} 2",
        "reprise_agent_phase_seconds_count{phase=\"load_total\"} 2",
        "reprise_agent_device_lost{device=\"0\"} 0",
        "reprise_agent_peer_requests_total 0",
        "reprise_agent_directory_connected 0",
    ] {
        assert!(text.lines().any(|found| found == line), "no line '{line}' in:\n{text}");
    }
}

#[test]
fn a_match_finds_blocks_in_dram_or_on_nvme_and_ends_at_the_first_missing_block() {
    let (_env, agent) = TestEnv::with_agent("node");
    let (engine, blocks) = (agent.engine(small()), numbers(0..50));
    engine.save_durably(&blocks);
    assert_eq!(engine.matches(&numbers(0..51), Scope::Local), vec![Source::OwnDram; 50]);
    assert_eq!(engine.load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnDram; 50]);
    engine.trim();
    assert_eq!(engine.matches(&blocks, Scope::Local), vec![Source::OwnNvme; 50]);
    assert_eq!(engine.load_all(&blocks, &LoadParams::LOCAL), vec![Source::OwnNvme; 50]);
    assert_eq!(agent.admin().counter("device_fills"), 50);
}

#[test]
fn layers_arrive_in_order_and_are_readable_when_announced() {
    let env = TestEnv::new();
    let config = AgentConfig { arena: ByteSize(32 << 20), ..AgentConfig::named("node") };
    let agent = env.agent(&config);
    // 32 layers of 2 × 16 KiB: 1 MiB a block.
    let layout = layout_of(32, 4);
    let (engine, blocks) = (agent.engine(layout), numbers(0..12));
    engine.save_durably(&blocks);
    engine.trim();
    let keys = keys(&blocks);
    let request = LoadRequest { read_bytes: 32 << 10, scope: Scope::Local, ..LoadRequest::new(keys.clone()) };
    let load = engine.client().load(&request).expect("a response");
    let mut object = vec![0; object_bytes(&layout)];
    let mut announced = 0;
    for layer in 0..layout.layers() {
        let ready = load.wait_layer(layer, PATIENCE).expect("the layer").layers;
        assert!(ready > layer && ready >= announced, "the number of ready layers only grows");
        announced = ready;
        for (block, key) in keys.iter().enumerate() {
            for index in [2 * layer, 2 * layer + 1] {
                load.copy_object(block, index, &mut object).expect("a verified copy");
                assert_eq!(mismatches(&key.0, index, &object), 0);
            }
        }
    }
}

#[test]
fn rejects_a_load_that_exceeds_a_frame_with_the_maximum_number_of_blocks() {
    let env = TestEnv::new();
    let agent = env.agent(&without_pool());
    // 960 objects a block.
    let engine = agent.engine(layout_of(480, 1));
    let load = |count| engine.client().load(&LoadRequest::new(keys(&numbers(0..count))));
    let error = load(4252).expect_err("the response would exceed a frame");
    assert!(matches!(&error, ClientError::BadRequest(text) if text.contains("at most 4251")), "{error}");
    load(4251).expect("a response with misses only");
}

#[test]
fn rejects_an_unknown_request_and_closes_a_session_with_malformed_ones() {
    let env = TestEnv::new();
    env.allow("session closed");
    let agent = env.agent(&without_pool());
    let bystander = agent.engine(small());
    let mut later = RawSession::with_handshake(&agent.files().socket, &small());
    // Request 9 with field 99 as its body.
    later.send_message(&[0x08, 0x09, 0x9a, 0x06, 0x00]);
    let (id, kind, message) = later.refusal();
    assert_eq!((id, kind), (9, FailureKind::BadRequest), "{message}");
    later.send(10, request::Body::Stats(local::Stats {}));
    let response = later.receive();
    assert!(matches!(response, Some(local::Response { id: 10, body: Some(response::Body::Stats(_)) })));
    for malformed in [vec![0xff; 64], local::Request { id: 0, body: None }.encode_to_vec()] {
        let mut session = RawSession::with_handshake(&agent.files().socket, &small());
        session.send_message(&malformed);
        let (id, kind, message) = session.refusal();
        assert_eq!((id, kind), (0, FailureKind::BadRequest), "{message}");
        assert!(session.is_closed());
    }
    bystander.client().stats().expect("the other session continues");
}

#[test]
fn rejects_a_user_that_is_not_listed() {
    let env = TestEnv::new();
    env.require("session rejected");
    let agent = env.agent(&AgentConfig { session: "allow_uids = [4242]".to_owned(), ..without_pool() });
    let mut session = RawSession::connect(&agent.files().socket);
    let (_, kind, message) = session.refusal();
    assert_eq!(kind, FailureKind::BadRequest);
    assert!(message.contains("allow_uids"), "{message}");
    assert!(session.is_closed());
    let error = agent.connect(small()).expect_err("the user is not listed");
    assert!(matches!(error, ClientError::AgentLost { .. } | ClientError::BadRequest(_)), "{error}");
    assert_eq!(agent.admin().counter("sessions"), 0);
}

#[test]
fn the_socket_has_the_configured_mode() {
    let env = TestEnv::new();
    let agent = env.agent(&AgentConfig { session: "mode = \"0600\"".to_owned(), ..without_pool() });
    let mode = fs::metadata(&agent.files().socket).expect("the socket exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}
