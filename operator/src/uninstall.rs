//! The uninstall hook of the chart: deletes the objects that a release has applied, while the operator still
//! runs, and waits until they and their children are gone.
//!
//! Order ([`Step`]):
//! 1. Tenants. Control planes have a third of the time to remove their budgets. The others are deleted with their
//!    clusters.
//! 2. Pools with a confirmed wipe. Agents wipe them.
//! 3. Clusters with the objects that they leave ([`leftovers`]).
//! 4. Other pools. Their data is kept.
//!
//! Resource definitions and objects that the release did not apply are kept. The command logs objects that
//! are kept and need attention:
//! * pools with an unconfirmed wipe;
//! * allocations with a grant on a node of a cluster that is kept, because no operator is left to remove
//!   their finalizer;
//! * other pools with the operator's finalizer, for the same reason.
//!
//! The command may be run again after a timeout or an error. The Job of the hook does.

use std::time::Duration;

use anyhow::{Context as _, bail};
use clap::Args;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool};
use serde_json::{Value, json};
use tokio::time::Instant;

use crate::framework::child::ChildKind;
use crate::framework::error::{CONFLICT, NOT_FOUND};
use crate::framework::finalizers::has;
use crate::framework::labels::CLUSTER_UID;
use crate::reconcile::names::{DELETE_IN_USE, IN_USE_FINALIZER, QUEUES_FINALIZER, RELEASE};
use crate::reconcile::pool::guard::CONFIRMED;

/// Interval of polls for remaining objects.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Fraction of the time, as a divisor, that control planes have to remove tenants.
const TENANTS_PART: u32 = 3;
/// Most objects that an error or a kind of warning names.
const NAMES_MAX: usize = 20;

/// A release of the chart, and the time for its deletion.
#[derive(Clone, Debug, Args)]
pub struct Release {
    /// Name of the release
    #[arg(long = "release", value_name = "RELEASE")]
    name: String,
    /// Namespace of the release's clusters
    #[arg(long, env = "POD_NAMESPACE", default_value = "default")]
    namespace: String,
    /// Timeout in seconds; on expiry, print the remaining objects and fail
    #[arg(long, default_value_t = 300)]
    timeout_seconds: u64,
}

/// Objects of the release that are deleted together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Tenants,
    /// Pools that agents wipe first.
    WipedPools,
    Clusters,
    /// Pools whose data is kept.
    OtherPools,
}

/// State of one run.
struct Run<'a> {
    client: &'a Client,
    release: &'a Release,
    begun: Instant,
}

/// Deletes the objects that a release has applied, and waits until they are gone.
///
/// # Errors
/// An object remains after the timeout, with the reason in the message, or the API server rejected a
/// deletion.
pub async fn delete(client: &Client, release: &Release) -> anyhow::Result<()> {
    let within = Duration::from_secs(release.timeout_seconds);
    let run = Run { client, release, begun: Instant::now() };
    let tenants = run.delete(Step::Tenants, within / TENANTS_PART).await?;
    if !tenants.is_empty() {
        tracing::info!(
            "control planes did not remove these tenants in time; deleting them with their clusters: {}",
            join(&tenants)
        );
    }
    for step in [Step::WipedPools, Step::Clusters, Step::Tenants, Step::OtherPools] {
        let left = run.delete(step, within).await?;
        if !left.is_empty() {
            bail!("still there after {within:?}: {}", join(&left));
        }
    }
    run.warn_about_remaining().await?;
    tracing::info!(release = release.name, "all objects that the release applied are gone");
    Ok(())
}

impl Step {
    fn resource(self) -> ApiResource {
        match self {
            Step::Tenants => ApiResource::erase::<CacheTenant>(&()),
            Step::Clusters => ApiResource::erase::<KVCacheCluster>(&()),
            Step::WipedPools | Step::OtherPools => ApiResource::erase::<SSDPool>(&()),
        }
    }

    /// Returns whether the step deletes an object of the release. No step deletes a pool with an unconfirmed
    /// wipe.
    fn includes(self, object: &DynamicObject) -> bool {
        let spec = &object.data["spec"];
        let wipes = spec["deletionPolicy"] == "Wipe";
        match self {
            Step::Tenants | Step::Clusters => true,
            Step::WipedPools => wipes && spec["wipeConfirmation"].is_string(),
            Step::OtherPools => !wipes,
        }
    }

    /// In a foreground deletion, the cluster remains until all objects that it owns are gone.
    fn params(self) -> DeleteParams {
        if self == Step::Clusters { DeleteParams::foreground() } else { DeleteParams::background() }
    }
}

/// Objects that clusters leave, until the operator or Kubernetes deletes or releases them.
struct Leftover {
    resource: ApiResource,
    labels: &'static str,
    /// Why they remain, if their conditions do not state it.
    why: &'static str,
    is_left: fn(&Kept, &DynamicObject) -> bool,
}

