//! Integration tests: each crate links one binary, unless its manifest gives a reason for another.

use std::collections::BTreeSet;

use crate::manifest::{Manifest, manifests};
use crate::tree::Tree;

pub(super) fn several(tree: &Tree) -> Vec<String> {
    manifests(tree).iter().flat_map(|manifest| of_crate(tree, manifest)).collect()
}

/// Names of the integration-test binaries of a crate.
fn targets<'t>(tree: &'t Tree, manifest: &Manifest) -> BTreeSet<&'t str> {
    let folder = format!("{}tests/", manifest.folder);
    tree.rust()
        .filter_map(|file| {
            let path = file.path.strip_prefix(&folder)?;
            let name = path.strip_suffix("/main.rs").or_else(|| path.strip_suffix(".rs"))?;
            (!name.contains('/')).then_some(name)
        })
        .collect()
}

/// Number of integration-test binaries in the tree.
pub(crate) fn count(tree: &Tree) -> usize {
    manifests(tree).iter().map(|manifest| targets(tree, manifest).len()).sum()
}

fn of_crate(tree: &Tree, manifest: &Manifest) -> Vec<String> {
    let targets = targets(tree, manifest);
    let justified: BTreeSet<String> = manifest
        .tables
        .iter()
        .filter(|table| table.name == "test" && !table.comments.is_empty())
        .filter_map(|table| table.text("name"))
        .collect();
    let plain: Vec<&str> = targets.into_iter().filter(|name| !justified.contains(*name)).collect();
    if plain.len() <= 1 {
        return Vec::new();
    }
    vec![format!("{}: {}", manifest.name, plain.join(", "))]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_crates_with_several_binaries_without_a_reason() {
        let package = "[package]\nname = \"a\"\n";
        let reason = format!("{package}# Counts its threads.\n[[test]]\nname = \"threads\"\n");
        let none = format!("{package}[[test]]\nname = \"threads\"\n");
        let tree = |manifest: &str| {
            Tree::of(&[
                ("a/Cargo.toml", manifest),
                ("a/tests/all/main.rs", ""),
                ("a/tests/all/module.rs", ""),
                ("a/tests/threads.rs", ""),
            ])
        };
        assert_eq!(several(&tree(&reason)), [""; 0]);
        assert_eq!(several(&tree(&none)), ["a: all, threads"]);
        assert_eq!(count(&tree(&none)), 2);
    }
}
