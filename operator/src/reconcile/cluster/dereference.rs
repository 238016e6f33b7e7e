//! Reads the objects that a cluster refers to: pools, tenants, profiles, nodes, workloads and its etcd.

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
use super::external_etcd::EtcdCheck;
use super::versions::has_ready_pods;
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::framework::refusal::Refusal;
use crate::reconcile::assignment::{ClusterAssignment, PoolAssignment};
use crate::reconcile::authority::{self, AuthorityState};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::{MembersVersion, StateResult};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::profile::files;
use crate::reconcile::tenant;
use crate::settings::DefaultImages;

/// Inputs of the agents' configuration other than the cluster itself.
#[derive(Clone, Debug)]
pub struct AgentConfigInputs {
    /// Identity of the cluster, from which names of children derive.
    pub names: ClusterNames,
    /// The pools that it names, in the order of the spec.
    pub pools: Vec<NamedPool>,
    /// Tenants that apply to the cluster.
    pub tenants: Vec<Arc<CacheTenant>>,
    /// The agents' current configuration. While all pools are rejected, it is the only record of settings
    /// accepted before.
    pub running: Option<String>,
}

impl AgentConfigInputs {
    /// Returns the names of its pools of raw devices.
    pub fn raw_pools(&self) -> impl Iterator<Item = &str> {
        let key = self.names.key();
        let is_raw =
            move |named: &&NamedPool| named.bound_pool(&key).is_some_and(|pool| pool.spec.devices.is_some());
        self.pools.iter().filter(is_raw).map(|named| named.name.as_str())
    }
}

/// The objects that a cluster refers to.
#[derive(Clone, Debug)]
pub struct ClusterInputs {
    /// Inputs of the agents' configuration.
    pub agent_config: AgentConfigInputs,
    /// Nodes of the cluster.
    pub assignment: ClusterAssignment,
    /// `CacheNode`s of its nodes, with the agents' reports.
    pub cache_nodes: Vec<Arc<CacheNode>>,
    /// Assignment of pods to tenants.
    pub bindings: PodBindings,
    /// Profile files that are mounted next to the agents' configuration.
    pub profiles: BTreeMap<String, String>,
    /// Images of its pods.
    pub images: DefaultImages,
    /// Result of the last check of an external etcd.
    pub store: Option<EtcdCheck>,
    /// DaemonSet of the agents, if it exists.
    pub agents: Option<Arc<DynamicObject>>,
    /// StatefulSet of the members, if it exists.
    pub members: Option<Arc<DynamicObject>>,
    /// State reported by the control plane; `None` if no member is ready.
    pub control_plane_state: Option<StateResult>,
    /// The StatefulSet of a managed etcd.
    pub etcd: Option<Arc<DynamicObject>>,
    /// Set if etcd's volumes cannot be provisioned: why.
    pub volumes: Option<String>,
    /// Set if the CA of etcd's certificates is lost.
    pub authority: Option<Refusal>,
    /// Authority of the certificates of agents and members.
    pub certificates: AuthorityState,
    /// Optional kinds, and whether the operator can create them here.
    pub access: BTreeMap<ChildKind, KindAccess>,
}

/// A pool that a cluster names.
#[derive(Clone, Debug)]
pub struct NamedPool {
    /// Name of the pool.
    pub name: String,
    /// The pool, if it exists.
    pub pool: Option<Arc<SSDPool>>,
    /// Cluster and nodes that the pool is assigned to.
    pub assignment: PoolAssignment,
}

impl NamedPool {
    /// Returns the pool if it is assigned to this cluster.
    pub fn bound_pool(&self, cluster: &str) -> Option<&SSDPool> {
        let has = self.assignment.is_used() && self.assignment.cluster.as_deref() == Some(cluster);
        self.pool.as_deref().filter(|_| has)
    }
}

/// Reads the inputs of the agents' configuration from the local stores.
pub fn agent_config_inputs(cluster: &KVCacheCluster, context: &Context) -> AgentConfigInputs {
    let (names, stores) = (ClusterNames::of(cluster), &context.stores);
    let assignment = stores.assignment();
    let pools = cluster.spec.pools.iter().map(|pool| NamedPool {
        name: pool.name.to_string(),
        pool: stores.pools.get(&ObjectRef::new(pool.name.as_str())),
        assignment: assignment.pools.get(pool.name.as_str()).cloned().unwrap_or_default(),
    });
    let map = stores.children.get(ChildKind::ConfigMap, Some(&names.namespace), &names.agent());
    let running = map.and_then(|map| Some(map.data["data"][AGENT_FILE].as_str()?.to_owned()));
    AgentConfigInputs { pools: pools.collect(), tenants: tenants(context, &names), running, names }
}

