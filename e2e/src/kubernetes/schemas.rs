//! Kubernetes' published schemas (`e2e/kubernetes/schemas.sh`) of the versions that Reprise supports. The
//! check covers unknown fields, missing required fields, and types.
//!
//! Checks of the API server that go beyond the schema are tested on one real server.

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::Value;

use crate::tree;

/// Minor versions that Reprise supports.
const MINORS: [&str; 4] = ["1.34.", "1.35.", "1.36.", "1.37."];

/// Definitions that accept several types: numbers or strings, or any JSON.
const FREE: [&str; 3] = [
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString",
    "io.k8s.apiextensions-apiserver.pkg.apis.apiextensions.v1.JSON",
    "io.k8s.apimachinery.pkg.api.resource.Quantity",
];

/// The definitions of one version.
#[derive(Debug)]
pub struct Schemas {
    /// Version of Kubernetes, without a `v`.
    pub version: String,
    definitions: Value,
}

impl Schemas {
    /// Returns the schemas of every version, oldest first.
    ///
    /// # Panics
    /// If they cannot be fetched, or a version is missing.
    pub fn all() -> Vec<Schemas> {
        let output = Command::new(tree().join("e2e/kubernetes/schemas.sh")).stderr(Stdio::inherit()).output();
        let output = output.expect("the script can be run");
        assert!(output.status.success(), "cannot fetch the schemas");
        let files = String::from_utf8(output.stdout).expect("paths");
        let all: Vec<Schemas> = files.lines().map(|file| Schemas::read(Path::new(file))).collect();
        for (minor, schemas) in MINORS.iter().zip(&all) {
            assert!(schemas.version.starts_with(minor), "{minor} is not {}", schemas.version);
        }
        assert_eq!(all.len(), MINORS.len());
        all
    }

    fn read(file: &Path) -> Schemas {
        let name = file.file_stem().and_then(|name| name.to_str()).expect("a name");
        let version = name.split("-v").nth(1).expect("a version in the name").to_owned();
        let text = fs::read_to_string(file).expect("the script has written it");
        let mut document: Value = serde_json::from_str(&text).expect("JSON");
        Schemas { version, definitions: document["definitions"].take() }
    }

    /// Returns the violations of an object; `None` if this version does not have its kind.
    ///
    /// # Panics
    /// If the object has no `apiVersion`.
    pub fn faults(&self, object: &Value) -> Option<Vec<String>> {
        let mut faults = Vec::new();
        let kind = object["kind"].as_str().unwrap_or_default();
        self.check(kind, object, self.of(object)?, &mut faults);
        Some(faults)
    }

    /// Returns the definition of an object's kind.
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

    /// Collects the violations of a value, recursively.
    fn check(&self, at: &str, value: &Value, schema: &Value, faults: &mut Vec<String>) {
        if let Some(reference) = schema["$ref"].as_str() {
            let name = reference.trim_start_matches("#/definitions/");
            if !FREE.contains(&name) {
                self.check(at, value, &self.definitions[name], faults);
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
                        Some(property) => self.check(&at, value, property, faults),
                        // An object without declared properties may have any.
                        None if schema.get("properties").is_none() => {}
                        None => faults.push(format!("{at} is not a field")),
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
                    self.check(&format!("{at}[{index}]"), item, &schema["items"], faults);
                }
            }
            (Some("string"), Value::String(_)) | (Some("boolean"), Value::Bool(_)) | (None, _) => {}
            (Some("integer"), Value::Number(number)) if number.is_i64() || number.is_u64() => {}
            (Some("number"), Value::Number(_)) => {}
            (Some(wanted), found) => faults.push(format!("{at} is {found}, not of type {wanted}")),
        }
    }
}
