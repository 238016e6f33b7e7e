//! Files that are made from the types, and what of them has drifted.
//!
//! `crds/definitions/<plural>.yaml`, one definition each, and `docs/RESOURCES.md`. Nothing else may be in the first folder: a
//! definition that was renamed would be installed for ever otherwise.

use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::path::{Path, PathBuf};

use crate::definitions::definitions;
use crate::reference;

/// Where definitions are, from the root of the repository.
pub const DEFINITIONS_FOLDER: &str = "crds/definitions";
/// Where the reference page is, from the root of the repository.
pub const REFERENCE_PAGE: &str = "docs/RESOURCES.md";

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
    let mut files: BTreeMap<PathBuf, String> = definitions
        .iter()
        .map(|definition| {
            let path = Path::new(DEFINITIONS_FOLDER).join(format!("{}.yaml", definition.spec.names.plural));
            let yaml = serde_yaml_ng::to_string(definition).expect("a definition is YAML");
            (path, format!("{HEADER}{yaml}"))
        })
        .collect();
    files.insert(REFERENCE_PAGE.into(), reference::page(&definitions));
    files
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
    let folder = match std::fs::read_dir(root.join(DEFINITIONS_FOLDER)) {
        Ok(folder) => folder,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut paths = folder
        .map(|entry| Ok(Path::new(DEFINITIONS_FOLDER).join(entry?.file_name())))
        .collect::<io::Result<Vec<PathBuf>>>()?;
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
