//! Reads from sysfs where devices and GPUs are in the machine.
//!
//! | device | its place |
//! |---|---|
//! | NVMe controller, GPU | that of its PCI function |
//! | block device | that of the PCI function above it in sysfs; of partitions, that of the disk |
//! | RAID, LVM, NVMe with several paths | what the places of all members have in common |
//! | file | that of the block device of its file system |
//!
//! Files on memory, network and layered file systems have no place, nor do those on Btrfs, whose files have no device
//! number of a disk. Without a place, a device is neither preferred nor avoided. No place is guessed.

use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};

use reprise_policy::{DevicePlace, GpuPlace, PciAddress};

use crate::description::DeviceDescription;

/// Maximum depth of devices on devices: a volume on encryption on RAID on disks.
const LAYERS_MAX: u32 = 4;

/// Reads the place of a function from sysfs below `root`, which is `/` for this machine.
///
/// # Errors
/// There is no such function, or its entry is not below a root complex.
pub fn pci_place(root: &Path, address: PciAddress) -> io::Result<DevicePlace> {
    let entry = root.join("sys/bus/pci/devices").join(address.to_string());
    let path = fs::canonicalize(&entry)?;
    below_root_complex(&path).ok_or_else(|| {
        let text = format!("{} is not below a PCIe root complex", path.display());
        io::Error::new(io::ErrorKind::InvalidData, text)
    })
}

/// Reads the place of a GPU as a session states it.
///
/// # Errors
/// The machine has no such function or NUMA node; the message is for the session.
pub fn gpu_place(root: &Path, gpu: GpuPlace) -> Result<DevicePlace, String> {
    match gpu {
        GpuPlace::Pci(address) => pci_place(root, address).map_err(|error| {
            format!(
                "cannot find the GPU {address} in /sys of the agent ({error}): state the address that nvidia-smi \
                 shows on this node, or none"
            )
        }),
        GpuPlace::NumaNode(node) => {
            let folder = root.join("sys/devices/system/node").join(format!("node{node}"));
            let place = DevicePlace { root: None, numa_node: Some(node) };
            let text = format!("this node has no NUMA node {node}: state one that lscpu shows, or none");
            folder.exists().then_some(place).ok_or(text)
        }
    }
}

/// Reads the place of a device; `None` if it has none, or it cannot be read.
pub fn device_place(root: &Path, device: &DeviceDescription) -> Option<DevicePlace> {
    match device {
        DeviceDescription::Controller(controller) => pci_place(root, controller.address).ok(),
        // The namespace of an emulated controller is the file.
        DeviceDescription::Path(path) | DeviceDescription::Emulated(path) => {
            let metadata = fs::metadata(path).ok()?;
            let is_block_device = metadata.file_type().is_block_device();
            let number = if is_block_device { metadata.rdev() } else { metadata.dev() };
            block_place(root, (libc::major(number), libc::minor(number)))
        }
    }
}

/// Reads the place of the block device with a number.
fn block_place(root: &Path, (major, minor): (u32, u32)) -> Option<DevicePlace> {
    let entry = root.join("sys/dev/block").join(format!("{major}:{minor}"));
    entry_place(&fs::canonicalize(entry).ok()?, LAYERS_MAX)
}

/// Returns the place of an entry of a block device or of a controller.
fn entry_place(entry: &Path, layers: u32) -> Option<DevicePlace> {
    if let Some(place) = below_root_complex(entry) {
        return Some(place);
    }
    let layers = layers.checked_sub(1)?;
    let disk = if entry.join("partition").exists() { entry.parent()? } else { entry };
    let mut places = members(disk).into_iter().map(|member| entry_place(&member, layers));
    let first = places.next()??;
    let shared = places.try_fold(first, |shared, place| {
        let place = place?;
        Some(DevicePlace {
            root: shared.root.filter(|root| place.root.as_ref() == Some(root)),
            numa_node: shared.numa_node.filter(|node| place.numa_node == Some(*node)),
        })
    })?;
    (shared.root.is_some() || shared.numa_node.is_some()).then_some(shared)
}

/// Returns the devices that a device of the kernel consists of, or the controllers that lead to it.
fn members(disk: &Path) -> Vec<PathBuf> {
    let entries = |folder: &Path| {
        let all = fs::read_dir(folder).into_iter().flatten().flatten();
        all.filter_map(|entry| fs::canonicalize(entry.path()).ok())
    };
    let parts: Vec<PathBuf> = entries(&disk.join("slaves")).collect();
    if !parts.is_empty() {
        return parts;
    }
    // A disk with several paths is below its subsystem, which has a link to each controller.
    let subsystem = disk.parent().filter(|parent| {
        let name = parent.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with("nvme-subsys"))
    });
    let controllers = subsystem.into_iter().flat_map(entries);
    controllers.filter(|path| path.join("transport").exists()).collect()
}

