//! What decides whether images are built again: everything that changes what is in them, and nothing else.

use std::collections::BTreeSet;
use std::process::Command;

use reprise_e2e::tree;

/// Prints what images of a profile are made of.
const SCRIPT: &str = "set -euo pipefail; . images/made-of.sh; made_of \"$0\"";

/// Flags that whoever runs the tests may have set.
const FLAGS: [&str; 4] = ["RUSTFLAGS", "CARGO_PROFILE_IMAGES_LTO", "CC_x86_64_unknown_linux_musl", "CFLAGS"];

/// What images of a profile are made of with a variable in the environment.
fn made_of(profile: &str, variable: Option<(&str, &str)>) -> BTreeSet<String> {
    let mut command = Command::new("bash");
    command.current_dir(tree()).args(["-c", SCRIPT, profile]);
    for flag in FLAGS {
        command.env_remove(flag);
    }
    command.envs(variable);
    let output = command.output().expect("bash can be run");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect()
}

/// What a program says of itself, or that it is not there.
fn version(tool: &str) -> String {
    let said = Command::new(tool).arg("--version").current_dir(tree()).output().ok();
    let said = said.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let first = said.and_then(|said| said.lines().next().map(str::to_owned));
    first.unwrap_or_else(|| format!("no {tool}"))
}

#[test]
fn images_are_made_of_sources_locks_configurations_and_tools() {
    let all = made_of("images", None);
    let has = |word: &str| all.iter().any(|line| line.contains(word));
    for word in [
        "  .cargo/config.toml",
        "  Cargo.lock",
        "  Cargo.toml",
        "  Dockerfile",
        "  e2e/Cargo.toml",
        "  e2e/etcd/go.mod",
        "  e2e/etcd/go.sum",
        "  e2e/go.sh",
        "  images/made-of.sh",
        "  operator/src/main.rs",
        "  proto/protos/controlplane.proto",
    ] {
        assert!(has(word), "images are made of {word}: {all:#?}");
    }
    for tool in ["rustc", "cargo", "musl-gcc", "objcopy", "buildah"] {
        assert!(all.contains(&version(tool)), "images are made by {tool}: {all:#?}");
    }
    assert!(!has("docs/"), "documents are in no image: {all:#?}");
    assert_eq!(made_of("images", None), all);
}

#[test]
fn flags_and_the_profile_make_other_images_and_folders_do_not() {
    let plain = made_of("images", None);
    let dev = made_of("dev", None);
    assert!(
        dev.contains(&version("ldd")) && !plain.contains(&version("ldd")),
        "its C library is in them: {dev:#?}"
    );
    assert!(!dev.contains(&version("musl-gcc")), "and no other: {dev:#?}");
    for flag in FLAGS {
        let with = made_of("images", Some((flag, "thin")));
        let more: Vec<&String> = with.difference(&plain).collect();
        assert_eq!(more, [&format!("{flag}=thin")]);
    }
    for folder in ["CARGO_TARGET_DIR", "CARGO_TARGET_TMPDIR", "REPRISE_CACHE", "PROTOC"] {
        assert_eq!(made_of("images", Some((folder, "/elsewhere"))), plain, "{folder}");
    }
}
