//! Progress that a controller reports to the watchdog.

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

/// Waits until a predicate is true.
async fn until(is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("becomes true in time");
}

#[tokio::test(start_paused = true)]
async fn watchdog_sees_hanging_reconcile_until_it_ends() {
    let context = Arc::new(Box::new(services()));
    let (store, mut writer) = store::<Node>();
    let mut node = Node::default();
    node.metadata.name = Some("n1".to_owned());
    // The controller starts once the store is filled.
    for event in [Event::Init, Event::InitApply(node.clone()), Event::InitDone] {
        writer.apply_watcher_event(&event);
    }
    let feed: Feed<Node> = Feed::default();
    let controller = Controller::for_shared_stream(feed.changes(Change::is_foreign), store);
    let (stop, stops) = watch::channel(false);
    let (begin, begins) = watch::channel(false);
    let reconcile = move |_: Arc<Node>, _: Arc<Box<Services>>| {
        let mut begins = begins.clone();
        async move {
            let _ = begins.wait_for(|begins| *begins).await;
            Ok(Action::await_change())
        }
    };
    let queue = tokio::spawn(run(controller, reconcile, Arc::clone(&context), stops));
    let later = || Instant::now() + STUCK_AFTER + Duration::from_secs(1);
    let reports_stuck =
        |words: &str| context.watchdog.stuck(later()).is_some_and(|stuck| stuck.contains(words));
    until(|| reports_stuck("the queue of Node has sent no heartbeat")).await;
    feed.request(Arc::new(node)).await;
    until(|| reports_stuck("the reconcile of Node//n1")).await;
    assert_eq!(context.watchdog.stuck(Instant::now()), None, "the reconcile may take some time");
    begin.send(true).expect("the reconcile waits for it");
    until(|| !reports_stuck("the reconcile of Node//n1")).await;
    stop.send(true).expect("the controller runs until then");
    queue.await.expect("it ends");
    assert_eq!(context.watchdog.stuck(later()), None, "a stopped queue is not stuck");
}
