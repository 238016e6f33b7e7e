//! Permissions of the chart's pods: the level `restricted` of Kubernetes' pod security, with justified
//! exceptions.

use std::fs;

use reprise_e2e::tree;
use serde_json::{Value, json};

use crate::chart::helm::{Document, render_set, sets};

/// Objects whose pods mount a directory of the node, with the reason.
const ON_THE_NODE: [(&str, &str); 2] =
    [("reprise-round-trip", "the agents' socket"), ("reprise-seccomp", "the kubelet's profiles")];

/// Objects whose pods run as root, with the reason.
const AS_ROOT: [(&str, &str); 2] = [
    ("reprise-round-trip", "agents let root connect, unless values name another user"),
    ("reprise-seccomp", "the kubelet's directory is root's"),
];

/// Returns all objects that have pods, by name.
fn workloads() -> Vec<(String, Document)> {
    let documents = sets().into_iter().flat_map(|(_, files)| render_set(&files));
    let named = documents.filter(|one| one.object["spec"]["template"]["spec"].is_object());
    named.map(|one| (one.object["metadata"]["name"].as_str().expect("a name").to_owned(), one)).collect()
}

fn is_listed(list: &[(&str, &str)], name: &str) -> bool {
    list.iter().any(|(listed, _)| *listed == name)
}

#[test]
fn pods_have_the_least_permissions() {
    let workloads = workloads();
    for name in [
        "reprise-operator",
        "reprise-definitions",
        "reprise-objects",
        "reprise-delete",
        "reprise-round-trip",
        "reprise-seccomp",
    ] {
        assert!(workloads.iter().any(|(one, _)| one == name), "{name} is rendered by some set");
    }
    for (name, workload) in workloads {
        let pod = &workload.object["spec"]["template"]["spec"];
        assert_eq!(pod["securityContext"]["seccompProfile"], json!({ "type": "RuntimeDefault" }), "{name}");
        let is_root = pod["securityContext"]["runAsUser"] == json!(0);
        assert!(!is_root || is_listed(&AS_ROOT, &name), "{name} is root");
        assert_eq!(pod["securityContext"]["runAsNonRoot"] == json!(true), !is_root, "{name}");
        for share in ["hostNetwork", "hostPID", "hostIPC"] {
            assert_eq!(pod[share], Value::Null, "{name}: {share}");
        }
        for volume in pod["volumes"].as_array().into_iter().flatten() {
            assert_eq!(
                volume.get("hostPath").is_some(),
                volume["name"] == "socket" || volume["name"] == "seccomp",
                "{name}"
            );
            assert!(volume.get("hostPath").is_none() || is_listed(&ON_THE_NODE, &name), "{name}: {volume}");
        }
        for container in pod["containers"].as_array().expect("containers") {
            let expected = json!({
                "allowPrivilegeEscalation": false,
                "readOnlyRootFilesystem": true,
                "capabilities": { "drop": ["ALL"] },
            });
            assert_eq!(container["securityContext"], expected, "{name}");
            assert!(container["resources"]["limits"]["memory"].is_string(), "{name}: memory is bounded");
        }
    }
}

/// Time for the operator to release its lease after its work has stopped, in seconds.
const RELEASES_WITHIN: u64 = 10;

#[test]
fn the_grace_period_covers_the_operators_shutdown_and_the_release_of_its_lease() {
    let source = fs::read_to_string(tree().join("operator/src/run.rs")).expect("the operator's source");
    let (_, after) =
        source.split_once("STOPS_WITHIN: Duration = Duration::from_secs(").expect("the operator's bound");
    let bound = after.split_once(')').and_then(|(seconds, _)| seconds.parse::<u64>().ok()).expect("seconds");
    let operators = workloads().into_iter().filter(|(_, one)| one.object["kind"] == "Deployment");
    let graces: Vec<u64> = operators
        .map(|(_, one)| one.object["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64())
        .map(|grace| grace.expect("the chart sets a grace period"))
        .collect();
    assert_eq!(graces.len(), sets().len(), "an operator in each set");
    for grace in graces {
        assert!(grace >= bound + RELEASES_WITHIN, "{grace} s of the chart, {bound} s of the operator");
    }
}

#[test]
fn only_clients_of_the_api_server_get_a_token() {
    for (name, workload) in workloads() {
        let clients = ["reprise-operator", "reprise-definitions", "reprise-objects", "reprise-delete"];
        let is_client = clients.contains(&name.as_str());
        let pod = &workload.object["spec"]["template"]["spec"];
        assert_eq!(pod["automountServiceAccountToken"], json!(is_client), "{name}");
    }
}

#[test]
fn images_are_named_by_registry_and_tag_or_digest() {
    let everything = sets().pop().expect("the last set is everything").1;
    let documents = render_set(&everything);
    let operator = documents.iter().find(|one| one.object["kind"] == "Deployment").expect("the operator");
    let container = &operator.object["spec"]["template"]["spec"]["containers"][0];
    let registry = "registry.example.com:5000/reprise";
    assert_eq!(container["image"], format!("{registry}/reprise-operator:0.1.1"));
    let arguments: Vec<&str> =
        container["args"].as_array().expect("arguments").iter().filter_map(Value::as_str).collect();
    let digest = "sha256:0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";
    assert_eq!(
        arguments[1..4],
        [
            format!("--image-agent={registry}/reprise-agent@{digest}"),
            format!("--image-control-plane={registry}/other/controlplane:7"),
            format!("--image-etcd={registry}/etcd:v3.6.11"),
        ]
    );
}
