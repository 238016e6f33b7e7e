//! Custom resource definitions as the API server gets them.
//!
//! The derived schemas change in three ways. `nullable` is removed, so that `null` means "absent" only.
//! Formats that Kubernetes does not know (`uint32`) become a maximum, because the API server warns about each and ignores
//! it: an object with a larger number could not be read, nor could a list with it.
//! Descriptions lose the source's line breaks and gain the meanings of choices, so that `kubectl explain`
//! shows them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use kube::CustomResourceExt;
use serde_json::{Map, Value, json};

use crate::{CacheNode, CacheTenant, GPUQueueAllocation, KVCacheCluster, SSDPool, SlackProfile};

/// Formats known to the API server, among those in our types.
const FORMATS: [&str; 3] = ["int32", "int64", "date-time"];

/// Largest numbers of other formats. The API server has 64 bits with a sign.
const MAXIMA: [(&str, i64); 4] = [
    ("uint8", u8::MAX as i64),
    ("uint16", u16::MAX as i64),
    ("uint32", u32::MAX as i64),
    ("uint64", i64::MAX),
];

/// Keywords that contain one schema.
const SCHEMA_OF: [&str; 2] = ["items", "additionalProperties"];

/// Returns all definitions, in the order of the documentation.
pub fn definitions() -> Vec<CustomResourceDefinition> {
    [
        KVCacheCluster::crd(),
        SSDPool::crd(),
        GPUQueueAllocation::crd(),
        SlackProfile::crd(),
        CacheTenant::crd(),
        CacheNode::crd(),
    ]
    .into_iter()
    .map(normalized)
    .collect()
}

/// Returns the schema of a definition's only version, as JSON.
pub fn schema(definition: &CustomResourceDefinition) -> Value {
    let version = definition.spec.versions.first().expect("one version is generated");
    let validation = version.schema.as_ref().expect("a schema is generated");
    serde_json::to_value(validation.open_api_v3_schema.as_ref().expect("a schema is generated"))
        .expect("a schema is JSON")
}

fn normalized(mut definition: CustomResourceDefinition) -> CustomResourceDefinition {
    let mut schema = schema(&definition);
    normalize(&mut schema);
    let schema = serde_json::from_value(schema).expect("a normalized schema is a schema");
    let version = definition.spec.versions.first_mut().expect("one version is generated");
    version.schema.as_mut().expect("a schema is generated").open_api_v3_schema = Some(schema);
    definition
}

fn normalize(schema: &mut Value) {
    let Value::Object(fields) = schema else { return };
    fields.remove("nullable");
    let format = fields.get("format").and_then(Value::as_str).filter(|format| !FORMATS.contains(format));
    if let Some(format) = format.map(str::to_owned) {
        fields.remove("format");
        if let Some((_, maximum)) = MAXIMA.iter().find(|(name, _)| *name == format) {
            fields.entry("maximum").or_insert_with(|| json!(maximum));
        }
    }
    if let Some(Value::Array(words)) = fields.get_mut("enum") {
        words.retain(|word| !word.is_null());
    }
    normalize_description(fields);
    for keyword in SCHEMA_OF {
        if let Some(inner) = fields.get_mut(keyword) {
            normalize(inner);
        }
    }
    if let Some(Value::Object(properties)) = fields.get_mut("properties") {
        properties.values_mut().for_each(normalize);
    }
}

/// Normalizes the description. The title of a choice contains the meanings of its values
/// ([`crate::fields`]); any other title is the name of a Rust type.
fn normalize_description(fields: &mut Map<String, Value>) {
    let title = fields.remove("title");
    let meanings = title.as_ref().and_then(Value::as_str).filter(|_| fields.contains_key("enum"));
    let Some(description) = fields.get("description").and_then(Value::as_str) else { return };
    let mut text = description.split_whitespace().collect::<Vec<_>>().join(" ");
    if let Some(meanings) = meanings {
        text = format!("{text} {}", meanings.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    fields.insert("description".to_owned(), text.into());
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn replaces_unknown_formats_and_keeps_meanings_of_choices() {
        let mut schema = json!({
            "title": "Thing",
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": {"type": "integer", "format": "uint32", "nullable": true}},
                "choice": {"type": "string", "enum": ["A", null], "title": "`A`: one.", "description": "A\nchoice."},
                "time": {"type": "string", "format": "date-time"},
            },
        });
        normalize(&mut schema);
        let expected = json!({
            "type": "object",
            "properties": {
                "list": {"type": "array", "items": {"type": "integer", "maximum": 4_294_967_295_u32}},
                "choice": {"type": "string", "enum": ["A"], "description": "A choice. `A`: one."},
                "time": {"type": "string", "format": "date-time"},
            },
        });
        assert_eq!(schema, expected);
    }

    /// Counts the integers of a schema. Each has a maximum or a size, so that an accepted object can be read.
    fn count_bounded_integers(schema: &Value) -> usize {
        let inner = match schema {
            Value::Object(fields) => fields.values().map(count_bounded_integers).sum(),
            Value::Array(items) => items.iter().map(count_bounded_integers).sum(),
            _ => 0,
        };
        let is_integer = schema["type"] == "integer";
        assert!(!is_integer || schema["maximum"].is_number() || schema["format"].is_string(), "{schema}");
        inner + usize::from(is_integer)
    }

    #[test]
    fn integers_are_bounded() {
        let counts: Vec<usize> =
            definitions().iter().map(|definition| count_bounded_integers(&schema(definition))).collect();
        assert!(counts.iter().all(|count| *count > 0), "{counts:?}");
    }
}
