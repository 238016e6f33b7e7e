//! NVMe controllers on the PCI bus, and their uses by the kernel.

use std::fs;
use std::path::{Path, PathBuf};

use reprise_io::PciAddress;

use super::{Host, Obstacle, VFIO_DRIVER, names};

/// Class of NVMe controllers: mass storage, non-volatile memory, NVM Express (PCI Code and ID Assignment, 1.2).
const NVME_CLASS: u32 = 0x01_08_02;
/// Base class of bridges, which stay in the kernel when a function of their group does not.
const BRIDGE: u32 = 0x06;

/// A use of a block device that a driver in user space must not end.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeviceUse {
    /// A file system is mounted.
    Mounted {
        /// The block device.
        device: String,
        /// Its mount point.
        at: String,
    },
    /// It is a swap space.
    Swap {
        /// The block device.
        device: String,
    },
    /// Another device of the kernel is built on it: RAID, LVM, encryption.
    Held {
        /// The block device.
        device: String,
        /// The device on it.
        by: String,
    },
}

impl std::fmt::Display for DeviceUse {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            DeviceUse::Mounted { device, at } => write!(f, "{device} is mounted at {at}"),
            DeviceUse::Swap { device } => write!(f, "{device} is a swap space"),
            DeviceUse::Held { device, by } => write!(f, "{device} is a part of {by}"),
        }
    }
}

/// An NVMe controller on the PCI bus.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeFunction {
    /// Place on the bus.
    pub address: PciAddress,
    /// Driver that it is bound to.
    pub driver: Option<String>,
    /// Number of its IOMMU group.
    pub iommu_group: Option<u32>,
    /// Functions of the group that another driver of the kernel has.
    pub group_users: Vec<String>,
    /// Name in the kernel, while the kernel's driver has it.
    pub name: Option<String>,
    /// Serial number, while the kernel's driver has it.
    pub serial: Option<String>,
    /// I/O queue pairs that the kernel's driver has, while it has the controller.
    pub kernel_queue_pairs: Option<u32>,
    /// Block devices of its namespaces.
    pub block_devices: Vec<String>,
    /// Uses of its block devices.
    pub uses: Vec<DeviceUse>,
    /// Whether the device node of its group is visible to this process.
    pub has_group_node: bool,
}

impl NvmeFunction {
    /// Reports whether a driver in user space can have the controller.
    pub fn is_bound_to_vfio(&self) -> bool {
        self.driver.as_deref() == Some(VFIO_DRIVER)
    }

    /// Returns the obstacles of a driver in user space, in the order of removing them.
    pub fn obstacles(&self) -> Vec<Obstacle> {
        let address = self.address;
        let mut all: Vec<Obstacle> = Vec::new();
        for one in &self.uses {
            all.push(Obstacle::new(
                format!("NVMe controller {address} is in use by the kernel: {one}"),
                "choose another controller, or move the data away and end that use",
            ));
        }
        if self.iommu_group.is_none() {
            all.push(Obstacle::new(
                format!("NVMe controller {address} has no IOMMU group"),
                "enable VT-d or AMD-Vi in the firmware, and start the kernel with intel_iommu=on or amd_iommu=on",
            ));
        }
        match self.driver.as_deref() {
            Some(VFIO_DRIVER) => {}
            Some(driver) => all.push(Obstacle::new(
                format!("NVMe controller {address} is bound to the kernel's driver {driver}"),
                format!("run driverctl set-override {address} {VFIO_DRIVER}, after a backup of its data"),
            )),
            None => all.push(Obstacle::new(
                format!("NVMe controller {address} is bound to no driver"),
                format!("run driverctl set-override {address} {VFIO_DRIVER}"),
            )),
        }
        if !self.group_users.is_empty() {
            let others = self.group_users.join(", ");
            all.push(Obstacle::new(
                format!("the IOMMU group of NVMe controller {address} also has {others}"),
                format!("bind them to {VFIO_DRIVER} too, or put the drive into another slot"),
            ));
        }
        if self.is_bound_to_vfio() && !self.has_group_node {
            let group = self.iommu_group.unwrap_or_default();
            all.push(Obstacle::new(
                format!("/dev/vfio/{group} is missing"),
                "give the agent's container access to /dev/vfio",
            ));
        }
        all
    }
}

/// Returns all NVMe controllers; functions that disappear meanwhile are omitted.
pub(super) fn scan(host: &Host) -> Vec<NvmeFunction> {
    let addresses = host.names("sys/bus/pci/devices").into_iter();
    let mut found: Vec<NvmeFunction> =
        addresses.filter_map(|name| read(host, name.parse().ok()?).ok()).collect();
    found.sort_by_key(|function| function.address);
    found
}

