//! Engines that die, hold too much or come in crowds: what they held comes back, and whoever asks too much is told so.

use std::io::{Read, Write};
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reprise_client::{ClientError, LoadRequest, Reservation, Scope};
use reprise_e2e::content::{key, keys, small};
use reprise_e2e::raw::RawSession;
use reprise_e2e::{Agent, AgentConfig, Engine, Loading, Outcome, PATIENCE, World, wait_until};
use reprise_proto::local::{self, request, response};

/// Set in the process that this executable starts of itself, to be an engine that gets killed.
const VICTIM: &str = "REPRISE_E2E_VICTIM_SOCKET";

/// Sessions that an agent takes at the same time.
const SESSIONS_MAX: usize = 256;

/// Loads that a session may hold: entries of its progress page.
const LOADS_HELD_MAX: usize = 64;

/// More slots than the arena has.
const MORE_THAN_ALL: u32 = 8192;

/// Everything that one engine can get of the arena.
fn reserve_all(engine: &Engine) -> Vec<Reservation> {
    let mut all = Vec::new();
    loop {
        let more = engine.client().reserve(MORE_THAN_ALL, Duration::ZERO).expect("an answer");
        if more.is_empty() {
            return all;
        }
        all.extend(more);
    }
}

/// Nothing of the arena is held by anybody.
fn assert_all_given_back(agent: &Agent) {
    let counters = agent.admin().wait_quiet(PATIENCE);
    assert_eq!(counters.get("loads_held"), 0);
}

#[test]
fn an_engine_that_is_killed_gives_back_its_reservations_and_loads() {
    if let Some(socket) = std::env::var_os(VICTIM) {
        return be_killed(Path::new(&socket));
    }
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    engine.save_durably(&(0..40).collect::<Vec<_>>());
    agent.admin().wait_quiet(PATIENCE);
    engine.trim();
    let whole = reserve_all(&engine).len();
    assert!(whole > 300, "three quarters of 512 slots: {whole}");
    for round in 0..5 {
        let mut victim = Command::new(std::env::current_exe().expect("this executable"))
            .args([
                "--exact",
                "engines::an_engine_that_is_killed_gives_back_its_reservations_and_loads",
                "--nocapture",
            ])
            .env(VICTIM, &agent.files().socket)
            .stdout(Stdio::piped())
            .spawn()
            .expect("an engine can be started");
        let mut output = victim.stdout.take().expect("piped");
        let mut said = Vec::new();
        while !said.ends_with(b"holding\n") {
            let mut byte = [0];
            output.read_exact(&mut byte).expect("the engine says that it holds leases");
            said.push(byte[0]);
        }
        let counters = agent.admin().counters();
        assert!(counters.get("reserved_bytes") > 0 && counters.get("read_leases") >= 40);
        assert!(
            engine.client().reserve(1, Duration::ZERO).expect("an answer").is_empty(),
            "the victim has all"
        );
        victim.kill().expect("killed");
        victim.wait().expect("it ends");
        assert_all_given_back(&agent);
        engine.trim();
        assert_eq!(reserve_all(&engine).len(), whole, "slots that came back after kill {round}");
    }
    engine.load_all(&(0..40).collect::<Vec<_>>(), &Loading::LOCAL);
}

/// Takes everything, says so, and waits for the end.
fn be_killed(socket: &Path) {
    let engine = Engine::connect(socket, small()).expect("a session");
    let load = engine.client().load(&LoadRequest::new(keys(&(0..40).collect::<Vec<_>>()))).expect("a load");
    let held = reserve_all(&engine);
    let mut output = std::io::stdout();
    output.write_all(b"holding\n").and_then(|()| output.flush()).expect("said");
    loop {
        std::thread::park();
        assert!(held.len() + load.blocks().len() > 0);
    }
}

