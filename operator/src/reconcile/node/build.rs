//! Builds the spec of a `CacheNode`. Pure.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::fields::{
    ClusterRef, DeletionPolicy, Digest, HostPath, LabelValue, Name, NodeMode, NodeName, ShortName, Uid,
};
use reprise_crds::node::{PoolClaim, QueueClaim};
use reprise_crds::pool::DEVICES_PER_NODE_MAX;
use reprise_crds::{CacheNode, CacheNodeSpec, KVCacheCluster, SSDPool};

use super::dereference::{AgentGrants, ClusterState, NodeInputs, cluster_of};
use crate::reconcile::pool::guard::has_guard;

/// Name of a pool's file in its directory.
const POOL_FILE: &str = "pool";

/// Desired state of a `CacheNode`.
#[derive(Clone, Debug, PartialEq)]
pub enum DesiredCacheNode {
    /// It exists with this spec.
    Spec(Box<CacheNodeSpec>),
    /// It keeps its spec except the queue pairs, because its cluster must not change.
    QueuesOnly(Box<CacheNodeSpec>),
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
    if own.state == ClusterState::Frozen {
        let live = inputs.live.as_deref();
        return live.map_or(DesiredCacheNode::Unchanged, |live| with_queues(live, &inputs.queues));
    }
    let cluster = &own.cluster;
    let kept = inputs.retained.iter().map(|(pool, claim)| retained_claim(pool, claim));
    let mut claims: Vec<PoolClaim> = inputs.pools.iter().map(|pool| claim(pool)).chain(kept).collect();
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
    let key = |cluster: &KVCacheCluster| {
        format!("{}/{}", cluster.namespace().unwrap_or_default(), cluster.name_any())
    };
    let own = inputs.cluster.as_ref().map(|own| key(&own.cluster));
    cluster_of(live).is_some_and(|before| own.as_ref() != Some(&before))
}

/// Returns the present spec with other queue pairs.
fn with_queues(live: &CacheNode, queues: &[QueueClaim]) -> DesiredCacheNode {
    let has = &live.spec.queues;
    if has.len() == queues.len() && queues.iter().all(|claim| has.contains(claim)) {
        return DesiredCacheNode::Unchanged;
    }
    DesiredCacheNode::QueuesOnly(Box::new(CacheNodeSpec { queues: queues.to_vec(), ..live.spec.clone() }))
}

/// Returns the most restrictive mode of all pools, including rejected ones. A cordoned Kubernetes node is
/// draining.
fn mode(node: &Node, inputs: &NodeInputs) -> NodeMode {
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default();
    if unschedulable {
        return NodeMode::Draining;
    }
    let pools = inputs.pools.iter().chain(inputs.retained.iter().map(|(pool, _)| pool));
    pools.map(|pool| pool.spec.mode).max().unwrap_or_default()
}

/// Returns the value of the label that the cluster selects; `None` if the node lacks it or it is empty.
fn failure_domain(node: &Node, cluster: &KVCacheCluster) -> Option<LabelValue> {
    let value = node.labels().get(cluster.spec.agents.failure_domain_label.as_str())?;
    (!value.is_empty()).then(|| LabelValue::new(value))
}

/// Returns the claim of a rejected pool as the node has it. A deletion still applies, to the devices of that
/// claim.
fn retained_claim(pool: &SSDPool, claim: &PoolClaim) -> PoolClaim {
    let generation = match pool.metadata.deletion_timestamp {
        Some(_) => pool.metadata.generation.unwrap_or_default(),
        None => claim.generation,
    };
    PoolClaim { generation, wipe: is_wiped(pool), ..claim.clone() }
}

/// Whether the data on a pool's devices must be destroyed.
fn is_wiped(pool: &SSDPool) -> bool {
    let spec = &pool.spec;
    let confirmed = spec.deletion_policy == DeletionPolicy::Wipe && spec.wipe_confirmation.is_some();
    pool.metadata.deletion_timestamp.is_some() && confirmed && !has_guard(pool)
}

