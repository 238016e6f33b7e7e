//! Conditions about transports, raw devices, and the etcd that the operator manages.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::sync::Arc;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::status::set;
use serde_json::{Value, json};

use super::*;
use crate::reconcile::cluster::inputs::tests::{add_pool, of};

/// Returns a cluster with these modes of agents and a pool of this spec.
fn found(modes: Value, pool: Value) -> (KVCacheCluster, ClusterInputs) {
    let cluster: KVCacheCluster = serde_json::from_value(json!({
        "apiVersion": "reprise.dev/v1alpha1", "kind": "KVCacheCluster",
        "metadata": { "name": "c", "namespace": "n", "uid": "c" },
        "spec": { "pools": [{ "name": "p" }], "agents": modes },
    }))
    .expect("an object");
    let mut found = of(&cluster);
    add_pool(&mut found, pool);
    (cluster, found)
}

fn one(findings: &[Finding], kind: Type) -> Finding {
    findings.iter().find(|finding| finding.kind == kind).cloned().unwrap_or_else(|| panic!("no {kind}"))
}

fn directory() -> Value {
    json!({ "directory": { "path": "/p", "size": "1Gi" } })
}

#[test]
fn notes_raw_devices_that_agents_may_be_unable_to_open() {
    let raw = || json!({ "devices": { "globs": ["/dev/disk/by-id/nvme-*"] } });
    let bound = |modes: Value, pool: Value| {
        let (cluster, found) = found(modes, pool);
        one(&compute(&cluster, &found, None, None).1, Type::PoolsBound)
    };
    let finding = bound(json!({}), raw());
    assert_eq!(finding.status, ConditionStatus::True, "some container runtimes allow it");
    assert!(
        finding.message.contains("raw devices of p") && finding.message.contains("agents.deviceAccess.mode")
    );
    let plugin = json!({ "mode": "DevicePlugin", "resourceName": "example.com/nvme" });
    for (modes, pool) in [
        (json!({}), directory()),
        (json!({ "deviceAccess": { "mode": "Privileged" } }), raw()),
        (json!({ "deviceAccess": plugin }), raw()),
    ] {
        assert_eq!(bound(modes, pool).message, "1 pools are bound");
    }
}

#[test]
fn missing_etcd_member_degrades_the_cluster_after_the_start_and_after_updates() {
    let (mut cluster, mut found) = found(json!({}), directory());
    found.assignment.nodes.push("n1".to_owned());
    let mut degraded = |wanted: u32, ready: u32, updated: u32, image: &str, age: i64| {
        let etcd = json!({
            "metadata": { "name": "c-etcd", "generation": 1 },
            "spec": { "replicas": wanted, "template": { "spec": { "containers": [{ "image": image }] } } },
            "status": { "observedGeneration": 1, "readyReplicas": ready, "updatedReplicas": updated },
        });
        found.etcd = Some(Arc::new(serde_json::from_value(etcd).expect("an object")));
        let managed = json!({ "mode": "Managed", "managed": { "replicas": wanted } });
        cluster.spec.etcd = serde_json::from_value(managed).expect("a store");
        let answers = Finding::yes(Type::EtcdReady, Reason::AsDesired, "");
        let mut conditions = Vec::new();
        set(&mut conditions, &answers, 1, &Time(clock::now().0 - SignedDuration::from_secs(age)));
        cluster.status = Some(KVCacheClusterStatus { conditions, ..KVCacheClusterStatus::default() });
        let findings = compute(&cluster, &found, None, None).1;
        assert_eq!(one(&findings, Type::EtcdReady).status, ConditionStatus::True, "{ready} of {wanted}");
        one(&findings, Type::Degraded)
    };
    for (wanted, ready, updated, image, age) in [
        (1, 1, 1, "etcd:1", 61),
        (3, 3, 3, "etcd:1", 61),
        // It has just started, another image is desired, or one of three members is updated.
        (3, 2, 3, "etcd:1", 5),
        (3, 2, 3, "etcd:0", 61),
        (3, 2, 1, "etcd:1", 61),
    ] {
        let finding = degraded(wanted, ready, updated, image, age);
        assert_eq!(finding.reason, Reason::AsDesired, "{ready} of {wanted}");
    }
    for (wanted, ready, spare) in
        [(3, 2, "if 1 more fail"), (5, 4, "if 2 more fail"), (5, 3, "if 1 more fail")]
    {
        let finding = degraded(wanted, ready, wanted, "etcd:1", 61);
        assert_eq!((finding.status, finding.reason), (ConditionStatus::True, Reason::MembersMissing));
        assert!(finding.message.contains(spare) && finding.message.contains("c-etcd"), "{}", finding.message);
    }
}