/// Reads all inputs of a cluster. It polls an external etcd and the members of the control plane.
pub async fn dereference(cluster: &KVCacheCluster, context: &Context) -> ClusterInputs {
    let (agent_config, stores) = (agent_config_inputs(cluster, context), &context.stores);
    let names = &agent_config.names;
    stores.secrets.follow(names, &context.client, (stores, &context.triggers)).await;
    let own = stores.assignment().cluster(cluster).cloned().unwrap_or_default();
    let cache_nodes = own.nodes.iter().filter_map(|node| {
        let found = stores.cache_nodes.get(&ObjectRef::new(node))?;
        belongs_to(&found, names).then_some(found)
    });
    let cache_nodes: Vec<Arc<CacheNode>> = cache_nodes.collect();
    let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
    let set = |name: &str| stores.children.get(ChildKind::StatefulSet, Some(&names.namespace), name);
    let (members, etcd) = (set(&names.control_plane()), set(&names.etcd()));
    let control_plane_state = match members.as_deref() {
        Some(members) if has_ready_pods(members) => Some(member_state(members, names, context).await),
        _ => None,
    };
    ClusterInputs {
        bindings: tenant::pods::assign(names, context).bindings,
        profiles: files::of(cluster, names, &cache_nodes, context),
        cache_nodes,
        images: images(&cluster.spec.images, &context.settings.images),
        store: context.store_checks.check(cluster, context).await,
        agents: stores.children.get(ChildKind::DaemonSet, Some(&names.namespace), &names.agent()),
        members,
        control_plane_state,
        volumes: context.storage_classes.problem(cluster, etcd.as_deref(), context).await,
        authority: certificates::lost_authority(cluster, context),
        certificates: authority::read(cluster, context).await,
        etcd,
        access: optional.map(|kind| (kind, stores.children.access(kind))).collect(),
        assignment: own,
        agent_config,
    }
}

/// Returns the state reported by members that is at least as new as their StatefulSet. A state cached before
/// a rollout describes replaced members.
async fn member_state(members: &DynamicObject, names: &ClusterNames, context: &Context) -> StateResult {
    let version = MembersVersion(members.resource_version().unwrap_or_default());
    context.control_planes.require_members_version(names, version).await;
    context.control_planes.state(names, &context.metrics).await
}

/// Whether a node belongs to a cluster.
pub fn belongs_to(node: &CacheNode, cluster: &ClusterNames) -> bool {
    node.spec.cluster_ref.as_ref().is_some_and(|named| {
        named.name.as_str() == cluster.name && named.namespace.as_str() == cluster.namespace
    })
}

/// Returns the accepted tenants that apply to a cluster, by name.
pub fn tenants(context: &Context, cluster: &ClusterNames) -> Vec<Arc<CacheTenant>> {
    let is_right =
        |tenant: &CacheTenant| applies_to(tenant, cluster) && tenant::validate::validate(tenant).is_none();
    let mut tenants = context.stores.tenants.state_filter(is_right);
    tenants.sort_by_key(|tenant| tenant.name_any());
    tenants
}

/// Whether a tenant applies to a cluster.
pub fn applies_to(tenant: &CacheTenant, cluster: &ClusterNames) -> bool {
    let named = &tenant.spec.clusters;
    let is_it = |named: &reprise_crds::fields::ClusterRef| {
        named.name.as_str() == cluster.name && named.namespace.as_str() == cluster.namespace
    };
    named.is_empty() || named.iter().any(is_it)
}

/// Returns the images of a cluster's spec, with the operator's defaults.
pub fn images(specified: &Images, released: &DefaultImages) -> DefaultImages {
    let of = |image: &Option<Image>, released: &str| match image {
        None => released.to_owned(),
        Some(Image { repository, tag, digest }) => match (tag, digest) {
            (_, Some(digest)) => format!("{repository}@{digest}"),
            (Some(tag), None) => format!("{repository}:{tag}"),
            (None, None) => repository.to_string(),
        },
    };
    DefaultImages {
        agent: of(&specified.agent, &released.agent),
        control_plane: of(&specified.control_plane, &released.control_plane),
        etcd: of(&specified.etcd, &released.etcd),
        operator: released.operator.clone(),
    }
}