/// What the uninstall does not delete.
struct Kept {
    /// Name of the release.
    release: String,
    namespace: String,
    /// Clusters in it that are not being deleted.
    clusters: Vec<DynamicObject>,
    nodes: Vec<DynamicObject>,
}

impl Kept {
    /// Whether the cluster of a child is gone or is being deleted. Bindings have no namespace, but their subjects
    /// have.
    fn lacks_cluster_of(&self, child: &DynamicObject) -> bool {
        let subjects = child.data["subjects"].as_array();
        let is_elsewhere =
            subjects.is_some_and(|all| all.iter().all(|one| one["namespace"] != self.namespace.as_str()));
        let of = child.labels().get(CLUSTER_UID);
        !is_elsewhere && !self.clusters.iter().any(|cluster| cluster.metadata.uid.as_ref() == of)
    }
}

fn leftovers() -> [Leftover; 6] {
    let child = |kind: ChildKind, why| Leftover {
        resource: kind.resource(),
        labels: CLUSTER_UID,
        why,
        is_left: Kept::lacks_cluster_of,
    };
    let by_kubernetes = "Kubernetes deletes it with its cluster";
    [
        child(ChildKind::StatefulSet, by_kubernetes),
        child(ChildKind::DaemonSet, by_kubernetes),
        child(ChildKind::ClusterRoleBinding, "the operator deletes it. Check that the operator runs"),
        Leftover {
            resource: ApiResource::erase::<CacheNode>(&()),
            labels: "",
            why: "the operator deletes it once the agent has released the granted GPU queues of the node; an agent \
                  that does not report for a minute counts as gone. Check that the operator runs",
            is_left: |kept, node| {
                let of = &node.data["spec"]["clusterRef"];
                let is_it = |cluster: &DynamicObject| of["name"] == cluster.name_any().as_str();
                of["namespace"] == kept.namespace.as_str() && !kept.clusters.iter().any(is_it)
            },
        },
        Leftover {
            resource: ApiResource::erase::<GPUQueueAllocation>(&()),
            labels: "",
            why: "the operator ends its grant, because its node no longer belongs to a cluster. Check that the \
                  operator runs",
            is_left: |kept, allocation| {
                let is_it =
                    |node: &DynamicObject| allocation.data["spec"]["nodeName"] == node.name_any().as_str();
                has(allocation, QUEUES_FINALIZER) && !kept.nodes.iter().any(is_it)
            },
        },
        Leftover {
            resource: Step::OtherPools.resource(),
            labels: "",
            why: "the operator removes its finalizer a minute after the last session, because no node has the pool. Check that \
                  the operator runs",
            is_left: |kept, pool| {
                let mut claims =
                    kept.nodes.iter().filter_map(|node| node.data["spec"]["claims"].as_array()).flatten();
                let is_claimed = claims.any(|claim| claim["uid"].as_str() == pool.metadata.uid.as_deref());
                // A later step deletes the release's own pools.
                let is_applied = pool.labels().get(RELEASE) == Some(&kept.release);
                has(pool, IN_USE_FINALIZER) && Step::OtherPools.includes(pool) && !is_claimed && !is_applied
            },
        },
    ]
}

