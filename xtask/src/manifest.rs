//! Cargo's manifests: the names of packages and of their dependencies.

use std::collections::BTreeMap;

use crate::toml::{self, Table};
use crate::tree::Tree;

/// The manifest of a package.
pub(crate) struct Manifest {
    /// Name of the package.
    pub(crate) name: String,
    /// Folder of the manifest, with a `/` at its end.
    pub(crate) folder: String,
    /// Names of the packages that it depends on, for any target and purpose.
    pub(crate) dependencies: Vec<String>,
    /// Those of them that only tests use.
    pub(crate) of_tests: Vec<String>,
    pub(crate) tables: Vec<Table>,
}

/// Returns the manifests of all packages in the tree.
pub(crate) fn manifests(tree: &Tree) -> Vec<Manifest> {
    let files: Vec<_> = tree
        .files()
        .filter(|file| file.path == "Cargo.toml" || file.path.ends_with("/Cargo.toml"))
        .map(|file| (file, toml::tables(&file.text)))
        .collect();
    // Names under which a workspace lists packages of other names.
    let renamed: BTreeMap<String, String> = files
        .iter()
        .flat_map(|(_, tables)| tables.iter().filter(|table| table.name.starts_with("workspace.")))
        .flat_map(dependencies)
        .collect();
    files
        .into_iter()
        .filter_map(|(file, tables)| {
            let name = tables.iter().find(|table| table.name == "package")?.text("name")?;
            let named = |is_chosen: fn(&Table) -> bool| -> Vec<String> {
                let own = tables.iter().filter(|table| !table.name.starts_with("workspace."));
                own.filter(|table| is_chosen(table))
                    .flat_map(dependencies)
                    .map(|(key, package)| renamed.get(&key).cloned().unwrap_or(package))
                    .collect()
            };
            let dependencies = named(|_| true);
            let others = named(|table| !table.name.contains("dev-dependencies"));
            let of_tests = dependencies.iter().filter(|name| !others.contains(name)).cloned().collect();
            let folder = file.path.strip_suffix("Cargo.toml").unwrap_or_default().to_owned();
            Some(Manifest { name, folder, dependencies, of_tests, tables })
        })
        .collect()
}

/// Dependencies of a table: their keys, and the packages that these name.
fn dependencies(table: &Table) -> Vec<(String, String)> {
    if table.name.ends_with("dependencies") {
        let named = |(key, value): &(String, String)| {
            let key = key.split('.').next().unwrap_or_default().to_owned();
            (key.clone(), package_of(value).unwrap_or(key))
        };
        return table.entries.iter().map(named).collect();
    }
    // The table of one dependency: `[dependencies.name]`.
    match table.name.rsplit_once("dependencies.") {
        Some((_, key)) => vec![(key.to_owned(), table.text("package").unwrap_or_else(|| key.to_owned()))],
        None => Vec::new(),
    }
}

/// Returns the package that an inline table names: `{ package = "name" }`.
fn package_of(value: &str) -> Option<String> {
    let (before, rest) = value.split_once("package")?;
    if !before.trim_end().ends_with(['{', ',']) {
        return None;
    }
    Some(rest.trim_start().strip_prefix('=')?.trim_start().strip_prefix('"')?.split('"').next()?.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_dependencies_under_every_name() {
        let root =
            "[workspace.dependencies]\nshort = { path = \"x\", package = \"reprise-x\" }\nlibc = \"1\"\n";
        let own = "[package]\nname = \"a\"\n[dependencies]\nshort.workspace = true\nlibc = { workspace = true }\n\
                   [target.'cfg(unix)'.dev-dependencies]\nb = { package = \"reprise-b\" }\n\
                   [build-dependencies.c]\npath = \"c\"\n";
        let tree = Tree::of(&[("Cargo.toml", root), ("a/Cargo.toml", own)]);
        let found = manifests(&tree);
        assert_eq!(found.len(), 1);
        assert_eq!((found[0].name.as_str(), found[0].folder.as_str()), ("a", "a/"));
        assert_eq!(found[0].dependencies, ["reprise-x", "libc", "reprise-b", "c"]);
        assert_eq!(found[0].of_tests, ["reprise-b"]);
    }
}
