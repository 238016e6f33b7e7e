//! What the operator knows: stores that watches fill, and the plan made of them.

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

use crate::child::ChildKind;
use crate::names::CLUSTER_UID;
use crate::optional::Access;
use crate::plan::Plan;
use crate::plan::held::Held;

/// The stores, for readers.
#[derive(Debug)]
pub struct World {
    /// All clusters.
    pub clusters: Store<KVCacheCluster>,
    /// All pools.
    pub pools: Store<SSDPool>,
    /// All tenants.
    pub tenants: Store<CacheTenant>,
    /// All profiles.
    pub profiles: Store<SlackProfile>,
    /// All allocations.
    pub allocations: Store<GPUQueueAllocation>,
    /// All nodes, without what nobody here reads.
    pub nodes: Store<Node>,
    /// All namespaces: tenants select them by their labels.
    pub namespaces: Store<Namespace>,
    /// All nodes of clusters.
    pub cache_nodes: Store<CacheNode>,
    /// What the operator made, by kind.
    children: BTreeMap<ChildKind, Store<DynamicObject>>,
    /// Of optional kinds, what is known of them.
    access: BTreeMap<ChildKind, flag::Sender<Option<Access>>>,
    /// Somebody who removes what belongs to no cluster any more waits for this.
    orphans: Notify,
    /// Counts changes that the plan depends on.
    version: AtomicU64,
    plan: Mutex<Planned>,
}

/// A plan, and what it was made of.
#[derive(Debug, Default)]
struct Planned {
    /// How many changes are in it.
    version: u64,
    /// What nodes had.
    held: Held,
    plan: Arc<Plan>,
}

/// The stores, for the watches.
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

impl World {
    /// Empty stores.
    pub fn new() -> (World, Writers) {
        let (clusters, cluster_writer) = store();
        let (pools, pool_writer) = store();
        let (tenants, tenant_writer) = store();
        let (profiles, profile_writer) = store();
        let (allocations, allocation_writer) = store();
        let (nodes, node_writer) = store();
        let (namespaces, namespace_writer) = store();
        let (cache_nodes, cache_node_writer) = store();
        let child_writers: Vec<(ChildKind, Writer<DynamicObject>)> =
            ChildKind::ALL.into_iter().map(|kind| (kind, Writer::new(kind.resource()))).collect();
        let children = child_writers.iter().map(|(kind, writer)| (*kind, writer.as_reader())).collect();
        let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
        let world = World {
            clusters,
            pools,
            tenants,
            profiles,
            allocations,
            nodes,
            namespaces,
            cache_nodes,
            children,
            access: optional.map(|kind| (kind, flag::Sender::new(None))).collect(),
            orphans: Notify::new(),
            version: AtomicU64::new(1),
            plan: Mutex::default(),
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
        (world, writers)
    }

    /// Waits until every store has been filled once.
    ///
    /// # Errors
    /// A watch has ended, as it does when the process ends.
    pub async fn ready(&self) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
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
            // The sender is ours: it is there.
            let _ = known.subscribe().wait_for(Option::is_some).await;
        }
        Ok(())
    }

    /// Waits until what there is of a kind is known.
    ///
    /// # Errors
    /// Its watch has ended, as it does when the process ends.
    pub async fn filled(
        &self,
        kind: ChildKind,
    ) -> Result<(), kube::runtime::reflector::store::WriterDropped> {
        match self.children.get(&kind) {
            Some(store) => store.wait_until_ready().await,
            None => Ok(()),
        }
    }

    /// Whether children of a kind can be made here.
    pub fn access(&self, kind: ChildKind) -> Access {
        match self.access.get(&kind) {
            Some(known) => known.borrow().unwrap_or(Access::NotServed),
            None => Access::Usable,
        }
    }

    /// What was found out about an optional kind.
    pub(crate) fn set_access(&self, kind: ChildKind, access: Access) {
        if let Some(known) = self.access.get(&kind) {
            let is_news = known.send_replace(Some(access)) != Some(access);
            if is_news {
                tracing::info!(kind = kind.as_str(), ?access, "whether an optional kind can be used here");
            }
        }
    }

    /// Something has changed that the plan depends on.
    pub fn changed(&self) {
        self.version.fetch_add(1, Ordering::AcqRel);
    }

    /// Something may be there that belongs to no cluster any more.
    pub fn orphaned(&self) {
        self.orphans.notify_one();
    }

    /// Waits for [`World::orphaned`].
    pub async fn until_orphaned(&self) {
        self.orphans.notified().await;
    }

    /// The plan of what is stored.
    pub fn plan(&self) -> Arc<Plan> {
        let version = self.version.load(Ordering::Acquire);
        let mut planned = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
        if planned.version != version {
            let held = Held::of(&self.cache_nodes.state());
            let made = Plan::make(&self.clusters.state(), &self.pools.state(), &self.nodes.state(), &held);
            *planned = Planned { version, held, plan: Arc::new(made) };
        }
        Arc::clone(&planned.plan)
    }

    /// A `CacheNode` has changed. Whether the plan is another one now, since what is contested may have waited for that.
    pub fn held_changed(&self, node: &str) -> bool {
        let before = {
            let planned = self.plan.lock().unwrap_or_else(PoisonError::into_inner);
            let now = self.cache_nodes.get(&ObjectRef::new(node));
            if !planned.plan.is_contested || !planned.held.has_lost(node, now.as_deref()) {
                return false;
            }
            Arc::clone(&planned.plan)
        };
        self.changed();
        *self.plan() != *before
    }

    /// A cluster by `namespace/name`.
    pub fn cluster(&self, key: &str) -> Option<Arc<KVCacheCluster>> {
        let (namespace, name) = key.split_once('/')?;
        self.clusters.get(&ObjectRef::new(name).within(namespace))
    }

    /// A cluster by its unique id.
    pub fn cluster_of_uid(&self, uid: &str) -> Option<Arc<KVCacheCluster>> {
        self.clusters.find(|cluster| cluster.metadata.uid.as_deref() == Some(uid))
    }

    /// A child by its name.
    pub fn child(&self, kind: ChildKind, namespace: Option<&str>, name: &str) -> Option<Arc<DynamicObject>> {
        let mut reference = ObjectRef::new_with(name, kind.resource());
        if let Some(namespace) = namespace {
            reference = reference.within(namespace);
        }
        self.children.get(&kind)?.get(&reference)
    }

    /// All children of a kind.
    pub fn children(&self, kind: ChildKind) -> Vec<Arc<DynamicObject>> {
        self.children.get(&kind).map(Store::state).unwrap_or_default()
    }

    /// All children of a kind that belong to a cluster.
    pub fn children_of(&self, kind: ChildKind, cluster_uid: &str) -> Vec<Arc<DynamicObject>> {
        let store = self.children.get(&kind);
        let is_theirs =
            |child: &DynamicObject| child.labels().get(CLUSTER_UID).is_some_and(|uid| uid == cluster_uid);
        store.map(|store| store.state_filter(is_theirs)).unwrap_or_default()
    }
}
