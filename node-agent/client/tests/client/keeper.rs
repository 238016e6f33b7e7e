//! The keeper of a session: absent, restarted, silent and dropped.

use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::Instant;

use reprise_client::{ClientError, KeeperStatus, Scope, SessionKeeper};
use reprise_proto::local::{self, response};

use crate::fake_agent::{FakeAgent, Grant, LONG, Peer, SHORT, Script, key, options};

fn keeper(agent: &FakeAgent) -> SessionKeeper {
    SessionKeeper::new(agent.options()).expect("a thread")
}

/// Waits until the keeper's status is as it should be.
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
fn without_an_agent_there_is_no_session_and_its_status_says_why() {
    let directory = tempfile::tempdir().expect("a directory");
    let keeper = SessionKeeper::new(options(&directory.path().join("nobody"))).expect("a thread");
    wait_for(&keeper, "tried", |status| status.last_error.is_some());
    let status = keeper.status();
    assert!(status.last_error.as_ref().is_some_and(|words| words.contains("no agent at")), "{status:?}");
    assert_eq!((status.is_connected, status.sessions), (false, 0));
    assert_eq!(status.last_error_kind, Some("AgentAbsent"));
    assert!(keeper.refusal(LONG).is_none(), "it may come later");
    assert!(keeper.current().is_none());
    assert!(keeper.absence().to_string().contains("no agent at"));
}

fn failure(kind: local::FailureKind, words: &str) -> response::Body {
    response::Body::Failure(local::Failure { kind: kind as i32, message: words.to_owned() })
}

/// Refuses the greeting.
fn refuse_greeting(kind: local::FailureKind, words: &'static str) -> Script {
    Box::new(move |peer| {
        let (id, _) = peer.expect("hello");
        peer.reply(id, failure(kind, words));
    })
}

/// Refuses the process before it has said anything.
fn turn_away(kind: local::FailureKind, words: &'static str) -> Script {
    Box::new(move |peer| peer.reply(0, failure(kind, words)))
}

/// Takes the session, and refuses a slot.
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
fn what_an_agent_will_never_take_is_known_after_its_first_answer() {
    use local::FailureKind::{BadRequest, Version};
    for (script, kind, words) in [
        (refuse_greeting(Version, "agent speaks 9"), "Version", "agent speaks 9"),
        (refuse_greeting(BadRequest, "another tenant's"), "BadRequest", "another tenant's"),
        (turn_away(BadRequest, "user 7 may not"), "BadRequest", "user 7 may not"),
        (refuse_slot("raise arena.region_bytes"), "BadRequest", "region_bytes"),
    ] {
        let agent = FakeAgent::start_in_sequence(vec![script]);
        let keeper = keeper(&agent);
        let refusal = keeper.refusal(LONG).expect("it is refused");
        assert_eq!(refusal.kind(), kind);
        assert!(refusal.to_string().contains(words), "{refusal}");
        drop(keeper);
        agent.join();
    }
}

#[test]
fn an_agent_that_is_full_or_silent_or_takes_the_session_refuses_nothing() {
    let full = FakeAgent::start_in_sequence(vec![turn_away(local::FailureKind::Busy, "256 sessions")]);
    assert!(keeper(&full).refusal(LONG).is_none());
    full.join();
    let silent = FakeAgent::start(|peer| while peer.receive().is_some() {});
    // Its thread ends with the greeting's patience, which nobody waits for.
    assert!(keeper(&silent).refusal(SHORT).is_none());
    let taking = FakeAgent::start(|peer| {
        peer.greet();
        let (id, _) = peer.expect_reserve();
        peer.reply_reserved(id, 1, Grant::First);
        match peer.expect("abort") {
            (_, local::request::Body::Abort(abort)) => assert_eq!(abort.leases, [1], "it is given back"),
            (_, other) => panic!("expected abort, got {other:?}"),
        }
        assert!(peer.receive().is_none(), "the client closes");
    });
    assert!(keeper(&taking).refusal(LONG).is_none());
    taking.join();
}

#[test]
fn an_agent_that_comes_later_or_comes_back_gets_a_session() {
    let directory = tempfile::tempdir().expect("a directory");
    let late = directory.path().join("agent");
    let keeper = SessionKeeper::new(options(&late)).expect("a thread");
    wait_for(&keeper, "tried", |status| status.last_error.is_some());
    let (die, told_to_die) = mpsc::channel::<()>();
    let first: Script = Box::new(move |peer| {
        peer.greet();
        told_to_die.recv().expect("the test says when");
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
    wait_for(&keeper, "connected anew", |status| status.sessions == 2);
    assert!(!client.is_alive(), "the old session stays lost");
    assert!(keeper.status().last_error.is_some_and(|words| words.contains("ended")));
    assert!(keeper.answering().expect("a new session").stats().is_ok());
    drop(keeper);
    agent.join();
}

#[test]
fn a_suspected_agent_is_not_offered_until_it_has_answered() {
    let (answer, told_to_answer) = mpsc::channel::<()>();
    let agent = FakeAgent::start(move |peer| {
        peer.greet();
        let probe = peer.expect_stats();
        told_to_answer.recv().expect("the test says when");
        peer.reply_stats(probe);
        answer_probes(peer);
    });
    let keeper = keeper(&agent);
    assert!(keeper.wait_until_connected(LONG));
    keeper.suspect();
    assert!(keeper.answering().is_none());
    assert!(keeper.current().is_some(), "the session stands");
    assert!(keeper.status().is_suspected);
    assert!(keeper.absence().to_string().contains("does not answer"));
    answer.send(()).expect("the agent lives");
    assert!(keeper.wait_until_connected(LONG));
    assert!(keeper.answering().is_some());
    drop(keeper);
    agent.join();
}

#[test]
fn an_agent_that_dies_under_suspicion_is_replaced() {
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
    wait_for(&keeper, "connected anew", |status| status.sessions == 2 && !status.is_suspected);
    assert!(keeper.answering().is_some());
    drop(keeper);
    agent.join();
}

#[test]
fn the_session_ends_with_its_keeper() {
    let agent = FakeAgent::start(|peer| {
        peer.greet();
        assert!(peer.receive().is_none(), "the client closes");
    });
    let keeper = keeper(&agent);
    assert!(keeper.wait_until_connected(LONG));
    let client = keeper.current().expect("a session");
    drop(keeper);
    let error = client.match_keys(&[key(0)], Scope::Local).expect_err("it has ended");
    assert!(matches!(error, ClientError::AgentLost { .. }), "{error}");
    agent.join();
}

#[test]
fn a_keeper_is_dropped_at_once_while_it_greets_an_agent_that_does_not_answer() {
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
