//! Inputs of a cluster, as its reconcile reads them ([`super::dereference`]).

use std::collections::BTreeMap;
use std::sync::Arc;

use kube::api::DynamicObject;
use reprise_crds::{CacheNode, CacheTenant, SSDPool};
use reprise_policy::identity::PodBindings;

use super::etcd::external::EtcdCheck;
use crate::framework::child::ChildKind;
use crate::framework::child_stores::KindAccess;
use crate::reconcile::assignment::{ClusterAssignment, PoolAssignment};
use crate::reconcile::authority::AuthorityState;
use crate::reconcile::control_plane::StateResult;
use crate::reconcile::names::ClusterNames;
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
    /// Authority of the certificates of all pods.
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
    /// Returns the pool if it belongs to this cluster. A rejected pool does too: its directories stay mounted, so that
    /// rejecting and accepting it restarts no agent.
    pub fn bound_pool(&self, cluster: &str) -> Option<&SSDPool> {
        self.pool.as_deref().filter(|_| self.assignment.cluster.as_deref() == Some(cluster))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::reconcile::authority::tests::any_authority;

    /// Inputs of a new cluster without pools, nodes and optional kinds.
    pub(crate) fn of(cluster: &reprise_crds::KVCacheCluster) -> ClusterInputs {
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
            agents: None,
            members: None,
            control_plane_state: None,
            etcd: None,
            volumes: None,
            certificates: AuthorityState::Present(any_authority()),
            access: BTreeMap::new(),
        }
    }

    /// Adds pool `p`, which is assigned to cluster `n/c`.
    pub(crate) fn add_pool(inputs: &mut ClusterInputs, spec: serde_json::Value) {
        let pool = SSDPool::new("p", serde_json::from_value(spec).expect("a spec"));
        let assignment = PoolAssignment { cluster: Some("n/c".to_owned()), ..PoolAssignment::default() };
        let named = NamedPool { name: "p".to_owned(), pool: Some(Arc::new(pool)), assignment };
        inputs.agent_config.pools.push(named);
    }
}
