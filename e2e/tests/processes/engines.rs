//! Engines that die, hold too much or are too many: resources are released, and excessive requests are
//! rejected.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reprise_client::{ClientError, LoadRequest, Reservation, Scope};
use reprise_e2e::content::{key, keys, small};
use reprise_e2e::raw::RawSession;
use reprise_e2e::{Agent, AgentConfig, Engine, LoadParams, Outcome, PATIENCE, TestEnv, wait_until};
use reprise_proto::local::{self, request, response};

/// Set in the child process of this executable that acts as the killed engine.
const VICTIM: &str = "REPRISE_E2E_VICTIM_SOCKET";

/// Maximum number of concurrent sessions of an agent.
const SESSIONS_MAX: usize = 256;

/// Maximum number of held loads of a session: the entries of its progress page.
const LOADS_HELD_MAX: usize = 64;

/// More slots than the arena has.
const MORE_THAN_ALL: u32 = 8192;

/// Reserves everything that one engine can get of the arena.
fn reserve_all(engine: &Engine) -> Vec<Reservation> {
    let mut all = Vec::new();
    loop {
        let more = engine.client().reserve(MORE_THAN_ALL, Duration::ZERO).expect("a response");
        if more.is_empty() {
            return all;
        }
        all.extend(more);
    }
}

/// Checks that no session holds anything of the arena.
fn assert_all_released(agent: &Agent) {
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_eq!(counters.get("loads_held"), 0);
}

#[test]
fn a_killed_engine_releases_its_reservations_and_loads() {
    if let Some(socket) = std::env::var_os(VICTIM) {
        return be_killed(Path::new(&socket));
    }
    let (_env, agent) = TestEnv::with_agent("node");
    let engine = agent.engine(small());
    engine.save_durably(&(0..40).collect::<Vec<_>>());
    agent.admin().wait_quiet(PATIENCE);
    engine.trim();
    let capacity = reserve_all(&engine).len();
    assert!(capacity > 300, "three quarters of 512 slots: {capacity}");
    for round in 0..5 {
        let mut victim = Command::new(std::env::current_exe().expect("this executable"))
            .args([
                "--exact",
                "processes::engines::a_killed_engine_releases_its_reservations_and_loads",
                "--nocapture",
            ])
            .env(VICTIM, &agent.files().socket)
            .stdout(Stdio::piped())
            .spawn()
            .expect("an engine can be started");
        let mut output = victim.stdout.take().expect("piped");
        let mut printed = Vec::new();
        while !printed.ends_with(b"holding\n") {
            let mut byte = [0];
            output.read_exact(&mut byte).expect("the engine prints that it holds leases");
            printed.push(byte[0]);
        }
        let counters = agent.admin().counters();
        assert!(counters.get("reserved_bytes") > 0 && counters.get("read_leases") >= 40);
        assert!(
            engine.client().reserve(1, Duration::ZERO).expect("a response").is_empty(),
            "the victim holds all slots"
        );
        victim.kill().expect("killed");
        victim.wait().expect("the killed engine exits");
        assert_all_released(&agent);
        engine.trim();
        assert_eq!(reserve_all(&engine).len(), capacity, "released slots after kill {round}");
    }
    engine.load_all(&(0..40).collect::<Vec<_>>(), &LoadParams::LOCAL);
}

/// Reserves everything, prints that, and waits to be killed.
fn be_killed(socket: &Path) {
    let engine = Engine::connect(socket, small()).expect("a session");
    let load = engine.client().load(&LoadRequest::new(keys(&(0..40).collect::<Vec<_>>()))).expect("a load");
    let held = reserve_all(&engine);
    let mut output = std::io::stdout();
    output.write_all(b"holding\n").and_then(|()| output.flush()).expect("the pipe is open");
    loop {
        std::thread::park();
        assert!(held.len() + load.blocks().len() > 0);
    }
}

