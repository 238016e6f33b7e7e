//! Checks of source files: their docs, lengths and modules, and words that only some of them may contain.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::tree::{File, Tree};

/// Most lines of a source file.
const LINES_MAX: usize = 600;

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Folders that may contain unsafe code (docs/ARCHITECTURE.md, "Folders and crates").
const UNSAFE_PLACES: &[&str] = &[
    "node-agent/buffers/",
    "node-agent/io/",
    "node-agent/nvme/src/vfio",
    "cuda/",
    "python/src/memory/tensors.rs",
    // The interface of libFuzzer, and the bound on memory.
    "fuzz/src/engine.rs",
];

/// Files that read the time of day, for people and for formats that require it. All other code uses monotonic
/// time, so that a clock that is set or steps changes nothing.
const WALL_CLOCK_PLACES: &[&str] = &[
    "controlplane/src/events/publisher.rs",
    "node-agent/src/device/identity.rs",
    "node-agent/src/recorder.rs",
    // Certificates are valid from a date to a date.
    "identity/",
    "daemon/src/certificates.rs",
    "cli/src/certs",
    "cli/src/doctor",
    "operator/src/framework/clock.rs",
    "operator/src/reconcile/authority.rs",
    "operator/src/signing/certificate.rs",
    "e2e/",
    "testkit/src/process.rs",
];

/// Files that draw random numbers without a seed: delays of retries, ids, secrets.
const RANDOM_PLACES: &[&str] =
    &["operator/src/framework/backoff.rs", "operator/src/reconcile/salts.rs", "controlplane/src/events.rs"];

/// This file contains the words that it searches for.
const OWN: &str = "xtask/src/check/structure.rs";

/// Source files that are searched for words.
fn searched(tree: &Tree) -> impl Iterator<Item = &File> {
    tree.rust().filter(|file| file.path != OWN)
}

pub(super) fn module_docs(tree: &Tree) -> Vec<String> {
    let opens_with_doc = |file: &&File| {
        let first = file.text.lines().find(|line| !line.trim().is_empty());
        first.is_some_and(|line| line.starts_with("//!"))
    };
    tree.rust().filter(|file| !opens_with_doc(file)).map(|file| file.path.clone()).collect()
}

pub(super) fn lengths(tree: &Tree) -> Vec<String> {
    let lines = tree.rust().map(|file| (file, file.text.lines().count()));
    lines
        .filter(|(_, lines)| *lines > LINES_MAX)
        .map(|(file, lines)| format!("{}: {lines} lines, limit {LINES_MAX}", file.path))
        .collect()
}

pub(super) fn unsafe_code(tree: &Tree) -> Vec<String> {
    let has_unsafe_code = |file: &&File| {
        file.text.lines().any(|line| {
            let code = line.split("//").next().unwrap_or("");
            code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl")
        })
    };
    searched(tree)
        .filter(|file| !UNSAFE_PLACES.iter().any(|place| file.path.starts_with(place)))
        .filter(has_unsafe_code)
        .map(|file| file.path.clone())
        .collect()
}

pub(super) fn times_of_day(tree: &Tree) -> Vec<String> {
    let words = ["SystemTime", "UNIX_EPOCH", "chrono::"];
    searched(tree)
        .filter(|file| !WALL_CLOCK_PLACES.iter().any(|place| file.path.starts_with(place)))
        .filter(|file| words.iter().any(|word| file.text.contains(word)))
        .map(|file| file.path.clone())
        .collect()
}

pub(super) fn seeds(tree: &Tree) -> Vec<String> {
    let words = ["rand::rng()", "rand::random", "from_os_rng", "from_rng(", "RngSeed::Random", "thread_rng"];
    let mut offences: Vec<String> = searched(tree)
        .filter(|file| !RANDOM_PLACES.contains(&file.path.as_str()))
        .filter(|file| words.iter().any(|word| file.text.contains(word)))
        .map(|file| file.path.clone())
        .collect();
    // Cargo sets it for each program that it runs (.cargo/config.toml), unless the environment has another one.
    let seed = std::env::var("PROPTEST_RNG_SEED").unwrap_or_default();
    if seed.parse::<u64>().is_err() {
        offences.push(format!("invalid PROPTEST_RNG_SEED \"{seed}\": expected a number"));
    }
    offences
}

pub(super) fn dead_modules(tree: &Tree) -> Vec<String> {
    let texts: BTreeMap<&str, &str> =
        tree.rust().map(|file| (file.path.as_str(), file.text.as_str())).collect();
    tree.rust().filter(|file| is_dead(&file.path, &texts)).map(|file| file.path.clone()).collect()
}

