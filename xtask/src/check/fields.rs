//! Every field of the custom resources has an effect, is rejected, or is reported as unused.
//!
//! `xtask/fields.toml` lists all fields. Each entry is one of:
//! * `read by FILE`: a field of a spec that this file reads.
//! * `written by FILE`: a field of a status that this file writes.
//! * `never set, reported by FILE`: a field of a status without a value yet; this file names it in a condition.
//! * `rejected by FILE`: a field of a spec that this file rejects, with a message that names the field.
//! * `unused, reported by FILE`: a field of a spec without effect yet; this file names it in a condition.
//!
//! An entry of the last two kinds covers the fields below it, as does one of the types in [`WHOLE`].
//!
//! The fields come from the generated definitions (`crds/definitions`); a test of `crds` compares these with the types.

use std::collections::{BTreeMap, BTreeSet};

use crate::toml;
use crate::tree::Tree;
use crate::yaml::Node;

/// Fields that are passed on or read as a whole: types of Kubernetes, and conditions.
const WHOLE: &[&str] =
    &["conditions", "namespaceSelector", "nodeSelector", "resources", "slackProfiles", "tolerations"];

/// File with the fields.
const FIELDS: &str = "xtask/fields.toml";

/// Folder of the definitions.
const DEFINITIONS: &str = "crds/definitions/";

/// The schemas have more fields than this.
const FIELDS_MIN: usize = 300;

/// Returns the paths of all fields that contain no other fields, for example `spec.pools[].name`.
fn leaves(schema: &Node, path: &str, found: &mut BTreeSet<String>) {
    if let Some(fields) = schema.at(&["properties"]) {
        for field in &fields.children {
            leaves(field, &format!("{path}.{}", field.name), found);
        }
        return;
    }
    match schema.at(&["items"]) {
        Some(items) if items.at(&["properties"]).is_some() => leaves(items, &format!("{path}[]"), found),
        _ => drop(found.insert(path.to_owned())),
    }
}

/// Returns the kind of a definition, and the fields in its spec and its status.
fn fields_of(definition: &str) -> Result<(String, BTreeSet<String>), String> {
    let root = Node::parse(definition)?;
    let kind = root.at(&["spec", "names", "kind"]).ok_or("a definition without a kind")?.scalar.clone();
    let schema = root.at(&["spec", "versions", "schema", "openAPIV3Schema", "properties"]);
    let schema = schema.ok_or("a definition without a schema")?;
    let mut found = BTreeSet::new();
    for part in ["spec", "status"] {
        leaves(schema.at(&[part]).ok_or("a schema without spec or status")?, part, &mut found);
    }
    Ok((kind, found))
}

/// Returns the fields in the spec and the status of each kind.
fn fields(tree: &Tree) -> Result<BTreeMap<String, BTreeSet<String>>, String> {
    let definitions = tree.files().filter(|file| file.path.starts_with(DEFINITIONS));
    definitions.map(|file| fields_of(&file.text).map_err(|error| format!("{}: {error}", file.path))).collect()
}

/// Whether an entry covers a field: the field itself, or one below it.
fn covers(entry: &str, field: &str) -> bool {
    field.strip_prefix(entry).is_some_and(|rest| rest.is_empty() || rest.starts_with(['.', '[']))
}

/// Returns the last name of a path as Rust code writes it.
fn identifier(path: &str) -> String {
    let name = last_name(path);
    if name == "type" {
        return "kind".to_owned();
    }
    let mut words = String::new();
    let mut before = ' ';
    for character in name.chars() {
        if character.is_ascii_uppercase() && (before.is_ascii_lowercase() || before.is_ascii_digit()) {
            words.push('_');
        }
        words.push(character.to_ascii_lowercase());
        before = character;
    }
    words
}

fn last_name(path: &str) -> &str {
    path.rsplit('.').next().unwrap_or_default().trim_end_matches("[]")
}

/// Returns the code of a file without comments and unit tests.
fn code(tree: &Tree, file: &str) -> Option<String> {
    let text = tree.file(file)?.text.split("#[cfg(test)]").next().unwrap_or_default();
    Some(text.lines().filter(|line| !line.trim_start().starts_with("//")).collect::<Vec<_>>().join("\n"))
}

/// Whether a text contains a name as a whole word.
fn has_word(text: &str, word: &str) -> bool {
    let is_part = |character: char| character.is_ascii_alphanumeric() || character == '_';
    text.match_indices(word)
        .any(|(at, _)| !text[..at].ends_with(is_part) && !text[at + word.len()..].starts_with(is_part))
}

