//! Matches that are started and polled.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use reprise_client::{Client, ClientError, Scope, Source};

use crate::fake_agent::{FakeAgent, LONG, SHORT, key};

/// Time that a scheduler waits for an answer.
const MOMENT: Duration = Duration::from_millis(5);

#[test]
fn an_unanswered_match_can_be_polled_again() {
    let (answer, answer_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        let (id, blocks) = peer.expect_match();
        answer_signal.recv().expect("the test sends the signal");
        peer.reply_matched(id, blocks);
        peer.receive();
    });
    let client = agent.connect();
    let mut pending = client.start_match(&[key(1), key(2)], Scope::Local).expect("sent");
    assert_eq!(pending.poll(MOMENT).expect("no error"), None);
    assert_eq!(pending.poll(Duration::ZERO).expect("no error"), None);
    answer.send(()).expect("the agent lives");
    let sources = pending.poll(LONG).expect("answered");
    assert_eq!(sources, Some(vec![Source::OwnDram; 2]));
    assert_eq!(
        pending.poll(Duration::ZERO).expect("known"),
        sources,
        "a repeated poll returns the same answer"
    );
    drop(client);
    drop(pending);
    agent.join();
}

#[test]
fn start_match_does_not_wait_for_an_agent_that_does_not_read() {
    let (proceed, proceed_signal) = mpsc::channel::<()>();
    let agent = FakeAgent::serve(move |peer| {
        proceed_signal.recv().expect("the test sends the signal");
        while let Some((id, _)) = peer.receive() {
            peer.reply_matched(id, 8192);
        }
    });
    let client = agent.connect();
    let keys = vec![key(1); 8192];
    let started = Instant::now();
    // 32 MiB / 128 KiB = 256 requests would end in `Busy`; 40 fill any socket.
    let mut pending: Vec<_> =
        (0..40).map(|_| client.start_match(&keys, Scope::Local).expect("queued")).collect();
    assert!(started.elapsed() < LONG / 2, "each takes some milliseconds");
    assert_eq!(pending[0].poll(Duration::ZERO).expect("no error"), None);
    proceed.send(()).expect("the agent lives");
    for pending in &mut pending {
        assert_eq!(pending.poll(LONG).expect("answered").map(|sources| sources.len()), Some(8192));
    }
    agent.end((client, pending));
}

#[test]
fn an_unanswered_match_ends_with_the_call_timeout() {
    let agent = FakeAgent::serve(|peer| {
        let (unanswered, _) = peer.expect_match();
        let (id, blocks) = peer.expect_match();
        peer.reply_matched(unanswered, 1);
        peer.reply_matched(id, blocks);
    });
    let client = Client::connect(agent.options().call_timeout(SHORT)).expect("a session");
    let mut pending = client.start_match(&[key(1)], Scope::Local).expect("sent");
    let error = pending.poll(LONG).expect_err("no answer");
    assert!(matches!(error, ClientError::Timeout { call: "match", .. }), "{error}");
    assert_eq!(client.match_keys(&[key(1)], Scope::Local).expect("the session continues").len(), 1);
    agent.join();
}

#[test]
fn a_dropped_match_is_ignored_and_an_empty_one_is_not_sent() {
    let agent = FakeAgent::serve(|peer| {
        let (dropped, _) = peer.expect_match();
        peer.reply_matched(dropped, 1);
        let (id, blocks) = peer.expect_match();
        assert_eq!(blocks, 2);
        peer.reply_matched(id, blocks);
    });
    let client = agent.connect();
    drop(client.start_match(&[key(1)], Scope::Local).expect("sent"));
    let mut empty = client.start_match(&[], Scope::Local).expect("known");
    assert_eq!(empty.poll(Duration::ZERO).expect("known"), Some(vec![]));
    assert_eq!(client.match_keys(&[key(1), key(2)], Scope::Local).expect("answered").len(), 2);
    agent.join();
}
