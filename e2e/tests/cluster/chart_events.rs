//! Events of a clean install: none is a warning.
//!
//! Every warning in `kubectl get events -A` must need attention, also right after an install.

use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::release::NAMESPACE;
use serde_json::Value;

use crate::chart::running;

/// Checks the events of all namespaces since the namespace of the release was created. The release is ready
/// and no fault was injected.
pub(crate) fn have_no_warning(cluster: &mut Cluster) {
    let release = running(cluster);
    let created = release.object("namespace", NAMESPACE)["metadata"]["creationTimestamp"].clone();
    let created = created.as_str().expect("a namespace has a time of creation");
    let json = cluster.kubectl(&["get", "events", "--all-namespaces", "--output=json"]);
    let list: Value = serde_json::from_str(&json).expect("kubectl prints JSON");
    let events = list["items"].as_array().expect("a list has items");
    // Times of the API server are in the same format, so their texts have the order of the times.
    let of_install: Vec<&Value> = events.iter().filter(|event| last_seen(event) >= created).collect();
    let started = of_install.iter().filter(|event| event["reason"] == "Started").count();
    assert!(started >= 7, "operators, members, etcd and agents have started among {}", of_install.len());
    let warnings: Vec<String> = of_install
        .into_iter()
        .filter(|event| {
            event["type"] == "Warning"
                && !is_of_a_busy_kubelet(event)
                && !is_of_a_busy_authorizer(event)
                && !is_a_repaired_address(event)
        })
        .map(line)
        .collect();
    assert!(warnings.is_empty(), "a clean install caused warnings:\n{}", warnings.join("\n"));
}

/// Returns whether the event reports that the kubelet could not read an existing object in time. There is
/// another message for an object that does not exist.
fn is_of_a_busy_kubelet(event: &Value) -> bool {
    let message = event["message"].as_str().unwrap_or_default();
    ["configmap", "secret"].iter().any(|kind| {
        message.ends_with(&format!("failed to sync {kind} cache: timed out waiting for the condition"))
    })
}

/// Returns whether the kubelet asked for an object of a pod before the API server's authorizer of nodes had seen that the
/// pod is on this node. The kubelet asks again.
fn is_of_a_busy_authorizer(event: &Value) -> bool {
    let message = event["message"].as_str().unwrap_or_default();
    event["reason"] == "FailedMount"
        && message.contains(": no relationship found between node '")
        && message.ends_with("' and this object")
}

/// Returns whether the API server's periodic check of addresses met a Service that was just being created. It then
/// repairs the allocation, which was about to be complete.
fn is_a_repaired_address(event: &Value) -> bool {
    let message = event["message"].as_str().unwrap_or_default();
    event["reason"] == "ClusterIPNotAllocated" && message.ends_with("is not allocated; repairing")
}

/// Returns when an event was last seen, from the first field that is set.
fn last_seen(event: &Value) -> &str {
    let times = [
        &event["series"]["lastObservedTime"],
        &event["lastTimestamp"],
        &event["eventTime"],
        &event["metadata"]["creationTimestamp"],
    ];
    times.into_iter().find_map(Value::as_str).unwrap_or_default()
}

fn line(event: &Value) -> String {
    let about = &event["involvedObject"];
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    format!(
        "{} {} {}/{}/{} ({} times): {}",
        last_seen(event),
        text(&event["reason"]),
        text(&about["namespace"]),
        text(&about["kind"]),
        text(&about["name"]),
        event["count"].as_u64().unwrap_or(1),
        text(&event["message"]),
    )
}