/// Returns the fault of an entry; `None` if it has none.
fn offence(tree: &Tree, path: &str, value: &str) -> Option<String> {
    let Some((verb, file)) = value.rsplit_once(' ') else { return Some(format!("'{value}' names no file")) };
    let Some(code) = code(tree, file) else { return Some(format!("{file} does not exist")) };
    let name = last_name(path);
    let word = match (verb, path.starts_with("spec")) {
        ("read by", true) | ("written by", false) => identifier(path),
        ("never set, reported by", false) | ("rejected by" | "unused, reported by", true) => {
            // A message names a reference by its own name.
            let parent = path.rsplit('.').nth(1).unwrap_or_default();
            if name == "name" { parent.trim_end_matches("[]").to_owned() } else { name.to_owned() }
        }
        _ => return Some(format!("'{verb}' is not a verb for this field")),
    };
    (!has_word(&code, &word)).then(|| format!("{file} does not contain {word}"))
}

pub(super) fn effects(tree: &Tree) -> Vec<String> {
    let all = match fields(tree) {
        Ok(all) => all,
        Err(error) => return vec![error],
    };
    let entries: BTreeMap<String, BTreeMap<String, String>> = tree
        .file(FIELDS)
        .map(|file| toml::tables(&file.text))
        .unwrap_or_default()
        .into_iter()
        .filter(|table| !table.name.is_empty())
        .map(|table| {
            let entries = table.entries.iter();
            let texts = entries.map(|(path, value)| (path.clone(), toml::string(value).unwrap_or_default()));
            (table.name.clone(), texts.collect())
        })
        .collect();
    let mut offences = Vec::new();
    if all.values().map(BTreeSet::len).sum::<usize>() <= FIELDS_MIN {
        offences.push(format!("the schemas have at most {FIELDS_MIN} fields"));
    }
    if !entries.keys().eq(all.keys()) {
        offences.push(format!("{FIELDS} lists not all kinds, or others"));
    }
    for (kind, fields) in &all {
        if let Some(listed) = entries.get(kind) {
            offences.extend(of_kind(tree, kind, fields, listed));
        }
    }
    offences
}

fn of_kind(
    tree: &Tree,
    kind: &str,
    fields: &BTreeSet<String>,
    listed: &BTreeMap<String, String>,
) -> Vec<String> {
    let mut offences = Vec::new();
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
        offences.extend(offence(tree, path, value).map(|why| format!("{kind} {path}: {why}")));
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_wrong_entries() {
        let reader = "operator/src/reconcile/node/build.rs";
        let tree = Tree::of(&[(reader, "// moon_phase\nself.failure_domain_label\n#[cfg(test)]\nmode")]);
        assert_eq!(offence(&tree, "spec.agents.failureDomainLabel", &format!("read by {reader}")), None);
        for (path, value, why) in [
            ("spec.moonPhase", format!("read by {reader}"), "does not contain moon_phase"),
            ("spec.failureDomain", format!("read by {reader}"), "does not contain failure_domain"),
            ("spec.mode", "read by operator/src/gone.rs".to_owned(), "does not exist"),
            ("status.mode", format!("read by {reader}"), "is not a verb for this field"),
            ("spec.mode", format!("written by {reader}"), "is not a verb for this field"),
            ("spec.depth", format!("unused, reported by {reader}"), "does not contain depth"),
            ("spec.mode", "unknown".to_owned(), "names no file"),
        ] {
            let found = offence(&tree, path, &value).unwrap_or_default();
            assert!(found.contains(why), "{path} {value}: {found}");
        }
        assert!(covers("spec.pools", "spec.pools[].name") && !covers("spec.pool", "spec.pools[].name"));
        assert_eq!(identifier("spec.p99ReadLatency[]"), "p99_read_latency");
    }

    #[test]
    fn finds_fields_of_a_schema_that_the_list_lacks() {
        let definition = "spec:\n  names:\n    kind: A\n  versions:\n  - name: v1\n    schema:\n      openAPIV3Schema:\n\
                          \x20       properties:\n          spec:\n            properties:\n              b:\n\
                          \x20               items:\n                  properties:\n                    c:\n\
                          \x20                     type: string\n          status:\n            properties:\n\
                          \x20             d:\n                enum:\n                - e\n";
        let (kind, fields) = fields_of(definition).expect("it parses");
        assert_eq!(kind, "A");
        assert_eq!(fields.iter().collect::<Vec<_>>(), ["spec.b[].c", "status.d"]);
        let tree = Tree::of(&[("a.rs", "c")]);
        let listed = [("spec.b[].c", "read by a.rs"), ("status.e", "written by a.rs")];
        let listed = listed.map(|(path, value)| (path.to_owned(), value.to_owned())).into();
        let offences = of_kind(&tree, &kind, &fields, &listed);
        assert_eq!(offences[0], "A status.d: missing in xtask/fields.toml");
        assert_eq!(offences[1], "A status.e: listed in xtask/fields.toml, but not in the schema");
    }
}
