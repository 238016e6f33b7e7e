//! Checks the chart's network policies and monitors against the pods that the operator builds: labels and
//! port names must exist on the pods, and every pod must have a policy.
//!
//! The chart is read as rendered with all features (`e2e/tests/chart/golden/everything.yaml`, which a chart
//! test keeps current).

use std::collections::BTreeMap;
use std::path::Path;

use serde::Deserialize;

use super::*;

/// Labels of clients that the user allows in the chart's values.
const OF_PEOPLE: [&str; 2] = ["gateway", "router"];

/// Labels and port names of one kind of pods.
struct Pods {
    labels: Value,
    ports: Vec<String>,
}

fn rendered() -> Vec<Value> {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("../e2e/tests/chart/golden/everything.yaml");
    let text = std::fs::read_to_string(file).expect("a golden file");
    let documents = serde_yaml_ng::Deserializer::from_str(&text);
    documents.map(|document| Value::deserialize(document).expect("YAML")).collect()
}

fn items(list: &Value) -> impl Iterator<Item = &Value> {
    list.as_array().into_iter().flatten()
}

fn pods_of(workload: &Value) -> Pods {
    let template = &workload["spec"]["template"];
    let ports = items(&template["spec"]["containers"]).flat_map(|container| items(&container["ports"]));
    let ports = ports.map(|port| port["name"].as_str().expect("ports have names").to_owned()).collect();
    Pods { labels: template["metadata"]["labels"].clone(), ports }
}

/// Returns all pods by workload: the operator's own, and those of a cluster with all features.
fn pods(rendered: &[Value]) -> BTreeMap<String, Pods> {
    let children = built(json!({ "controlPlane": { "events": { "publish": {} } } }), |_| ());
    let workloads = [ChildKind::StatefulSet, ChildKind::DaemonSet];
    let built = children.iter().filter(|child| workloads.contains(&child.kind)).map(|child| {
        let mut pods = pods_of(&child.body);
        pods.labels["app.kubernetes.io/instance"] = json!("chat");
        (child.name.clone(), pods)
    });
    let operator = rendered.iter().find(|one| one["kind"] == "Deployment").expect("the operator");
    built.chain([("reprise-operator".to_owned(), pods_of(operator))]).collect()
}

/// Returns the names of the selected pods, which must have these ports; a selector without matches fails the test.
fn selected<'a>(
    pods: &'a BTreeMap<String, Pods>,
    selector: &Value,
    ports: &[&Value],
    by: &Value,
) -> Vec<&'a str> {
    let labels = selector["matchLabels"].as_object().expect("these select by labels");
    let is_selected = |pods: &Pods| labels.iter().all(|(name, value)| pods.labels.get(name) == Some(value));
    let found: Vec<_> = pods.iter().filter(|(_, pods)| is_selected(pods)).collect();
    assert!(!found.is_empty(), "{selector} of {by} selects no pods");
    for (name, pods) in &found {
        for port in ports.iter().map(|port| port["port"].as_str().expect("a port name")) {
            assert!(pods.ports.iter().any(|one| one == port), "{by} names port {port} of {name}");
        }
    }
    found.into_iter().map(|(name, _)| name.as_str()).collect()
}

#[test]
fn policies_match_labels_and_ports_of_existing_pods() {
    let rendered = rendered();
    let pods = pods(&rendered);
    let mut covered = Vec::new();
    for policy in rendered.iter().filter(|one| one["kind"] == "NetworkPolicy") {
        let (name, spec) = (&policy["metadata"]["name"], &policy["spec"]);
        let ports: Vec<&Value> = items(&spec["ingress"]).flat_map(|rule| items(&rule["ports"])).collect();
        covered.extend(selected(&pods, &spec["podSelector"], &ports, name));
        for rule in items(&spec["ingress"]) {
            assert!(items(&rule["ports"]).next().is_some(), "it would open all ports: {policy}");
            assert!(items(&rule["from"]).next().is_some(), "it would admit all clients: {policy}");
            let selectors = items(&rule["from"]).filter_map(|peer| peer.get("podSelector"));
            let is_of_people =
                |selector: &&Value| OF_PEOPLE.iter().any(|app| selector["matchLabels"]["app"] == *app);
            for selector in selectors.filter(|selector| !is_of_people(selector)) {
                selected(&pods, selector, &[], name);
            }
        }
    }
    covered.sort_unstable();
    let all: Vec<&str> = pods.keys().map(String::as_str).collect();
    assert_eq!(covered, all, "each kind of pod has one policy");
}

#[test]
fn monitors_select_all_pods_of_clusters_and_name_the_port_of_their_metrics() {
    let rendered = rendered();
    let pods = pods(&rendered);
    let mut found = Vec::new();
    for monitor in rendered.iter().filter(|one| one["kind"] == "PodMonitor") {
        let (name, spec) = (&monitor["metadata"]["name"], &monitor["spec"]);
        let ports: Vec<&Value> = items(&spec["podMetricsEndpoints"]).collect();
        for pods in selected(&pods, &spec["selector"], &ports, name) {
            // etcd serves metrics on a separate port without TLS.
            let port = if pods == "c-etcd" { "metrics" } else { "admin" };
            assert!(ports.iter().any(|one| one["port"] == port), "{name} reads {pods}");
            found.push(pods);
        }
    }
    found.sort_unstable();
    assert_eq!(found, ["c-agent", "c-controlplane", "c-etcd"], "the operator has a service");
}
