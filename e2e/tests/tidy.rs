//! Repository checks that relieve review.
//!
//! Each test states its rule; a failure names the file. The list of files comes from git, so untracked files
//! are not checked.

#[path = "tidy/fields.rs"]
mod fields;
#[path = "tidy/language.rs"]
mod language;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use cargo_metadata::MetadataCommand;
use reprise_e2e::tree;

/// No source file may be longer.
const LINES_MAX: usize = 900;

/// Files longer than this are on the ratchet: listed with the length they may not exceed.
const LINES_BEFORE_RATCHET: usize = 600;

/// Longest permitted lengths of files beyond [`LINES_BEFORE_RATCHET`]. Lower a number when a file shrinks; never
/// raise one: split the file by responsibility.
const RATCHET: &[(&str, usize)] = &[];

const FILE_BYTES_MAX: u64 = 1 << 20;

/// Folders that may contain unsafe code (docs/ARCHITECTURE.md, "Folders and crates").
const UNSAFE_PLACES: &[&str] = &["node-agent/buffers/", "node-agent/io/", "python/src/memory/tensors.rs"];

/// Every dependency that one of our crates may have on another, development dependencies included.
const EDGES: &[(&str, &[&str])] = &[
    ("reprise-policy", &[]),
    ("reprise-proto", &[]),
    ("reprise-daemon", &["reprise-policy"]),
    ("reprise-buffers", &["reprise-policy"]),
    ("reprise-io", &["reprise-policy", "reprise-buffers"]),
    ("reprise-transport", &["reprise-policy", "reprise-buffers"]),
    ("reprise-agent-core", &["reprise-policy"]),
    ("reprise-agent-kubernetes", &["reprise-crds"]),
    ("reprise-client", &["reprise-policy", "reprise-proto", "reprise-buffers"]),
    (
        "reprise-agent",
        &[
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-buffers",
            "reprise-io",
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
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-controlplane-core",
            "reprise-controlplane-store",
        ],
    ),
    ("reprise-crds", &[]),
    ("reprise-operator", &["reprise-crds", "reprise-daemon", "reprise-policy", "reprise-proto"]),
    ("reprise-simulator", &["reprise-policy", "reprise-agent-core", "reprise-controlplane-core"]),
    (
        "reprise",
        &[
            "reprise-policy",
            "reprise-proto",
            "reprise-daemon",
            "reprise-buffers",
            "reprise-io",
            "reprise-transport",
            "reprise-agent-core",
            "reprise-client",
            "reprise-controlplane-core",
            "reprise-simulator",
        ],
    ),
    ("reprise-python", &["reprise-policy", "reprise-client"]),
    ("reprise-e2e", &["reprise-policy", "reprise-proto", "reprise-client", "reprise-crds"]),
];

/// Manifests of the workspaces. The native half of the Python package has its own.
const MANIFESTS: &[&str] = &["Cargo.toml", "python/Cargo.toml"];

/// Crates that decide without doing: no async runtime, no clock, no I/O libraries.
const PURE: &[&str] =
    &["reprise-policy", "reprise-agent-core", "reprise-controlplane-core", "reprise-simulator"];

/// Dependencies that a pure crate must not have.
const IMPURE: &[&str] = &["tokio", "libc", "io-uring", "tonic", "axum", "rand", "redb", "crossbeam-channel"];

fn tracked() -> Vec<String> {
    let output = Command::new("git").arg("ls-files").current_dir(tree()).output().expect("git runs");
    assert!(output.status.success(), "git ls-files failed: the checks need a git checkout");
    let files: Vec<String> = String::from_utf8(output.stdout)
        .expect("file names are UTF-8")
        .lines()
        .filter(|file| tree().join(file).exists())
        .map(str::to_owned)
        .collect();
    assert!(
        files.iter().any(|file| file == "Cargo.toml"),
        "the list of files is not that of this repository"
    );
    files
}

fn rust_files() -> Vec<(String, String)> {
    tracked()
        .into_iter()
        .filter(|file| file.ends_with(".rs"))
        .map(|file| {
            let text = fs::read_to_string(tree().join(&file)).expect("a tracked file reads");
            (file, text)
        })
        .collect()
}

fn assert_none(rule: &str, offenders: &[String]) {
    assert!(offenders.is_empty(), "{rule}:\n  {}", offenders.join("\n  "));
}

#[test]
fn every_source_file_opens_with_a_module_doc() {
    let offenders: Vec<String> = rust_files()
        .into_iter()
        .filter(|(_, text)| {
            !text.lines().find(|line| !line.trim().is_empty()).is_some_and(|line| line.starts_with("//!"))
        })
        .map(|(file, _)| file)
        .collect();
    assert_none("a source file opens with a `//!` module doc", &offenders);
}

