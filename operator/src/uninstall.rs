//! The uninstall hook of the chart: deletes the objects that a release has applied, while the operator still
//! runs, and waits until they and their children are gone.
//!
//! Order:
//! 1. Tenants. Control planes have a third of the time to remove their budgets.
//! 2. Pools with a confirmed wipe. Agents wipe them.
//! 3. Clusters with all their children: those that Kubernetes deletes, and those that the operator deletes
//!    (`CacheNode`s, bindings, grants of queues on nodes that no longer belong to a cluster).
//! 4. Other pools. Their data is kept.
//!
//! Resource definitions and objects that the release did not apply are kept. The command logs objects that
//! are kept and need attention:
//! * pools with an unconfirmed wipe;
//! * allocations with a grant on a node of a cluster that is kept, because no operator is left to remove
//!   their finalizer;
//! * other clusters and pools that engines use, for the same reason.
//!
//! The command may be run again after a timeout.

use std::collections::BTreeSet;
use std::time::Duration;

use anyhow::{Context as _, bail};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::framework::child::ChildKind;
use crate::framework::labels::{CLUSTER_UID, MANAGED_BY, OPERATOR};
use crate::reconcile::deletion_guard::{self, CONFIRMED};
use crate::reconcile::names::{DELETE_IN_USE, IN_USE_FINALIZER, QUEUES_FINALIZER, RELEASE};

/// Interval of polls for remaining objects.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Fraction of the time, as a divisor, that control planes have to remove tenants.
const TENANTS_PART: u32 = 3;
/// HTTP status code: the object does not exist.
const NOT_FOUND: u16 = 404;
/// HTTP status code: another writer modified the object.
const CONFLICT: u16 = 409;
/// HTTP status code: the server asks the client to retry later.
const TOO_MANY_REQUESTS: u16 = 429;
/// Most objects that an error or a kind of warning names.
const NAMES_MAX: usize = 20;

/// A release of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// Name of the release.
    pub name: String,
    /// Namespace of the release and its clusters.
    pub namespace: String,
}

/// How a pool is uninstalled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PoolAction {
    /// Deleted first, after agents have wiped it.
    Wipe,
    /// Deleted, and its data is kept.
    Retain,
    /// Kept, because its wipe is not confirmed.
    Keep,
}

/// State of one run.
struct Run<'a> {
    client: &'a Client,
    release: &'a Release,
    within: Duration,
    begun: Instant,
}

/// Deletes the objects that a release has applied, and waits until they are gone.
///
/// # Errors
/// An object remains after the timeout, with the reason in the message, or the API server rejected a
/// deletion.
pub async fn delete(client: &Client, release: &Release, within: Duration) -> anyhow::Result<()> {
    let run = Run { client, release, within, begun: Instant::now() };
    run.delete_tenants().await?;
    run.delete_pools(PoolAction::Wipe).await?;
    run.delete_clusters().await?;
    run.until_gone(async || run.ending_grants().await).await?;
    run.until_gone(async || run.remaining_tenants().await).await?;
    run.delete_pools(PoolAction::Retain).await?;
    run.log_remaining().await
}

