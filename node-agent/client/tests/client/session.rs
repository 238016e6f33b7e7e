//! Failures of a session: absent, dying, silent and misbehaving agents.

use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::{Duration, Instant};

use crate::fake_agent::{Answer, FakeAgent, Grant, LONG, Peer, SHORT, key, options};
use reprise_client::{Client, ClientError, LearnedSalt, LoadRequest, MatchOptions, Scope};
use reprise_policy::{GpuPlace, NamespaceDigest, TenantName, TenantSalt};
use reprise_proto::local::{self, response};

#[test]
fn the_error_for_an_absent_agent_names_the_socket() {
    let directory = tempfile::tempdir().expect("a directory");
    let error = Client::connect(options(&directory.path().join("absent"))).expect_err("no agent listens");
    assert!(matches!(error, ClientError::AgentAbsent { .. }), "{error}");
    assert!(error.to_string().contains("absent"), "{error}");
}

#[test]
fn connecting_to_an_agent_that_does_not_accept_times_out() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("agent");
    let _listener = UnixListener::bind(&path).expect("a socket");
    let options = options(&path).call_timeout(SHORT);
    let error = Client::connect(options).expect_err("the agent does not answer");
    assert!(matches!(error, ClientError::Timeout { call: "hello", .. }), "{error}");
}

#[test]
fn a_listener_that_is_not_an_agent_counts_as_a_refusal() {
    let answers_with = |answer: &'static [u8]| {
        let stranger = FakeAgent::start(move |peer| {
            peer.expect("hello");
            peer.send_raw(answer);
            assert!(peer.receive().is_none(), "the client closes");
        });
        let error = Client::connect(stranger.options()).expect_err("no agent");
        stranger.join();
        error
    };
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("datagrams");
    let _socket = std::os::unix::net::UnixDatagram::bind(&path).expect("a socket");
    let of_datagrams = Client::connect(options(&path)).expect_err("no agent");
    for error in [
        answers_with(b"HTTP/1.1 400 Bad Request\r\n\r\n"),
        answers_with(&[3, 0, 0, 0, 0xff, 0xff, 0xff]),
        of_datagrams,
    ] {
        let words = error.to_string();
        assert!(words.contains("does not greet") && words.contains("correct the socket path"), "{words}");
        assert!(matches!(error, ClientError::Version(_)) && error.is_refusal(), "{words}");
    }
}

#[test]
fn a_version_mismatch_has_the_message_of_the_agent() {
    let agent = FakeAgent::start(|peer| {
        let (id, _) = peer.expect("hello");
        let failure =
            local::Failure { kind: local::FailureKind::Version as i32, message: "agent speaks 9".into() };
        peer.reply(id, response::Body::Failure(failure));
    });
    let error = Client::connect(agent.options()).expect_err("refused");
    assert!(matches!(&error, ClientError::Version(text) if text == "agent speaks 9"), "{error}");
    agent.join();
}

#[test]
fn a_rejection_before_the_greeting_has_the_message_of_the_agent() {
    for _ in 0..50 {
        let agent = FakeAgent::start(|peer| {
            let failure = local::Failure {
                kind: local::FailureKind::Busy as i32,
                message: "256 sessions are open".into(),
            };
            peer.reply(0, response::Body::Failure(failure));
        });
        let error = Client::connect(agent.options()).expect_err("refused");
        assert!(error.to_string().contains("256 sessions are open"), "{error}");
        agent.join();
    }
}