#[test]
fn a_session_that_ends_at_any_point_leaves_nothing_behind() {
    let env = TestEnv::new();
    env.allow("session rejected");
    let agent = env.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    engine.save_durably(&(0..20).collect::<Vec<_>>());
    let capacity = reserve_all(&engine).len();
    let packed = reprise_policy::BlockKey::pack(&keys(&(0..20).collect::<Vec<_>>()));
    let load = local::Load { keys: packed.into(), local_only: true, ..local::Load::default() };
    let bodies = [
        request::Body::Reserve(local::Reserve { count: 30, kind: 0 }),
        request::Body::Load(load.clone()),
        request::Body::Load(load),
        request::Body::Reserve(local::Reserve { count: MORE_THAN_ALL, kind: 0 }),
    ];
    for answers in 0..=bodies.len() {
        engine.trim();
        let mut session = RawSession::with_handshake(&agent.files().socket, &small());
        for (id, body) in (2..).zip(&bodies) {
            session.send(id, body.clone());
        }
        for _ in 0..answers {
            session.receive().expect("responses to valid requests");
        }
        // The session ends with unread responses, in the middle of loads from disk.
        drop(session);
        agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
        assert_all_released(&agent);
    }
    assert_eq!(reserve_all(&engine).len(), capacity);
}

#[test]
fn an_engine_that_finds_the_arena_full_waits_for_released_slots() {
    let (_env, agent) = TestEnv::with_agent("node");
    let (greedy, patient) = (agent.engine(small()), agent.engine(small()));
    let held = reserve_all(&greedy);
    let started = Instant::now();
    assert!(patient.client().reserve(1, Duration::from_millis(50)).expect("a response").is_empty());
    assert!(started.elapsed() >= Duration::from_millis(50), "the call waits for its timeout");
    let waiting = std::thread::spawn(move || patient.client().reserve(5, PATIENCE).map(|slots| slots.len()));
    let before = agent.admin().counter("reserves");
    agent.admin().wait_for("reserves", PATIENCE, |reserves| reserves > before);
    drop(held);
    let count = waiting.join().expect("no panic").expect("slots");
    assert!((1..=5).contains(&count));
    assert_all_released(&agent);
}

#[test]
fn engines_that_save_faster_than_the_disk_wait_and_lose_nothing() {
    let (_env, agent) = TestEnv::with_agent("node");
    // Three engines, each with 24 MiB through an arena of 16 MiB.
    std::thread::scope(|scope| {
        for engine in 0..3u64 {
            let agent = &agent;
            scope.spawn(move || {
                let session = agent.engine(small());
                let mut tickets = Vec::new();
                let numbers: Vec<u64> = (engine * 1000..engine * 1000 + 500).collect();
                for batch in numbers.chunks(50) {
                    tickets.push(session.save(batch).expect("written blocks make room").ticket);
                }
                for ticket in tickets {
                    let outcome =
                        session.client().wait_durable(ticket, PATIENCE).expect("a durability notice");
                    assert_eq!((outcome.durable, outcome.lost_keys.len()), (50, 0));
                }
            });
        }
    });
    let engine = agent.engine(small());
    for from in [0, 1000, 2000] {
        for batch in (from..from + 500).collect::<Vec<u64>>().chunks(100) {
            engine.load_all(batch, &LoadParams::LOCAL);
        }
    }
}

#[test]
fn a_load_larger_than_the_arena_reports_the_blocks_without_room() {
    let (_env, agent) = TestEnv::with_agent("node");
    let engine = agent.engine(small());
    let all: Vec<u64> = (0..600).collect();
    for batch in all.chunks(100) {
        engine.save_durably(batch);
    }
    engine.trim();
    let outcomes = engine.load(&all, &LoadParams::LOCAL).expect("a response");
    let verified = outcomes.iter().filter(|outcome| outcome.is_verified()).count();
    let no_room = Outcome::Missing(reprise_client::BlockStatus::NoSpace);
    assert_eq!(verified, 512, "the arena has 512 slots of this size");
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == no_room).count(), 600 - 512);
    engine.load_all(&all[550..], &LoadParams::LOCAL);
}

