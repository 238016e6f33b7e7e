//! Answers of the probe endpoints, and heartbeats of a controller.

use k8s_openapi::api::core::v1::Node;
use kube::runtime::Controller;
use kube::runtime::controller::Action;
use kube::runtime::reflector::store;
use kube::runtime::watcher::Event;

use super::*;
use crate::framework::controller::run;
use crate::framework::feed::Feed;
use crate::framework::watchdog::{HEARTBEAT_INTERVAL, STUCK_AFTER};
use crate::reconcile::context::tests::context;

#[tokio::test(start_paused = true)]
async fn controller_sends_heartbeats_until_it_stops() {
    let context = context().await;
    let (store, mut writer) = store::<Node>();
    // The controller starts once the store is filled.
    for event in [Event::Init, Event::InitDone] {
        writer.apply_watcher_event(&event);
    }
    let feed: Feed<Node> = Feed::default();
    let controller = Controller::for_shared_stream(feed.changes(), store);
    let (stop, stops) = watch::channel(false);
    let reconcile = async |_: Arc<Node>, _: Arc<Context>| Ok(Action::await_change());
    let queue = tokio::spawn(run(controller, reconcile, Arc::clone(&context), stops));
    let is_stuck = || context.watchdog.stuck(Instant::now() + STUCK_AFTER + HEARTBEAT_INTERVAL).is_some();
    let begun = async {
        while !is_stuck() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(STARTS_WITHIN, begun).await.expect("a heartbeat, which is old by then");
    stop.send(true).expect("the controller runs until then");
    queue.await.expect("it ends");
    assert!(!is_stuck(), "a stopped queue is not stuck");
}

#[tokio::test(start_paused = true)]
async fn healthz_fails_while_a_queue_is_stuck() {
    let (context, (_ready, is_ready)) = (context().await, watch::channel(true));
    let pages = Pages { context: Arc::clone(&context), ready: is_ready };
    let health = async || healthz(State(pages.clone())).await.status();
    assert_eq!(health().await, StatusCode::OK, "no queue has started yet");
    context.watchdog.heartbeat("Node", Instant::now());
    tokio::time::advance(STUCK_AFTER).await;
    assert_eq!(health().await, StatusCode::OK);
    tokio::time::advance(Duration::from_secs(1)).await;
    context.watchdog.heartbeat("SSDPool", Instant::now());
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
