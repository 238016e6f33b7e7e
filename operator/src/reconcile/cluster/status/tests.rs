//! Conditions about transports, raw devices, and the etcd that the operator manages.

#![allow(clippy::needless_pass_by_value, reason = "specs are made where they are passed")]

use std::time::Duration;

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::status::{ConditionStatus, set};
use serde_json::{Value, json};

use super::*;
use crate::reconcile::cluster::etcd::missing_members;
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

/// Adds a node, and an etcd with these numbers of desired and ready members.
fn with_etcd(found: &mut ClusterInputs, wanted: u32, ready: u32) {
    found.assignment.nodes.push("n1".to_owned());
    let etcd = json!({
        "metadata": { "name": "c-etcd", "generation": 1 },
        "spec": { "replicas": wanted, "template": { "spec": { "containers": [{ "image": found.images.etcd }] } } },
        "status": { "observedGeneration": 1, "readyReplicas": ready, "updatedReplicas": wanted },
    });
    found.etcd = Some(Arc::new(serde_json::from_value(etcd).expect("an object")));
}

#[test]
fn missing_etcd_member_degrades_the_cluster_after_the_start() {
    let (mut cluster, mut found) = found(json!({}), directory());
    let mut degraded = |wanted: u8, ready: u32, since: Duration| {
        with_etcd(&mut found, u32::from(wanted), ready);
        let managed = json!({ "mode": "Managed", "managed": { "replicas": wanted } });
        cluster.spec.etcd = serde_json::from_value(managed).expect("a store");
        let answers = Finding::yes(Type::EtcdReady, Reason::AsDesired, "");
        let mut conditions = Vec::new();
        let began = Time(clock::now().0 - SignedDuration::try_from(since).expect("minutes"));
        set(&mut conditions, &answers, 1, &began);
        cluster.status = Some(KVCacheClusterStatus { conditions, ..KVCacheClusterStatus::default() });
        let findings = compute(&cluster, &found, None, None).1;
        assert_eq!(one(&findings, Type::EtcdReady).status, ConditionStatus::True, "{ready} of {wanted}");
        one(&findings, Type::Degraded)
    };
    let (new, settled) = (Duration::from_secs(5), Duration::from_secs(61));
    for (wanted, ready, since) in [(1, 1, settled), (3, 3, settled), (3, 2, new)] {
        assert_eq!(degraded(wanted, ready, since).reason, Reason::AsDesired, "{ready} of {wanted}");
    }
    for (wanted, ready, spare) in
        [(3, 2, "if 1 more fail"), (5, 4, "if 2 more fail"), (5, 3, "if 1 more fail")]
    {
        let finding = degraded(wanted, ready, settled);
        assert_eq!((finding.status, finding.reason), (ConditionStatus::True, Reason::MembersMissing));
        assert!(finding.message.contains(spare) && finding.message.contains("c-etcd"), "{}", finding.message);
    }
}

#[test]
fn rolling_update_of_etcd_does_not_degrade_the_cluster() {
    let (mut cluster, mut found) = found(json!({}), directory());
    with_etcd(&mut found, 3, 2);
    let managed = json!({ "mode": "Managed", "managed": { "replicas": 3 } });
    cluster.spec.etcd = serde_json::from_value(managed).expect("a store");
    let mut conditions = Vec::new();
    let began = Time(clock::now().0 - SignedDuration::from_hours(1));
    set(&mut conditions, &Finding::yes(Type::EtcdReady, Reason::AsDesired, ""), 1, &began);
    cluster.status = Some(KVCacheClusterStatus { conditions, ..KVCacheClusterStatus::default() });
    assert!(missing_members(&cluster, &found).is_some());
    found.images.etcd = "etcd:2".to_owned();
    assert_eq!(missing_members(&cluster, &found), None, "another image is desired");
    with_etcd(&mut found, 3, 2);
    let mut etcd = (*found.etcd.clone().expect("set above")).clone();
    etcd.data["status"]["updatedReplicas"] = json!(1);
    found.etcd = Some(Arc::new(etcd));
    assert_eq!(missing_members(&cluster, &found), None, "one of three members is updated");
}
