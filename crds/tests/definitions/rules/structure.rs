//! The checks of the API server besides CEL: types, required and unknown fields, choices, bounds, patterns. It
//! implements only the JSON Schema keywords in our definitions; an unknown keyword fails the test.

use regex::Regex;
use serde_json::{Map, Value};

/// Keywords that do not constrain a single value, or are checked elsewhere.
const SILENT: &[&str] = &["description", "default", "x-kubernetes-validations", "x-kubernetes-list-map-keys"];

/// Returns the object with the schema's defaults.
pub(crate) fn with_defaults(schema: &Value, object: &Value) -> Value {
    kube::core::cel::apply_defaults(schema, object)
}

/// Returns the violations of an object, each beginning with its path. Metadata is not checked.
pub(crate) fn violations(schema: &Value, object: &Value) -> Vec<String> {
    let mut found = Vec::new();
    for part in ["spec", "status"] {
        if let Some(value) = object.get(part) {
            check(&schema["properties"][part], value, part, &mut found);
        }
    }
    found
}

fn check(schema: &Value, value: &Value, path: &str, found: &mut Vec<String>) {
    let schema = schema.as_object().expect("a schema is an object");
    for (keyword, bound) in schema {
        let keeps = match keyword.as_str() {
            "type" => has_type(value, bound.as_str().expect("one type")),
            "enum" => bound.as_array().expect("a list").contains(value),
            "minimum" => value.as_f64().is_none_or(|number| number >= limit(bound)),
            "maximum" => value.as_f64().is_none_or(|number| number <= limit(bound)),
            "minLength" => value.as_str().is_none_or(|text| text.chars().count() as f64 >= limit(bound)),
            "maxLength" => value.as_str().is_none_or(|text| text.chars().count() as f64 <= limit(bound)),
            "minItems" => value.as_array().is_none_or(|items| items.len() as f64 >= limit(bound)),
            "maxItems" => value.as_array().is_none_or(|items| items.len() as f64 <= limit(bound)),
            "maxProperties" => value.as_object().is_none_or(|entries| entries.len() as f64 <= limit(bound)),
            "pattern" => {
                let pattern = Regex::new(bound.as_str().expect("a text")).expect("a pattern");
                value.as_str().is_none_or(|text| pattern.is_match(text))
            }
            "required" => bound.as_array().expect("a list").iter().all(|name| {
                value.as_object().is_none_or(|fields| fields.contains_key(name.as_str().expect("a name")))
            }),
            "x-kubernetes-list-type" => unique(schema, value),
            "format" | "properties" | "items" | "additionalProperties" => true,
            silent => {
                assert!(SILENT.contains(&silent), "{path}: '{silent}' is not known here");
                true
            }
        };
        if !keeps {
            found.push(format!("{path}: {keyword} {bound} refuses {value}"));
        }
    }
    below(schema, value, path, found);
}

fn below(schema: &Map<String, Value>, value: &Value, path: &str, found: &mut Vec<String>) {
    if let (Some(items), Some(values)) = (schema.get("items"), value.as_array()) {
        for (at, value) in values.iter().enumerate() {
            check(items, value, &format!("{path}[{at}]"), found);
        }
    }
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = format!("{path}.{name}");
        match (
            schema.get("properties").and_then(|properties| properties.get(name)),
            schema.get("additionalProperties"),
        ) {
            (Some(inner), _) | (None, Some(inner)) => check(inner, value, &path, found),
            (None, None) => found.push(format!("{path}: no such field")),
        }
    }
}

fn has_type(value: &Value, name: &str) -> bool {
    match name {
        "string" => value.is_string(),
        "integer" => value.is_i64() || value.is_u64(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        other => panic!("type '{other}' is not known here"),
    }
}

fn unique(schema: &Map<String, Value>, value: &Value) -> bool {
    let Some(values) = value.as_array() else { return true };
    let identity = |value: &Value| match schema.get("x-kubernetes-list-map-keys").and_then(Value::as_array) {
        Some(keys) => keys.iter().map(|key| value[key.as_str().expect("a name")].clone()).collect(),
        None => vec![value.clone()],
    };
    values
        .iter()
        .enumerate()
        .all(|(at, value)| values[..at].iter().all(|other| identity(other) != identity(value)))
}

fn limit(bound: &Value) -> f64 {
    bound.as_f64().expect("a number")
}
