//! Builds the spec of a `CacheNode`. Pure.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::fields::{
    ClusterRef, DeletionPolicy, HostPath, LabelValue, Name, NodeMode, NodeName, ShortName, Uid,
};
use reprise_crds::node::{PoolClaim, QueueClaim};
use reprise_crds::pool::DEVICES_PER_NODE_MAX;
use reprise_crds::{CacheNode, CacheNodeSpec, SSDPool};

use super::dereference::NodeInputs;
use crate::framework::finalizers::has;
use crate::reconcile::membership::{belongs_to, is_frozen};
use crate::reconcile::names::{ClusterNames, WIPE_FINALIZER};
use crate::reconcile::pool::guard::has_guard;

/// Name of a pool's file in its directory.
const POOL_FILE: &str = "pool";

/// Returns the desired spec of a node's `CacheNode`; `None` if it should not exist. If the cluster is frozen, only the
/// queue pairs differ from the present spec.
pub fn build(node: &Node, inputs: &NodeInputs) -> Option<CacheNodeSpec> {
    let (live, cluster) = (inputs.live.as_deref(), inputs.cluster.as_ref());
    let with_queues = |live: &CacheNode, queues: &[QueueClaim]| CacheNodeSpec {
        queues: queues.to_vec(),
        ..live.spec.clone()
    };
    let is_of_other = |live: &&CacheNode| {
        live.spec.cluster_ref.is_some()
            && cluster.is_none_or(|cluster| !belongs_to(live, &ClusterNames::of(cluster)))
    };
    if let Some(live) = live.filter(is_of_other) {
        // It stays until the agent has released its queue pairs. The CacheNode of another cluster follows its deletion,
        // which discards the agent's report.
        return inputs.holds_queues.then(|| with_queues(live, &[]));
    }
    let cluster = cluster?;
    if is_frozen(cluster) {
        return live.map(|live| with_queues(live, &inputs.queues));
    }
    // Oldest pool first: a device with two names that two claims select goes to the first claim.
    let claims = inputs.pools.iter().map(|pool| claim(pool, is_wiped(pool, inputs)));
    let failure_domain = node.labels().get(cluster.spec.agents.failure_domain_label.as_str());
    Some(CacheNodeSpec {
        node_name: NodeName::new(node.name_any()),
        cluster_ref: Some(ClusterRef {
            namespace: Name::new(cluster.namespace().unwrap_or_default()),
            name: ShortName::new(cluster.name_any()),
        }),
        mode: mode(node, inputs),
        failure_domain: failure_domain.filter(|value| !value.is_empty()).map(LabelValue::new),
        configuration_digest: inputs.configuration.clone(),
        claims: claims.collect(),
        profiles: inputs.profiles.clone(),
        queues: inputs.queues.clone(),
    })
}

/// Returns the most restrictive mode of all pools. A cordoned Kubernetes node is draining.
fn mode(node: &Node, inputs: &NodeInputs) -> NodeMode {
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default();
    if unschedulable {
        return NodeMode::Draining;
    }
    inputs.pools.iter().map(|pool| pool.spec.mode).max().unwrap_or_default()
}