/// Reads the function at an address.
pub(super) fn read(host: &Host, address: PciAddress) -> Result<NvmeFunction, Obstacle> {
    let folder = folder(host, address);
    let Some(class) = class(&folder) else {
        let what = format!("no function is at the PCI address {address}");
        return Err(Obstacle::new(what, "correct the address: reprise doctor lists the NVMe controllers"));
    };
    if class != NVME_CLASS {
        let what = format!("the function at {address} is not an NVMe controller (class {class:06x})");
        return Err(Obstacle::new(what, "correct the address: reprise doctor lists the NVMe controllers"));
    }
    let iommu_group = link_name(&folder.join("iommu_group")).and_then(|name| name.parse().ok());
    let name = names(&folder.join("nvme")).into_iter().next();
    let controller = name.as_ref().map(|name| folder.join("nvme").join(name));
    let text = |file: &str| Some(fs::read_to_string(controller.as_ref()?.join(file)).ok()?.trim().to_owned());
    let queues = text("queue_count").and_then(|count| count.parse::<u32>().ok());
    let block_devices: Vec<String> =
        controller.as_deref().map(|folder| namespaces(host, folder)).unwrap_or_default();
    Ok(NvmeFunction {
        address,
        driver: link_name(&folder.join("driver")),
        iommu_group,
        group_users: group_users(&folder, address),
        serial: text("serial").filter(|serial| !serial.is_empty()),
        // One queue pair is the admin queue pair.
        kernel_queue_pairs: queues.map(|queues| queues.saturating_sub(1)),
        uses: block_devices.iter().flat_map(|device| uses(host, device)).collect(),
        block_devices,
        name,
        has_group_node: iommu_group.is_some_and(|group| host.path(&format!("dev/vfio/{group}")).exists()),
    })
}

fn folder(host: &Host, address: PciAddress) -> PathBuf {
    host.path("sys/bus/pci/devices").join(address.to_string())
}

fn class(folder: &Path) -> Option<u32> {
    let text = fs::read_to_string(folder.join("class")).ok()?;
    u32::from_str_radix(text.trim().trim_start_matches("0x"), 16).ok()
}

/// Returns the last part of a link's target.
fn link_name(link: &Path) -> Option<String> {
    fs::read_link(link).ok()?.file_name()?.to_str().map(str::to_owned)
}

/// Returns the other functions of a group that a driver other than vfio-pci has; bridges do not count.
fn group_users(folder: &Path, address: PciAddress) -> Vec<String> {
    let members = folder.join("iommu_group/devices");
    let others = names(&members).into_iter().filter(|name| *name != address.to_string());
    let in_use = others.filter(|name| {
        let member = members.join(name);
        let driver = link_name(&member.join("driver"));
        let is_bridge = class(&member).is_some_and(|class| class >> 16 == BRIDGE);
        !is_bridge && driver.is_some_and(|driver| driver != VFIO_DRIVER)
    });
    in_use.collect()
}

/// Returns the names of the block devices of a controller: `nvme0n1`, with the partitions of each. With multipath, the
/// visible device is that of the subsystem.
fn namespaces(host: &Host, controller: &Path) -> Vec<String> {
    let mut all = Vec::new();
    for entry in names(controller) {
        let Some(disk) = visible_name(&entry) else { continue };
        let visible = host.path("sys/class/block").join(&disk);
        let mut partitions = names(&controller.join(&entry));
        partitions.extend(names(&visible));
        partitions.retain(|name| name.starts_with(&disk));
        partitions.sort();
        partitions.dedup();
        all.push(disk);
        all.extend(partitions);
    }
    all
}

/// Returns the name under which a namespace of a controller is visible: with multipath, `nvme0c1n2` is `nvme0n2`.
/// `None` if the entry is not a namespace.
pub(crate) fn visible_name(entry: &str) -> Option<String> {
    let (controller, namespace) = entry.strip_prefix("nvme")?.split_once('n')?;
    let digits = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let subsystem = controller.split('c').next()?;
    (digits(subsystem) && digits(namespace)).then(|| format!("nvme{subsystem}n{namespace}"))
}

/// Returns the uses of a block device. Its directory is in `sys/class/block`.
fn uses(host: &Host, device: &str) -> Vec<DeviceUse> {
    let node = format!("/dev/{device}");
    let mut all = Vec::new();
    let mounts = host.text("proc/mounts").unwrap_or_default();
    for line in mounts.lines() {
        let mut words = line.split_whitespace();
        if let (Some(source), Some(at)) = (words.next(), words.next())
            && source == node
        {
            all.push(DeviceUse::Mounted { device: device.to_owned(), at: at.to_owned() });
        }
    }
    let swaps = host.text("proc/swaps").unwrap_or_default();
    if swaps.lines().any(|line| line.split_whitespace().next() == Some(node.as_str())) {
        all.push(DeviceUse::Swap { device: device.to_owned() });
    }
    let holders = names(&host.path("sys/class/block").join(device).join("holders"));
    all.extend(holders.into_iter().map(|by| DeviceUse::Held { device: device.to_owned(), by }));
    all
}
