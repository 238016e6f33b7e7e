//! Malformed clients, and sessions that conflict: they get an error or a miss, never a hang, and other
//! sessions are not affected.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::Duration;

use rand::RngExt;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, CommitStatus, ConnectOptions, LoadRequest, Scope,
};
use reprise_e2e::content::{key, keys, layout_of, small};
use reprise_e2e::process::copy_binary;
use reprise_e2e::raw::{RawSession, hello, wire_layout};
use reprise_e2e::seed::seeded;
use reprise_e2e::{Agent, AgentConfig, LoadParams, Outcome, PATIENCE, TestEnv, fast_call, wait_until};
use reprise_policy::{ByteSize, NamespaceDigest, TenantName};
use reprise_proto::local::{self, FailureKind, request, response};
use reprise_testkit::configuration;

/// Id of a user and group without privileges on every Linux.
const UNPRIVILEGED: u32 = 65534;

/// Starts an agent in a new environment.
fn env_with_agent() -> (TestEnv, Agent) {
    let (env, agent) = TestEnv::with_agent("node");
    (env, agent)
}

#[test]
fn rejects_an_invalid_hello_with_an_error_and_closes_the_session() {
    let (env, agent) = env_with_agent();
    env.allow("session rejected");
    let fits = hello(&small());
    let own_version = format!("agent {}", local::PROTOCOL_VERSION);
    let with_layout = |change: fn(&mut local::Layout)| {
        let mut layout = wire_layout(&small());
        change(&mut layout);
        local::Hello { layout: Some(layout), ..hello(&small()) }
    };
    for (greeting, kind, words) in [
        (local::Hello { protocol_version: 0, ..fits.clone() }, FailureKind::Version, ["protocol", "0"]),
        (local::Hello { protocol_version: 99, ..fits.clone() }, FailureKind::Version, ["99", &own_version]),
        (
            local::Hello { namespace: vec![1; 31].into(), ..fits.clone() },
            FailureKind::BadRequest,
            ["namespace", "31"],
        ),
        (
            local::Hello { namespace: Vec::new().into(), ..fits.clone() },
            FailureKind::BadRequest,
            ["namespace", "0"],
        ),
        (
            local::Hello { tenant: "Team A".to_owned(), ..fits.clone() },
            FailureKind::BadRequest,
            ["'Team A'", "a-z"],
        ),
        (local::Hello { layout: None, ..fits.clone() }, FailureKind::BadRequest, ["layout", ""]),
        (with_layout(|layout| layout.layers = 0), FailureKind::BadRequest, ["layers", "at least 1"]),
        (with_layout(|layout| layout.layers = 1 << 20), FailureKind::BadRequest, ["layers", "1048576"]),
        (with_layout(|layout| layout.parts = 3), FailureKind::BadRequest, ["parts", "3"]),
        (with_layout(|layout| layout.dtype = 0), FailureKind::BadRequest, ["dtype", "0"]),
        (with_layout(|layout| layout.tp_rank = 4), FailureKind::BadRequest, ["tp_rank", "tp_size"]),
        (with_layout(|layout| layout.layers = 1000), FailureKind::BadRequest, ["objects", "960"]),
        (with_layout(|layout| layout.kv_heads = 60_000), FailureKind::BadRequest, ["bytes", "fewer tokens"]),
    ] {
        let mut session = RawSession::connect(&agent.files().socket);
        session.send(5, request::Body::Hello(greeting));
        let (id, found, message) = session.refusal();
        assert_eq!((id, found), (5, kind), "{message}");
        assert!(words.iter().all(|word| message.contains(word)), "no {words:?} in: {message}");
        assert!(session.is_closed(), "the session stays open after: {message}");
    }
    let mut session = RawSession::connect(&agent.files().socket);
    session.send(7, request::Body::Stats(local::Stats {}));
    assert!(session.refusal().2.contains("first message"));
    assert!(session.is_closed());
    agent.engine(small()).save_durably(&[1]);
}

