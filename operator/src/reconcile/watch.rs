//! Watches: fill the stores and enqueue the objects to reconcile.
//!
//! | changed | reconciled |
//! |---|---|
//! | spec of a cluster, pool, tenant or profile; acceptance of a cluster or pool | everything: the assignment may have changed |
//! | name or labels of a node | the node, all clusters, pools, profiles and allocations |
//! | name or labels of a namespace | all clusters and the tenants that select pods, if such tenants exist |
//! | any other part of these objects, except the operator's own last write | the object |
//! | a child | its cluster |
//! | a `CacheNode` | its node, its cluster, the pools of its claims and devices, one of its allocations |
//! | spec of a `CacheNode`, if that changes the assignment | everything |
//! | spec, GPUs, applied profiles or applied tenants of a `CacheNode` | profiles of its cluster's namespace, tenants that select pods |
//! | any part of a profile | allocations that name it |
//! | any part of an allocation | its node, because the `CacheNode` contains the grants |
//! | spec of an allocation | one allocation of its node |
//! | chosen revision of a profile | affected nodes, clusters of its namespace ([`crate::reconcile::profile::apply`]) |
//!
//! The reconcile of one allocation decides about all allocations of its node. So one is enough, and a deleted
//! allocation requires another one of the node.
//!
//! A status that a reconcile wrote does not trigger the same reconcile again ([`crate::framework::own_writes`]). Reconciles of
//! dependent objects are triggered.
//!
//! Nothing is reconciled before all stores are filled ([`Triggers::open`]): missing objects would look like
//! deleted ones. After a watch was lost and its objects were listed again, everything is reconciled, because
//! deletions may have been missed.

use std::collections::BTreeSet;
use std::fmt::Debug;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use futures_util::StreamExt;
use futures_util::future::BoxFuture;
use k8s_openapi::api::core::v1::{Namespace, Node};
use kube::api::{Api, DynamicObject};
use kube::runtime::reflector::store::Writer;
use kube::runtime::reflector::{ObjectRef, reflector};
use kube::runtime::utils::Backoff;
use kube::runtime::watcher::{DefaultBackoff, Event};
use kube::runtime::{WatchStreamExt, watcher};
use kube::{Client, Resource, ResourceExt};
use reprise_crds::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool, SlackProfile};
use serde::de::DeserializeOwned;
use tokio::sync::mpsc::{Receiver, Sender, channel};
use tokio::task::JoinSet;

use crate::framework::labels::{CLUSTER_UID, MANAGED_BY, OPERATOR};
use crate::framework::optional_kinds;
use crate::reconcile::node::apply::is_foreign;
use crate::reconcile::stores::{Stores, Writers};
use crate::reconcile::tenant::pods;

mod change;

use crate::framework::own_writes::OwnWrites;
pub(crate) use change::is_by_operator;
use change::{Change, LastSeen, WatchedKind, strip};

/// Requests buffered for a queue. The queue takes them at once and keeps one per object.
const REQUESTS_MAX: usize = 1024;

/// Longest delay before a failed watch restarts.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// Key of the log condition for a lost watch.
pub(crate) const WATCH_LOST: &str = "watch_lost";

/// Senders of reconcile requests.
#[derive(Debug)]
pub struct Triggers {
    open: AtomicBool,
    /// Last writes of this process.
    pub(crate) own_writes: Arc<OwnWrites>,
    clusters: Sender<ObjectRef<KVCacheCluster>>,
    pools: Sender<ObjectRef<SSDPool>>,
    nodes: Sender<ObjectRef<Node>>,
    tenants: Sender<ObjectRef<CacheTenant>>,
    profiles: Sender<ObjectRef<SlackProfile>>,
    allocations: Sender<ObjectRef<GPUQueueAllocation>>,
}

/// Receivers of reconcile requests, for the queues.
#[derive(Debug)]
pub struct ReconcileRequests {
    /// Requests to reconcile clusters.
    pub clusters: Receiver<ObjectRef<KVCacheCluster>>,
    /// Requests to reconcile pools.
    pub pools: Receiver<ObjectRef<SSDPool>>,
    /// Requests to reconcile nodes.
    pub nodes: Receiver<ObjectRef<Node>>,
    /// Requests to reconcile tenants.
    pub tenants: Receiver<ObjectRef<CacheTenant>>,
    /// Requests to reconcile profiles.
    pub profiles: Receiver<ObjectRef<SlackProfile>>,
    /// Requests to reconcile allocations.
    pub allocations: Receiver<ObjectRef<GPUQueueAllocation>>,
}