#[test]
fn source_files_have_at_most_600_lines() {
    let limits: BTreeMap<&str, usize> = RATCHET.iter().copied().collect();
    let mut offenders = Vec::new();
    for (file, text) in rust_files() {
        let lines = text.lines().count();
        let limit = limits.get(file.as_str()).copied().unwrap_or(LINES_BEFORE_RATCHET).min(LINES_MAX);
        if lines > limit {
            offenders.push(format!("{file}: {lines} lines, limit {limit}"));
        }
    }
    assert_none("files are split by responsibility before they grow too long", &offenders);
}

#[test]
fn crates_depend_only_on_permitted_crates() {
    let packages_of = |manifest: &&str| {
        let metadata = MetadataCommand::new().manifest_path(tree().join(manifest)).no_deps().exec();
        metadata.expect("cargo metadata runs").packages
    };
    let packages: Vec<_> = MANIFESTS.iter().flat_map(packages_of).collect();
    let allowed: BTreeMap<&str, &[&str]> = EDGES.iter().copied().collect();
    let ours: BTreeSet<&str> = packages.iter().map(|package| package.name.as_str()).collect();
    let mut offenders = Vec::new();
    for package in &packages {
        let Some(may) = allowed.get(package.name.as_str()) else {
            offenders.push(format!("{} is not in the list of edges", package.name));
            continue;
        };
        for dependency in &package.dependencies {
            let name = dependency.name.as_str();
            if ours.contains(name) && !may.contains(&name) {
                offenders.push(format!("{} must not depend on {name}", package.name));
            }
            if PURE.contains(&package.name.as_str()) && IMPURE.contains(&name) {
                offenders.push(format!("{} is pure and must not depend on {name}", package.name));
            }
        }
    }
    assert_none("crate edges are those of docs/ARCHITECTURE.md", &offenders);
}

#[test]
fn unsafe_code_lives_in_the_leaf_crates() {
    let offenders: Vec<String> = rust_files()
        .into_iter()
        .filter(|(file, _)| !UNSAFE_PLACES.iter().any(|place| file.starts_with(place)))
        .filter(|(_, text)| {
            text.lines().any(|line| {
                let code = line.split("//").next().unwrap_or("");
                code.contains("unsafe {") || code.contains("unsafe fn") || code.contains("unsafe impl")
            })
        })
        .map(|(file, _)| file)
        // This file contains the words that it searches for.
        .filter(|file| file != "e2e/tests/tidy.rs")
        .collect();
    assert_none("unsafe code lives in the crates that docs/ARCHITECTURE.md lists", &offenders);
}

/// Files that read the time of day, for people and for formats that require it. All other code uses monotonic
/// time, so that a clock that is set or steps changes nothing.
const WALL_CLOCK_PLACES: &[&str] =
    &["controlplane/src/events/publisher.rs", "node-agent/src/device/identity.rs", "e2e/"];

#[test]
fn only_listed_files_read_the_time_of_day() {
    let wall_clocks = ["SystemTime", "UNIX_EPOCH", "chrono::"];
    let is_offender = |(path, text): &(String, String)| {
        !WALL_CLOCK_PLACES.iter().any(|place| path.starts_with(place))
            && wall_clocks.iter().any(|word| text.contains(word))
    };
    let offenders: Vec<String> = rust_files().into_iter().filter(is_offender).map(|(path, _)| path).collect();
    assert_none("only what people read has the time of day", &offenders);
}

/// Files that draw random numbers without a seed: delays of retries, ids.
const RANDOM_PLACES: &[&str] = &["operator/src/backoff.rs", "controlplane/src/events.rs"];

#[test]
fn random_tests_have_fixed_seeds() {
    let words = ["rand::rng()", "rand::random", "from_os_rng", "from_rng(", "RngSeed::Random", "thread_rng"];
    let is_offender = |(path, text): &(String, String)| {
        !RANDOM_PLACES.contains(&path.as_str())
            && path != "e2e/tests/tidy.rs"
            && words.iter().any(|word| text.contains(word))
    };
    let offenders: Vec<String> = rust_files().into_iter().filter(is_offender).map(|(path, _)| path).collect();
    assert_none("random numbers of tests come from a seed (e2e/src/seed.rs, PROPTEST_RNG_SEED)", &offenders);
    // Set by cargo for each program that it runs (.cargo/config.toml), unless the environment has another one.
    let seed = std::env::var("PROPTEST_RNG_SEED").expect("cargo sets the seed of property tests");
    assert!(seed.parse::<u64>().is_ok(), "invalid PROPTEST_RNG_SEED \"{seed}\": expected a number");
}