#[test]
fn tenants_have_different_namespaces_and_one_without_a_salt_has_no_session() {
    let (env, agent) = env_with_agent();
    env.allow("session rejected");
    let tenants = ["team-a", "team-b"].map(|name| name.parse::<TenantName>().expect("a name"));
    for tenant in &tenants {
        configuration::provide_salt(&agent.files().socket, tenant).expect("written");
    }
    let of = |tenant: &str| local::Hello { tenant: tenant.to_owned(), ..hello(&small()) };
    let connect = |hello_message: local::Hello| {
        let mut session = RawSession::connect(&agent.files().socket);
        session.send(5, request::Body::Hello(hello_message));
        session
    };
    let salt = |mut session: RawSession| match session.receive().and_then(|response| response.body) {
        Some(response::Body::Welcome(welcome)) => welcome.tenant_salt.to_vec(),
        other => panic!("expected a welcome, got {other:?}"),
    };
    for tenant in &tenants {
        let expected = configuration::test_salt(tenant);
        assert_eq!(salt(connect(of(tenant.as_str()))), expected.secret(), "the file of the tenant");
    }
    assert!(salt(connect(of(""))).is_empty(), "the default tenant is not isolated");
    // A session of another tenant whose namespace is the same, which needs the salt of that tenant.
    let namespace = NamespaceDigest(hello(&small()).namespace.as_ref().try_into().expect("a digest"));
    let of_team_a = namespace.of_tenant(Some(&configuration::test_salt(&tenants[0])));
    let equal = local::Hello { namespace: of_team_a.0.to_vec().into(), ..of("") };
    let unsalted = connect(of("team-c"));
    for (mut session, words) in
        [(connect(equal), "belongs to tenant 'team-a'"), (unsalted, "reprise tenant create-salt team-c")]
    {
        let (id, kind, message) = session.refusal();
        assert_eq!((id, kind), (5, FailureKind::BadRequest));
        assert!(message.contains(words), "{message}");
        assert!(session.is_closed());
    }
}

#[test]
fn frames_that_are_too_long_incomplete_or_garbage_end_only_their_session() {
    let (env, agent) = env_with_agent();
    env.allow("session rejected");
    env.allow("session closed");
    let mut rng = seeded("garbage");
    let bystander = agent.engine(small());
    bystander.save_durably(&[1, 2, 3]);
    let socket = &agent.files().socket;
    // Too long: rejected before anything is allocated.
    for length in [local::FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
        let mut session = RawSession::with_handshake(socket, &small());
        session.send_bytes(&length.to_le_bytes());
        let (_, kind, message) = session.refusal();
        assert_eq!(kind, FailureKind::BadRequest);
        assert!(message.contains("limit"), "{message}");
        assert!(session.is_closed());
    }
    // Incomplete: a length without its bytes, and then the end of the stream.
    let mut torn = RawSession::with_handshake(socket, &small());
    torn.send_bytes(&[200, 0, 0, 0, 1, 2, 3]);
    drop(torn);
    // Garbage before and after the handshake. Some of it is a valid message by chance, but every session
    // ends.
    for round in 0..64u32 {
        let mut garbage = vec![0; rng.random_range(1..300)];
        rng.fill(garbage.as_mut_slice());
        let mut session = match round % 2 {
            0 => RawSession::connect(socket),
            _ => RawSession::with_handshake(socket, &small()),
        };
        session.send_message(&garbage);
        session.send_message(&[0xff; 16]);
        let responses = (0..4).take_while(|_| !session.is_closed()).count();
        assert!(responses < 4, "garbage keeps a session open");
    }
    bystander.trim();
    bystander.load_all(&[1, 2, 3], &LoadParams::LOCAL);
    agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
}

