//! A block device of a node that is a file underneath, with a stable name: what a disk is to whoever looks for one.
//!
//! Nodes of one machine share `/dev`, so a pool that is to be on one node selects the node as well.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Where stable names are.
const BY_ID: &str = "/dev/disk/by-id";

/// See the module. It goes when this is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    device: PathBuf,
    link: PathBuf,
}

impl LoopDevice {
    /// Makes a device of so many zeros, and gives it a stable name.
    ///
    /// # Panics
    /// When the machine has no loop devices, or does not give one.
    pub fn new(file: &Path, bytes: u64, name: &str) -> LoopDevice {
        fs::File::create(file).and_then(|file| file.set_len(bytes)).expect("a file can be made");
        let device = losetup(&["--find", "--show", file.to_str().expect("folders of tests are UTF-8")]);
        fs::create_dir_all(BY_ID).expect("a folder can be made");
        let link = Path::new(BY_ID).join(name);
        // What a test left that was killed.
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(device.trim(), &link).expect("a link can be made");
        LoopDevice { device: PathBuf::from(device.trim()), link }
    }

    /// Its stable name.
    pub fn stable_name(&self) -> &Path {
        &self.link
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
        // Whoever has it open still keeps it until it is closed.
        let detached = Command::new("losetup").arg("--detach").arg(&self.device).status();
        if !detached.is_ok_and(|status| status.success()) && !std::thread::panicking() {
            panic!("{} cannot be detached", self.device.display());
        }
    }
}

fn losetup(arguments: &[&str]) -> String {
    let output =
        Command::new("losetup").args(arguments).output().expect("losetup is there: install util-linux");
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "losetup {}: {said}: the machine needs loop devices",
        arguments.join(" ")
    );
    String::from_utf8(output.stdout).expect("a path of a device is text")
}
