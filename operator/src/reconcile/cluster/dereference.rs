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

use super::etcd::external::EtcdCheck;
use super::etcd::{is_starting, volumes};
use super::workloads::Pods;
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::reconcile::assignment::{ClusterAssignment, PoolAssignment};
use crate::reconcile::authority::{self, AuthorityState};
use crate::reconcile::context::Context;
use crate::reconcile::control_plane::StateResult;
use crate::reconcile::membership::{belongs_to, tenants};
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
}

/// A pool that a cluster names.
#[derive(Clone, Debug)]
pub struct NamedPool {
    pub name: String,
    /// The pool, if it exists.
    pub pool: Option<Arc<SSDPool>>,
    /// Cluster and nodes that the pool is assigned to.
    pub assignment: PoolAssignment,
}

/// The objects that a cluster refers to.
#[derive(Clone, Debug)]
pub struct ClusterInputs {
    pub agent_config: AgentConfigInputs,
    /// Nodes of the cluster.
    pub assignment: ClusterAssignment,
    /// `CacheNode`s of its nodes, with the agents' reports.
    pub cache_nodes: Vec<Arc<CacheNode>>,
    /// Assignment of pods to tenants.
    pub bindings: PodBindings,
    /// Profile files that are mounted next to the agents' configuration.
    pub profiles: BTreeMap<String, String>,
    pub images: DefaultImages,
    /// Result of the last check of an external etcd.
    pub store: Option<EtcdCheck>,
    pub agents: Pods,
    pub members: Pods,
    /// State reported by the control plane; `None` if no member is ready.
    pub control_plane_state: Option<StateResult>,
    /// StatefulSet of a managed etcd.
    pub etcd: Option<Arc<DynamicObject>>,
    pub etcd_pods: Pods,
    /// Set if etcd's volumes cannot be provisioned: why.
    pub volumes: Option<String>,
    /// Authority of the certificates of all pods.
    pub certificates: AuthorityState,
    /// Optional kinds, and whether the operator can create them here.
    pub access: BTreeMap<ChildKind, KindAccess>,
}

impl AgentConfigInputs {
    /// Returns the pools that belong to the cluster. A rejected pool does too: its directories stay mounted, so that
    /// rejecting and accepting it restarts no agent.
    pub fn bound_pools(&self) -> impl Iterator<Item = (&NamedPool, &SSDPool)> {
        let key = self.names.key();
        let is_bound = move |named: &&NamedPool| named.assignment.cluster.as_deref() == Some(key.as_str());
        self.pools.iter().filter(is_bound).filter_map(|named| Some((named, named.pool.as_deref()?)))
    }

    /// Whether the cluster has a pool of raw devices.
    pub fn has_raw_pools(&self) -> bool {
        self.bound_pools().any(|(_, pool)| pool.spec.devices.is_some())
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
    AgentConfigInputs { pools: pools.collect(), tenants: tenants(context, &names), names }
}

/// Reads all inputs of a cluster. It polls an external etcd and the members of the control plane.
pub async fn dereference(cluster: &KVCacheCluster, context: &Context) -> ClusterInputs {
    let (agent_config, stores) = (agent_config_inputs(cluster, context), &context.stores);
    let names = &agent_config.names;
    context.secrets.follow(names, &context.client, stores).await;
    // Also renews the operator's certificate for calls to the control plane.
    let certificates = authority::read(names, context).await;
    let assignment = stores.assignment().cluster(cluster).cloned().unwrap_or_default();
    let cache_nodes = assignment.nodes.iter().filter_map(|node| {
        let found = stores.cache_nodes.get(&ObjectRef::new(node))?;
        belongs_to(&found, names).then_some(found)
    });
    let cache_nodes: Vec<Arc<CacheNode>> = cache_nodes.collect();
    let optional = ChildKind::ALL.into_iter().filter(|kind| kind.is_optional());
    let workload = |kind, name: &str| stores.children.get(kind, Some(&names.namespace), name);
    let images = images(&cluster.spec.images, &context.settings.images);
    let agents = workload(ChildKind::DaemonSet, &names.agent());
    let set_of_members = workload(ChildKind::StatefulSet, &names.control_plane());
    let members = Pods::of(set_of_members.as_deref(), &images.control_plane);
    let etcd = workload(ChildKind::StatefulSet, &names.etcd());
    let etcd_pods = Pods::of(etcd.as_deref(), &images.etcd);
    let mut control_plane_state = None;
    if let Some(set) = set_of_members.as_deref().filter(|_| members.ready > 0) {
        // A state cached before a rollout describes replaced members.
        let version = set.resource_version().unwrap_or_default();
        context.control_planes.require_members_version(names, version).await;
        control_plane_state = Some(context.control_planes.state(names).await);
    }
    let mut volumes = None;
    // The StatefulSet controller creates the claims; a rejected cluster may have no StatefulSet.
    if etcd.is_some() && is_starting(cluster, etcd_pods) {
        volumes = volumes::problem(names, &context.client).await;
    }
    ClusterInputs {
        bindings: tenant::pods::assign(names, context).bindings,
        profiles: files::of(cluster, names, &cache_nodes, context),
        cache_nodes,
        store: context.store_checks.check(cluster, context).await,
        agents: Pods::of(agents.as_deref(), &images.agent),
        members,
        images,
        control_plane_state,
        volumes,
        etcd_pods,
        certificates,
        etcd,
        access: optional.map(|kind| (kind, stores.children.access(kind))).collect(),
        assignment,
        agent_config,
    }
}

/// Returns the images of a cluster's spec, with the operator's defaults.
fn images(specified: &Images, released: &DefaultImages) -> DefaultImages {
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

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reconcile::authority::tests::any_authority;

    /// Inputs of a new cluster without pools, nodes and optional kinds.
    pub(crate) fn inputs(cluster: &KVCacheCluster) -> ClusterInputs {
        let names = ClusterNames::of(cluster);
        ClusterInputs {
            agent_config: AgentConfigInputs { names, pools: Vec::new(), tenants: Vec::new() },
            assignment: ClusterAssignment::default(),
            cache_nodes: Vec::new(),
            bindings: PodBindings::default(),
            profiles: BTreeMap::new(),
            images: DefaultImages {
                agent: "agent:1".to_owned(),
                control_plane: "controlplane:1".to_owned(),
                etcd: "etcd:1".to_owned(),
                operator: "operator:1".to_owned(),
            },
            store: None,
            agents: Pods::default(),
            members: Pods::default(),
            control_plane_state: None,
            etcd: None,
            etcd_pods: Pods::default(),
            volumes: None,
            certificates: AuthorityState::Present(any_authority()),
            access: BTreeMap::new(),
        }
    }
}
