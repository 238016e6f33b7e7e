//! Consistency of the values, their schema and their documentation.

use std::fs;

use serde_json::Value;

use crate::chart::helm::{chart, render_set, sets};

fn read(name: &str) -> String {
    fs::read_to_string(chart().join(name)).expect("the chart's files can be read")
}

/// Values that `values.yaml` shows as a comment only, because setting them has an effect.
const COMMENTED: [&str; 2] = ["cluster", "global"];

#[test]
fn values_yaml_contains_every_value_of_the_schema() {
    let schema: Value = serde_json::from_str(&read("values.schema.json")).expect("JSON");
    let values: Value = serde_yaml_ng::from_str(&read("values.yaml")).expect("YAML");
    let mut missing = Vec::new();
    walk("", &schema, &values, &mut missing, &schema);
    missing.retain(|path| !COMMENTED.contains(&path.as_str()));
    assert!(missing.is_empty(), "values.yaml lacks {missing:?}");
}

fn walk(at: &str, schema: &Value, values: &Value, missing: &mut Vec<String>, root: &Value) {
    let schema = match schema["$ref"].as_str() {
        Some(reference) => root.pointer(reference.trim_start_matches('#')).expect("a definition"),
        None => schema,
    };
    for (name, property) in schema["properties"].as_object().into_iter().flatten() {
        let path = if at.is_empty() { name.clone() } else { format!("{at}.{name}") };
        // Users choose which resources they set.
        if path.ends_with("resources.limits") || path.ends_with("resources.requests") {
            continue;
        }
        match values.get(name) {
            Some(value) => walk(&path, property, value, missing, root),
            None => missing.push(path),
        }
    }
}

#[test]
fn every_group_of_values_has_a_comment() {
    let text = read("values.yaml");
    let lines: Vec<&str> = text.lines().collect();
    for (number, line) in lines.iter().enumerate() {
        let is_group = line.ends_with(':') && !line.starts_with([' ', '#']);
        if is_group {
            let above = number.checked_sub(1).map_or("", |before| lines[before]);
            let below = lines.get(number + 2).copied().unwrap_or_default();
            let next = lines.get(number + 1).copied().unwrap_or_default();
            assert!(
                above.starts_with("# ") || next.trim_start().starts_with("# "),
                "no comment for {line} (then '{next}', '{below}')"
            );
        }
    }
}

/// The profile lists no system call twice, and allows the three of io_uring.
#[test]
fn the_seccomp_profile_is_valid_and_allows_io_uring() {
    let profile: Value = serde_json::from_str(&read("files/seccomp-agent.json")).expect("JSON");
    assert_eq!(profile["defaultAction"], "SCMP_ACT_ERRNO");
    let mut names: Vec<&str> = profile["syscalls"]
        .as_array()
        .expect("a list")
        .iter()
        .flat_map(|rule| rule["names"].as_array().expect("a list"))
        .map(|name| name.as_str().expect("a name"))
        .collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count, "a system call is listed twice");
    for name in
        ["io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_create", "listen", "ppoll", "futex"]
    {
        assert!(names.contains(&name), "{name}");
    }
    for name in ["mount", "ptrace", "bpf", "setns", "unshare", "kexec_load", "init_module", "perf_event_open"]
    {
        assert!(!names.contains(&name), "{name}");
    }
}

#[test]
fn kubelets_and_the_profiles_operator_get_the_same_profile() {
    let everything = sets().pop().expect("the last set is everything").1;
    let documents = render_set(&everything);
    let written: Value = serde_json::from_str(&read("files/seccomp-agent.json")).expect("JSON");
    let of = |kind: &str| {
        documents.iter().find(|one| one.object["kind"] == kind).expect("rendered").object.clone()
    };
    assert_eq!(of("SeccompProfile")["spec"], written);
    let map = documents
        .iter()
        .find(|one| one.object["metadata"]["name"] == "reprise-seccomp" && one.object["kind"] == "ConfigMap");
    let text = map.expect("rendered").object["data"]["reprise-agent.json"].as_str().expect("text").to_owned();
    assert_eq!(serde_json::from_str::<Value>(&text).expect("JSON"), written);
}
