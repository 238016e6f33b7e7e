//! Schema of the chart's values: the chart's own values from `chart_values.json`, and the specs of our
//! kinds with the schemas of the API server.
//!
//! All objects are closed: Helm rejects a misspelled field before it installs anything, where the API
//! server would drop the field. CEL rules have no counterpart here; the API server enforces them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value, json};

use crate::definitions::schema;

/// Schema of the chart's own values. It refers to the kinds' specs, which [`values_schema`] inserts.
const CHART_SCHEMA: &str = include_str!("chart_values.json");

/// Kinds whose specs are part of the values.
const KINDS: [&str; 3] = ["KVCacheCluster", "SSDPool", "CacheTenant"];

/// Keywords with the same meaning in JSON schemas and in definitions. Descriptions are kept, because
/// editors show them.
const SHARED_KEYWORDS: [&str; 13] = [
    "description",
    "enum",
    "items",
    "maxItems",
    "maxLength",
    "maxProperties",
    "maximum",
    "minItems",
    "minLength",
    "minimum",
    "pattern",
    "required",
    "type",
];

/// Returns the schema as text.
///
/// # Panics
/// Never: the built-in JSON is an object with `$defs`.
pub(crate) fn values_schema(definitions: &[CustomResourceDefinition]) -> String {
    let mut whole: Value = serde_json::from_str(CHART_SCHEMA).expect("the chart's own values are JSON");
    for kind in KINDS {
        let definition =
            definitions.iter().find(|one| one.spec.names.kind == kind).expect("the kind is defined");
        whole["$defs"][kind] = closed(&schema(definition)["properties"]["spec"]);
    }
    let mut text = serde_json::to_string_pretty(&whole).expect("a schema is JSON");
    text.push('\n');
    text
}

/// Returns the same schema without additional fields in its objects.
fn closed(schema: &Value) -> Value {
    let fields = schema.as_object().expect("a schema is an object");
    let mut closed: Map<String, Value> = fields
        .iter()
        .filter(|(name, _)| SHARED_KEYWORDS.contains(&name.as_str()))
        .map(copy_keyword)
        .collect();
    if let Some(items) = fields.get("items") {
        closed.insert("items".to_owned(), self::closed(items));
    }
    if let Some(Value::Object(properties)) = fields.get("properties") {
        let properties = properties.iter().map(|(name, property)| (name.clone(), self::closed(property)));
        closed.insert("properties".to_owned(), Value::Object(properties.collect()));
    }
    if schema["type"] == "object" {
        let others = fields.get("additionalProperties").map_or(json!(false), self::closed);
        closed.insert("additionalProperties".to_owned(), others);
    }
    Value::Object(closed)
}

/// Copies a keyword. Bounds of integers are written as integers.
fn copy_keyword((name, value): (&String, &Value)) -> (String, Value) {
    let whole = value.as_f64().filter(|number| number.fract() == 0.0 && name.ends_with("imum"));
    #[allow(clippy::cast_possible_truncation, reason = "bounds of our fields are below 2^53")]
    let value = whole.map_or_else(|| value.clone(), |number| json!(number as i64));
    (name.clone(), value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn closes_objects_keeps_maps_open_and_drops_kubernetes_keywords() {
        let schema = json!({
            "type": "object",
            "x-kubernetes-validations": [{"rule": "true"}],
            "required": ["list"],
            "properties": {
                "list": {"type": "array", "maxItems": 2, "items": {"type": "object", "properties": {"a": {"type": "integer", "maximum": 5.0}}}},
                "map": {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "string"}, "default": {}},
            },
        });
        let expected = json!({
            "type": "object",
            "additionalProperties": false,
            "required": ["list"],
            "properties": {
                "list": {"type": "array", "maxItems": 2, "items": {"type": "object", "additionalProperties": false, "properties": {"a": {"type": "integer", "maximum": 5}}}},
                "map": {"type": "object", "maxProperties": 3, "additionalProperties": {"type": "string"}},
            },
        });
        assert_eq!(closed(&schema), expected);
    }

    #[test]
    fn every_reference_has_its_definition() {
        let text = values_schema(&crate::definitions());
        let whole: Value = serde_json::from_str(&text).expect("JSON");
        for (at, _) in text.match_indices("\"#/$defs/") {
            let name = text[at..].trim_start_matches("\"#/$defs/").split('"').next().expect("a name");
            assert!(whole["$defs"][name].is_object(), "{name}");
        }
    }
}