#[test]
fn invalid_requests_get_errors_and_the_session_continues() {
    let (_world, agent) = env_with_agent();
    let mut session = RawSession::with_handshake(&agent.files().socket, &small());
    let torn_keys = local::Match { keys: vec![0; 17].into(), local_only: true, ..local::Match::default() };
    let no_keys = local::Load { local_only: true, ..local::Load::default() };
    let many: Vec<u8> = vec![0; 16 * (local::KEYS_PER_CALL_MAX + 1)];
    let many_keys = local::Load { keys: many.into(), local_only: true, ..local::Load::default() };
    let bad = [
        request::Body::Match(torn_keys),
        request::Body::Load(no_keys),
        request::Body::Load(many_keys),
        request::Body::Reserve(local::Reserve { count: 0, kind: 0 }),
        request::Body::Release(local::Release { load: 12345 }),
        request::Body::Hello(hello(&small())),
    ];
    for (id, body) in (2..).zip(bad) {
        let what = format!("{body:?}");
        session.send(id, body);
        let (answered, kind, message) = session.refusal();
        assert_eq!((answered, kind), (id, FailureKind::BadRequest), "{message} to {}", &what[..40]);
        assert!(!message.is_empty());
    }
    session.send(99, request::Body::Stats(local::Stats {}));
    let response = session.receive();
    assert!(matches!(response, Some(local::Response { id: 99, body: Some(response::Body::Stats(_)) })));
}

#[test]
fn silent_connections_do_not_block_others() {
    let (env, agent) = env_with_agent();
    env.allow("session rejected");
    let mut block = 0;
    // The agent closes silent connections after 5 s.
    fast_call("a session next to silent connections", Duration::from_secs(4), || {
        let silent: Vec<RawSession> = (0..20).map(|_| RawSession::connect(&agent.files().socket)).collect();
        block += 1;
        agent.engine(small()).save_durably(&[block]);
        silent
    });
}

#[test]
fn sessions_with_different_layouts_never_see_each_others_blocks() {
    let (_world, agent) = env_with_agent();
    let (small_engine, wide) = (agent.engine(small()), agent.engine(layout_of(2, 2)));
    assert_eq!(small().block_bytes(), layout_of(2, 2).block_bytes(), "both layouts have the same block size");
    small_engine.save_durably(&[1, 2]);
    assert!(wide.matches(&[1, 2], Scope::Local).is_empty());
    let missing = Outcome::Missing(BlockStatus::Miss);
    assert_eq!(wide.load(&[1, 2], &LoadParams::LOCAL).expect("a load"), [missing, missing]);
    // The key belongs to a block of the other layout, so the commit of this block fails.
    let committed = wide.save(&[1]).expect("a commit");
    assert_eq!(committed.statuses, [CommitStatus::BadItem]);
    let outcome = wide.client().wait_durable(committed.ticket, PATIENCE).expect("a durability notice");
    assert_eq!(outcome.durable, 0);
    small_engine.trim();
    small_engine.load_all(&[1, 2], &LoadParams::LOCAL);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
}

#[test]
fn rejects_blocks_larger_than_a_region_with_the_remedy() {
    let (_world, agent) = env_with_agent();
    // 16 MiB a block; the regions have 8 MiB.
    let engine = agent.engine(layout_of(64, 32));
    let error = engine.client().reserve(1, Duration::ZERO).expect_err("the block exceeds a region");
    assert!(
        matches!(&error, ClientError::BadRequest(text) if text.contains("arena.region_bytes")),
        "{error}"
    );
    let error = engine.load(&[1], &LoadParams::LOCAL).expect_err("the block exceeds a region");
    assert!(
        matches!(&error, ClientError::BadRequest(text) if text.contains("arena.region_bytes")),
        "{error}"
    );
}

