//! Every field of the custom resources has an effect, is rejected, or is reported as unused.
//!
//! `fields.toml` lists all fields. Each entry is one of:
//! * `read by FILE`: a field of a spec that this file reads.
//! * `written by FILE`: a field of a status that this file writes.
//! * `never set, reported by FILE`: a field of a status without a value yet; this file names it in a condition.
//! * `rejected by FILE`: a field of a spec that this file rejects, with a message that names the field.
//! * `unused, reported by FILE`: a field of a spec without effect yet; this file names it in a condition.
//!
//! An entry of the last two kinds covers the fields below it, as does one of the types in [`WHOLE`].

use std::collections::{BTreeMap, BTreeSet};

use regex::Regex;
use reprise_e2e::tree;
use serde_json::Value;

use super::assert_none;

/// Fields that are passed on or read as a whole: types of Kubernetes, and conditions.
const WHOLE: &[&str] =
    &["conditions", "namespaceSelector", "nodeSelector", "resources", "slackProfiles", "tolerations"];

/// File with the fields.
const FIELDS: &str = "e2e/tests/tidy/fields.toml";

/// Returns the paths of all fields that contain no other fields, for example `spec.pools[].name`.
fn leaves(schema: &Value, path: &str, found: &mut BTreeSet<String>) {
    match (&schema["properties"], &schema["items"]) {
        (Value::Object(fields), _) => {
            for (name, field) in fields {
                leaves(field, &format!("{path}.{name}"), found);
            }
        }
        (_, items @ Value::Object(_)) if items["properties"].is_object() => {
            leaves(items, &format!("{path}[]"), found);
        }
        _ => {
            found.insert(path.to_owned());
        }
    }
}

/// Returns the fields in the spec and the status of each kind.
fn fields() -> BTreeMap<String, BTreeSet<String>> {
    let kinds = reprise_crds::definitions().into_iter().map(|definition| {
        let schema = reprise_crds::definitions::schema(&definition);
        let mut found = BTreeSet::new();
        for part in ["spec", "status"] {
            leaves(&schema["properties"][part], part, &mut found);
        }
        (definition.spec.names.kind, found)
    });
    kinds.collect()
}

/// Whether an entry covers a field: the field itself, or one below it.
fn covers(entry: &str, field: &str) -> bool {
    field.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns the last name of a path as Rust code writes it.
fn identifier(path: &str) -> String {
    let name = path.rsplit('.').next().expect("a path has a name").trim_end_matches("[]");
    if name == "type" {
        return "kind".to_owned();
    }
    let boundary = Regex::new("([a-z0-9])([A-Z])").expect("the expression is valid");
    boundary.replace_all(name, "${1}_${2}").to_lowercase()
}

/// Returns the code of a file without comments and unit tests.
fn code(file: &str) -> Option<String> {
    let text = std::fs::read_to_string(tree().join(file)).ok()?;
    let text = text.split("#[cfg(test)]").next().unwrap_or_default();
    Some(text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n"))
}

/// Returns the fault of an entry; `None` if it has none.
fn offence(path: &str, value: &str) -> Option<String> {
    let Some((verb, file)) = value.rsplit_once(' ') else { return Some(format!("'{value}' names no file")) };
    let Some(code) = code(file) else { return Some(format!("{file} does not exist")) };
    let name = path.rsplit('.').next().expect("a path has a name").trim_end_matches("[]");
    let word = match (verb, path.starts_with("spec")) {
        ("read by", true) | ("written by", false) => identifier(path),
        ("never set, reported by", false) | ("rejected by" | "unused, reported by", true) => {
            // A message names a reference by its own name.
            let parent = path.rsplit('.').nth(1).unwrap_or_default();
            if name == "name" { parent.trim_end_matches("[]").to_owned() } else { name.to_owned() }
        }
        _ => return Some(format!("'{verb}' is not a verb for this field")),
    };
    let found = Regex::new(&format!(r"\b{word}\b")).expect("names are plain").is_match(&code);
    (!found).then(|| format!("{file} does not contain {word}"))
}

#[test]
fn every_field_of_the_custom_resources_has_an_effect_or_is_reported() {
    let text = std::fs::read_to_string(tree().join(FIELDS)).expect("the file exists");
    let entries: BTreeMap<String, BTreeMap<String, String>> =
        toml::from_str(&text).expect("the file is TOML");
    let mut offences = Vec::new();
    let all = fields();
    assert!(all.values().map(BTreeSet::len).sum::<usize>() > 300, "the schemas have fields: {all:?}");
    assert_eq!(
        entries.keys().collect::<Vec<_>>(),
        all.keys().collect::<Vec<_>>(),
        "{FIELDS} lists all kinds"
    );
    for (kind, fields) in &all {
        let listed = &entries[kind];
        for field in fields {
            match listed.keys().filter(|entry| covers(entry, field)).count() {
                1 => {}
                0 => offences.push(format!("{kind} {field}: missing in {FIELDS}")),
                _ => offences.push(format!("{kind} {field}: several entries in {FIELDS} cover it")),
            }
        }
        for (path, value) in listed {
            if !fields.iter().any(|field| covers(path, field)) {
                offences.push(format!("{kind} {path}: listed in {FIELDS}, but not in the schema"));
            }
            let is_leaf = fields.contains(path);
            let is_whole = WHOLE.iter().any(|name| path.ends_with(&format!(".{name}")));
            if !is_leaf && !is_whole && !value.starts_with("rejected") && !value.starts_with("unused") {
                offences.push(format!("{kind} {path}: list the fields below it in {FIELDS}"));
            }
            offences.extend(offence(path, value).map(|why| format!("{kind} {path}: {why}")));
        }
    }
    assert_none("every field has a reader, a writer, a rejection, or a report that it is unused", &offences);
}

#[test]
fn wrong_entries_are_found() {
    let reader = "operator/src/node/build.rs";
    assert_eq!(offence("spec.agents.failureDomainLabel", &format!("read by {reader}")), None);
    for (path, value, why) in [
        ("spec.moonPhase", format!("read by {reader}"), "does not contain moon_phase"),
        ("spec.mode", "read by operator/src/gone.rs".to_owned(), "does not exist"),
        ("status.mode", format!("read by {reader}"), "is not a verb for this field"),
        ("spec.mode", format!("written by {reader}"), "is not a verb for this field"),
        ("spec.depth", format!("unused, reported by {reader}"), "does not contain depth"),
        ("spec.mode", "unknown".to_owned(), "names no file"),
    ] {
        let found = offence(path, &value).unwrap_or_default();
        assert!(found.contains(why), "{path} {value}: {found}");
    }
    assert!(covers("spec.pools", "spec.pools[].name") && !covers("spec.pool", "spec.pools[].name"));
}
