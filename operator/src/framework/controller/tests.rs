//! Heartbeats of a controller.

use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::store;
use kube::runtime::watcher::Event;

use super::*;
use crate::framework::change::Change;
use crate::framework::feed::Feed;
use crate::framework::services::tests::services;
use crate::framework::watchdog::STUCK_AFTER;

/// Timeout of a wait, on the paused clock.
const PATIENCE: Duration = Duration::from_secs(30);

#[tokio::test(start_paused = true)]
async fn sends_heartbeats_until_it_stops() {
    let context = Arc::new(Box::new(services()));
    let (store, mut writer) = store::<Node>();
    // The controller starts once the store is filled.
    for event in [Event::Init, Event::InitDone] {
        writer.apply_watcher_event(&event);
    }
    let feed: Feed<Node> = Feed::default();
    let controller = Controller::for_shared_stream(feed.changes(Change::is_foreign), store);
    let (stop, stops) = watch::channel(false);
    let reconcile = async |_: Arc<Node>, _: Arc<Box<Services>>| Ok(Action::await_change());
    let queue = tokio::spawn(run(controller, reconcile, Arc::clone(&context), stops));
    let is_stuck = || context.watchdog.stuck(Instant::now() + STUCK_AFTER + HEARTBEAT_INTERVAL).is_some();
    let begun = async {
        while !is_stuck() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, begun).await.expect("a heartbeat, which is old by then");
    stop.send(true).expect("the controller runs until then");
    queue.await.expect("it ends");
    assert!(!is_stuck(), "a stopped queue is not stuck");
}
