//! The uninstall hook of the chart: deletes the objects that a release has applied, while the operator still
//! runs, and waits until they and their children are gone.
//!
//! Order ([`Step`]):
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
//! * other pools with the operator's finalizer, for the same reason.
//!
//! The command may be run again after a timeout.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool};
use serde_json::{Value, json};

use crate::framework::child::ChildKind;
use crate::framework::finalizers::has;
use crate::framework::labels::CLUSTER_UID;
use crate::reconcile::names::{DELETE_IN_USE, IN_USE_FINALIZER, QUEUES_FINALIZER, RELEASE};
use crate::reconcile::pool::guard::CONFIRMED;

/// Interval of polls for remaining objects.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// Fraction of the time, as a divisor, that control planes have to remove tenants.
const TENANTS_PART: u32 = 3;
/// HTTP status code: the object, or its kind, does not exist.
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
    let tenants = run.delete(Step::Tenants, within / TENANTS_PART).await?;
    if !tenants.is_empty() {
        tracing::info!(
            "control planes did not remove these tenants in time; deleting them with their clusters: {}",
            tenants.join("; ")
        );
    }
    for step in [Step::WipedPools, Step::Clusters, Step::OtherPools] {
        let left = run.delete(step, within).await?;
        if !left.is_empty() {
            let named = left.iter().take(NAMES_MAX).cloned().collect::<Vec<_>>().join("; ");
            let more = left.len().saturating_sub(NAMES_MAX);
            let more = if more > 0 { format!("; and {more} more") } else { String::new() };
            bail!("still there after {within:?}: {named}{more}");
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

/// Objects that remain after a cluster and that the operator or Kubernetes deletes or releases.
struct Leftover {
    resource: ApiResource,
    /// Label selector.
    labels: &'static str,
    /// Why they remain, if their conditions do not tell.
    why: &'static str,
    is_left: fn(&Known, &DynamicObject) -> bool,
}

/// What is kept.
struct Known {
    release: Release,
    /// Name and uid of the clusters in the release's namespace that are not being deleted.
    clusters: BTreeMap<String, String>,
    /// Names of all `CacheNode`s.
    nodes: BTreeSet<String>,
    /// Uids of the pools that a node has.
    claimed: BTreeSet<String>,
}

fn leftovers() -> [Leftover; 8] {
    let row = |resource, labels, why, is_left| Leftover { resource, labels, why, is_left };
    let by_kubernetes = "Kubernetes deletes it with its cluster";
    [
        row(ApiResource::erase::<KVCacheCluster>(&()), "", "", |known, cluster| {
            cluster.metadata.deletion_timestamp.is_some() && !is_applied(cluster, &known.release)
        }),
        // Tenants of control planes that were unreachable.
        row(ApiResource::erase::<CacheTenant>(&()), "", "", |known, tenant| {
            is_applied(tenant, &known.release)
        }),
        row(ChildKind::StatefulSet.resource(), CLUSTER_UID, by_kubernetes, Known::is_orphan),
        row(ChildKind::DaemonSet.resource(), CLUSTER_UID, by_kubernetes, Known::is_orphan),
        row(
            ChildKind::ClusterRoleBinding.resource(),
            CLUSTER_UID,
            "the operator deletes it. Check that the operator runs",
            |known, binding| {
                let mut subjects = binding.data["subjects"].as_array().into_iter().flatten();
                subjects.any(|one| one["namespace"] == known.release.namespace.as_str())
                    && known.is_orphan(binding)
            },
        ),
        row(
            ApiResource::erase::<CacheNode>(&()),
            "",
            "the operator deletes it once the agent has released the granted GPU queues of the node; an agent that \
             does not report for a minute counts as gone. Check that the operator runs",
            |known, node| {
                let of = &node.data["spec"]["clusterRef"];
                of["namespace"] == known.release.namespace.as_str()
                    && !of["name"].as_str().is_some_and(|name| known.clusters.contains_key(name))
            },
        ),
        row(
            ApiResource::erase::<GPUQueueAllocation>(&()),
            "",
            "the operator ends its grant, because its node no longer belongs to a cluster. Check that the operator \
             runs",
            |known, allocation| {
                let node = allocation.data["spec"]["nodeName"].as_str().unwrap_or_default();
                has(allocation, QUEUES_FINALIZER) && !known.nodes.contains(node)
            },
        ),
        row(
            Step::OtherPools.resource(),
            "",
            "the operator removes its finalizer, because no node has the pool. Check that the operator runs",
            |known, pool| {
                let is_claimed = pool.uid().is_some_and(|uid| known.claimed.contains(&uid));
                has(pool, IN_USE_FINALIZER) && Step::OtherPools.includes(pool) && !is_claimed
            },
        ),
    ]
}

impl Known {
    /// Whether the cluster of a child is gone or is being deleted.
    fn is_orphan(&self, child: &DynamicObject) -> bool {
        let of = child.labels().get(CLUSTER_UID);
        of.is_some_and(|of| !self.clusters.values().any(|uid| uid == of))
    }
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
                let (params, patch) = (PatchParams::default(), Patch::Merge(&patch));
                let call = async || api.patch(&name, &params, &patch).await;
                self.request(&format!("annotate {kind} {name}"), call).await?;
            }
            if object.metadata.deletion_timestamp.is_none() {
                let call = async || api.delete(&name, &step.params()).await;
                self.request(&format!("delete {kind} {name}"), call).await?;
                tracing::info!(kind, name, "deleted");
            }
        }
        loop {
            let left = self.remaining(step).await?;
            if left.is_empty() || self.begun.elapsed() >= within {
                return Ok(left);
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

    /// Describes what remains of a step. Clusters also leave what [`leftovers`] lists.
    async fn remaining(&self, step: Step) -> anyhow::Result<Vec<String>> {
        let (kind, applied) = (step.resource().kind, self.applied(step).await?);
        let mut left: Vec<String> = applied.iter().map(|object| describe(&kind, object, "")).collect();
        if step == Step::Clusters {
            let known = self.known().await?;
            for Leftover { resource, labels, why, is_left } in leftovers() {
                let all = self.list(&resource, labels).await?;
                let all = all.iter().filter(|object| is_left(&known, object));
                left.extend(all.map(|object| describe(&resource.kind, object, why)));
            }
        }
        Ok(left)
    }

    async fn known(&self) -> anyhow::Result<Known> {
        let mut clusters = self.list(&Step::Clusters.resource(), "").await?;
        clusters.retain(|cluster| cluster.metadata.deletion_timestamp.is_none());
        let nodes = self.list(&ApiResource::erase::<CacheNode>(&()), "").await?;
        let claims = nodes.iter().filter_map(|node| node.data["spec"]["claims"].as_array()).flatten();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        Ok(Known {
            release: self.release.clone(),
            clusters: clusters
                .iter()
                .map(|cluster| (cluster.name_any(), cluster.uid().unwrap_or_default()))
                .collect(),
            claimed: claims.map(|claim| text(&claim["uid"])).collect(),
            nodes: nodes.iter().map(ResourceExt::name_any).collect(),
        })
    }

    /// Logs objects that stay and need attention.
    async fn warn_about_remaining(&self) -> anyhow::Result<()> {
        let allocations = self.list(&ApiResource::erase::<GPUQueueAllocation>(&()), "").await?;
        warn(
            "GPUQueueAllocation",
            allocations.iter().filter(|allocation| has(*allocation, QUEUES_FINALIZER)),
            &format!(
                "the allocation stays, with its grant and the finalizer {QUEUES_FINALIZER}, because its node \
                 belongs to a cluster that is not part of the release. Its deletion will wait until an operator \
                 is installed again or the finalizer is removed by hand"
            ),
        );
        let pools = self.list(&Step::OtherPools.resource(), "").await?;
        let (applied, others): (Vec<_>, Vec<_>) =
            pools.iter().partition(|pool| is_applied(pool, self.release));
        warn(
            "SSDPool",
            applied.into_iter(),
            "the pool stays, because its deletionPolicy is Wipe and the wipe is not confirmed; delete it by hand",
        );
        warn(
            "SSDPool",
            others.into_iter().filter(|pool| has(*pool, IN_USE_FINALIZER)),
            &format!(
                "the pool stays, with the finalizer {IN_USE_FINALIZER}, because nodes have it or it will be wiped. \
                 Its deletion will wait until an operator is installed again or the finalizer is removed by hand"
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

    /// Lists objects with these labels.
    async fn list(&self, resource: &ApiResource, labels: &str) -> anyhow::Result<Vec<DynamicObject>> {
        let (api, params) = (self.api(resource), ListParams::default().labels(labels));
        let what = format!("list {}", resource.plural);
        let listed = self.request(&what, async || api.list(&params).await).await?;
        Ok(listed.map(|list| list.items).unwrap_or_default())
    }

    /// Sends a request until the API server answers or the time is over. Returns `None` if the object or its
    /// kind does not exist, or if another writer modified the object.
    async fn request<T>(
        &self,
        what: &str,
        call: impl AsyncFn() -> Result<T, kube::Error>,
    ) -> anyhow::Result<Option<T>> {
        loop {
            match call().await {
                Ok(answer) => return Ok(Some(answer)),
                Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => {
                    return Ok(None);
                }
                Err(kube::Error::Api(status))
                    if (400..500).contains(&status.code) && status.code != TOO_MANY_REQUESTS =>
                {
                    return Err(kube::Error::Api(status)).with_context(|| format!("cannot {what}"));
                }
                Err(error) if self.begun.elapsed() >= self.within => {
                    return Err(error)
                        .with_context(|| format!("cannot {what}: the API server does not answer"));
                }
                Err(error) => tracing::info!(%error, what, "API server request failed; retrying"),
            }
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    }
}

/// Whether the release has applied an object.
fn is_applied(object: &DynamicObject, release: &Release) -> bool {
    object.labels().get(RELEASE) == Some(&release.name)
}

fn full_name(object: &DynamicObject) -> String {
    let name = object.name_any();
    object.namespace().map_or(name.clone(), |namespace| format!("{namespace}/{name}"))
}

/// Logs objects that stay.
fn warn<'a>(kind: &str, objects: impl Iterator<Item = &'a DynamicObject>, why: &str) {
    let names: Vec<String> = objects.map(full_name).collect();
    for name in names.iter().take(NAMES_MAX) {
        tracing::warn!(kind, name, "{why}");
    }
    let more = names.len().saturating_sub(NAMES_MAX);
    if more > 0 {
        tracing::warn!(kind, more, "more objects stay for the same reason");
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
        let known = Known {
            release: Release { name: "r".to_owned(), namespace: "n".to_owned() },
            clusters: BTreeMap::from([("kept".to_owned(), "1".to_owned())]),
            nodes: BTreeSet::from(["n2".to_owned()]),
            claimed: BTreeSet::from(["used".to_owned()]),
        };
        let child = |uid: &str| json!({ "name": "c", "labels": { CLUSTER_UID: uid } });
        let subject = |namespace: &str| json!({ "subjects": [{ "namespace": namespace }] });
        let of = |namespace: &str, name: &str| json!({ "spec": { "clusterRef": { "namespace": namespace, "name": name } } });
        let granted = json!({ "name": "a", "finalizers": [QUEUES_FINALIZER, "others.example/hold"] });
        let on = |node: &str| json!({ "spec": { "nodeName": node } });
        let used = |uid: &str| json!({ "name": "p", "uid": uid, "finalizers": [IN_USE_FINALIZER] });
        let labelled = |name: &str| json!({ "name": "t", "labels": { RELEASE: name } });
        for (kind, metadata, more, expected) in [
            ("CacheTenant", labelled("r"), json!({}), true),
            ("CacheTenant", labelled("other"), json!({}), false),
            ("DaemonSet", child("1"), json!({}), false),
            ("DaemonSet", child("2"), json!({}), true),
            ("DaemonSet", json!({ "name": "c" }), json!({}), false),
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
            ("SSDPool", used("unused"), json!({ "spec": { "deletionPolicy": "Wipe" } }), false),
        ] {
            let row =
                leftovers().into_iter().find(|row| row.resource.kind == kind).expect("a row of the kind");
            let found = object(kind, metadata, more);
            assert_eq!((row.is_left)(&known, &found), expected, "{found:?}");
        }
    }

    #[test]
    fn remaining_object_is_described_with_its_reason() {
        let blocked = json!({ "status": { "conditions": [
            { "type": "Ready", "status": "True", "message": "fine" },
            { "type": "DeletionBlocked", "status": "True", "message": "2 nodes have not wiped" },
        ] } });
        for (finalizers, more, why, words) in [
            (&["reprise.dev/wipe"][..], blocked, "it waits", "SSDPool p: 2 nodes have not wiped"),
            (
                &["reprise.dev/wipe"],
                json!({}),
                "",
                "finalizers: reprise.dev/wipe. Check that the operator runs",
            ),
            (&["reprise.dev/wipe"], json!({}), "it waits", "SSDPool p: it waits"),
            (&[], json!({}), "", "being deleted"),
        ] {
            let pool = object("SSDPool", json!({ "name": "p", "finalizers": finalizers }), more);
            let description = describe("SSDPool", &pool, why);
            assert!(description.contains(words), "{description}");
        }
    }
}
