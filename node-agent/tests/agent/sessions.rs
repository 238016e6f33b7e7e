//! Sessions: who may open one, what happens to bad requests, and what the end of one gives back.

use std::fs;
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Command, Stdio};

use prost::Message;
use reprise_client::{Client, ClientError, ConnectOptions, LoadRequest};
use reprise_proto::local::{self, FailureKind, request, response};

use crate::blocks::{
    PATIENCE, connect, connect_with, keys, layout, layout_of, load_all, namespace, save, save_durably,
};
use crate::process::{Agent, Config, Home};

/// Set in the process that this binary starts of itself to be an engine that gets killed.
const VICTIM: &str = "REPRISE_TEST_VICTIM_SOCKET";

/// A session without a client library: whatever bytes a test wants.
struct Raw(UnixStream);

impl Raw {
    fn connect(socket: &Path) -> Raw {
        let stream = UnixStream::connect(socket).expect("the agent listens");
        stream.set_read_timeout(Some(PATIENCE)).expect("a timeout");
        Raw(stream)
    }

    fn greeted(socket: &Path) -> Raw {
        let mut raw = Raw::connect(socket);
        raw.send(1, request::Body::Hello(hello()));
        assert!(matches!(
            raw.receive(),
            Some(local::Response { id: 1, body: Some(response::Body::Welcome(_)) })
        ));
        raw
    }

    fn send(&mut self, id: u64, body: request::Body) {
        self.send_bytes(&local::Request { id, body: Some(body) }.encode_to_vec());
    }

