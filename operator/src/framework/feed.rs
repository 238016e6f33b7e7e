//! Watches that several controllers share: each kind is watched once and stored once, and its changes are passed to all
//! subscribers.
//!
//! kube's shared streams pass no deletions, so a deleted child would not be applied again. A [`Feed`] passes them like
//! other changes.

use std::fmt::Debug;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::{Stream, StreamExt, stream};
use kube::api::{Api, ListParams};
use kube::runtime::reflector::reflector;
use kube::runtime::reflector::store::Writer;
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{DefaultBackoff, Event};
use kube::runtime::{WatchStreamExt, watcher};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::sync::watch;

use crate::framework::change::{Change, LastSeen, OwnWrites, WatchedKind, strip};
use crate::framework::child_stores::KindAccess;
use crate::framework::error::{FORBIDDEN, NOT_FOUND};

/// Changes buffered for a subscriber. A controller takes them at once and keeps one request per object.
const CHANGES_MAX: usize = 1024;

/// Longest delay before a failed watch restarts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Key of the log condition for a lost watch.
pub(crate) const WATCH_LOST: &str = "watch_lost";

/// An object and what changed of it.
type Published<K> = (Arc<K>, Change);

/// Changes of the objects of one kind.
#[derive(Debug)]
pub struct Feed<K> {
    subscribers: Mutex<Vec<mpsc::Sender<Published<K>>>>,
}

impl<K> Default for Feed<K> {
    fn default() -> Feed<K> {
        Feed { subscribers: Mutex::default() }
    }
}

impl<K: Send + Sync + 'static> Feed<K> {
    /// Subscribes to all changes, from now on.
    pub fn changes(&self) -> impl Stream<Item = Arc<K>> + Send + 'static + use<K> {
        self.subscribe(|_| true)
    }

    /// Subscribes to the changes of desired states, from now on.
    pub fn spec_changes(&self) -> impl Stream<Item = Arc<K>> + Send + 'static + use<K> {
        self.subscribe(|change| change == Change::Spec)
    }

    /// Subscribes to the changes after which an object itself is reconciled, from now on: all except the operator's own
    /// writes.
    pub fn foreign_changes(&self) -> impl Stream<Item = Arc<K>> + Send + 'static + use<K> {
        self.subscribe(|change| change != Change::OwnWrite)
    }

    fn subscribe(
        &self,
        is_relevant: fn(Change) -> bool,
    ) -> impl Stream<Item = Arc<K>> + Send + 'static + use<K> {
        let (sender, receiver) = mpsc::channel(CHANGES_MAX);
        self.subscribers.lock().unwrap_or_else(PoisonError::into_inner).push(sender);
        let changes = stream::unfold(receiver, async |mut receiver: mpsc::Receiver<Published<K>>| {
            Some((receiver.recv().await?, receiver))
        });
        changes.filter_map(move |(object, change)| std::future::ready(is_relevant(change).then_some(object)))
    }

    /// Requests that an object is reconciled, as if another writer had changed it.
    pub async fn request(&self, object: Arc<K>) {
        self.publish(object, Change::Other).await;
    }

    async fn publish(&self, object: Arc<K>, change: Change) {
        let subscribers = {
            let mut subscribers = self.subscribers.lock().unwrap_or_else(PoisonError::into_inner);
            subscribers.retain(|subscriber| !subscriber.is_closed());
            subscribers.clone()
        };
        for subscriber in subscribers {
            // Fails only while the controllers are shutting down.
            let _ = subscriber.send((Arc::clone(&object), change)).await;
        }
    }
}

/// Requests to reconcile all objects of the subscribed kinds. Several that no controller has handled yet count once.
#[derive(Debug, Default)]
pub struct Signal(watch::Sender<()>);

impl Signal {
    /// Sends the signal to all subscribers.
    pub fn send(&self) {
        self.0.send_replace(());
    }

    /// Subscribes to the signals from now on.
    pub fn subscribe(&self) -> impl Stream<Item = ()> + Send + 'static + use<> {
        stream::unfold(self.0.subscribe(), async |mut receiver| {
            receiver.changed().await.ok()?;
            Some(((), receiver))
        })
    }
}

/// Delays of a watch that cannot start: kube's, but shorter, because a new holder of the lease sees no changes until its
/// watches run.
#[derive(Default)]
pub(crate) struct WatchBackoff(DefaultBackoff);

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(PAUSE_MAX))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Waits until an optional kind can be listed. Until then, `on_list` receives why it is not usable. A watch would log each
/// rejected list as a warning.
async fn wait_until_usable<K>(api: &Api<K>, on_list: impl Fn(KindAccess))
where
    K: Clone + DeserializeOwned + Debug,
{
    loop {
        match api.list(&ListParams::default().limit(1)).await {
            Ok(_) => return,
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => on_list(KindAccess::NotServed),
            Err(kube::Error::Api(status)) if status.code == FORBIDDEN => on_list(KindAccess::NotAllowed),
            Err(error) => tracing::info!(%error, "cannot check whether an optional kind is usable; retrying"),
        }
        tokio::time::sleep(PAUSE_MAX).await;
    }
}

/// Watches the objects of a kind until the task ends. A failed watch restarts with a growing delay. The removal of an
/// optional kind in use is not handled: its watch fails and is retried.
///
/// `on_change` runs after the store has changed and before the subscribers receive the change. `on_list` runs after all
/// objects were listed, because deletions may have been missed before, and while an optional kind is not usable.
pub(crate) async fn watch<K>(
    (api, config, is_optional): (Api<K>, watcher::Config, bool),
    writer: Writer<K>,
    (feed, own_writes): (Arc<Feed<K>>, Arc<OwnWrites>),
    on_change: impl Fn(&K, Change) + Send,
    on_list: impl Fn(KindAccess) + Send + Sync,
) where
    K: WatchedKind + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Clone + Eq + std::hash::Hash,
{
    if is_optional {
        wait_until_usable(&api, &on_list).await;
    }
    let (mut seen, kind) = (LastSeen::default(), std::any::type_name::<K>());
    let stream = watcher(api, config).backoff(WatchBackoff::default()).modify(strip);
    let mut events = std::pin::pin!(reflector(writer, stream));
    while let Some(event) = events.next().await {
        let (object, change) = match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                let change = seen.record(&object, &own_writes);
                (object, change)
            }
            Ok(Event::Delete(object)) => {
                seen.forget(&object, &own_writes);
                (object, Change::Spec)
            }
            Ok(Event::Init) => continue,
            Ok(Event::InitDone) => {
                tracing::info!(recovered = WATCH_LOST, kind, "watch established");
                on_list(KindAccess::Usable);
                continue;
            }
            Err(error) => {
                tracing::warn!(condition = WATCH_LOST, %error, kind, "watch lost; restarting it");
                continue;
            }
        };
        on_change(&object, change);
        feed.publish(Arc::new(object), change).await;
    }
}
