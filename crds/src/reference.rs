//! `docs/resources`: every field and rule of every kind, generated from the schemas that the API server gets.
//!
//! One page for each kind and an index with the types and reasons of conditions. A table cell has at most
//! [`CELL_CHARS_MAX`] characters; the rest of a longer description is a list item below the table.

use std::collections::BTreeMap;
use std::fmt::Write as _;

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;
use serde_json::{Map, Value};

use crate::definitions::schema;
use crate::status::{ConditionType, Reason};
use crate::{CATEGORY, GROUP, VERSION};

/// Name of the index page.
pub(crate) const INDEX: &str = "README.md";

/// Second line of every page.
const HEADER: &str =
    "<!-- Generated from the types in crds/src by `cargo run -p reprise-crds --bin crdgen`. Do not edit. -->";

/// Upper bound on the characters of a description in a table cell.
const CELL_CHARS_MAX: usize = 200;
/// Upper bound on the characters of a line of prose. Table rows are longer.
const LINE_CHARS_MAX: usize = 100;

/// Returns all pages by their file name.
pub(crate) fn pages(definitions: &[CustomResourceDefinition]) -> BTreeMap<String, String> {
    let kinds = definitions.iter().map(|definition| (file_name(definition), kind_page(definition)));
    kinds.chain([(INDEX.to_owned(), index(definitions))]).collect()
}

fn file_name(definition: &CustomResourceDefinition) -> String {
    format!("{}.md", definition.spec.names.kind.to_lowercase())
}

fn index(definitions: &[CustomResourceDefinition]) -> String {
    let mut page = format!("# Custom resources\n\n{HEADER}\n\n");
    prose(
        &mut page,
        &format!(
            "All kinds are in `{GROUP}/{VERSION}`. `kubectl get {CATEGORY}` lists the objects of all kinds, and `kubectl explain` \
             shows the descriptions of these pages."
        ),
    );
    line(&mut page, "");
    for item in [
        "A field without a default is absent unless you set it. `required` fields must be set.",
        "Quantities of bytes are whole numbers, alone or with `k`, `M`, `G`, `T`, `P`, `Ki`, `Mi`, `Gi`, `Ti` or `Pi`.",
        "Durations are whole numbers with `ms`, `s`, `m` or `h`.",
    ] {
        list_item(&mut page, "", item);
    }
    line(&mut page, "\n| kind | short | scope | purpose |\n|---|---|---|---|");
    for definition in definitions {
        let names = &definition.spec.names;
        let short = names.short_names.iter().flatten().cloned().collect::<Vec<_>>().join(", ");
        let description = text(&schema(definition), "description");
        let purpose = sentences(&description).into_iter().next().unwrap_or_default().to_owned();
        line(
            &mut page,
            &format!(
                "| [{}]({}) | `{short}` | {} | {purpose} |",
                names.kind,
                file_name(definition),
                definition.spec.scope
            ),
        );
    }
    line(&mut page, "\n## Condition types\n\n| type | meaning when true |\n|---|---|");
    for (word, meaning) in ConditionType::MEANINGS {
        line(&mut page, &format!("| `{word}` | {} |", joined(meaning)));
    }
    line(&mut page, "\n## Condition reasons\n\n| reason | meaning |\n|---|---|");
    for (word, meaning) in Reason::MEANINGS {
        line(&mut page, &format!("| `{word}` | {} |", joined(meaning)));
    }
    page
}

fn kind_page(definition: &CustomResourceDefinition) -> String {
    let schema = schema(definition);
    let kind = &definition.spec.names.kind;
    let mut page = format!("# {kind}\n\n{HEADER}\n\n");
    prose(&mut page, &text(&schema, "description"));
    line(&mut page, &format!("\n[All custom resources]({INDEX})"));
    for part in ["spec", "status"] {
        let title = if part == "spec" { "Spec" } else { "Status" };
        line(
            &mut page,
            &format!(
                "\n## {title}\n\n| field | type | default | bounds | description |\n|---|---|---|---|---|"
            ),
        );
        let mut rows = Rows { page: &mut page, details: Vec::new() };
        rows.fields(part, &schema["properties"][part]);
        let details = rows.details;
        if !details.is_empty() {
            line(&mut page, "");
        }
        for (path, detail) in details {
            detail_items(&mut page, &path, &detail);
        }
    }
    line(
        &mut page,
        "\n## Rules\n\nThe API server rejects an object that violates one of these rules.\n\n| field | message |\n|---|---|",
    );
    rules(&mut page, "", &schema);
    page
}

