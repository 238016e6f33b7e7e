//! Runs a controller: serial per object, bounded concurrency per kind, retries with a growing delay. An error is logged
//! and counted; a missing permission is also an event on the object.

use std::fmt::Debug;
use std::future::Future;
use std::ops::Deref;
use std::sync::Arc;
use std::time::Duration;

use futures_util::StreamExt;
use kube::runtime::Controller;
use kube::runtime::controller::{Action, Config, Error};
use kube::runtime::events::{Event, EventType};
use kube::{Resource, ResourceExt};
use reprise_crds::status::Reason;
use serde::de::DeserializeOwned;
use tokio::sync::watch;
use tokio::time::Instant;

use crate::framework::error::{CONFLICT, FORBIDDEN, OperatorError, within};
use crate::framework::events::{self, Subject, kind_of};
use crate::framework::services::Services;

/// Key of the log condition for a failed reconcile.
const RECONCILE_FAILED: &str = "reconcile_failed";

/// Concurrent reconciles per kind. Enough to use the API server well, few enough to leave it capacity for
/// other clients.
const AT_ONCE: u16 = 8;

/// Failures for a missing permission with one event, which is at the first of them.
const FAILURES_PER_EVENT: u32 = 16;

/// Timeout of a reconcile. Most take milliseconds; a longer one waits for a peer that does not answer.
const RECONCILE_TIMEOUT: Duration = Duration::from_secs(60);

/// Runs a controller until `stop` is set. Then running reconciles finish before it returns.
pub async fn run<K, C, F, R>(
    controller: Controller<K>,
    reconcile: F,
    context: Arc<C>,
    mut stop: watch::Receiver<bool>,
) where
    K: Resource<DynamicType = ()> + Clone + Debug + DeserializeOwned + Send + Sync + 'static,
    C: Deref<Target = Services> + Send + Sync + 'static,
    F: Fn(Arc<K>, Arc<C>) -> R + Send + 'static,
    R: Future<Output = Result<Action, OperatorError>> + Send + 'static,
{
    let timed = move |object: Arc<K>, context: Arc<C>| {
        let (key, subject) = (key(&*object), Subject::of(&*object));
        timed(key, subject, reconcile(object, Arc::clone(&context)), context)
    };
    let failed =
        |object: Arc<K>, error: &OperatorError, context: Arc<C>| retry(&key(&*object), error, &context);
    // A task, because the trigger must be `Sync`. It ends with the process.
    let stopped = tokio::spawn(async move { stop.wait_for(|stop| *stop).await.is_ok() });
    controller
        .with_config(Config::default().concurrency(AT_ONCE))
        .graceful_shutdown_on(async move { drop(stopped.await) })
        .run(timed, failed, Arc::clone(&context))
        // Results of reconciles were handled above, and requests for deleted objects need no action.
        .for_each(async |result| {
            if let Err(Error::QueueError(error)) = result {
                tracing::warn!(%error, kind = kind_of::<K>(), "watch lost; restarting it");
            }
        })
        .await;
}

/// Runs a reconcile with a time limit, and records its progress and result.
async fn timed<C: Deref<Target = Services>>(
    key: String,
    subject: Subject,
    reconcile: impl Future<Output = Result<Action, OperatorError>>,
    context: Arc<C>,
) -> Result<Action, OperatorError> {
    let (begun, kind, of_rights) = (Instant::now(), subject.kind, format!("{key} forbidden"));
    let ended = within(RECONCILE_TIMEOUT, reconcile).await;
    let result = if ended.is_ok() { "done" } else { "failed" };
    context.metrics.record_reconcile(kind, result, begun.elapsed());
    match &ended {
        Ok(_) => {
            context.backoff.record_success(&key);
            context.backoff.record_success(&of_rights);
            tracing::info!(recovered = RECONCILE_FAILED, object = key, "reconcile succeeds again");
        }
        // Only an administrator can grant the permission. Changes of the object cause reconciles at any rate.
        Err(error)
            if error.code() == Some(FORBIDDEN)
                && context.backoff.count_failure(&of_rights).is_multiple_of(FAILURES_PER_EVENT) =>
        {
            let note = format!(
                "reconcile failed: {error}. Give the operator the permissions of this version's chart"
            );
            let event = Event {
                type_: EventType::Warning,
                reason: Reason::Forbidden.as_str().to_owned(),
                note: Some(note),
                action: "Reconcile".to_owned(),
                secondary: None,
            };
            events::publish(&context, &subject, event).await;
        }
        Err(_) => {}
    }
    ended
}

/// Logs a failed reconcile and returns when it is repeated.
fn retry(key: &str, error: &OperatorError, context: &Services) -> Action {
    let wait = context.backoff.record_failure(key);
    // Another writer was first. The retry sees its result, so no warning is needed.
    if error.code() == Some(CONFLICT) {
        tracing::info!(
            condition = "reconcile_conflict",
            %error,
            object = key,
            ?wait,
            "retrying reconcile: the object was modified concurrently (409)"
        );
    } else {
        tracing::warn!(condition = RECONCILE_FAILED, %error, object = key, ?wait, "reconcile failed; retrying");
    }
    Action::requeue(wait)
}

fn key<K: Resource<DynamicType = ()>>(object: &K) -> String {
    format!("{}/{}/{}", kind_of::<K>(), object.namespace().unwrap_or_default(), object.name_any())
}
