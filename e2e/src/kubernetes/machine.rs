//! What makes a process the machine of a node: run as the first process of namespaces of its own, it mounts what the node has for
//! itself, starts the node's programs and takes the end of whatever is left without a parent. When it is killed, everything on
//! the node goes.
//!
//! ```text
//! /run              in memory: sockets, networks of pods; as after a boot
//! /run/machine      the node's folder on disk: what follows, its configuration, its logs
//! /run/bin          the programs, shared by all nodes
//! /var/lib, /var/log, /mnt   the node's own, on disk
//! /proc/sys/…       files in place of settings that a kubelet would change for the whole machine
//! ```
//!
//! The rest of the file system is the machine's that runs the test. A program that ends is not started again: a test sees it. Only while
//! they start, they are: containerd listens a while before it answers, and a kubelet that is told so ends.

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

/// The node's folder, as the node sees it.
pub const FOLDER: &str = "/run/machine";

/// The folder of programs, as the node sees it.
pub const PROGRAMS: &str = "/run/bin";

/// Folders that a node has for itself, and what they are called in its folder.
const OWN: [(&str, &str); 3] = [("lib", "/var/lib"), ("log", "/var/log"), ("mnt", "/mnt")];

/// Settings that a kubelet makes sure of, with the values that it wants. They are not of any namespace.
const SETTINGS: [(&str, &str); 6] = [
    ("vm/overcommit_memory", "1"),
    ("vm/panic_on_oom", "0"),
    ("kernel/panic", "10"),
    ("kernel/panic_on_oops", "1"),
    ("kernel/keys/root_maxkeys", "1000000"),
    ("kernel/keys/root_maxbytes", "25000000"),
];

/// How long a program may take to listen.
const LISTENS_WITHIN: Duration = Duration::from_secs(60);

/// How long programs that end are started again, and after which pause.
const STARTS_WITHIN: Duration = Duration::from_secs(15);
const START_PAUSE: Duration = Duration::from_millis(500);

/// What a machine does, in a file that it is given.
#[derive(Debug, Serialize, Deserialize)]
pub struct Plan {
    /// The node's folder.
    pub folder: PathBuf,
    /// The folder of programs.
    pub programs: PathBuf,
    /// What is started, one after the other.
    pub services: Vec<Service>,
}

/// A program of a node.
#[derive(Debug, Serialize, Deserialize)]
pub struct Service {
    /// For its log, in the node's folder.
    pub name: String,
    /// Program and arguments, as the node sees them.
    pub command: Vec<String>,
    /// It listens there before the next one is started.
    pub socket: Option<PathBuf>,
}

/// The settings of the machine that nodes must not change, as they are.
pub(super) fn settings() -> BTreeMap<String, String> {
    let value = |name: &str| fs::read_to_string(Path::new("/proc/sys").join(name)).unwrap_or_default();
    SETTINGS.iter().map(|(name, _)| ((*name).to_owned(), value(name))).collect()
}

/// Is the machine until it is killed.
///
/// # Errors
/// What cannot be mounted or started.
pub fn run(plan: &Path) -> Result<()> {
    let plan: Plan = serde_json::from_slice(&fs::read(plan)?)?;
    mount_all(&plan).map_err(|error| Error::new(error.kind(), format!("mounting: {error}")))?;
    // Of the node's network.
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
                    writeln!(std::io::stderr(), "{} has ended: {status:?}", service.name)?;
                    if started.elapsed() < STARTS_WITHIN {
                        std::thread::sleep(START_PAUSE);
                        running.insert(service.start()?, service);
                    }
                }
            }
            Ok(None) | Err(Errno::INTR) => {}
            Err(Errno::CHILD) => return Err(Error::other("all programs have ended")),
            Err(error) => return Err(error.into()),
        }
    }
}

fn mount_all(plan: &Plan) -> Result<()> {
    // Made beside the old one, so that nothing hides the folders before they are bound: they may lie anywhere.
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
    // Pods are mounted below it by one program and seen by others; so mounts must be passed on.
    let kubelet = "/var/lib/kubelet";
    fs::create_dir_all(kubelet)?;
    mount_bind_recursive(kubelet, kubelet)?;
    mount_change(kubelet, MountPropagationFlags::SHARED | MountPropagationFlags::REC)?;
    let settings = Path::new("/run/settings");
    for (name, value) in SETTINGS {
        let setting = Path::new("/proc/sys").join(name);
        // A kernel without key rings has no settings of theirs.
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
    /// Starts it, and gives its process id.
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

    /// Waits until it listens, when that is of interest.
    fn listens(&self) -> Result<()> {
        let Some(socket) = &self.socket else { return Ok(()) };
        let give_up = Instant::now() + LISTENS_WITHIN;
        while UnixStream::connect(socket).is_err() {
            if Instant::now() > give_up {
                return Err(Error::new(ErrorKind::TimedOut, format!("{} does not listen", self.name)));
            }
            std::thread::sleep(Duration::from_millis(20));
        }
        Ok(())
    }
}
