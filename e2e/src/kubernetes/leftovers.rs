//! Leftovers of a cluster: everything, of all kinds that a cluster creates, that did not exist before it.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::{cgroups, node_init};

/// Default folders of the programs. Only their existence is compared, since other programs write there.
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

/// Everything that exists at a moment, by kind and name.
#[derive(Debug)]
pub struct Inventory {
    cluster: String,
    items: BTreeSet<String>,
}

impl Inventory {
    /// Lists everything that this process can see on the machine or that has the cluster's name.
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
        let settings = node_init::settings();
        add("setting", settings.iter().map(|(name, value)| format!("{name} = {}", value.trim())).collect());
        Inventory { cluster: cluster.to_owned(), items }
    }

    /// Returns what exists now and did not exist then.
    pub fn leftovers(&self) -> Vec<String> {
        Inventory::take(&self.cluster).items.difference(&self.items).cloned().collect()
    }
}

/// Lists the visible processes by id: in own namespaces, all that this process or its children have started.
fn processes() -> Vec<String> {
    let is_one = |name: &String| name.bytes().all(|byte| byte.is_ascii_digit());
    let name = |id: String| {
        let comm = fs::read_to_string(format!("/proc/{id}/comm")).unwrap_or_default();
        format!("{id} {}", comm.trim())
    };
    entries("/proc").into_iter().filter(is_one).map(name).collect()
}

fn mounts() -> Vec<String> {
    let text = fs::read_to_string("/proc/self/mountinfo").expect("every process has this file");
    let place = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        format!("{} (number {})", words[4], words[0])
    };
    text.lines().map(place).collect()
}

fn interfaces() -> Vec<String> {
    let output = Command::new("ip").args(["-oneline", "link"]).output().expect("ip can be run");
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
