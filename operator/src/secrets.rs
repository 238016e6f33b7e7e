//! Secrets of clusters, watched by name: RBAC then permits the operator to read these names only.
//!
//! The first reconcile of a cluster starts one watch for each of its Secrets, and waits until their state is known. A
//! change reconciles the cluster. A watch ends when its cluster is gone and the Secret changes, which its garbage
//! collection does.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use kube::api::DynamicObject;
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, ResourceExt};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::child::ChildKind;
use crate::children::api;
use crate::names::{CLUSTER_UID, ClusterNames};
use crate::stores::Stores;
use crate::watch::{Triggers, WATCH_LOST, WatchBackoff};

/// Time in which the state of a Secret becomes known. Later, it counts as unknown, and readers ask the API server.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// Namespace and name of a Secret.
type Key = (String, String);

/// State of a Secret.
#[derive(Clone, Debug, Default)]
enum State {
    /// The watch has not delivered it yet.
    #[default]
    Unknown,
    /// The Secret does not exist.
    Absent,
    Present(Arc<DynamicObject>),
}

/// Watches of the Secrets of all clusters.
#[derive(Debug, Default)]
pub struct Secrets {
    watched: Mutex<HashMap<Key, watch::Receiver<State>>>,
}

/// Parts of the operator that a watch needs.
struct Watching {
    client: Client,
    stores: Arc<Stores>,
    triggers: Arc<Triggers>,
    names: ClusterNames,
}

impl Secrets {
    /// Returns a Secret as its watch last reported it; `None` if it does not exist, or is not watched.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<DynamicObject>> {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let state = watched.get(&(namespace.to_owned(), name.to_owned()))?.borrow().clone();
        match state {
            State::Present(secret) => Some(secret),
            State::Unknown | State::Absent => None,
        }
    }

    /// Watches the Secrets of a cluster, and waits until their state is known.
    pub async fn follow(
        &self,
        names: &ClusterNames,
        client: &Client,
        (stores, triggers): (&Arc<Stores>, &Arc<Triggers>),
    ) {
        let secrets =
            [names.authority(), names.console(), names.salts(), names.etcd_authority(), names.etcd_tls()];
        let states = secrets.map(|name| {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            // Watches that have ended.
            watched.retain(|_, state| state.has_changed().is_ok());
            let start = || {
                let (sender, state) = watch::channel(State::Unknown);
                let watching = Watching {
                    client: client.clone(),
                    stores: Arc::clone(stores),
                    triggers: Arc::clone(triggers),
                    names: names.clone(),
                };
                tokio::spawn(watching.run(name.clone(), sender));
                state
            };
            watched.entry((names.namespace.clone(), name.clone())).or_insert_with(start).clone()
        });
        let known = states.map(|mut state| async move {
            // An error means that the watch has ended.
            let _ = state.wait_for(|state| !matches!(state, State::Unknown)).await;
        });
        // Readers handle an unknown state.
        let _ = timeout(KNOWN_WITHIN, join_all(known)).await;
    }
}

impl Watching {
    async fn run(self, name: String, sender: watch::Sender<State>) {
        let secrets = api(&self.client, ChildKind::Secret, Some(&self.names.namespace));
        let only = watcher::Config::default().fields(&format!("metadata.name={name}"));
        let mut events = watcher(secrets, only).backoff(WatchBackoff::default()).boxed();
        let mut is_listed = false;
        while let Some(event) = events.next().await {
            let state = match event {
                Ok(watcher::Event::Init) => {
                    is_listed = false;
                    continue;
                }
                Ok(watcher::Event::InitApply(secret) | watcher::Event::Apply(secret)) => {
                    is_listed = true;
                    // One that another component has created is not the cluster's.
                    match secret.labels().get(CLUSTER_UID) {
                        Some(uid) if *uid == self.names.uid => State::Present(Arc::new(secret)),
                        _ => State::Absent,
                    }
                }
                Ok(watcher::Event::InitDone) => {
                    tracing::info!(recovered = WATCH_LOST, secret = name, "watch established");
                    if is_listed {
                        continue;
                    }
                    State::Absent
                }
                Ok(watcher::Event::Delete(_)) => State::Absent,
                Err(error) => {
                    tracing::warn!(condition = WATCH_LOST, %error, secret = name, "watch lost; restarting it");
                    continue;
                }
            };
            let was_known = !matches!(*sender.borrow(), State::Unknown);
            sender.send_replace(state);
            let cluster = self.stores.cluster_by_uid(&self.names.uid);
            match cluster {
                Some(cluster) if was_known => self.triggers.enqueue_cluster(&cluster).await,
                Some(_) => {}
                None => return,
            }
        }
    }
}
