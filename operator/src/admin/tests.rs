//! Answers of the probe endpoints.

use tokio::time::Instant;

use super::*;
use crate::framework::watchdog::STUCK_AFTER;
use crate::reconcile::context::tests::context;

#[tokio::test(start_paused = true)]
async fn healthz_fails_while_a_queue_is_stuck() {
    let (context, (_ready, is_ready)) = (context().await, watch::channel(true));
    let pages = Pages { context: Arc::clone(&context), ready: is_ready };
    let health = async || healthz(State(pages.clone())).await.status();
    assert_eq!(health().await, StatusCode::OK, "no queue has started yet");
    context.watchdog.heartbeat("Node", Instant::now());
    assert_eq!(health().await, StatusCode::OK);
    tokio::time::advance(STUCK_AFTER + Duration::from_secs(1)).await;
    assert_eq!(health().await, StatusCode::SERVICE_UNAVAILABLE);
    let ready = readyz(State(pages.clone())).await.status();
    assert_eq!(ready, StatusCode::OK, "readiness does not depend on it");
    context.watchdog.heartbeat("Node", Instant::now());
    assert_eq!(health().await, StatusCode::OK);
}

#[tokio::test(start_paused = true)]
async fn startz_waits_until_the_replica_is_ready() {
    let (ready, is_ready) = watch::channel(false);
    let pages = Pages { context: context().await, ready: is_ready };
    let started = tokio::spawn(startz(State(pages.clone())));
    tokio::time::sleep(STARTS_WITHIN / 2).await;
    assert!(!started.is_finished(), "the replica is not ready yet");
    assert_eq!(readyz(State(pages.clone())).await.status(), StatusCode::SERVICE_UNAVAILABLE);
    ready.send(true).expect("the page holds a receiver");
    assert_eq!(started.await.expect("no panic").status(), StatusCode::OK);
    let begun = Instant::now();
    assert_eq!(startz(State(pages)).await.status(), StatusCode::OK);
    assert_eq!(begun.elapsed(), Duration::ZERO, "it answers at once");
}
