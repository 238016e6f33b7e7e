//! Reads what is wanted of a node: its cluster, and the pools on it.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use reprise_crds::status::{ConditionType, holds};
use reprise_crds::{CacheNode, KVCacheCluster, SSDPool};

use crate::cluster::build::configuration::agent_digest;
use crate::cluster::dereference::referred;
use crate::context::Context;

/// What is wanted of a node, as it is.
#[derive(Clone, Debug)]
pub struct Found {
    /// Its cluster.
    pub cluster: Option<NodeCluster>,
    /// Pools on it, the oldest first.
    pub pools: Vec<Arc<SSDPool>>,
    /// What is there of it.
    pub live: Option<Arc<CacheNode>>,
}

/// The cluster of a node.
#[derive(Clone, Debug)]
pub struct NodeCluster {
    /// It.
    pub cluster: Arc<KVCacheCluster>,
    /// Digest of its agents' configuration.
    pub configuration: String,
    /// Whether it may be changed.
    pub state: ClusterState,
}

/// Whether a cluster may be changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ClusterState {
    /// It is kept as its spec says.
    Kept,
    /// It is paused, or its spec was not accepted, or not yet: what is there stays.
    Left,
}

/// Reads it, from the stores.
pub fn dereference(node: &Node, context: &Context) -> Found {
    let world = &context.world;
    let plan = world.plan();
    let own = plan.nodes.get(&node.name_any()).cloned().unwrap_or_default();
    let cluster = own.cluster.as_ref().and_then(|key| world.cluster(key)).map(|cluster| {
        let conditions =
            cluster.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
        let generation = cluster.metadata.generation.unwrap_or_default();
        let left = cluster.spec.paused || !holds(conditions, ConditionType::Accepted, generation);
        NodeCluster {
            configuration: agent_digest(&cluster, &referred(&cluster, context)),
            state: if left { ClusterState::Left } else { ClusterState::Kept },
            cluster,
        }
    });
    Found {
        cluster,
        pools: own.pools.iter().filter_map(|pool| world.pools.get(&ObjectRef::new(pool))).collect(),
        live: world.cache_nodes.get(&ObjectRef::new(&node.name_any())),
    }
}
