//! The schema of the chart's values: the chart's own ones as written in `chart_values.json`, and the specs of our kinds by the same
//! schemas as the API server has them.
//!
//! Everything is closed: a field that is spelled wrong is refused before anything is installed, where the API server would drop it.
//! Rules in CEL have no counterpart here; the API server keeps them.

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value, json};

use crate::definitions::schema;

/// The chart's own values. What stands there for a kind is a reference, which is made whole here.
const OWN: &str = include_str!("chart_values.json");

/// Kinds that values hold specs of.
const KINDS: [&str; 3] = ["KVCacheCluster", "SSDPool", "CacheTenant"];

/// Keywords that mean the same in JSON schemas and in definitions. Descriptions stay: editors show them.
const KEPT: [&str; 13] = [
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

/// The schema as text.
///
/// # Panics
/// Never: what is built in is an object that has the kinds' places.
pub(crate) fn values_schema(definitions: &[CustomResourceDefinition]) -> String {
    let mut whole: Value = serde_json::from_str(OWN).expect("the chart's own values are JSON");
    for kind in KINDS {
        let definition = definitions.iter().find(|one| one.spec.names.kind == kind).expect("a kind of ours");
        whole["$defs"][kind] = closed(&schema(definition)["properties"]["spec"]);
    }
    let mut text = serde_json::to_string_pretty(&whole).expect("a schema is JSON");
    text.push('\n');
    text
}

/// The same schema, in which objects have no other fields than those that are named.
fn closed(schema: &Value) -> Value {
    let fields = schema.as_object().expect("a schema is an object");
    let mut closed: Map<String, Value> =
        fields.iter().filter(|(name, _)| KEPT.contains(&name.as_str())).map(copied).collect();
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

/// Bounds of integers are integers, as people write them.
fn copied((name, value): (&String, &Value)) -> (String, Value) {
    let whole = value.as_f64().filter(|number| number.fract() == 0.0 && name.ends_with("imum"));
    #[allow(clippy::cast_possible_truncation, reason = "bounds of our fields are below 2^53")]
    let value = whole.map_or_else(|| value.clone(), |number| json!(number as i64));
    (name.clone(), value)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objects_are_closed_maps_stay_open_and_what_only_kubernetes_knows_goes() {
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
