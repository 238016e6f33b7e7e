//! A block device of a node, backed by a file, with a stable name.
//!
//! The nodes of one machine share `/dev`, so a pool on one node must also select the node.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Folder of stable device names.
const BY_ID: &str = "/dev/disk/by-id";

/// A loop device with a stable name. It is detached when this is dropped.
#[derive(Debug)]
pub struct LoopDevice {
    device: PathBuf,
    link: PathBuf,
}

impl LoopDevice {
    /// Creates a device of `bytes` zeros, and gives it a stable name.
    ///
    /// # Panics
    /// If the machine has no free loop device.
    pub fn new(file: &Path, bytes: u64, name: &str) -> LoopDevice {
        fs::File::create(file).and_then(|file| file.set_len(bytes)).expect("a file can be created");
        let device = losetup(&["--find", "--show", file.to_str().expect("folders of tests are UTF-8")]);
        fs::create_dir_all(BY_ID).expect("a folder can be created");
        let link = Path::new(BY_ID).join(name);
        // A killed test may have left the link.
        let _ = fs::remove_file(&link);
        std::os::unix::fs::symlink(device.trim(), &link).expect("a link can be created");
        LoopDevice { device: PathBuf::from(device.trim()), link }
    }

    /// Returns the path with the stable name.
    pub fn stable_name(&self) -> &Path {
        &self.link
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.link);
        // The kernel keeps the device until every process that has it open has closed it.
        let detached = Command::new("losetup").arg("--detach").arg(&self.device).status();
        if !detached.is_ok_and(|status| status.success()) && !std::thread::panicking() {
            panic!("cannot detach {}", self.device.display());
        }
    }
}

fn losetup(arguments: &[&str]) -> String {
    let output =
        Command::new("losetup").args(arguments).output().expect("losetup can be run: install util-linux");
    let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(
        output.status.success(),
        "losetup {}: {stderr}: the machine needs loop devices",
        arguments.join(" ")
    );
    String::from_utf8(output.stdout).expect("a path of a device is text")
}
