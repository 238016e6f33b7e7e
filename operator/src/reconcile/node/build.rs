//! Builds the spec of a `CacheNode`. Pure.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::fields::{
    ClusterRef, DeletionPolicy, Digest, HostPath, LabelValue, Name, NodeMode, NodeName, ShortName, Uid,
};
use reprise_crds::node::{PoolClaim, QueueClaim};
use reprise_crds::pool::DEVICES_PER_NODE_MAX;
use reprise_crds::{CacheNode, CacheNodeSpec, KVCacheCluster, SSDPool};

use super::dereference::{AgentGrants, NodeInputs};
use crate::reconcile::membership::{cluster_of, is_frozen};
use crate::reconcile::names::ClusterNames;
use crate::reconcile::pool::guard::has_guard;

/// Name of a pool's file in its directory.
const POOL_FILE: &str = "pool";

/// Desired state of a `CacheNode`.
#[derive(Clone, Debug, PartialEq)]
pub enum DesiredCacheNode {
    /// It exists with this spec. If the cluster is frozen, only the queue pairs differ from the present one.
    Spec(Box<CacheNodeSpec>),
    /// The node no longer belongs to its cluster. It keeps its spec without queue pairs until the agent has
    /// released them.
    Releasing(Box<CacheNodeSpec>),
    /// It does not exist: the node belongs to no cluster, or the agent of its former cluster is gone.
    Absent,
    /// It stays as it is.
    Unchanged,
}

/// Returns the desired state of a node's `CacheNode`.
pub fn build(node: &Node, inputs: &NodeInputs) -> DesiredCacheNode {
    if let Some(live) = inputs.live.as_deref().filter(|live| belongs_to_other_cluster(live, inputs)) {
        match inputs.agent_grants {
            AgentGrants::None => {}
            AgentGrants::Reporting => {
                let spec = CacheNodeSpec { queues: Vec::new(), ..live.spec.clone() };
                return DesiredCacheNode::Releasing(Box::new(spec));
            }
            // Deletion discards the agent's report. The new cluster's `CacheNode` is created afterwards.
            AgentGrants::Silent => return DesiredCacheNode::Absent,
        }
    }
    let Some(own) = &inputs.cluster else { return DesiredCacheNode::Absent };
    let cluster = &own.cluster;
    if is_frozen(cluster) {
        return with_queues(inputs.live.as_deref(), &inputs.queues);
    }
    let wipes = |pool: &SSDPool| is_wiped(pool) && !inputs.contested.contains(&pool.name_any());
    let mut claims: Vec<PoolClaim> = inputs.pools.iter().map(|pool| claim(pool, wipes(pool))).collect();
    claims.sort_by(|a, b| a.pool.cmp(&b.pool));
    let spec = CacheNodeSpec {
        node_name: NodeName::new(node.name_any()),
        cluster_ref: Some(ClusterRef {
            namespace: Name::new(cluster.namespace().unwrap_or_default()),
            name: ShortName::new(cluster.name_any()),
        }),
        mode: mode(node, inputs),
        failure_domain: failure_domain(node, cluster),
        configuration_digest: Some(Digest::new(own.configuration.clone())),
        claims,
        profiles: inputs.profiles.clone(),
        queues: inputs.queues.clone(),
    };
    DesiredCacheNode::Spec(Box::new(spec))
}

/// Whether the `CacheNode` belongs to a cluster other than the node's.
fn belongs_to_other_cluster(live: &CacheNode, inputs: &NodeInputs) -> bool {
    let own = inputs.cluster.as_ref().map(|own| ClusterNames::of(&own.cluster).key());
    cluster_of(live).is_some_and(|before| own.as_ref() != Some(&before))
}

/// Returns the present spec with other queue pairs.
fn with_queues(live: Option<&CacheNode>, queues: &[QueueClaim]) -> DesiredCacheNode {
    let Some(live) = live else { return DesiredCacheNode::Unchanged };
    let has = &live.spec.queues;
    if has.len() == queues.len() && queues.iter().all(|claim| has.contains(claim)) {
        return DesiredCacheNode::Unchanged;
    }
    DesiredCacheNode::Spec(Box::new(CacheNodeSpec { queues: queues.to_vec(), ..live.spec.clone() }))
}

