//! Nodes, pools and a cluster like those of users and Kubernetes, and agents that apply their `CacheNode`s
//! immediately.

use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use k8s_openapi::api::core::v1::Node;
use kube::Client;
use kube::api::{Api, ApiResource, DynamicObject, ListParams, ObjectMeta, Patch, PatchParams, PostParams};
use kube::core::GroupVersionKind;
use reprise_e2e::kubernetes::fleet::Reporters;
use serde_json::{Value, json};
use tokio::task::JoinSet;

use super::Scale;

/// Namespace and name of the cluster.
const SPACE: &str = "default";
const CLUSTER: &str = "bench";

/// Label of nodes with the name of their pool.
const POOL_LABEL: &str = "reprise.dev/bench-pool";

/// Field manager of pools and cluster.
const USER: &str = "bench";

/// Maximum number of concurrent calls.
const AT_ONCE: usize = 16;

/// Interval between checks of all nodes.
const PAUSE: Duration = Duration::from_millis(500);

/// Size of pools; the allocation of disks is not measured.
const POOL_SIZE: &str = "1Gi";

/// All objects, with a client of the API server.
pub(super) struct Fleet {
    client: Client,
    scale: Scale,
    etcd: String,
}

impl Fleet {
    pub(super) fn new(client: Client, scale: Scale, etcd: String) -> Fleet {
        Fleet { client, scale, etcd }
    }

    /// Creates nodes, each for one pool.
    pub(super) async fn create_nodes(&self) -> anyhow::Result<()> {
        let api: Api<Node> = Api::all(self.client.clone());
        let pools = self.scale.pools;
        all((0..self.scale.nodes).map(|number| {
            let api = api.clone();
            async move {
                let labels = [(POOL_LABEL.to_owned(), pool_name(number % pools))];
                let metadata = ObjectMeta {
                    name: Some(node_name(number)),
                    labels: Some(labels.into_iter().collect()),
                    ..ObjectMeta::default()
                };
                let node = Node { metadata, ..Node::default() };
                api.create(&PostParams::default(), &node).await.context("creating a node").map(drop)
            }
        }))
        .await
    }

    /// Creates pools and their cluster.
    pub(super) async fn create_cluster(&self) -> anyhow::Result<()> {
        let names: Vec<Value> =
            (0..self.scale.pools).map(|pool| json!({ "name": pool_name(pool) })).collect();
        for pool in 0..self.scale.pools {
            let name = pool_name(pool);
            let spec = json!({
                "directory": { "path": format!("/data/{name}"), "size": POOL_SIZE },
                "nodeSelector": { "matchLabels": { POOL_LABEL: name } },
            });
            self.apply("SSDPool", &name, spec).await?;
        }
        let spec = json!({
            "etcd": { "mode": "External", "external": { "endpoints": [self.etcd] } },
            "pools": names,
        });
        self.apply("KVCacheCluster", CLUSTER, spec).await
    }

    /// Cordons every pool, one after another.
    pub(super) async fn cordon_pools(&self) -> anyhow::Result<()> {
        let patch = Patch::Merge(json!({ "spec": { "mode": "Cordoned" } }));
        for pool in 0..self.scale.pools {
            let changed = self.api("SSDPool").patch(&pool_name(pool), &PatchParams::default(), &patch).await;
            changed.context("changing a pool")?;
        }
        Ok(())
    }

    /// Waits until a condition is true.
    pub(super) async fn wait_until(
        &self,
        what: &str,
        patience: Duration,
        holds: impl AsyncFn(&Fleet) -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        let give_up = Instant::now() + patience;
        while !holds(self).await? {
            if Instant::now() > give_up {
                bail!("the operator did not reach this state within {patience:?}: {what}");
            }
            tokio::time::sleep(PAUSE).await;
        }
        Ok(())
    }

    /// Returns whether every node has a claim.
    pub(super) async fn is_wanted_everywhere(&self) -> anyhow::Result<bool> {
        let nodes = self.cache_nodes().await?;
        let has_claim = |node: &DynamicObject| {
            node.data["spec"]["claims"].as_array().is_some_and(|claims| claims.len() == 1)
        };
        Ok(nodes.len() == self.scale.nodes && nodes.iter().all(has_claim))
    }

