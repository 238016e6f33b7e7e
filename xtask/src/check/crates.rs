//! Dependencies between the crates of the tree, and those of crates that decide without doing.

use std::collections::{BTreeMap, BTreeSet};

use crate::manifest::manifests;
use crate::tree::Tree;

/// Every dependency that one of our crates may have on another, development dependencies included.
const EDGES: &[(&str, &[&str])] = &[
    ("reprise-policy", &[]),
    ("reprise-proto", &["reprise-identity"]),
    ("reprise-identity", &[]),
    ("reprise-daemon", &["reprise-identity", "reprise-policy"]),
    ("reprise-buffers", &["reprise-policy"]),
    ("reprise-io", &["reprise-policy", "reprise-buffers"]),
    ("reprise-cuda", &["reprise-policy", "reprise-buffers", "reprise-io", "reprise-nvme"]),
    ("reprise-nvme", &["reprise-buffers", "reprise-io"]),
    ("reprise-transport", &["reprise-identity", "reprise-policy", "reprise-buffers"]),
    ("reprise-agent-core", &["reprise-policy"]),
    ("reprise-agent-kubernetes", &["reprise-crds", "reprise-policy"]),
    ("reprise-client", &["reprise-policy", "reprise-proto", "reprise-buffers"]),
    (
        "reprise-extents",
        &[
            "reprise-policy",
            "reprise-buffers",
            "reprise-io",
            "reprise-nvme",
            "reprise-client",
            "reprise-cuda",
        ],
    ),
    (
        "reprise-agent",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-buffers",
            "reprise-io",
            "reprise-nvme",
            "reprise-transport",
            "reprise-agent-core",
            "reprise-agent-kubernetes",
        ],
    ),
    ("reprise-controlplane-core", &["reprise-policy"]),
    ("reprise-controlplane-store", &["reprise-policy"]),
    (
        "reprise-controlplane",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-controlplane-core",
            "reprise-controlplane-store",
        ],
    ),
    ("reprise-crds", &[]),
    (
        "reprise-operator",
        &["reprise-crds", "reprise-daemon", "reprise-identity", "reprise-policy", "reprise-proto"],
    ),
    ("reprise-simulator", &["reprise-policy", "reprise-agent-core", "reprise-controlplane-core"]),
    (
        "reprise-testkit",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-buffers",
            "reprise-io",
            "reprise-client",
            "reprise-extents",
        ],
    ),
    (
        "reprise",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-testkit",
            "reprise-buffers",
            "reprise-io",
            "reprise-transport",
            "reprise-agent-core",
            "reprise-client",
            "reprise-controlplane-core",
            "reprise-simulator",
            "reprise-nvme",
            "reprise-cuda",
        ],
    ),
    (
        "reprise-bench",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-testkit",
            "reprise-agent-core",
            "reprise-client",
            "reprise-e2e",
        ],
    ),
    ("reprise-fuzz", &[]),
    ("reprise-python", &["reprise-policy", "reprise-client", "reprise-extents"]),
    ("xtask", &[]),
    (
        "reprise-e2e",
        &[
            "reprise-identity",
            "reprise-policy",
            "reprise-proto",
            "reprise-buffers",
            "reprise-transport",
            "reprise-client",
            "reprise-crds",
            "reprise-testkit",
        ],
    ),
];

/// The crate that runs fuzz targets. Tests of every crate may use it.
const FUZZ: &str = "reprise-fuzz";

/// Dependencies that only the tests of a crate may have.
const EDGES_OF_TESTS: &[(&str, &str)] = &[
    ("reprise-controlplane-store", "reprise-testkit"),
    ("reprise-controlplane", "reprise-testkit"),
    // The conformance suite of I/O engines holds for all of them.
    ("reprise-io", "reprise-nvme"),
];

/// Crates that decide without doing: no async runtime, no clock, no I/O libraries.
const PURE: &[&str] =
    &["reprise-policy", "reprise-agent-core", "reprise-controlplane-core", "reprise-simulator"];

/// Dependencies that a pure crate must not have.
const IMPURE: &[&str] = &["tokio", "libc", "io-uring", "tonic", "axum", "rand", "redb", "crossbeam-channel"];

pub(super) fn edges(tree: &Tree) -> Vec<String> {
    let packages = manifests(tree);
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    let ours: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut offences = Vec::new();
    for package in &packages {
        let own = package.name.as_str();
        let Some(may) = allowed.get(own) else {
            offences.push(format!("{own} is not in the list of edges"));
            continue;
        };
        for name in package.dependencies.iter().map(String::as_str) {
            let is_of_tests = package.of_tests.iter().any(|other| other == name);
            let is_edge_of_tests = name == FUZZ || EDGES_OF_TESTS.contains(&(own, name));
            let is_allowed = may.contains(&name) || (is_of_tests && is_edge_of_tests);
            if ours.contains(name) && !is_allowed {
                offences.push(format!("{own} must not depend on {name}"));
            }
            if PURE.contains(&own) && IMPURE.contains(&name) {
                offences.push(format!("{own} is pure and must not depend on {name}"));
            }
        }
    }
    for name in EDGES.iter().map(|(name, _)| *name).filter(|name| !ours.contains(name)) {
        offences.push(format!("{name} is in the list of edges, but not in the tree"));
    }
    if let Some(xtask) =
        packages.iter().find(|package| package.name == "xtask" && !package.dependencies.is_empty())
    {
        offences.push(format!("xtask has no dependencies, not {}", xtask.dependencies.join(", ")));
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_forbidden_edges_and_unknown_crates() {
        let manifest = |name: &str, dependency: &str| {
            format!(
                "[package]\nname = \"{name}\"\n[dev-dependencies]\n{dependency} = {{ workspace = true }}\n"
            )
        };
        let tree = Tree::of(&[
            ("policy/Cargo.toml", &manifest("reprise-policy", "tokio")),
            ("proto/Cargo.toml", &manifest("reprise-proto", "reprise-policy")),
            ("daemon/Cargo.toml", &manifest("reprise-daemon", "reprise-policy")),
            ("new/Cargo.toml", &manifest("reprise-new", "serde")),
        ]);
        let found: Vec<String> =
            edges(&tree).into_iter().filter(|offence| !offence.ends_with("not in the tree")).collect();
        assert_eq!(
            found,
            [
                "reprise-policy is pure and must not depend on tokio",
                "reprise-proto must not depend on reprise-policy",
                "reprise-new is not in the list of edges",
            ]
        );
    }
}