/// Whether the data on a pool's devices must be destroyed. If the policy was set after the deletion, when the finalizer
/// can no longer be added, the data is kept. A wipe that was requested stays so: without it, agents would open the device
/// again, if a finalizer of another party holds the pool.
fn is_wiped(pool: &SSDPool, inputs: &NodeInputs) -> bool {
    let claims = inputs.live.iter().flat_map(|live| &live.spec.claims);
    let is_requested =
        || claims.into_iter().any(|claim| claim.wipe && pool.uid().as_deref() == Some(claim.uid.as_str()));
    pool.metadata.deletion_timestamp.is_some()
        && pool.spec.deletion_policy == DeletionPolicy::Wipe
        && pool.spec.wipe_confirmation.is_some()
        && (has(pool, WIPE_FINALIZER) || is_requested())
        && !has_guard(pool)
        && !inputs.contested.contains(&pool.name_any())
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
mod tests {
    use std::collections::BTreeSet;
    use std::sync::Arc;

    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::test_objects::{merged, object, pool, resource};

    fn node() -> Node {
        object(json!({ "metadata": { "name": "n1" } }))
    }

    /// Inputs with these pools and an accepted cluster of this spec.
    fn found(pools: Vec<Arc<SSDPool>>, cluster: &Value) -> NodeInputs {
        let accepted = json!({
            "type": "Accepted", "status": "True", "reason": "AsDesired", "message": "",
            "lastTransitionTime": "2026-01-01T00:00:00Z",
        });
        let parts = json!({ "spec": cluster, "status": { "conditions": [accepted] } });
        NodeInputs {
            cluster: Some(Arc::new(resource(json!({ "name": "c", "namespace": "n" }), parts))),
            configuration: None,
            pools,
            contested: BTreeSet::new(),
            profiles: Vec::new(),
            queues: Vec::new(),
            holds_queues: false,
            live: None,
        }
    }

    #[test]
    fn claim_requests_wipe_once_the_pool_is_deleted_and_the_wipe_confirmed() {
        let held = |finalizers: &[&str]| json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": finalizers });
        let deleted = || held(&[WIPE_FINALIZER]);
        let wipe = json!({ "deletionPolicy": "Wipe" });
        let confirmed = || merged(wipe.clone(), json!({ "wipeConfirmation": "yes-really-destroy-the-data" }));
        for (policy, metadata, contested, expected) in [
            (confirmed(), json!({}), false, false),
            (wipe.clone(), deleted(), false, false),
            (json!({}), deleted(), false, false),
            (confirmed(), deleted(), false, true),
            // Engines still have sessions.
            (confirmed(), held(&[WIPE_FINALIZER, "reprise.dev/in-use"]), false, false),
            // The policy was set after the deletion.
            (confirmed(), held(&["reprise.dev/in-use"]), false, false),
            // Another pool names the devices as well.
            (confirmed(), deleted(), true, false),
        ] {
            let case = format!("{policy} {metadata} {contested}");
            let mut inputs = found(vec![Arc::new(pool(metadata, policy))], &json!({}));
            inputs.contested.extend(contested.then(|| "p".to_owned()));
            let spec = build(&node(), &inputs).expect("a spec");
            assert_eq!(spec.claims[0].wipe, expected, "{case}");
        }
        // All nodes have reported the wipe, and a finalizer of another party holds the pool.
        let held = |finalizer: &str| vec![Arc::new(pool(held(&[finalizer]), confirmed()))];
        let mut inputs = found(held(WIPE_FINALIZER), &json!({}));
        let spec = build(&node(), &inputs).expect("a spec");
        inputs.live = Some(Arc::new(CacheNode::new("n1", spec)));
        inputs.pools = held("others.example/hold");
        assert!(build(&node(), &inputs).expect("a spec").claims[0].wipe);
    }

    #[test]
    fn claims_are_in_the_order_of_the_pools() {
        let named = |name: &str| Arc::new(pool(json!({ "name": name }), json!({})));
        let spec = build(&node(), &found(vec![named("z"), named("a")], &json!({}))).expect("a spec");
        assert_eq!(spec.claims.iter().map(|claim| claim.pool.as_str()).collect::<Vec<_>>(), ["z", "a"]);
    }

    #[test]
    fn queue_pairs_change_in_frozen_clusters_and_are_released_before_deletion() {
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
        let inputs = |paused: bool, holds_queues: bool, live: Option<Arc<CacheNode>>| NodeInputs {
            queues: queues.clone(),
            holds_queues,
            live,
            ..found(Vec::new(), &json!({ "paused": paused }))
        };
        let left = NodeInputs { queues: Vec::new(), ..inputs(true, false, live("c")) };
        let gone = |holds_queues, live| NodeInputs { cluster: None, ..inputs(false, holds_queues, live) };
        for (inputs, expected) in [
            (inputs(false, false, None), "c Active 1"),
            (inputs(true, false, None), "absent"),
            (inputs(true, true, live("c")), "c Cordoned 1"),
            (left, "c Cordoned 0"),
            (gone(true, live("c")), "c Cordoned 0"),
            (gone(false, live("c")), "absent"),
            (gone(false, None), "absent"),
            // The CacheNode of the node's cluster follows afterwards.
            (inputs(false, true, live("d")), "d Cordoned 0"),
            (inputs(false, false, live("d")), "absent"),
        ] {
            let found = build(&node(), &inputs).map_or_else(
                || "absent".to_owned(),
                |spec| {
                    let cluster = spec.cluster_ref.map(|cluster| cluster.name.to_string());
                    format!("{} {} {}", cluster.unwrap_or_default(), spec.mode, spec.queues.len())
                },
            );
            assert_eq!(found, expected, "{inputs:?}");
        }
    }
}