/// Rows of the table of one part.
struct Rows<'a> {
    page: &'a mut String,
    /// Fields whose description does not fit in a cell, with the rest of it.
    details: Vec<(String, Detail)>,
}

/// The part of a description below the table.
struct Detail {
    sentences: String,
    /// Values of a choice and their meanings.
    choices: Vec<(String, String)>,
}

impl Rows<'_> {
    fn fields(&mut self, path: &str, schema: &Value) {
        let required: Vec<&str> =
            schema["required"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        for (name, field) in schema["properties"].as_object().into_iter().flatten() {
            let path = format!("{path}.{name}");
            self.row(&path, field, required.contains(&name.as_str()));
            self.nested(&path, field);
        }
    }

    /// Adds the fields of an object, of the objects in a list, or of the values of a map.
    fn nested(&mut self, path: &str, field: &Value) {
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
        let (cell, detail) = split_description(field);
        self.details.extend(detail.map(|detail| (path.to_owned(), detail)));
        let cells = [format!("`{path}`"), type_of(field), default, bounds(field), cell];
        line(self.page, &format!("| {} |", cells.join(" | ")));
    }
}

/// Splits a description into the text of the cell and the rest. If the description is too long for a cell, the
/// meanings of choices move below the table, and then as many of the last sentences as necessary.
fn split_description(field: &Value) -> (String, Option<Detail>) {
    let whole = text(field, "description");
    if whole.chars().count() <= CELL_CHARS_MAX {
        return (whole, None);
    }
    let values: Vec<&str> =
        field["enum"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let mut rest = whole.as_str();
    let mut choices = Vec::new();
    for value in values.iter().rev() {
        if let Some((before, meaning)) = rest.rsplit_once(&format!("`{value}`: ")) {
            choices.insert(0, ((*value).to_owned(), meaning.trim().to_owned()));
            rest = before.trim();
        }
    }
    let mut cell = String::new();
    let mut sentences = sentences(rest).into_iter().peekable();
    while let Some(sentence) = sentences
        .next_if(|next| cell.is_empty() || cell.chars().count() + 1 + next.chars().count() <= CELL_CHARS_MAX)
    {
        cell.push_str(if cell.is_empty() { "" } else { " " });
        cell.push_str(sentence);
    }
    let sentences = sentences.collect::<Vec<_>>().join(" ");
    (cell, Some(Detail { sentences, choices }))
}

/// Sentences of a description. A sentence ends with a full stop and a space.
fn sentences(text: &str) -> Vec<&str> {
    text.split_inclusive(". ").map(str::trim).collect()
}

fn detail_items(page: &mut String, path: &str, detail: &Detail) {
    let first = format!("`{path}`: {}", detail.sentences);
    list_item(page, "", first.trim());
    for (value, meaning) in &detail.choices {
        list_item(page, "  ", &format!("`{value}`: {meaning}"));
    }
}

fn type_of(field: &Value) -> String {
    match field["type"].as_str() {
        Some("array") => format!("list of {}", type_of(&field["items"])),
        Some("object") if field.get("additionalProperties").is_some() => {
            format!("map to {}", type_of(&field["additionalProperties"]))
        }
        Some(_) if field.get("enum").is_some() => "choice".to_owned(),
        Some(_) if field["format"] == "date-time" => "time".to_owned(),
        Some(name) => name.to_owned(),
        None => "any".to_owned(),
    }
}

/// Describes lengths, ranges, patterns and the values of a choice, including those of a list's items.
fn bounds(field: &Value) -> String {
    let fields = field.as_object().expect("a schema is an object");
    let mut parts = Vec::new();
    if let Some(values) = fields.get("enum").and_then(Value::as_array) {
        parts.push(
            values
                .iter()
                .filter_map(Value::as_str)
                .map(|value| format!("`{value}`"))
                .collect::<Vec<_>>()
                .join(", "),
        );
    }
    parts.extend(range(fields, "minimum", "maximum", ""));
    parts.extend(
        range(fields, "minLength", "maxLength", " characters").filter(|_| !fields.contains_key("enum")),
    );
    parts.extend(range(fields, "minItems", "maxItems", " items"));
    parts.extend(range(fields, "minProperties", "maxProperties", " entries"));
    if let Some(pattern) = fields.get("pattern").and_then(Value::as_str) {
        parts.push(format!("`{}`", pattern.replace('|', "\\|")));
    }
    if fields.contains_key("items") {
        let each = bounds(&field["items"]);
        parts.extend((!each.is_empty()).then(|| format!("each {each}")));
    }
    parts.join("; ")
}

fn range(fields: &Map<String, Value>, least: &str, most: &str, unit: &str) -> Option<String> {
    let number = |keyword: &str| fields.get(keyword).and_then(Value::as_f64);
    match (number(least), number(most)) {
        (Some(least), Some(most)) if least == most => Some(format!("{least}{unit}")),
        (Some(least), Some(most)) => Some(format!("{least} to {most}{unit}")),
        (Some(least), None) => Some(format!("at least {least}{unit}")),
        (None, Some(most)) => Some(format!("at most {most}{unit}")),
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

/// Returns a text of a schema on one line, escaped for Markdown tables.
fn text(schema: &Value, keyword: &str) -> String {
    joined(schema[keyword].as_str().unwrap_or_default()).replace('|', "\\|")
}

fn joined(text: &str) -> String {
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

fn line(page: &mut String, text: &str) {
    writeln!(page, "{text}").expect("writing to a string does not fail");
}

fn prose(page: &mut String, text: &str) {
    wrapped(page, "", "", text);
}

fn list_item(page: &mut String, indent: &str, text: &str) {
    wrapped(page, &format!("{indent}* "), &format!("{indent}  "), text);
}

/// Writes a text in lines of at most [`LINE_CHARS_MAX`] characters, except where one word is longer.
fn wrapped(page: &mut String, first_indent: &str, indent: &str, text: &str) {
    let mut current = first_indent.to_owned();
    let mut has_words = false;
    for word in text.split_whitespace() {
        if has_words && current.chars().count() + 1 + word.chars().count() > LINE_CHARS_MAX {
            line(page, &current);
            current = indent.to_owned();
            has_words = false;
        }
        current.push_str(if has_words { " " } else { "" });
        current.push_str(word);
        has_words = true;
    }
    line(page, &current);
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn moves_choices_and_last_sentences_of_long_descriptions_below_the_table() {
        let short = json!({"type": "string", "enum": ["A"], "description": "A choice. `A`: One."});
        let (cell, detail) = split_description(&short);
        assert_eq!(cell, "A choice. `A`: One.");
        assert!(detail.is_none());

        let (first, second) = ("x".repeat(150) + ".", "y".repeat(150) + ".");
        let description = format!("{first} {second} `A`: One. `B`: Two.");
        let long = json!({"type": "string", "enum": ["A", "B"], "description": description});
        let (cell, detail) = split_description(&long);
        let detail = detail.expect("the description does not fit in a cell");
        assert_eq!((cell, detail.sentences), (first, second));
        let pair = |value: &str, meaning: &str| (value.to_owned(), meaning.to_owned());
        assert_eq!(detail.choices, [pair("A", "One."), pair("B", "Two.")]);
    }

    #[test]
    fn wraps_list_items_at_the_line_limit() {
        let mut page = String::new();
        list_item(&mut page, "", &["word"; 40].join(" "));
        let lines: Vec<&str> = page.lines().collect();
        assert_eq!(lines.len(), 3);
        assert!(lines.iter().all(|line| line.chars().count() <= LINE_CHARS_MAX));
        assert!(lines[0].starts_with("* word") && lines[1].starts_with("  word"));
    }
}
