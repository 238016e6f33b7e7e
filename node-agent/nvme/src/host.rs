//! Requirements of NVMe in user space that a machine has or lacks, read from files: `/sys`, `/proc` and `/dev`.
//!
//! | requirement | file |
//! |---|---|
//! | an IOMMU | `/sys/class/iommu`, `/sys/kernel/iommu_groups` |
//! | interrupt remapping | chips of `/proc/interrupts`: `IR-…`, or `ITS-…` on ARM |
//! | the driver vfio-pci | `/sys/bus/pci/drivers/vfio-pci`, `/dev/vfio/vfio` |
//! | memory that may be locked | `/proc/self/limits`, `/proc/self/status` |
//! | the function, not in use | `/sys/bus/pci/devices`, `/proc/mounts`, `/proc/swaps` |
//!
//! All paths are below a root directory, so that tests give a prepared tree. Nothing is changed, and no device is
//! opened.

mod functions;

use std::fs;
use std::path::{Path, PathBuf};

use reprise_io::PciAddress;

pub(crate) use functions::visible_name;
pub use functions::{DeviceUse, NvmeFunction};

/// Driver of the kernel that gives functions to user space.
pub const VFIO_DRIVER: &str = "vfio-pci";

/// Number of `CAP_IPC_LOCK` in capability masks (linux/capability.h): memory is locked without a limit.
const CAP_IPC_LOCK: u32 = 14;

/// Locked memory next to the arena: queues, list pages and buffers of a device are below 16 MiB.
pub const LOCKED_BYTES_EXTRA: u64 = 16 << 20;

/// Something that a machine or function lacks, and the remedy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Obstacle {
    /// The missing or blocking part.
    pub what: String,
    /// The remedy for an operator of the machine.
    pub remedy: String,
}

impl Obstacle {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Obstacle {
        Obstacle { what: what.into(), remedy: remedy.into() }
    }
}

impl std::fmt::Display for Obstacle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.what, self.remedy)
    }
}

/// State of interrupt remapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InterruptRemapping {
    /// Functions cannot send interrupts to other targets than their own.
    On,
    /// The kernel does not use it.
    Off,
    /// Off, and the kernel was configured to accept that.
    OffAccepted,
    /// No interrupts are listed.
    Unknown,
}

/// Free and total pages of 2 MiB or another huge size.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HugePages {
    /// Reserved pages in total.
    pub total: u64,
    /// Pages that are not in use.
    pub free: u64,
    /// Size of a page in bytes.
    pub page_bytes: u64,
}

/// A machine, by the root directory of its files.
#[derive(Clone, Debug)]
pub struct Host {
    root: PathBuf,
}

impl Host {
    /// Reads a machine below `root`; `/` is this machine.
    pub fn at(root: impl Into<PathBuf>) -> Host {
        Host { root: root.into() }
    }

    /// Returns the number of IOMMUs in use.
    pub fn iommus(&self) -> usize {
        self.names("sys/class/iommu").len()
    }

    /// Returns the number of IOMMU groups.
    pub fn iommu_groups(&self) -> usize {
        self.names("sys/kernel/iommu_groups").len()
    }

    /// Reports whether the kernel gives functions to user space without an IOMMU, and thus without protection.
    pub fn has_unsafe_mode(&self) -> bool {
        self.is_set("sys/module/vfio/parameters/enable_unsafe_noiommu_mode")
    }

    /// Reports whether the driver vfio-pci is loaded.
    pub fn has_vfio_driver(&self) -> bool {
        self.path("sys/bus/pci/drivers").join(VFIO_DRIVER).exists()
    }

    /// Reports whether the container of VFIO is visible to this process.
    pub fn has_vfio_node(&self) -> bool {
        self.path("dev/vfio/vfio").exists()
    }

    /// Returns the state of interrupt remapping.
    pub fn interrupt_remapping(&self) -> InterruptRemapping {
        let interrupts = self.text("proc/interrupts").unwrap_or_default();
        let mut words = interrupts.split_whitespace();
        if words.any(|word| word.starts_with("IR-") || word.starts_with("ITS-")) {
            InterruptRemapping::On
        } else if interrupts.is_empty() {
            InterruptRemapping::Unknown
        } else if self.is_set("sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts") {
            InterruptRemapping::OffAccepted
        } else {
            InterruptRemapping::Off
        }
    }