#[test]
fn the_greeting_contains_version_namespace_layout_tenant_name_and_gpu() {
    let agent = FakeAgent::start(|peer| {
        let hello = peer.greet();
        assert_eq!(hello.protocol_version, local::PROTOCOL_VERSION);
        assert_eq!(hello.namespace.as_ref(), [7; 32]);
        assert_eq!((hello.client_name.as_str(), hello.tenant.as_str()), ("engine-3", "team-a"));
        assert_eq!(hello.gpu, Some(local::hello::Gpu::GpuPciAddress("0000:3b:00.0".into())));
        let layout = hello.layout.expect("a layout");
        assert_eq!((layout.layers, layout.parts, layout.head_dim, layout.dtype), (2, 2, 72, 1));
    });
    let tenant: TenantName = "team-a".parse().expect("a name");
    let gpu = GpuPlace::Pci("0000:3B:00.0".parse().expect("an address"));
    let learned = LearnedSalt::unknown(TenantName::clone(&tenant)).expect("random bytes");
    let options =
        agent.options().client_name("engine-3").tenant(tenant).gpu(gpu).learned_salt(learned.clone());
    let client = Client::connect(options).expect("a session");
    let stated = NamespaceDigest([7; 32]);
    assert_eq!(*client.namespace(), stated.of_tenant(Some(&TenantSalt::new([5; 32]))));
    assert_eq!(learned.namespace(&stated), *client.namespace());
    assert!(!format!("{client:?}").contains("5, 5, 5"), "the salt is a secret");
    assert_eq!((client.node(), client.agent_version()), ("node-a", "test"));
    agent.join();
}

#[test]
fn rejects_a_too_long_name_before_connecting() {
    let error =
        Client::connect(options("/nowhere".as_ref()).client_name("x".repeat(65))).expect_err("too long");
    assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
}

#[test]
fn the_death_of_the_agent_fails_a_waiting_call_at_once() {
    let agent = FakeAgent::serve(|peer| {
        peer.expect_match();
    });
    let client = agent.connect();
    let started = Instant::now();
    let error = client.match_keys(&[key(1)], Scope::Local).expect_err("the agent has died");
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    assert!(started.elapsed() < LONG / 2);
    assert!(!client.is_alive());
    let later = client.match_keys(&[key(1)], Scope::Local).expect_err("still dead");
    assert!(matches!(later, ClientError::AgentLost { .. }), "{later}");
    agent.join();
}

#[test]
fn the_death_of_the_agent_ends_a_wait_for_a_layer() {
    let (die, die_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        peer.layers_ready(0, 5, 1);
        let block = peer.place_block(0);
        peer.reply_loaded(id, Answer { load: 5, entry: 0, grant: Grant::First }, vec![block]);
        die_signal.recv().expect("the test sends the signal");
    });
    let client = agent.connect();
    let load = client.load(&LoadRequest::new(vec![key(0)])).expect("placed");
    assert_eq!(load.wait_layer(0, LONG).expect("ready").layers, 1);
    let error = std::thread::scope(|scope| {
        let waiting = scope.spawn(|| load.wait_layer(1, LONG));
        die.send(()).expect("the agent lives");
        waiting.join().expect("no panic").expect_err("layer 1 does not arrive")
    });
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    agent.join();
}

#[test]
fn a_too_long_frame_ends_the_session() {
    let agent = FakeAgent::serve(|peer| {
        peer.expect_match();
        peer.send_raw(&(local::FRAME_BYTES_MAX as u32 + 1).to_le_bytes());
        assert!(peer.receive().is_none(), "the client closes");
    });
    let error = agent.connect().match_keys(&[key(1)], Scope::Local).expect_err("protocol broken");
    assert!(matches!(&error, ClientError::AgentLost { reason } if reason.contains("frame")), "{error}");
    agent.join();
}

#[test]
fn undecodable_bytes_and_a_missing_descriptor_end_the_session() {
    let garbage = |peer: &mut Peer, _: u64| peer.send_raw(&[3, 0, 0, 0, 0xff, 0xff, 0xff]);
    let no_descriptor = |peer: &mut Peer, id: u64| {
        let regions = vec![peer.grant(true)];
        let reserved = local::Reserved { regions, ..local::Reserved::default() };
        peer.reply(id, response::Body::Reserved(reserved));
    };
    for (wrong, word) in [(garbage as fn(&mut _, _), "cannot decode"), (no_descriptor, "descriptor")] {
        let agent = FakeAgent::serve(move |peer| {
            let (id, _) = peer.expect("a call");
            wrong(peer, id);
            assert!(peer.receive().is_none(), "the client closes");
        });
        let error = agent.connect().reserve(1, LONG).expect_err("protocol broken");
        assert!(matches!(&error, ClientError::AgentLost { reason } if reason.contains(word)), "{error}");
        agent.join();
    }
}