#[test]
fn blocks_of_an_unused_namespace_are_misses_at_once() {
    let (_world, agent) = env_with_agent();
    agent.engine(small()).save_durably(&[1, 2, 3]);
    let other = NamespaceDigest([9; 32]);
    let options = ConnectOptions::new(&agent.files().socket, other, small()).call_timeout(PATIENCE);
    let client = Client::connect(options).expect("any namespace may be used");
    let of_other = |number: u64| {
        reprise_policy::BlockKey::derive(
            &other,
            &number.to_le_bytes(),
            reprise_policy::key::KeyPart::default(),
        )
    };
    let keys: Vec<_> = (1..4).map(of_other).collect();
    assert!(client.match_keys(&keys, Scope::Cluster).expect("a response").is_empty());
    // A stand-alone agent queries no directory.
    let load = fast_call("a load of unknown blocks", Duration::from_secs(2), || {
        client.load(&LoadRequest::new(keys.clone())).expect("a response")
    });
    assert!(load.blocks().iter().all(|block| block.status() == BlockStatus::Miss));
}

#[test]
fn a_commit_with_invalid_leases_keys_or_checksums_publishes_nothing() {
    let (env, agent) = env_with_agent();
    env.require("dropped a block in DRAM that does not match its checksums");
    let mut session = RawSession::with_handshake(&agent.files().socket, &small());
    session.send(2, request::Body::Reserve(local::Reserve { count: 3, kind: 0 }));
    let Some(response::Body::Reserved(reserved)) = session.receive().and_then(|response| response.body)
    else {
        panic!("expected slots");
    };
    let [first, second, third] = [0, 1, 2].map(|at| reserved.leases[at].lease);
    let item = |lease, key: &[u8], checksums: usize| local::CommitItem {
        lease,
        key: key.to_vec().into(),
        checksums: vec![0; 4 * checksums].into(),
    };
    let objects = small().objects() as usize;
    let items = vec![
        item(first, &[1; 15], objects),
        item(second, &key(1).0, objects - 1),
        item(third, &key(2).0, objects),
        item(third, &key(3).0, objects),
        // An unknown lease. Bit 31 would name an extent, which a commit of arena slots must not contain.
        item(u64::MAX ^ 1 << 31, &key(4).0, objects),
    ];
    session.send(3, request::Body::Commit(local::Commit { items, ..local::Commit::default() }));
    let Some(response::Body::Committed(committed)) = session.receive().and_then(|response| response.body)
    else {
        panic!("expected the result of the commit");
    };
    use local::CommitStatus::{BadItem, Committed, NoLease};
    assert_eq!(committed.statuses().collect::<Vec<_>>(), [BadItem, BadItem, Committed, NoLease, NoLease]);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
    // Checksums that do not match the slot's content are detected by the first load, and the block is
    // dropped.
    let engine = agent.engine(small());
    assert_eq!(engine.load(&[2], &LoadParams::LOCAL).expect("a load"), [Outcome::Corrupt]);
    assert_eq!(engine.matches(&[1], Scope::Local).len(), 0);
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 1);
}

#[test]
fn a_session_cannot_use_leases_of_another() {
    let (_world, agent) = env_with_agent();
    let holder = agent.engine(small());
    let held = holder.reserve(4).expect("slots");
    let mut thief = RawSession::with_handshake(&agent.files().socket, &small());
    let every: Vec<u64> = (0..64).collect();
    thief.send(2, request::Body::Abort(local::Abort { leases: every }));
    assert!(matches!(
        thief.receive(),
        Some(local::Response { id: 2, body: Some(response::Body::Aborted(_)) })
    ));
    let slots = held.len() as u64 * small().slot_bytes();
    assert_eq!(agent.admin().counter("reserved_bytes"), slots, "another session released the slots");
    let mut held = held;
    for (reservation, number) in held.iter_mut().zip(1..) {
        holder.fill(reservation, &key(number)).expect("filled");
    }
    let items = held.into_iter().zip(keys(&[1, 2, 3, 4])).collect();
    let committed = holder.client().commit(items, CommitOptions::default()).expect("committed");
    assert!(committed.statuses.iter().all(|status| status.is_committed()), "{:?}", committed.statuses);
    holder.load_all(&[1, 2, 3, 4], &LoadParams::LOCAL);
}

