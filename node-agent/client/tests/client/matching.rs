//! Matches that are asked for now and looked at later.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use reprise_client::{Client, ClientError, Scope, Source};

use crate::fake_agent::{FakeAgent, LONG, SHORT, key};

/// What a scheduler waits for an answer.
const MOMENT: Duration = Duration::from_millis(5);

#[test]
fn a_match_that_is_not_answered_yet_is_looked_at_again() {
    let (answer, told_to_answer) = mpsc::channel::<()>();
    let agent = FakeAgent::start(move |peer| {
        peer.greet();
        let (id, blocks) = peer.expect_match();
        told_to_answer.recv().expect("the test says when");
        peer.reply_matched(id, blocks);
        peer.receive();
    });
    let client = agent.connect();
    let mut pending = client.start_match(&[key(1), key(2)], Scope::Local).expect("asked");
    assert_eq!(pending.poll(MOMENT).expect("no error"), None);
    assert_eq!(pending.poll(Duration::ZERO).expect("no error"), None);
    answer.send(()).expect("the agent lives");
    let sources = pending.poll(LONG).expect("answered");
    assert_eq!(sources, Some(vec![Source::OwnDram; 2]));
    assert_eq!(pending.poll(Duration::ZERO).expect("known"), sources, "an answer is given again");
    drop(client);
    drop(pending);
    agent.join();
}

#[test]
fn matches_are_asked_for_without_waiting_while_the_agent_does_not_read() {
    let (go_on, told_to_go_on) = mpsc::channel::<()>();
    let agent = FakeAgent::start(move |peer| {
        peer.greet();
        told_to_go_on.recv().expect("the test says when");
        while let Some((id, _)) = peer.receive() {
            peer.reply_matched(id, 8192);
        }
    });
    let client = agent.connect();
    let keys = vec![key(1); 8192];
    let started = Instant::now();
    // 32 MiB / 128 KiB would end in `Busy`; these fill any socket.
    let mut pending: Vec<_> =
        (0..40).map(|_| client.start_match(&keys, Scope::Local).expect("taken")).collect();
    assert!(started.elapsed() < LONG / 2, "each takes some milliseconds");
    assert_eq!(pending[0].poll(Duration::ZERO).expect("no error"), None);
    go_on.send(()).expect("the agent lives");
    for pending in &mut pending {
        assert_eq!(pending.poll(LONG).expect("answered").map(|sources| sources.len()), Some(8192));
    }
    drop((client, pending));
    agent.join();
}

#[test]
fn a_match_that_is_never_answered_ends_with_the_patience_of_the_session() {
    let agent = FakeAgent::start(|peer| {
        peer.greet();
        let (unanswered, _) = peer.expect_match();
        let (id, blocks) = peer.expect_match();
        peer.reply_matched(unanswered, 1);
        peer.reply_matched(id, blocks);
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let mut pending = client.start_match(&[key(1)], Scope::Local).expect("asked");
    let error = pending.poll(LONG).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { call: "match", .. }), "{error}");
    assert_eq!(client.match_keys(&[key(1)], Scope::Local).expect("the session goes on").len(), 1);
    agent.join();
}

#[test]
fn a_match_that_is_dropped_is_forgotten_and_an_empty_one_is_not_asked() {
    let agent = FakeAgent::start(|peer| {
        peer.greet();
        let (dropped, _) = peer.expect_match();
        peer.reply_matched(dropped, 1);
        let (id, blocks) = peer.expect_match();
        assert_eq!(blocks, 2);
        peer.reply_matched(id, blocks);
    });
    let client = agent.connect();
    drop(client.start_match(&[key(1)], Scope::Local).expect("asked"));
    let mut empty = client.start_match(&[], Scope::Local).expect("known");
    assert_eq!(empty.poll(Duration::ZERO).expect("known"), Some(vec![]));
    assert_eq!(client.match_keys(&[key(1), key(2)], Scope::Local).expect("answered").len(), 2);
    agent.join();
}
