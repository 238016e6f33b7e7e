//! The session keeper with absent, restarted and silent agents, and its drop.

use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::Instant;

use reprise_client::{ClientError, KeeperStatus, Scope, SessionKeeper};
use reprise_proto::local::{self, response};

use crate::fake_agent::{FakeAgent, Grant, LONG, Peer, SHORT, Script, key, options};

fn keeper(agent: &FakeAgent) -> SessionKeeper {
    SessionKeeper::new(agent.options()).expect("a thread")
}

/// Waits until the keeper's status fulfils a condition.
fn wait_for(keeper: &SessionKeeper, what: &str, is_so: impl Fn(&KeeperStatus) -> bool) {
    let until = Instant::now() + LONG;
    while !is_so(&keeper.status()) {
        assert!(Instant::now() < until, "not {what}: {:?}", keeper.status());
        std::thread::yield_now();
    }
}

/// Answers probes until the client closes.
fn answer_probes(peer: &mut Peer) {
    while let Some((id, _)) = peer.receive() {
        peer.reply_stats(id);
    }
}

#[test]
fn status_has_the_reason_while_there_is_no_agent() {
    let directory = tempfile::tempdir().expect("a directory");
    let keeper = SessionKeeper::new(options(&directory.path().join("absent"))).expect("a thread");
    wait_for(&keeper, "an attempt", |status| status.last_error.is_some());
    let status = keeper.status();
    assert!(status.last_error.as_ref().is_some_and(|words| words.contains("no agent at")), "{status:?}");
    assert_eq!((status.is_connected, status.sessions), (false, 0));
    assert_eq!(status.last_error_kind, Some("AgentAbsent"));
    assert!(keeper.refusal(LONG).is_none(), "the agent may start later");
    assert!(keeper.current().is_none());
    assert!(keeper.unavailable_reason().to_string().contains("no agent at"));
}

fn failure(kind: local::FailureKind, words: &str) -> response::Body {
    response::Body::Failure(local::Failure { kind: kind as i32, message: words.to_owned() })
}

/// Rejects the greeting of a session.
fn refuse_greeting(kind: local::FailureKind, words: &'static str) -> Script {
    Box::new(move |peer| {
        let (id, _) = peer.expect("hello");
        peer.reply(id, failure(kind, words));
    })
}

/// Rejects the process before it has sent a request.
fn turn_away(kind: local::FailureKind, words: &'static str) -> Script {
    Box::new(move |peer| peer.reply(0, failure(kind, words)))
}

/// Accepts the session and rejects a reservation.
fn refuse_slot(words: &'static str) -> Script {
    Box::new(move |peer| {
        peer.greet();
        let (id, count) = peer.expect_reserve();
        assert_eq!(count, 1);
        peer.reply(id, failure(local::FailureKind::BadRequest, words));
        assert!(peer.receive().is_none(), "the client closes");
    })
}

#[test]
fn refusal_is_known_after_the_first_answer() {
    use local::FailureKind::{BadRequest, Version};
    for (script, kind, words) in [
        (refuse_greeting(Version, "agent speaks 9"), "Version", "agent speaks 9"),
        (refuse_greeting(BadRequest, "another tenant's"), "BadRequest", "another tenant's"),
        (turn_away(BadRequest, "user 7 may not"), "BadRequest", "user 7 may not"),
        (refuse_slot("raise arena.region_bytes"), "BadRequest", "region_bytes"),
    ] {
        let agent = FakeAgent::start_in_sequence(vec![script]);
        let keeper = keeper(&agent);
        let refusal = keeper.refusal(LONG).expect("the agent refuses");
        assert_eq!(refusal.kind(), kind);
        assert!(refusal.to_string().contains(words), "{refusal}");
        drop(keeper);
        agent.join();
    }
}