/// Returns the place of an entry of sysfs that is below a root complex.
fn below_root_complex(entry: &Path) -> Option<DevicePlace> {
    let names = entry.components().filter_map(|part| part.as_os_str().to_str());
    // Only a root complex has a colon behind `pci`: `pci` alone is a bus of sysfs.
    let complex = names.into_iter().find(|name| name.starts_with("pci") && name.contains(':'))?;
    let mut nodes = entry.ancestors().filter_map(|folder| fs::read_to_string(folder.join("numa_node")).ok());
    // -1 without NUMA.
    let numa_node = nodes.next().and_then(|text| text.trim().parse().ok());
    Some(DevicePlace { root: Some(complex.to_owned()), numa_node })
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Simulated sysfs in a temporary folder.
    struct Sysfs(tempfile::TempDir);

    impl Sysfs {
        fn new() -> Sysfs {
            Sysfs(tempfile::tempdir().expect("a folder"))
        }

        fn root(&self) -> &Path {
            self.0.path()
        }

        fn folder(&self, path: &str) -> PathBuf {
            let folder = self.root().join("sys").join(path);
            fs::create_dir_all(&folder).expect("a folder");
            folder
        }

        fn link(&self, from: &str, to: &Path) {
            let from = self.root().join("sys").join(from);
            fs::create_dir_all(from.parent().expect("a folder")).expect("a folder");
            symlink(to, from).expect("a link");
        }

        /// Creates a function below a root complex; returns its folder below `sys`.
        fn function(&self, complex: &str, address: &str, numa_node: &str) -> String {
            let path = format!("devices/{complex}/0000:00:01.0/{address}");
            let folder = self.folder(&path);
            fs::write(folder.join("numa_node"), format!("{numa_node}\n")).expect("a file");
            self.link(&format!("bus/pci/devices/{address}"), &folder);
            path
        }

        /// Creates a disk and the link of its number.
        fn disk(&self, path: &str, number: &str) -> PathBuf {
            let folder = self.folder(path);
            self.link(&format!("dev/block/{number}"), &folder);
            folder
        }
    }

    fn place(root: &str, numa_node: u32) -> DevicePlace {
        DevicePlace { root: Some(root.to_owned()), numa_node: Some(numa_node) }
    }

    fn address(text: &str) -> PciAddress {
        text.parse().expect("an address")
    }

    #[test]
    fn functions_have_the_place_of_their_root_complex() {
        let sysfs = Sysfs::new();
        sysfs.function("pci0000:3a", "0000:3b:00.0", "0");
        sysfs.function("pci0000:80", "0000:81:00.0", "-1");
        let read = |text| pci_place(sysfs.root(), address(text));
        assert_eq!(read("0000:3b:00.0").expect("a place"), place("pci0000:3a", 0));
        let without_numa = read("0000:81:00.0").expect("a place");
        assert_eq!((without_numa.root.as_deref(), without_numa.numa_node), (Some("pci0000:80"), None));
        assert_eq!(read("0000:01:00.0").expect_err("no such function").kind(), io::ErrorKind::NotFound);
        let controller = crate::ControllerDescription::at(address("0000:3b:00.0"));
        let controller = DeviceDescription::Controller(controller);
        assert_eq!(device_place(sysfs.root(), &controller), Some(place("pci0000:3a", 0)));
    }

    #[test]
    fn stated_place_of_a_gpu_must_exist() {
        let sysfs = Sysfs::new();
        sysfs.function("pci0000:3a", "0000:3b:00.0", "0");
        sysfs.folder("devices/system/node/node1");
        let read = |gpu| gpu_place(sysfs.root(), gpu);
        assert_eq!(read(GpuPlace::Pci(address("0000:3b:00.0"))), Ok(place("pci0000:3a", 0)));
        assert_eq!(read(GpuPlace::NumaNode(1)), Ok(DevicePlace { root: None, numa_node: Some(1) }));
        let refused = read(GpuPlace::Pci(address("0000:3c:00.0"))).expect_err("no such function");
        assert!(refused.contains("0000:3c:00.0") && refused.contains("nvidia-smi"), "{refused}");
        let refused = read(GpuPlace::NumaNode(2)).expect_err("no such node");
        assert!(refused.contains("NUMA node 2"), "{refused}");
    }

    #[test]
    fn disks_and_partitions_have_the_place_of_their_controller() {
        let sysfs = Sysfs::new();
        let function = sysfs.function("pci0000:3a", "0000:3b:00.0", "0");
        sysfs.disk(&format!("{function}/nvme/nvme0/nvme0n1"), "259:0");
        let part = sysfs.disk(&format!("{function}/nvme/nvme0/nvme0n1/nvme0n1p1"), "259:1");
        fs::write(part.join("partition"), "1\n").expect("a file");
        for number in [(259, 0), (259, 1)] {
            assert_eq!(block_place(sysfs.root(), number), Some(place("pci0000:3a", 0)), "{number:?}");
        }
        assert_eq!(block_place(sysfs.root(), (0, 52)), None, "a file system in memory");
    }

    #[test]
    fn devices_on_devices_have_what_their_members_have_in_common() {
        let sysfs = Sysfs::new();
        for (complex, at, node, number) in [
            ("pci0000:3a", "0000:3b:00.0", "0", "259:0"),
            ("pci0000:5d", "0000:5e:00.0", "0", "259:1"),
            ("pci0000:d7", "0000:d8:00.0", "1", "259:2"),
        ] {
            let function = sysfs.function(complex, at, node);
            sysfs.disk(&format!("{function}/nvme/nvme0/nvme0n1"), number);
        }
        let volume = |number: &str, members: &[&str]| {
            let folder = sysfs.disk(&format!("devices/virtual/block/dm-{number}"), number);
            let slaves = folder.join("slaves");
            fs::create_dir_all(&slaves).expect("a folder");
            for member in members {
                let to = sysfs.root().join("sys/dev/block").join(member);
                symlink(to, slaves.join(member)).expect("a link");
            }
        };
        volume("253:0", &["259:0"]);
        volume("253:1", &["259:0", "259:1"]);
        volume("253:2", &["259:0", "259:2"]);
        volume("253:3", &["253:0"]);
        volume("253:4", &[]);
        let read = |minor| block_place(sysfs.root(), (253, minor));
        assert_eq!(read(0), Some(place("pci0000:3a", 0)));
        assert_eq!(read(1), Some(DevicePlace { root: None, numa_node: Some(0) }));
        assert_eq!(read(2), None, "members on both processors");
        assert_eq!(read(3), Some(place("pci0000:3a", 0)), "a volume on a volume");
        assert_eq!(read(4), None);
        volume("253:5", &["253:5"]);
        assert_eq!(read(5), None, "a circle ends");
    }

    #[test]
    fn disk_with_several_paths_has_the_place_of_its_controllers() {
        let sysfs = Sysfs::new();
        let function = sysfs.function("pci0000:3a", "0000:3b:00.0", "0");
        let controller = sysfs.folder(&format!("{function}/nvme/nvme0"));
        fs::write(controller.join("transport"), "pcie\n").expect("a file");
        let subsystem = "devices/virtual/nvme-subsystem/nvme-subsys0";
        let disk = sysfs.disk(&format!("{subsystem}/nvme0n1"), "259:0");
        sysfs.link(&format!("{subsystem}/nvme0"), &controller);
        let part = sysfs.disk(&format!("{subsystem}/nvme0n1/nvme0n1p1"), "259:1");
        fs::write(part.join("partition"), "1\n").expect("a file");
        fs::create_dir_all(disk.join("slaves")).expect("a folder");
        for number in [(259, 0), (259, 1)] {
            assert_eq!(block_place(sysfs.root(), number), Some(place("pci0000:3a", 0)), "{number:?}");
        }
    }

    #[test]
    fn file_has_the_place_of_the_disk_of_its_file_system() {
        let sysfs = Sysfs::new();
        let file = sysfs.root().join("pool");
        fs::write(&file, "content").expect("a file");
        let device = DeviceDescription::from(file.as_path());
        assert_eq!(device_place(sysfs.root(), &device), None, "no disk has the number");
        let number = fs::metadata(&file).expect("a file").dev();
        let function = sysfs.function("pci0000:3a", "0000:3b:00.0", "0");
        let number = format!("{}:{}", libc::major(number), libc::minor(number));
        sysfs.disk(&format!("{function}/nvme/nvme0/nvme0n1"), &number);
        assert_eq!(device_place(sysfs.root(), &device), Some(place("pci0000:3a", 0)));
        assert_eq!(
            device_place(sysfs.root(), &DeviceDescription::Emulated(file)),
            Some(place("pci0000:3a", 0))
        );
        assert_eq!(device_place(sysfs.root(), &"/nowhere/pool".into()), None);
    }
}
