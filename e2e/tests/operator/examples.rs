//! The operator accepts the examples of the chart. The tests of the chart validate them by the rules of the API server.

use kube::ResourceExt;
use reprise_e2e::{PATIENCE, tree, wait_until};
use serde::Deserialize;
use serde_json::Value;

use crate::operator::test_cluster::{TestCluster, USER_KINDS};

/// Reasons of conditions of objects that the operator rejects for their spec.
const REJECTED: [&str; 3] = ["InvalidSpec", "Unsupported", "ProfileInvalid"];

fn documents(file: &str) -> Vec<Value> {
    let text =
        std::fs::read_to_string(tree().join("charts/reprise/examples").join(file)).expect("an example");
    serde_yaml_ng::Deserializer::from_str(&text).map(|one| Value::deserialize(one).expect("YAML")).collect()
}

#[test]
fn operator_accepts_the_examples_of_the_chart() {
    let (k8s, _operator) = TestCluster::with_operator();
    for values in ["lab.yaml", "raw-devices.yaml"] {
        let values = &documents(values)[0];
        for (kind, field) in [("SSDPool", "pools"), ("CacheTenant", "tenants")] {
            for (name, spec) in values[field].as_object().into_iter().flatten() {
                k8s.apply_resource(kind, name, spec);
            }
        }
        let pool = values["cluster"]["pools"][0]["name"].as_str().expect("a pool");
        k8s.apply_resource("KVCacheCluster", &format!("with-{pool}"), &values["cluster"]);
    }
    for file in ["cluster", "pool", "profile", "queues", "tenant"] {
        for mut object in documents(&format!("resources/{file}.yaml")) {
            let kind = object["kind"].as_str().expect("a kind");
            if USER_KINDS.iter().any(|(known, ..)| *known == kind) {
                // All objects of a test are in one namespace.
                object["metadata"].as_object_mut().expect("metadata").remove("namespace");
                k8s.apply(&object);
            }
        }
    }
    let objects = wait_until("all examples have conditions", PATIENCE, || {
        let objects = k8s.user_objects();
        let has_conditions =
            |status: &Value| status["conditions"].as_array().is_some_and(|all| !all.is_empty());
        objects.values().all(|object| has_conditions(&object.data["status"])).then_some(objects)
    });
    for object in objects.values() {
        for condition in object.data["status"]["conditions"].as_array().expect("seen above") {
            let reason = condition["reason"].as_str().expect("a reason");
            assert!(!REJECTED.contains(&reason), "{}: {condition}", object.name_any());
        }
    }
}
