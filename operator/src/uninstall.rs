//! What the chart runs before it goes: deletes the objects that its release has applied, while the operator still runs, and waits until what
//! was made of them is gone.
//!
//! In this order: tenants, whose budgets the control planes forget, if they can be told in a third of the time; pools that are wiped, which
//! agents do; clusters, with everything that Kubernetes removes of them and that the operator does (`CacheNode`s, bindings, grants of queues on
//! nodes that no cluster has any more); then the other pools, whose data stays. A pool that is to be wiped and that nobody has confirmed stays, and is
//! named. Definitions stay, and objects that the release has not applied. An allocation that has a grant on a node of such a cluster is named: the
//! operator's finalizer is on it, and nobody takes that away once the operator is gone. So are clusters and pools of somebody's own that engines use.
//!
//! It may be run again after it has given up.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use anyhow::{Context as _, bail};
use k8s_openapi::api::rbac::v1::ClusterRoleBinding;
use kube::api::{Api, ApiResource, DeleteParams, DynamicObject, ListParams, Patch, PatchParams};
use kube::{Client, ResourceExt};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool};
use serde_json::{Value, json};

use crate::child::ChildKind;
use crate::in_use::{self, YES};
use crate::names::{
    CLUSTER_UID, DELETE_IN_USE, IN_USE_FINALIZER, MANAGED_BY, OPERATOR, QUEUES_FINALIZER, RELEASE,
};

/// Between two looks at what remains.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// Control planes have this part of the time to be told that tenants go.
const TENANTS_PART: u32 = 3;
/// HTTP's code for what is not there.
const NOT_FOUND: u16 = 404;
/// HTTP's code for a write to what somebody else has written meanwhile.
const CONFLICT: u16 = 409;
/// HTTP's code for what is to be asked again later.
const TOO_MANY_REQUESTS: u16 = 429;
/// So many things are named when it gives up, at the most.
const NAMES_MAX: usize = 20;

/// A release of the chart.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Release {
    /// Its name.
    pub name: String,
    /// Its namespace, in which its clusters are.
    pub namespace: String,
}

/// What is done with a pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It goes first, wiped by the agents.
    Wiped,
    /// It goes, and its data stays.
    Retained,
    /// It stays: nobody has confirmed that its data is to be destroyed.
    Kept,
}

/// One run.
struct Run<'a> {
    client: &'a Client,
    release: &'a Release,
    within: Duration,
    begun: Instant,
}

/// Deletes what a release has applied, and waits until it is gone.
///
/// # Errors
/// Something remains after that time, or may not be deleted; what and why.
pub async fn delete(client: &Client, release: &Release, within: Duration) -> anyhow::Result<()> {
    let run = Run { client, release, within, begun: Instant::now() };
    run.tenants().await?;
    run.pools(Fate::Wiped).await?;
    run.clusters().await?;
    run.until_gone(async || run.grants_left().await).await?;
    run.until_gone(async || run.tenants_left().await).await?;
    run.pools(Fate::Retained).await?;
    run.name_what_stays().await
}

