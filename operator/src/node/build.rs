//! Makes the spec of a `CacheNode`. Pure.

use k8s_openapi::api::core::v1::Node;
use kube::ResourceExt;
use reprise_crds::fields::{
    ClusterRef, DeletionPolicy, Digest, HostPath, Name, NodeMode, NodeName, ShortName, Uid,
};
use reprise_crds::node::{PoolClaim, QueueClaim};
use reprise_crds::pool::DEVICES_PER_NODE_MAX;
use reprise_crds::{CacheNode, CacheNodeSpec, KVCacheCluster, SSDPool};

use super::dereference::{ClusterState, Found, Lent, cluster_of};
use crate::in_use;

/// The file of a pool in its directory.
const POOL_FILE: &str = "pool";

/// What is wanted of a `CacheNode`.
#[derive(Clone, Debug, PartialEq)]
pub enum Wanted {
    /// It is there, with this spec.
    Spec(Box<CacheNodeSpec>),
    /// It is as it is, but for the queue pairs that its agent keeps: its cluster may not be changed.
    Queues(Box<CacheNodeSpec>),
    /// Its cluster has the node no more. It is as it is, without queue pairs, until the agent has let go of them.
    Leaves(Box<CacheNodeSpec>),
    /// It is not there: no cluster has the node, or the agent of the one that had it is gone.
    Nothing,
    /// Whatever it is, it stays.
    Unchanged,
}

/// What is wanted of a node.
pub fn build(node: &Node, found: &Found) -> Wanted {
    if let Some(live) = found.live.as_deref().filter(|live| is_left(live, found)) {
        match found.lent {
            Lent::Nothing => {}
            Lent::Answered => {
                let spec = CacheNodeSpec { queues: Vec::new(), ..live.spec.clone() };
                return Wanted::Leaves(Box::new(spec));
            }
            // With it goes what its agent said. Another cluster's is made after that.
            Lent::Silent => return Wanted::Nothing,
        }
    }
    let Some(own) = &found.cluster else { return Wanted::Nothing };
    if own.state == ClusterState::Left {
        let live = found.live.as_deref();
        return live.map_or(Wanted::Unchanged, |live| with_queues(live, &found.queues));
    }
    let cluster = &own.cluster;
    let kept = found.kept.iter().map(|(pool, claim)| kept(pool, claim));
    let mut claims: Vec<PoolClaim> = found.pools.iter().map(|pool| claim(pool)).chain(kept).collect();
    claims.sort_by(|a, b| a.pool.cmp(&b.pool));
    let spec = CacheNodeSpec {
        node_name: NodeName::new(node.name_any()),
        cluster_ref: Some(ClusterRef {
            namespace: Name::new(cluster.namespace().unwrap_or_default()),
            name: ShortName::new(cluster.name_any()),
        }),
        mode: mode(node, found),
        configuration_digest: Some(Digest::new(own.configuration.clone())),
        claims,
        profiles: found.profiles.clone(),
        queues: found.queues.clone(),
    };
    Wanted::Spec(Box::new(spec))
}

/// Whether a node's cluster is not that of its `CacheNode`.
fn is_left(live: &CacheNode, found: &Found) -> bool {
    let key = |cluster: &KVCacheCluster| {
        format!("{}/{}", cluster.namespace().unwrap_or_default(), cluster.name_any())
    };
    let own = found.cluster.as_ref().map(|own| key(&own.cluster));
    cluster_of(live).is_some_and(|before| own.as_ref() != Some(&before))
}

/// What there is, but for its queue pairs.
fn with_queues(live: &CacheNode, queues: &[QueueClaim]) -> Wanted {
    let has = &live.spec.queues;
    if has.len() == queues.len() && queues.iter().all(|claim| has.contains(claim)) {
        return Wanted::Unchanged;
    }
    Wanted::Queues(Box::new(CacheNodeSpec { queues: queues.to_vec(), ..live.spec.clone() }))
}

