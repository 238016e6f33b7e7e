//! NVMe controllers in a simulated sysfs below a node's root, for machines without NVMe.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A controller `nvmeN` with one device.
#[derive(Clone, Copy, Debug)]
pub struct NvmeController<'a> {
    /// The N in `nvmeN`.
    pub number: u32,
    /// Serial number of the controller.
    pub serial: &'a str,
    /// Number of I/O queue pairs.
    pub pairs: u32,
    /// Name of its device below `/dev`.
    pub device: &'a str,
}

impl NvmeController<'_> {
    /// Creates the controller's files below a node's root.
    pub fn create_under(&self, root: &Path) {
        let (name, sys) = (format!("nvme{}", self.number), root.join("sys"));
        let folder = sys.join("devices").join(&name);
        let disk = folder.join(self.device);
        fs::create_dir_all(&disk).expect("a folder");
        for (file, text) in [
            ("serial", self.serial.to_owned()),
            ("transport", "pcie".to_owned()),
            ("address", format!("0000:{:02x}:00.0", self.number)),
            // One queue pair is for administration.
            ("queue_count", (self.pairs + 1).to_string()),
        ] {
            fs::write(folder.join(file), format!("{text}\n")).expect("the folder is writable");
        }
        symlink(&folder, disk.join("device")).expect("a link can be created");
        for (class, name, target) in [("nvme", name.as_str(), &folder), ("block", self.device, &disk)] {
            let class = sys.join("class").join(class);
            fs::create_dir_all(&class).expect("a folder");
            symlink(target, class.join(name)).expect("a link can be created");
        }
    }
}
