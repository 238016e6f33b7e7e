//! Reads what a cluster refers to: pools, tenants, profiles, its nodes, what runs of it, and its store.

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::ResourceExt;
use kube::api::DynamicObject;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::cluster::Images;
use reprise_crds::fields::Image;
use reprise_crds::{CacheNode, CacheTenant, KVCacheCluster, SSDPool};
use reprise_policy::identity::PodBindings;

use super::build::configuration::AGENT_FILE;
use super::certificates;
use super::store::StoreLook;
use super::versions::has_ready_pods;
use crate::child::ChildKind;
use crate::context::Context;
use crate::control_plane::{Look, MembersSeen};
use crate::names::ClusterNames;
use crate::optional::Access;
use crate::plan::{ClusterPlan, PoolPlan, Refusal};
use crate::profile::files;
use crate::settings::DefaultImages;
use crate::tenant;

/// Everything that the agents' configuration is made of, beside the cluster.
#[derive(Clone, Debug)]
pub struct Referred {
    /// The cluster, for names.
    pub names: ClusterNames,
    /// The pools that it names, in the order of the spec.
    pub pools: Vec<NamedPool>,
    /// Tenants that its agents know.
    pub tenants: Vec<Arc<CacheTenant>>,
    /// The configuration that its agents have: of pools that are all refused only this says what was accepted before.
    pub running: Option<String>,
}

impl Referred {
    /// Names of the pools of raw devices that the cluster has.
    pub fn raw_pools(&self) -> impl Iterator<Item = &str> {
        let key = self.names.key();
        let is_raw =
            move |named: &&NamedPool| named.bound(&key).is_some_and(|pool| pool.spec.devices.is_some());
        self.pools.iter().filter(is_raw).map(|named| named.name.as_str())
    }
}

/// What a cluster refers to, as it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// What its agents are configured by.
    pub referred: Referred,
    /// Its nodes.
    pub plan: ClusterPlan,
    /// What its agents say.
    pub cache_nodes: Vec<Arc<CacheNode>>,
    /// Which pods are which tenant's.
    pub bindings: PodBindings,
    /// Contents of profiles, as files beside the agents' configuration.
    pub profiles: BTreeMap<String, String>,
    /// Images of its pods.
    pub images: DefaultImages,
    /// Its store, where somebody else runs it.
    pub store: Option<StoreLook>,
    /// What runs: agents.
    pub agents: Option<Arc<DynamicObject>>,
    /// What runs: members.
    pub members: Option<Arc<DynamicObject>>,
    /// What members say, where one of them serves.
    pub said_by_members: Option<Look>,
    /// What runs: etcd.
    pub etcd: Option<Arc<DynamicObject>>,
    /// What keeps volumes of etcd from coming, in words.
    pub volumes: Option<String>,
    /// That the authority of etcd's certificates is lost, in words.
    pub authority: Option<Refusal>,
    /// Which optional kinds can be made here.
    pub access: BTreeMap<ChildKind, Access>,
}

/// A pool that a cluster names.
#[derive(Clone, Debug)]
pub struct NamedPool {
    /// Its name.
    pub name: String,
    /// It, if it is there.
    pub pool: Option<Arc<SSDPool>>,
    /// What was decided of it.
    pub plan: PoolPlan,
}

impl NamedPool {
    /// The pool, if the cluster has it.
    pub fn bound(&self, cluster: &str) -> Option<&SSDPool> {
        let has = self.plan.is_used() && self.plan.cluster.as_deref() == Some(cluster);
        self.pool.as_deref().filter(|_| has)
    }
}

/// Reads what the agents are configured by, from the stores.
pub fn referred(cluster: &KVCacheCluster, context: &Context) -> Referred {
    let (names, world) = (ClusterNames::of(cluster), &context.world);
    let plan = world.plan();
    let pools = cluster.spec.pools.iter().map(|pool| NamedPool {
        name: pool.name.to_string(),
        pool: world.pools.get(&ObjectRef::new(pool.name.as_str())),
        plan: plan.pools.get(pool.name.as_str()).cloned().unwrap_or_default(),
    });
    let map = world.child(ChildKind::ConfigMap, Some(&names.namespace), &names.agent());
    let running = map.and_then(|map| Some(map.data["data"][AGENT_FILE].as_str()?.to_owned()));
    Referred { pools: pools.collect(), tenants: tenants(context, &names), running, names }
}

