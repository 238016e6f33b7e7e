//! The description of a device: its kind, and the path or address that identifies it. Opening, locking, sizing
//! and health build on it.
//!
//! | kind | identified by | its I/O |
//! |---|---|---|
//! | file | path | the kernel |
//! | block device | path | the kernel |
//! | NVMe controller | PCI address, serial number, namespace | a driver in user space, which has the whole function |
//! | emulated controller | path of its file | the same driver, on an emulation in this process |
//!
//! A controller that a user-space driver serves has no block device, no queues of the kernel and no entry in
//! `/sys/class/nvme`.

use std::fmt;
use std::path::{Path, PathBuf};

use reprise_policy::PciAddress;

/// Kind and identity of a device.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum DeviceDescription {
    /// A file or a block device of the kernel. [`DeviceFile::open`](crate::DeviceFile::open) finds out which.
    Path(PathBuf),
    /// An NVMe controller that a driver in user space serves.
    Controller(ControllerDescription),
    /// An NVMe controller that this process emulates, with a file as its namespace: for tests and demonstrations.
    Emulated(PathBuf),
}

/// Identity of a namespace of an NVMe controller. The address states where the controller is; serial numbers and the
/// namespace are compared with its Identify data when it is opened.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ControllerDescription {
    /// Place on the PCI bus.
    pub address: PciAddress,
    /// Accepted serial numbers; empty: any.
    pub serials: Vec<String>,
    /// Identifier of the namespace; `None`: the only one.
    pub namespace: Option<u32>,
}

impl ControllerDescription {
    /// Describes the only namespace of the controller at an address.
    pub fn at(address: PciAddress) -> ControllerDescription {
        ControllerDescription { address, serials: Vec::new(), namespace: None }
    }
}

impl fmt::Display for ControllerDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "pci:{}", self.address)?;
        self.namespace.map_or(Ok(()), |namespace| write!(f, "/{namespace}"))
    }
}

impl DeviceDescription {
    /// Returns the path of a device that the kernel serves.
    pub fn path(&self) -> Option<&Path> {
        match self {
            DeviceDescription::Path(path) => Some(path),
            DeviceDescription::Controller(_) | DeviceDescription::Emulated(_) => None,
        }
    }

    /// Returns whether both describe the same controller, file or block device.
    pub fn is_same_device(&self, other: &DeviceDescription) -> bool {
        match (self, other) {
            (DeviceDescription::Controller(one), DeviceDescription::Controller(other)) => {
                one.address == other.address
            }
            (
                DeviceDescription::Path(one) | DeviceDescription::Emulated(one),
                DeviceDescription::Path(other) | DeviceDescription::Emulated(other),
            ) => one == other,
            (DeviceDescription::Controller(_), _) | (_, DeviceDescription::Controller(_)) => false,
        }
    }
}

impl From<PathBuf> for DeviceDescription {
    fn from(path: PathBuf) -> DeviceDescription {
        DeviceDescription::Path(path)
    }
}

impl From<&Path> for DeviceDescription {
    fn from(path: &Path) -> DeviceDescription {
        DeviceDescription::Path(path.to_owned())
    }
}

impl From<&str> for DeviceDescription {
    fn from(path: &str) -> DeviceDescription {
        DeviceDescription::Path(PathBuf::from(path))
    }
}

impl fmt::Display for DeviceDescription {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            DeviceDescription::Path(path) => path.display().fmt(f),
            DeviceDescription::Controller(controller) => controller.fmt(f),
            DeviceDescription::Emulated(path) => write!(f, "emulated:{}", path.display()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn descriptions_name_paths_and_controllers() {
        let path = DeviceDescription::from(Path::new("/dev/nvme0n1"));
        assert_eq!(
            (path.to_string().as_str(), path.path()),
            ("/dev/nvme0n1", Some(Path::new("/dev/nvme0n1")))
        );
        let only = ControllerDescription::at("0000:3b:00.0".parse().expect("an address"));
        let second = ControllerDescription { namespace: Some(2), ..only.clone() };
        let emulated = DeviceDescription::Emulated("/tmp/disk".into());
        for (device, text) in [
            (DeviceDescription::Controller(only.clone()), "pci:0000:3b:00.0"),
            (DeviceDescription::Controller(second), "pci:0000:3b:00.0/2"),
            (emulated.clone(), "emulated:/tmp/disk"),
        ] {
            assert_eq!((device.to_string().as_str(), device.path()), (text, None));
        }
        assert!(emulated.is_same_device(&"/tmp/disk".into()) && !emulated.is_same_device(&path));
        let named = ControllerDescription { serials: vec!["S1".into()], ..only.clone() };
        let [only, named] = [only, named].map(DeviceDescription::Controller);
        assert!(only.is_same_device(&named) && !only.is_same_device(&path));
    }
}
