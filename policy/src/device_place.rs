//! Places of devices in a machine, and their distance from a GPU.
//!
//! A transfer between a device and a GPU below one PCIe root complex does not pass through the processor. Below another
//! one of the same NUMA node, it does not pass through the link between processors.
//!
//! Not included: reading places from sysfs, which `reprise-io` does.

use std::fmt;
use std::str::FromStr;

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

/// Place of a device in the machine; at least one field is known.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DevicePlace {
    /// PCIe root complex, as sysfs names it: `pci0000:3a`.
    pub root: Option<String>,
    /// NUMA node; `None` if the machine has no such information.
    pub numa_node: Option<u32>,
}

impl DevicePlace {
    /// Returns how near a device is; one without a known place is far.
    pub fn distance_to(&self, device: Option<&DevicePlace>) -> Distance {
        if self.root.is_some() && device.is_some_and(|device| device.root == self.root) {
            Distance::SameRoot
        } else if self.numa_node.is_some() && device.is_some_and(|device| device.numa_node == self.numa_node)
        {
            Distance::SameNode
        } else {
            Distance::Far
        }
    }
}

impl fmt::Display for DevicePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.root, self.numa_node) {
            (Some(root), Some(node)) => write!(f, "{root}, NUMA node {node}"),
            (Some(root), None) => f.write_str(root),
            (None, Some(node)) => write!(f, "NUMA node {node}"),
            (None, None) => f.write_str("unknown"),
        }
    }
}

/// Distance between a device and a GPU, the nearest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Distance {
    /// Below one PCIe root complex.
    SameRoot,
    /// Of one NUMA node.
    SameNode,
    /// Neither, or unknown.
    Far,
}

/// Place of a GPU, as a session states it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuPlace {
    /// Its address on the PCI bus.
    Pci(PciAddress),
    /// Its NUMA node.
    NumaNode(u32),
}

#[cfg(test)]
mod tests {
    use super::*;

    fn place(root: &str, numa_node: Option<u32>) -> DevicePlace {
        DevicePlace { root: (!root.is_empty()).then(|| root.to_owned()), numa_node }
    }

    #[test]
    fn devices_under_the_root_of_the_gpu_are_nearest() {
        let gpu = place("pci0000:3a", Some(0));
        for (device, distance) in [
            (Some(place("pci0000:3a", Some(0))), Distance::SameRoot),
            (Some(place("pci0000:3a", None)), Distance::SameRoot),
            (Some(place("pci0000:5d", Some(0))), Distance::SameNode),
            (Some(place("pci0000:d7", Some(1))), Distance::Far),
            (Some(place("pci0000:d7", None)), Distance::Far),
            (None, Distance::Far),
        ] {
            assert_eq!(gpu.distance_to(device.as_ref()), distance, "{device:?}");
        }
        assert!(Distance::SameRoot < Distance::SameNode && Distance::SameNode < Distance::Far);
    }

    #[test]
    fn unknown_parts_of_places_are_not_equal() {
        let without_node = place("pci0000:00", None);
        assert_eq!(without_node.distance_to(Some(&place("pci0000:80", None))), Distance::Far);
        let without_root = place("", Some(1));
        assert_eq!(without_root.distance_to(Some(&place("", Some(1)))), Distance::SameNode);
        assert_eq!(without_root.distance_to(Some(&place("", Some(0)))), Distance::Far);
        assert_eq!(without_root.distance_to(Some(&place("pci0000:3a", None))), Distance::Far);
    }

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
}
