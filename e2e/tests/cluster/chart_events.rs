//! Events of a clean install: none of them is a warning.
//!
//! A person who installs the chart and looks at `kubectl get events -A` has to trust that a warning means something.

use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::release::NAMESPACE;
use serde_json::Value;

use crate::chart::running;

/// Looks at all events since the namespace of the release was made, in every namespace. The release is ready, and nothing has been done to it.
pub(crate) fn have_no_warning(cluster: &mut Cluster) {
    let release = running(cluster);
    let made = release.object("namespace", NAMESPACE)["metadata"]["creationTimestamp"].clone();
    let made = made.as_str().expect("a namespace that is there was made");
    let said = cluster.kubectl(&["get", "events", "--all-namespaces", "--output=json"]);
    let list: Value = serde_json::from_str(&said).expect("kubectl says JSON");
    let events = list["items"].as_array().expect("a list has items");
    // Times of the API server begin with the date and end with the fractions of a second, if at all: texts are in the order of the times.
    let of_install: Vec<&Value> = events.iter().filter(|event| last_seen(event) >= made).collect();
    let started = of_install.iter().filter(|event| event["reason"] == "Started").count();
    assert!(started >= 7, "operators, members, etcd and agents have started among {}", of_install.len());
    let warnings: Vec<String> = of_install
        .into_iter()
        .filter(|event| event["type"] == "Warning" && !is_of_a_busy_kubelet(event))
        .map(line)
        .collect();
    assert!(warnings.is_empty(), "warnings of a clean install:\n{}", warnings.join("\n"));
}

/// Whether the kubelet was too busy to read an object in time that exists. Another message reports one that does not exist.
fn is_of_a_busy_kubelet(event: &Value) -> bool {
    let message = event["message"].as_str().unwrap_or_default();
    ["configmap", "secret"].iter().any(|kind| {
        message.ends_with(&format!("failed to sync {kind} cache: timed out waiting for the condition"))
    })
}

/// When an event was seen last, by whichever field has it.
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
