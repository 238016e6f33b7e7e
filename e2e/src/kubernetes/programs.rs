//! The programs that a cluster is made of: where they are, and how they come to be there.
//!
//! Kubernetes, etcd, CoreDNS and Helm are built from Go modules by scripts of `e2e/`, once, into the cache folder. containerd, runc and what
//! a node's network needs are the distribution's, installed by `e2e/kubernetes/packages.sh` where that may be done.
//!
//! Nothing can be built or installed in namespaces without a network, so [`prepare`] comes first; afterwards all of it is there
//! and asking takes a script of some milliseconds.

use std::path::PathBuf;
use std::process::{Command, Stdio};

/// What a cluster takes of Kubernetes.
const KUBERNETES: [&str; 6] =
    ["kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "kubectl"];

/// Which profile of Cargo.toml the programs in images are built by.
const IMAGES_PROFILE: &str = "REPRISE_IMAGES_PROFILE";
/// The one by which tests have built them already.
const TEST_PROFILE: &str = "dev";

/// Where distributions put network plugins.
const PLUGINS: [&str; 2] = ["/usr/lib/cni", "/opt/cni/bin"];

/// Builds and installs what is missing.
///
/// # Errors
/// What cannot be had, and what to do.
pub fn prepare() -> Result<(), String> {
    run("e2e/kubernetes/packages.sh", &[])?;
    run("e2e/kubernetes/build.sh", &KUBERNETES)?;
    for script in ["e2e/etcd/build.sh", "e2e/coredns/build.sh", "e2e/helm/build.sh", "e2e/kubernetes/pod.sh"]
    {
        run(script, &[])?;
    }
    Ok(())
}

/// The archives of Reprise's own images, as `make images-test` makes them: built when what they are made of has changed. To be called before
/// [`super::cluster::enter`] by who installs the chart; afterwards it takes a moment. `REPRISE_IMAGES_PROFILE=images` takes those that
/// `make images` makes.
///
/// # Errors
/// They cannot be built.
pub fn images() -> Result<Vec<PathBuf>, String> {
    let profile = std::env::var(IMAGES_PROFILE).unwrap_or_else(|_| TEST_PROFILE.to_owned());
    let said = run("images/build.sh", &["--profile", &profile])?;
    Ok(said.lines().filter_map(|line| line.split("  ").next()).map(PathBuf::from).collect())
}

/// A command of Kubernetes.
///
/// # Panics
/// When it is not there and cannot be built.
pub(super) fn kubernetes(command: &str) -> PathBuf {
    one("e2e/kubernetes/build.sh", &[command])
}

/// The name server of clusters.
pub(super) fn coredns() -> PathBuf {
    one("e2e/coredns/build.sh", &[])
}

/// Helm.
pub(super) fn helm() -> PathBuf {
    one("e2e/helm/build.sh", &[])
}

/// What pods of tests run: `e2e/src/bin/reprise-e2e-pod.rs` as a static program, for images that hold nothing else.
pub fn pod() -> PathBuf {
    one("e2e/kubernetes/pod.sh", &[])
}

/// Who plays nodes that nobody runs. Built by [`prepare_kwok`].
pub(super) fn kwok() -> PathBuf {
    one("e2e/kwok/build.sh", &[])
}

/// Builds it where that has not been done. To be called before [`super::cluster::enter`], as [`images`].
///
/// # Errors
/// It cannot be built.
pub fn prepare_kwok() -> Result<(), String> {
    run("e2e/kwok/build.sh", &[]).map(drop)
}

/// The folder of network plugins.
///
/// # Panics
/// When there is none: [`prepare`] has not been called.
pub(super) fn plugins() -> &'static str {
    let has_all = |folder: &&&str| PathBuf::from(folder).join("ptp").exists();
    PLUGINS.iter().find(has_all).expect("packages.sh installs them")
}

fn one(script: &str, arguments: &[&str]) -> PathBuf {
    let said = run(script, arguments).unwrap_or_else(|error| panic!("{error}"));
    PathBuf::from(said.trim())
}

fn run(script: &str, arguments: &[&str]) -> Result<String, String> {
    let path = crate::tree().join(script);
    let output = Command::new(&path).args(arguments).stderr(Stdio::inherit()).output();
    let output = output.map_err(|error| format!("{} cannot be run: {error}", path.display()))?;
    if output.status.success() {
        Ok(String::from_utf8_lossy(&output.stdout).into_owned())
    } else {
        Err(format!("{script} {} has failed: what it said is above", arguments.join(" ")))
    }
}
