//! Validates every rendered object against Kubernetes' own schemas of the supported versions. Kinds of third
//! parties, which these schemas lack, are listed below.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use reprise_e2e::kubernetes::Schemas;
use serde_json::Value;

use crate::chart::helm::{render_set_with, sets, template};

/// Kinds of third parties, which Kubernetes' schemas lack.
const THIRD_PARTY_KINDS: [&str; 3] = ["ServiceMonitor", "PodMonitor", "SeccompProfile"];

#[test]
fn objects_match_the_schemas_of_kubernetes_from_1_34_to_1_37() {
    let mut kinds = BTreeSet::new();
    for schemas in Schemas::all() {
        // Rendered for this version of Kubernetes.
        let version = ["--kube-version", schemas.version.as_str()];
        for document in sets().iter().flat_map(|(_, files)| render_set_with(files, &version)) {
            let object = document.object;
            let kind = object["kind"].as_str().expect("a kind");
            let Some(faults) = schemas.faults(&object) else {
                assert!(THIRD_PARTY_KINDS.contains(&kind), "{} has no {kind}", schemas.version);
                continue;
            };
            kinds.insert(kind.to_owned());
            assert!(faults.is_empty(), "{}: {} of {object}", schemas.version, faults.join(", "));
        }
    }
    assert!(kinds.len() >= 14, "{kinds:?}");
    let (_, default) = sets().remove(0);
    let files: Vec<&Path> = default.iter().map(PathBuf::as_path).collect();
    let rendered = template(&files, &["--kube-version", "1.33.9"]);
    assert!(
        !rendered.success && rendered.stderr.contains("1.33.9"),
        "an older version is rejected: {}",
        rendered.stderr
    );
}

#[test]
fn reports_violations_of_a_schema() {
    let schemas = Schemas::all().pop().expect("versions");
    let map = |change: fn(&mut Value)| {
        let mut map = serde_json::json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "a" },
            "spec": { "selector": { "matchExpressions": [{ "key": "a", "operator": "Exists" }] } },
        });
        change(&mut map);
        schemas.faults(&map).expect("known")
    };
    assert_eq!(map(|_| {}), Vec::<String>::new());
    assert_eq!(
        map(|map| map["spec"]["minAvailabl"] = 1.into()),
        ["PodDisruptionBudget.spec.minAvailabl is not a field"]
    );
    assert_eq!(
        map(|map| map["spec"]["selector"]["matchExpressions"][0] = serde_json::json!({ "key": 1 })),
        [
            "PodDisruptionBudget.spec.selector.matchExpressions[0].key is 1, not of type string",
            "PodDisruptionBudget.spec.selector.matchExpressions[0] lacks \"operator\"",
        ]
    );
}
