//! Conditions about the etcd that the operator manages.

use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use k8s_openapi::jiff::SignedDuration;
use reprise_crds::status::set;
use serde_json::json;

use super::*;
use crate::reconcile::cluster::dereference::tests::inputs;
use crate::reconcile::cluster::workloads::Pods;
use crate::reconcile::test_objects::{object, resource};

#[test]
fn missing_etcd_member_degrades_the_cluster_after_the_start_and_after_updates() {
    for (wanted, ready, updated, image, age, expected) in [
        (1, 1, 1, "etcd:1", 61, None),
        (3, 3, 3, "etcd:1", 61, None),
        // It has just started, another image is desired, or one of three members is updated.
        (3, 2, 3, "etcd:1", 5, None),
        (3, 2, 3, "etcd:0", 61, None),
        (3, 2, 1, "etcd:1", 61, None),
        (3, 2, 3, "etcd:1", 61, Some("if 1 more fail")),
        (5, 4, 5, "etcd:1", 61, Some("if 2 more fail")),
        (5, 3, 5, "etcd:1", 61, Some("if 1 more fail")),
    ] {
        let answers = Finding::yes(Type::EtcdReady, Reason::AsDesired, "");
        let mut conditions = Vec::new();
        set(&mut conditions, &answers, 1, &Time(clock::now().0 - SignedDuration::from_secs(age)));
        let cluster: KVCacheCluster = resource(
            json!({ "name": "c", "namespace": "n", "uid": "c" }),
            json!({ "spec": { "etcd": { "managed": { "replicas": wanted } } }, "status": { "conditions": conditions } }),
        );
        let mut inputs = inputs(&cluster);
        inputs.assignment.nodes.push("n1".to_owned());
        let etcd = object(json!({
            "metadata": { "name": "c-etcd", "generation": 1 },
            "spec": { "template": { "spec": { "containers": [{ "image": image }] } } },
            "status": { "observedGeneration": 1, "readyReplicas": ready, "updatedReplicas": updated },
        }));
        inputs.etcd_pods = Pods::of(Some(&etcd), "etcd:1");
        let findings = compute(&cluster, &inputs, None, None).1;
        let one = |kind: Type| findings.iter().find(|finding| finding.kind == kind).expect("a condition");
        assert_eq!(one(Type::EtcdReady).status, ConditionStatus::True, "{ready} of {wanted}");
        let Finding { reason, message, .. } = one(Type::Degraded);
        let words = expected.unwrap_or_default();
        assert_eq!(*reason == Reason::MembersMissing, expected.is_some(), "{ready} of {wanted}: {message}");
        assert!(message.contains(words), "{ready} of {wanted}: {message}");
    }
}
