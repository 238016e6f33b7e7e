//! `docs/RESOURCES.md`: every field of every kind, out of the same schemas that the API server gets.

use std::fmt::Write as _;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value};

use crate::definitions::schema;
use crate::status::{ConditionType, Reason};
use crate::{CATEGORY, GROUP, VERSION};

/// The page.
pub(crate) fn page(definitions: &[CustomResourceDefinition]) -> String {
    let mut page = format!(
        "# Resources\n\n<!-- Generated from the types in crds/src by `cargo run -p reprise-crds --bin crdgen`. Do not edit. -->\n\n\
         All kinds are of `{GROUP}/{VERSION}`; `kubectl get {CATEGORY}` shows all of them, `kubectl explain` says what stands here. \
         A field without a default is absent unless it is written; `required` fields must be written. Bytes are whole numbers with \
         `k`, `M`, `G`, `T`, `P`, `Ki`, `Mi`, `Gi`, `Ti` or `Pi`; times are whole numbers with `ms`, `s`, `m` or `h`.\n\n\
         | kind | short | scope |\n|---|---|---|\n"
    );
    for definition in definitions {
        let names = &definition.spec.names;
        let short = names.short_names.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
        line(
            &mut page,
            &format!(
                "| [{0}](#{1}) | `{short}` | {2} |",
                names.kind,
                names.kind.to_lowercase(),
                definition.spec.scope
            ),
        );
    }
    for definition in definitions {
        kind(&mut page, definition);
    }
    line(&mut page, "\n## Conditions\n\n| type | meaning when true |\n|---|---|");
    for (word, meaning) in ConditionType::MEANINGS {
        line(&mut page, &format!("| `{word}` | {} |", joined(meaning)));
    }
    line(&mut page, "\n| reason | meaning |\n|---|---|");
    for (word, meaning) in Reason::MEANINGS {
        line(&mut page, &format!("| `{word}` | {} |", joined(meaning)));
    }
    page
}

fn kind(page: &mut String, definition: &CustomResourceDefinition) {
    let schema = schema(definition);
    let names = &definition.spec.names;
    line(page, &format!("\n## {}\n\n{}\n", names.kind, text(&schema, "description")));
    for part in ["spec", "status"] {
        line(
            page,
            &format!(
                "### {} of {}\n\n| field | type | default | bounds | what it is |\n|---|---|---|---|---|",
                part, names.kind
            ),
        );
        let mut rows = Rows { page: &mut *page };
        rows.fields(part, &schema["properties"][part]);
        page.push('\n');
    }
    line(
        page,
        &format!("### Rules of {}\n\n| where | what is refused, and what to do |\n|---|---|", names.kind),
    );
    rules(page, "", &schema);
}

/// Rows of the table of one part.
struct Rows<'a> {
    page: &'a mut String,
}

impl Rows<'_> {
    fn fields(&mut self, path: &str, schema: &Value) {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            self.row(&path, field, required.contains(&name.as_str()));
            self.below(&path, field);
        }
    }

    /// What is in an object, in the objects of a list, in the values of a map.
    fn below(&mut self, path: &str, field: &Value) {
        match field["type"].as_str() {
            Some("array") => self.fields(&format!("{path}[]"), &field["items"]),
            Some("object") if field.get("additionalProperties").is_some() => {
                self.fields(&format!("{path}.*"), &field["additionalProperties"]);
            }
            _ => self.fields(path, field),
        }
    }

    fn row(&mut self, path: &str, field: &Value, required: bool) {
        let default = match field.get("default") {
            Some(Value::Object(_)) => "of its fields".to_owned(),
            Some(default) => format!("`{default}`"),
            None if required => "required".to_owned(),
            None => String::new(),
        };
        let cells = [format!("`{path}`"), type_of(field), default, bounds(field), text(field, "description")];
        line(self.page, &format!("| {} |", cells.join(" | ")));
    }
}

fn type_of(field: &Value) -> String {
    match field["type"].as_str() {
        Some("array") => format!("list of {}", type_of(&field["items"])),
        Some("object") if field.get("additionalProperties").is_some() => {
            format!("map to {}", type_of(&field["additionalProperties"]))
        }
        Some(_) if field.get("enum").is_some() => "choice".to_owned(),
        Some(_) if field["format"] == "date-time" => "time of day".to_owned(),
        Some(name) => name.to_owned(),
        None => "any".to_owned(),
    }
}

/// Bounds in words: lengths, ranges, patterns, words of a choice; those of a list's items with it.
fn bounds(field: &Value) -> String {
    let fields = field.as_object().expect("a schema is an object");
    let mut told = Vec::new();
    if let Some(words) = fields.get("enum").and_then(Value::as_array) {
        told.push(
            words
                .iter()
                .filter_map(Value::as_str)
                .map(|word| format!("`{word}`"))
                .collect::<Vec<_>>()
                .join(", "),
        );
    }
    told.extend(range(fields, "minimum", "maximum", ""));
    told.extend(
        range(fields, "minLength", "maxLength", " characters").filter(|_| !fields.contains_key("enum")),
    );
    told.extend(range(fields, "minItems", "maxItems", " items"));
    told.extend(range(fields, "minProperties", "maxProperties", " entries"));
    if let Some(pattern) = fields.get("pattern").and_then(Value::as_str) {
        told.push(format!("`{}`", pattern.replace('|', "\\|")));
    }
    if fields.contains_key("items") {
        let each = bounds(&field["items"]);
        told.extend((!each.is_empty()).then(|| format!("each {each}")));
    }
    told.join("; ")
}

fn range(fields: &Map<String, Value>, least: &str, most: &str, unit: &str) -> Option<String> {
    let whole = |keyword: &str| fields.get(keyword).and_then(Value::as_f64);
    match (whole(least), whole(most)) {
        (Some(least), Some(most)) if least == most => Some(format!("{least}{unit}")),
        (Some(least), Some(most)) => Some(format!("{least} to {most}{unit}")),
        (Some(least), None) => Some(format!("{least} and more{unit}")),
        (None, Some(most)) => Some(format!("up to {most}{unit}")),
        (None, None) => None,
    }
}

fn rules(page: &mut String, path: &str, schema: &Value) {
    for rule in schema["x-kubernetes-validations"].as_array().into_iter().flatten() {
        let place = if path.is_empty() { "the object" } else { path.trim_start_matches('.') };
        line(page, &format!("| `{place}` | {} |", text(rule, "message")));
    }
    for (name, field) in schema["properties"].as_object().into_iter().flatten() {
        rules(page, &format!("{path}.{name}"), field);
    }
    if schema.get("items").is_some() {
        rules(page, &format!("{path}[]"), &schema["items"]);
    }
}

/// A text of a schema, fit for a cell of a table.
fn text(schema: &Value, keyword: &str) -> String {
    joined(schema[keyword].as_str().unwrap_or_default()).replace('|', "\\|")
}

fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("writing to a string does not fail");
}