impl Run<'_> {
    /// Deletes the objects of a step. Returns what remains when `within` has passed since the start of the run.
    async fn delete(&self, step: Step, within: Duration) -> anyhow::Result<Vec<String>> {
        let resource = step.resource();
        let api = self.api(&resource);
        for object in self.applied(step).await? {
            let (kind, name) = (&resource.kind, object.name_any());
            if matches!(step, Step::WipedPools | Step::OtherPools) {
                // Uninstalling the release implies that decision, and the operator, which would remove the
                // finalizer later, is deleted next.
                let patch = json!({ "metadata": { "annotations": { DELETE_IN_USE: CONFIRMED } } });
                let patched = api.patch(&name, &PatchParams::default(), &Patch::Merge(&patch)).await;
                unless_gone(patched, &format!("annotate {kind} {name}"))?;
            }
            if object.metadata.deletion_timestamp.is_none() {
                let deleted = api.delete(&name, &step.params()).await;
                unless_gone(deleted, &format!("delete {kind} {name}"))?;
                tracing::info!(kind, name, "deleted");
            }
        }
        loop {
            let is_late = self.begun.elapsed() >= within;
            match self.remaining(step).await {
                Ok(left) if left.is_empty() || is_late => return Ok(left),
                Ok(_) => {}
                Err(error) if is_late || is_rejection(&error) => return Err(error),
                Err(error) => tracing::warn!(%error, "cannot list what remains; retrying"),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }

    /// Returns the objects of the release that a step deletes.
    async fn applied(&self, step: Step) -> anyhow::Result<Vec<DynamicObject>> {
        let mut objects = self.list(&step.resource(), &format!("{RELEASE}={}", self.release.name)).await?;
        objects.retain(|object| step.includes(object));
        Ok(objects)
    }

    /// Describes what remains of a step, and what clusters leave.
    async fn remaining(&self, step: Step) -> anyhow::Result<Vec<String>> {
        let (kind, applied) = (step.resource().kind, self.applied(step).await?);
        let mut left: Vec<String> = applied.iter().map(|object| describe(&kind, object, "")).collect();
        if step == Step::Clusters {
            let mut clusters = self.list(&step.resource(), "").await?;
            clusters.retain(|cluster| cluster.metadata.deletion_timestamp.is_none());
            let nodes = self.list(&ApiResource::erase::<CacheNode>(&()), "").await?;
            let Release { name, namespace, .. } = self.release.clone();
            let kept = Kept { release: name, namespace, clusters, nodes };
            for Leftover { resource, labels, why, is_left } in leftovers() {
                let all = self.list(&resource, labels).await?;
                let all = all.iter().filter(|object| is_left(&kept, object));
                left.extend(all.map(|object| describe(&resource.kind, object, why)));
            }
        }
        Ok(left)
    }

    /// Logs objects that stay and need attention.
    async fn warn_about_remaining(&self) -> anyhow::Result<()> {
        let allocations = self.list(&ApiResource::erase::<GPUQueueAllocation>(&()), "").await?;
        let granted = allocations.iter().filter(|allocation| has(*allocation, QUEUES_FINALIZER));
        let pools = self.list(&Step::OtherPools.resource(), "").await?;
        let is_applied = |pool: &&DynamicObject| pool.labels().get(RELEASE) == Some(&self.release.name);
        let (applied, others): (Vec<_>, Vec<_>) = pools.iter().partition(is_applied);
        let in_use = others.into_iter().filter(|pool| has(*pool, IN_USE_FINALIZER));
        let later = "Their deletion will wait until an operator is installed again or the finalizer is removed by hand";
        warn(
            granted,
            &format!(
                "GPUQueueAllocations stay, with their grants and the finalizer {QUEUES_FINALIZER}, because their nodes \
                 belong to clusters that are not part of the release. {later}"
            ),
        );
        warn(
            applied,
            "SSDPools stay, because their deletionPolicy is Wipe and the wipe is not confirmed; delete them by hand",
        );
        warn(
            in_use,
            &format!(
                "SSDPools stay, with the finalizer {IN_USE_FINALIZER}, because nodes have them or they will be wiped. {later}"
            ),
        );
        Ok(())
    }

    /// API client for a kind. The namespace of the release has all clusters of the release.
    fn api(&self, resource: &ApiResource) -> Api<DynamicObject> {
        match resource.kind.as_str() {
            "KVCacheCluster" | "StatefulSet" | "DaemonSet" => {
                Api::namespaced_with(self.client.clone(), &self.release.namespace, resource)
            }
            _ => Api::all_with(self.client.clone(), resource),
        }
    }

    /// Lists objects with these labels; none if the kind does not exist.
    async fn list(&self, resource: &ApiResource, labels: &str) -> anyhow::Result<Vec<DynamicObject>> {
        let listed = self.api(resource).list(&ListParams::default().labels(labels)).await;
        let listed = unless_gone(listed, &format!("list {}", resource.plural))?;
        Ok(listed.map(|list| list.items).unwrap_or_default())
    }
}

/// Whether the API server has answered and rejected a request.
fn is_rejection(error: &anyhow::Error) -> bool {
    let answer = error.downcast_ref::<kube::Error>();
    matches!(answer, Some(kube::Error::Api(status)) if (400..500).contains(&status.code))
}

/// Returns the answer to a request; `None` if the object or its kind does not exist, or if another writer modified the
/// object.
fn unless_gone<T>(answer: Result<T, kube::Error>, request: &str) -> anyhow::Result<Option<T>> {
    match answer {
        Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => Ok(None),
        answer => answer.map(Some).with_context(|| format!("cannot {request}")),
    }
}

/// Logs that these objects stay, and why. Logs nothing without objects.
fn warn<'a>(objects: impl IntoIterator<Item = &'a DynamicObject>, why: &str) {
    let full_name = |object: &DynamicObject| match object.namespace() {
        Some(namespace) => format!("{namespace}/{}", object.name_any()),
        None => object.name_any(),
    };
    let objects: Vec<String> = objects.into_iter().map(full_name).collect();
    if !objects.is_empty() {
        tracing::warn!(objects = join(&objects), "{why}");
    }
}

