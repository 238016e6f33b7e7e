//! The operator's copy of the API server's objects, filled by watches, and the assignment computed from it.

use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool, SlackProfile};

use crate::framework::change::OwnWrites;
use crate::framework::child_stores::{ChildStores, ChildWriters};
use crate::framework::feed::{Feed, Signal};
use crate::framework::labels::CLUSTER_UID;
use crate::reconcile::assignment::Assignment;

/// Readers of all stores.
#[derive(Debug)]
pub struct Stores {
    pub clusters: Store<KVCacheCluster>,
    pub pools: Store<SSDPool>,
    pub tenants: Store<CacheTenant>,
    pub profiles: Store<SlackProfile>,
    pub allocations: Store<GPUQueueAllocation>,
    /// All Kubernetes nodes, without managed fields.
    pub nodes: Store<Node>,
    /// All namespaces. Tenants select them by label.
    pub namespaces: Store<Namespace>,
    /// All CacheNodes, one per node with an agent.
    pub cache_nodes: Store<CacheNode>,
    /// Objects that the operator created, by kind, without Secrets.
    pub children: Arc<ChildStores>,
    pub feeds: Feeds,
    pub own_writes: Arc<OwnWrites>,
    /// The last assignment, unless its inputs have changed.
    assignment: Mutex<Option<Arc<Assignment>>>,
}

/// Changes of all watched kinds, and signals to reconcile all objects of some kinds.
#[derive(Debug, Default)]
pub struct Feeds {
    pub clusters: Arc<Feed<KVCacheCluster>>,
    pub pools: Arc<Feed<SSDPool>>,
    pub tenants: Arc<Feed<CacheTenant>>,
    pub profiles: Arc<Feed<SlackProfile>>,
    pub allocations: Arc<Feed<GPUQueueAllocation>>,
    pub nodes: Arc<Feed<Node>>,
    pub namespaces: Arc<Feed<Namespace>>,
    pub cache_nodes: Arc<Feed<CacheNode>>,
    pub children: Arc<Feed<DynamicObject>>,
    pub everything: Signal,
    /// Reconciles all objects that may depend on the labels of a node.
    pub node_labels: Signal,
    pub all_clusters: Signal,
}

/// Writers of all stores, for the watches.
#[derive(Debug, Default)]
pub struct Writers {
    pub(crate) clusters: Writer<KVCacheCluster>,
    pub(crate) pools: Writer<SSDPool>,
    pub(crate) tenants: Writer<CacheTenant>,
    pub(crate) profiles: Writer<SlackProfile>,
    pub(crate) allocations: Writer<GPUQueueAllocation>,
    pub(crate) nodes: Writer<Node>,
    pub(crate) namespaces: Writer<Namespace>,
    pub(crate) cache_nodes: Writer<CacheNode>,
    pub(crate) children: ChildWriters,
}

impl Stores {
    /// Creates empty stores and their writers.
    pub fn new() -> (Stores, Writers) {
        let (children, child_writers) = ChildStores::new();
        let writers = Writers { children: child_writers, ..Writers::default() };
        let stores = Stores {
            clusters: writers.clusters.as_reader(),
            pools: writers.pools.as_reader(),
            tenants: writers.tenants.as_reader(),
            profiles: writers.profiles.as_reader(),
            allocations: writers.allocations.as_reader(),
            nodes: writers.nodes.as_reader(),
            namespaces: writers.namespaces.as_reader(),
            cache_nodes: writers.cache_nodes.as_reader(),
            children: Arc::new(children),
            feeds: Feeds::default(),
            own_writes: Arc::default(),
            assignment: Mutex::default(),
        };
        (stores, writers)
    }

    /// Waits until every store has been filled once.
    ///
    /// # Errors
    /// A watch has ended, because the process is ending.
    pub async fn wait_until_ready(&self) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
        self.clusters.wait_until_ready().await?;
        self.pools.wait_until_ready().await?;
        self.tenants.wait_until_ready().await?;
        self.profiles.wait_until_ready().await?;
        self.allocations.wait_until_ready().await?;
        self.nodes.wait_until_ready().await?;
        self.namespaces.wait_until_ready().await?;
        self.cache_nodes.wait_until_ready().await?;
        self.children.wait_until_ready().await
    }

    /// Marks the assignment as outdated, because one of its inputs changed.
    pub fn invalidate_assignment(&self) {
        *self.assignment.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// Reconciles everything, because the assignment may have changed or deletions may have been missed.
    pub fn reconcile_everything(&self) {
        self.invalidate_assignment();
        self.feeds.everything.send();
    }

    /// Returns the assignment of the stored objects, computing it again only if inputs have changed.
    pub fn assignment(&self) -> Arc<Assignment> {
        let mut cached = self.assignment.lock().unwrap_or_else(PoisonError::into_inner);
        let compute = || {
            Arc::new(Assignment::compute(
                &self.clusters.state(),
                &self.pools.state(),
                &self.nodes.state(),
                &self.cache_nodes.state(),
            ))
        };
        Arc::clone(cached.get_or_insert_with(compute))
    }

    /// Returns a cluster by `namespace/name`.
    pub fn cluster(&self, key: &str) -> Option<Arc<KVCacheCluster>> {
        let (namespace, name) = key.split_once('/')?;
        self.clusters.get(&ObjectRef::new(name).within(namespace))
    }

    /// Returns a cluster by its unique id.
    pub fn cluster_by_uid(&self, uid: &str) -> Option<Arc<KVCacheCluster>> {
        self.clusters.find(|cluster| cluster.metadata.uid.as_deref() == Some(uid))
    }

    /// Returns the cluster that a child belongs to.
    pub fn cluster_of_child(&self, child: &DynamicObject) -> Option<Arc<KVCacheCluster>> {
        self.cluster_by_uid(child.labels().get(CLUSTER_UID)?)
    }

    /// Returns the cluster that a node is assigned to.
    pub fn cluster_of_node(&self, node: &CacheNode) -> Option<Arc<KVCacheCluster>> {
        let named = node.spec.cluster_ref.as_ref()?;
        self.clusters.get(&ObjectRef::new(named.name.as_str()).within(named.namespace.as_str()))
    }
}
