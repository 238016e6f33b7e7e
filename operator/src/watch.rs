//! Watches: fill the stores and say what has to be reconciled.
//!
//! | changed | reconciled |
//! |---|---|
//! | spec of a cluster, pool, tenant or profile, or whether a cluster or pool is accepted | everything: the plan may have changed |
//! | name or labels of a node | it, all clusters, pools, profiles and allocations |
//! | name or labels of a namespace | all clusters, and tenants that name pods, if there are such tenants |
//! | anything else of these, except what the operator has written last itself | it |
//! | a child | its cluster |
//! | a CacheNode | its node, its cluster, the pools that it has or had, one of its allocations, which decides for all of them |
//! | spec of a CacheNode, if the plan has changed by what its node had | everything |
//! | spec of a CacheNode, its GPUs, or what it says of profiles and of whose pods are whose | profiles of its cluster's namespace, tenants that name pods |
//! | anything of a profile | allocations that name it |
//! | anything of an allocation | its node, whose agent is told of grants |
//! | spec of an allocation | another one of its node: one that is gone decides nothing |
//! | what was decided of a profile | nodes that it was decided for, clusters of its namespace ([`crate::profile::apply`]) |
//!
//! A status or condition that a reconcile has written does not trigger that reconcile again ([`own`]); what depends on it is reconciled all the same.
//!
//! Nothing is reconciled before all stores have been filled ([`Triggers::open`]): a half-known world would look like one in which much
//! was deleted. After a watch was lost and everything was read again, all is reconciled, since deletions may have been missed.

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

use crate::names::{CLUSTER_UID, MANAGED_BY, OPERATOR};
use crate::node::apply::is_of_other_maker;
use crate::optional;
use crate::tenant::pods;
use crate::world::{World, Writers};

mod news;
pub(crate) mod own;

use news::{News, Seen, Watched, strip};
pub(crate) use news::{is_by_operator, own_of};
use own::OwnWrites;

/// Requests that wait for a queue, which takes them at once: it keeps one for each object.
const REQUESTS_MAX: usize = 1024;

/// A watch that has failed begins again after so long, at the most.
const PAUSE_MAX: Duration = Duration::from_secs(5);

/// The condition of a watch that was lost, in the log.
const WATCH_LOST: &str = "watch_lost";

/// Where requests to reconcile go.
#[derive(Debug)]
pub struct Triggers {
    open: AtomicBool,
    /// What this process has written last.
    pub(crate) own: OwnWrites,
    clusters: Sender<ObjectRef<KVCacheCluster>>,
    pools: Sender<ObjectRef<SSDPool>>,
    nodes: Sender<ObjectRef<Node>>,
    tenants: Sender<ObjectRef<CacheTenant>>,
    profiles: Sender<ObjectRef<SlackProfile>>,
    allocations: Sender<ObjectRef<GPUQueueAllocation>>,
}

/// Where they come from.
#[derive(Debug)]
pub struct Requests {
    /// Of clusters.
    pub clusters: Receiver<ObjectRef<KVCacheCluster>>,
    /// Of pools.
    pub pools: Receiver<ObjectRef<SSDPool>>,
    /// Of nodes.
    pub nodes: Receiver<ObjectRef<Node>>,
    /// Of tenants.
    pub tenants: Receiver<ObjectRef<CacheTenant>>,
    /// Of profiles.
    pub profiles: Receiver<ObjectRef<SlackProfile>>,
    /// Of allocations.
    pub allocations: Receiver<ObjectRef<GPUQueueAllocation>>,
}

impl Triggers {
    /// Closed ones.
    pub fn new() -> (Triggers, Requests) {
        let (clusters, cluster_requests) = channel(REQUESTS_MAX);
        let (pools, pool_requests) = channel(REQUESTS_MAX);
        let (nodes, node_requests) = channel(REQUESTS_MAX);
        let (tenants, tenant_requests) = channel(REQUESTS_MAX);
        let (profiles, profile_requests) = channel(REQUESTS_MAX);
        let (allocations, allocation_requests) = channel(REQUESTS_MAX);
        let open = AtomicBool::new(false);
        let own = OwnWrites::default();
        let triggers = Triggers { open, own, clusters, pools, nodes, tenants, profiles, allocations };
        let requests = Requests {
            clusters: cluster_requests,
            pools: pool_requests,
            nodes: node_requests,
            tenants: tenant_requests,
            profiles: profile_requests,
            allocations: allocation_requests,
        };
        (triggers, requests)
    }

