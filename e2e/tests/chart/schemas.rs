//! Every rendered object against Kubernetes' own schemas of the versions that the chart is for, from its published modules
//! (`e2e/kubernetes/schemas.sh`): no field that such a version does not know, none that it requires missing, all of the right type.
//!
//! What a server checks beyond its schema is tested on one of them (`release.rs`). Kinds of others than Kubernetes are not in these
//! schemas; their names stand here.

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use reprise_e2e::tree;
use serde_json::Value;

use crate::helm::{render_set, sets};

/// Kinds that Kubernetes does not have.
const OF_OTHERS: [&str; 3] = ["ServiceMonitor", "PodMonitor", "SeccompProfile"];

/// Free fields of Kubernetes' schemas: numbers or texts, JSON of any form.
const FREE: [&str; 3] = [
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON",
    "io.k8s.apimachinery.pkg.api.resource.Quantity",
];

/// Files of schemas, oldest first.
fn files() -> Vec<PathBuf> {
    let output = Command::new(tree().join("e2e/kubernetes/schemas.sh")).stderr(Stdio::inherit()).output();
    let output = output.expect("the script can be run");
    assert!(output.status.success(), "schemas cannot be had");
    String::from_utf8(output.stdout).expect("paths").lines().map(PathBuf::from).collect()
}

/// Definitions of one version.
struct Schemas {
    definitions: Value,
}

impl Schemas {
    /// The name of a kind's definition.
    fn of(&self, object: &Value) -> Option<&Value> {
        let api_version = object["apiVersion"].as_str().expect("an object has a version");
        let (group, version) = api_version.split_once('/').unwrap_or(("", api_version));
        self.definitions.as_object().expect("definitions").values().find(|definition| {
            let kinds = definition["x-kubernetes-group-version-kind"].as_array();
            kinds.into_iter().flatten().any(|kind| {
                kind["group"] == group && kind["version"] == version && kind["kind"] == object["kind"]
            })
        })
    }

    /// What of a value does not fit.
    fn faults(&self, at: &str, value: &Value, schema: &Value, faults: &mut Vec<String>) {
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.trim_start_matches("#/definitions/");
            if !FREE.contains(&name) {
                self.faults(at, value, &self.definitions[name], faults);
            }
            return;
        }
        match (schema["type"].as_str(), value) {
            (Some("object"), Value::Object(fields)) => {
                for (name, value) in fields {
                    let property =
                        schema["properties"].get(name).or_else(|| schema.get("additionalProperties"));
                    let at = format!("{at}.{name}");
                    match property {
                        Some(property) => self.faults(&at, value, property, faults),
                        // An object without named fields is free.
                        None if schema.get("properties").is_none() => {}
                        None => faults.push(format!("{at} is no field")),
                    }
                }
                for name in schema["required"].as_array().into_iter().flatten() {
                    if !fields.contains_key(name.as_str().expect("a name")) {
                        faults.push(format!("{at} lacks {name}"));
                    }
                }
            }
            (Some("array"), Value::Array(items)) => {
                for (index, item) in items.iter().enumerate() {
                    self.faults(&format!("{at}[{index}]"), item, &schema["items"], faults);
                }
            }
            (Some("string"), Value::String(_)) | (Some("boolean"), Value::Bool(_)) | (None, _) => {}
            (Some("integer"), Value::Number(number)) if number.is_i64() || number.is_u64() => {}
            (Some("number"), Value::Number(_)) => {}
            (Some(wanted), found) => faults.push(format!("{at} is {found}, not of type {wanted}")),
        }
    }
}

fn read(file: &PathBuf) -> Schemas {
    let text = fs::read_to_string(file).expect("the script has laid it there");
    let mut whole: Value = serde_json::from_str(&text).expect("JSON");
    Schemas { definitions: whole["definitions"].take() }
}

#[test]
fn every_object_fits_kubernetes_from_1_34_to_1_37() {
    let files = files();
    let versions: Vec<&str> = files.iter().filter_map(|file| file.to_str()?.split("-v").nth(1)).collect();
    for minor in ["1.34.", "1.35.", "1.36.", "1.37."] {
        assert!(versions.iter().any(|version| version.starts_with(minor)), "{minor} in {versions:?}");
    }
    let objects: Vec<Value> =
        sets().iter().flat_map(|(_, files)| render_set(files)).map(|document| document.object).collect();
    let mut kinds = BTreeSet::new();
    for file in &files {
        let schemas = read(file);
        for object in &objects {
            let kind = object["kind"].as_str().expect("a kind");
            let Some(schema) = schemas.of(object) else {
                assert!(OF_OTHERS.contains(&kind), "{} has no {kind}", file.display());
                continue;
            };
            kinds.insert(kind);
            let mut faults = Vec::new();
            schemas.faults(kind, object, schema, &mut faults);
            assert!(faults.is_empty(), "{}: {} of {object}", file.display(), faults.join(", "));
        }
    }
    assert!(kinds.len() >= 14, "{kinds:?}");
}

#[test]
fn what_does_not_fit_a_schema_is_found() {
    let schemas = read(files().last().expect("versions"));
    let map = |change: fn(&mut Value)| {
        let mut map = serde_json::json!({
            "apiVersion": "policy/v1", "kind": "PodDisruptionBudget", "metadata": { "name": "a" },
            "spec": { "selector": { "matchExpressions": [{ "key": "a", "operator": "Exists" }] } },
        });
        change(&mut map);
        let mut faults = Vec::new();
        schemas.faults("it", &map, schemas.of(&map).expect("known"), &mut faults);
        faults
    };
    assert_eq!(map(|_| {}), Vec::<String>::new());
    assert_eq!(map(|map| map["spec"]["minAvailabl"] = 1.into()), ["it.spec.minAvailabl is no field"]);
    assert_eq!(
        map(|map| map["spec"]["selector"]["matchExpressions"][0] = serde_json::json!({ "key": 1 })),
        [
            "it.spec.selector.matchExpressions[0].key is 1, not of type string",
            "it.spec.selector.matchExpressions[0] lacks \"operator\"",
        ]
    );
}
