//! The keeper of a session: absent, restarted, silent and dropped.

use std::os::unix::net::UnixListener;
use std::sync::mpsc;
use std::time::Instant;

use reprise_client::{ClientError, KeeperStatus, Scope, SessionKeeper};

use crate::fake_agent::{FakeAgent, LONG, Peer, Script, key, options};

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
    assert!(keeper.current().is_none());
    assert!(keeper.absence().to_string().contains("no agent at"));
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