impl Run<'_> {
    /// Those whose control planes are away go with their clusters.
    async fn tenants(&self) -> anyhow::Result<()> {
        let api = self.all_tenants();
        self.delete_all(&api, &self.applied(&api).await?, &DeleteParams::background()).await?;
        let left = self.wait(self.within / TENANTS_PART, async || self.tenants_left().await).await?;
        if !left.is_empty() {
            tracing::info!(
                "tenants that control planes were not told of go with their clusters: {}",
                left.join("; ")
            );
        }
        Ok(())
    }

    async fn tenants_left(&self) -> anyhow::Result<Vec<String>> {
        Ok(self.applied(&self.all_tenants()).await?.iter().map(remains).collect())
    }

    async fn pools(&self, fate: Fate) -> anyhow::Result<()> {
        let api = self.all_pools();
        let of_fate = async || {
            let mut pools = self.applied(&api).await?;
            pools.retain(|pool| self::fate(pool) == fate);
            anyhow::Ok(pools)
        };
        let pools = of_fate().await?;
        self.let_go(&api, &pools).await?;
        self.delete_all(&api, &pools, &DeleteParams::background()).await?;
        self.until_gone(async || Ok(of_fate().await?.iter().map(remains).collect())).await
    }

    async fn clusters(&self) -> anyhow::Result<()> {
        let namespace = &self.release.namespace;
        let resource = ApiResource::erase::<KVCacheCluster>(&());
        let api: Api<DynamicObject> = Api::namespaced_with(self.client.clone(), namespace, &resource);
        // It stays until everything that has it as its owner is gone.
        let clusters = self.applied(&api).await?;
        self.let_go(&api, &clusters).await?;
        self.delete_all(&api, &clusters, &DeleteParams::foreground()).await?;
        self.until_gone(async || {
            let clusters = self.list(&api, &ListParams::default()).await?;
            let (going, staying): (Vec<_>, Vec<_>) =
                clusters.into_iter().partition(|cluster| cluster.metadata.deletion_timestamp.is_some());
            let mut left = Vec::new();
            for cluster in &going {
                left.push(self.of_cluster(cluster).await?);
            }
            let staying: BTreeSet<String> = staying.iter().map(ResourceExt::name_any).collect();
            left.extend(self.nodes(&staying).await?);
            left.extend(self.bindings(&going).await?);
            Ok(left)
        })
        .await
    }

    /// A cluster that is being deleted, and what it waits for.
    async fn of_cluster(&self, cluster: &DynamicObject) -> anyhow::Result<String> {
        let of_it =
            ListParams::default().labels(&format!("{CLUSTER_UID}={}", cluster.uid().unwrap_or_default()));
        let mut workloads = Vec::new();
        for kind in [ChildKind::StatefulSet, ChildKind::DaemonSet] {
            let api: Api<DynamicObject> =
                Api::namespaced_with(self.client.clone(), &self.release.namespace, &kind.resource());
            let found = self.list(&api, &of_it).await?;
            workloads.extend(found.iter().map(|one| format!("{} {}", kind.as_str(), one.name_any())));
        }
        let waits =
            if workloads.is_empty() { held(cluster) } else { format!("waits for {}", workloads.join(", ")) };
        Ok(format!("KVCacheCluster {}: {waits}", cluster.name_any()))
    }

    /// Nodes of clusters of the namespace that are gone or go.
    async fn nodes(&self, staying: &BTreeSet<String>) -> anyhow::Result<Vec<String>> {
        let api: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let nodes = self.list(&api, &ListParams::default()).await?;
        let is_left = |node: &&DynamicObject| {
            let cluster = &node.data["spec"]["clusterRef"];
            let is_here = cluster["namespace"] == self.release.namespace.as_str();
            is_here && !cluster["name"].as_str().is_some_and(|name| staying.contains(name))
        };
        let left = nodes.iter().filter(is_left).map(|node| node.name_any());
        let say = |name: String| {
            format!(
                "CacheNode {name}: the operator removes it, once the agent has let go of what GPUQueueAllocations of the node were granted: an agent \
                 that says nothing for a minute counts as gone. Does the operator run?"
            )
        };
        Ok(left.map(say).collect())
    }

    /// Bindings of clusters that go, which the operator removes afterwards.
    async fn bindings(&self, going: &[DynamicObject]) -> anyhow::Result<Vec<String>> {
        let api: Api<ClusterRoleBinding> = Api::all(self.client.clone());
        let ours = ListParams::default().labels(&format!("{MANAGED_BY}={OPERATOR},{CLUSTER_UID}"));
        let bindings = self.patiently(async || api.list(&ours).await).await?.items;
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
            .map(|name| format!("ClusterRoleBinding {name}: the operator removes it: does it run?"))
            .collect())
    }

    /// Allocations whose grants the operator ends, since the agents of their nodes are gone.
    async fn grants_left(&self) -> anyhow::Result<Vec<String>> {
        let (ending, _) = self.grants().await?;
        let say = |one: &DynamicObject| {
            let (node, name) = (node_of(one), full_name(one));
            format!(
                "GPUQueueAllocation {name}: no cluster has node {node} any more, and the operator ends its grant: does it run?"
            )
        };
        Ok(ending.iter().map(say).collect())
    }

    /// Allocations with our finalizer: those of nodes that no cluster has, and the others.
    async fn grants(&self) -> anyhow::Result<(Vec<DynamicObject>, Vec<DynamicObject>)> {
        let allocations: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<GPUQueueAllocation>(&()));
        let nodes: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let allocations = self.list(&allocations, &ListParams::default()).await?;
        let nodes = self.list(&nodes, &ListParams::default()).await?;
        Ok(by_agent(allocations, &nodes))
    }

    async fn name_what_stays(&self) -> anyhow::Result<()> {
        let (_, granted) = self.grants().await?;
        for allocation in granted.iter().take(NAMES_MAX) {
            tracing::warn!(
                allocation = full_name(allocation),
                node = node_of(allocation),
                "the allocation stays, with its grant and the finalizer {QUEUES_FINALIZER}: a cluster that the release has not applied has its node. \
                 Without an operator a deletion of it waits until one is installed again, or until somebody takes the finalizer away"
            );
        }
        if let Some(more) = granted.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
            tracing::warn!(more, "more allocations stay like these");
        }
        for pool in self.applied(&self.all_pools()).await? {
            tracing::warn!(
                pool = pool.name_any(),
                "the pool stays: its deletionPolicy is Wipe and nobody has confirmed it; delete it by hand"
            );
        }
        let looked = async {
            self.let_go_of_unused().await?;
            self.name_what_is_held().await
        };
        if let Err(error) = looked.await {
            tracing::warn!(
                error = format!("{error:#}"),
                "what else stays with the operator's finalizers cannot be looked at"
            );
        }
        tracing::info!(release = self.release.name, "what the release has applied is gone");
        Ok(())
    }

    /// Pools of somebody's own that no node has any more are let go of: the operator would do it a little later, and goes now.
    async fn let_go_of_unused(&self) -> anyhow::Result<()> {
        let nodes: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<CacheNode>(&()));
        let nodes = self.list(&nodes, &ListParams::default()).await?;
        let claims = nodes.iter().filter_map(|node| node.data["spec"]["claims"].as_array()).flatten();
        let claimed: BTreeSet<&str> = claims.filter_map(|claim| claim["uid"].as_str()).collect();
        let api = self.all_pools();
        for pool in self.list(&api, &ListParams::default()).await? {
            let is_unused = !claimed.contains(pool.uid().unwrap_or_default().as_str());
            let wipes = pool.data["spec"]["deletionPolicy"] == "Wipe";
            if !is_unused || wipes || !in_use::holds(&pool) {
                continue;
            }
            let mut finalizers = pool.finalizers().to_vec();
            finalizers.retain(|one| one != IN_USE_FINALIZER);
            let patch = Patch::Merge(json!({
                "metadata": { "finalizers": finalizers, "resourceVersion": pool.metadata.resource_version },
            }));
            let name = pool.name_any();
            let patched =
                self.patiently(async || match api.patch(&name, &PatchParams::default(), &patch).await {
                    Err(kube::Error::Api(status)) if [NOT_FOUND, CONFLICT].contains(&status.code) => Ok(()),
                    other => other.map(|_| ()),
                });
            patched.await.with_context(|| format!("SSDPool {name} cannot be let go of"))?;
        }
        Ok(())
    }

    /// Clusters and pools of somebody's own that engines use, or that are to be wiped: without an operator nobody lets them go.
    async fn name_what_is_held(&self) -> anyhow::Result<()> {
        let clusters: Api<DynamicObject> =
            Api::all_with(self.client.clone(), &ApiResource::erase::<KVCacheCluster>(&()));
        let mut objects = self.list(&clusters, &ListParams::default()).await?;
        objects.extend(self.list(&self.all_pools(), &ListParams::default()).await?);
        // What stays of the release is named already.
        let is_named = |object: &DynamicObject| object.labels().get(RELEASE) == Some(&self.release.name);
        objects.retain(|object| in_use::holds(object) && !is_named(object));
        for object in objects.iter().take(NAMES_MAX) {
            let (kind, name) = (kind(object), full_name(object));
            tracing::warn!(
                kind,
                name,
                "it stays, with the finalizer {IN_USE_FINALIZER}, since engines use it or it is to be wiped. Without an operator a deletion of it \
                 waits until one is installed again, or until somebody takes the finalizer away"
            );
        }
        if let Some(more) = objects.len().checked_sub(NAMES_MAX).filter(|more| *more > 0) {
            tracing::warn!(more, "more clusters and pools stay like these");
        }
        Ok(())
    }

    fn all_tenants(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<CacheTenant>(&()))
    }

    fn all_pools(&self) -> Api<DynamicObject> {
        Api::all_with(self.client.clone(), &ApiResource::erase::<SSDPool>(&()))
    }

    /// Objects of a kind that the release has applied.
    async fn applied(&self, api: &Api<DynamicObject>) -> anyhow::Result<Vec<DynamicObject>> {
        self.list(api, &ListParams::default().labels(&format!("{RELEASE}={}", self.release.name))).await
    }

    /// Objects of a kind; none where the kind is not defined.
    async fn list(&self, api: &Api<DynamicObject>, of: &ListParams) -> anyhow::Result<Vec<DynamicObject>> {
        let listed = self.patiently(async || match api.list(of).await {
            Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(Vec::new()),
            other => other.map(|list| list.items),
        });
        listed.await
    }

    /// Says of clusters or pools that they go although engines use them: who ends a release has decided that, and the operator, which
    /// takes its finalizers away, goes next.
    async fn let_go(&self, api: &Api<DynamicObject>, objects: &[DynamicObject]) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "metadata": { "annotations": { DELETE_IN_USE: YES } } }));
        let lacks =
            |object: &&DynamicObject| object.annotations().get(DELETE_IN_USE).is_none_or(|said| said != YES);
        for object in objects.iter().filter(lacks) {
            let (kind, name) = (kind(object), object.name_any());
            let patched =
                self.patiently(async || match api.patch(&name, &PatchParams::default(), &patch).await {
                    Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
                    other => other.map(|_| ()),
                });
            patched.await.with_context(|| format!("{kind} {name} cannot be annotated"))?;
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
            let deleted = self.patiently(async || match api.delete(&name, how).await {
                Err(kube::Error::Api(status)) if status.code == NOT_FOUND => Ok(()),
                other => other.map(|_| ()),
            });
            deleted.await.with_context(|| format!("{kind} {name} cannot be deleted"))?;
            tracing::info!(kind, name, "deleted");
        }
        Ok(())
    }

    /// Waits until nothing is left; of what is, each is named with why it remains.
    async fn until_gone(&self, left: impl AsyncFn() -> anyhow::Result<Vec<String>>) -> anyhow::Result<()> {
        let mut left = self.wait(self.within, left).await?;
        if left.is_empty() {
            return Ok(());
        }
        let more = left.len().saturating_sub(NAMES_MAX);
        left.truncate(NAMES_MAX);
        let more = if more > 0 { format!("; and {more} more") } else { String::new() };
        bail!("after {:?} there remain: {}{more}", self.within, left.join("; "));
    }

    /// Waits until nothing is left, and for so long after the beginning at the most; what is left.
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
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }

    /// Asks again while the API server is away; what it refuses is refused.
    async fn patiently<T>(&self, call: impl AsyncFn() -> Result<T, kube::Error>) -> anyhow::Result<T> {
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
                Err(error) => tracing::info!(%error, "asked again"),
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
    }
}