#[test]
fn an_answer_of_the_wrong_kind_ends_the_session() {
    let agent = FakeAgent::serve(|peer| {
        let (id, _) = peer.expect_match();
        peer.reply(id, response::Body::Released(local::Released {}));
        assert!(peer.receive().is_none(), "the client closes");
    });
    let error = agent.connect().match_keys(&[key(1)], Scope::Local).expect_err("protocol broken");
    assert!(matches!(error, ClientError::Protocol(_)), "{error}");
    agent.join();
}

#[test]
fn an_unanswered_call_times_out_and_the_session_continues() {
    let agent = FakeAgent::serve(|peer| {
        let (unanswered, _) = peer.expect_match();
        let (id, blocks) = peer.expect_match();
        peer.reply_matched(unanswered, 1);
        peer.reply_matched(id, blocks);
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let error = client.match_keys(&[key(1)], Scope::Local).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { call: "match", .. }), "{error}");
    assert_eq!(client.match_keys(&[key(1), key(2)], Scope::Local).expect("answered").len(), 2);
    agent.join();
}

#[test]
fn releases_a_load_that_is_answered_too_late() {
    let (answer, answer_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_load();
        answer_signal.recv().expect("the test sends the signal");
        peer.reply_loaded_whole(id, Answer { load: 77, entry: 0, grant: Grant::First }, 1);
        assert_eq!(peer.expect_release(), 77);
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let request = LoadRequest { deadline: Duration::ZERO, ..LoadRequest::new(vec![key(0)]) };
    let error = client.load(&request).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { call: "load", .. }), "{error}");
    answer.send(()).expect("the agent lives");
    agent.join();
}

#[test]
fn aborts_reservations_that_arrive_too_late() {
    let (answer, answer_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, _) = peer.expect_reserve();
        answer_signal.recv().expect("the test sends the signal");
        peer.reply_reserved(id, 3, Grant::First);
        match peer.expect("abort") {
            (_, local::request::Body::Abort(abort)) => assert_eq!(abort.leases, [1, 2, 3]),
            (_, other) => panic!("expected abort, got {other:?}"),
        }
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let error = client.reserve(3, Duration::ZERO).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { call: "reserve", .. }), "{error}");
    answer.send(()).expect("the agent lives");
    agent.join();
}

