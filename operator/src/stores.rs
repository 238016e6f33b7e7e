//! The operator's copy of the API server's objects, filled by watches, and the assignment computed from it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, Store, store};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool, SlackProfile};
use tokio::sync::{Notify, watch as flag};

use crate::assignment::Assignment;
use crate::assignment::current::CurrentAssignment;
use crate::child::ChildKind;
use crate::names::CLUSTER_UID;
use crate::optional_kinds::KindAccess;
use crate::secrets::Secrets;

/// Readers of all stores.
#[derive(Debug)]
pub struct Stores {
    /// All KVCacheClusters of the Kubernetes cluster.
    pub clusters: Store<KVCacheCluster>,
    /// All SSDPools of the Kubernetes cluster.
    pub pools: Store<SSDPool>,
    /// All CacheTenants of the Kubernetes cluster.
    pub tenants: Store<CacheTenant>,
    /// All SlackProfiles of the Kubernetes cluster.
    pub profiles: Store<SlackProfile>,
    /// All GPUQueueAllocations of the Kubernetes cluster.
    pub allocations: Store<GPUQueueAllocation>,
    /// All Kubernetes nodes, without managed fields.
    pub nodes: Store<Node>,
    /// All namespaces. Tenants select them by label.
    pub namespaces: Store<Namespace>,
    /// All CacheNodes, one per node with an agent.
    pub cache_nodes: Store<CacheNode>,
    /// Secrets of clusters.
    pub secrets: Secrets,
    /// Objects that the operator created, by kind, without Secrets.
    children: BTreeMap<ChildKind, Store<DynamicObject>>,
    /// Availability of optional kinds. `None` until it is known.
    access: BTreeMap<ChildKind, flag::Sender<Option<KindAccess>>>,
    /// Wakes the task that deletes orphaned objects.
    orphans: Notify,
    /// Version of the assignment's inputs, incremented on each change.
    version: AtomicU64,
    assignment: Mutex<CachedAssignment>,
}

/// An assignment and the inputs that it was computed from.
#[derive(Debug, Default)]
struct CachedAssignment {
    /// Version of the inputs.
    version: u64,
    /// What nodes had at that time.
    current: CurrentAssignment,
    assignment: Arc<Assignment>,
}

/// Writers of all stores, for the watches.
#[derive(Debug)]
pub struct Writers {
    pub(crate) clusters: Writer<KVCacheCluster>,
    pub(crate) pools: Writer<SSDPool>,
    pub(crate) tenants: Writer<CacheTenant>,
    pub(crate) profiles: Writer<SlackProfile>,
    pub(crate) allocations: Writer<GPUQueueAllocation>,
    pub(crate) nodes: Writer<Node>,
    pub(crate) namespaces: Writer<Namespace>,
    pub(crate) cache_nodes: Writer<CacheNode>,
    pub(crate) children: Vec<(ChildKind, Writer<DynamicObject>)>,
}

impl Stores {
    /// Creates empty stores and their writers.
    pub fn new() -> (Stores, Writers) {
        let (clusters, cluster_writer) = store();
        let (pools, pool_writer) = store();
        let (tenants, tenant_writer) = store();
        let (profiles, profile_writer) = store();
        let (allocations, allocation_writer) = store();
        let (nodes, node_writer) = store();
        let (namespaces, namespace_writer) = store();
        let (cache_nodes, cache_node_writer) = store();
        let watched = ChildKind::ALL.into_iter().filter(|kind| *kind != ChildKind::Secret);
        let child_writers: Vec<(ChildKind, Writer<DynamicObject>)> =
            watched.map(|kind| (kind, Writer::new(kind.resource()))).collect();
        let children = child_writers.iter().map(|(kind, writer)| (*kind, writer.as_reader())).collect();
        let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
        let stores = Stores {
            clusters,
            pools,
            tenants,
            profiles,
            allocations,
            nodes,
            namespaces,
            cache_nodes,
            secrets: Secrets::default(),
            children,
            access: optional.map(|kind| (kind, flag::Sender::new(None))).collect(),
            orphans: Notify::new(),
            version: AtomicU64::new(1),
            assignment: Mutex::default(),
        };
        let writers = Writers {
            clusters: cluster_writer,
            pools: pool_writer,
            tenants: tenant_writer,
            profiles: profile_writer,
            allocations: allocation_writer,
            nodes: node_writer,
            namespaces: namespace_writer,
            cache_nodes: cache_node_writer,
            children: child_writers,
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
        for (kind, store) in &self.children {
            if !kind.is_optional() {
                store.wait_until_ready().await?;
            }
        }
        for known in self.access.values() {
            // An error is impossible: `self` holds the sender.
            let _ = known.subscribe().wait_for(Option::is_some).await;
        }
        Ok(())
    }

    /// Waits until the store of one kind has been filled.
    ///
    /// # Errors
    /// The watch has ended, because the process is ending.
    pub async fn wait_until_filled(
        &self,
        kind: ChildKind,
    ) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
        match self.children.get(&kind) {
            Some(store) => store.wait_until_ready().await,
            None => Ok(()),
        }
    }