#[test]
fn every_module_file_belongs_to_a_module() {
    let files = rust_files();
    let texts: BTreeMap<&str, &str> =
        files.iter().map(|(file, text)| (file.as_str(), text.as_str())).collect();
    let mut offenders = Vec::new();
    for (file, _) in &files {
        let path = Path::new(file);
        let stem = path.file_stem().and_then(|stem| stem.to_str()).expect("a file name");
        let (path, stem) = match stem {
            // `x/mod.rs` is the module `x` of the folder above.
            "mod" => {
                let folder = path.parent().expect("a folder");
                (folder, folder.file_name().and_then(|name| name.to_str()).expect("a folder's name"))
            }
            _ => (path, stem),
        };
        let parent = path.parent().expect("a folder");
        let folder = parent.file_name().and_then(|name| name.to_str()).unwrap_or("");
        let is_root = matches!(stem, "lib" | "main" | "build")
            || matches!(folder, "tests" | "examples" | "benches" | "bin");
        if is_root && !file.ends_with("/mod.rs") {
            continue;
        }
        let declares = |candidate: PathBuf| {
            let text = texts.get(candidate.to_str().expect("UTF-8")).copied().unwrap_or("");
            text.lines().any(|line| {
                let line = line.trim();
                let line =
                    line.strip_prefix("pub(crate) ").or_else(|| line.strip_prefix("pub ")).unwrap_or(line);
                line.strip_prefix("mod ").is_some_and(|rest| rest.trim_end_matches([';', ' ', '{']) == stem)
            })
        };
        let owner = parent.with_extension("rs");
        let mut owners = vec![parent.join("lib.rs"), parent.join("main.rs"), parent.join("mod.rs"), owner];
        // A folder of an integration test: any file of `tests/` may own it.
        if parent.parent().and_then(Path::file_name).is_some_and(|name| name == "tests") || folder == "tests"
        {
            let tests = parent.parent().expect("a folder");
            owners.extend(
                files.iter().map(|(file, _)| PathBuf::from(file)).filter(|file| file.starts_with(tests)),
            );
        }
        if !owners.into_iter().any(declares) {
            offenders.push(file.clone());
        }
    }
    assert_none("a module file is declared by its parent, or it is dead", &offenders);
}

#[test]
fn every_note_of_open_work_names_an_issue() {
    let offenders: Vec<String> = rust_files()
        .into_iter()
        .filter(|(file, _)| file != "e2e/tests/tidy.rs")
        .flat_map(|(file, text)| {
            text.lines()
                .enumerate()
                .filter(|(_, line)| {
                    ["TODO", "FIXME", "XXX"].iter().any(|word| line.contains(word)) && !line.contains("(#")
                })
                .map(|(index, _)| format!("{file}:{}", index + 1))
                .collect::<Vec<_>>()
        })
        .collect();
    assert_none("a note of work to do names its issue, as in TODO(#12)", &offenders);
}

#[test]
fn every_ignored_test_has_a_reason() {
    let offenders: Vec<String> = rust_files()
        .into_iter()
        .filter(|(file, _)| file != "e2e/tests/tidy.rs")
        .filter(|(_, text)| text.lines().any(|line| line.trim() == "#[ignore]"))
        .map(|(file, _)| file)
        .collect();
    assert_none("#[ignore] has a reason", &offenders);
}

#[test]
fn the_tree_holds_no_large_files_and_no_paths_of_one_machine() {
    // Spelled in two halves, so that this file does not contain the forbidden words.
    let forbidden: Vec<String> = [("/wor", "k/main"), ("/roo", "t/"), ("/home", "/"), ("crates", ".io/")]
        .iter()
        .map(|(head, tail)| format!("{head}{tail}"))
        .collect();
    let mut offenders = Vec::new();
    for file in tracked() {
        let path = tree().join(&file);
        let bytes = fs::metadata(&path).expect("a tracked file has metadata").len();
        if bytes > FILE_BYTES_MAX {
            offenders.push(format!("{file}: {bytes} bytes"));
        }
        let text = fs::read_to_string(&path).unwrap_or_default();
        if file != "Cargo.lock" {
            offenders.extend(
                forbidden
                    .iter()
                    .filter(|word| text.contains(word.as_str()))
                    .map(|word| format!("{file}: {word}")),
            );
        }
    }
    assert_none("the tree is small and contains no path of one machine", &offenders);
}
