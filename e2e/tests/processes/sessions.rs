//! Clients that speak wrong, and sessions that do not fit together: a refusal with words or a miss, never a hang, and
//! nothing that others would feel.

use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rand::RngExt;
use reprise_client::{
    BlockStatus, Client, ClientError, CommitOptions, CommitStatus, ConnectOptions, LoadRequest, Scope,
};
use reprise_e2e::content::{key, keys, layout_of, small};
use reprise_e2e::process::copy_binary;
use reprise_e2e::raw::{RawSession, hello, wire_layout};
use reprise_e2e::seed::seeded;
use reprise_e2e::{Agent, AgentConfig, Loading, Outcome, PATIENCE, World, wait_until};
use reprise_policy::{ByteSize, NamespaceDigest};
use reprise_proto::local::{self, FailureKind, request, response};

/// User and group `nobody` on every Linux.
const NOBODY: u32 = 65534;

/// An agent and somebody who must feel nothing of what happens beside.
fn world_with_agent() -> (World, Agent) {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    (world, agent)
}

#[test]
fn a_greeting_that_does_not_fit_is_refused_with_words_and_the_session_ends() {
    let (world, agent) = world_with_agent();
    world.allow("session refused");
    let fits = hello(&small());
    let with_layout = |change: fn(&mut local::Layout)| {
        let mut layout = wire_layout(&small());
        change(&mut layout);
        local::Hello { layout: Some(layout), ..hello(&small()) }
    };
    for (greeting, kind, words) in [
        (local::Hello { protocol_version: 0, ..fits.clone() }, FailureKind::Version, ["protocol", "0"]),
        (local::Hello { protocol_version: 99, ..fits.clone() }, FailureKind::Version, ["99", "1"]),
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
        assert!(session.is_closed(), "the session goes on after: {message}");
    }
    let mut session = RawSession::connect(&agent.files().socket);
    session.send(7, request::Body::Stats(local::Stats {}));
    assert!(session.refusal().2.contains("first message"));
    assert!(session.is_closed());
    agent.engine(small()).save_durably(&[1]);
}

#[test]
fn a_namespace_of_one_tenant_is_refused_to_another_for_the_life_of_the_agent() {
    let (world, agent) = world_with_agent();
    world.allow("session refused");
    let of = |tenant: &str| local::Hello { tenant: tenant.to_owned(), ..hello(&small()) };
    let greet = |greeting: local::Hello| {
        let mut session = RawSession::connect(&agent.files().socket);
        session.send(5, request::Body::Hello(greeting));
        session
    };
    let welcome = |mut session: RawSession| {
        matches!(session.receive().and_then(|answer| answer.body), Some(response::Body::Welcome(_)))
    };
    assert!(welcome(greet(of("team-a"))));
    for other in ["team-b", ""] {
        let mut session = greet(of(other));
        let (id, kind, message) = session.refusal();
        assert_eq!((id, kind), (5, FailureKind::BadRequest));
        assert!(message.contains("belongs to tenant 'team-a'"), "{message}");
        assert!(session.is_closed());
    }
    let elsewhere = local::Hello { namespace: vec![9; 32].into(), ..of("team-b") };
    assert!(welcome(greet(elsewhere)), "in another namespace it is welcome");
    assert!(welcome(greet(of("team-a"))));
}

