//! Paths of the programs of a cluster, and their installation.
//!
//! Scripts in `e2e/` build Kubernetes, etcd, CoreDNS and Helm from Go modules into the cache folder, once.
//! containerd, runc and network tools are packages of the distribution, which `e2e/kubernetes/packages.sh`
//! installs if it may.
//!
//! Builds and installations need a network, so [`prepare`] must run before the program enters its namespaces.
//! Later calls only run scripts that take some milliseconds.

use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::binary;

/// Commands of Kubernetes in a cluster.
const KUBERNETES: [&str; 6] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];

/// Variable with the Cargo profile of the programs in images.
const IMAGES_PROFILE: &str = "REPRISE_IMAGES_PROFILE";
/// The default profile, with which the tests have built the programs already.
const TEST_PROFILE: &str = "dev";

/// Folders in which distributions install network plugins.
const PLUGINS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Builds and installs the missing programs.
///
/// # Errors
/// The missing programs, and the remedy.
pub fn prepare() -> Result<(), String> {
    run("e2e/kubernetes/packages.sh", &[])?;
    run("e2e/kubernetes/build.sh", &KUBERNETES)?;
    for script in ["e2e/etcd/build.sh", "e2e/coredns/build.sh", "e2e/helm/build.sh", "e2e/kubernetes/pod.sh"]
    {
        run(script, &[])?;
    }
    Ok(())
}

/// Returns the archives of Reprise's own images, as `make images-test` builds them; rebuilds them if their
/// sources have changed. Call it before [`super::cluster::enter`]; later calls are fast.
/// `REPRISE_IMAGES_PROFILE=images` selects the images of `make images`.
///
/// # Errors
/// The images cannot be built.
pub fn images() -> Result<Vec<PathBuf>, String> {
    let profile = std::env::var(IMAGES_PROFILE).unwrap_or_else(|_| TEST_PROFILE.to_owned());
    let listed = run("images/build.sh", &["--profile", &profile])?;
    Ok(listed.lines().filter_map(|line| line.split("  ").next()).map(PathBuf::from).collect())
}

/// Returns the path of a command of Kubernetes.
///
/// # Panics
/// If it does not exist and cannot be built.
pub(super) fn kubernetes(command: &str) -> PathBuf {
    one("e2e/kubernetes/build.sh", &[command])
}

/// Returns the path of the clusters' name server.
pub(super) fn coredns() -> PathBuf {
    one("e2e/coredns/build.sh", &[])
}

/// Returns the path of Helm.
pub(super) fn helm() -> PathBuf {
    one("e2e/helm/build.sh", &[])
}

/// Returns the static program of the tests' pods (`e2e/src/bin/reprise-e2e-pod.rs`), the only file in their
/// image.
pub fn pod() -> PathBuf {
    one("e2e/kubernetes/pod.sh", &[])
}

/// Returns the engine with rings in pods (`e2e/src/bin/reprise-e2e-rings.rs`) and the libraries that it needs, by their
/// paths in an image. It is the one that was built with the tests, without its symbols.
///
/// # Panics
/// If it was not built together with the tests.
pub fn rings(folder: &Path) -> Vec<(String, PathBuf)> {
    let program = folder.join("rings");
    output(Command::new("objcopy").arg("--strip-all").arg(binary("reprise-e2e-rings")).arg(&program));
    let listed = output(Command::new("ldd").arg(&program));
    // `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)` for the loader; the kernel's own library has no path.
    let words = listed.lines().flat_map(|line| line.split_whitespace().find(|word| word.starts_with('/')));
    let libraries = words.map(|path| (path.to_owned(), PathBuf::from(path)));
    std::iter::once(("/bin/rings".to_owned(), program.clone())).chain(libraries).collect()
}

/// Runs a program that must succeed, and returns its output.
fn output(command: &mut Command) -> String {
    let output = command.output().unwrap_or_else(|error| panic!("cannot run {command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Returns the path of kwok, which simulates nodes. [`prepare_kwok`] builds it.
pub(super) fn kwok() -> PathBuf {
    one("e2e/kwok/build.sh", &[])
}

/// Builds kwok if it does not exist. Call it before [`super::cluster::enter`], like [`images`].
///
/// # Errors
/// kwok cannot be built.
pub fn prepare_kwok() -> Result<(), String> {
    run("e2e/kwok/build.sh", &[]).map(drop)
}

/// Returns the folder of network plugins.
///
/// # Panics
/// If the plugins are missing because [`prepare`] was not called.
pub(super) fn plugins() -> &'static str {
    let has_all = |folder: &&&str| PathBuf::from(folder).join("ptp").exists();
    PLUGINS.iter().find(has_all).expect("packages.sh has installed the plugins")
}

fn one(script: &str, arguments: &[&str]) -> PathBuf {
    let printed = run(script, arguments).unwrap_or_else(|error| panic!("{error}"));
    PathBuf::from(printed.trim())
}

fn run(script: &str, arguments: &[&str]) -> Result<String, String> {
    let path = crate::tree().join(script);
    let output = Command::new(&path).args(arguments).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("cannot run {}: {error}", path.display()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{script} {} failed: its output is above", arguments.join(" ")))
    }
}
