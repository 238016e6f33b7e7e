//! Roles: every rule has a comment with its reason, and wildcards and rights on pods are never granted.

use std::fs;

use reprise_e2e::tree;
use serde_json::Value;

use crate::chart::helm::{Document, chart, render, render_set, sets};

/// Returns the rules of a role, and for each whether a comment precedes it.
fn rules(document: &Document) -> Vec<(Value, bool)> {
    let rules = document.object["rules"].as_array().cloned().unwrap_or_default();
    let lines: Vec<&str> = document.text.lines().collect();
    let starts: Vec<usize> =
        (0..lines.len()).filter(|line| lines[*line].starts_with("  - apiGroups:")).collect();
    assert_eq!(rules.len(), starts.len(), "a rule begins with its groups: {}", document.text);
    let has_reason = |line: usize| lines[line - 1].trim_start().starts_with("# ");
    rules.into_iter().zip(starts).map(|(rule, line)| (rule, has_reason(line))).collect()
}

/// Returns all roles of all sets.
fn roles() -> Vec<Document> {
    let documents = sets().into_iter().flat_map(|(_, files)| render_set(&files));
    documents.filter(|one| ["ClusterRole", "Role"].map(Value::from).contains(&one.object["kind"])).collect()
}

#[test]
fn every_rule_has_a_comment_with_its_reason() {
    let roles = roles();
    assert!(roles.len() > 10, "roles of every set");
    for role in roles {
        let rules = rules(&role);
        assert!(!rules.is_empty(), "{}", role.object["metadata"]["name"]);
        for (rule, has_reason) in rules {
            assert!(has_reason, "no reason for {rule} of {}", role.object["metadata"]["name"]);
        }
    }
}

#[test]
fn no_role_grants_wildcards_or_rights_on_pods() {
    for role in roles() {
        for (rule, _) in rules(&role) {
            let name = &role.object["metadata"]["name"];
            let all = ["apiGroups", "resources", "verbs"]
                .iter()
                .flat_map(|part| rule[part].as_array().expect("a list"));
            for word in all {
                let word = word.as_str().expect("a word");
                let wide = ["*", "escalate", "impersonate"].contains(&word) || word.starts_with("pods");
                assert!(!wide, "{name}: {rule}");
            }
            // `bind` may only be granted for these roles.
            if rule["verbs"].as_array().is_some_and(|verbs| verbs.contains(&"bind".into())) {
                assert_eq!(
                    rule["resourceNames"],
                    serde_json::json!(["reprise-agent", "reprise-member"]),
                    "{name}"
                );
            }
        }
    }
}

#[test]
fn without_rbac_there_are_accounts_but_no_roles() {
    let documents = render(&[], &["--set", "rbac.create=false", "--set", "cluster.paused=false"]);
    let kinds: Vec<&str> = documents.iter().filter_map(|one| one.object["kind"].as_str()).collect();
    assert!(!kinds.iter().any(|kind| kind.contains("Role")), "{kinds:?}");
    assert_eq!(kinds.iter().filter(|kind| **kind == "ServiceAccount").count(), 4);
}

#[test]
fn documented_installation_permits_the_secrets_of_the_cluster_in_the_examples() {
    let read = |file: &std::path::Path| fs::read_to_string(file).expect("a text");
    let page = read(&tree().join("docs/kubernetes/install.md"));
    let (_, rest) = page.split_once("--set-json '").expect("the command of the page");
    let (clusters, _) = rest.split_once('\'').expect("the end of the value");
    let example = read(&chart().join("examples/resources/cluster.yaml"));
    let field = |name: &str| {
        let line = example.lines().find_map(|line| line.strip_prefix(&format!("  {name}: ")));
        line.expect("a field of the metadata").to_owned()
    };
    let is_of_cluster = |document: &Document| {
        document.object["kind"] == "Role"
            && document.object["metadata"]["namespace"] == field("namespace")
            && document.text.contains(&format!("[{}-ca, ", field("name")))
    };
    let documents = render(&[], &["--set-json", clusters]);
    assert!(documents.iter().any(is_of_cluster), "{clusters}");
}