#[test]
fn the_session_ends_when_the_agent_does_not_read() {
    let (end, end_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |_| {
        end_signal.recv().expect("the test sends the signal");
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let keys = vec![key(1); local::KEYS_PER_CALL_MAX];
    // 128 KiB a call: the socket's buffer takes a few; the next call cannot be written.
    let lost = (0..64).any(|_| {
        let error = client.match_keys(&keys, Scope::Local).expect_err("the agent does not answer");
        matches!(&error, ClientError::AgentLost { reason } if reason.contains("does not read"))
    });
    assert!(lost);
    end.send(()).expect("the agent lives");
    agent.join();
}

#[test]
fn answers_out_of_order_reach_their_callers() {
    const CALLS: usize = 16;
    let agent = FakeAgent::serve(|peer| {
        let asked: Vec<(u64, usize)> = (0..CALLS).map(|_| peer.expect_match()).collect();
        asked.into_iter().rev().for_each(|(id, blocks)| peer.reply_matched(id, blocks));
    });
    let client = agent.connect();
    std::thread::scope(|scope| {
        for blocks in 1..=CALLS {
            let client = client.clone();
            scope.spawn(move || {
                let matched = client.match_keys(&vec![key(0); blocks], Scope::Cluster).expect("answered");
                assert_eq!(matched.len(), blocks);
            });
        }
    });
    agent.join();
}

#[test]
fn closing_ends_the_session_for_all_its_handles() {
    let agent = FakeAgent::serve(|peer| {
        assert!(peer.receive().is_none(), "the client closes");
    });
    let client = agent.connect();
    let other = client.clone();
    client.close();
    let error = other.stats().expect_err("closed");
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    agent.join();
}

/// Returns the bytes of a message in `docs/PROTOCOL.md`.
fn example(message: &str) -> Vec<u8> {
    let document = include_str!("../../../../docs/PROTOCOL.md");
    let begin = format!("| `{message}` |");
    let rows = document.lines().filter(|line| line.starts_with(&begin));
    let mut last_cells = rows.filter_map(|row| row.rsplit('`').nth(1));
    // Other tables have rows about the message, too.
    let hex = last_cells.find(|cell| cell.bytes().all(|byte| byte.is_ascii_hexdigit())).expect("its example");
    let byte = |at| u8::from_str_radix(&hex[at..at + 2], 16).expect("hexadecimal");
    (0..hex.len()).step_by(2).map(byte).collect()
}

/// Starts a client whose first call must be the first example, and answers it with the second.
fn session_of_the_document(call: &'static str, answer: &'static str) -> (FakeAgent, Client) {
    let agent = FakeAgent::serve(move |peer| {
        let asked =
            peer.receive_raw().unwrap_or_else(|| panic!("the client closed instead of sending {call}"));
        assert_eq!(asked, example(call), "{call}");
        let answer = example(answer);
        peer.send_raw(&(answer.len() as u32).to_le_bytes());
        peer.send_raw(&answer);
        peer.receive_raw();
    });
    let client = agent.connect();
    (agent, client)
}

#[test]
fn calls_and_answers_match_the_bytes_in_the_document() {
    let (agent, client) = session_of_the_document("Trim", "Trimmed");
    assert_eq!(client.trim().expect("an answer"), 3);
    agent.end(client);

    let (agent, client) = session_of_the_document("Stats", "StatsReply");
    assert_eq!(client.stats().expect("an answer"), [("loads".to_owned(), 8)]);
    agent.end(client);

    let (agent, client) = session_of_the_document("Reserve", "Failure");
    assert!(client.reserve(3, Duration::ZERO).expect("an answer").is_empty(), "the agent is busy");
    agent.end(client);

    let (agent, client) = session_of_the_document("Match", "Failure");
    let options = MatchOptions { scope: Scope::Local, position: Some(300), inputs: None };
    let error = client.match_keys(&[key(0x11)], options).expect_err("refused");
    assert!(matches!(&error, ClientError::Busy(text) if text == "full"), "{error}");
    agent.end(client);

    let (agent, client) = session_of_the_document("Load", "Failure");
    let request =
        LoadRequest { read_bytes: 512 << 10, scope: Scope::Local, ..LoadRequest::new(vec![key(0x11)]) };
    let error = client.load(&request).expect_err("refused");
    assert!(matches!(error, ClientError::Busy(_)), "{error}");
    agent.end(client);
}

#[test]
fn rejects_too_many_keys_and_answers_none_without_a_call() {
    let agent = FakeAgent::serve(|peer| {
        assert!(peer.receive().is_none(), "nothing is sent");
    });
    let client = agent.connect();
    let too_many = vec![key(1); local::KEYS_PER_CALL_MAX + 1];
    let error = client.match_keys(&too_many, Scope::Local).expect_err("refused");
    assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
    let error = client.load(&LoadRequest::new(vec![])).expect_err("refused");
    assert!(matches!(error, ClientError::BadRequest(_)), "{error}");
    assert_eq!(client.match_keys(&[], Scope::Local).expect("an empty answer"), []);
    agent.end(client);
}
