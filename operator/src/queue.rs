//! Runs reconciles: one at a time for an object, a few at once for a kind, tried again with a growing delay when they fail.

use std::fmt::Debug;
use std::future::Future;
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

use crate::context::Context;
use crate::error::OperatorError;
use crate::progress::SAID_EVERY;
use crate::status::kind_of;

/// The condition of an object whose reconcile failed, in the log.
const RECONCILE_FAILED: &str = "reconcile_failed";

/// Reconciles of one kind at once: enough to keep the API server busy, and few enough to leave it to others.
const AT_ONCE: u16 = 8;

/// A reconcile that takes longer waits for somebody who does not answer; most take milliseconds.
const ENDS_WITHIN: Duration = Duration::from_secs(60);

/// Reconciles objects of a kind as they are asked for, until `stop` says so; those that run are ended.
pub async fn run<K, F, R>(
    store: Store<K>,
    requests: Receiver<ObjectRef<K>>,
    reconcile: F,
    context: Arc<Context>,
    stop: watch::Receiver<bool>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + Send + Sync + 'static,
    F: Fn(Arc<K>, Arc<Context>) -> R + Clone + Send + 'static,
    R: Future<Output = Result<Action, OperatorError>> + Send + 'static,
{
    let timed = move |object: Arc<K>, context: Arc<Context>| -> BoxFuture<'static, _> {
        let reconcile = reconcile.clone();
        async move {
            let (begun, key) = (Instant::now(), key(&*object));
            context.progress.begun(kind_of::<K>(), &key, begun);
            let ended = tokio::time::timeout(ENDS_WITHIN, reconcile(object, Arc::clone(&context))).await;
            let ended = ended.unwrap_or(Err(OperatorError::Late(ENDS_WITHIN)));
            let result = if ended.is_ok() { "done" } else { "failed" };
            context.metrics.reconciled(kind_of::<K>(), result, begun.elapsed());
            context.progress.ended(kind_of::<K>(), &key, Instant::now());
            if ended.is_ok() {
                context.backoff.succeeded(&key);
                tracing::info!(recovered = RECONCILE_FAILED, object = key, "the reconcile succeeds again");
            }
            ended
        }
        .boxed()
    };
    let failed = |object: Arc<K>, error: &OperatorError, context: Arc<Context>| {
        let key = key(&*object);
        let wait = context.backoff.failed(&key);
        // Somebody else was first: the next try sees what is there now.
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
                "a reconcile failed and is tried again"
            );
        }
        Action::requeue(wait)
    };
    let queue = stream(requests).map(Ok::<_, std::convert::Infallible>).take_until(stopped(stop));
    let config = Config::default().concurrency(AT_ONCE);
    // What it yields was handled above, and objects that are gone need nothing.
    let working = applier(timed, failed, Arc::clone(&context), store, queue, config).for_each(async |_| ());
    // In one task: a reconcile that holds the thread keeps the queue from saying that it lives.
    tokio::select! {
        () = working => {}
        () = live(kind_of::<K>(), &context) => {}
    }
    context.progress.stopped(kind_of::<K>());
}

/// Says for ever that a queue lives.
async fn live(kind: &'static str, context: &Context) {
    loop {
        context.progress.lives(kind, Instant::now());
        tokio::time::sleep(SAID_EVERY).await;
    }
}

/// Ends when the process is to stop.
pub(crate) async fn stopped(mut stop: watch::Receiver<bool>) {
    // Fails when nobody can say so any more, which is as good.
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
