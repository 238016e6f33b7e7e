//! A node whose disk stalls: writes hang in the kernel for seconds. Only operations that need the disk wait.
//! The node counts as alive, and its blocks in DRAM are served to its own engines and to other nodes.
//!
//! The disk is a file system in a file. `fsfreeze` blocks all writes and flushes until it is unfrozen.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use reprise_client::Source;
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, run_in_own_namespace};
use reprise_e2e::{AgentConfig, Cluster, LoadParams, PATIENCE, TestEnv};

/// Name of the test that runs in its own namespaces.
const STALLED: &str =
    "processes::disk_stall::a_node_with_a_stalled_disk_is_alive_and_serves_blocks_from_memory";

/// Duration of the stall: three times the silence after which a node is not offered.
const STALL: Duration = Duration::from_secs(6);

/// Size of the file system, which holds a pool of 64 MiB.
const DISK_MIB: u64 = 128;

/// A mounted file system in a file, which can be frozen.
struct Disk {
    folder: PathBuf,
}

impl Disk {
    fn mount(at: &Path) -> Disk {
        let (file, folder) = (at.join("first.disk"), at.join("disk"));
        let image = std::fs::File::create(&file).expect("a file can be created");
        image.set_len(DISK_MIB << 20).expect("the size of a file can be set");
        std::fs::create_dir(&folder).expect("a folder can be created");
        run(administrator("mkfs.ext4").args(["-q", "-F"]).arg(&file));
        run(administrator("mount").args(["-o", "loop"]).arg(&file).arg(&folder));
        Disk { folder }
    }

    fn stall(&self) {
        run(administrator("fsfreeze").arg("--freeze").arg(&self.folder));
    }

    fn resume(&self) {
        run(administrator("fsfreeze").arg("--unfreeze").arg(&self.folder));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A frozen file system could never be unmounted. Both fail if the test has done this already.
        let _ = administrator("fsfreeze").arg("--unfreeze").arg(&self.folder).output();
        let _ = administrator("umount").arg("--lazy").arg(&self.folder).output();
    }
}

/// Returns a command for administrators, whose folder may be missing in the user's PATH.
fn administrator(command: &str) -> Command {
    let folders = std::env::var("PATH").unwrap_or_default() + ":/usr/sbin:/sbin";
    let mut command = Command::new(command);
    command.env("PATH", folders);
    command
}

fn run(command: &mut Command) {
    let output = command.output().unwrap_or_else(|error| panic!("{command:?}: {error}"));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_node_with_a_stalled_disk_is_alive_and_serves_blocks_from_memory() {
    if !run_in_own_namespace(STALLED) {
        return;
    }
    // The loopback interface of the test's own namespace.
    let _network = Network::new();
    let env = TestEnv::new();
    let disk = Disk::mount(env.folder());
    let etcd = env.etcd();
    let endpoint = etcd.endpoint();
    let members = ["a", "b", "c"].map(|name| env.member(name, &endpoint)).into();
    let mut cluster = Cluster::of(env, etcd, members);
    for (node, pool_folder) in [("first", Some(disk.folder.clone())), ("second", None)] {
        let control_plane = cluster.members.iter().map(|member| member.address().to_owned()).collect();
        let config = AgentConfig { control_plane, pool_folder, ..AgentConfig::named(node) };
        let agent = cluster.env.agent(&config);
        cluster.agents.push(agent);
    }
    cluster.wait_until_complete(3);
    let (cluster, saver, reader) = cluster.save_blocks(20);

    disk.stall();
    let stalled = Instant::now();
    let unwritten = numbers(20..30);
    let ticket = saver.save(&unwritten).expect("the arena has room").ticket;
    wait_for_sources(&reader, &unwritten, PATIENCE);
    while stalled.elapsed() < STALL {
        for member in &cluster.members {
            assert_eq!(member.offers("first"), Some(true), "after {:?}", stalled.elapsed());
        }
        assert_eq!(saver.load_all(&unwritten, &LoadParams::LOCAL), vec![Source::OwnDram; unwritten.len()]);
    }
    load_from_peer(&reader, &unwritten);
    let written = cluster.agents[0].admin().counters().get("nvme_blocks");
    assert_eq!(written, 20, "no block was written during the stall");
    disk.resume();

    saver.await_durable(ticket, unwritten.len());
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..30));
}