#[test]
fn busy_silent_and_accepting_agents_are_not_a_refusal() {
    let full = FakeAgent::start_in_sequence(vec![turn_away(local::FailureKind::Busy, "256 sessions")]);
    assert!(keeper(&full).refusal(LONG).is_none());
    full.join();
    let silent = FakeAgent::start(|peer| while peer.receive().is_some() {});
    // Its thread ends when the greeting times out; the test does not wait for that.
    assert!(keeper(&silent).refusal(SHORT).is_none());
    let taking = FakeAgent::serve(|peer| {
        peer.give_slots(1, Grant::First);
        match peer.expect("abort") {
            (_, local::request::Body::Abort(abort)) => assert_eq!(abort.leases, [1], "the lease is released"),
            (_, other) => panic!("expected abort, got {other:?}"),
        }
        assert!(peer.receive().is_none(), "the client closes");
    });
    assert!(keeper(&taking).refusal(LONG).is_none());
    taking.join();
}

#[test]
fn connects_to_an_agent_that_starts_later_or_restarts() {
    let directory = tempfile::tempdir().expect("a directory");
    let late = directory.path().join("agent");
    let keeper = SessionKeeper::new(options(&late)).expect("a thread");
    wait_for(&keeper, "an attempt", |status| status.last_error.is_some());
    let (die, die_signal) = mpsc::channel::<()>();
    let first: Script = Box::new(move |peer| {
        peer.greet();
        die_signal.recv().expect("the test sends the signal");
    });
    let second: Script = Box::new(|peer| {
        peer.greet();
        answer_probes(peer);
    });
    let agent = FakeAgent::start_in_sequence(vec![first, second]);
    std::os::unix::fs::symlink(agent.socket(), &late).expect("a link");
    assert!(keeper.wait_until_connected(LONG), "{:?}", keeper.status());
    let client = keeper.current().expect("a session");
    die.send(()).expect("the agent lives");
    wait_for(&keeper, "a second session", |status| status.sessions == 2);
    assert!(!client.is_alive(), "the old session stays lost");
    assert!(keeper.status().last_error.is_some_and(|words| words.contains("ended")));
    assert!(keeper.responsive().expect("a new session").stats().is_ok());
    drop(keeper);
    agent.join();
}

#[test]
fn a_suspected_agent_is_not_returned_until_it_answers() {
    let (answer, answer_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let probe = peer.expect_stats();
        answer_signal.recv().expect("the test sends the signal");
        peer.reply_stats(probe);
        answer_probes(peer);
    });
    let keeper = keeper(&agent);
    assert!(keeper.wait_until_connected(LONG));
    keeper.suspect();
    assert!(keeper.responsive().is_none());
    assert!(keeper.current().is_some(), "the session stays open");
    assert!(keeper.status().is_suspected);
    assert!(keeper.unavailable_reason().to_string().contains("does not answer"));
    answer.send(()).expect("the agent lives");
    assert!(keeper.wait_until_connected(LONG));
    assert!(keeper.responsive().is_some());
    drop(keeper);
    agent.join();
}

#[test]
fn a_suspected_agent_that_dies_is_replaced() {
    let first: Script = Box::new(|peer| {
        peer.greet();
        peer.expect_stats();
    });
    let second: Script = Box::new(|peer| {
        peer.greet();
        answer_probes(peer);
    });
    let agent = FakeAgent::start_in_sequence(vec![first, second]);
    let keeper = keeper(&agent);
    assert!(keeper.wait_until_connected(LONG));
    keeper.suspect();
    wait_for(&keeper, "a second session", |status| status.sessions == 2 && !status.is_suspected);
    assert!(keeper.responsive().is_some());
    drop(keeper);
    agent.join();
}

#[test]
fn the_session_ends_with_its_keeper() {
    let agent = FakeAgent::serve(|peer| {
        assert!(peer.receive().is_none(), "the client closes");
    });
    let keeper = keeper(&agent);
    assert!(keeper.wait_until_connected(LONG));
    let client = keeper.current().expect("a session");
    drop(keeper);
    let error = client.match_keys(&[key(0)], Scope::Local).expect_err("the session has ended");
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    agent.join();
}

#[test]
fn dropping_a_keeper_does_not_wait_for_an_unanswered_greeting() {
    let directory = tempfile::tempdir().expect("a directory");
    let path = directory.path().join("agent");
    let listener = UnixListener::bind(&path).expect("a socket");
    let keeper = SessionKeeper::new(options(&path)).expect("a thread");
    let (_greeting, _) = listener.accept().expect("it connects");
    assert!(keeper.current().is_none());
    let started = Instant::now();
    drop(keeper);
    assert!(started.elapsed() < LONG / 2);
}