#[test]
fn rejects_a_load_beyond_the_limit_of_held_loads() {
    let (_env, agent) = TestEnv::with_agent("node");
    let engine = agent.engine(small());
    engine.save_durably(&[1]);
    let request = LoadRequest { scope: Scope::Local, ..LoadRequest::new(vec![key(1)]) };
    let mut held: Vec<_> =
        (0..LOADS_HELD_MAX).map(|_| engine.client().load(&request).expect("a load")).collect();
    let error = engine.client().load(&request).expect_err("the progress page has no free entry");
    assert!(matches!(&error, ClientError::Busy(text) if text.contains("release")), "{error}");
    held.pop();
    engine.load_all(&[1], &LoadParams::LOCAL);
}

#[test]
fn rejects_a_session_beyond_the_limit_until_another_one_ends() {
    let env = TestEnv::new();
    env.require("the limit of 256 sessions is reached");
    let agent = env.agent(&AgentConfig::named("node"));
    let mut sessions: Vec<Engine> = (0..SESSIONS_MAX).map(|_| agent.engine(small())).collect();
    assert_eq!(agent.admin().counter("sessions"), SESSIONS_MAX as u64);
    for _ in 0..20 {
        let error = agent.connect(small()).expect_err("the limit is reached");
        assert!(error.to_string().contains("the limit of 256 sessions is reached"), "{error}");
    }
    sessions[0].save_durably(&[1]);
    sessions[SESSIONS_MAX - 1].load_all(&[1], &LoadParams::LOCAL);
    sessions.pop();
    let late = wait_until("room for another session", PATIENCE, || agent.connect(small()).ok());
    late.load_all(&[1], &LoadParams::LOCAL);
    drop(sessions);
    agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
}

#[test]
fn each_pipelined_request_gets_one_response() {
    // Fewer than the responses that an agent queues for a client that does not read.
    const REQUESTS: usize = 1500;
    let (_env, agent) = TestEnv::with_agent("node");
    let mut session = RawSession::with_handshake(&agent.files().socket, &small());
    let packed = reprise_policy::BlockKey::pack(&[key(1)]);
    for id in 0..REQUESTS {
        let keys = local::Match { keys: packed.clone().into(), local_only: true, ..local::Match::default() };
        session.send(id as u64 + 2, request::Body::Match(keys));
    }
    let mut responses = [0; REQUESTS];
    for _ in 0..REQUESTS {
        let response = session.receive().expect("every request gets a response");
        let is_expected = match response.body {
            Some(response::Body::Matched(_)) => true,
            Some(response::Body::Failure(failure)) => failure.kind() == local::FailureKind::Busy,
            _ => false,
        };
        assert!(is_expected, "a match or 'busy'");
        responses[usize::try_from(response.id - 2).expect("an id of this session")] += 1;
    }
    assert!(responses.iter().all(|times| *times == 1), "one response each");
}

#[test]
fn aborts_are_accepted_even_while_many_requests_are_pending() {
    // More than the limit of pending requests, and fewer than the responses that an agent queues for a client
    // that does not read.
    const REQUESTS: u64 = 1500;
    let (_env, agent) = TestEnv::with_agent("node");
    let mut session = RawSession::with_handshake(&agent.files().socket, &small());
    session.send(2, request::Body::Reserve(local::Reserve { count: 256, kind: 0 }));
    let Some(response::Body::Reserved(reserved)) = session.receive().and_then(|response| response.body)
    else {
        panic!("expected slots");
    };
    assert!(agent.admin().counter("reserved_bytes") > 0);
    let packed = reprise_policy::BlockKey::pack(&keys(&(0..64).collect::<Vec<_>>()));
    for id in 0..REQUESTS {
        let keys = local::Match { keys: packed.clone().into(), local_only: true, ..local::Match::default() };
        session.send(100 + id, request::Body::Match(keys));
        if let Some(lease) = reserved.leases.get(usize::try_from(id).expect("few")) {
            let leases = vec![lease.lease];
            session.send(100_000 + id, request::Body::Abort(local::Abort { leases }));
        }
    }
    for _ in 0..REQUESTS + reserved.leases.len() as u64 {
        let response = session.receive().expect("every request gets a response");
        let is_aborted = matches!(response.body, Some(response::Body::Aborted(_)));
        assert!(response.id < 100_000 || is_aborted, "an abort was rejected: {response:?}");
    }
    assert_eq!(agent.admin().counter("reserved_bytes"), 0);
}
