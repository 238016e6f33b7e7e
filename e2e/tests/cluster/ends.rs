//! How clusters end: nothing is left behind, and what is would be seen or is removed.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use reprise_e2e::host::apart;
use reprise_e2e::kubernetes::Cluster;
use reprise_e2e::kubernetes::leftovers::Inventory;
use reprise_e2e::process::{Running, binary};
use reprise_e2e::wait_until;

/// A whole cluster starts and is looked at.
const LABORATORY_WITHIN: Duration = Duration::from_secs(180);

/// What is there is seen.
const SEEN_WITHIN: Duration = Duration::from_secs(10);

/// Between two looks that start a process.
const PAUSE: Duration = Duration::from_millis(200);

/// Something of each kind, left on purpose.
pub(crate) fn leftovers_are_seen(cluster: &mut Cluster) {
    let seen = cluster.inventory();
    for kind in ["process", "mount", "network namespace", "network interface", "control group"] {
        assert!(seen.iter().any(|item| item.starts_with(kind)), "no {kind} in {seen:#?}");
    }
    let before = Inventory::take("another");
    nothing_is_left_since(&before);
    let folder = tempfile::tempdir().expect("a folder");
    run("ip", &["netns", "add", "stray"]);
    run("ip", &["link", "add", "stray0", "type", "bridge"]);
    run("mount", &["-t", "tmpfs", "none", folder.path().to_str().expect("UTF-8")]);
    let mut process = Command::new("sleep");
    let process = Running::spawn({
        process.arg("600");
        process
    });
    // A new process has its parent's name for a moment longer than its parent waits for it.
    let after = wait_until("a new process to be seen by its name", SEEN_WITHIN, || {
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
    nothing_is_left_since(&before);
}

/// Nodes are up, and start a program for a moment whenever they do something for a pod or a service: such a one is new and is not left.
fn nothing_is_left_since(before: &Inventory) {
    let give_up = Instant::now() + SEEN_WITHIN;
    let mut left = before.leftovers();
    while !left.is_empty() && Instant::now() < give_up {
        std::thread::sleep(PAUSE);
        left = before.leftovers();
    }
    assert_eq!(left, Vec::<String>::new(), "nothing is left that was not there");
}

/// The cluster's own check is in its drop, and panics.
pub(crate) fn leaves_nothing(cluster: Cluster) {
    let folder = cluster.folder().to_owned();
    drop(cluster);
    assert!(!folder.exists(), "{} is still there", folder.display());
}

/// SIGKILL to what a person starts: all processes go with it, and the next start removes the rest. That start is the cluster of the tests that
/// follow.
pub(crate) fn a_killed_laboratory(nodes: u8) -> Cluster {
    let cgroups_before = cgroups();
    let (mut laboratory, folder, _output) = laboratory();
    let kubectl = Command::new(folder.join("kubectl")).args(["get", "nodes", "--output=name"]).output();
    let kubectl = kubectl.expect("the laboratory has laid down how to look around");
    assert_eq!(String::from_utf8_lossy(&kubectl.stdout), "node/node1\n", "{kubectl:?}");
    let there = Command::new(folder.join("on-node1")).args(["ls", "/var/lib"]).output();
    let there = there.expect("and at the node");
    assert!(String::from_utf8_lossy(&there.stdout).contains("kubelet"), "{there:?}");
    assert_ne!(cgroups(), cgroups_before, "it has control groups");
    laboratory.kill();
    wait_until("its processes to be gone", LABORATORY_WITHIN, || {
        processes_of(&folder).is_empty().then_some(())
    });
    let mut left = cgroups();
    left.retain(|group| !cgroups_before.contains(group));
    assert!(folder.exists() && !left.is_empty(), "a kill leaves files and control groups");
    let cluster = Cluster::start(nodes);
    assert!(!folder.exists(), "a start removes the folder");
    let now = cgroups();
    assert!(left.iter().all(|group| !now.contains(group)), "and the control groups {left:?}: {now:?}");
    cluster
}

/// Starts one of one node. Once it is up: where its files are, and what else it says, which must be kept open.
fn laboratory() -> (Running, PathBuf, impl Sized) {
    let (reader, writer) = std::io::pipe().expect("a pipe");
    let mut command = Command::new(binary("k8s-lab"));
    command.arg("1").stdin(Stdio::null()).stdout(writer);
    let laboratory = Running::spawn(apart(command));
    let mut lines = BufReader::new(reader).lines();
    let place = lines.find_map(|line| {
        let line = line.expect("it says text");
        line.strip_prefix("Files: ").map(PathBuf::from)
    });
    (laboratory, place.expect("it comes up and says where its files are"), lines)
}

/// Processes that have something to do with a folder.
fn processes_of(folder: &Path) -> Vec<String> {
    let all = std::fs::read_dir("/proc").expect("processes are listed").flatten();
    let command = |entry: std::fs::DirEntry| std::fs::read(entry.path().join("cmdline")).ok();
    let folder = folder.display().to_string();
    let text = |bytes: Vec<u8>| String::from_utf8_lossy(&bytes).replace('\0', " ");
    all.filter_map(command).map(text).filter(|command| command.contains(&folder)).collect()
}

/// Control groups of all clusters of the machine.
fn cgroups() -> Vec<String> {
    let output = Command::new("find")
        .args(["/sys/fs/cgroup", "-maxdepth", "2", "-name", "reprise-e2e-*"])
        .output()
        .expect("findutils are there");
    let mut found: Vec<String> = String::from_utf8_lossy(&output.stdout).lines().map(str::to_owned).collect();
    found.sort();
    found
}

fn run(program: &str, arguments: &[&str]) {
    let output = Command::new(program).args(arguments).output().expect("the harness needs it too");
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
}
