//! Secrets of clusters, watched by name: RBAC then permits the operator to read these names only.
//!
//! The first reconcile of a cluster starts one watch for each of its Secrets, and waits until their state is known. A
//! change reconciles the cluster. A watch ends when its cluster is gone and the Secret changes, which its garbage
//! collection does.
//!
//! For a cluster outside of the chart, the operator may lack the permission. The API server then rejects the watches,
//! which are retried: they succeed once the permission is granted, and reconcile the cluster.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::join_all;
use k8s_openapi::api::core::v1::Secret;
use kube::api::{Api, DynamicObject, Patch, PatchParams, PostParams};
use kube::runtime::WatchStreamExt;
use kube::runtime::watcher::{self, watch_object};
use kube::{Client, ResourceExt};
use reprise_crds::status::Reason;
use reprise_crds::{KVCacheCluster, OPERATOR_FIELD_MANAGER};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::framework::child::ChildKind;
use crate::framework::children::api;
use crate::framework::error::{FORBIDDEN, OperatorError};
use crate::framework::feed::{WATCH_LOST, WatchBackoff};
use crate::framework::labels::CLUSTER_UID;
use crate::framework::metrics::Write;
use crate::framework::refusal::Refusal;
use crate::reconcile::cluster::build::metadata::metadata;
use crate::reconcile::context::Context;
use crate::reconcile::names::{ClusterNames, Component};
use crate::reconcile::stores::Stores;

/// Time in which the state of a Secret becomes known. Later, it counts as unknown, and readers ask the API server.
const KNOWN_WITHIN: Duration = Duration::from_secs(5);

/// State of a Secret.
#[derive(Clone, Debug, Default, PartialEq)]
enum State {
    /// The watch has not delivered it yet.
    #[default]
    Unknown,
    Absent,
    Present(Arc<DynamicObject>),
    /// The operator has no permission to read it. Readers that ask the API server get the message.
    Forbidden,
}

/// Watches of the Secrets of all clusters.
#[derive(Debug, Default)]
pub struct Secrets {
    /// States by namespace and name.
    watched: Mutex<HashMap<(String, String), watch::Receiver<State>>>,
}

impl Secrets {
    /// Returns a Secret of a cluster as its watch last reported it; `None` if it does not exist, is not of the cluster,
    /// or is not watched.
    pub fn get(&self, names: &ClusterNames, name: &str) -> Option<Arc<DynamicObject>> {
        match self.state(names, name) {
            State::Present(secret) if !is_foreign(names, &*secret) => Some(secret),
            _ => None,
        }
    }

    /// Whether the watch has reported that a Secret does not exist.
    pub fn is_absent(&self, names: &ClusterNames, name: &str) -> bool {
        self.state(names, name) == State::Absent
    }

    fn state(&self, names: &ClusterNames, name: &str) -> State {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        let state = watched.get(&(names.namespace.clone(), name.to_owned()));
        state.map(|state| state.borrow().clone()).unwrap_or_default()
    }

    /// Watches the Secrets of a cluster, and waits until their state is known.
    pub async fn follow(&self, names: &ClusterNames, client: &Client, stores: &Arc<Stores>) {
        let states = secrets_of(names).map(|name| {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            // Watches that have ended.
            watched.retain(|_, state| state.has_changed().is_ok());
            let start = || {
                let (sender, state) = watch::channel(State::Unknown);
                let api = api(client, ChildKind::Secret, Some(&names.namespace));
                tokio::spawn(follow(api, name.clone(), names.clone(), Arc::clone(stores), sender));
                state
            };
            watched.entry((names.namespace.clone(), name.clone())).or_insert_with(start).clone()
        });
        let known = states.map(|mut state| async move {
            // An error means that the watch has ended.
            let _ = state.wait_for(|state| *state != State::Unknown).await;
        });
        // Readers handle an unknown state.
        let _ = timeout(KNOWN_WITHIN, join_all(known)).await;
    }
}