fn kind(object: &DynamicObject) -> &str {
    object.types.as_ref().map_or("object", |types| types.kind.as_str())
}

fn fate(pool: &DynamicObject) -> Fate {
    let spec = &pool.data["spec"];
    match (spec["deletionPolicy"] == "Wipe", spec["wipeConfirmation"].is_string()) {
        (false, _) => Fate::Retained,
        (true, true) => Fate::Wiped,
        (true, false) => Fate::Kept,
    }
}

/// Allocations with our finalizer, by whether an agent is on their node: without one first.
fn by_agent(
    allocations: Vec<DynamicObject>,
    nodes: &[DynamicObject],
) -> (Vec<DynamicObject>, Vec<DynamicObject>) {
    let nodes: BTreeSet<String> = nodes.iter().map(ResourceExt::name_any).collect();
    let has_grant = |one: &DynamicObject| one.finalizers().iter().any(|held| held == QUEUES_FINALIZER);
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

/// An object that is being deleted, and why it is still there.
fn remains(object: &DynamicObject) -> String {
    format!("{} {}: {}", kind(object), object.name_any(), held(object))
}

fn held(object: &DynamicObject) -> String {
    let conditions = object.data["status"]["conditions"].as_array();
    let blocks = |condition: &&Value| condition["type"] == "DeletionBlocked" && condition["status"] == "True";
    let blocked = conditions.and_then(|conditions| conditions.iter().find(blocks));
    match blocked.and_then(|condition| condition["message"].as_str()) {
        Some(message) => message.to_owned(),
        None if object.finalizers().is_empty() => "it is being deleted".to_owned(),
        None => {
            format!("its finalizers are not done: {}; does the operator run?", object.finalizers().join(", "))
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
    fn data_is_destroyed_only_where_it_was_confirmed() {
        let of = |spec: Value| fate(&pool(&spec, &json!({}), &[]));
        assert_eq!(of(json!({})), Fate::Retained);
        assert_eq!(of(json!({ "deletionPolicy": "Retain" })), Fate::Retained);
        assert_eq!(of(json!({ "deletionPolicy": "Wipe" })), Fate::Kept);
        assert_eq!(of(json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes" })), Fate::Wiped);
    }

    #[test]
    fn grants_whose_agents_are_gone_are_waited_for_and_others_stay() {
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
        let (ending, staying) = by_agent(all, &[node]);
        let names = |of: &[DynamicObject]| of.iter().map(full_name).collect::<Vec<_>>();
        assert_eq!(
            (names(&ending), names(&staying)),
            (vec!["n/ends".to_owned()], vec!["n/stays".to_owned()])
        );
    }

    #[test]
    fn what_remains_says_why() {
        let blocked = json!({ "conditions": [
            { "type": "Ready", "status": "True", "message": "fine" },
            { "type": "DeletionBlocked", "status": "True", "message": "2 nodes have not wiped" },
        ] });
        assert_eq!(
            remains(&pool(&json!({}), &blocked, &["reprise.dev/wipe"])),
            "SSDPool p: 2 nodes have not wiped"
        );
        let held = remains(&pool(&json!({}), &json!({}), &["reprise.dev/wipe"]));
        assert!(held.contains("reprise.dev/wipe") && held.contains("operator"), "{held}");
        assert!(remains(&pool(&json!({}), &json!({}), &[])).contains("being deleted"));
    }
}