impl Run<'_> {
    /// Deletes tenants. Tenants of unreachable control planes are deleted together with their clusters.
    async fn delete_tenants(&self) -> anyhow::Result<()> {
        let api = self.all_tenants();
        self.delete_all(&api, &self.applied(&api).await?, &DeleteParams::background()).await?;
        let left = self.wait(self.within / TENANTS_PART, async || self.remaining_tenants().await).await?;
        if !left.is_empty() {
            tracing::info!(
                "control planes did not remove these tenants in time; deleting them with their clusters: {}",
                left.join("; ")
            );
        }
        Ok(())
    }

    async fn remaining_tenants(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.applied(&self.all_tenants()).await?.iter().map(describe).collect())
    }

    async fn delete_pools(&self, action: PoolAction) -> anyhow::Result<()> {
        let api = self.all_pools();
        let with_action = async || {
            let mut pools = self.applied(&api).await?;
            pools.retain(|pool| pool_action(pool) == action);
            anyhow::Ok(pools)
        };
        let pools = with_action().await?;
        self.confirm_deletion(&api, &pools).await?;
        self.delete_all(&api, &pools, &DeleteParams::background()).await?;
        self.until_gone(async || Ok(with_action().await?.iter().map(describe).collect())).await
    }

    async fn delete_clusters(&self) -> anyhow::Result<()> {
        let namespace = &self.release.namespace;
        let resource = ApiResource::erase::<KVCacheCluster>(&());
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        // Foreground: the cluster remains until all objects that it owns are gone.
        let clusters = self.applied(&api).await?;
        self.confirm_deletion(&api, &clusters).await?;
        self.delete_all(&api, &clusters, &DeleteParams::foreground()).await?;
        self.until_gone(async || {
            let clusters = self.list(&api, &ListParams::default()).await?;
            let (going, staying): (Vec<_>, Vec<_>) =
                clusters.into_iter().partition(|cluster| cluster.metadata.deletion_timestamp.is_some());
            let mut left = Vec::new();
            for cluster in &going {
                left.push(self.describe_cluster(cluster).await?);
            }
            let staying: BTreeSet<String> = staying.iter().map(ResourceExt::name_any).collect();
            left.extend(self.remaining_nodes(&staying).await?);
            left.extend(self.remaining_bindings(&going).await?);
            Ok(left)
        })
        .await
    }

    /// Describes a cluster that is being deleted, with the workloads or the reason that it waits for.
    async fn describe_cluster(&self, cluster: &DynamicObject) -> anyhow::Result<String> {
        let of_it =
            ListParams::default().labels(&format!("{CLUSTER_UID}={}", cluster.uid().unwrap_or_default()));
        let mut workloads = Vec::new();
        for kind in [ChildKind::StatefulSet, ChildKind::DaemonSet] {
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &self.release.namespace, &kind.resource());
            let found = self.list(&api, &of_it).await?;
            workloads.extend(found.iter().map(|one| format!("{} {}", kind.as_str(), one.name_any())));
        }
        let waits = if workloads.is_empty() {
            remaining_reason(cluster)
        } else {
            format!("waits for {}", workloads.join(", "))
        };
        Ok(format!("KVCacheCluster {}: {waits}", cluster.name_any()))
    }

    /// Describes remaining CacheNodes of clusters in the namespace that are gone or being deleted.
    async fn remaining_nodes(&self, staying: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
        let api: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let nodes = self.list(&api, &ListParams::default()).await?;
        let is_left = |node: &&DynamicObject| {
            let cluster = &node.data["spec"]["clusterRef"];
            let is_here = cluster["namespace"] == self.release.namespace.as_str();
            is_here && !cluster["name"].as_str().is_some_and(|name| staying.contains(name))
        };
        let left = nodes.iter().filter(is_left).map(|node| node.name_any());
        let message = |name: String| {
            format!(
                "CacheNode {name}: the operator deletes it once the agent has released the granted GPU \
                 queues of the node; an agent that does not report for a minute counts as gone. Check that \
                 the operator runs"
            )
        };
        Ok(left.map(message).collect())
    }

    /// Describes bindings of deleted clusters, which the operator deletes after the clusters.
    async fn remaining_bindings(&self, going: &[DynamicObject]) -> anyhow::Result<Vec<String>> {
        let api: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        let ours = ListParams::default().labels(&format!("{MANAGED_BY}={OPERATOR},{CLUSTER_UID}"));
        let bindings = self.retry(async || api.list(&ours).await).await?.items;
        let clusters: Api<DynamicObject> = Api::namespaced_with(
            self.client.clone(),
            &self.release.namespace,
            &ApiResource::erase::<KVCacheCluster>(&()),
        );
        let there = self.list(&clusters, &ListParams::default()).await?;
        let stays = |uid: &str| {
            let has = |cluster: &DynamicObject| cluster.metadata.uid.as_deref() == Some(uid);
            there.iter().any(has) && !going.iter().any(has)
        };
        let is_left = |binding: &&ClusterRoleBinding| {
            let of_us = binding
                .subjects
                .iter()
                .flatten()
                .any(|subject| subject.namespace.as_deref() == Some(self.release.namespace.as_str()));
            of_us && !binding.labels().get(CLUSTER_UID).is_some_and(|uid| stays(uid))
        };
        let left = bindings.iter().filter(is_left).map(|binding| binding.name_any());
        Ok(left
            .map(|name| {
                format!("ClusterRoleBinding {name}: the operator deletes it. Check that the operator runs")
            })
            .collect())
    }

    /// Describes allocations whose grants the operator ends, because the agents of their nodes are gone.
    async fn ending_grants(&self) -> anyhow::Result<Vec<String>> {
        let (ending, _) = self.grants().await?;
        let message = |one: &DynamicObject| {
            let (node, name) = (node_of(one), full_name(one));
            format!(
                "GPUQueueAllocation {name}: the operator ends its grant, because node {node} no longer \
                 belongs to a cluster. Check that the operator runs"
            )
        };
        Ok(ending.iter().map(message).collect())
    }

    /// Returns allocations with the operator's finalizer: those on nodes of no cluster, then the others.
    async fn grants(&self) -> anyhow::Result<(Vec<DynamicObject>, Vec<DynamicObject>)> {
        let allocations: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<GPUQueueAllocation>(&()));
        let nodes: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let allocations = self.list(&allocations, &ListParams::default()).await?;
        let nodes = self.list(&nodes, &ListParams::default()).await?;
        Ok(split_by_agent(allocations, &nodes))
    }

    async fn log_remaining(&self) -> anyhow::Result<()> {
        let (_, granted) = self.grants().await?;
        for allocation in granted.iter().take(NAMES_MAX) {
            tracing::warn!(
                allocation = full_name(allocation),
                node = node_of(allocation),
                "the allocation stays, with its grant and the finalizer {QUEUES_FINALIZER}, because its node \
                 belongs to a cluster that is not part of the release. Its deletion will wait until an \
                 operator is installed again or the finalizer is removed by hand"
            );
        }
        if let Some(more) = granted.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
            tracing::warn!(more, "more allocations stay for the same reason");
        }
        for pool in self.applied(&self.all_pools()).await? {
            tracing::warn!(
                pool = pool.name_any(),
                "the pool stays, because its deletionPolicy is Wipe and the wipe is not confirmed; delete it \
                 by hand"
            );
        }
        let checked = async {
            self.release_unused_pools().await?;
            self.log_blocked().await
        };
        if let Err(error) = checked.await {
            tracing::warn!(
                error = format!("{error:#}"),
                "cannot check for other objects that keep the operator's finalizers"
            );
        }
        tracing::info!(release = self.release.name, "all objects that the release applied are gone");
        Ok(())
    }

    /// Removes the finalizer from other pools that no node has. The operator would do that a little later,
    /// but stops now.
    async fn release_unused_pools(&self) -> anyhow::Result<()> {
        let nodes: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let nodes = self.list(&nodes, &ListParams::default()).await?;
        let claims = nodes.iter().filter_map(|node| node.data["spec"]["claims"].as_array()).flatten();
        let claimed: BTreeSet<&str> = claims.filter_map(|claim| claim["uid"].as_str()).collect();
        let api = self.all_pools();
        for pool in self.list(&api, &ListParams::default()).await? {
            let is_unused = !claimed.contains(pool.uid().unwrap_or_default().as_str());
            let wipes = pool.data["spec"]["deletionPolicy"] == "Wipe";
            if !is_unused || wipes || !deletion_guard::has_guard(&pool) {
                continue;
            }
            let mut finalizers = pool.finalizers().to_vec();
            finalizers.retain(|one| one != IN_USE_FINALIZER);
            let patch = Patch::Merge(json!({
                "metadata": { "finalizers": finalizers, "resourceVersion": pool.metadata.resource_version },
            }));
            let name = pool.name_any();
            let patched =
                self.retry(async || match api.patch(&name, &PatchParams::default(), &patch).await {
                    Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => Ok(()),
                    other => other.map(|_| ()),
                });
            patched.await.with_context(|| format!("cannot remove the finalizer from SSDPool {name}"))?;
        }
        Ok(())
    }

    /// Logs other clusters and pools that are in use or will be wiped. Without an operator their deletion
    /// never ends.
    async fn log_blocked(&self) -> anyhow::Result<()> {
        let clusters: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<KVCacheCluster>(&()));
        let mut objects = self.list(&clusters, &ListParams::default()).await?;
        objects.extend(self.list(&self.all_pools(), &ListParams::default()).await?);
        // Remaining objects of the release were logged already.
        let is_named = |object: &DynamicObject| object.labels().get(RELEASE) == Some(&self.release.name);
        objects.retain(|object| deletion_guard::has_guard(object) && !is_named(object));
        for object in objects.iter().take(NAMES_MAX) {
            let (kind, name) = (kind(object), full_name(object));
            tracing::warn!(
                kind,
                name,
                "the object stays, with the finalizer {IN_USE_FINALIZER}, because engines use it or it will \
                 be wiped. Its deletion will wait until an operator is installed again or the finalizer is \
                 removed by hand"
            );
        }
        if let Some(more) = objects.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
            tracing::warn!(more, "more clusters and pools stay for the same reason");
        }
        Ok(())
    }

    fn all_tenants(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<CacheTenant>(&()))
    }

    fn all_pools(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<SSDPool>(&()))
    }

    /// Returns the objects of a kind that the release has applied.
    async fn applied(&self, api: &Api<DynamicObject>) -> anyhow::Result<Vec<DynamicObject>> {
        self.list(api, &ListParams::default().labels(&format!("{RELEASE}={}", self.release.name))).await
    }

    /// Lists objects of a kind. Returns an empty list if the kind is not defined.
    async fn list(&self, api: &Api<DynamicObject>, of: &ListParams) -> anyhow::Result<Vec<DynamicObject>> {
        let listed = self.retry(async || match api.list(of).await {
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(Vec::new()),
            other => other.map(|list| list.items),
        });
        listed.await
    }

    /// Confirms the deletion of clusters or pools that engines use. Uninstalling the release implies that
    /// decision, and the operator, which would remove the finalizers later, is deleted next.
    async fn confirm_deletion(
        &self,
        api: &Api<DynamicObject>,
        objects: &[DynamicObject],
    ) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { DELETE_IN_USE: CONFIRMED } } }));
        let lacks = |object: &&DynamicObject| {
            object.annotations().get(DELETE_IN_USE).is_none_or(|value| value != CONFIRMED)
        };
        for object in objects.iter().filter(lacks) {
            let (kind, name) = (kind(object), object.name_any());
            let patched =
                self.retry(async || match api.patch(&name, &PatchParams::default(), &patch).await {
                    Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
                    other => other.map(|_| ()),
                });
            patched.await.with_context(|| format!("cannot annotate {kind} {name}"))?;
        }
        Ok(())
    }

    async fn delete_all(
        &self,
        api: &Api<DynamicObject>,
        objects: &[DynamicObject],
        how: &DeleteParams,
    ) -> anyhow::Result<()> {
        for object in objects.iter().filter(|object| object.metadata.deletion_timestamp.is_none()) {
            let (kind, name) = (kind(object), object.name_any());
            let deleted = self.retry(async || match api.delete(&name, how).await {
                Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
                other => other.map(|_| ()),
            });
            deleted.await.with_context(|| format!("cannot delete {kind} {name}"))?;
            tracing::info!(kind, name, "deleted");
        }
        Ok(())
    }

    /// Waits until nothing is left. On timeout, the error names remaining objects and why they remain.
    async fn until_gone(&self, left: impl AsyncFn() -> anyhow::Result<Vec<String>>) -> anyhow::Result<()> {
        let mut left = self.wait(self.within, left).await?;
        if left.is_empty() {
            return Ok(());
        }
        let more = left.len().saturating_sub(NAMES_MAX);
        left.truncate(NAMES_MAX);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        bail!("still there after {:?}: {}{more}", self.within, left.join("; "));
    }

    /// Waits until nothing is left or `within` has passed since the start of the run. Returns the remaining
    /// objects.
    async fn wait(
        &self,
        within: Duration,
        left: impl AsyncFn() -> anyhow::Result<Vec<String>>,
    ) -> anyhow::Result<Vec<String>> {
        loop {
            let left = left().await?;
            if left.is_empty() || self.begun.elapsed() >= within {
                return Ok(left);
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Retries a call until the timeout, unless the API server rejects it.
    async fn retry<T>(&self, call: impl AsyncFn() -> Result<T, kube::Error>) -> anyhow::Result<T> {
        loop {
            match call().await {
                Ok(done) => return Ok(done),
                Err(kube::Error::Api(status))
                    if (400..500).contains(&status.code) && status.code != TOO_MANY_REQUESTS =>
                {
                    return Err(kube::Error::Api(status).into());
                }
                Err(error) if self.begun.elapsed() >= self.within => {
                    return Err(error).context("the API server does not answer");
                }
                Err(error) => tracing::info!(%error, "API server request failed; retrying"),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("object", |types| types.kind.as_str())
}

fn pool_action(pool: &DynamicObject) -> PoolAction {
    let spec = &pool.data["spec"];
    match (spec["deletionPolicy"] == "Wipe", spec["wipeConfirmation"].is_string()) {
        (false, _) => PoolAction::Retain,
        (true, true) => PoolAction::Wipe,
        (true, false) => PoolAction::Keep,
    }
}

/// Splits allocations with the operator's finalizer: those on nodes without an agent, then the others.
fn split_by_agent(
    allocations: Vec<DynamicObject>,
    nodes: &[DynamicObject],
) -> (Vec<DynamicObject>, Vec<DynamicObject>) {
    let nodes: BTreeSet<String> = nodes.iter().map(ResourceExt::name_any).collect();
    let has_grant =
        |one: &DynamicObject| one.finalizers().iter().any(|description| description == QUEUES_FINALIZER);
    let granted = allocations.into_iter().filter(has_grant);
    granted.partition(|one| !nodes.contains(node_of(one)))
}

fn node_of(allocation: &DynamicObject) -> &str {
    allocation.data["spec"]["nodeName"].as_str().unwrap_or_default()
}

fn full_name(object: &DynamicObject) -> String {
    let name = object.name_any();
    object.namespace().map_or(name.clone(), |namespace| format!("{namespace}/{name}"))
}

/// Describes an object that is being deleted, and why it remains.
fn describe(object: &DynamicObject) -> String {
    format!("{} {}: {}", kind(object), object.name_any(), remaining_reason(object))
}

fn remaining_reason(object: &DynamicObject) -> String {
    let conditions = object.data["status"]["conditions"].as_array();
    let blocks = |condition: &&Value| condition["type"] == "DeletionBlocked" && condition["status"] == "True";
    let blocked = conditions.and_then(|conditions| conditions.iter().find(blocks));
    match blocked.and_then(|condition| condition["message"].as_str()) {
        Some(message) => message.to_owned(),
        None if object.finalizers().is_empty() => "it is being deleted".to_owned(),
        None => {
            format!(
                "waits for its finalizers: {}. Check that the operator runs",
                object.finalizers().join(", ")
            )
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn pool(spec: &Value, status: &Value, finalizers: &[&str]) -> DynamicObject {
        serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool",
            "metadata": { "name": "p", "finalizers": finalizers }, "spec": spec, "status": status,
        }))
        .expect("an object")
    }

    #[test]
    fn wipes_only_pools_with_confirmed_wipe() {
        let of = |spec: Value| pool_action(&pool(&spec, &json!({}), &[]));
        assert_eq!(of(json!({})), PoolAction::Retain);
        assert_eq!(of(json!({ "deletionPolicy": "Retain" })), PoolAction::Retain);
        assert_eq!(of(json!({ "deletionPolicy": "Wipe" })), PoolAction::Keep);
        assert_eq!(of(json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes" })), PoolAction::Wipe);
    }

    #[test]
    fn waits_for_grants_without_agent_and_keeps_other_grants() {
        let allocation = |name: &str, node: &str, finalizers: &[&str]| -> DynamicObject {
            serde_json::from_value(json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "GPUQueueAllocation",
                "metadata": { "name": name, "namespace": "n", "finalizers": finalizers }, "spec": { "nodeName": node },
            }))
            .expect("an object")
        };
        let node: DynamicObject = serde_json::from_value(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n2" },
        }))
        .expect("an object");
        let all = vec![
            allocation("ends", "n1", &["reprise.dev/queues", "others.example/hold"]),
            allocation("stays", "n2", &["reprise.dev/queues"]),
            allocation("waits", "n1", &[]),
            allocation("other", "n1", &["others.example/hold"]),
        ];
        let (ending, staying) = split_by_agent(all, &[node]);
        let names = |of: &[DynamicObject]| of.iter().map(full_name).collect::<Vec<_>>();
        assert_eq!(
            (names(&ending), names(&staying)),
            (vec!["n/ends".to_owned()], vec!["n/stays".to_owned()])
        );
    }

    #[test]
    fn remaining_object_is_described_with_its_reason() {
        let blocked = json!({ "conditions": [
            { "type": "Ready", "status": "True", "message": "fine" },
            { "type": "DeletionBlocked", "status": "True", "message": "2 nodes have not wiped" },
        ] });
        assert_eq!(
            describe(&pool(&json!({}), &blocked, &["reprise.dev/wipe"])),
            "SSDPool p: 2 nodes have not wiped"
        );
        let description = describe(&pool(&json!({}), &json!({}), &["reprise.dev/wipe"]));
        assert!(
            description.contains("reprise.dev/wipe") && description.contains("operator"),
            "{description}"
        );
        assert!(describe(&pool(&json!({}), &json!({}), &[])).contains("being deleted"));
    }
}