/// Watches a Secret of a cluster, and reconciles the cluster after changes, until the cluster is gone.
async fn follow(
    api: Api<DynamicObject>,
    secret: String,
    names: ClusterNames,
    stores: Arc<Stores>,
    sender: watch::Sender<State>,
) {
    let namespace = &names.namespace;
    let mut found = watch_object(api, &secret).backoff(WatchBackoff::default()).boxed();
    while let Some(found) = found.next().await {
        let state = match found {
            Ok(found) => {
                tracing::info!(recovered = WATCH_LOST, namespace, secret, "watch established");
                found.map_or(State::Absent, |secret| State::Present(Arc::new(secret)))
            }
            Err(error) if is_forbidden(&error) => {
                tracing::warn!(condition = WATCH_LOST, %error, namespace, secret, "no permission for a Secret");
                State::Forbidden
            }
            Err(error) => {
                tracing::warn!(condition = WATCH_LOST, %error, namespace, secret, "watch lost; restarting it");
                continue;
            }
        };
        let is_news = sender.send_replace(state.clone()) != state;
        let Some(cluster) = stores.cluster_by_uid(&names.uid) else { return };
        if is_news {
            stores.feeds.clusters.request(cluster).await;
        }
    }
}

/// Names of a cluster's Secrets, without the keys of tenants: only clusters with encrypted tenants need the permission
/// for them, and they are read when they are compared.
fn secrets_of(names: &ClusterNames) -> [String; 3] {
    [names.authority(), names.console(), names.salts()]
}

/// The refusal of a cluster whose Secrets the operator may not read.
pub(crate) fn refusal(names: &ClusterNames, message: &str) -> Refusal {
    let message = format!(
        "the operator has no permission for the cluster's Secrets: add {{namespace: {}, name: {}}} to the value rbac.clusters \
         of the chart, and upgrade the release: {message}",
        names.namespace, names.name
    );
    Refusal::new(Reason::Forbidden, message)
}

/// Whether the API server rejects a watch because a permission is missing.
fn is_forbidden(error: &watcher::Error) -> bool {
    match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => status.code == FORBIDDEN,
        watcher::Error::WatchError(status) => status.code == FORBIDDEN,
        _ => false,
    }
}

/// Whether a Secret is not of this cluster.
pub(crate) fn is_foreign(names: &ClusterNames, secret: &impl ResourceExt) -> bool {
    secret.labels().get(CLUSTER_UID) != Some(&names.uid)
}

/// Creates a Secret of the agents with these entries, or changes them in the version that was read. Entries with the
/// value `null` are removed.
///
/// # Errors
/// The API server rejected the write, for example because another writer changed the Secret (409).
pub(crate) async fn write_entries(
    cluster: &KVCacheCluster,
    name: &str,
    stored: Option<&Secret>,
    entries: &Value,
    context: &Context,
) -> Result<(), OperatorError> {
    let names = ClusterNames::of(cluster);
    let secrets: Api<Secret> = Api::namespaced(context.client.clone(), &names.namespace);
    let field_manager = Some(OPERATOR_FIELD_MANAGER.to_owned());
    let written = match stored {
        None => {
            let secret = json!({
                "apiVersion": "v1", "kind": "Secret", "type": "Opaque",
                "metadata": metadata(cluster, &names, Component::Agent, name), "data": entries,
            });
            let secret =
                serde_json::from_value(secret).map_err(|error| OperatorError::Identity(error.to_string()))?;
            secrets.create(&PostParams { field_manager, ..PostParams::default() }, &secret).await
        }
        Some(stored) => {
            let version = json!({ "resourceVersion": stored.resource_version() });
            let patch = Patch::Merge(json!({ "metadata": version, "data": entries }));
            secrets.patch(name, &PatchParams { field_manager, ..PatchParams::default() }, &patch).await
        }
    };
    written.map_err(OperatorError::api(format!("write Secret {name}")))?;
    context.metrics.record_write("Secret", Write::Apply);
    Ok(())
}
