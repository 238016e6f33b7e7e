//! Clocks of processes that a test changes: the time of day, which anybody may set, and where monotonic time begins.
//!
//! ```text
//!  WallClock       a shared object, preloaded: CLOCK_REALTIME plus what a mapped file says, changed while the process runs
//!  MonotonicClock  a time namespace: CLOCK_MONOTONIC and CLOCK_BOOTTIME plus what was said at its making, for processes started in it
//! ```
//!
//! The machine's own clock is never touched. Only programs that call the C library take a [`WallClock`]: ours do; etcd, which asks the
//! kernel itself, does not.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::config::StartedWith;
use crate::process::{Running, Starting};

/// The source of the preloaded object, in the tree.
const SOURCE: &str = "e2e/clock/wall.c";

/// Names its file to the preloaded object.
const VARIABLE: &str = "REPRISE_E2E_WALL_CLOCK";

/// The time of day as processes that are started with it see it.
#[derive(Debug)]
pub struct WallClock {
    library: PathBuf,
    file: PathBuf,
}

/// A time namespace, for as long as it is held.
#[derive(Debug)]
pub struct MonotonicClock {
    keeper: Running,
}

impl WallClock {
    /// The machine's time, with its files in `folder` under this name.
    ///
    /// # Panics
    /// When the object cannot be compiled: a linker is called `cc` wherever Rust programs are built.
    pub fn new(folder: &Path, name: &str) -> WallClock {
        let (library, file) = (folder.join(format!("{name}.clock.so")), folder.join(format!("{name}.clock")));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library);
        let output = compiler.arg(crate::tree().join(SOURCE)).output().expect("cc is there");
        assert!(output.status.success(), "{SOURCE}: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(&file, [0; 16]).expect("a file can be written");
        WallClock { library, file }
    }

    /// How a process is started that goes by it.
    pub fn start(&self) -> StartedWith {
        let text = |path: &Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
        let environment =
            vec![("LD_PRELOAD".to_owned(), text(&self.library)), (VARIABLE.to_owned(), text(&self.file))];
        StartedWith { environment, ..StartedWith::default() }
    }

    /// Sets it: so many seconds from the machine's, at once.
    pub fn set(&self, seconds: i64) {
        self.file().write_all_at(&seconds.to_ne_bytes(), 0).expect("a file can be written");
    }

    /// How often somebody was told a time that was not the machine's.
    pub fn told(&self) -> u64 {
        let mut told = [0; 8];
        self.file().read_exact_at(&mut told, 8).expect("sixteen bytes");
        u64::from_ne_bytes(told)
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.file).expect("it was made")
    }
}

impl MonotonicClock {
    /// A clock that shows so many seconds more than the machine's. What it says is written to a log in `folder`.
    ///
    /// # Panics
    /// When this user can make no time namespace.
    pub fn ahead(folder: &Path, seconds: u64) -> MonotonicClock {
        let mut command = Command::new("unshare");
        let seconds = seconds.to_string();
        command.args(["--time", "--monotonic", &seconds, "--boottime", &seconds]);
        // Whoever is started by it from then on is in the namespace: the file below stands for it.
        command.args(["sh", "-c", "echo '{\"ready\":true}'; exec sleep infinity"]).stdin(Stdio::null());
        let starting = Starting::spawn(command, &folder.join("clocks.log"));
        let (keeper, _) =
            starting.ready().unwrap_or_else(|refused| panic!("no time namespace: {}", refused.text));
        MonotonicClock { keeper }
    }

    /// How a process is started that goes by it.
    pub fn start(&self) -> StartedWith {
        let namespace = format!("--time=/proc/{}/ns/time_for_children", self.keeper.id());
        StartedWith { launcher: vec!["nsenter".to_owned(), namespace], ..StartedWith::default() }
    }
}
