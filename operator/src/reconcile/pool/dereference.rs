//! Reads the inputs of a pool: its cluster, its nodes and their reports.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::node::{AppliedPool, Device};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use super::guard::Guard;
use crate::reconcile::assignment::PoolAssignment;
use crate::reconcile::context::Context;
use crate::reconcile::membership::tenants;
use crate::reconcile::names::ClusterNames;

/// The inputs of a pool.
#[derive(Clone, Debug)]
pub struct PoolInputs {
    /// Cluster and nodes that the pool is assigned to.
    pub assignment: PoolAssignment,
    pub cluster: Option<Arc<KVCacheCluster>>,
    /// `CacheNode`s of the assigned nodes; nodes without one are missing.
    pub nodes: Vec<PoolNode>,
    /// Bytes that tenants reserve on each node.
    pub reserved: u64,
    /// Whether sessions use the pool.
    pub guard: Guard,
}

/// The `CacheNode` of one node of the pool.
#[derive(Clone, Debug)]
pub struct PoolNode {
    /// The `CacheNode` with the agent's report.
    pub node: Arc<CacheNode>,
    pub pool_uid: String,
    pub pool: String,
}

/// Reads the inputs from the local stores.
pub fn dereference(pool: &SSDPool, context: &Context) -> PoolInputs {
    let stores = &context.stores;
    let assignment = stores.assignment().pools.get(&pool.name_any()).cloned().unwrap_or_default();
    let cluster = assignment.cluster.as_ref().and_then(|key| stores.cluster(key));
    let node = |name: &String| {
        let node = stores.cache_nodes.get(&ObjectRef::new(name))?;
        Some(PoolNode { node, pool_uid: pool.uid().unwrap_or_default(), pool: pool.name_any() })
    };
    let bytes = |reserved: &Quantity| reserved.bytes().unwrap_or_default();
    let reserved = cluster.as_ref().map(|cluster| {
        let tenants = tenants(context, &ClusterNames::of(cluster));
        tenants.iter().map(|tenant| bytes(&tenant.spec.per_node.ssd.reserved)).fold(0, u64::saturating_add)
    });
    let mut inputs = PoolInputs {
        nodes: assignment.nodes.iter().filter_map(node).collect(),
        reserved: reserved.unwrap_or_default(),
        guard: Guard::default(),
        cluster,
        assignment,
    };
    inputs.guard = Guard::of(pool, super::build::is_guarded(pool, &inputs), context);
    inputs
}

impl PoolNode {
    /// Returns the pool's devices or files on the node.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        let devices = self.node.status.iter().flat_map(|status| &status.devices);
        devices.filter(|device| device.pool.as_str() == self.pool)
    }

    /// Returns the name of the node.
    pub fn name(&self) -> &str {
        self.node.metadata.name.as_deref().unwrap_or_default()
    }

    /// Returns the claim that the agent has applied.
    pub fn applied(&self) -> Option<&AppliedPool> {
        let applied = self.node.status.as_ref()?.applied.as_ref()?;
        applied.pools.iter().find(|applied| applied.uid.as_str() == self.pool_uid)
    }
}