#[test]
fn frames_that_are_too_long_torn_or_garbage_end_their_session_and_no_other() {
    let (world, agent) = world_with_agent();
    world.allow("session refused");
    world.allow("session closed");
    let mut rng = seeded("garbage");
    let bystander = agent.engine(small());
    bystander.save_durably(&[1, 2, 3]);
    let socket = &agent.files().socket;
    // Too long: told so before anything is allocated.
    for length in [local::FRAME_BYTES_MAX as u32 + 1, u32::MAX] {
        let mut session = RawSession::greeted(socket, &small());
        session.send_bytes(&length.to_le_bytes());
        let (_, kind, message) = session.refusal();
        assert_eq!(kind, FailureKind::BadRequest);
        assert!(message.contains("limit"), "{message}");
        assert!(session.is_closed());
    }
    // Torn: a length without its bytes, then the end.
    let mut torn = RawSession::greeted(socket, &small());
    torn.send_bytes(&[200, 0, 0, 0, 1, 2, 3]);
    drop(torn);
    // Garbage before and after the greeting. Some of it is a message by chance, and answered; all of it has an end.
    for round in 0..64u32 {
        let mut garbage = vec![0; rng.random_range(1..300)];
        rng.fill(garbage.as_mut_slice());
        let mut session = match round % 2 {
            0 => RawSession::connect(socket),
            _ => RawSession::greeted(socket, &small()),
        };
        session.send_message(&garbage);
        session.send_message(&[0xff; 16]);
        let answers = (0..4).take_while(|_| !session.is_closed()).count();
        assert!(answers < 4, "garbage keeps a session open");
    }
    bystander.trim();
    bystander.load_all(&[1, 2, 3], &Loading::LOCAL);
    agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
}

