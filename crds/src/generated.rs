//! Files that are generated from the types, and their drift from the repository.
//!
//! * `crds/definitions/<plural>.yaml`: one definition for each kind.
//! * `docs/resources`: one reference page for each kind, and an index.
//! * `charts/reprise/files/definitions`: copies of the definitions, because Helm cannot read files outside of
//!   the chart. Their annotation keeps them when a release is uninstalled.
//! * `charts/reprise/values.schema.json`: the schema of the chart's values.
//!
//! The three folders must contain no other file. Otherwise the definition or page of a renamed kind would stay.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use crate::definitions::definitions;
use crate::reference;
use crate::values::values_schema;

/// Folder of the definitions, relative to the root of the repository.
pub const DEFINITIONS_FOLDER: &str = "crds/definitions";
/// Folder of the reference pages, relative to the root of the repository.
pub const REFERENCE_FOLDER: &str = "docs/resources";

/// Folder of the chart's definitions.
pub const CHART_DEFINITIONS_FOLDER: &str = "charts/reprise/files/definitions";
/// Schema of the chart's values.
pub const VALUES_SCHEMA: &str = "charts/reprise/values.schema.json";

/// Folders that contain generated files only.
const FOLDERS: [&str; 3] = [DEFINITIONS_FOLDER, CHART_DEFINITIONS_FOLDER, REFERENCE_FOLDER];

/// Annotation by which Helm keeps an object when a release is uninstalled.
const KEEP: (&str, &str) = ("helm.sh/resource-policy", "keep");

/// First line of every definition.
const HEADER: &str =
    "# Generated from the types in crds/src by `cargo run -p reprise-crds --bin crdgen`. Do not edit.\n";

/// Difference between a generated file and the repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drift {
    /// The file is missing.
    Missing(PathBuf),
    /// The file differs; the number is that of the first different line, counted from 1.
    Differs(PathBuf, usize),
    /// The file is not generated from any type.
    Superfluous(PathBuf),
}

/// Returns all files by their path relative to the root of the repository.
pub fn files() -> BTreeMap<PathBuf, String> {
    let definitions = definitions();
    let mut files = BTreeMap::new();
    for definition in &definitions {
        let name = format!("{}.yaml", definition.spec.names.plural);
        files.insert(Path::new(DEFINITIONS_FOLDER).join(&name), yaml(definition));
        files
            .insert(Path::new(CHART_DEFINITIONS_FOLDER).join(&name), yaml(&with_keep_annotation(definition)));
    }
    for (name, page) in reference::pages(&definitions) {
        files.insert(Path::new(REFERENCE_FOLDER).join(name), page);
    }
    files.insert(VALUES_SCHEMA.into(), values_schema(&definitions));
    files
}

fn yaml(definition: &CustomResourceDefinition) -> String {
    format!("{HEADER}{}", serde_yaml_ng::to_string(definition).expect("a definition is YAML"))
}

/// Returns the definition with the annotation that keeps it when the release is uninstalled. Deleting a
/// definition would delete every object of its kind.
fn with_keep_annotation(definition: &CustomResourceDefinition) -> CustomResourceDefinition {
    let mut kept = definition.clone();
    let (name, value) = KEEP;
    kept.metadata.annotations.get_or_insert_default().insert(name.to_owned(), value.to_owned());
    kept
}

/// Returns the differences below a repository's root.
///
/// # Errors
/// A file or a folder cannot be read.
pub fn drift(root: &Path) -> io::Result<Vec<Drift>> {
    let expected = files();
    let mut drift = Vec::new();
    for (path, text) in &expected {
        match std::fs::read_to_string(root.join(path)) {
            Ok(current) if current == *text => {}
            Ok(current) => drift.push(Drift::Differs(path.clone(), first_difference(&current, text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => drift.push(Drift::Missing(path.clone())),
            Err(error) => return Err(error),
        }
    }
    for path in present(root)? {
        if !expected.contains_key(&path) {
            drift.push(Drift::Superfluous(path));
        }
    }
    Ok(drift)
}

/// Writes all files below a repository's root, and removes superfluous ones.
///
/// # Errors
/// A file or folder cannot be read, written or removed.
pub fn write(root: &Path) -> io::Result<Vec<Drift>> {
    let changes = drift(root)?;
    let expected = files();
    for change in &changes {
        match change {
            Drift::Superfluous(path) => std::fs::remove_file(root.join(path))?,
            Drift::Missing(path) | Drift::Differs(path, _) => {
                let target = root.join(path);
                std::fs::create_dir_all(target.parent().expect("every path has a folder"))?;
                std::fs::write(target, &expected[path])?;
            }
        }
    }
    Ok(changes)
}

/// Returns the root of the repository that contains a folder.
pub fn repository_above(folder: &Path) -> Option<PathBuf> {
    folder.ancestors().find(|folder| folder.join("crds/Cargo.toml").is_file()).map(Path::to_owned)
}

fn present(root: &Path) -> io::Result<Vec<PathBuf>> {
    let mut paths = Vec::new();
    for folder in FOLDERS {
        let entries = match std::fs::read_dir(root.join(folder)) {
            Ok(entries) => entries,
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            Err(error) => return Err(error),
        };
        for entry in entries {
            paths.push(Path::new(folder).join(entry?.file_name()));
        }
    }
    paths.sort();
    Ok(paths)
}

fn first_difference(current: &str, expected: &str) -> usize {
    let equal = current.lines().zip(expected.lines()).take_while(|(current, expected)| current == expected);
    equal.count() + 1
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drift::Missing(path) => write!(f, "{}: is missing", path.display()),
            Drift::Differs(path, line) => write!(f, "{}: differs from line {line} on", path.display()),
            Drift::Superfluous(path) => write!(f, "{}: is not generated from any type", path.display()),
        }
    }
}
