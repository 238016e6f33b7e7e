//! Files that are made from the types, and what of them has drifted.
//!
//! `crds/definitions/<plural>.yaml`, one definition each, `docs/RESOURCES.md`, and of the Helm chart the schema of its values and its
//! own copies of the definitions, since Helm reads no file outside its chart: those stay when a release is uninstalled. Nothing
//! else may be in the folders of definitions: one that was renamed would be installed for ever otherwise.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use k8s_openapi::apiextensions_apiserver::pkg::apis::apiextensions::v1::CustomResourceDefinition;

use crate::definitions::definitions;
use crate::reference;
use crate::values::values_schema;

/// Where definitions are, from the root of the repository.
pub const DEFINITIONS_FOLDER: &str = "crds/definitions";
/// Where the reference page is, from the root of the repository.
pub const REFERENCE_PAGE: &str = "docs/RESOURCES.md";

/// Where the chart's definitions are.
pub const CHART_DEFINITIONS_FOLDER: &str = "charts/reprise/files/definitions";
/// Where the schema of the chart's values is.
pub const VALUES_SCHEMA: &str = "charts/reprise/values.schema.json";

/// Folders in which nothing else may be.
const FOLDERS: [&str; 2] = [DEFINITIONS_FOLDER, CHART_DEFINITIONS_FOLDER];

/// What tells Helm to leave an object where it is.
const KEEP: (&str, &str) = ("helm.sh/resource-policy", "keep");

/// The first lines of every definition.
const HEADER: &str =
    "# Generated from the types in crds/src by `cargo run -p reprise-crds --bin crdgen`. Do not edit.\n";

/// How a file differs from what it should be.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Drift {
    /// It is not there.
    Missing(PathBuf),
    /// It differs, first in this line, counted from 1.
    Differs(PathBuf, usize),
    /// It should not be there.
    Superfluous(PathBuf),
}

/// All files by their path from the root of the repository.
pub fn files() -> BTreeMap<PathBuf, String> {
    let definitions = definitions();
    let mut files = BTreeMap::new();
    for definition in &definitions {
        let name = format!("{}.yaml", definition.spec.names.plural);
        files.insert(Path::new(DEFINITIONS_FOLDER).join(&name), yaml(definition));
        files.insert(Path::new(CHART_DEFINITIONS_FOLDER).join(&name), yaml(&kept(definition)));
    }
    files.insert(REFERENCE_PAGE.into(), reference::page(&definitions));
    files.insert(VALUES_SCHEMA.into(), values_schema(&definitions));
    files
}

fn yaml(definition: &CustomResourceDefinition) -> String {
    format!("{HEADER}{}", serde_yaml_ng::to_string(definition).expect("a definition is YAML"))
}

/// The same definition, which outlives the release that brought it: with it would go every object of its kind.
fn kept(definition: &CustomResourceDefinition) -> CustomResourceDefinition {
    let mut kept = definition.clone();
    let (name, value) = KEEP;
    kept.metadata.annotations.get_or_insert_default().insert(name.to_owned(), value.to_owned());
    kept
}

/// What differs below a repository's root.
///
/// # Errors
/// A file or the folder cannot be read.
pub fn drift(root: &Path) -> io::Result<Vec<Drift>> {
    let wanted = files();
    let mut drift = Vec::new();
    for (path, text) in &wanted {
        match std::fs::read_to_string(root.join(path)) {
            Ok(found) if found == *text => {}
            Ok(found) => drift.push(Drift::Differs(path.clone(), first_difference(&found, text))),
            Err(error) if error.kind() == io::ErrorKind::NotFound => drift.push(Drift::Missing(path.clone())),
            Err(error) => return Err(error),
        }
    }
    for path in present(root)? {
        if !wanted.contains_key(&path) {
            drift.push(Drift::Superfluous(path));
        }
    }
    Ok(drift)
}

/// Writes all files below a repository's root, and takes away what should not be there.
///
/// # Errors
/// A file or folder cannot be read, written or removed.
pub fn write(root: &Path) -> io::Result<Vec<Drift>> {
    let changes = drift(root)?;
    let wanted = files();
    for change in &changes {
        match change {
            Drift::Superfluous(path) => std::fs::remove_file(root.join(path))?,
            Drift::Missing(path) | Drift::Differs(path, _) => {
                let target = root.join(path);
                std::fs::create_dir_all(target.parent().expect("every path has a folder"))?;
                std::fs::write(target, &wanted[path])?;
            }
        }
    }
    Ok(changes)
}

/// The repository that a folder is in.
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

fn first_difference(found: &str, wanted: &str) -> usize {
    let same = found.lines().zip(wanted.lines()).take_while(|(found, wanted)| found == wanted).count();
    same + 1
}

impl fmt::Display for Drift {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Drift::Missing(path) => write!(f, "{}: is missing", path.display()),
            Drift::Differs(path, line) => write!(f, "{}: differs from line {line} on", path.display()),
            Drift::Superfluous(path) => write!(f, "{}: is no definition of ours", path.display()),
        }
    }
}
