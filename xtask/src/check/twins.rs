//! Files of the simulator that follow a production loop: twins, whose steps are copies that nothing compares with
//! their original.
//!
//! A file is a twin if a comment in it names a source of a crate that does, for example
//! `node-agent/src/directory/link.rs`. Every twin names its original, so that a reader finds it. A file that only keeps
//! a contract of such a source is in [`CONTRACTS`].

use crate::tree::{File, Tree};

/// Twins that exist: production state machines decide in them, but the order in which outputs are carried out is a
/// copy. Remove a name when its order has become production code; add none.
const TWINS: &[&str] = &[
    "simulator/src/client.rs",
    "simulator/src/control_plane.rs",
    "simulator/src/link.rs",
    "simulator/src/links.rs",
    "simulator/src/member.rs",
    "simulator/src/member/placement.rs",
    "simulator/src/membership.rs",
    "simulator/src/membership/identity.rs",
    "simulator/src/membership/member_entry.rs",
    "simulator/src/membership/writes.rs",
    "simulator/src/reports.rs",
];

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
    compare(&found(tree), TWINS)
}

fn compare(found: &[&str], twins: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = found
        .iter()
        .filter(|path| !twins.contains(path))
        .map(|path| format!("{path}: a new twin; move the steps that it follows into a pure crate"))
        .collect();
    let gone = twins.iter().filter(|path| !found.contains(path));
    all.extend(gone.map(|path| format!("{path} is not a twin: remove it from TWINS in xtask")));
    all
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
            ("simulator/src/old.rs", "fn a() {} // as in node-agent/src/directory/link.rs\n"),
            ("cli/src/new.rs", "//! As `controlplane/src/new.rs`.\n"),
        ]);
        let found = found(&tree);
        assert_eq!(found, ["simulator/src/new.rs", "simulator/src/old.rs"]);
        let offences = compare(&found, &["simulator/src/old.rs", "simulator/src/gone.rs"]);
        assert!(offences[0].starts_with("simulator/src/new.rs: a new twin"), "{offences:?}");
        assert!(offences[1].starts_with("simulator/src/gone.rs is not a twin"), "{offences:?}");
        assert_eq!(offences.len(), 2, "{offences:?}");
    }
}