#[test]
fn a_socket_that_is_dropped_at_any_point_of_a_session_leaves_nothing_behind() {
    let world = World::new();
    world.allow("session refused");
    let agent = world.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    engine.save_durably(&(0..20).collect::<Vec<_>>());
    let whole = reserve_all(&engine).len();
    let packed = reprise_policy::BlockKey::pack(&keys(&(0..20).collect::<Vec<_>>()));
    let load = local::Load { keys: packed.into(), local_only: true, ..local::Load::default() };
    let bodies = [
        request::Body::Reserve(local::Reserve { count: 30 }),
        request::Body::Load(load.clone()),
        request::Body::Load(load),
        request::Body::Reserve(local::Reserve { count: MORE_THAN_ALL }),
    ];
    for answers in 0..=bodies.len() {
        engine.trim();
        let mut session = RawSession::greeted(&agent.files().socket, &small());
        for (id, body) in (2..).zip(&bodies) {
            session.send(id, body.clone());
        }
        for _ in 0..answers {
            session.receive().expect("answers to good requests");
        }
        // With some answers read and others not, in the middle of loads from disk.
        drop(session);
        agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
        assert_all_given_back(&agent);
    }
    assert_eq!(reserve_all(&engine).len(), whole);
}

#[test]
fn an_engine_that_finds_the_arena_full_waits_and_gets_what_another_gives_back() {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let (greedy, patient) = (agent.engine(small()), agent.engine(small()));
    let held = reserve_all(&greedy);
    let started = Instant::now();
    assert!(patient.client().reserve(1, Duration::from_millis(50)).expect("an answer").is_empty());
    assert!(started.elapsed() >= Duration::from_millis(50), "it waited as long as it was told to");
    let waiting = std::thread::spawn(move || patient.client().reserve(5, PATIENCE).map(|slots| slots.len()));
    let asked = agent.admin().counter("reserves");
    agent.admin().wait_for("reserves", PATIENCE, |reserves| reserves > asked);
    drop(held);
    let got = waiting.join().expect("no panic").expect("slots");
    assert!((1..=5).contains(&got));
    assert_all_given_back(&agent);
}

#[test]
fn engines_that_save_faster_than_the_disk_are_slowed_down_and_lose_nothing() {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    // Three engines, each 24 MiB through an arena of 16.
    std::thread::scope(|scope| {
        for engine in 0..3u64 {
            let agent = &agent;
            scope.spawn(move || {
                let session = agent.engine(small());
                let mut tickets = Vec::new();
                let numbers: Vec<u64> = (engine * 1000..engine * 1000 + 500).collect();
                for some in numbers.chunks(50) {
                    tickets.push(session.save(some).expect("room comes when blocks are written").ticket);
                }
                for ticket in tickets {
                    let outcome = session.client().wait_durable(ticket, PATIENCE).expect("a notice");
                    assert_eq!((outcome.durable, outcome.lost_keys.len()), (50, 0));
                }
            });
        }
    });
    let engine = agent.engine(small());
    for from in [0, 1000, 2000] {
        for some in (from..from + 500).collect::<Vec<u64>>().chunks(100) {
            engine.load_all(some, &Loading::LOCAL);
        }
    }
}

#[test]
fn a_load_that_does_not_fit_beside_what_is_held_says_which_blocks_have_no_room() {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    let all: Vec<u64> = (0..600).collect();
    for some in all.chunks(100) {
        engine.save_durably(some);
    }
    engine.trim();
    let outcomes = engine.load(&all, &Loading::LOCAL).expect("an answer");
    let right = outcomes.iter().filter(|outcome| outcome.is_right()).count();
    let no_room = Outcome::Missing(reprise_client::BlockStatus::NoSpace);
    assert_eq!(right, 512, "the arena has 512 slots of this size");
    assert_eq!(outcomes.iter().filter(|outcome| **outcome == no_room).count(), 600 - 512);
    engine.load_all(&all[550..], &Loading::LOCAL);
}

