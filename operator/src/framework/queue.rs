//! Queues of reconciles: serial per object, bounded concurrency per kind, retries with a growing delay.

use std::fmt::Debug;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use futures_util::{FutureExt, Stream, StreamExt};
use kube::runtime::applier;
use kube::runtime::controller::{Action, Config};
use kube::runtime::reflector::{ObjectRef, Store};
use kube::{Resource, ResourceExt};
use tokio::sync::mpsc::Receiver;
use tokio::sync::watch;

use crate::framework::error::OperatorError;
use crate::framework::services::Services;
use crate::framework::status::kind_of;
use crate::framework::watchdog::HEARTBEAT_INTERVAL;

/// Key of the log condition for a failed reconcile.
const RECONCILE_FAILED: &str = "reconcile_failed";

/// Concurrent reconciles per kind. Enough to use the API server well, few enough to leave it capacity for
/// other clients.
const AT_ONCE: u16 = 8;

/// Timeout of a reconcile. Most take milliseconds; a longer one waits for a peer that does not answer.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(60);

/// Reconciles requested objects of a kind until `stop` is set. Then running reconciles finish before it
/// returns.
pub async fn run<K, C, F, R>(
    store: Store<K>,
    requests: Receiver<ObjectRef<K>>,
    reconcile: F,
    context: Arc<C>,
    stop: watch::Receiver<bool>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    C: Deref<Target = Services> + Send + Sync + 'static,
    F: Fn(Arc<K>, Arc<C>) -> R + Clone + Send + 'static,
    R: Future<Output = Result<Action, OperatorError>> + Send + 'static,
{
    let timed = move |object: Arc<K>, context: Arc<C>| -> BoxFuture<'static, _> {
        let reconcile = reconcile.clone();
        async move {
            let (begun, key) = (Instant::now(), key(&*object));
            context.watchdog.reconcile_started(kind_of::<K>(), &key, begun);
            let ended =
                tokio::time::timeout(RECONCILE_TIMEOUT, reconcile(object, Arc::clone(&context))).await;
            let ended = ended.unwrap_or(Err(OperatorError::Timeout(RECONCILE_TIMEOUT)));
            let result = if ended.is_ok() { "done" } else { "failed" };
            context.metrics.record_reconcile(kind_of::<K>(), result, begun.elapsed());
            context.watchdog.reconcile_finished(kind_of::<K>(), &key, Instant::now());
            if ended.is_ok() {
                context.backoff.record_success(&key);
                tracing::info!(recovered = RECONCILE_FAILED, object = key, "reconcile succeeds again");
            }
            ended
        }
        .boxed()
    };
    let failed = |object: Arc<K>, error: &OperatorError, context: Arc<C>| {
        let key = key(&*object);
        let wait = context.backoff.record_failure(&key);
        // Another writer was first. The retry sees its result, so no warning is needed.
        if error.code() == Some(409) {
            tracing::info!(
                condition = "reconcile_conflict",
                %error,
                object = key,
                ?wait,
                "retrying reconcile: the object was modified concurrently (409)"
            );
        } else {
            tracing::warn!(
                condition = RECONCILE_FAILED,
                %error,
                object = key,
                ?wait,
                "reconcile failed; retrying"
            );
        }
        Action::requeue(wait)
    };
    let queue = stream(requests).map(Ok::<_, std::convert::Infallible>).take_until(stopped(stop));
    let config = Config::default().concurrency(AT_ONCE);
    // Results were handled above, and requests for deleted objects need no action.
    let working = applier(timed, failed, Arc::clone(&context), store, queue, config).for_each(async |_| ());
    // In the same task, so that a reconcile that blocks the thread also stops the heartbeat.
    tokio::select! {
        () = working => {}
        () = send_heartbeats(kind_of::<K>(), &context) => {}
    }
    context.watchdog.queue_stopped(kind_of::<K>());
}

/// Sends heartbeats of a queue to the watchdog until the task ends.
async fn send_heartbeats(kind: &'static str, context: &Services) {
    loop {
        context.watchdog.heartbeat(kind, Instant::now());
        tokio::time::sleep(HEARTBEAT_INTERVAL).await;
    }
}

/// Waits until the process should stop.
pub(crate) async fn stopped(mut stop: watch::Receiver<bool>) {
    // An error means that the sender is gone, which also ends the process.
    let _ = stop.wait_for(|stop| *stop).await;
}

fn stream<T: Send>(requests: Receiver<T>) -> impl Stream<Item = T> {
    futures_util::stream::unfold(requests, async |mut requests| {
        let request = requests.recv().await?;
        Some((request, requests))
    })
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    format!("{}/{}/{}", kind_of::<K>(), object.namespace().unwrap_or_default(), object.name_any())
}

#[cfg(test)]
mod tests;
