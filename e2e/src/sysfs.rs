//! What the kernel shows of NVMe controllers below a node's root, for machines that have none.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

/// A controller `nvmeN`.
#[derive(Clone, Copy, Debug)]
pub struct NvmeController<'a> {
    /// Its number.
    pub number: u32,
    /// Its serial number.
    pub serial: &'a str,
    /// Queue pairs that it has for I/O.
    pub pairs: u32,
    /// Name below `/dev` of a device of it.
    pub device: &'a str,
}

impl NvmeController<'_> {
    /// Shows it below a node's root.
    pub fn show(&self, root: &Path) {
        let (name, sys) = (format!("nvme{}", self.number), root.join("sys"));
        let folder = sys.join("devices").join(&name);
        let disk = folder.join(self.device);
        fs::create_dir_all(&disk).expect("a folder");
        for (file, text) in [
            ("serial", self.serial.to_owned()),
            ("transport", "pcie".to_owned()),
            ("address", format!("0000:{:02x}:00.0", self.number)),
            // One of them is for administration.
            ("queue_count", (self.pairs + 1).to_string()),
        ] {
            fs::write(folder.join(file), format!("{text}\n")).expect("a file can be written");
        }
        symlink(&folder, disk.join("device")).expect("a link can be made");
        for (class, name, target) in [("nvme", name.as_str(), &folder), ("block", self.device, &disk)] {
            let class = sys.join("class").join(class);
            fs::create_dir_all(&class).expect("a folder");
            symlink(target, class.join(name)).expect("a link can be made");
        }
    }
}