/// Reads all of it; a store of somebody else is asked, and members which versions they are.
pub async fn dereference(cluster: &KVCacheCluster, context: &Context) -> Found {
    let (referred, world) = (referred(cluster, context), &context.world);
    let names = &referred.names;
    let own = world.plan().cluster(cluster).cloned().unwrap_or_default();
    let cache_nodes = own.nodes.iter().filter_map(|node| {
        let found = world.cache_nodes.get(&ObjectRef::new(node))?;
        is_of(&found, names).then_some(found)
    });
    let cache_nodes: Vec<Arc<CacheNode>> = cache_nodes.collect();
    let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
    let set = |name: &str| world.child(ChildKind::StatefulSet, Some(&names.namespace), name);
    let (members, etcd) = (set(&names.control_plane()), set(&names.etcd()));
    let said_by_members = match members.as_deref() {
        Some(members) if has_ready_pods(members) => Some(look_at(members, names, context).await),
        _ => None,
    };
    Found {
        bindings: tenant::pods::bound(names, context).bindings,
        profiles: files::of(cluster, names, &cache_nodes, context),
        cache_nodes,
        images: images(&cluster.spec.images, &context.settings.images),
        store: context.store_looks.look(cluster, context).await,
        agents: world.child(ChildKind::DaemonSet, Some(&names.namespace), &names.agent()),
        members,
        said_by_members,
        volumes: context.class_looks.missing(cluster, etcd.as_deref(), context).await,
        authority: certificates::lost(cluster, context),
        etcd,
        access: optional.map(|kind| (kind, world.access(kind))).collect(),
        plan: own,
        referred,
    }
}

/// What members say that are not older than what is seen of them here: a look from before a rollout is of others.
async fn look_at(members: &DynamicObject, names: &ClusterNames, context: &Context) -> Look {
    let seen = MembersSeen(members.resource_version().unwrap_or_default());
    context.control_planes.heed(names, seen).await;
    context.control_planes.look(names, &context.metrics).await
}

/// Whether a node belongs to a cluster.
pub fn is_of(node: &CacheNode, cluster: &ClusterNames) -> bool {
    node.spec.cluster_ref.as_ref().is_some_and(|named| {
        named.name.as_str() == cluster.name && named.namespace.as_str() == cluster.namespace
    })
}

/// Tenants that a cluster's agents know, by name. One that is refused changes nothing.
pub fn tenants(context: &Context, cluster: &ClusterNames) -> Vec<Arc<CacheTenant>> {
    let is_right =
        |tenant: &CacheTenant| knows(tenant, cluster) && tenant::validate::validate(tenant).is_none();
    let mut tenants = context.world.tenants.state_filter(is_right);
    tenants.sort_by_key(|tenant| tenant.name_any());
    tenants
}

/// Whether a tenant is one of a cluster's.
pub fn knows(tenant: &CacheTenant, cluster: &ClusterNames) -> bool {
    let named = &tenant.spec.clusters;
    let is_it = |named: &reprise_crds::fields::ClusterRef| {
        named.name.as_str() == cluster.name && named.namespace.as_str() == cluster.namespace
    };
    named.is_empty() || named.iter().any(is_it)
}

/// What the cluster says, else what the operator was released with.
pub fn images(said: &Images, released: &DefaultImages) -> DefaultImages {
    let of = |image: &Option<Image>, released: &str| match image {
        None => released.to_owned(),
        Some(Image { repository, tag, digest }) => match (tag, digest) {
            (_, Some(digest)) => format!("{repository}@{digest}"),
            (Some(tag), None) => format!("{repository}:{tag}"),
            (None, None) => repository.to_string(),
        },
    };
    DefaultImages {
        agent: of(&said.agent, &released.agent),
        control_plane: of(&said.control_plane, &released.control_plane),
        etcd: of(&said.etcd, &released.etcd),
    }
}