    /// From now on requests pass. Everything is asked for once.
    pub async fn open(&self, world: &World) {
        self.open.store(true, Ordering::Release);
        self.everything(world).await;
    }

    /// Everything that there is.
    async fn everything(&self, world: &World) {
        self.all_clusters_and_pools(world).await;
        for node in world.nodes.state() {
            self.send(&self.nodes, &*node).await;
        }
        for tenant in world.tenants.state() {
            self.send(&self.tenants, &*tenant).await;
        }
        self.all_profiles(world).await;
        self.all_allocations(world).await;
    }

    async fn all_allocations(&self, world: &World) {
        for allocation in world.allocations.state() {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// An allocation, of which something could not be written.
    pub(crate) async fn allocation(&self, allocation: &GPUQueueAllocation) {
        self.send(&self.allocations, allocation).await;
    }

    /// Allocations that name a profile: they are refused by what its status says.
    async fn allocations_with(&self, world: &World, profile: &SlackProfile) {
        let (namespace, name) = (profile.namespace().unwrap_or_default(), profile.name_any());
        let names_it = |allocation: &GPUQueueAllocation| {
            let named = allocation.spec.slack_profile_ref.as_ref();
            is_in(allocation, &namespace) && named.is_some_and(|named| named.name.as_str() == name)
        };
        for allocation in world.allocations.state_filter(names_it) {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// One allocation of a node, whose reconcile is about all of them.
    async fn one_allocation(&self, world: &World, node: &str) {
        let of_node = |allocation: &GPUQueueAllocation| allocation.spec.node_name.as_str() == node;
        if let Some(allocation) = world.allocations.find(of_node) {
            self.send(&self.allocations, &*allocation).await;
        }
    }

    /// All clusters.
    pub(crate) async fn all_clusters(&self, world: &World) {
        for cluster in world.clusters.state() {
            self.send(&self.clusters, &*cluster).await;
        }
    }

    async fn all_clusters_and_pools(&self, world: &World) {
        self.all_clusters(world).await;
        for pool in world.pools.state() {
            self.send(&self.pools, &*pool).await;
        }
    }

    async fn all_profiles(&self, world: &World) {
        for profile in world.profiles.state() {
            self.send(&self.profiles, &*profile).await;
        }
    }

    /// Clusters, where pods of namespaces are told from each other, and the tenants that name such.
    async fn who_is_who(&self, world: &World) {
        if world.tenants.find(pods::names_pods).is_none() {
            return;
        }
        self.all_clusters(world).await;
        self.naming_tenants(world).await;
    }

    /// Tenants that name pods.
    async fn naming_tenants(&self, world: &World) {
        for tenant in world.tenants.state_filter(pods::names_pods) {
            self.send(&self.tenants, &*tenant).await;
        }
    }

    /// Clusters of a namespace.
    pub(crate) async fn clusters_in(&self, world: &World, namespace: &str) {
        for cluster in world.clusters.state_filter(|cluster| is_in(cluster, namespace)) {
            self.send(&self.clusters, &*cluster).await;
        }
    }

    /// Nodes by their names.
    pub(crate) async fn nodes_named(&self, world: &World, names: &BTreeSet<String>) {
        for name in names {
            if let Some(node) = world.nodes.get(&ObjectRef::new(name)) {
                self.send(&self.nodes, &*node).await;
            }
        }
    }

    async fn send<K>(&self, to: &Sender<ObjectRef<K>>, object: &K)
    where
        K: Resource<DynamicType = ()>,
    {
        if self.open.load(Ordering::Acquire) {
            // Fails when the queues are shutting down: nobody waits for it any more.
            let _ = to.send(ObjectRef::from_obj(object)).await;
        }
    }

    async fn cache_node(&self, world: &World, cache_node: &CacheNode, news: News) {
        if news == News::Spec && world.held_changed(&cache_node.name_any()) {
            self.everything(world).await;
        }
        self.one_allocation(world, &cache_node.name_any()).await;
        // Of its own condition the node has nothing left to do.
        let node = world.nodes.get(&ObjectRef::new(&cache_node.name_any()));
        if let Some(node) = node.filter(|_| news != News::Own) {
            self.send(&self.nodes, &*node).await;
        }
        if news == News::Spec && is_of_other_maker(cache_node) {
            // The conditions of the cluster that selects the node name it.
            self.all_clusters(world).await;
        }
        let of_cluster = cache_node.spec.cluster_ref.as_ref().and_then(|cluster| {
            world.clusters.get(&ObjectRef::new(cluster.name.as_str()).within(cluster.namespace.as_str()))
        });
        if let Some(cluster) = of_cluster {
            self.send(&self.clusters, &*cluster).await;
        }
        if let (News::Spec, Some(cluster)) = (news, &cache_node.spec.cluster_ref) {
            self.naming_tenants(world).await;
            let namespace = cluster.namespace.as_str();
            for profile in world.profiles.state_filter(|profile| is_in(profile, namespace)) {
                self.send(&self.profiles, &*profile).await;
            }
        }
        let claimed = cache_node.spec.claims.iter().map(|claim| &claim.pool);
        let devices = cache_node.status.iter().flat_map(|status| &status.devices).map(|device| &device.pool);
        let mut pools: Vec<&str> = claimed.chain(devices).map(|pool| pool.as_str()).collect();
        pools.sort_unstable();
        pools.dedup();
        for name in pools {
            if let Some(pool) = world.pools.get(&ObjectRef::new(name)) {
                self.send(&self.pools, &*pool).await;
            }
        }
    }
}

fn is_in<K: Resource>(object: &K, namespace: &str) -> bool {
    object.meta().namespace.as_deref() == Some(namespace)
}

/// Starts all watches. They end with the set.
pub fn start(client: &Client, world: &Arc<World>, writers: Writers, triggers: &Arc<Triggers>) -> JoinSet<()> {
    let mut tasks = JoinSet::new();
    let on = || On { world: Arc::clone(world), triggers: Arc::clone(triggers) };
    let all = || watcher::Config::default();
    tasks.spawn(follow(
        Api::<KVCacheCluster>::all(client.clone()),
        all(),
        writers.clusters,
        on(),
        |on, object, news| {
            Box::pin(async move {
                on.itself(&on.triggers.clusters, object, news).await;
                on.wide(news).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<SSDPool>::all(client.clone()),
        all(),
        writers.pools,
        on(),
        |on, object, news| {
            Box::pin(async move {
                on.itself(&on.triggers.pools, object, news).await;
                on.wide(news).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<CacheTenant>::all(client.clone()),
        all(),
        writers.tenants,
        on(),
        |on, object, news| {
            Box::pin(async move {
                on.itself(&on.triggers.tenants, object, news).await;
                on.wide(news).await;
            })
        },
    ));
    tasks.spawn(follow(
        Api::<SlackProfile>::all(client.clone()),
        all(),
        writers.profiles,
        on(),
        |on, object, news| {
            Box::pin(async move {
                on.itself(&on.triggers.profiles, object, news).await;
                on.triggers.allocations_with(&on.world, object).await;
                on.wide(news).await;
            })
        },
    ));
    let allocations = Api::<GPUQueueAllocation>::all(client.clone());
    tasks.spawn(follow(allocations, all(), writers.allocations, on(), |on, object, news| {
        Box::pin(async move {
            // The end of a grant is scheduled by the reconcile that sees it in the status.
            let ends = object.status.as_ref().is_some_and(|status| status.expires_at.is_some());
            let news_of_it = if ends && news == News::Own { News::Other } else { news };
            on.itself(&on.triggers.allocations, object, news_of_it).await;
            // One that is gone decides nothing, and others may have its room.
            let node = object.spec.node_name.as_str();
            if news == News::Spec {
                on.triggers.one_allocation(&on.world, node).await;
            }
            on.triggers.nodes_named(&on.world, &BTreeSet::from([node.to_owned()])).await;
        })
    }));
    tasks.spawn(follow(Api::<Node>::all(client.clone()), all(), writers.nodes, on(), |on, object, news| {
        Box::pin(async move {
            if news == News::Spec {
                on.world.changed();
                on.triggers.all_clusters_and_pools(&on.world).await;
                on.triggers.all_profiles(&on.world).await;
                on.triggers.all_allocations(&on.world).await;
            }
            on.itself(&on.triggers.nodes, object, news).await;
        })
    }));
    let namespaces = Api::<Namespace>::all(client.clone());
    tasks.spawn(follow(namespaces, all(), writers.namespaces, on(), |on, _, news| {
        Box::pin(async move {
            if news == News::Spec {
                on.triggers.who_is_who(&on.world).await;
            }
        })
    }));
    tasks.spawn(follow(
        Api::<CacheNode>::all(client.clone()),
        all(),
        writers.cache_nodes,
        on(),
        |on, object, news| Box::pin(on.triggers.cache_node(&on.world, object, news)),
    ));
    for (kind, writer) in writers.children {
        let api: Api<DynamicObject> = Api::all_with(client.clone(), &kind.resource());
        let ours = watcher::Config::default().labels(&format!("{MANAGED_BY}={OPERATOR}"));
        let following = follow(api, ours, writer, on(), |on, object, _| Box::pin(on.child(object)));
        if kind.is_optional() {
            let (world, triggers) = (Arc::clone(world), Arc::clone(triggers));
            tasks.spawn(optional::follow(client.clone(), kind, world, triggers, following));
        } else {
            tasks.spawn(following);
        }
    }
    tasks
}

/// What happens on a change has this to work with.
struct On {
    world: Arc<World>,
    triggers: Arc<Triggers>,
}

impl On {
    /// The object itself is reconciled, unless the event only shows what its last reconcile wrote.
    async fn itself<K>(&self, to: &Sender<ObjectRef<K>>, object: &K, news: News)
    where
        K: Resource<DynamicType = ()>,
    {
        if news != News::Own {
            self.triggers.send(to, object).await;
        }
    }

    /// A child has changed: its cluster is looked at, or it has none any more.
    async fn child(&self, child: &DynamicObject) {
        let cluster = child.labels().get(CLUSTER_UID).and_then(|uid| self.world.cluster_of_uid(uid));
        match cluster {
            Some(cluster) => self.triggers.send(&self.triggers.clusters, &*cluster).await,
            None => self.world.orphaned(),
        }
    }

    /// Whatever the plan may have changed for.
    async fn wide(&self, news: News) {
        if news == News::Spec {
            self.world.changed();
            self.world.orphaned();
            self.triggers.everything(&self.world).await;
        }
    }
}

/// Pauses of a watch that cannot begin: kube's own, and no longer than [`PAUSE_MAX`], since a replica that has just got the lease sees nothing before. A
/// few replicas with a dozen watches each ask no API server too much.
#[derive(Default)]
struct Pauses(DefaultBackoff);

impl Iterator for Pauses {
    type Item = Duration;

    fn next(&mut self) -> Option<Duration> {
        self.0.next().map(|pause| pause.min(PAUSE_MAX))
    }
}

impl Backoff for Pauses {
    fn reset(&mut self) {
        self.0.reset();
    }
}

/// Follows one kind for ever. A watch that fails begins again, with a delay that grows.
async fn follow<K, F>(api: Api<K>, config: watcher::Config, writer: Writer<K>, on: On, changed: F)
where
    K: Watched + Clone + DeserializeOwned + Debug + Send + Sync + 'static,
    K::DynamicType: Clone + Eq + std::hash::Hash,
    F: for<'a> Fn(&'a On, &'a K, News) -> BoxFuture<'a, ()>,
{
    let mut seen = Seen::default();
    let stream = watcher(api, config).backoff(Pauses::default()).modify(strip);
    let mut events = std::pin::pin!(reflector(writer, stream));
    while let Some(event) = events.next().await {
        match event {
            Ok(Event::Apply(object) | Event::InitApply(object)) => {
                let news = seen.see(&object, &on.triggers.own);
                changed(&on, &object, news).await;
            }
            Ok(Event::Delete(object)) => {
                seen.forget(&object, &on.triggers.own);
                changed(&on, &object, News::Spec).await;
            }
            Ok(Event::Init) => {}
            Ok(Event::InitDone) => {
                let kind = std::any::type_name::<K>();
                tracing::info!(recovered = WATCH_LOST, kind, "a watch goes on");
                on.wide(News::Spec).await;
            }
            Err(error) => {
                let kind = std::any::type_name::<K>();
                tracing::warn!(condition = WATCH_LOST, %error, kind, "a watch was lost and begins again");
            }
        }
    }
}
