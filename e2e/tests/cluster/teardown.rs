//! The end of clusters: nothing is left behind, and leftovers are detected or removed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reprise_e2e::host::outside_namespaces;
use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::leftovers::Inventory;
use reprise_e2e::process::{ChildProcess, binary};
use reprise_e2e::wait_until;

/// Bound on the start of a lab, and on its end.
const LAB_WITHIN: Duration = Duration::from_secs(180);

/// Bound until a new object is detected.
const SEEN_WITHIN: Duration = Duration::from_secs(10);

/// Interval between polls that each start a process.
const PAUSE: Duration = Duration::from_millis(200);

/// Creates a leftover of each kind and checks that it is detected.
pub(crate) fn leftovers_are_detected(cluster: &mut Cluster) {
    let found = cluster.inventory();
    for kind in ["process", "mount", "network namespace", "network interface", "control group"] {
        assert!(found.iter().any(|item| item.starts_with(kind)), "no {kind} in {found:#?}");
    }
    let before = Inventory::take("another");
    assert_nothing_left(&before);
    let folder = tempfile::tempdir().expect("a folder");
    run("ip", &["netns", "add", "stray"]);
    run("ip", &["link", "add", "stray0", "type", "bridge"]);
    run("mount", &["-t", "tmpfs", "none", folder.path().to_str().expect("UTF-8")]);
    let mut command = Command::new("sleep");
    let process = ChildProcess::spawn({
        command.arg("600");
        command
    });
    // A new process has its parent's name until its `exec` has finished.
    let after = wait_until("a new process to have its own name", SEEN_WITHIN, || {
        let after = before.leftovers();
        after.iter().any(|item| item.contains(" sleep")).then_some(after)
    });
    let is_there = |words: &str| after.iter().any(|item| item.contains(words));
    for words in ["namespace stray", "interface stray0", &folder.path().display().to_string()] {
        assert!(is_there(words), "'{words}' is not in {after:#?}");
    }
    drop(process);
    run("umount", &[folder.path().to_str().expect("UTF-8")]);
    run("ip", &["link", "del", "stray0"]);
    run("ip", &["netns", "del", "stray"]);
    assert_nothing_left(&before);
}

/// Checks that nothing is left. Running nodes start short-lived programs for pods and services, which may
/// appear for a moment.
fn assert_nothing_left(before: &Inventory) {
    let deadline = Instant::now() + SEEN_WITHIN;
    let mut leftovers = before.leftovers();
    while !leftovers.is_empty() && Instant::now() < deadline {
        std::thread::sleep(PAUSE);
        leftovers = before.leftovers();
    }
    assert_eq!(leftovers, Vec::<String>::new(), "something is left behind");
}

/// Drops the cluster, which panics if it leaves something behind.
pub(crate) fn leaves_nothing_behind(cluster: Cluster) {
    let folder = cluster.folder().to_owned();
    drop(cluster);
    assert!(!folder.exists(), "{} still exists", folder.display());
}

/// Kills a lab. All its processes must end, and the start of the next cluster must remove the rest. Returns
/// that cluster for the following tests.
pub(crate) fn a_killed_lab(nodes: u8) -> Cluster {
    let cgroups_before = cgroups();
    let (mut lab, folder, _output) = start_lab();
    let kubectl = Command::new(folder.join("kubectl")).args(["get", "nodes", "--output=name"]).output();
    let kubectl = kubectl.expect("the lab has written a script for kubectl");
    assert_eq!(String::from_utf8_lossy(&kubectl.stdout), "node/node1\n", "{kubectl:?}");
    let listing = Command::new(folder.join("on-node1")).args(["ls", "/var/lib"]).output();
    let listing = listing.expect("the lab has written a script for the node");
    assert!(String::from_utf8_lossy(&listing.stdout).contains("kubelet"), "{listing:?}");
    assert_ne!(cgroups(), cgroups_before, "the lab has control groups");
    lab.kill();
    wait_until("the lab's processes to end", LAB_WITHIN, || processes_of(&folder).is_empty().then_some(()));
    let mut remaining = cgroups();
    remaining.retain(|group| !cgroups_before.contains(group));
    assert!(folder.exists() && !remaining.is_empty(), "a kill leaves files and control groups");
    let cluster = Cluster::start(nodes);
    assert!(!folder.exists(), "a start removes the folder");
    let now = cgroups();
    assert!(
        remaining.iter().all(|group| !now.contains(group)),
        "a start removes the control groups {remaining:?}: {now:?}"
    );
    cluster
}

/// Starts a lab with one node. Returns its process, its folder, and its open output.
fn start_lab() -> (ChildProcess, PathBuf, impl Sized) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(binary("k8s-lab"));
    command.arg("1").stdin(Stdio::null()).stdout(writer);
    let lab = ChildProcess::spawn(outside_namespaces(command));
    let mut lines = BufReader::new(reader).lines();
    let folder = lines.find_map(|line| {
        let line = line.expect("the output is text");
        line.strip_prefix("Files: ").map(PathBuf::from)
    });
    (lab, folder.expect("the lab prints its folder"), lines)
}

/// Returns the command lines of processes that contain a folder's path.
fn processes_of(folder: &Path) -> Vec<String> {
    let all = std::fs::read_dir("/proc").expect("processes are listed").flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
    let folder = folder.display().to_string();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).replace('\0', " ");
    all.filter_map(command).map(text).filter(|command| command.contains(&folder)).collect()
}

/// Returns the control groups of all clusters of the machine.
fn cgroups() -> Vec<String> {
    let output = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", "reprise-e2e-*"])
        .output()
        .expect("find can be run");
    let mut found: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    found.sort();
    found
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("the program can be run");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
