//! A node whose disk stalls: writes hang for seconds, in the kernel. Whoever waits for the disk waits; nobody takes the node for dead, and its
//! blocks in DRAM are served, to its own engines and to others.
//!
//! The disk is a file system in a file, frozen as for a snapshot (`fsfreeze`), which holds every write and every flush until it is thawed.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use reprise_client::Source;
use reprise_e2e::cluster::{load_from_peer, numbers, wait_for_sources};
use reprise_e2e::host::{Network, in_own_namespace};
use reprise_e2e::{AgentConfig, Cluster, Loading, PATIENCE, World};

/// The test that needs a mount of its own.
const STALLED: &str = "stalled::a_node_whose_disk_stalls_is_alive_and_serves_what_it_has_in_memory";

/// Longer than a silent node is offered, three times over.
const STALL: Duration = Duration::from_secs(6);

/// A file system for a pool of 64 MiB.
const DISK_MIB: u64 = 128;

/// A mounted file system in a file.
struct Disk {
    folder: PathBuf,
}

impl Disk {
    fn mounted(at: &Path) -> Disk {
        let (file, folder) = (at.join("first.disk"), at.join("disk"));
        let image = std::fs::File::create(&file).expect("a file can be made");
        image.set_len(DISK_MIB << 20).expect("a file has a length");
        std::fs::create_dir(&folder).expect("a folder can be made");
        run(administrator("mkfs.ext4").args(["-q", "-F"]).arg(&file));
        run(administrator("mount").args(["-o", "loop"]).arg(&file).arg(&folder));
        Disk { folder }
    }

    fn stall(&self) {
        run(administrator("fsfreeze").arg("--freeze").arg(&self.folder));
    }

    fn go_on(&self) {
        run(administrator("fsfreeze").arg("--unfreeze").arg(&self.folder));
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        // A frozen one would stay for ever; both fail where the test has done it.
        let _ = administrator("fsfreeze").arg("--unfreeze").arg(&self.folder).output();
        let _ = administrator("umount").arg("--lazy").arg(&self.folder).output();
    }
}

/// A command of the administrator's, whose folder not everybody has among those of commands.
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
fn a_node_whose_disk_stalls_is_alive_and_serves_what_it_has_in_memory() {
    if !in_own_namespace(STALLED) {
        return;
    }
    // Loopback, in the test's own namespace.
    let _network = Network::new();
    let world = World::new();
    let disk = Disk::mounted(world.folder());
    let etcd = world.etcd();
    let endpoint = etcd.endpoint();
    let members = ["a", "b", "c"].map(|name| world.member(name, &endpoint)).into();
    let mut cluster = Cluster::of(world, etcd, members);
    for (node, pool_folder) in [("first", Some(disk.folder.clone())), ("second", None)] {
        let control_plane = cluster.members.iter().map(|member| member.address().to_owned()).collect();
        let config = AgentConfig { control_plane, pool_folder, ..AgentConfig::named(node) };
        let agent = cluster.world.agent(&config);
        cluster.agents.push(agent);
    }
    cluster.wait_until_whole(3);
    let (cluster, saver, reader) = cluster.hold(20);

    disk.stall();
    let stalled = Instant::now();
    let unwritten = numbers(20..30);
    let ticket = saver.save(&unwritten).expect("the arena takes blocks").ticket;
    wait_for_sources(&reader, &unwritten, PATIENCE);
    while stalled.elapsed() < STALL {
        for member in &cluster.members {
            assert_eq!(member.offers("first"), Some(true), "after {:?}", stalled.elapsed());
        }
        assert_eq!(saver.load_all(&unwritten, &Loading::LOCAL), vec![Source::OwnDram; unwritten.len()]);
    }
    load_from_peer(&reader, &unwritten);
    let written = cluster.agents[0].admin().counters().get("nvme_blocks");
    assert_eq!(written, 20, "nothing was written meanwhile");
    disk.go_on();

    saver.await_durable(ticket, unwritten.len());
    cluster.assert_complete(3, [&saver, &reader], &numbers(0..30));
}
