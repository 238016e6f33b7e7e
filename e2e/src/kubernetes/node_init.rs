//! The init process of a node: process 1 of its own namespaces. It mounts the node's own folders, starts the
//! node's programs and reaps orphans. When it is killed, everything on the node ends.
//!
//! ```text
//! /run              tmpfs: sockets, networks of pods; empty after each start
//! /run/machine      the node's folder on disk: the folders below, its configuration, its logs
//! /run/bin          the programs, shared by all nodes
//! /var/lib, /var/log, /mnt   the node's own, on disk
//! /proc/sys/…       files instead of settings that a kubelet would change for the whole machine
//! ```
//!
//! The rest of the file system is that of the machine. A program that exits is not restarted, so that a test
//! sees it. The only exception is the time of the start: containerd listens before it responds, and then a
//! kubelet exits.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Error, ErrorKind, Result, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{
    MountFlags, MountPropagationFlags, mount, mount_bind, mount_bind_recursive, mount_change, mount_move,
};
use rustix::process::{WaitOptions, wait};
use serde::{Deserialize, Serialize};

/// The node's folder as the node sees it.
pub const FOLDER: &str = "/run/machine";

/// The folder of programs as the node sees it.
pub const PROGRAMS: &str = "/run/bin";

/// Folders that each node has for itself: name in the node's folder, mount point.
const OWN: [(&str, &str); 3] = [("lib", "/var/lib"), ("log", "/var/log"), ("mnt", "/mnt")];

/// Settings that a kubelet enforces, with its values. They belong to no namespace.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// Bound until a program listens.
const LISTENS_WITHIN: Duration = Duration::from_secs(60);

/// Time during which programs that exit are restarted, and the pause before each restart.
const STARTS_WITHIN: Duration = Duration::from_secs(15);
const START_PAUSE: Duration = Duration::from_millis(500);

/// Instructions for the init process, in a JSON file.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// Path of the node's folder.
    pub folder: PathBuf,
    /// The folder of programs.
    pub programs: PathBuf,
    /// Programs to start, in this order.
    pub services: Vec<Service>,
}

/// A program of a node.
#[derive(Debug, Serialize, Deserialize)]
pub struct Service {
    /// Name of its log in the node's folder.
    pub name: String,
    /// Program and arguments, with paths as the node sees them.
    pub command: Vec<String>,
    /// A socket on which it must listen before the next program is started.
    pub socket: Option<PathBuf>,
}

/// Returns the machine's values of the settings that nodes must not change.
pub(super) fn settings() -> BTreeMap<String, String> {
    let value = |name: &str| fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default();
    SETTINGS.iter().map(|(name, _)| ((*name).to_owned(), value(name))).collect()
}

/// Runs as the init process until it is killed.
///
/// # Errors
/// A mount or the start of a program failed.
pub fn run(plan: &Path) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(plan)?)?;
    mount_all(&plan).map_err(|error| Error::new(error.kind(), format!("mounting: {error}")))?;
    // This setting belongs to the node's network namespace.
    fs::write("/proc/sys/net/ipv4/ip_forward", "1")?;
    let mut running = BTreeMap::new();
    for service in &plan.services {
        running.insert(service.start()?, service);
        service.listens()?;
    }
    let started = Instant::now();
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((process, status))) => {
                if let Some(service) = running.remove(&process.as_raw_nonzero().get()) {
                    writeln!(std::io::stderr(), "{} has exited: {status:?}", service.name)?;
                    if started.elapsed() < STARTS_WITHIN {
                        std::thread::sleep(START_PAUSE);
                        running.insert(service.start()?, service);
                    }
                }
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Err(Error::other("all programs have exited")),
            Err(error) => return Err(error.into()),
        }
    }
}

fn mount_all(plan: &Plan) -> Result<()> {
    // Prepared elsewhere and then moved: the folders to bind may be below the old /run, which must stay
    // visible.
    let new = Path::new("/run/new");
    fs::create_dir_all(new)?;
    mount("tmpfs", new, "tmpfs", MountFlags::empty(), None)?;
    for (name, from) in [("machine", &plan.folder), ("bin", &plan.programs)] {
        let to = new.join(name);
        fs::create_dir(&to)?;
        mount_bind(from, &to)?;
    }
    mount_move(new, "/run")?;
    for (name, to) in OWN {
        let from = Path::new(FOLDER).join(name);
        fs::create_dir_all(&from)?;
        mount_bind(&from, to)?;
    }
    // The kubelet's mounts below this folder must propagate to other programs.
    let kubelet = "/var/lib/kubelet";
    fs::create_dir_all(kubelet)?;
    mount_bind_recursive(kubelet, kubelet)?;
    mount_change(kubelet, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    let settings = Path::new("/run/settings");
    for (name, value) in SETTINGS {
        let setting = Path::new("/proc/sys").join(name);
        // A kernel without key rings lacks their settings.
        if setting.exists() {
            let file = settings.join(name);
            fs::create_dir_all(file.parent().expect("below the folder"))?;
            fs::write(&file, format!("{value}\n"))?;
            mount_bind(&file, &setting)?;
        }
    }
    Ok(())
}

impl Service {
    /// Starts the program and returns its process id.
    fn start(&self) -> Result<i32> {
        let log = Path::new(FOLDER).join(format!("{}.log", self.name));
        let log = File::options().create(true).append(true).open(log)?;
        let (program, arguments) = self.command.split_first().expect("a program");
        let mut command = Command::new(program);
        command.args(arguments).stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
        let started = command.spawn();
        let child = started.map_err(|error| Error::new(error.kind(), format!("{program}: {error}")))?;
        Ok(i32::try_from(child.id()).expect("process ids are positive numbers of 32 bits"))
    }

    /// Waits until the program listens on its socket, if it has one.
    fn listens(&self) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let deadline = Instant::now() + LISTENS_WITHIN;
        while UnixStream::connect(socket).is_err() {
            if Instant::now() > deadline {
                return Err(Error::new(ErrorKind::TimedOut, format!("{} does not listen", self.name)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
