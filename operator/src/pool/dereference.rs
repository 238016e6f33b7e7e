//! Reads what a pool is about: its cluster, its nodes, and what they say.

use std::sync::Arc;

use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::fields::Quantity;
use reprise_crds::node::{AppliedPool, Device};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use crate::cluster::dereference::tenants;
use crate::context::Context;
use crate::in_use::{self, Usage};
use crate::names::ClusterNames;
use crate::plan::PoolPlan;

/// What a pool is about, as it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// What was decided of it.
    pub plan: PoolPlan,
    /// Its cluster.
    pub cluster: Option<Arc<KVCacheCluster>>,
    /// What the nodes say that it selects; nothing of nodes without a CacheNode.
    pub nodes: Vec<PoolNode>,
    /// Bytes that tenants are sure of, on each node.
    pub reserved: u64,
    /// Who uses it.
    pub usage: Usage,
}

/// What one node says of the pool.
#[derive(Clone, Debug)]
pub struct PoolNode {
    /// All that it says.
    pub node: Arc<CacheNode>,
    /// The unique id of the pool.
    pub pool_uid: String,
    /// The name of the pool.
    pub pool: String,
}

/// Reads it, from the stores.
pub fn dereference(pool: &SSDPool, context: &Context) -> Found {
    let world = &context.world;
    let plan = world.plan().pools.get(&pool.name_any()).cloned().unwrap_or_default();
    let cluster = plan.cluster.as_ref().and_then(|key| world.cluster(key));
    let node = |name: &String| {
        let node = world.cache_nodes.get(&ObjectRef::new(name))?;
        Some(PoolNode { node, pool_uid: pool.uid().unwrap_or_default(), pool: pool.name_any() })
    };
    let bytes = |reserved: &Quantity| reserved.bytes().unwrap_or_default();
    let reserved = cluster.as_ref().map(|cluster| {
        let tenants = tenants(context, &ClusterNames::of(cluster));
        tenants.iter().map(|tenant| bytes(&tenant.spec.per_node.ssd.reserved)).fold(0, u64::saturating_add)
    });
    let mut found = Found {
        nodes: plan.nodes.iter().filter_map(node).collect(),
        reserved: reserved.unwrap_or_default(),
        usage: Usage::default(),
        cluster,
        plan,
    };
    found.usage = in_use::of_pool(pool, super::build::is_guarded(pool, &found), context);
    found
}

impl PoolNode {
    /// Devices or files of the pool there.
    pub fn devices(&self) -> impl Iterator<Item = &Device> {
        let devices = self.node.status.iter().flat_map(|status| &status.devices);
        devices.filter(|device| device.pool.as_str() == self.pool)
    }

    /// The generation of the claim that the node has.
    pub fn claimed(&self) -> Option<i64> {
        let mut claims = self.node.spec.claims.iter();
        claims.find(|claim| claim.uid.as_str() == self.pool_uid).map(|claim| claim.generation)
    }

    /// The claim that the agent follows.
    pub fn applied(&self) -> Option<&AppliedPool> {
        let applied = self.node.status.as_ref()?.applied.as_ref()?;
        applied.pools.iter().find(|applied| applied.uid.as_str() == self.pool_uid)
    }
}
