//! Membership of nodes and tenants in clusters, whether clusters may be changed, and reports of the agents of nodes.
//! Below the reconcilers of all kinds.

use std::sync::Arc;
use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kube::ResourceExt;
use reprise_crds::fields::ClusterRef;
use reprise_crds::status::{Condition, ConditionStatus, ConditionType, Reason, find, holds};
use reprise_crds::{CacheNode, CacheTenant, KVCacheCluster};

use crate::framework::clock;
use crate::reconcile::context::Context;
use crate::reconcile::names::ClusterNames;
use crate::reconcile::tenant;

/// Age of a `CacheNode` report above which the agent counts as absent.
pub const REPORT_TIMEOUT: Duration = Duration::from_secs(60);

/// Returns the conditions of a `CacheNode`.
pub fn conditions(node: &CacheNode) -> &[Condition] {
    node.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default()
}

/// Returns the time of an agent's last report.
pub fn last_report(node: &CacheNode) -> Option<&Time> {
    node.status.as_ref()?.last_updated.as_ref()
}

/// Whether a node's agent has reported within [`REPORT_TIMEOUT`].
pub fn has_reported(node: &CacheNode) -> bool {
    last_report(node).is_some_and(|last| clock::since(last) <= REPORT_TIMEOUT)
}

/// Whether a node's agent serves engines.
pub fn is_ready(node: &CacheNode) -> bool {
    has_reported(node) && holds(conditions(node), ConditionType::AgentReady, 0)
}

/// Whether the operator changes nothing of a cluster: it is paused, or its current spec is rejected or not accepted yet.
/// A conflict about nodes does not reject the spec: the cluster works on its other nodes.
pub fn is_frozen(cluster: &KVCacheCluster) -> bool {
    let conditions = cluster.status.as_ref().map(|status| status.conditions.as_slice()).unwrap_or_default();
    let generation = cluster.metadata.generation.unwrap_or_default();
    let accepted = find(conditions, ConditionType::Accepted).is_some_and(|accepted| {
        accepted.observed_generation >= generation
            && (accepted.status == ConditionStatus::True || accepted.reason == Reason::Conflict.as_str())
    });
    cluster.spec.paused || !accepted
}

/// Returns the cluster of a `CacheNode` as `namespace/name`.
pub fn cluster_of(node: &CacheNode) -> Option<String> {
    node.spec.cluster_ref.as_ref().map(|cluster| format!("{}/{}", cluster.namespace, cluster.name))
}

/// Whether a node belongs to a cluster.
pub fn belongs_to(node: &CacheNode, cluster: &ClusterNames) -> bool {
    node.spec.cluster_ref.as_ref().is_some_and(|named| is_named(cluster, named))
}

/// Returns the accepted tenants that apply to a cluster, by name.
pub fn tenants(context: &Context, cluster: &ClusterNames) -> Vec<Arc<CacheTenant>> {
    let mut tenants = context.stores.tenants.state();
    let rejected = tenant::validate::rejected(&tenants);
    tenants.retain(|tenant| applies_to(tenant, cluster) && !rejected.contains_key(&tenant.name_any()));
    tenants.sort_by_key(|tenant| tenant.name_any());
    tenants
}

/// Whether a tenant applies to a cluster.
pub fn applies_to(tenant: &CacheTenant, cluster: &ClusterNames) -> bool {
    let named = &tenant.spec.clusters;
    named.is_empty() || named.iter().any(|named| is_named(cluster, named))
}

fn is_named(cluster: &ClusterNames, named: &ClusterRef) -> bool {
    named.name.as_str() == cluster.name && named.namespace.as_str() == cluster.namespace
}
