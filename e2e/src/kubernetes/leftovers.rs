//! What a cluster has left behind: everything that was not there before it, of all the kinds that it makes.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{cgroups, machine};

/// Where its programs put files when they are not told to put them elsewhere. Whole folders are not compared: others work there.
const PLACES: [&str; 12] = [
    "/etc/cni",
    "/etc/kubernetes",
    "/opt/cni",
    "/opt/containerd",
    "/usr/libexec/kubernetes",
    "/var/lib/cni",
    "/var/lib/containerd",
    "/var/lib/kubelet",
    "/var/lib/reprise",
    "/var/log/containers",
    "/var/log/pods",
    "/var/run/kubernetes",
];

/// What is there, by kind and name.
#[derive(Debug)]
pub struct Inventory {
    cluster: String,
    items: BTreeSet<String>,
}

impl Inventory {
    /// Of the machine as this process sees it, and of what has the cluster's name.
    pub fn take(cluster: &str) -> Inventory {
        let mut items = BTreeSet::new();
        let mut add = |kind: &str, names: Vec<String>| {
            items.extend(names.into_iter().map(|name| format!("{kind} {name}")));
        };
        add("process", processes());
        add("mount", mounts());
        add("network namespace", entries("/run/netns"));
        add("network interface", interfaces());
        add("control group", paths(&cgroups::of_cluster(cluster)));
        add("loop device", loop_devices());
        let is_there = |place: &&str| Path::new(place).exists();
        add("file", PLACES.into_iter().filter(is_there).map(str::to_owned).collect());
        let settings = machine::settings();
        add("setting", settings.iter().map(|(name, value)| format!("{name} = {}", value.trim())).collect());
        Inventory { cluster: cluster.to_owned(), items }
    }

    /// What is there now and was not then.
    pub fn leftovers(&self) -> Vec<String> {
        Inventory::take(&self.cluster).items.difference(&self.items).cloned().collect()
    }
}

/// Processes that this one can see, by id: in a namespace of its own, all that it or its children have started.
fn processes() -> Vec<String> {
    let is_one = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let name = |id: String| {
        let comm = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        format!("{id} {}", comm.trim())
    };
    entries("/proc").into_iter().filter(is_one).map(name).collect()
}

fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("every process has one");
    let place = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        format!("{} (number {})", words[4], words[0])
    };
    text.lines().map(place).collect()
}

fn interfaces() -> Vec<String> {
    let output = Command::new("ip").args(["-oneline", "link"]).output().expect("iproute2 is there");
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    text.lines().filter_map(|line| line.split(": ").nth(1)).map(str::to_owned).collect()
}

fn loop_devices() -> Vec<String> {
    let is_used = |name: &String| Path::new("/sys/block").join(name).join("loop").exists();
    entries("/sys/block").into_iter().filter(is_used).collect()
}

fn entries(folder: &str) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
}

fn paths(all: &[PathBuf]) -> Vec<String> {
    all.iter().map(|path| path.display().to_string()).collect()
}