/// The most cautious of what pools say, also of those that are refused, and what Kubernetes does: a node that takes no pods is being drained.
fn mode(node: &Node, found: &Found) -> NodeMode {
    let unschedulable = node.spec.as_ref().and_then(|spec| spec.unschedulable).unwrap_or_default();
    if unschedulable {
        return NodeMode::Draining;
    }
    let pools = found.pools.iter().chain(found.kept.iter().map(|(pool, _)| pool));
    pools.map(|pool| pool.spec.mode).max().unwrap_or_default()
}

/// The claim of a pool that is refused, as it was; but what is deleted goes, with the devices that it has.
fn kept(pool: &SSDPool, claim: &PoolClaim) -> PoolClaim {
    let generation = match pool.metadata.deletion_timestamp {
        Some(_) => pool.metadata.generation.unwrap_or_default(),
        None => claim.generation,
    };
    PoolClaim { generation, wipe: is_wiped(pool), ..claim.clone() }
}

/// Whether what is on a pool's devices is destroyed.
fn is_wiped(pool: &SSDPool) -> bool {
    let spec = &pool.spec;
    let confirmed = spec.deletion_policy == DeletionPolicy::Wipe && spec.wipe_confirmation.is_some();
    pool.metadata.deletion_timestamp.is_some() && confirmed && !in_use::holds(pool)
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
        max_devices: devices.map_or(DEVICES_PER_NODE_MAX, |devices| devices.max_per_node),
        file: directory.map(|directory| HostPath::new(format!("{}/{POOL_FILE}", directory.path))),
        size: size.or_else(|| directory.map(|directory| directory.size.clone())),
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
    use crate::node::dereference::NodeCluster;

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

    fn found(pools: Vec<Arc<SSDPool>>, state: ClusterState) -> Found {
        let cluster: KVCacheCluster = object(json!({
            "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster",
            "metadata": { "name": "c", "namespace": "n" }, "spec": {},
        }));
        let digest = crate::digest::of("configuration");
        let own = NodeCluster { cluster: Arc::new(cluster), configuration: digest, state };
        let digest = Digest::new(crate::digest::of("a profile"));
        let profiles = vec![ProfileClaim { name: Name::new("slack"), digest }];
        Found {
            cluster: Some(own),
            pools,
            kept: Vec::new(),
            profiles,
            queues: Vec::new(),
            lent: Lent::Nothing,
            live: None,
        }
    }

    fn spec(node: Value, pools: Vec<Arc<SSDPool>>) -> CacheNodeSpec {
        let node = object(json!({ "metadata": { "name": "n1" }, "spec": node }));
        match build(&node, &found(pools, ClusterState::Kept)) {
            Wanted::Spec(spec) => *spec,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn every_pool_of_a_node_is_a_claim_the_most_cautious_mode_holds_and_profiles_are_those_decided() {
        let directory = json!({ "directory": { "path": "/data/p", "size": "2Gi" } });
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
        assert_eq!((raw.globs.len(), raw.max_devices, raw.file.as_ref()), (1, 2, None));
        let health =
            |claim: &PoolClaim| (claim.max_media_errors, claim.min_spare_percent.map(|least| least.0));
        assert_eq!((health(raw), health(file)), ((Some(7), Some(10)), (None, None)));
        assert_eq!(raw.max_read_latency.as_ref().map(ToString::to_string).as_deref(), Some("50ms"));
        assert_eq!(spec(json!({ "unschedulable": true }), Vec::new()).mode, NodeMode::Draining);
        assert_eq!(spec(json!({}), Vec::new()).mode, NodeMode::Active);
    }

    #[test]
    fn a_claim_says_wipe_once_the_pool_is_deleted_and_the_wipe_confirmed() {
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
        assert!(!wiped(&confirmed, used), "engines have sessions still");
    }

    #[test]
    fn a_pool_that_is_refused_keeps_the_claim_that_the_node_has() {
        let was = claim(&pool("p", json!({ "directory": { "path": "/p", "size": "2Gi" } }), json!({})));
        let edited = json!({ "directory": { "path": "/p", "size": "3Gi" }, "mode": "Cordoned" });
        let made = |edited: &Value, more: Value| {
            let kept = (pool("p", edited.clone(), more), was.clone());
            let node = object(json!({ "metadata": { "name": "n1" } }));
            let found = Found { kept: vec![kept], ..found(Vec::new(), ClusterState::Kept) };
            let Wanted::Spec(spec) = build(&node, &found) else { panic!("a cluster has the node") };
            (spec.claims[0].clone(), spec.mode)
        };
        assert_eq!(made(&edited, json!({ "generation": 5 })), (was.clone(), NodeMode::Cordoned));
        let mut wiped = edited;
        wiped["deletionPolicy"] = json!("Wipe");
        wiped["wipeConfirmation"] = json!("yes-really-destroy-the-data");
        let deleted = json!({ "generation": 6, "deletionTimestamp": "2026-01-01T00:00:00Z" });
        let goes = PoolClaim { generation: 6, wipe: true, ..was.clone() };
        assert_eq!(made(&wiped, deleted).0, goes, "what it has is destroyed, and nothing else");
    }

    #[test]
    fn a_node_without_a_cluster_has_nothing_and_one_of_a_paused_cluster_is_left() {
        let node: Node = object(json!({ "metadata": { "name": "n1" } }));
        assert_eq!(build(&node, &found(Vec::new(), ClusterState::Left)), Wanted::Unchanged);
        let none = Found { cluster: None, ..found(Vec::new(), ClusterState::Kept) };
        assert_eq!(build(&node, &none), Wanted::Nothing);
    }

    #[test]
    fn what_is_lent_of_a_node_is_told_also_while_its_cluster_is_left_and_ends_before_its_cache_node() {
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
        let left = Found { live: live("c"), ..found(Vec::new(), ClusterState::Left) };
        let queues_of = |found: &Found| match build(&node, found) {
            Wanted::Queues(spec) => Some((spec.mode, spec.queues)),
            _ => None,
        };
        assert_eq!(queues_of(&left), Some((NodeMode::Cordoned, Vec::new())));
        let lent = Found { queues: queues.clone(), lent: Lent::Answered, ..left };
        assert_eq!(build(&node, &lent), Wanted::Unchanged, "it is told already");
        let kept = Found { live: None, ..lent.clone() };
        assert_eq!(build(&node, &kept), Wanted::Unchanged);
        let Wanted::Spec(spec) =
            build(&node, &Found { queues: queues.clone(), ..found(Vec::new(), ClusterState::Kept) })
        else {
            panic!("a cluster has the node")
        };
        assert_eq!(spec.queues, queues);
        let leaves = |found: &Found| match build(&node, found) {
            Wanted::Leaves(spec) => {
                Some((spec.cluster_ref.map(|cluster| cluster.name.to_string()), spec.queues))
            }
            _ => None,
        };
        let gone = Found { cluster: None, ..lent.clone() };
        assert_eq!(leaves(&gone), Some((Some("c".to_owned()), Vec::new())), "its agent lets go of them");
        for lent in [Lent::Nothing, Lent::Silent] {
            assert_eq!(build(&node, &Found { lent, ..gone.clone() }), Wanted::Nothing);
        }
        // Another cluster's comes after that.
        for state in [ClusterState::Kept, ClusterState::Left] {
            let moved = Found { lent: Lent::Answered, live: live("d"), ..found(Vec::new(), state) };
            assert_eq!(leaves(&moved), Some((Some("d".to_owned()), Vec::new())));
            assert_eq!(build(&node, &Found { lent: Lent::Silent, ..moved.clone() }), Wanted::Nothing);
            let free = build(&node, &Found { lent: Lent::Nothing, ..moved });
            assert!(matches!(free, Wanted::Spec(_) | Wanted::Queues(_)), "{free:?}");
        }
    }
}
