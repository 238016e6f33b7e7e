//! Answers of the probe endpoints.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::framework::watchdog::STUCK_AFTER;
use crate::reconcile::context::tests::context;

/// Sends a probe request and returns the whole response.
async fn probe(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("the port accepts connections");
    let request = format!("GET {path} HTTP/1.1\r\nhost: operator\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("the request is sent");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("a response");
    answer
}

#[tokio::test]
async fn healthz_fails_while_a_queue_is_stuck() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let context = context().await;
    let (_ready, is_ready) = watch::channel(true);
    let limit = connection_limit(&Guard::plain(), &context.metrics.rejected).expect("enough descriptors");
    tokio::spawn(serve(listener, (Guard::plain(), limit), Arc::clone(&context), is_ready));
    assert!(probe(address, "/healthz").await.starts_with("HTTP/1.1 200"), "no queue has started yet");
    context.watchdog.heartbeat("Node", Instant::now());
    assert!(probe(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let Some(long_ago) = Instant::now().checked_sub(STUCK_AFTER + Duration::from_secs(1)) else {
        panic!("this machine has been up for less than {STUCK_AFTER:?}")
    };
    context.watchdog.heartbeat("Node", long_ago);
    let answer = probe(address, "/healthz").await;
    assert!(answer.starts_with("HTTP/1.1 503") && answer.ends_with("stuck\n"), "{answer}");
    assert!(probe(address, "/readyz").await.starts_with("HTTP/1.1 200"), "readiness does not depend on it");
    context.watchdog.heartbeat("Node", Instant::now());
    assert!(probe(address, "/healthz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn startz_waits_until_the_replica_is_ready() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (ready, is_ready) = watch::channel(false);
    let context = context().await;
    let limit = connection_limit(&Guard::plain(), &context.metrics.rejected).expect("enough descriptors");
    tokio::spawn(serve(listener, (Guard::plain(), limit), context, is_ready));
    let mut started = tokio::spawn(probe(address, "/startz"));
    assert!(probe(address, "/readyz").await.starts_with("HTTP/1.1 503"));
    assert!(probe(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut started).await;
    assert!(early.is_err(), "answered before the replica is ready: {early:?}");
    ready.send(true).expect("the server holds a receiver");
    assert!(started.await.expect("no panic").starts_with("HTTP/1.1 200"));
    assert!(probe(address, "/startz").await.starts_with("HTTP/1.1 200"), "answers at once");
}
