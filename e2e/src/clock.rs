//! Clocks of processes under the control of a test: the wall clock, and the start of the monotonic clock.
//!
//! ```text
//!  WallClock       preloaded shared object: CLOCK_REALTIME plus an offset in a mapped file, which may change
//!  MonotonicClock  time namespace: CLOCK_MONOTONIC and CLOCK_BOOTTIME plus a fixed offset
//! ```
//!
//! The machine's own clock is never changed. A [`WallClock`] works only for programs that call the C library.
//! Our programs do; etcd calls the kernel directly and is not affected.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::process::{ChildProcess, LaunchOptions, StartingProcess};

/// Source of the preloaded object, relative to the tree.
const SOURCE: &str = "e2e/clock/wall.c";

/// Environment variable with the path of the mapped file.
const VARIABLE: &str = "REPRISE_E2E_WALL_CLOCK";

/// A wall clock for the processes that are started with it.
#[derive(Debug)]
pub struct WallClock {
    library: PathBuf,
    file: PathBuf,
}

/// A time namespace, which exists as long as this value.
#[derive(Debug)]
pub struct MonotonicClock {
    keeper: ChildProcess,
}

impl WallClock {
    /// Creates a clock with offset 0, and its files `NAME.clock` and `NAME.clock.so` in `folder`.
    ///
    /// # Panics
    /// If the object cannot be compiled. Every machine that builds Rust programs has a linker called `cc`.
    pub fn new(folder: &Path, name: &str) -> WallClock {
        let (library, file) = (folder.join(format!("{name}.clock.so")), folder.join(format!("{name}.clock")));
        let mut compiler = Command::new("cc");
        compiler.args(["-shared", "-fPIC", "-O1", "-Wall", "-Wextra", "-Werror", "-o"]).arg(&library);
        let output = compiler.arg(crate::tree().join(SOURCE)).output().expect("cc can be run");
        assert!(output.status.success(), "{SOURCE}: {}", String::from_utf8_lossy(&output.stderr));
        fs::write(&file, [0; 16]).expect("a file can be written");
        WallClock { library, file }
    }

    /// Returns the launch options of a process that uses this clock.
    pub fn start(&self) -> LaunchOptions {
        let text = |path: &Path| path.to_str().expect("folders of tests are UTF-8").to_owned();
        let environment =
            vec![("LD_PRELOAD".to_owned(), text(&self.library)), (VARIABLE.to_owned(), text(&self.file))];
        LaunchOptions { environment, ..LaunchOptions::default() }
    }

    /// Sets the offset from the machine's clock, in seconds. It takes effect at once.
    pub fn set(&self, seconds: i64) {
        self.file().write_all_at(&seconds.to_ne_bytes(), 0).expect("a file can be written");
    }

    /// Returns how often a process has read a time with a non-zero offset.
    pub fn altered_reads(&self) -> u64 {
        let mut reads = [0; 8];
        self.file().read_exact_at(&mut reads, 8).expect("sixteen bytes");
        u64::from_ne_bytes(reads)
    }

    fn file(&self) -> File {
        File::options().read(true).write(true).open(&self.file).expect("created by `new`")
    }
}

impl MonotonicClock {
    /// Creates a clock that is `seconds` ahead of the machine's. Its log is `clocks.log` in `folder`.
    ///
    /// # Panics
    /// If this user cannot create a time namespace.
    pub fn ahead(folder: &Path, seconds: u64) -> MonotonicClock {
        let mut command = Command::new("unshare");
        let seconds = seconds.to_string();
        command.args(["--time", "--monotonic", &seconds, "--boottime", &seconds]);
        // Children of this shell are in the namespace, which ends with it.
        command.args(["sh", "-c", "echo '{\"ready\":true}'; exec sleep infinity"]).stdin(Stdio::null());
        let starting = StartingProcess::spawn(command, &folder.join("clocks.log"));
        let (keeper, _) =
            starting.ready().unwrap_or_else(|error| panic!("cannot create a time namespace: {}", error.text));
        MonotonicClock { keeper }
    }

    /// Returns the launch options of a process that uses this clock.
    pub fn start(&self) -> LaunchOptions {
        let namespace = format!("--time=/proc/{}/ns/time_for_children", self.keeper.id());
        LaunchOptions { launcher: vec!["nsenter".to_owned(), namespace], ..LaunchOptions::default() }
    }
}