    fn send_bytes(&mut self, message: &[u8]) {
        let mut frame = (message.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(message);
        // The agent may have closed the session already.
        let _ = self.0.write_all(&frame);
    }

    /// The next message; `None` when the agent has closed the session.
    fn receive(&mut self) -> Option<local::Response> {
        let mut length = [0; 4];
        self.0.read_exact(&mut length).ok()?;
        let mut message = vec![0; u32::from_le_bytes(length) as usize];
        self.0.read_exact(&mut message).ok()?;
        Some(local::Response::decode(message.as_slice()).expect("a response"))
    }

    fn failure(&mut self) -> (u64, FailureKind, String) {
        let response = self.receive().expect("an answer");
        match response.body {
            Some(response::Body::Failure(failure)) => (response.id, failure.kind(), failure.message),
            other => panic!("a failure was expected, not {other:?}"),
        }
    }
}

fn hello() -> local::Hello {
    local::Hello {
        protocol_version: local::PROTOCOL_VERSION,
        namespace: namespace().0.to_vec().into(),
        layout: Some(wire_layout()),
        client_name: "raw".to_owned(),
    }
}

fn wire_layout() -> local::Layout {
    local::Layout {
        layers: 8,
        parts: 2,
        kv_heads: 1,
        head_dim: 128,
        dtype: 1,
        tokens_per_block: 16,
        tp_rank: 0,
        tp_size: 1,
    }
}

fn start(home: &Home) -> Agent {
    home.start(&Config { pool: None, ..Config::default() })
}

#[test]
fn a_greeting_that_does_not_fit_is_refused_with_words_and_the_session_ends() {
    let home = Home::new();
    let agent = start(&home);
    let other_version = local::Hello { protocol_version: 99, ..hello() };
    let short = local::Hello { namespace: vec![1; 5].into(), ..hello() };
    let no_layers = local::Layout { layers: 0, ..wire_layout() };
    let flat = local::Hello { layout: Some(no_layers), ..hello() };
    let no_layout = local::Hello { layout: None, ..hello() };
    for (greeting, kind, words) in [
        (request::Body::Hello(other_version), FailureKind::Version, "protocol 99"),
        (request::Body::Hello(short), FailureKind::BadRequest, "namespace"),
        (request::Body::Hello(flat), FailureKind::BadRequest, "layers"),
        (request::Body::Hello(no_layout), FailureKind::BadRequest, "layout"),
        (request::Body::Stats(local::Stats {}), FailureKind::BadRequest, "first message"),
    ] {
        let mut raw = Raw::connect(&agent.socket);
        raw.send(5, greeting);
        let (id, found, message) = raw.failure();
        assert_eq!((id, found), (5, kind), "{message}");
        assert!(message.contains(words), "no '{words}' in: {message}");
        assert!(raw.receive().is_none(), "the session goes on after: {message}");
    }
    drop(connect(&agent.socket));
}

#[test]
fn bad_requests_are_answered_and_the_session_goes_on() {
    let home = Home::new();
    let agent = start(&home);
    let mut raw = Raw::greeted(&agent.socket);
    let odd = local::Match { keys: vec![0; 17].into(), local_only: true };
    let none = local::Load { keys: Vec::new().into(), deadline_us: 0, read_bytes: 0, local_only: true };
    let bad = [
        request::Body::Match(odd),
        request::Body::Load(none),
        request::Body::Reserve(local::Reserve { count: 0 }),
        request::Body::Hello(hello()),
    ];
    for (id, body) in (2..).zip(bad) {
        raw.send(id, body);
        let (answered, kind, message) = raw.failure();
        assert_eq!((answered, kind), (id, FailureKind::BadRequest), "{message}");
    }
    // A request from a later protocol: field 99 of the message.
    raw.send_bytes(&[0x08, 0x09, 0x9a, 0x06, 0x00]);
    assert_eq!(raw.failure().0, 9);
    raw.send(10, request::Body::Stats(local::Stats {}));
    assert!(matches!(raw.receive(), Some(local::Response { id: 10, body: Some(response::Body::Stats(_)) })));
}

#[test]
fn a_load_whose_answer_would_not_fit_a_frame_is_told_how_many_blocks_do() {
    let home = Home::new();
    let agent = start(&home);
    // 960 objects a block.
    let client = connect_with(&agent.socket, layout_of(480, 1));
    let error = client.load(&LoadRequest::new(keys(0..4252))).expect_err("too large an answer");
    assert!(matches!(&error, ClientError::BadRequest(text) if text.contains("at most 4251")), "{error}");
    let load = client.load(&LoadRequest::new(keys(0..4251))).expect("an answer: all misses");
    drop(load);
}

#[test]
fn bytes_that_are_no_request_end_the_session_and_nothing_else() {
    let home = Home::new();
    let agent = start(&home);
    let bystander = connect(&agent.socket);
    for garbage in [vec![0xff; 64], local::Request { id: 0, body: None }.encode_to_vec()] {
        let mut raw = Raw::greeted(&agent.socket);
        raw.send_bytes(&garbage);
        let (id, kind, _) = raw.failure();
        assert_eq!((id, kind), (0, FailureKind::BadRequest));
        assert!(raw.receive().is_none());
    }
    let mut raw = Raw::greeted(&agent.socket);
    raw.0.write_all(&u32::MAX.to_le_bytes()).expect("sent");
    assert!(raw.failure().2.contains("limit"));
    assert!(raw.receive().is_none());
    // A greeting cut short, and a connection that says nothing and goes.
    Raw::connect(&agent.socket).0.write_all(&[200, 0, 0, 0, 1, 2]).expect("sent");
    drop(Raw::connect(&agent.socket));
    bystander.stats().expect("the bystander's session goes on");
    agent.await_counter("sessions", 1);
}

#[test]
fn a_commit_with_bad_items_says_so_per_item_and_gives_their_slots_back() {
    let home = Home::new();
    let agent = start(&home);
    let mut raw = Raw::greeted(&agent.socket);
    raw.send(2, request::Body::Reserve(local::Reserve { count: 3 }));
    let Some(response::Body::Reserved(reserved)) = raw.receive().and_then(|response| response.body) else {
        panic!("slots");
    };
    let leases: Vec<u64> = reserved.leases.iter().map(|lease| lease.lease).collect();
    let item = |lease, key: usize, checksums: usize| local::CommitItem {
        lease,
        key: vec![1; key].into(),
        checksums: vec![0; checksums].into(),
    };
    let items =
        vec![item(leases[0], 15, 64), item(leases[1], 16, 63), item(leases[2], 16, 4), item(1 << 40, 16, 64)];
    raw.send(3, request::Body::Commit(local::Commit { items, priority: 0 }));
    let Some(response::Body::Committed(committed)) = raw.receive().and_then(|response| response.body) else {
        panic!("an answer");
    };
    let statuses: Vec<local::CommitStatus> = committed.statuses().collect();
    use local::CommitStatus::{BadItem, NoLease};
    assert_eq!(statuses, [BadItem, BadItem, BadItem, NoLease]);
    agent.await_counter("reserved_bytes", 0);
}

#[test]
fn an_engine_that_is_killed_gives_back_what_it_held() {
    if let Some(socket) = std::env::var_os(VICTIM) {
        return be_killed(Path::new(&socket));
    }
    let home = Home::new();
    let agent = home.start(&Config::default());
    let client = connect(&agent.socket);
    save_durably(&client, 0..20);
    let mut engine = Command::new(std::env::current_exe().expect("this binary"))
        .args(["--exact", "sessions::an_engine_that_is_killed_gives_back_what_it_held", "--nocapture"])
        .env(VICTIM, &agent.socket)
        .stdout(Stdio::piped())
        .spawn()
        .expect("an engine");
    let mut output = engine.stdout.take().expect("piped");
    let mut said = Vec::new();
    while !said.ends_with(b"holding\n") {
        let mut byte = [0];
        output.read_exact(&mut byte).expect("the engine says that it holds leases");
        said.push(byte[0]);
    }
    assert!(agent.counter("reserved_bytes") > 0 && agent.counter("read_leases") >= 20);
    assert_eq!(agent.counter("sessions"), 2);
    engine.kill().expect("killed");
    engine.wait().expect("waited for");
    agent.await_counter("sessions", 1);
    agent.await_counter("reserved_bytes", 0);
    agent.await_counter("read_leases", 0);
    assert_eq!(client.trim().expect("trimmed"), 20, "nothing holds the blocks in DRAM any more");
    load_all(&client, 0..20);
}

/// Takes slots and a load, says so, and waits for the end.
fn be_killed(socket: &Path) {
    let client = connect(socket);
    let held = client.reserve(10, PATIENCE).expect("slots");
    let load = client.load(&LoadRequest::new(keys(0..20))).expect("a load");
    let mut output = std::io::stdout();
    output.write_all(b"holding\n").and_then(|()| output.flush()).expect("said");
    loop {
        std::thread::park();
        assert!(held.len() + load.blocks().len() > 0);
    }
}

#[test]
fn a_user_who_is_not_listed_is_turned_away() {
    let home = Home::new();
    let config = Config { pool: None, session: "allow_uids = [4242]".to_owned(), ..Config::default() };
    let agent = home.start(&config);
    let mut raw = Raw::connect(&agent.socket);
    let (_, kind, message) = raw.failure();
    assert_eq!(kind, FailureKind::BadRequest);
    assert!(message.contains("allow_uids"), "{message}");
    assert!(raw.receive().is_none());
    let options = ConnectOptions::new(&agent.socket, namespace(), layout()).call_timeout(PATIENCE);
    let error = Client::connect(options).expect_err("turned away");
    assert!(matches!(error, ClientError::AgentLost { .. } | ClientError::BadRequest(_)), "{error}");
    assert_eq!(agent.counter("sessions"), 0);
}

#[test]
fn the_socket_has_the_configured_mode() {
    let home = Home::new();
    let config = Config { pool: None, session: "mode = \"0600\"".to_owned(), ..Config::default() };
    let agent = home.start(&config);
    let mode = fs::metadata(&agent.socket).expect("exists").permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
}

#[test]
fn a_client_that_does_not_read_is_closed_and_delays_nobody() {
    let home = Home::new();
    let agent = start(&home);
    let mut deaf = Raw::greeted(&agent.socket);
    deaf.0.set_write_timeout(Some(PATIENCE)).expect("a timeout");
    // Each answer is about 4 KiB and the socket takes some 200 KiB: the rest goes to the queue, then beyond it.
    let stats = |id| local::Request { id, body: Some(request::Body::Stats(local::Stats {})) }.encode_to_vec();
    let mut sent = 0u64;
    while sent < 1_000_000 {
        let message = stats(sent + 2);
        let mut frame = (message.len() as u32).to_le_bytes().to_vec();
        frame.extend_from_slice(&message);
        if deaf.0.write_all(&frame).is_err() {
            break;
        }
        sent += 1;
    }
    assert!(sent < 1_000_000, "the agent takes answers for a client that does not read without end");
    let client = connect(&agent.socket);
    save(&client, 0..5);
    load_all(&client, 0..5);
    agent.await_counter("sessions", 1);
}

#[test]
fn what_one_namespace_saved_under_a_key_is_the_same_bytes_for_every_session() {
    let home = Home::new();
    let agent = start(&home);
    let (first, second) = (connect(&agent.socket), connect(&agent.socket));
    save(&first, 0..10);
    load_all(&second, 0..10);
    drop(first);
    agent.await_counter("sessions", 1);
    load_all(&second, 0..10);
}
