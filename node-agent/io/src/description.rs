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
use std::str::FromStr;

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

/// Address of a function on the PCI bus: `domain:bus:device.function`, all hexadecimal. The domain has 4 to 8
/// digits, as host bridges in software have domains from 10000 on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PciAddress {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

/// Error of a text that is not a [`PciAddress`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("invalid PCI address \"{0}\": expected domain:bus:device.function, for example 0000:3b:00.0")]
pub struct PciAddressError(String);

/// Number of devices of a bus.
const DEVICES_OF_BUS: u32 = 32;

/// Number of functions of a device.
const FUNCTIONS_OF_DEVICE: u32 = 8;

impl FromStr for PciAddress {
    type Err = PciAddressError;

    fn from_str(text: &str) -> Result<PciAddress, PciAddressError> {
        parse(text).ok_or_else(|| PciAddressError(text.chars().take(64).collect()))
    }
}

fn parse(text: &str) -> Option<PciAddress> {
    let mut parts = text.split(':');
    let (domain, bus, slot) = (parts.next()?, parts.next()?, parts.next()?);
    let (device, function) = slot.split_once('.')?;
    let function = hex(function, 1..=1).filter(|function| *function < FUNCTIONS_OF_DEVICE)?;
    let device = hex(device, 2..=2).filter(|device| *device < DEVICES_OF_BUS)?;
    let address = PciAddress {
        domain: hex(domain, 4..=8)?,
        bus: u8::try_from(hex(bus, 2..=2)?).ok()?,
        device: u8::try_from(device).ok()?,
        function: u8::try_from(function).ok()?,
    };
    parts.next().is_none().then_some(address)
}

/// Parses hexadecimal digits; `None` for another number of digits.
fn hex(text: &str, digits: std::ops::RangeInclusive<usize>) -> Option<u32> {
    let is_number = digits.contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    is_number.then(|| u32::from_str_radix(text, 16).ok()).flatten()
}

impl fmt::Display for PciAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let PciAddress { domain, bus, device, function } = self;
        write!(f, "{domain:04x}:{bus:02x}:{device:02x}.{function}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pci_addresses_are_parsed_and_written_in_one_form() {
        for (text, written) in [
            ("0000:3b:00.0", "0000:3b:00.0"),
            ("0000:AF:1f.7", "0000:af:1f.7"),
            ("10000:e1:00.0", "10000:e1:00.0"),
            ("00010000:e1:00.0", "10000:e1:00.0"),
        ] {
            assert_eq!(text.parse::<PciAddress>().expect(text).to_string(), written);
        }
    }

    #[test]
    fn other_texts_are_rejected_with_an_example() {
        for text in [
            "",
            "3b:00.0",
            "000:3b:00.0",
            "0000:3b:00",
            "0000:3b:00.8",
            "0000:3b:20.0",
            "0000:3b:00.0:1",
            "0000:3b:0.0",
            "0000:3g:00.0",
            "0000:+b:00.0",
            "100000000:00:00.0",
            "/dev/nvme0n1",
        ] {
            let refused = text.parse::<PciAddress>().expect_err(text).to_string();
            assert!(refused.contains(text) && refused.contains("for example 0000:3b:00.0"), "{refused}");
        }
    }

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
