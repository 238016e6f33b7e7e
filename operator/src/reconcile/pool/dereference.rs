//! Reads the inputs of a pool: its cluster, its nodes and their reports.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::node::Device;
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::context::Context;
use crate::reconcile::membership::tenants;
use crate::reconcile::names::ClusterNames;

/// The inputs of a pool.
#[derive(Clone, Debug, Default)]
pub struct PoolInputs {
    /// Cluster and nodes that the pool is assigned to.
    pub assignment: PoolAssignment,
    pub cluster: Option<Arc<KVCacheCluster>>,
    /// `CacheNode`s of the assigned nodes; nodes without one are missing.
    pub nodes: Vec<PoolNode>,
    /// Bytes that tenants reserve on each node.
    pub reserved: u64,
}

/// The `CacheNode` of one node of the pool.
#[derive(Clone, Debug)]
pub struct PoolNode {
    /// The `CacheNode` with the agent's report.
    pub node: Arc<CacheNode>,
    /// The pool's devices or files on the node.
    pub devices: Vec<Device>,
    /// Whether its spec has the claim of the pool's current generation.
    pub is_claimed: bool,
    /// Whether the agent has applied that claim.
    pub is_applied: bool,
}

/// Reads the inputs from the local stores.
pub fn dereference(pool: &SSDPool, context: &Context) -> PoolInputs {
    let stores = &context.stores;
    let assignment = stores.assignment().pools.get(&pool.name_any()).cloned().unwrap_or_default();
    let cluster = assignment.cluster.as_ref().and_then(|key| stores.cluster(key));
    let node = |name: &String| Some(PoolNode::of(pool, stores.cache_nodes.get(&ObjectRef::new(name))?));
    let bytes = |reserved: &Quantity| reserved.bytes().unwrap_or_default();
    let reserved = cluster.as_ref().map(|cluster| {
        let tenants = tenants(context, &ClusterNames::of(cluster));
        tenants.iter().map(|tenant| bytes(&tenant.spec.per_node.ssd.reserved)).fold(0, u64::saturating_add)
    });
    PoolInputs {
        nodes: assignment.nodes.iter().filter_map(node).collect(),
        reserved: reserved.unwrap_or_default(),
        cluster,
        assignment,
    }
}

impl PoolNode {
    /// Selects the parts of a `CacheNode` that concern a pool.
    pub fn of(pool: &SSDPool, node: Arc<CacheNode>) -> PoolNode {
        let (name, uid) = (pool.name_any(), pool.uid().unwrap_or_default());
        let generation = pool.metadata.generation.unwrap_or_default();
        let devices = node.status.iter().flat_map(|status| &status.devices);
        let mut applied = node.status.iter().flat_map(|status| &status.applied).flat_map(|all| &all.pools);
        let mut claims = node.spec.claims.iter();
        PoolNode {
            devices: devices.filter(|device| device.pool.as_str() == name).cloned().collect(),
            is_claimed: claims.any(|one| one.uid.as_str() == uid && one.generation >= generation),
            is_applied: applied.any(|one| one.uid.as_str() == uid && one.generation >= generation),
            node,
        }
    }

    /// Returns the name of the node.
    pub fn name(&self) -> &str {
        self.node.metadata.name.as_deref().unwrap_or_default()
    }
}