#[test]
fn thousands_of_dropped_reservations_are_all_released() {
    const SLOTS: usize = 4000;
    // A block has two objects of 4 KiB: the arena has room for 8,192 blocks, and a reservation of 4,000 twice
    // would not fit.
    let tiny = layout_of(1, 1);
    let env = TestEnv::new();
    let agent = env.agent(&AgentConfig { arena: ByteSize(64 << 20), ..AgentConfig::named("node") });
    let engine = agent.engine(tiny);
    let reserved = engine.reserve(SLOTS).expect("slots");
    let bytes = SLOTS as u64 * tiny.slot_bytes();
    assert_eq!(agent.admin().counter("reserved_bytes"), bytes);
    reserved.into_iter().for_each(drop);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
    // A reservation right after a drop finds the dropped slots.
    drop(engine.reserve(SLOTS).expect("slots"));
    let again = engine.client().reserve(SLOTS as u32, Duration::ZERO).expect("a response");
    assert_eq!(again.len(), SLOTS, "the request overtook the release before it");
}

#[test]
fn an_error_for_a_rejected_user_names_the_setting_to_change() {
    // The test runs a client as another user, which requires root.
    let own = std::fs::metadata("/proc/self").expect("/proc is mounted").uid();
    assert_eq!(
        own, 0,
        "this test needs root: run it with sudo, or skip it with --skip an_error_for_a_rejected_user"
    );
    let env = TestEnv::for_every_user();
    let copy = env.folder().join("unprivileged-client");
    copy_binary("reprise", &copy);
    let closed =
        env.agent(&AgentConfig { session: "mode = \"0660\"".into(), ..AgentConfig::named("closed") });
    let stderr = error_of_unprivileged_client(&copy, &closed);
    let socket = closed.files().socket.to_str().expect("our folders have plain names");
    for words in [socket, "user 65534", "0660", "group 0", "session.mode", "session.allow_uids", "denied"] {
        assert!(stderr.contains(words), "no '{words}' in: {stderr}");
    }
    let open = env.agent(&AgentConfig { session: "mode = \"0666\"".into(), ..AgentConfig::named("open") });
    env.require("session rejected");
    let stderr = error_of_unprivileged_client(&copy, &open);
    for words in ["user 65534", "session.allow_uids"] {
        assert!(stderr.contains(words), "no '{words}' in: {stderr}");
    }
    let session = "mode = \"0666\"\nallow_uids = [65534]".into();
    let listed = env.agent(&AgentConfig { session, ..AgentConfig::named("listed") });
    assert_eq!(error_of_unprivileged_client(&copy, &listed), "", "the suggested setting is enough");
}

/// Opens a session as an unprivileged user with this copy of `reprise engine`. Returns its standard error.
fn error_of_unprivileged_client(copy: &Path, agent: &Agent) -> String {
    let layout: String = small().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(copy);
    command.args(["engine", "--layout", &layout, "--socket"]).arg(&agent.files().socket);
    let output = command
        .uid(UNPRIVILEGED)
        .gid(UNPRIVILEGED)
        .stdin(Stdio::null())
        .output()
        .expect("the copy can be run");
    let stderr = String::from_utf8(output.stderr).expect("the error is UTF-8");
    assert_eq!(output.status.success(), stderr.is_empty(), "{}: {stderr}", output.status);
    stderr
}

#[test]
fn a_client_that_does_not_read_is_disconnected_and_delays_no_other() {
    let (env, agent) = env_with_agent();
    env.require("the client does not read");
    let mut deaf = RawSession::with_handshake(&agent.files().socket, &small());
    // Responses of some 4 KiB each: the socket buffers a few hundred KiB of them, a bounded queue the rest.
    let flood = std::thread::spawn(move || {
        for id in 2..200_000 {
            deaf.send(id, request::Body::Stats(local::Stats {}));
        }
        deaf
    });
    let engine = agent.engine(small());
    wait_until("the end of the session of the client that does not read", PATIENCE, || {
        engine.save_durably(&[1]);
        engine.load_all(&[1], &LoadParams::LOCAL);
        (agent.admin().counter("sessions") == 1).then_some(())
    });
    drop(flood.join().expect("writes to a closed session do not panic"));
}
