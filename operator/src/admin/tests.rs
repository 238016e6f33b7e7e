//! What probes are told.

use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::*;
use crate::progress::STUCK_AFTER;
use crate::scripted::context;

/// The answer to a probe.
async fn asked(address: std::net::SocketAddr, path: &str) -> String {
    let mut stream = TcpStream::connect(address).await.expect("somebody listens");
    let request = format!("GET {path} HTTP/1.1\r\nhost: operator\r\nconnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).await.expect("it is read");
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.expect("it is answered");
    answer
}

#[tokio::test]
async fn the_kubelet_is_told_when_a_queue_does_not_go_on() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let context = context().await;
    let (_ready, is_ready) = watch::channel(true);
    let limit = connection_limit(&context.metrics.rejected).expect("enough descriptors");
    tokio::spawn(serve(listener, limit, Arc::clone(&context), is_ready));
    assert!(asked(address, "/healthz").await.starts_with("HTTP/1.1 200"), "it has begun nothing yet");
    context.progress.lives("Node", Instant::now());
    assert!(asked(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let Some(long_ago) = Instant::now().checked_sub(STUCK_AFTER + Duration::from_secs(1)) else {
        panic!("this machine runs for less than {STUCK_AFTER:?}")
    };
    context.progress.begun("Node", "Node//n1", long_ago);
    let said = asked(address, "/healthz").await;
    assert!(said.starts_with("HTTP/1.1 503") && said.contains("Node//n1"), "{said}");
    assert!(asked(address, "/readyz").await.starts_with("HTTP/1.1 200"), "readiness is another thing");
    context.progress.ended("Node", "Node//n1", Instant::now());
    assert!(asked(address, "/healthz").await.starts_with("HTTP/1.1 200"));
}

#[tokio::test]
async fn the_startup_probe_is_answered_when_the_replica_is_ready_and_not_before() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (ready, is_ready) = watch::channel(false);
    let context = context().await;
    let limit = connection_limit(&context.metrics.rejected).expect("enough descriptors");
    tokio::spawn(serve(listener, limit, context, is_ready));
    let mut started = tokio::spawn(asked(address, "/startz"));
    assert!(asked(address, "/readyz").await.starts_with("HTTP/1.1 503"));
    assert!(asked(address, "/healthz").await.starts_with("HTTP/1.1 200"));
    let early = tokio::time::timeout(Duration::from_millis(50), &mut started).await;
    assert!(early.is_err(), "answered before the replica is ready: {early:?}");
    ready.send(true).expect("the pages listen");
    assert!(started.await.expect("no panic").starts_with("HTTP/1.1 200"));
    assert!(asked(address, "/startz").await.starts_with("HTTP/1.1 200"), "at once");
}