#[test]
fn a_session_that_holds_as_many_loads_as_it_may_is_told_so() {
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let engine = agent.engine(small());
    engine.save_durably(&[1]);
    let request = LoadRequest { scope: Scope::Local, ..LoadRequest::new(vec![key(1)]) };
    let mut held: Vec<_> =
        (0..LOADS_HELD_MAX).map(|_| engine.client().load(&request).expect("a load")).collect();
    let error = engine.client().load(&request).expect_err("one more than the progress page has entries");
    assert!(matches!(&error, ClientError::Busy(text) if text.contains("release")), "{error}");
    held.pop();
    engine.load_all(&[1], &Loading::LOCAL);
}

#[test]
fn one_session_too_many_is_refused_with_words_and_taken_when_another_has_ended() {
    let world = World::new();
    world.require("256 sessions are open already");
    let agent = world.agent(&AgentConfig::named("node"));
    let mut sessions: Vec<Engine> = (0..SESSIONS_MAX).map(|_| agent.engine(small())).collect();
    assert_eq!(agent.admin().counter("sessions"), SESSIONS_MAX as u64);
    for _ in 0..20 {
        let error = agent.connect(small()).expect_err("one session too many");
        assert!(error.to_string().contains("256 sessions are open already"), "{error}");
    }
    sessions[0].save_durably(&[1]);
    sessions[SESSIONS_MAX - 1].load_all(&[1], &Loading::LOCAL);
    sessions.pop();
    let late = wait_until("a free seat", PATIENCE, || agent.connect(small()).ok());
    late.load_all(&[1], &Loading::LOCAL);
    drop(sessions);
    agent.admin().wait_for("sessions", PATIENCE, |sessions| sessions == 1);
}

#[test]
fn requests_sent_without_waiting_are_each_answered_once() {
    // Fewer than an agent lets wait for a client that does not read meanwhile.
    const REQUESTS: usize = 1500;
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let mut session = RawSession::greeted(&agent.files().socket, &small());
    let packed = reprise_policy::BlockKey::pack(&[key(1)]);
    for id in 0..REQUESTS {
        let keys = local::Match { keys: packed.clone().into(), local_only: true };
        session.send(id as u64 + 2, request::Body::Match(keys));
    }
    let mut answered = [0; REQUESTS];
    for _ in 0..REQUESTS {
        let response = session.receive().expect("every request is answered");
        let fine = match response.body {
            Some(response::Body::Matched(_)) => true,
            Some(response::Body::Failure(failure)) => failure.kind() == local::FailureKind::Busy,
            _ => false,
        };
        assert!(fine, "a match or 'busy'");
        answered[usize::try_from(response.id - 2).expect("one of ours")] += 1;
    }
    assert!(answered.iter().all(|times| *times == 1), "one answer each");
}

#[test]
fn what_gives_slots_back_is_taken_however_many_requests_wait() {
    // More than may wait for their answer, and fewer than an agent keeps answers for to a client that does not read.
    const REQUESTS: u64 = 1500;
    let world = World::new();
    let agent = world.agent(&AgentConfig::named("node"));
    let mut session = RawSession::greeted(&agent.files().socket, &small());
    session.send(2, request::Body::Reserve(local::Reserve { count: 256 }));
    let Some(response::Body::Reserved(reserved)) = session.receive().and_then(|response| response.body)
    else {
        panic!("slots are there");
    };
    assert!(agent.admin().counter("reserved_bytes") > 0);
    let packed = reprise_policy::BlockKey::pack(&keys(&(0..64).collect::<Vec<_>>()));
    for id in 0..REQUESTS {
        let keys = local::Match { keys: packed.clone().into(), local_only: true };
        session.send(100 + id, request::Body::Match(keys));
        if let Some(lease) = reserved.leases.get(usize::try_from(id).expect("few")) {
            let leases = vec![lease.lease];
            session.send(100_000 + id, request::Body::Abort(local::Abort { leases }));
        }
    }
    for _ in 0..REQUESTS + reserved.leases.len() as u64 {
        let response = session.receive().expect("every request is answered");
        let given_back = matches!(response.body, Some(response::Body::Aborted(_)));
        assert!(response.id < 100_000 || given_back, "refused to take a slot back: {response:?}");
    }
    assert_eq!(agent.admin().counter("reserved_bytes"), 0);
}