/// Joins texts, at most [`NAMES_MAX`] of them.
fn join(texts: &[String]) -> String {
    let joined = texts.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join("; ");
    match texts.len().saturating_sub(NAMES_MAX) {
        0 => joined,
        more => format!("{joined}; and {more} more"),
    }
}

/// Describes an object that remains, with the reason in its conditions, or else `why`.
fn describe(kind: &str, object: &DynamicObject, why: &str) -> String {
    let mut conditions = object.data["status"]["conditions"].as_array().into_iter().flatten();
    let blocks = |condition: &&Value| condition["type"] == "DeletionBlocked" && condition["status"] == "True";
    let blocked = conditions.find(blocks).and_then(|condition| condition["message"].as_str());
    let finalizers = object.finalizers().join(", ");
    let why = match blocked.unwrap_or(why) {
        "" if finalizers.is_empty() => "it is being deleted".to_owned(),
        "" => format!("waits for its finalizers: {finalizers}. Check that the operator runs"),
        why => why.to_owned(),
    };
    format!("{kind} {}: {why}", object.name_any())
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "objects are made where they are passed")]
mod tests {
    use super::*;

    fn object(kind: &str, metadata: Value, more: Value) -> DynamicObject {
        let mut whole = json!({ "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": metadata });
        whole.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        serde_json::from_value(whole).expect("an object")
    }

    #[test]
    fn wipes_only_pools_with_confirmed_wipe() {
        for (spec, steps) in [
            (json!({}), &[Step::OtherPools][..]),
            (json!({ "deletionPolicy": "Retain" }), &[Step::OtherPools]),
            (json!({ "deletionPolicy": "Wipe" }), &[]),
            (json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes" }), &[Step::WipedPools]),
        ] {
            let pool = object("SSDPool", json!({ "name": "p" }), json!({ "spec": spec }));
            let all = [Step::WipedPools, Step::OtherPools];
            let found: Vec<Step> = all.into_iter().filter(|step| step.includes(&pool)).collect();
            assert_eq!(found, steps, "{spec}");
        }
    }

    #[test]
    fn leftovers_of_deleted_clusters_are_awaited_and_others_are_not() {
        let claims = json!({ "spec": { "claims": [{ "uid": "used" }] } });
        let kept = Kept {
            release: "r".to_owned(),
            namespace: "n".to_owned(),
            clusters: vec![object("KVCacheCluster", json!({ "name": "kept", "uid": "1" }), json!({}))],
            nodes: vec![object("CacheNode", json!({ "name": "n2" }), claims)],
        };
        let child = |uid: &str| json!({ "name": "c", "labels": { CLUSTER_UID: uid } });
        let subject = |namespace: &str| json!({ "subjects": [{ "namespace": namespace }] });
        let of = |namespace: &str, name: &str| json!({ "spec": { "clusterRef": { "namespace": namespace, "name": name } } });
        let granted = json!({ "name": "a", "finalizers": [QUEUES_FINALIZER, "others.example/hold"] });
        let on = |node: &str| json!({ "spec": { "nodeName": node } });
        let used = |uid: &str| json!({ "name": "p", "uid": uid, "finalizers": [IN_USE_FINALIZER] });
        let mut applied = used("unused");
        applied["labels"] = json!({ RELEASE: "r" });
        for (kind, metadata, more, expected) in [
            ("DaemonSet", child("1"), json!({}), false),
            ("DaemonSet", child("2"), json!({}), true),
            ("ClusterRoleBinding", child("2"), subject("n"), true),
            ("ClusterRoleBinding", child("2"), subject("other"), false),
            ("ClusterRoleBinding", child("1"), subject("n"), false),
            ("CacheNode", json!({ "name": "n1" }), of("n", "gone"), true),
            ("CacheNode", json!({ "name": "n1" }), of("n", "kept"), false),
            ("CacheNode", json!({ "name": "n1" }), of("other", "gone"), false),
            ("GPUQueueAllocation", granted.clone(), on("n1"), true),
            ("GPUQueueAllocation", granted, on("n2"), false),
            ("GPUQueueAllocation", json!({ "name": "a" }), on("n1"), false),
            ("SSDPool", used("unused"), json!({ "spec": {} }), true),
            ("SSDPool", used("used"), json!({ "spec": {} }), false),
            ("SSDPool", applied, json!({ "spec": {} }), false),
            ("SSDPool", used("unused"), json!({ "spec": { "deletionPolicy": "Wipe" } }), false),
        ] {
            let row =
                leftovers().into_iter().find(|row| row.resource.kind == kind).expect("a row of the kind");
            let found = object(kind, metadata, more);
            assert_eq!((row.is_left)(&kept, &found), expected, "{found:?}");
        }
    }
}