/// Returns the most restrictive mode of all pools. A cordoned Kubernetes node is draining.
fn mode(node: &Node, inputs: &NodeInputs) -> NodeMode {
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default();
    if unschedulable {
        return NodeMode::Draining;
    }
    inputs.pools.iter().map(|pool| pool.spec.mode).max().unwrap_or_default()
}

/// Returns the value of the label that the cluster selects; `None` if the node lacks it or it is empty.
fn failure_domain(node: &Node, cluster: &KVCacheCluster) -> Option<LabelValue> {
    let value = node.labels().get(cluster.spec.agents.failure_domain_label.as_str())?;
    (!value.is_empty()).then(|| LabelValue::new(value))
}

/// Whether the data on a pool's devices must be destroyed.
fn is_wiped(pool: &SSDPool) -> bool {
    let spec = &pool.spec;
    let confirmed = spec.deletion_policy == DeletionPolicy::Wipe && spec.wipe_confirmation.is_some();
    pool.metadata.deletion_timestamp.is_some() && confirmed && !has_guard(pool)
}

fn claim(pool: &SSDPool, wipe: bool) -> PoolClaim {
    let spec = &pool.spec;
    let (devices, directory) = (spec.devices.as_ref(), spec.directory.as_ref());
    let size = devices.and_then(|devices| devices.size.clone());
    PoolClaim {
        pool: ShortName::new(pool.name_any()),
        uid: Uid::new(pool.uid().unwrap_or_default()),
        generation: pool.metadata.generation.unwrap_or_default(),
        globs: devices.map(|devices| devices.globs.clone()).unwrap_or_default(),
        serials: devices.map(|devices| devices.serials.clone()).unwrap_or_default(),
        namespace_id: devices.and_then(|devices| devices.namespace_id),
        max_devices: devices.map_or(DEVICES_PER_NODE_MAX, |devices| devices.max_per_node),
        file: directory.map(|directory| HostPath::new(format!("{}/{POOL_FILE}", directory.path))),
        size: size.or_else(|| directory.map(|directory| directory.size.clone())),
        reserve: directory.and_then(|directory| directory.reserve.clone()),
        engine: spec.engine,
        fallback_engine: spec.fallback_engine,
        foreign_signatures: devices.map(|devices| devices.foreign_signatures).unwrap_or_default(),
        max_read_latency: spec.health.max_read_latency.clone(),
        max_media_errors: spec.health.max_media_errors,
        min_spare_percent: spec.health.min_spare_percent,
        wipe,
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::node::dereference::NodeCluster;
    use crate::reconcile::test_objects::{merged, object, resource};

    fn node() -> Node {
        object(json!({ "metadata": { "name": "n1" } }))
    }

    fn pool(name: &str, spec: Value, more: Value) -> Arc<SSDPool> {
        let metadata = json!({ "name": name, "uid": format!("uid-{name}"), "generation": 4 });
        Arc::new(resource(merged(metadata, more), json!({ "spec": spec })))
    }

    /// Inputs with these pools and an accepted cluster of this spec.
    fn found(pools: Vec<Arc<SSDPool>>, cluster: Value) -> NodeInputs {
        let accepted = json!({
            "type": "Accepted", "status": "True", "reason": "AsDesired", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let parts = json!({ "spec": cluster, "status": { "conditions": [accepted] } });
        let cluster: KVCacheCluster = resource(json!({ "name": "c", "namespace": "n" }), parts);
        let configuration = crate::framework::digest::of("configuration");
        NodeInputs {
            cluster: Some(NodeCluster { cluster: Arc::new(cluster), configuration }),
            pools,
            contested: BTreeSet::new(),
            profiles: Vec::new(),
            queues: Vec::new(),
            agent_grants: AgentGrants::None,
            live: None,
        }
    }

    fn spec(node: &Node, inputs: &NodeInputs) -> CacheNodeSpec {
        match build(node, inputs) {
            DesiredCacheNode::Spec(spec) => *spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn claim_requests_wipe_once_the_pool_is_deleted_and_the_wipe_confirmed() {
        let deleted = || json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let used =
            json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["reprise.dev/in-use"] });
        let wipe = json!({ "deletionPolicy": "Wipe" });
        let confirmed =
            || json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" });
        for (policy, metadata, contested, expected) in [
            (confirmed(), json!({}), false, false),
            (wipe, deleted(), false, false),
            (json!({}), deleted(), false, false),
            (confirmed(), deleted(), false, true),
            // Engines still have sessions.
            (confirmed(), used, false, false),
            // Another pool names the devices as well.
            (confirmed(), deleted(), true, false),
        ] {
            let whole = merged(json!({ "directory": { "path": "/p", "size": "2Gi" } }), policy.clone());
            let mut inputs = found(vec![pool("p", whole, metadata.clone())], json!({}));
            inputs.contested.extend(contested.then(|| "p".to_owned()));
            let claims = spec(&node(), &inputs).claims;
            assert_eq!(claims[0].wipe, expected, "{policy} {metadata} {contested}");
        }
    }

    #[test]
    fn queue_pairs_change_in_frozen_clusters_and_are_released_before_deletion() {
        use AgentGrants::{None as Free, Reporting, Silent};
        let node = node();
        let queues: Vec<QueueClaim> = object(json!([{
            "uid": "u-q", "allocation": "n/q", "controllers": [{ "serial": "S1", "queuePairs": 8 }],
        }]));
        let live = |cluster: &str| {
            let spec = json!({
                "nodeName": "n1", "clusterRef": { "namespace": "n", "name": cluster }, "mode": "Cordoned",
                "queues": queues,
            });
            Some(Arc::new(resource::<CacheNode>(json!({ "name": "n1" }), json!({ "spec": spec }))))
        };
        let inputs = |paused: bool, agent_grants: AgentGrants, live: Option<Arc<CacheNode>>| NodeInputs {
            queues: queues.clone(),
            agent_grants,
            live,
            ..found(Vec::new(), json!({ "paused": paused }))
        };
        let outcome = |inputs: &NodeInputs| {
            let described = |spec: &CacheNodeSpec| {
                let cluster = spec.cluster_ref.as_ref().map(|cluster| cluster.name.as_str());
                format!("{} {} {}", cluster.unwrap_or_default(), spec.mode, spec.queues.len())
            };
            match build(&node, inputs) {
                DesiredCacheNode::Spec(spec) => described(&spec),
                DesiredCacheNode::Releasing(spec) => format!("releasing {}", described(&spec)),
                DesiredCacheNode::Absent => "absent".to_owned(),
                DesiredCacheNode::Unchanged => "unchanged".to_owned(),
            }
        };
        let left = NodeInputs { queues: Vec::new(), ..inputs(true, Free, live("c")) };
        let gone = |grants: AgentGrants| NodeInputs { cluster: None, ..inputs(false, grants, live("c")) };
        for (inputs, expected) in [
            (inputs(false, Free, None), "c Active 1"),
            (inputs(true, Free, None), "unchanged"),
            (inputs(true, Reporting, live("c")), "unchanged"),
            (left, "c Cordoned 0"),
            (gone(Reporting), "releasing c Cordoned 0"),
            (gone(Free), "absent"),
            (gone(Silent), "absent"),
            (NodeInputs { cluster: None, ..inputs(false, Free, None) }, "absent"),
            // The other cluster's `CacheNode` follows afterwards.
            (inputs(false, Reporting, live("d")), "releasing d Cordoned 0"),
            (inputs(false, Silent, live("d")), "absent"),
            (inputs(false, Free, live("d")), "c Active 1"),
        ] {
            assert_eq!(outcome(&inputs), expected, "{inputs:?}");
        }
    }
}
