//! Test programs with counters for coverage, and the targets in them.

use std::collections::BTreeSet;
use std::env;
use std::path::PathBuf;
use std::process::{Command, Stdio};

use crate::Folders;

/// Crates with targets, this one for its feature, and three whose features make the dependencies those of
/// `cargo test --workspace`, so that they are not compiled again.
const PACKAGES: &[&str] = &[
    "reprise",
    "reprise-bench",
    "reprise-crds",
    "reprise-fuzz",
    "reprise-agent",
    "reprise-agent-core",
    "reprise-client",
    "reprise-controlplane",
    "reprise-controlplane-core",
    "reprise-identity",
    "reprise-io",
    "reprise-nvme",
    "reprise-policy",
    "reprise-simulator",
    "reprise-transport",
];

/// Test programs of these crates: the agent is a binary, and the harness of its core is an integration test.
const PROGRAMS: &[&str] = &["--lib", "--bin", "reprise-agent", "--test", "agent"];

/// Module of the targets in each program.
const MODULE: &str = "fuzz::";

/// A target in its program.
pub(crate) struct Target {
    /// Name of its test and of its folder.
    pub(crate) name: String,
    /// Path of the test.
    pub(crate) test: String,
    /// Program that runs the test.
    pub(crate) program: PathBuf,
}

/// Builds the programs and lists their targets.
pub(crate) fn build(folders: &Folders) -> Result<Vec<Target>, String> {
    let mut command = cargo(folders);
    command.args(["test", "--locked", "--no-run", "--features", "reprise-fuzz/libfuzzer"]);
    command.args(["--message-format", "json-render-diagnostics"]);
    command.args(PACKAGES.iter().flat_map(|package| ["-p", package])).args(PROGRAMS);
    command.env("RUSTC_WORKSPACE_WRAPPER", folders.root.join("fuzz/rustc.sh"));
    command.env("REPRISE_FUZZ_SOURCES", engine_sources(folders)?);
    let built = command.output().map_err(|error| format!("cannot run cargo: {error}"))?;
    if !built.status.success() {
        return Err(
            "cannot build the targets: they need a C++ compiler, and the errors above have the reason"
                .to_owned(),
        );
    }
    let messages = String::from_utf8_lossy(&built.stdout).into_owned();
    let mut targets = Vec::new();
    for program in messages.lines().filter_map(executable) {
        targets.extend(list(&program)?);
    }
    targets.sort_by(|one: &Target, other| one.name.cmp(&other.name));
    let names: BTreeSet<&str> = targets.iter().map(|target| target.name.as_str()).collect();
    if names.is_empty() || names.len() < targets.len() {
        return Err(format!("expected targets with different names, found {names:?}"));
    }
    Ok(targets)
}

fn cargo(folders: &Folders) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    // Variables about this program: `ring` is compiled again when they change.
    let is_own = |name: &str| {
        let prefixes = ["CARGO_PKG_", "CARGO_MANIFEST_", "CARGO_BIN_", "CARGO_CRATE_", "CARGO_PRIMARY_"];
        prefixes.iter().any(|prefix| name.starts_with(prefix))
    };
    for (name, _) in env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_own)) {
        command.env_remove(name);
    }
    command.current_dir(&folders.root).stderr(Stdio::inherit());
    command
}

/// Folder of libFuzzer's sources, in the version of `Cargo.lock`.
fn engine_sources(folders: &Folders) -> Result<PathBuf, String> {
    let mut command = cargo(folders);
    let listed = command.args(["metadata", "--locked", "--format-version", "1"]).output();
    let listed = listed.map_err(|error| format!("cannot run cargo: {error}"))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let manifests = text.split("\"manifest_path\":\"").skip(1).filter_map(|rest| rest.split('"').next());
    let folder = manifests
        .filter_map(|path| path.strip_suffix("/Cargo.toml"))
        .find(|path| path.rsplit('/').next().is_some_and(|name| name.starts_with("libfuzzer-sys-")));
    let folder = folder.ok_or("cargo does not list libfuzzer-sys: the errors above have the reason")?;
    Ok(PathBuf::from(folder).join("libfuzzer"))
}

/// Path of the program in a message of cargo.
fn executable(message: &str) -> Option<PathBuf> {
    let (_, rest) = message.split_once("\"executable\":\"")?;
    Some(PathBuf::from(rest.split_once('"')?.0))
}

fn list(program: &PathBuf) -> Result<Vec<Target>, String> {
    let listed = Command::new(program).args(["--list", "--format", "terse"]).output();
    let listed = listed.map_err(|error| format!("cannot run {}: {error}", program.display()))?;
    let text = String::from_utf8_lossy(&listed.stdout);
    let tests = text.lines().filter_map(|line| line.strip_suffix(": test"));
    let target = |test: &str| {
        let (before, name) = test.split_once(MODULE)?;
        let is_target = (before.is_empty() || before.ends_with("::")) && !name.contains("::");
        is_target.then(|| Target { name: name.to_owned(), test: test.to_owned(), program: program.clone() })
    };
    Ok(tests.filter_map(target).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_the_programs_in_messages_of_cargo() {
        let message = r#"{"reason":"compiler-artifact","executable":"/a/b-1","fresh":true}"#;
        assert_eq!(executable(message), Some(PathBuf::from("/a/b-1")));
        assert_eq!(executable(r#"{"reason":"compiler-artifact","executable":null}"#), None);
    }
}
