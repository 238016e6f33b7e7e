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

/// Name of the cluster of the chart.
const CHART_CLUSTER: &str = "chat";

/// Labels and port names of one kind of pods.
#[derive(Debug)]
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

fn pods_of(workload: &Value) -> Pods {
    let template = &workload["spec"]["template"];
    let containers = template["spec"]["containers"].as_array().expect("containers");
    let ports = containers.iter().flat_map(|container| container["ports"].as_array().into_iter().flatten());
    let ports = ports.map(|port| port["name"].as_str().expect("ports have names").to_owned()).collect();
    Pods { labels: template["metadata"]["labels"].clone(), ports }
}

/// Returns all pods by workload: the operator's own, and those of a cluster with all features.
fn pods(rendered: &[Value]) -> BTreeMap<String, Pods> {
    let children = built(json!({ "controlPlane": { "events": { "publish": {} } } }), |_| ());
    let workloads = [ChildKind::StatefulSet, ChildKind::DaemonSet];
    let built = children.iter().filter(|child| workloads.contains(&child.kind));
    let built = built.map(|child| {
        let mut pods = pods_of(&child.body);
        pods.labels["app.kubernetes.io/instance"] = json!(CHART_CLUSTER);
        (child.name.clone(), pods)
    });
    let operator = rendered.iter().find(|one| one["kind"] == "Deployment").expect("the operator");
    built.chain([("reprise-operator".to_owned(), pods_of(operator))]).collect()
}

fn is_selected(pods: &Pods, selector: &Value) -> bool {
    let labels = selector["matchLabels"].as_object().expect("these select by labels");
    labels.iter().all(|(name, value)| pods.labels.get(name) == Some(value))
}

/// Returns the selected pods; a selector without matches fails the test.
fn selected<'a>(pods: &'a BTreeMap<String, Pods>, selector: &Value, by: &Value) -> Vec<(&'a str, &'a Pods)> {
    let found = pods.iter().filter(|(_, pods)| is_selected(pods, selector));
    let found: Vec<(&str, &Pods)> = found.map(|(name, pods)| (name.as_str(), pods)).collect();
    assert!(!found.is_empty(), "{selector} of {by} selects no pods");
    found
}

/// Checks that every selected pod has the named ports.
fn has_ports(pods: &[(&str, &Pods)], ports: &Value, by: &Value) {
    for port in ports.as_array().into_iter().flatten() {
        let port = port["port"].as_str().expect("a port name");
        for (name, pods) in pods {
            assert!(pods.ports.iter().any(|one| one == port), "{by} names port {port} of {name}: {pods:?}");
        }
    }
}

#[test]
fn policies_match_labels_and_ports_of_existing_pods() {
    let rendered = rendered();
    let pods = pods(&rendered);
    let policies: Vec<&Value> = rendered.iter().filter(|one| one["kind"] == "NetworkPolicy").collect();
    let mut covered = Vec::new();
    for policy in &policies {
        let name = &policy["metadata"]["name"];
        let own = selected(&pods, &policy["spec"]["podSelector"], name);
        for rule in policy["spec"]["ingress"].as_array().expect("rules") {
            assert!(rule["ports"].as_array().is_some_and(|ports| !ports.is_empty()), "{policy}");
            has_ports(&own, &rule["ports"], name);
            let peers = rule["from"].as_array().expect("a rule without peers would admit all clients");
            let selectors = peers.iter().filter_map(|peer| peer.get("podSelector"));
            let is_of_people =
                |selector: &&Value| OF_PEOPLE.iter().any(|app| selector["matchLabels"]["app"] == *app);
            for selector in selectors.filter(|selector| !is_of_people(selector)) {
                selected(&pods, selector, name);
            }
        }
        covered.extend(own.iter().map(|(name, _)| *name));
    }
    covered.sort_unstable();
    let all: Vec<&str> = pods.keys().map(String::as_str).collect();
    assert_eq!(covered, all, "each kind of pod has one policy");
}

#[test]
fn metrics_readers_reach_all_pods_and_monitors_select_them() {
    let rendered = rendered();
    let pods = pods(&rendered);
    // Port with the metrics of each workload; etcd serves them on a separate port without TLS.
    let port_of = |name: &str| if name == "c-etcd" { "metrics" } else { "admin" };
    let has = |ports: &Value, port: &str| {
        ports.as_array().is_some_and(|ports| ports.iter().any(|one| one["port"] == port))
    };
    for (name, own) in &pods {
        let port = port_of(name);
        let lets_in = rendered.iter().filter(|one| one["kind"] == "NetworkPolicy").any(|policy| {
            let rules = policy["spec"]["ingress"].as_array().expect("rules");
            let from_outside = |rule: &&Value| rule["from"][0].get("namespaceSelector").is_some();
            is_selected(own, &policy["spec"]["podSelector"])
                && rules.iter().filter(from_outside).any(|rule| has(&rule["ports"], port))
        });
        assert!(lets_in, "no policy admits readers of the metrics of {name}");
    }
    let monitors = rendered.iter().filter(|one| one["kind"] == "PodMonitor");
    let mut found: Vec<&str> = Vec::new();
    for monitor in monitors {
        let name = &monitor["metadata"]["name"];
        let own = selected(&pods, &monitor["spec"]["selector"], name);
        has_ports(&own, &monitor["spec"]["podMetricsEndpoints"], name);
        for (pods, _) in &own {
            assert!(has(&monitor["spec"]["podMetricsEndpoints"], port_of(pods)), "{name} reads {pods}");
        }
        found.extend(own.iter().map(|(name, _)| *name));
    }
    found.sort_unstable();
    assert_eq!(found, ["c-agent", "c-controlplane", "c-etcd"], "the operator has a service");
}
