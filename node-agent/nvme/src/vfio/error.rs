//! What keeps a PCI function from being used, with the remedy.

use std::io;

use reprise_io::PciAddress;

/// A PCI function that cannot be used. Each message has the remedy.
#[derive(Debug, thiserror::Error)]
pub enum FunctionError {
    /// The machine has no function at the address.
    #[error("no PCI function {0}: list the NVMe controllers with `lspci -D -d ::0108`")]
    Absent(PciAddress),
    /// The function is not an NVMe controller.
    #[error(
        "PCI function {address} has class {class:06x}, an NVMe controller has 010802: correct the address"
    )]
    NotNvme {
        /// Address of the function.
        address: PciAddress,
        /// Its class, subclass and programming interface.
        class: u32,
    },
    /// A file system on the controller is mounted.
    #[error("{device} of controller {address} is mounted at {place}: unmount it, or use another controller")]
    Mounted {
        /// Address of the controller.
        address: PciAddress,
        /// Block device.
        device: String,
        /// Mount point.
        place: String,
    },
    /// A block device of the controller is in use.
    #[error("{device} of controller {address} is in use by {user}: release it, or use another controller")]
    InUse {
        /// Address of the controller.
        address: PciAddress,
        /// Block device.
        device: String,
        /// Its user: another block device, swap, or an unknown process.
        user: String,
    },
    /// A driver of the kernel serves the function.
    #[error(
        "PCI function {address} belongs to the kernel's driver {driver}: bind it to vfio-pci (`driverctl set-override \
         {address} vfio-pci`)"
    )]
    KernelDriver {
        /// Address of the function.
        address: PciAddress,
        /// Name of the driver.
        driver: String,
    },
    /// No driver serves the function.
    #[error(
        "PCI function {0} has no driver: load vfio-pci and bind it (`driverctl set-override {0} vfio-pci`)"
    )]
    Unbound(PciAddress),
    /// The function did not get the driver.
    #[error(
        "PCI function {address} was not bound to {driver}: its driver is now {now}; see the kernel's log"
    )]
    NotBound {
        /// Address of the function.
        address: PciAddress,
        /// Requested driver.
        driver: &'static str,
        /// Present driver.
        now: String,
    },
    /// The kernel has no vfio-pci.
    #[error("the kernel's module vfio-pci is not loaded: run `modprobe vfio-pci`")]
    NoVfio,
    /// The function is not behind an IOMMU.
    #[error(
        "PCI function {0} is not behind an IOMMU: enable it in the firmware (VT-d or AMD-Vi), and on Intel boot with \
         intel_iommu=on"
    )]
    NoIommu(PciAddress),
    /// Functions of the same IOMMU group belong to drivers of the kernel.
    #[error(
        "IOMMU group {group} of {address} also has {others}: bind them to vfio-pci too, or move the controller to a \
         slot with ACS"
    )]
    SharedGroup {
        /// Address of the controller.
        address: PciAddress,
        /// Number of the group.
        group: u32,
        /// The other functions, with their drivers.
        others: String,
    },
    /// Another process has opened the group.
    #[error("IOMMU group {group} of {address} is open in another process: end that process")]
    GroupBusy {
        /// Address of the controller.
        address: PciAddress,
        /// Number of the group.
        group: u32,
    },
    /// This process may not open the group.
    #[error("no permission for {path}: run as root, or give this user access to the file")]
    Permission {
        /// Path of the file.
        path: String,
    },
    /// The IOMMU does not remap interrupts.
    #[error(
        "the IOMMU of {0} does not remap interrupts, so a device could forge them: enable interrupt remapping (x2APIC) \
         in the firmware; only on trusted machines load vfio_iommu_type1 with allow_unsafe_interrupts=1"
    )]
    InterruptRemapping(PciAddress),
    /// The limit of locked memory is too low.
    #[error(
        "mapping {bytes} bytes for the controller exceeds the limit of locked memory ({limit}): raise it (`ulimit -l`, \
         LimitMEMLOCK= of systemd), or grant CAP_IPC_LOCK"
    )]
    LockedMemory {
        /// Size of the mapping.
        bytes: u64,
        /// Limit as the kernel reports it, or an empty text.
        limit: String,
    },
    /// The kernel allows no further mappings of a container.
    #[error(
        "mapping {0} bytes for the controller exceeds the kernel's number of mappings: raise dma_entry_limit of the \
         module vfio_iommu_type1, or register less memory"
    )]
    Mappings(u64),
    /// The kernel cannot pin the memory, or its IOMMU cannot reach the address.
    #[error(
        "the kernel cannot map {bytes} bytes for the controller ({error}): use memory of this machine, a memfd of whole \
         pages, and not memory of a device"
    )]
    Unmappable {
        /// Size of the mapping.
        bytes: u64,
        /// Error of the kernel.
        error: io::Error,
    },
    /// A BAR is smaller than its use requires.
    #[error("BAR {bar} of {address} has {bytes} bytes, {needed} are needed: {remedy}")]
    SmallBar {
        /// Address of the function.
        address: PciAddress,
        /// Number of the BAR.
        bar: u8,
        /// Its size.
        bytes: u64,
        /// Required size.
        needed: u64,
        /// What to do.
        remedy: &'static str,
    },
    /// The function does not decode accesses to its BARs.
    #[error("PCI function {0} is disabled: load its driver, or write 1 to its file `enable` in sysfs")]
    Disabled(PciAddress),
    /// No addresses for the controller are left.
    #[error(
        "no {0} bytes of addresses are free for the controller, which reaches 508 GiB at once: use a smaller arena, or let \
         engines register less memory; addresses of memory that is no longer mapped are free again"
    )]
    NoAddresses(u64),
    /// This processor's order of stores to memory and to devices is not supported.
    #[error("VFIO is supported on x86-64 only")]
    Processor,
    /// A system call has failed.
    #[error("cannot {what}: {source}")]
    System {
        /// The operation.
        what: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl FunctionError {
    pub(super) fn system(what: impl Into<String>, source: io::Error) -> FunctionError {
        FunctionError::System { what: what.into(), source }
    }
}