#[test]
fn requests_that_make_no_sense_are_answered_and_the_session_goes_on() {
    let (_world, agent) = world_with_agent();
    let mut session = RawSession::greeted(&agent.files().socket, &small());
    let torn_keys = local::Match { keys: vec![0; 17].into(), local_only: true };
    let no_keys = local::Load { local_only: true, ..local::Load::default() };
    let many: Vec<u8> = vec![0; 16 * (local::KEYS_PER_CALL_MAX + 1)];
    let many_keys = local::Load { keys: many.into(), local_only: true, ..local::Load::default() };
    let bad = [
        request::Body::Match(torn_keys),
        request::Body::Load(no_keys),
        request::Body::Load(many_keys),
        request::Body::Reserve(local::Reserve { count: 0 }),
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
    let answer = session.receive();
    assert!(matches!(answer, Some(local::Response { id: 99, body: Some(response::Body::Stats(_)) })));
}

#[test]
fn a_connection_that_says_nothing_does_not_keep_others_out() {
    let (world, agent) = world_with_agent();
    world.allow("session refused");
    let _silent: Vec<RawSession> = (0..20).map(|_| RawSession::connect(&agent.files().socket)).collect();
    let started = Instant::now();
    agent.engine(small()).save_durably(&[1]);
    assert!(started.elapsed() < Duration::from_secs(4), "others wait for those who say nothing");
}

#[test]
fn two_sessions_of_different_layouts_never_see_each_others_blocks() {
    let (_world, agent) = world_with_agent();
    let (small_engine, wide) = (agent.engine(small()), agent.engine(layout_of(2, 2)));
    assert_eq!(small().block_bytes(), layout_of(2, 2).block_bytes(), "even blocks of one size");
    small_engine.save_durably(&[1, 2]);
    assert!(wide.matches(&[1, 2], Scope::Local).is_empty());
    let missing = Outcome::Missing(BlockStatus::Miss);
    assert_eq!(wide.load(&[1, 2], &Loading::LOCAL).expect("a load"), [missing, missing]);
    // The key is taken: a block of another layout cannot have it.
    let committed = wide.save(&[1]).expect("a commit");
    assert_eq!(committed.statuses, [CommitStatus::BadItem]);
    let outcome = wide.client().wait_durable(committed.ticket, PATIENCE).expect("a notice");
    assert_eq!(outcome.durable, 0);
    small_engine.trim();
    small_engine.load_all(&[1, 2], &Loading::LOCAL);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
}

#[test]
fn a_block_larger_than_a_region_is_refused_with_the_remedy() {
    let (_world, agent) = world_with_agent();
    // 16 MiB a block; the regions have 8 MiB.
    let engine = agent.engine(layout_of(64, 32));
    let error = engine.client().reserve(1, Duration::ZERO).expect_err("no slot can be so large");
    assert!(
        matches!(&error, ClientError::BadRequest(text) if text.contains("arena.region_bytes")),
        "{error}"
    );
    let error = engine.load(&[1], &Loading::LOCAL).expect_err("no slot can be so large");
    assert!(
        matches!(&error, ClientError::BadRequest(text) if text.contains("arena.region_bytes")),
        "{error}"
    );
}

#[test]
fn a_namespace_that_nobody_has_saved_in_is_a_miss_at_once() {
    let (_world, agent) = world_with_agent();
    agent.engine(small()).save_durably(&[1, 2, 3]);
    let other = NamespaceDigest([9; 32]);
    let options = ConnectOptions::new(&agent.files().socket, other, small()).call_timeout(PATIENCE);
    let client = Client::connect(options).expect("any namespace may be asked for");
    let of_other = |number: u64| {
        reprise_policy::BlockKey::derive(
            &other,
            &number.to_le_bytes(),
            reprise_policy::key::KeyPart::default(),
        )
    };
    let keys: Vec<_> = (1..4).map(of_other).collect();
    assert!(client.match_keys(&keys, Scope::Cluster).expect("an answer").is_empty());
    let started = Instant::now();
    let load = client.load(&LoadRequest::new(keys)).expect("an answer");
    assert!(load.blocks().iter().all(|block| block.status() == BlockStatus::Miss));
    assert!(started.elapsed() < Duration::from_secs(2), "a stand-alone agent has nobody to ask");
}

#[test]
fn a_commit_without_right_leases_keys_or_checksums_publishes_nothing() {
    let (world, agent) = world_with_agent();
    world.require("a block in DRAM no longer matched its checksums");
    let mut session = RawSession::greeted(&agent.files().socket, &small());
    session.send(2, request::Body::Reserve(local::Reserve { count: 3 }));
    let Some(response::Body::Reserved(reserved)) = session.receive().and_then(|response| response.body)
    else {
        panic!("slots were asked for");
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
        item(u64::MAX, &key(4).0, objects),
    ];
    session.send(3, request::Body::Commit(local::Commit { items, priority: 0, parent: Default::default() }));
    let Some(response::Body::Committed(committed)) = session.receive().and_then(|response| response.body)
    else {
        panic!("a commit was sent");
    };
    use local::CommitStatus::{BadItem, Committed, NoLease};
    assert_eq!(committed.statuses().collect::<Vec<_>>(), [BadItem, BadItem, Committed, NoLease, NoLease]);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
    // What was committed with wrong checksums is not what was in the slot: whoever loads it finds out, and it goes.
    let engine = agent.engine(small());
    assert_eq!(engine.load(&[2], &Loading::LOCAL).expect("a load"), [Outcome::Detected]);
    assert_eq!(engine.matches(&[1], Scope::Local).len(), 0);
    agent.admin().wait_for("dram_corrupt_blocks", PATIENCE, |dropped| dropped == 1);
}

#[test]
fn a_lease_of_one_session_is_nothing_to_another() {
    let (_world, agent) = world_with_agent();
    let holder = agent.engine(small());
    let held = holder.reserve(4).expect("slots");
    let mut thief = RawSession::greeted(&agent.files().socket, &small());
    let every: Vec<u64> = (0..64).collect();
    thief.send(2, request::Body::Abort(local::Abort { leases: every }));
    assert!(matches!(
        thief.receive(),
        Some(local::Response { id: 2, body: Some(response::Body::Aborted(_)) })
    ));
    let slots = held.len() as u64 * small().slot_bytes();
    assert_eq!(agent.admin().counter("reserved_bytes"), slots, "somebody else gave the slots back");
    let mut held = held;
    for (reservation, number) in held.iter_mut().zip(1..) {
        holder.fill(reservation, &key(number)).expect("filled");
    }
    let items = held.into_iter().zip(keys(&[1, 2, 3, 4])).collect();
    let committed = holder.client().commit(items, CommitOptions::default()).expect("committed");
    assert!(committed.statuses.iter().all(|status| status.is_committed()), "{:?}", committed.statuses);
    holder.load_all(&[1, 2, 3, 4], &Loading::LOCAL);
}

#[test]
fn thousands_of_reservations_that_are_dropped_one_by_one_are_all_given_back() {
    const SLOTS: usize = 4000;
    // Two objects of 4 KiB a block: the arena has room for 8,192, and less than twice as many may be reserved.
    let tiny = layout_of(1, 1);
    let world = World::new();
    let agent = world.agent(&AgentConfig { arena: ByteSize(64 << 20), ..AgentConfig::named("node") });
    let engine = agent.engine(tiny);
    let reserved = engine.reserve(SLOTS).expect("slots");
    let bytes = SLOTS as u64 * tiny.slot_bytes();
    assert_eq!(agent.admin().counter("reserved_bytes"), bytes);
    reserved.into_iter().for_each(drop);
    agent.admin().wait_for("reserved_bytes", PATIENCE, |bytes| bytes == 0);
    // Whoever drops and asks again at once finds what was dropped.
    drop(engine.reserve(SLOTS).expect("slots"));
    let again = engine.client().reserve(SLOTS as u32, Duration::ZERO).expect("an answer");
    assert_eq!(again.len(), SLOTS, "the request overtook what was given back before it");
}

#[test]
fn a_user_whom_the_agent_does_not_admit_is_told_what_to_change() {
    // Runs a client as another user, which only root may.
    let own = std::fs::metadata("/proc/self").expect("/proc is mounted").uid();
    assert_eq!(own, 0, "this test needs root: run it with sudo, or leave it out with --skip whom_the_agent");
    let world = World::for_every_user();
    let copy = world.folder().join("client-of-nobody");
    copy_binary("reprise", &copy);
    let closed =
        world.agent(&AgentConfig { session: "mode = \"0660\"".into(), ..AgentConfig::named("closed") });
    let said = said_to_nobody(&copy, &closed);
    let socket = closed.files().socket.to_str().expect("our folders have plain names");
    for words in [socket, "user 65534", "0660", "group 0", "session.mode", "session.allow_uids", "denied"] {
        assert!(said.contains(words), "no '{words}' in: {said}");
    }
    let open = world.agent(&AgentConfig { session: "mode = \"0666\"".into(), ..AgentConfig::named("open") });
    world.require("session refused");
    let said = said_to_nobody(&copy, &open);
    for words in ["user 65534", "session.allow_uids"] {
        assert!(said.contains(words), "no '{words}' in: {said}");
    }
    let session = "mode = \"0666\"\nallow_uids = [65534]".into();
    let listed = world.agent(&AgentConfig { session, ..AgentConfig::named("listed") });
    assert_eq!(said_to_nobody(&copy, &listed), "", "what the words ask for is enough");
}

/// Opens a session as nobody, with this copy of the command line's engine; what it has to say about that.
fn said_to_nobody(copy: &Path, agent: &Agent) -> String {
    let layout: String = small().encode().iter().map(|byte| format!("{byte:02x}")).collect();
    let mut command = Command::new(copy);
    command.args(["engine", "--layout", &layout, "--socket"]).arg(&agent.files().socket);
    let output = command.uid(NOBODY).gid(NOBODY).stdin(Stdio::null()).output().expect("it can be run");
    let said = String::from_utf8(output.stderr).expect("words are UTF-8");
    assert_eq!(output.status.success(), said.is_empty(), "{}: {said}", output.status);
    said
}

#[test]
fn a_client_that_does_not_read_is_closed_and_delays_nobody() {
    let (world, agent) = world_with_agent();
    world.require("its client does not read");
    let mut deaf = RawSession::greeted(&agent.files().socket, &small());
    // Answers of some 4 KiB each: the socket takes a few hundred KiB of them, a bounded queue the rest.
    let flood = std::thread::spawn(move || {
        for id in 2..200_000 {
            deaf.send(id, request::Body::Stats(local::Stats {}));
        }
        deaf
    });
    let engine = agent.engine(small());
    wait_until("the end of the session that does not read", PATIENCE, || {
        engine.save_durably(&[1]);
        engine.load_all(&[1], &Loading::LOCAL);
        (agent.admin().counter("sessions") == 1).then_some(())
    });
    drop(flood.join().expect("sending to a closed session fails quietly"));
}