impl Triggers {
    /// Creates closed triggers, which drop requests, and the receivers.
    pub fn new() -> (Triggers, ReconcileRequests) {
        let (clusters, cluster_requests) = channel(REQUESTS_MAX);
        let (pools, pool_requests) = channel(REQUESTS_MAX);
        let (nodes, node_requests) = channel(REQUESTS_MAX);
        let (tenants, tenant_requests) = channel(REQUESTS_MAX);
        let (profiles, profile_requests) = channel(REQUESTS_MAX);
        let (allocations, allocation_requests) = channel(REQUESTS_MAX);
        let open = AtomicBool::new(false);
        let own_writes = Arc::default();
        let triggers = Triggers { open, own_writes, clusters, pools, nodes, tenants, profiles, allocations };
        let requests = ReconcileRequests {
            clusters: cluster_requests,
            pools: pool_requests,
            nodes: node_requests,
            tenants: tenant_requests,
            profiles: profile_requests,
            allocations: allocation_requests,
        };
        (triggers, requests)
    }

    /// Lets requests pass from now on, and enqueues all objects once.
    pub async fn open(&self, stores: &Stores) {
        self.open.store(true, Ordering::Release);
        self.enqueue_everything(stores).await;
    }

    /// Enqueues all objects of all kinds.
    async fn enqueue_everything(&self, stores: &Stores) {
        self.enqueue_clusters_and_pools(stores).await;
        for node in stores.nodes.state() {
            self.send(&self.nodes, &*node).await;
        }
        for tenant in stores.tenants.state() {
            self.send(&self.tenants, &*tenant).await;
        }
        self.enqueue_all_profiles(stores).await;
        self.enqueue_all_allocations(stores).await;
    }

