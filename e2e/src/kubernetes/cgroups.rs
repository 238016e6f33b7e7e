//! The control groups of a node: what its pods get lies under one group of the node's own in every hierarchy.
//!
//! Control groups have no namespace that ends with a process: these are the one thing that a killed test leaves behind, beside its
//! folder. They are named after that folder, so the next cluster finds and removes them ([`remove_abandoned`]).

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// What all of them begin with.
const PREFIX: &str = "reprise-e2e-";

/// How long the end of processes may take to be seen in their groups.
const EMPTY_WITHIN: Duration = Duration::from_secs(10);

/// What pods are limited by, and a unified hierarchy must hand down.
const CONTROLLERS: [&str; 5] = ["cpuset", "cpu", "io", "memory", "pids"];

/// What a kubelet cannot do without.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

/// The groups of one node; removed when dropped, for which all processes in them must have ended.
#[derive(Debug)]
pub(super) struct Cgroups {
    name: String,
}

impl Cgroups {
    /// Makes them. A cluster's name has no dash.
    ///
    /// # Errors
    /// What the machine does not let happen.
    pub(super) fn make(cluster: &str, node: &str) -> Result<Cgroups, String> {
        let cgroups = Cgroups { name: format!("{PREFIX}{cluster}-{node}") };
        let hierarchies = hierarchies();
        if hierarchies.is_empty() {
            return Err("no control groups are mounted on this machine: kubelets need them".to_owned());
        }
        for hierarchy in &hierarchies {
            let group = hierarchy.join(&cgroups.name);
            fs::create_dir_all(&group).map_err(|error| {
                format!(
                    "no control group can be made ({}: {error}): root of the machine may",
                    group.display()
                )
            })?;
            inherit_cpus(hierarchy, &group);
        }
        if let [unified] = &hierarchies[..] {
            hand_down(unified, &unified.join(&cgroups.name))?;
        }
        Ok(cgroups)
    }

    /// As a kubelet is told.
    pub(super) fn root(&self) -> String {
        format!("/{}", self.name)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        let give_up = Instant::now() + EMPTY_WITHIN;
        for hierarchy in hierarchies() {
            let group = hierarchy.join(&self.name);
            // What stays is found by whoever looks for leftovers.
            while group.exists() && !remove(&group) && Instant::now() < give_up {
                std::thread::sleep(Duration::from_millis(20));
            }
        }
    }
}

/// Groups of a cluster that are there, whatever node they are of.
pub(super) fn of_cluster(cluster: &str) -> Vec<PathBuf> {
    let prefix = format!("{PREFIX}{cluster}-");
    all().into_iter().filter(|(_, name)| name.starts_with(&prefix)).map(|(path, _)| path).collect()
}

/// Removes those of clusters that have ended without doing so; who is there is told by `is_alive`.
pub(super) fn remove_abandoned(is_alive: impl Fn(&str) -> bool) {
    for (path, name) in all() {
        let cluster = name[PREFIX.len()..].split('-').next().unwrap_or_default();
        if !is_alive(cluster) {
            remove(&path);
        }
    }
}

/// Groups of all clusters, and their names.
fn all() -> Vec<(PathBuf, String)> {
    let groups = |hierarchy: PathBuf| fs::read_dir(hierarchy).into_iter().flatten().flatten();
    let named = |entry: fs::DirEntry| (entry.path(), entry.file_name().to_string_lossy().into_owned());
    let ours = |(_, name): &(PathBuf, String)| name.starts_with(PREFIX);
    hierarchies().into_iter().flat_map(groups).map(named).filter(ours).collect()
}

/// Where hierarchies are mounted: many of version 1, or one unified, or both.
fn hierarchies() -> Vec<PathBuf> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("every process has one");
    let mount = |line: &str| {
        let (place, system) = line.split_once(" - ")?;
        let is_one = system.starts_with("cgroup ") || system.starts_with("cgroup2 ");
        is_one.then(|| PathBuf::from(place.split(' ').nth(4).expect("the fifth is where it is mounted")))
    };
    text.lines().filter_map(mount).collect()
}

/// A group without processors may have no processes; those of version 1 begin so.
fn inherit_cpus(hierarchy: &Path, group: &Path) {
    for file in ["cpuset.cpus", "cpuset.mems"] {
        // Only one hierarchy has such files, and a unified one inherits by itself.
        if let Ok(above) = fs::read(hierarchy.join(file)) {
            let _ = fs::write(group.join(file), above);
        }
    }
}

/// Gives a group of the unified hierarchy what its pods are limited by.
fn hand_down(hierarchy: &Path, group: &Path) -> Result<(), String> {
    for controller in CONTROLLERS {
        // One by one, since one that is not there would keep the others away; what is missing is told below.
        let _ = fs::write(hierarchy.join("cgroup.subtree_control"), format!("+{controller}"));
    }
    let has = fs::read_to_string(group.join("cgroup.controllers")).unwrap_or_default();
    let lacks: Vec<&str> =
        NEEDED.into_iter().filter(|need| !has.split_whitespace().any(|one| one == *need)).collect();
    if lacks.is_empty() {
        return Ok(());
    }
    Err(format!(
        "control groups of this machine lack {}: in a container, run it with a private control group \
         namespace and no processes of its own in the root group",
        lacks.join(", ")
    ))
}

/// Removes a group and all below it; false when there is still a process.
fn remove(group: &Path) -> bool {
    let below = fs::read_dir(group).into_iter().flatten().flatten();
    let folders = below.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    let all_below = folders.map(|entry| remove(&entry.path())).fold(true, |all, one| all & one);
    all_below && fs::remove_dir(group).is_ok()
}
