//! The control groups of a node: the groups of its pods are below one group of the node in every hierarchy.
//!
//! Control groups do not end with a process: besides its folder, they are the only thing that a killed test
//! leaves behind. They are named after that folder, so the next cluster finds and removes them
//! ([`remove_abandoned`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Common prefix of the names of all groups.
const PREFIX: &str = "reprise-e2e-";

/// Bound until the groups of killed processes become empty.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// Controllers that limit pods, which a unified hierarchy must delegate.
const CONTROLLERS: [&str; 5] = ["cpuset", "cpu", "io", "memory", "pids"];

/// Controllers that a kubelet requires.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

/// The groups of one node. Removed when dropped; all processes in them must have ended.
#[derive(Debug)]
pub(super) struct Cgroups {
    name: String,
}

impl Cgroups {
    /// Creates the groups of a node. The name of a cluster contains no dash.
    ///
    /// # Errors
    /// The operation that the machine refuses.
    pub(super) fn make(cluster: &str, node: &str) -> Result<Cgroups, String> {
        let cgroups = Cgroups { name: format!("{PREFIX}{cluster}-{node}") };
        let hierarchies = hierarchies();
        if hierarchies.is_empty() {
            return Err("no control groups are mounted on this machine, and kubelets require them".to_owned());
        }
        for hierarchy in &hierarchies {
            let group = hierarchy.join(&cgroups.name);
            fs::create_dir_all(&group).map_err(|error| {
                format!(
                    "cannot create the control group {}: {error}; run as root of the machine",
                    group.display()
                )
            })?;
            inherit_cpus(hierarchy, &group);
        }
        if let [unified] = &hierarchies[..] {
            delegate(unified, &unified.join(&cgroups.name))?;
        }
        Ok(cgroups)
    }

    /// Returns the kubelet's `cgroupRoot`.
    pub(super) fn root(&self) -> String {
        format!("/{}", self.name)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let deadline = Instant::now() + EMPTY_WITHIN;
        for hierarchy in hierarchies() {
            let group = hierarchy.join(&self.name);
            // The leftover check reports groups that remain.
            while group.exists() && !remove(&group) && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Returns the groups of a cluster, of all its nodes.
pub(super) fn of_cluster(cluster: &str) -> Vec<PathBuf> {
    let prefix = format!("{PREFIX}{cluster}-");
    all().into_iter().filter(|(_, name)| name.starts_with(&prefix)).map(|(path, _)| path).collect()
}

/// Removes the groups of clusters that have ended without doing so. `is_alive` tests a cluster's name.
pub(super) fn remove_abandoned(is_alive: impl Fn(&str) -> bool) {
    for (path, name) in all() {
        let cluster = name[PREFIX.len()..].split('-').next().unwrap_or_default();
        if !is_alive(cluster) {
            remove(&path);
        }
    }
}

/// Returns the groups of all clusters with their names.
fn all() -> Vec<(PathBuf, String)> {
    let groups = |hierarchy: PathBuf| fs::read_dir(hierarchy).into_iter().flatten().flatten();
    let named = |entry: fs::DirEntry| (entry.path(), entry.file_name().to_string_lossy().into_owned());
    let ours = |(_, name): &(PathBuf, String)| name.starts_with(PREFIX);
    hierarchies().into_iter().flat_map(groups).map(named).filter(ours).collect()
}

/// Returns the mount points of all hierarchies: several of version 1, or one unified, or both.
fn hierarchies() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("every process has this file");
    let mount = |line: &str| {
        let (place, system) = line.split_once(" - ")?;
        let is_one = system.starts_with("cgroup ") || system.starts_with("cgroup2 ");
        is_one.then(|| PathBuf::from(place.split(' ').nth(4).expect("the fifth field is the mount point")))
    };
    text.lines().filter_map(mount).collect()
}

/// Copies the processors of the hierarchy's root. A new group of version 1 has none, and cannot contain
/// processes.
fn inherit_cpus(hierarchy: &Path, group: &Path) {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        // Only one hierarchy has these files, and a unified one inherits by itself.
        if let Ok(parent) = fs::read(hierarchy.join(file)) {
            let _ = fs::write(group.join(file), parent);
        }
    }
}

/// Enables the controllers that limit pods in a group of the unified hierarchy.
fn delegate(hierarchy: &Path, group: &Path) -> Result<(), String> {
    for controller in CONTROLLERS {
        // One at a time, since one missing controller fails the whole write; the check below reports missing
        // ones.
        let _ = fs::write(hierarchy.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    let enabled = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    let missing: Vec<&str> =
        NEEDED.into_iter().filter(|need| !enabled.split_whitespace().any(|one| one == *need)).collect();
    if missing.is_empty() {
        return Ok(());
    }
    Err(format!(
        "control groups of this machine lack {}: in a container, run it with a private control group \
         namespace and without processes in the root group",
        missing.join(", ")
    ))
}

/// Removes a group and all groups below it. Returns `false` if one still has a process.
fn remove(group: &Path) -> bool {
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    let folders = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let all_below = folders.map(|entry| remove(&entry.path())).fold(true, |all, one| all & one);
    all_below && fs::remove_dir(group).is_ok()
}