fn claim(pool: &SSDPool) -> PoolClaim {
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
        wipe: is_wiped(pool),
    }
}

#[cfg(test)]
#[allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]
mod tests {
    use std::sync::Arc;

    use reprise_crds::node::ProfileClaim;
    use serde::de::DeserializeOwned;
    use serde_json::{Value, json};

    use super::*;
    use crate::reconcile::node::dereference::NodeCluster;

    fn object<K: DeserializeOwned>(value: Value) -> K {
        serde_json::from_value(value).expect("an object")
    }

    fn pool(name: &str, spec: Value, more: Value) -> Arc<SSDPool> {
        let mut metadata = json!({ "name": name, "uid": format!("uid-{name}"), "generation": 4 });
        metadata.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
        Arc::new(object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "SSDPool", "metadata": metadata, "spec": spec,
        })))
    }

    fn found(pools: Vec<Arc<SSDPool>>, state: ClusterState) -> NodeInputs {
        let cluster: KVCacheCluster = object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster",
            "metadata": { "name": "c", "namespace": "n" }, "spec": {},
        }));
        let digest = crate::framework::digest::of("configuration");
        let own = NodeCluster { cluster: Arc::new(cluster), configuration: digest, state };
        let digest = Digest::new(crate::framework::digest::of("a profile"));
        let profiles = vec![ProfileClaim { name: Name::new("slack"), digest }];
        NodeInputs {
            cluster: Some(own),
            pools,
            retained: Vec::new(),
            profiles,
            queues: Vec::new(),
            agent_grants: AgentGrants::None,
            live: None,
        }
    }

    fn spec(node: Value, pools: Vec<Arc<SSDPool>>) -> CacheNodeSpec {
        let node = object(json!({ "metadata": { "name": "n1" }, "spec": node }));
        match build(&node, &found(pools, ClusterState::Managed)) {
            DesiredCacheNode::Spec(spec) => *spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn spec_has_a_claim_per_pool_the_most_restrictive_mode_and_the_decided_profiles() {
        let directory = json!({ "directory": { "path": "/data/p", "size": "2Gi", "reserve": "3Gi" } });
        let devices = json!({
            "devices": { "globs": ["/dev/disk/by-id/nvme-*"], "maxPerNode": 2 }, "mode": "Cordoned", "engine": "Plain",
            "health": { "maxReadLatency": "50ms", "maxMediaErrors": 7, "minSparePercent": 10 },
        });
        let made = spec(json!({}), vec![pool("q", devices, json!({})), pool("p", directory, json!({}))]);
        assert_eq!(made.mode, NodeMode::Cordoned);
        assert_eq!(made.profiles.iter().map(|claim| claim.name.as_str()).collect::<Vec<_>>(), ["slack"]);
        let [file, raw] = made.claims.as_slice() else { panic!("{:?}", made.claims) };
        assert_eq!(file.file.as_ref().map(HostPath::as_str), Some("/data/p/pool"));
        assert_eq!((file.generation, file.size.as_ref().map(|size| size.as_str())), (4, Some("2Gi")));
        let reserve = |claim: &PoolClaim| claim.reserve.as_ref().map(|reserve| reserve.as_str().to_owned());
        assert_eq!((reserve(file).as_deref(), reserve(raw)), (Some("3Gi"), None));
        assert_eq!((raw.globs.len(), raw.max_devices, raw.file.as_ref()), (1, 2, None));
        let health =
            |claim: &PoolClaim| (claim.max_media_errors, claim.min_spare_percent.map(|least| least.0));
        assert_eq!((health(raw), health(file)), ((Some(7), Some(10)), (None, None)));
        assert_eq!(raw.max_read_latency.as_ref().map(ToString::to_string).as_deref(), Some("50ms"));
        assert_eq!(spec(json!({ "unschedulable": true }), Vec::new()).mode, NodeMode::Draining);
        assert_eq!(spec(json!({}), Vec::new()).mode, NodeMode::Active);
    }

    #[test]
    fn failure_domain_is_the_value_of_the_label_of_the_cluster() {
        let domain = |labels: Value, agents: Value| {
            let node = object(json!({ "metadata": { "name": "n1", "labels": labels } }));
            let mut found = found(Vec::new(), ClusterState::Managed);
            let own = found.cluster.as_mut().expect("set above");
            let mut cluster = KVCacheCluster::clone(&own.cluster);
            cluster.spec.agents = object(agents);
            own.cluster = Arc::new(cluster);
            match build(&node, &found) {
                DesiredCacheNode::Spec(spec) => spec.failure_domain.map(|domain| domain.to_string()),
                other => panic!("{other:?}"),
            }
        };
        let labels = || json!({ "topology.kubernetes.io/zone": "zone-a", "rack": "r7", "empty": "" });
        let by = |label: &str| json!({ "failureDomainLabel": label });
        assert_eq!(domain(labels(), json!({})).as_deref(), Some("zone-a"), "the default label");
        assert_eq!(domain(labels(), by("rack")).as_deref(), Some("r7"));
        assert_eq!(domain(labels(), by("empty")), None);
        assert_eq!(domain(json!({}), json!({})), None);
    }

    #[test]
    fn claim_requests_wipe_once_the_pool_is_deleted_and_the_wipe_confirmed() {
        let deleted = json!({ "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let spec_of = |more: Value| {
            let mut whole = json!({ "directory": { "path": "/p", "size": "2Gi" } });
            whole.as_object_mut().expect("made above").extend(more.as_object().expect("fields").clone());
            whole
        };
        let wipes = spec_of(json!({ "deletionPolicy": "Wipe" }));
        let confirmed =
            spec_of(json!({ "deletionPolicy": "Wipe", "wipeConfirmation": "yes-really-destroy-the-data" }));
        let wiped = |more: &Value, metadata: Value| {
            spec(json!({}), vec![pool("p", more.clone(), metadata)]).claims[0].wipe
        };
        assert!(!wiped(&confirmed, json!({})));
        assert!(!wiped(&wipes, deleted.clone()));
        assert!(!wiped(&spec_of(json!({})), deleted.clone()));
        assert!(wiped(&confirmed, deleted));
        let used =
            json!({ "deletionTimestamp": "2026-01-01T00:00:00Z", "finalizers": ["reprise.dev/in-use"] });
        assert!(!wiped(&confirmed, used), "engines still have sessions");
    }

    #[test]
    fn rejected_pool_keeps_the_present_claim_of_the_node() {
        let was = claim(&pool("p", json!({ "directory": { "path": "/p", "size": "2Gi" } }), json!({})));
        let edited = json!({ "directory": { "path": "/p", "size": "3Gi" }, "mode": "Cordoned" });
        let made = |edited: &Value, more: Value| {
            let retained = (pool("p", edited.clone(), more), was.clone());
            let node = object(json!({ "metadata": { "name": "n1" } }));
            let found = NodeInputs { retained: vec![retained], ..found(Vec::new(), ClusterState::Managed) };
            let DesiredCacheNode::Spec(spec) = build(&node, &found) else { panic!("a spec") };
            (spec.claims[0].clone(), spec.mode)
        };
        assert_eq!(made(&edited, json!({ "generation": 5 })), (was.clone(), NodeMode::Cordoned));
        let mut wiped = edited;
        wiped["deletionPolicy"] = json!("Wipe");
        wiped["wipeConfirmation"] = json!("yes-really-destroy-the-data");
        let deleted = json!({ "generation": 6, "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let goes = PoolClaim { generation: 6, wipe: true, ..was.clone() };
        assert_eq!(made(&wiped, deleted).0, goes, "only the data of its present claim is destroyed");
    }

    #[test]
    fn node_without_a_cluster_has_no_cache_node_and_a_paused_cluster_keeps_its_own() {
        let node: Node = object(json!({ "metadata": { "name": "n1" } }));
        assert_eq!(build(&node, &found(Vec::new(), ClusterState::Frozen)), DesiredCacheNode::Unchanged);
        let none = NodeInputs { cluster: None, ..found(Vec::new(), ClusterState::Managed) };
        assert_eq!(build(&node, &none), DesiredCacheNode::Absent);
    }

    #[test]
    fn queue_pairs_change_in_frozen_clusters_and_are_released_before_deletion() {
        let node: Node = object(json!({ "metadata": { "name": "n1" } }));
        let queues: Vec<QueueClaim> = object(json!([{
            "uid": "u-q", "allocation": "n/q", "controllers": [{ "serial": "S1", "queuePairs": 8 }],
        }]));
        let live = |cluster: &str| {
            Some(Arc::new(object::<CacheNode>(json!({
                "apiVersion": "reprise.dev/v1alpha1", "kind": "CacheNode", "metadata": { "name": "n1" },
                "spec": {
                    "nodeName": "n1", "clusterRef": { "namespace": "n", "name": cluster }, "mode": "Cordoned",
                    "queues": queues,
                },
            }))))
        };
        let left = NodeInputs { live: live("c"), ..found(Vec::new(), ClusterState::Frozen) };
        let queues_of = |found: &NodeInputs| match build(&node, found) {
            DesiredCacheNode::QueuesOnly(spec) => Some((spec.mode, spec.queues)),
            _ => None,
        };
        assert_eq!(queues_of(&left), Some((NodeMode::Cordoned, Vec::new())));
        let lent = NodeInputs { queues: queues.clone(), agent_grants: AgentGrants::Reporting, ..left };
        assert_eq!(build(&node, &lent), DesiredCacheNode::Unchanged, "the spec lists it already");
        let kept = NodeInputs { live: None, ..lent.clone() };
        assert_eq!(build(&node, &kept), DesiredCacheNode::Unchanged);
        let DesiredCacheNode::Spec(spec) =
            build(&node, &NodeInputs { queues: queues.clone(), ..found(Vec::new(), ClusterState::Managed) })
        else {
            panic!("a spec")
        };
        assert_eq!(spec.queues, queues);
        let releasing = |found: &NodeInputs| match build(&node, found) {
            DesiredCacheNode::Releasing(spec) => {
                Some((spec.cluster_ref.map(|cluster| cluster.name.to_string()), spec.queues))
            }
            _ => None,
        };
        let gone = NodeInputs { cluster: None, ..lent.clone() };
        assert_eq!(releasing(&gone), Some((Some("c".to_owned()), Vec::new())), "the agent must release them");
        for lent in [AgentGrants::None, AgentGrants::Silent] {
            assert_eq!(
                build(&node, &NodeInputs { agent_grants: lent, ..gone.clone() }),
                DesiredCacheNode::Absent
            );
        }
        // The other cluster's `CacheNode` follows afterwards.
        for state in [ClusterState::Managed, ClusterState::Frozen] {
            let moved = NodeInputs {
                agent_grants: AgentGrants::Reporting,
                live: live("d"),
                ..found(Vec::new(), state)
            };
            assert_eq!(releasing(&moved), Some((Some("d".to_owned()), Vec::new())));
            assert_eq!(
                build(&node, &NodeInputs { agent_grants: AgentGrants::Silent, ..moved.clone() }),
                DesiredCacheNode::Absent
            );
            let free = build(&node, &NodeInputs { agent_grants: AgentGrants::None, ..moved });
            assert!(matches!(free, DesiredCacheNode::Spec(_) | DesiredCacheNode::QueuesOnly(_)), "{free:?}");
        }
    }
}