    async fn enqueue_all_allocations(&self, stores: &Stores) {
        for allocation in stores.allocations.state() {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// Enqueues an allocation again after a failed write.
    pub(crate) async fn enqueue_allocation(&self, allocation: &GPUQueueAllocation) {
        self.send(&self.allocations, allocation).await;
    }

    /// Enqueues allocations that name a profile. Its status decides whether they are refused.
    async fn enqueue_allocations_with(&self, stores: &Stores, profile: &SlackProfile) {
        let (namespace, name) = (profile.namespace().unwrap_or_default(), profile.name_any());
        let names_it = |allocation: &GPUQueueAllocation| {
            let named = allocation.spec.slack_profile_ref.as_ref();
            is_in(allocation, &namespace) && named.is_some_and(|named| named.name.as_str() == name)
        };
        for allocation in stores.allocations.state_filter(names_it) {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// Enqueues one allocation of a node. Its reconcile decides about all of them.
    async fn enqueue_one_allocation(&self, stores: &Stores, node: &str) {
        let of_node = |allocation: &GPUQueueAllocation| allocation.spec.node_name.as_str() == node;
        if let Some(allocation) = stores.allocations.find(of_node) {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// Enqueues a cluster whose Secret has changed.
    pub(crate) async fn enqueue_cluster(&self, cluster: &KVCacheCluster) {
        self.send(&self.clusters, cluster).await;
    }

    /// Enqueues all clusters for reconciling.
    pub(crate) async fn enqueue_all_clusters(&self, stores: &Stores) {
        for cluster in stores.clusters.state() {
            self.send(&self.clusters, &*cluster).await;
        }
    }

    async fn enqueue_clusters_and_pools(&self, stores: &Stores) {
        self.enqueue_all_clusters(stores).await;
        for pool in stores.pools.state() {
            self.send(&self.pools, &*pool).await;
        }
    }

    async fn enqueue_all_profiles(&self, stores: &Stores) {
        for profile in stores.profiles.state() {
            self.send(&self.profiles, &*profile).await;
        }
    }

    /// Enqueues all clusters and the tenants that select pods, if there are such tenants.
    async fn enqueue_pod_assignment(&self, stores: &Stores) {
        if stores.tenants.find(pods::selects_pods).is_none() {
            return;
        }
        self.enqueue_all_clusters(stores).await;
        self.enqueue_pod_tenants(stores).await;
    }

    /// Enqueues tenants that select pods.
    async fn enqueue_pod_tenants(&self, stores: &Stores) {
        for tenant in stores.tenants.state_filter(pods::selects_pods) {
            self.send(&self.tenants, &*tenant).await;
        }
    }

    /// Enqueues clusters of a namespace.
    pub(crate) async fn enqueue_clusters_in(&self, stores: &Stores, namespace: &str) {
        for cluster in stores.clusters.state_filter(|cluster| is_in(cluster, namespace)) {
            self.send(&self.clusters, &*cluster).await;
        }
    }

    /// Enqueues nodes by name.
    pub(crate) async fn enqueue_nodes(&self, stores: &Stores, names: &BTreeSet<String>) {
        for name in names {
            if let Some(node) = stores.nodes.get(&ObjectRef::new(name)) {
                self.send(&self.nodes, &*node).await;
            }
        }
    }

    async fn send<K>(&self, to: &Sender<ObjectRef<K>>, object: &K)
    where
        K: Resource<DynamicType = ()>,
    {
        if self.open.load(Ordering::Acquire) {
            // Fails only while the queues are shutting down.
            let _ = to.send(ObjectRef::from_obj(object)).await;
        }
    }

    async fn enqueue_for_cache_node(&self, stores: &Stores, cache_node: &CacheNode, change: Change) {
        if change == Change::Spec && stores.cache_node_changed(&cache_node.name_any()) {
            self.enqueue_everything(stores).await;
        }
        self.enqueue_one_allocation(stores, &cache_node.name_any()).await;
        // A change of the operator's own condition requires nothing of the node.
        let node = stores.nodes.get(&ObjectRef::new(&cache_node.name_any()));
        if let Some(node) = node.filter(|_| change != Change::OwnWrite) {
            self.send(&self.nodes, &*node).await;
        }
        if change == Change::Spec && is_foreign(cache_node) {
            // Conditions of the cluster that selects the node name this CacheNode.
            self.enqueue_all_clusters(stores).await;
        }
        let of_cluster = cache_node.spec.cluster_ref.as_ref().and_then(|cluster| {
            stores.clusters.get(&ObjectRef::new(cluster.name.as_str()).within(cluster.namespace.as_str()))
        });
        if let Some(cluster) = of_cluster {
            self.send(&self.clusters, &*cluster).await;
        }
        if let (Change::Spec, Some(cluster)) = (change, &cache_node.spec.cluster_ref) {
            self.enqueue_pod_tenants(stores).await;
            let namespace = cluster.namespace.as_str();
            for profile in stores.profiles.state_filter(|profile| is_in(profile, namespace)) {
                self.send(&self.profiles, &*profile).await;
            }
        }
        let claimed = cache_node.spec.claims.iter().map(|claim| &claim.pool);
        let devices = cache_node.status.iter().flat_map(|status| &status.devices).map(|device| &device.pool);
        let mut pools: Vec<&str> = claimed.chain(devices).map(|pool| pool.as_str()).collect();
        pools.sort_unstable();
        pools.dedup();
        for name in pools {
            if let Some(pool) = stores.pools.get(&ObjectRef::new(name)) {
                self.send(&self.pools, &*pool).await;
            }
        }
    }
}

fn is_in<K: Resource>(object: &K, namespace: &str) -> bool {
    object.meta().namespace.as_deref() == Some(namespace)
}

/// Starts all watches. They end when the set is dropped.
pub fn start(
    client: &Client,
    stores: &Arc<Stores>,
    writers: Writers,
    triggers: &Arc<Triggers>,
) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let on = || Handler { stores: Arc::clone(stores), triggers: Arc::clone(triggers) };
    let all = || watcher::Config::default();
    tasks.spawn(follow(
        Api::<KVCacheCluster>::all(client.clone()),
        all(),
        writers.clusters,
        on(),
        |on, object, change| {
            Box::pin(async move {
                on.enqueue_self(&on.triggers.clusters, object, change).await;
                on.handle_spec_change(change).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<SSDPool>::all(client.clone()),
        all(),
        writers.pools,
        on(),
        |on, object, change| {
            Box::pin(async move {
                on.enqueue_self(&on.triggers.pools, object, change).await;
                on.handle_spec_change(change).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<CacheTenant>::all(client.clone()),
        all(),
        writers.tenants,
        on(),
        |on, object, change| {
            Box::pin(async move {
                on.enqueue_self(&on.triggers.tenants, object, change).await;
                on.handle_spec_change(change).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<SlackProfile>::all(client.clone()),
        all(),
        writers.profiles,
        on(),
        |on, object, change| {
            Box::pin(async move {
                on.enqueue_self(&on.triggers.profiles, object, change).await;
                on.triggers.enqueue_allocations_with(&on.stores, object).await;
                on.handle_spec_change(change).await;
            })
        },
    ));
    let allocations = Api::<GPUQueueAllocation>::all(client.clone());
    tasks.spawn(follow(allocations, all(), writers.allocations, on(), |on, object, change| {
        Box::pin(async move {
            // Also for an own write: the reconcile that sees the end of a grant in the status schedules it.
            let ends = object.status.as_ref().is_some_and(|status| status.expires_at.is_some());
            let own_change = if ends && change == Change::OwnWrite { Change::Other } else { change };
            on.enqueue_self(&on.triggers.allocations, object, own_change).await;
            // A deleted allocation is not reconciled, but others may get its queues.
            let node = object.spec.node_name.as_str();
            if change == Change::Spec {
                on.triggers.enqueue_one_allocation(&on.stores, node).await;
            }
            on.triggers.enqueue_nodes(&on.stores, &BTreeSet::from([node.to_owned()])).await;
        })
    }));
    tasks.spawn(follow(
        Api::<Node>::all(client.clone()),
        all(),
        writers.nodes,
        on(),
        |on, object, change| {
            Box::pin(async move {
                if change == Change::Spec {
                    on.stores.invalidate_assignment();
                    on.triggers.enqueue_clusters_and_pools(&on.stores).await;
                    on.triggers.enqueue_all_profiles(&on.stores).await;
                    on.triggers.enqueue_all_allocations(&on.stores).await;
                }
                on.enqueue_self(&on.triggers.nodes, object, change).await;
            })
        },
    ));
    let namespaces = Api::<Namespace>::all(client.clone());
    tasks.spawn(follow(namespaces, all(), writers.namespaces, on(), |on, _, change| {
        Box::pin(async move {
            if change == Change::Spec {
                on.triggers.enqueue_pod_assignment(&on.stores).await;
            }
        })
    }));
    tasks.spawn(follow(
        Api::<CacheNode>::all(client.clone()),
        all(),
        writers.cache_nodes,
        on(),
        |on, object, change| Box::pin(on.triggers.enqueue_for_cache_node(&on.stores, object, change)),
    ));
    for (kind, writer) in writers.children {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind.resource());
        let ours = watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"));
        let following = follow(api, ours, writer, on(), |on, object, _| Box::pin(on.child(object)));
        if kind.is_optional() {
            let (stores, triggers) = (Arc::clone(stores), Arc::clone(triggers));
            let children = Arc::clone(&stores.children);
            let on_usable = async move { triggers.enqueue_all_clusters(&stores).await };
            tasks.spawn(optional_kinds::follow(client.clone(), kind, children, on_usable, following));
        } else {
            tasks.spawn(following);
        }
    }
    tasks
}

/// State for handling watch events.
struct Handler {
    stores: Arc<Stores>,
    triggers: Arc<Triggers>,
}

impl Handler {
    /// Enqueues the object itself, unless the event only shows the last write of its reconcile.
    async fn enqueue_self<K>(&self, to: &Sender<ObjectRef<K>>, object: &K, change: Change)
    where
        K: Resource<DynamicType = ()>,
    {
        if change != Change::OwnWrite {
            self.triggers.send(to, object).await;
        }
    }

    /// Handles a changed child: enqueues its cluster, or reports an orphan.
    async fn child(&self, child: &DynamicObject) {
        let cluster = child.labels().get(CLUSTER_UID).and_then(|uid| self.stores.cluster_by_uid(uid));
        match cluster {
            Some(cluster) => self.triggers.send(&self.triggers.clusters, &*cluster).await,
            None => self.stores.notify_orphans(),
        }
    }

    /// Handles a change that may affect the assignment: enqueues everything.
    async fn handle_spec_change(&self, change: Change) {
        if change == Change::Spec {
            self.stores.invalidate_assignment();
            self.stores.notify_orphans();
            self.triggers.enqueue_everything(&self.stores).await;
        }
    }
}

/// Delays of a watch that cannot start: kube's own, capped at [`PAUSE_MAX`], because a new holder of the
/// lease sees no changes until its watches run. A few replicas with a dozen watches each do not overload the API
/// server.
#[derive(Default)]
pub(crate) struct WatchBackoff(DefaultBackoff);

impl Iterator for WatchBackoff {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(PAUSE_MAX))
    }
}

impl Backoff for WatchBackoff {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Watches one kind until the task ends. A failed watch restarts with a growing delay.
async fn follow<K, F>(api: Api<K>, config: watcher::Config, writer: Writer<K>, on: Handler, changed: F)
where
    K: WatchedKind + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Clone + Eq + std::hash::Hash,
    F: for<'a> Fn(&'a Handler, &'a K, Change) -> BoxFuture<'a, ()>,
{
    let mut seen = LastSeen::default();
    let stream = watcher(api, config).backoff(WatchBackoff::default()).modify(strip);
    let mut events = std::pin::pin!(reflector(writer, stream));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                let change = seen.record(&object, &on.triggers.own_writes);
                changed(&on, &object, change).await;
            }
            Ok(Event::Delete(object)) => {
                seen.forget(&object, &on.triggers.own_writes);
                changed(&on, &object, Change::Spec).await;
            }
            Ok(Event::Init) => {}
            Ok(Event::InitDone) => {
                let kind = std::any::type_name::<K>();
                tracing::info!(recovered = WATCH_LOST, kind, "watch established");
                on.handle_spec_change(Change::Spec).await;
            }
            Err(error) => {
                let kind = std::any::type_name::<K>();
                tracing::warn!(condition = WATCH_LOST, %error, kind, "watch lost; restarting it");
            }
        }
    }
}
