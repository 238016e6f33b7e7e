//! Twins: files of the simulator that follow a production loop, that is, whose steps are copies that nothing compares
//! with their original. This check keeps the simulator free of them.
//!
//! A file is a twin if a comment in it names a source of a crate that does, for example
//! `node-agent/src/directory/link.rs`. A file that only keeps a contract of such a source is in [`CONTRACTS`].

use crate::tree::{File, Tree};

/// Files that name production files for another reason than following their steps.
const CONTRACTS: &[(&str, &str)] = &[
    ("simulator/src/lib.rs", "the list of twins"),
    (
        "simulator/src/offers.rs",
        "the environment: a transport, which also resolves names of nodes and tenants",
    ),
    ("simulator/src/placement_audit.rs", "a check knows which calls may end without an answer"),
    ("simulator/src/store.rs", "the environment: a store with the contract of etcd"),
];

/// Folders of the crates that do: sockets, devices, threads, futures.
const DOING: &[&str] =
    &["node-agent/src/", "node-agent/transport", "node-agent/io", "controlplane/src/", "controlplane/store"];

/// Whether a comment of a file names a source of a crate that does.
fn names_production(file: &File) -> bool {
    let comments = file.text.lines().filter_map(|line| line.split_once("//")).map(|(_, comment)| comment);
    comments.into_iter().any(|comment| DOING.iter().any(|folder| comment.contains(folder)))
}

/// Paths of the files that follow a production loop.
pub(crate) fn found(tree: &Tree) -> Vec<&str> {
    tree.rust()
        .filter(|file| file.path.starts_with("simulator/") && names_production(file))
        .map(|file| file.path.as_str())
        .filter(|path| !CONTRACTS.iter().any(|(contract, _)| contract == path))
        .collect()
}

pub(super) fn offences(tree: &Tree) -> Vec<String> {
    let offence = |path| format!("{path}: a new twin; move the steps that it follows into a pure crate");
    found(tree).into_iter().map(offence).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_files_whose_comments_name_a_production_loop() {
        let tree = Tree::of(&[
            ("simulator/src/new.rs", "//! As `controlplane/src/new.rs`.\n"),
            ("simulator/src/pure.rs", "//! As `controlplane/core/src/new.rs`.\n"),
            ("simulator/src/store.rs", "//! The contract of `controlplane/store/src/contract.rs`.\n"),
            ("simulator/src/link.rs", "fn a() {} // as in node-agent/src/directory/link.rs\n"),
            ("cli/src/new.rs", "//! As `controlplane/src/new.rs`.\n"),
        ]);
        assert_eq!(found(&tree), ["simulator/src/new.rs", "simulator/src/link.rs"]);
        let found = offences(&tree);
        assert!(found[0].starts_with("simulator/src/new.rs: a new twin"), "{found:?}");
        assert_eq!(found.len(), 2, "{found:?}");
    }
}
