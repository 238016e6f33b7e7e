//! What a queue tells of its progress.

use std::time::Duration;

use k8s_openapi::api::core::v1::Node;
use kube::runtime::reflector::store;
use kube::runtime::watcher::Event;
use tokio::sync::mpsc::channel;

use super::*;
use crate::progress::STUCK_AFTER;
use crate::scripted::context;

/// What does not come about by then never will; on an idle machine it takes milliseconds.
const PATIENCE: Duration = Duration::from_secs(30);

/// Until something is so.
async fn until(is_so: impl Fn() -> bool) {
    let waiting = async {
        while !is_so() {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(PATIENCE, waiting).await.expect("it comes about");
}

#[tokio::test]
async fn a_reconcile_that_hangs_is_seen_and_one_that_ends_is_not() {
    let context = context().await;
    let (store, mut writer) = store::<Node>();
    let mut node = Node::default();
    node.metadata.name = Some("n1".to_owned());
    // Nothing is reconciled before all is known.
    for event in [Event::Init, Event::InitApply(node), Event::InitDone] {
        writer.apply_watcher_event(&event);
    }
    let (requests, receiver) = channel(1);
    let (stop, stops) = watch::channel(false);
    let (begin, begins) = watch::channel(false);
    let reconcile = move |_: Arc<Node>, _: Arc<Context>| {
        let mut begins = begins.clone();
        async move {
            let _ = begins.wait_for(|begins| *begins).await;
            Ok(Action::await_change())
        }
    };
    let queue = tokio::spawn(run(store, receiver, reconcile, Arc::clone(&context), stops));
    let later = || Instant::now() + STUCK_AFTER + Duration::from_secs(1);
    let said = |words: &str| context.progress.stuck(later()).is_some_and(|said| said.contains(words));
    until(|| said("the queue of Node has done nothing")).await;
    requests.send(ObjectRef::new("n1")).await.expect("it listens");
    until(|| said("the reconcile of Node//n1")).await;
    assert_eq!(context.progress.stuck(Instant::now()), None, "it may take its time");
    begin.send(true).expect("the reconcile waits for it");
    until(|| !said("the reconcile of Node//n1")).await;
    stop.send(true).expect("the queue goes on until then");
    queue.await.expect("it ends");
    assert_eq!(context.progress.stuck(later()), None, "what was told to end is not stuck");
}
