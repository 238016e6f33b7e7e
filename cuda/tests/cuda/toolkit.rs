//! The choice of `nvcc`, with programs that only report a version.

#[path = "../../build/nvcc.rs"]
mod nvcc;

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use nvcc::{Found, Places, find};

/// Writes a program `nvcc` to a folder.
fn program(folder: &Path, version: &str) -> PathBuf {
    fs::create_dir_all(folder).expect("a folder");
    let file = folder.join("nvcc");
    let output = format!("Cuda compilation tools, release {version}, V{version}.48");
    fs::write(&file, format!("#!/bin/sh\necho '{output}'\n")).expect("a file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o755)).expect("a program");
    file
}

#[test]
fn only_an_nvcc_that_was_asked_for_can_fail_the_build() {
    let root = tempfile::tempdir().expect("a folder");
    let (old, new) =
        (program(&root.path().join("old"), "12.4"), program(&root.path().join("new/bin"), "13.0"));
    let absent = root.path().join("absent/nvcc");
    let asked = |program: &Path| find(&Places { reprise_nvcc: Some(program.into()), ..Places::default() });
    assert_eq!(asked(&new), Found::Usable(new.clone()));
    for (program, part) in [(&old, "is version 12.4: expected at least 12.8"), (&absent, "cannot be started")]
    {
        let Found::Unusable(reason) = asked(program) else { panic!("{} is used", program.display()) };
        assert!(reason.contains(part) && reason.contains("unset it to build without"), "{reason}");
    }
    let on_path = |folders: &[&Path]| Some(std::env::join_paths(folders).expect("no colon"));
    let (old_folder, new_folder) = (root.path().join("old"), root.path().join("new/bin"));
    // An old one is passed over; without a newer one there is no device code.
    let path = on_path(&[&old_folder, &new_folder]);
    assert_eq!(find(&Places { path, ..Places::default() }), Found::Usable(new.clone()));
    let path = on_path(&[&old_folder]);
    let Found::Nothing(Some(reason)) = find(&Places { path, ..Places::default() }) else {
        panic!("it is used")
    };
    assert!(reason.contains("is version 12.4"), "{reason}");
    let home = |folder: &str| Some(root.path().join(folder).into());
    assert_eq!(find(&Places { cuda_home: home("absent"), ..Places::default() }), Found::Nothing(None));
    assert_eq!(find(&Places { cuda_home: home("new"), ..Places::default() }), Found::Usable(new));
}

#[test]
fn the_script_fetches_nothing_if_an_nvcc_is_named() {
    let root = tempfile::tempdir().expect("a folder");
    let named = program(root.path(), "13.0");
    let script = |program: &Path| {
        let mut command = Command::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("toolkit.sh"));
        let cache = root.path().join("cache");
        let output = command.env("REPRISE_NVCC", program).env("REPRISE_CACHE", &cache).output();
        assert!(!cache.exists(), "something was fetched");
        output.expect("the script starts")
    };
    let found = script(&named);
    assert!(found.status.success(), "{found:?}");
    assert_eq!(String::from_utf8_lossy(&found.stdout).trim(), named.display().to_string());
    let absent = script(&root.path().join("absent"));
    assert!(!absent.status.success() && String::from_utf8_lossy(&absent.stderr).contains("or unset it"));
}