    /// Returns whether every node is cordoned.
    pub(super) async fn is_cordoned(&self) -> anyhow::Result<bool> {
        Ok(self.cache_nodes().await?.iter().all(|node| node.data["spec"]["mode"] == "Cordoned"))
    }

    /// Returns whether every pool is ready.
    pub(super) async fn is_ready(&self) -> anyhow::Result<bool> {
        let pools = self.list("SSDPool").await?;
        let is_ready = |pool: &DynamicObject| {
            let conditions = pool.data["status"]["conditions"].as_array();
            conditions
                .is_some_and(|all| all.iter().any(|one| one["type"] == "Ready" && one["status"] == "True"))
        };
        Ok(pools.iter().all(is_ready))
    }

    /// Reports once for every agent, as fast as the API server accepts it.
    pub(super) async fn report_all(&self) {
        self.reporters().report_all().await;
    }

    /// Reports for every agent at the interval of agents, evenly distributed over time.
    pub(super) async fn report_for(&self, time: Duration) {
        self.reporters().report_for(time).await;
    }

    fn reporters(&self) -> Reporters {
        let nodes = (0..self.scale.nodes).map(node_name).collect();
        // Nothing changes on the nodes.
        Reporters { api: self.api("CacheNode"), nodes, used: |_, _| "1Mi".to_owned() }
    }

    /// Returns the size of the largest object of Reprise, in bytes of JSON.
    pub(super) async fn largest_object_bytes(&self) -> anyhow::Result<usize> {
        let mut largest = 0;
        for kind in ["KVCacheCluster", "SSDPool", "CacheNode"] {
            for object in self.list(kind).await? {
                largest = largest.max(serde_json::to_vec(&object)?.len());
            }
        }
        Ok(largest)
    }

    async fn cache_nodes(&self) -> anyhow::Result<Vec<DynamicObject>> {
        self.list("CacheNode").await
    }

    async fn list(&self, kind: &str) -> anyhow::Result<Vec<DynamicObject>> {
        let listed = self.api(kind).list(&ListParams::default()).await;
        Ok(listed.with_context(|| format!("listing {kind}"))?.items)
    }

    async fn apply(&self, kind: &str, name: &str, spec: Value) -> anyhow::Result<()> {
        let object = json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": kind, "metadata": { "name": name }, "spec": spec,
        });
        let applied = self.api(kind).patch(name, &PatchParams::apply(USER), &Patch::Apply(&object)).await;
        applied.with_context(|| format!("applying {kind} {name}")).map(drop)
    }

    fn api(&self, kind: &str) -> Api<DynamicObject> {
        let plural = format!("{}s", kind.to_lowercase());
        let kind_of = GroupVersionKind::gvk("reprise.dev", "v1alpha1", kind);
        let resource = ApiResource::from_gvk_with_plural(&kind_of, &plural);
        match kind {
            "KVCacheCluster" => Api::namespaced_with(self.client.clone(), SPACE, &resource),
            _ => Api::all_with(self.client.clone(), &resource),
        }
    }
}

fn pool_name(pool: usize) -> String {
    format!("pool-{pool:02}")
}

fn node_name(number: usize) -> String {
    format!("node-{number:04}")
}

/// Runs all futures, several concurrently.
async fn all<F>(work: impl IntoIterator<Item = F>) -> anyhow::Result<()>
where
    F: Future<Output = anyhow::Result<()>> + Send + 'static,
{
    let mut running = JoinSet::new();
    for one in work {
        running.spawn(one);
        if running.len() >= AT_ONCE {
            ended(running.join_next().await)?;
        }
    }
    while !running.is_empty() {
        ended(running.join_next().await)?;
    }
    Ok(())
}

fn ended(one: Option<Result<anyhow::Result<()>, tokio::task::JoinError>>) -> anyhow::Result<()> {
    one.context("no task is running")?.context("a task panicked")?
}