/// Whether no parent declares the module of a file.
fn is_dead(file: &str, texts: &BTreeMap<&str, &str>) -> bool {
    let name = |path: &Path| path.file_name().and_then(|name| name.to_str()).unwrap_or("").to_owned();
    // `x/mod.rs` is the module `x` of the folder above.
    let path = Path::new(file.strip_suffix("/mod.rs").unwrap_or_else(|| file.trim_end_matches(".rs")));
    let stem = name(path);
    let parent = path.parent().unwrap_or(Path::new(""));
    let folder = name(parent);
    let is_root = matches!(stem.as_str(), "lib" | "main" | "build")
        || matches!(folder.as_str(), "tests" | "examples" | "benches" | "bin");
    if is_root && !file.ends_with("/mod.rs") {
        return false;
    }
    let mut owners: Vec<PathBuf> = ["lib.rs", "main.rs", "mod.rs"].map(|name| parent.join(name)).to_vec();
    owners.push(parent.with_extension("rs"));
    // A folder of an integration test: any file of `tests/` may own it.
    let above = parent.parent().map(name);
    if above.as_deref() == Some("tests") || folder == "tests" {
        let tests = parent.parent().unwrap_or(Path::new(""));
        owners.extend(texts.keys().map(PathBuf::from).filter(|file| file.starts_with(tests)));
    }
    !owners.iter().any(|owner| {
        let text = owner.to_str().and_then(|owner| texts.get(owner)).copied().unwrap_or("");
        text.lines().any(|line| declares(line, &stem))
    })
}

/// Whether a line declares a module.
fn declares(line: &str, module: &str) -> bool {
    let line = line.trim();
    let line = line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
    line.strip_prefix("mod ").is_some_and(|rest| rest.trim_end_matches([';', ' ', '{']) == module)
}

pub(super) fn notes(tree: &Tree) -> Vec<String> {
    let is_open =
        |line: &str| ["TODO", "FIXME", "XXX"].iter().any(|word| line.contains(word)) && !line.contains("(#");
    searched(tree)
        .flat_map(|file| {
            let lines = file.text.lines().enumerate().filter(move |(_, line)| is_open(line));
            lines.map(|(index, _)| format!("{}:{}", file.path, index + 1))
        })
        // The list of rules has an example.
        .filter(|place| !place.starts_with("xtask/src/check.rs:"))
        .collect()
}

pub(super) fn ignored_tests(tree: &Tree) -> Vec<String> {
    searched(tree)
        .filter(|file| file.text.lines().any(|line| line.trim() == "#[ignore]"))
        .map(|file| file.path.clone())
        .collect()
}

pub(super) fn sizes_and_paths(tree: &Tree) -> Vec<String> {
    // Spelled in two halves, so that this file does not contain the forbidden words.
    let forbidden = [("/wor", "k/main"), ("/roo", "t/"), ("/home", "/"), ("crates", ".io/")]
        .map(|(head, tail)| format!("{head}{tail}"));
    let mut offences = Vec::new();
    for file in tree.files() {
        if file.bytes > FILE_BYTES_MAX {
            offences.push(format!("{}: {} bytes", file.path, file.bytes));
        }
        if file.path != "Cargo.lock" {
            let found = forbidden.iter().filter(|word| file.text.contains(word.as_str()));
            offences.extend(found.map(|word| format!("{}: {word}", file.path)));
        }
    }
    offences
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_files_without_docs_and_files_that_are_too_long() {
        let long = format!("//! A.\n{}", "\n".repeat(LINES_MAX));
        let tree = Tree::of(&[("a.rs", "\n//! A.\n"), ("b.rs", "use a;\n"), ("c.rs", &long)]);
        assert_eq!(module_docs(&tree), ["b.rs"]);
        assert_eq!(lengths(&tree), ["c.rs: 601 lines, limit 600"]);
    }

    #[test]
    fn finds_words_outside_their_places() {
        let tree = Tree::of(&[
            ("node-agent/io/src/a.rs", "unsafe { b() }"),
            ("policy/src/a.rs", "// unsafe { b() }\nSystemTime::now()"),
            (
                "policy/src/b.rs",
                "unsafe fn b() {}\n#[ignore]\nlet x = rand::rng();\n// TODO: it\n// TODO(#1): it",
            ),
            ("e2e/src/a.rs", "SystemTime::now()"),
        ]);
        assert_eq!(unsafe_code(&tree), ["policy/src/b.rs"]);
        assert_eq!(times_of_day(&tree), ["policy/src/a.rs"]);
        assert_eq!(ignored_tests(&tree), ["policy/src/b.rs"]);
        assert_eq!(notes(&tree), ["policy/src/b.rs:4"]);
        assert!(seeds(&tree).contains(&"policy/src/b.rs".to_owned()));
    }

    #[test]
    fn finds_modules_that_no_file_declares() {
        let tree = Tree::of(&[
            ("a/src/lib.rs", "pub mod b;\nmod d {"),
            ("a/src/b.rs", "pub(crate) mod c;"),
            ("a/src/b/c.rs", ""),
            ("a/src/b/e.rs", ""),
            ("a/src/f/mod.rs", ""),
            ("a/src/bin/tool.rs", ""),
            ("a/tests/all/main.rs", "mod g;"),
            ("a/tests/all/g.rs", ""),
            ("a/tests/all/h.rs", ""),
        ]);
        assert_eq!(dead_modules(&tree), ["a/src/b/e.rs", "a/src/f/mod.rs", "a/tests/all/h.rs"]);
    }

    #[test]
    fn finds_large_files_and_paths_of_one_machine() {
        let path = format!("cd {}{}", "/roo", "t/a");
        let large = "x".repeat(1 + usize::try_from(FILE_BYTES_MAX).expect("it fits"));
        let tree = Tree::of(&[("a", &path), ("b", &large)]);
        assert_eq!(sizes_and_paths(&tree).len(), 2);
    }
}