    /// Returns whether the operator can create children of a kind.
    pub fn access(&self, kind: ChildKind) -> KindAccess {
        match self.access.get(&kind) {
            Some(known) => known.borrow().unwrap_or(KindAccess::NotServed),
            None => KindAccess::Usable,
        }
    }

    /// Records the availability of an optional kind.
    pub(crate) fn set_access(&self, kind: ChildKind, access: KindAccess) {
        if let Some(known) = self.access.get(&kind) {
            let is_news = known.send_replace(Some(access)) != Some(access);
            if is_news {
                tracing::info!(kind = kind.as_str(), ?access, "availability of an optional kind changed");
            }
        }
    }

    /// Marks the assignment as outdated, because one of its inputs changed.
    pub fn invalidate_assignment(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Wakes the task that deletes orphaned objects.
    pub fn notify_orphans(&self) {
        self.orphans.notify_one();
    }

    /// Waits for the next call of [`Stores::notify_orphans`].
    pub async fn wait_for_orphans(&self) {
        self.orphans.notified().await;
    }

    /// Returns the assignment of the stored objects, computing it again only if inputs have changed.
    pub fn assignment(&self) -> Arc<Assignment> {
        let version = self.version.load(Ordering::Acquire);
        let mut cached = self.assignment.lock().unwrap_or_else(PoisonError::into_inner);
        if cached.version != version {
            let current = CurrentAssignment::from_cache_nodes(&self.cache_nodes.state());
            let assignment = Assignment::compute(
                &self.clusters.state(),
                &self.pools.state(),
                &self.nodes.state(),
                &current,
            );
            *cached = CachedAssignment { version, current, assignment: Arc::new(assignment) };
        }
        Arc::clone(&cached.assignment)
    }

    /// Handles a changed `CacheNode`: a node that no longer has something may resolve a conflict. Returns
    /// whether the assignment changed.
    pub fn cache_node_changed(&self, node: &str) -> bool {
        let before = {
            let cached = self.assignment.lock().unwrap_or_else(PoisonError::into_inner);
            let now = self.cache_nodes.get(&ObjectRef::new(node));
            if !cached.assignment.is_contested || !cached.current.has_lost(node, now.as_deref()) {
                return false;
            }
            Arc::clone(&cached.assignment)
        };
        self.invalidate_assignment();
        *self.assignment() != *before
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

    /// Returns a child by its name.
    pub fn child(&self, kind: ChildKind, namespace: Option<&str>, name: &str) -> Option<Arc<DynamicObject>> {
        if kind == ChildKind::Secret {
            return self.secrets.get(namespace?, name);
        }
        let mut reference = ObjectRef::new_with(name, kind.resource());
        if let Some(namespace) = namespace {
            reference = reference.within(namespace);
        }
        self.children.get(&kind)?.get(&reference)
    }

    /// Returns all children of a kind.
    pub fn children(&self, kind: ChildKind) -> Vec<Arc<DynamicObject>> {
        self.children.get(&kind).map(Store::state).unwrap_or_default()
    }

    /// Returns all children of a kind that belong to a cluster.
    pub fn children_of(&self, kind: ChildKind, cluster_uid: &str) -> Vec<Arc<DynamicObject>> {
        let store = self.children.get(&kind);
        let is_theirs =
            |child: &DynamicObject| child.labels().get(CLUSTER_UID).is_some_and(|uid| uid == cluster_uid);
        store.map(|store| store.state_filter(is_theirs)).unwrap_or_default()
    }
}
