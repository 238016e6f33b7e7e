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
use kube::core::Status;
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

/// Namespace and name of a Secret.
type Key = (String, String);

/// State of a Secret.
#[derive(Clone, Debug, Default)]
enum State {
    /// The watch has not delivered it yet.
    #[default]
    Unknown,
    Absent,
    Present(Arc<DynamicObject>),
    /// Another component has created it.
    Foreign,
    /// The operator has no permission to read it; the API server's message.
    Forbidden(String),
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
    names: ClusterNames,
}

impl Secrets {
    /// Returns a Secret as its watch last reported it; `None` if it does not exist, or is not watched.
    pub fn get(&self, namespace: &str, name: &str) -> Option<Arc<DynamicObject>> {
        match self.state(namespace, name)? {
            State::Present(secret) => Some(secret),
            _ => None,
        }
    }

    /// Whether the watch has reported that a Secret does not exist.
    pub fn is_absent(&self, namespace: &str, name: &str) -> bool {
        matches!(self.state(namespace, name), Some(State::Absent))
    }

    fn state(&self, namespace: &str, name: &str) -> Option<State> {
        let watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
        Some(watched.get(&(namespace.to_owned(), name.to_owned()))?.borrow().clone())
    }

    /// Returns a refusal if the operator has no permission to read a Secret of a cluster.
    pub fn forbidden(&self, names: &ClusterNames) -> Option<Refusal> {
        let message =
            secrets_of(names).into_iter().find_map(|name| match self.state(&names.namespace, &name)? {
                State::Forbidden(message) => Some(message),
                _ => None,
            })?;
        Some(refusal(names, &message))
    }

    /// Watches the Secrets of a cluster, and waits until their state is known.
    pub async fn follow(&self, names: &ClusterNames, client: &Client, stores: &Arc<Stores>) {
        let states = secrets_of(names).map(|name| {
            let mut watched = self.watched.lock().unwrap_or_else(PoisonError::into_inner);
            // Watches that have ended.
            watched.retain(|_, state| state.has_changed().is_ok());
            let start = || {
                let (sender, state) = watch::channel(State::Unknown);
                let watching =
                    Watching { client: client.clone(), stores: Arc::clone(stores), names: names.clone() };
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

/// Returns the answer of the API server if it rejects a watch because a permission is missing.
fn missing_permission(error: &watcher::Error) -> Option<&Status> {
    let status = match error {
        watcher::Error::InitialListFailed(kube::Error::Api(status))
        | watcher::Error::WatchStartFailed(kube::Error::Api(status))
        | watcher::Error::WatchFailed(kube::Error::Api(status)) => status,
        watcher::Error::WatchError(status) => status,
        _ => return None,
    };
    (status.code == FORBIDDEN).then_some(status)
}

impl Watching {
    async fn run(self, name: String, sender: watch::Sender<State>) {
        let secrets = api(&self.client, ChildKind::Secret, Some(&self.names.namespace));
        let mut found = watch_object(secrets, &name).backoff(WatchBackoff::default()).boxed();
        while let Some(found) = found.next().await {
            let namespace = &self.names.namespace;
            let state = match found {
                Ok(Some(secret)) if is_foreign(&self.names, &secret) => State::Foreign,
                Ok(Some(secret)) => State::Present(Arc::new(secret)),
                Ok(None) => State::Absent,
                Err(error) => match missing_permission(&error) {
                    Some(Status { message, .. }) => {
                        tracing::warn!(
                            condition = WATCH_LOST,
                            error = message,
                            namespace,
                            secret = name,
                            "no permission for a Secret"
                        );
                        State::Forbidden(message.clone())
                    }
                    None => {
                        tracing::warn!(condition = WATCH_LOST, %error, namespace, secret = name, "watch lost; restarting it");
                        continue;
                    }
                },
            };
            if !matches!(state, State::Forbidden(_)) {
                tracing::info!(recovered = WATCH_LOST, namespace, secret = name, "watch established");
            }
            let before = sender.send_replace(state.clone());
            let is_news = !matches!(
                (&before, &state),
                (State::Unknown, _) | (State::Forbidden(_), State::Forbidden(_))
            );
            match self.stores.cluster_by_uid(&self.names.uid) {
                Some(cluster) if is_news => self.stores.feeds.clusters.request(cluster).await,
                Some(_) => {}
                None => return,
            }
        }
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