    /// Returns how much memory this process may lock in bytes; `None`: without a limit, or unknown.
    pub fn memlock_limit(&self) -> Option<u64> {
        let status = self.text("proc/self/status").unwrap_or_default();
        let mask = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
        let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
        if mask >> CAP_IPC_LOCK & 1 == 1 {
            return None;
        }
        let limits = self.text("proc/self/limits")?;
        let line = limits.lines().find_map(|line| line.strip_prefix("Max locked memory"))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Returns the reserved huge pages.
    pub fn huge_pages(&self) -> HugePages {
        let meminfo = self.text("proc/meminfo").unwrap_or_default();
        let field = |name: &str| {
            let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
            line.and_then(|value| value.split_whitespace().next()?.parse::<u64>().ok()).unwrap_or(0)
        };
        let page_bytes = field("Hugepagesize") << 10;
        HugePages { total: field("HugePages_Total"), free: field("HugePages_Free"), page_bytes }
    }

    /// Returns what the machine lacks for any controller, in the order of setting it up.
    pub fn obstacles(&self, locked_bytes: u64) -> Vec<Obstacle> {
        [self.iommu_obstacle(), self.interrupt_obstacle(), self.driver_obstacle()]
            .into_iter()
            .flatten()
            .chain(self.memlock_obstacle(locked_bytes))
            .collect()
    }

    /// Returns why functions cannot be isolated.
    pub fn iommu_obstacle(&self) -> Option<Obstacle> {
        if self.iommus() > 0 && self.iommu_groups() > 0 {
            return None;
        }
        let unsafe_mode = if self.has_unsafe_mode() {
            " (VFIO's mode without an IOMMU is enabled, and not used: a controller could write to all memory)"
        } else {
            ""
        };
        Some(Obstacle::new(
            format!("this machine has no IOMMU in use{unsafe_mode}"),
            "enable VT-d or AMD-Vi in the firmware, and start the kernel with intel_iommu=on or amd_iommu=on",
        ))
    }

    /// Returns why functions could send arbitrary interrupts.
    pub fn interrupt_obstacle(&self) -> Option<Obstacle> {
        (self.interrupt_remapping() == InterruptRemapping::Off).then(|| {
            Obstacle::new(
                "interrupt remapping is off",
                "enable it in the firmware (with x2APIC), and remove intremap=off from the kernel's command line",
            )
        })
    }

    /// Returns why vfio-pci cannot be used.
    pub fn driver_obstacle(&self) -> Option<Obstacle> {
        match (self.has_vfio_driver(), self.has_vfio_node()) {
            (false, _) => {
                Some(Obstacle::new("the kernel's driver vfio-pci is not loaded", "run modprobe vfio-pci"))
            }
            (true, false) => Some(Obstacle::new(
                "/dev/vfio/vfio is missing",
                "run modprobe vfio, and give the agent's container access to /dev/vfio",
            )),
            (true, true) => None,
        }
    }

    /// Returns why a driver cannot lock this many bytes next to its own memory.
    pub fn memlock_obstacle(&self, arena_bytes: u64) -> Option<Obstacle> {
        let needed = arena_bytes.saturating_add(LOCKED_BYTES_EXTRA);
        let limit = self.memlock_limit().filter(|limit| *limit < needed)?;
        Some(Obstacle::new(
            format!("this process may lock {} MiB of memory, and needs {} MiB", limit >> 20, needed >> 20),
            "raise the limit (ulimit -l, LimitMEMLOCK= of systemd), or give it the capability IPC_LOCK",
        ))
    }

    /// Returns the NVMe controllers on the PCI bus, sorted by address.
    pub fn nvme_functions(&self) -> Vec<NvmeFunction> {
        functions::scan(self)
    }

    /// Returns the NVMe controller at an address.
    ///
    /// # Errors
    /// There is no function at the address, or it is not an NVMe controller.
    pub fn nvme_function(&self, address: PciAddress) -> Result<NvmeFunction, Obstacle> {
        functions::read(self, address)
    }

    fn path(&self, below: &str) -> PathBuf {
        self.root.join(below)
    }

    fn text(&self, below: &str) -> Option<String> {
        fs::read_to_string(self.path(below)).ok()
    }

    fn is_set(&self, below: &str) -> bool {
        self.text(below).is_some_and(|text| matches!(text.trim(), "Y" | "1"))
    }

    fn names(&self, below: &str) -> Vec<String> {
        names(&self.path(below))
    }
}

/// Returns the sorted names in a directory; none if it cannot be read.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let mut names: Vec<String> =
        entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
    names.sort();
    names
}
