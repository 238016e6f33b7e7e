//! A PCI function in sysfs: its class, its users, and the change of its driver.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use reprise_io::PciAddress;

use super::error::FunctionError;
use crate::host::visible_name;

/// Class, subclass and programming interface of an NVMe controller (NVMe over PCIe 1.0, 3.3).
const NVME_CLASS: u32 = 0x01_0802;
/// Class and subclass of a bridge, which VFIO permits in a group.
const BRIDGE_CLASS: u32 = 0x06_04;
/// Driver that gives a function to a process.
const VFIO: &str = "vfio-pci";
/// Drivers of the other functions of a group that VFIO permits (VFIO_GROUP_FLAGS_VIABLE).
const PERMITTED: [&str; 3] = [VFIO, "pci-stub", "pcieport"];

/// A PCI function, as sysfs describes it.
#[derive(Clone, Debug)]
pub struct PciFunction {
    root: PathBuf,
    address: PciAddress,
}

impl PciFunction {
    /// Returns the function of this machine with an address. It may be absent.
    pub fn new(address: PciAddress) -> PciFunction {
        PciFunction::below(Path::new("/"), address)
    }

    /// Returns a function in `sys`, `proc` and `dev` below another root: those of the host, mounted in a container.
    pub fn below(root: &Path, address: PciAddress) -> PciFunction {
        PciFunction { root: root.to_owned(), address }
    }

    /// Returns the address of the function.
    pub fn address(&self) -> PciAddress {
        self.address
    }

    pub(super) fn folder(&self) -> PathBuf {
        self.root.join("sys/bus/pci/devices").join(self.address.to_string())
    }

    /// Returns the class, subclass and programming interface.
    ///
    /// # Errors
    /// `Absent` if there is no such function.
    pub fn class(&self) -> Result<u32, FunctionError> {
        class_of(&self.folder()).ok_or(FunctionError::Absent(self.address))
    }

    /// Returns the name of the driver; `None` if it has none.
    pub fn driver(&self) -> Option<String> {
        link_name(&self.folder().join("driver"))
    }

    /// Returns the number of the IOMMU group.
    ///
    /// # Errors
    /// `NoIommu` without a group.
    pub fn iommu_group(&self) -> Result<u32, FunctionError> {
        let group = link_name(&self.folder().join("iommu_group")).and_then(|name| name.parse().ok());
        group.ok_or(FunctionError::NoIommu(self.address))
    }

    /// Returns the size of a BAR in bytes; `None` if the function does not have it.
    pub fn bar_bytes(&self, bar: u8) -> Option<u64> {
        fs::metadata(self.bar_path(bar)).ok().map(|file| file.len())
    }

    pub(super) fn bar_path(&self, bar: u8) -> PathBuf {
        self.folder().join(format!("resource{bar}"))
    }

    /// Checks that the function decodes accesses to its BARs.
    pub(super) fn check_enabled(&self) -> Result<(), FunctionError> {
        let text = fs::read_to_string(self.folder().join("enable"));
        let text = text.map_err(|_| FunctionError::Absent(self.address))?;
        if text.trim() == "0" { Err(FunctionError::Disabled(self.address)) } else { Ok(()) }
    }

    /// Checks, step by step, that a process can open the controller through VFIO; returns its IOMMU group.
    ///
    /// # Errors
    /// The first step that is missing.
    pub fn check_ready(&self) -> Result<u32, FunctionError> {
        self.check_nvme()?;
        match self.driver() {
            Some(driver) if driver == VFIO => {}
            Some(driver) => {
                self.check_unused()?;
                return Err(FunctionError::KernelDriver { address: self.address, driver });
            }
            None => return Err(FunctionError::Unbound(self.address)),
        }
        let group = self.iommu_group()?;
        self.check_group(group)?;
        Ok(group)
    }

    fn check_nvme(&self) -> Result<(), FunctionError> {
        match self.class()? {
            NVME_CLASS => Ok(()),
            class => Err(FunctionError::NotNvme { address: self.address, class }),
        }
    }

    /// Checks that VFIO can use the group: no other function of it has a driver of the kernel.
    pub(super) fn check_group(&self, group: u32) -> Result<(), FunctionError> {
        let mut others = Vec::new();
        for folder in entries(&self.folder().join("iommu_group/devices")) {
            let is_bridge = class_of(&folder).is_some_and(|class| class >> 8 == BRIDGE_CLASS);
            let driver = link_name(&folder.join("driver"));
            if let Some(driver) = driver
                && !is_bridge
                && !PERMITTED.contains(&driver.as_str())
            {
                others.push(format!("{} with driver {driver}", name_of(&folder)));
            }
        }
        if others.is_empty() {
            return Ok(());
        }
        Err(FunctionError::SharedGroup { address: self.address, group, others: others.join(", ") })
    }

    /// Returns the names of the kernel's block devices on the controller, also of their partitions.
    pub fn block_devices(&self) -> Vec<String> {
        let mut names = Vec::new();
        for controller in entries(&self.folder().join("nvme")) {
            for namespace in entries(&controller) {
                let Some(name) = visible_name(&name_of(&namespace)) else { continue };
                let partitions = entries(&self.root.join("sys/class/block").join(&name));
                let partitions = partitions.iter().map(|path| name_of(path));
                names.extend(partitions.filter(|partition| partition.starts_with(&name)));
                names.push(name);
            }
        }
        names
    }

    /// Checks that no block device of the controller is mounted or used by another block device, as swap, or by a
    /// process that has opened it exclusively.
    ///
    /// # Errors
    /// `Mounted` or `InUse`.
    pub fn check_unused(&self) -> Result<(), FunctionError> {
        let mounts = fs::read_to_string(self.root.join("proc/self/mountinfo")).unwrap_or_default();
        let swaps = fs::read_to_string(self.root.join("proc/swaps")).unwrap_or_default();
        for device in self.block_devices() {
            let block = self.root.join("sys/class/block").join(&device);
            let number = fs::read_to_string(block.join("dev")).unwrap_or_default();
            if let Some(place) = mount_point(&mounts, number.trim()) {
                return Err(FunctionError::Mounted { address: self.address, device, place });
            }
            let path = self.root.join("dev").join(&device);
            let in_use = |user: String| FunctionError::InUse { address: self.address, device, user };
            if let Some(holder) = entries(&block.join("holders")).first() {
                return Err(in_use(name_of(holder)));
            }
            if swaps.lines().any(|line| line.split(' ').next().is_some_and(|used| Path::new(used) == path)) {
                return Err(in_use("swap".into()));
            }
            // Mounts in other namespaces of the kernel are not listed, but also open the device exclusively (open(2)).
            let opened = OpenOptions::new().read(true).custom_flags(libc::O_EXCL).open(&path);
            if opened.is_err_and(|error| error.raw_os_error() == Some(libc::EBUSY)) {
                return Err(in_use("a mount in another namespace, or a process".into()));
            }
        }
        Ok(())
    }

    /// Gives the controller to vfio-pci. Does nothing if it has it.
    ///
    /// # Errors
    /// If the function is not an NVMe controller, is in use, is not behind an IOMMU, or the kernel does not change its
    /// driver. The kernel's driver has it again then, where that is possible.
    pub fn bind_to_vfio(&self) -> Result<(), FunctionError> {
        self.check_nvme()?;
        if self.driver().as_deref() == Some(VFIO) {
            return Ok(());
        }
        self.iommu_group()?;
        if !self.root.join("sys/bus/pci/drivers").join(VFIO).exists() {
            return Err(FunctionError::NoVfio);
        }
        self.check_unused()?;
        let bound = self.change_driver(VFIO);
        if bound.is_err() {
            let _ = self.release_to_kernel();
        }
        bound
    }

    /// Gives the controller to the kernel's driver for its class.
    ///
    /// # Errors
    /// If the kernel does not change its driver; the function may have none then.
    pub fn release_to_kernel(&self) -> Result<(), FunctionError> {
        self.change_driver("")?;
        match self.driver() {
            Some(driver) if driver != VFIO => Ok(()),
            now => Err(self.not_bound("nvme", now)),
        }
    }

    /// Unbinds the function and binds it again, to one driver, or to any if the name is empty.
    fn change_driver(&self, driver: &'static str) -> Result<(), FunctionError> {
        let (folder, address) = (self.folder(), self.address.to_string());
        // A line feed removes an earlier choice.
        write(&folder.join("driver_override"), &format!("{driver}\n"))?;
        if self.driver().is_some() {
            write(&folder.join("driver/unbind"), &address)?;
        }
        write(&self.root.join("sys/bus/pci/drivers_probe"), &address)?;
        match self.driver() {
            Some(now) if now == driver || driver.is_empty() => Ok(()),
            now => Err(self.not_bound(if driver.is_empty() { "nvme" } else { VFIO }, now)),
        }
    }

    fn not_bound(&self, driver: &'static str, now: Option<String>) -> FunctionError {
        FunctionError::NotBound { address: self.address, driver, now: now.unwrap_or_else(|| "none".into()) }
    }
}

fn write(path: &Path, text: &str) -> Result<(), FunctionError> {
    let written =
        OpenOptions::new().write(true).open(path).and_then(|mut file| file.write_all(text.as_bytes()));
    written.map_err(|source| match source.kind() {
        io::ErrorKind::PermissionDenied => FunctionError::Permission { path: path.display().to_string() },
        _ => FunctionError::system(format!("write to {}", path.display()), source),
    })
}

/// Reads the file `class` of a function: hexadecimal, with the prefix 0x.
fn class_of(folder: &Path) -> Option<u32> {
    let text = fs::read_to_string(folder.join("class")).ok()?;
    u32::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok()
}

/// Returns the last name in the target of a link.
fn link_name(path: &Path) -> Option<String> {
    fs::read_link(path).ok().map(|target| name_of(&target))
}

fn name_of(path: &Path) -> String {
    path.file_name().unwrap_or_default().to_string_lossy().into_owned()
}

/// Returns the entries of a folder in order; none if it cannot be read.
fn entries(folder: &Path) -> Vec<PathBuf> {
    let mut all: Vec<_> =
        fs::read_dir(folder).into_iter().flatten().filter_map(|entry| Some(entry.ok()?.path())).collect();
    all.sort();
    all
}

/// Returns the mount point of a device number in mountinfo (proc(5)).
fn mount_point(mounts: &str, number: &str) -> Option<String> {
    let fields = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
    fields
        .filter(|fields| fields.get(2) == Some(&number))
        .find_map(|fields| Some((*fields.get(4)?).to_owned()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    const ADDRESS: &str = "0000:3b:00.0";

    /// A root with one controller of the kernel's driver, which has a namespace with a partition.
    struct Sysfs {
        root: TempDir,
        function: PciFunction,
    }

    impl Sysfs {
        fn new() -> Sysfs {
            let root = tempfile::tempdir().expect("a folder");
            let function = PciFunction::below(root.path(), ADDRESS.parse().expect("an address"));
            let sysfs = Sysfs { root, function };
            sysfs.add("class", "0x010802\n");
            sysfs.add("driver_override", "(null)\n");
            sysfs.drive(ADDRESS, "nvme");
            sysfs.file("sys/bus/pci/drivers_probe", "");
            sysfs.file("sys/bus/pci/drivers/vfio-pci/new_id", "");
            sysfs.add("nvme/nvme0/nvme0c0n1/size", "4096\n");
            sysfs.add("nvme/nvme0/cntlid", "0\n");
            sysfs.file("sys/class/block/nvme0n1/nvme0n1p1/partition", "1\n");
            sysfs.file("sys/class/block/nvme0n1/dev", "259:0\n");
            sysfs.file("sys/class/block/nvme0n1p1/dev", "259:1\n");
            sysfs.file("sys/kernel/iommu_groups/7/type", "DMA\n");
            let group = sysfs.root.path().join("sys/kernel/iommu_groups/7");
            symlink(group, sysfs.function.folder().join("iommu_group")).expect("a link");
            sysfs.join(ADDRESS);
            sysfs
        }

        fn file(&self, path: &str, text: &str) {
            let path = self.root.path().join(path);
            fs::create_dir_all(path.parent().expect("a folder")).expect("created");
            fs::write(path, text).expect("written");
        }

        fn add(&self, name: &str, text: &str) {
            self.file(&format!("sys/bus/pci/devices/{ADDRESS}/{name}"), text);
        }

        /// Sets the driver of a function.
        fn drive(&self, address: &str, driver: &str) {
            self.file(&format!("sys/bus/pci/drivers/{driver}/unbind"), "");
            let link = self.root.path().join(format!("sys/bus/pci/devices/{address}/driver"));
            let _ = fs::remove_file(&link);
            symlink(self.root.path().join("sys/bus/pci/drivers").join(driver), link).expect("a link");
        }

        /// Adds a function to the group.
        fn join(&self, address: &str) {
            self.file(&format!("sys/kernel/iommu_groups/7/devices/.{address}"), "");
            let from = self.root.path().join("sys/bus/pci/devices").join(address);
            let link = self.root.path().join("sys/kernel/iommu_groups/7/devices").join(address);
            symlink(from, link).expect("a link");
        }

        fn refusal(&self) -> String {
            self.function.check_ready().expect_err("it is not ready").to_string()
        }
    }

    #[test]
    fn a_function_that_is_absent_or_no_controller_is_refused() {
        let sysfs = Sysfs::new();
        let absent = PciFunction::below(sysfs.root.path(), "0000:01:00.0".parse().expect("an address"));
        let text = absent.check_ready().expect_err("absent").to_string();
        assert!(text.contains("no PCI function 0000:01:00.0") && text.contains("lspci"), "{text}");
        sysfs.add("class", "0x020000\n");
        assert!(sysfs.refusal().contains("class 020000"), "{}", sysfs.refusal());
    }

    #[test]
    fn block_devices_include_partitions_and_multipath_names() {
        assert_eq!(Sysfs::new().function.block_devices(), ["nvme0n1p1", "nvme0n1"]);
        assert_eq!(visible_name("nvme3n1").as_deref(), Some("nvme3n1"));
        assert_eq!(visible_name("nvme3c2n10").as_deref(), Some("nvme3n10"));
        for other in ["cntlid", "nvme3", "ng0n1", "nvmen1", "nvme1n"] {
            assert_eq!(visible_name(other), None, "{other}");
        }
    }

    #[test]
    fn a_controller_of_the_kernel_is_refused_with_its_user_or_its_driver() {
        let sysfs = Sysfs::new();
        assert!(sysfs.refusal().contains("kernel's driver nvme: bind it to vfio-pci"), "{}", sysfs.refusal());
        sysfs.file("sys/class/block/nvme0n1/holders/dm-3/dev", "");
        assert!(sysfs.refusal().contains("nvme0n1 of controller 0000:3b:00.0 is in use by dm-3"));
        sysfs.file("proc/swaps", "Filename Type\n/dev/sda1 partition\n");
        let swap = format!("{} partition\n", sysfs.root.path().join("dev/nvme0n1p1").display());
        sysfs.file("proc/swaps", &swap);
        assert!(sysfs.refusal().contains("nvme0n1p1 of controller 0000:3b:00.0 is in use by swap"));
        sysfs.file("proc/self/mountinfo", "25 30 259:1 / /data rw - ext4 /dev/nvme0n1p1 rw\n");
        assert!(sysfs.refusal().contains("nvme0n1p1 of controller 0000:3b:00.0 is mounted at /data"));
    }

    #[test]
    fn a_controller_in_use_is_not_unbound() {
        let sysfs = Sysfs::new();
        sysfs.file("proc/self/mountinfo", "25 30 259:1 / /data rw - ext4 /dev/nvme0n1p1 rw\n");
        let error = sysfs.function.bind_to_vfio().expect_err("mounted");
        assert!(matches!(error, FunctionError::Mounted { .. }), "{error}");
        let chosen = fs::read_to_string(sysfs.function.folder().join("driver_override")).expect("there");
        assert_eq!(chosen, "(null)\n", "nothing was written");
    }

    #[test]
    fn a_driver_that_does_not_change_is_reported_and_the_choice_withdrawn() {
        let sysfs = Sysfs::new();
        let error = sysfs.function.bind_to_vfio().expect_err("plain files change no driver");
        assert!(error.to_string().contains("not bound to vfio-pci: its driver is now nvme"), "{error}");
        let chosen = fs::read_to_string(sysfs.function.folder().join("driver_override")).expect("there");
        assert!(chosen.starts_with('\n'), "{chosen:?}");
    }

    #[test]
    fn each_missing_step_is_named_in_order() {
        let sysfs = Sysfs::new();
        fs::remove_file(sysfs.function.folder().join("driver")).expect("removed");
        assert!(sysfs.refusal().contains("has no driver: load vfio-pci"), "{}", sysfs.refusal());
        sysfs.drive(ADDRESS, VFIO);
        assert_eq!(sysfs.function.check_ready().expect("ready"), 7);
        sysfs.file("sys/bus/pci/devices/0000:3b:00.1/class", "0x020000\n");
        sysfs.drive("0000:3b:00.1", "mlx5_core");
        sysfs.join("0000:3b:00.1");
        let text = sysfs.refusal();
        assert!(text.contains("IOMMU group 7 of 0000:3b:00.0 also has 0000:3b:00.1 with driver mlx5_core"));
        for driver in PERMITTED {
            sysfs.drive("0000:3b:00.1", driver);
            assert_eq!(sysfs.function.check_ready().expect(driver), 7);
        }
        fs::remove_file(sysfs.function.folder().join("iommu_group")).expect("removed");
        assert!(sysfs.refusal().contains("not behind an IOMMU: enable it in the firmware"));
    }

    #[test]
    fn binding_requires_vfio_and_an_iommu() {
        let sysfs = Sysfs::new();
        fs::remove_dir_all(sysfs.root.path().join("sys/bus/pci/drivers/vfio-pci")).expect("removed");
        let error = sysfs.function.bind_to_vfio().expect_err("no vfio-pci");
        assert!(error.to_string().contains("modprobe vfio-pci"), "{error}");
        fs::remove_file(sysfs.function.folder().join("iommu_group")).expect("removed");
        let error = sysfs.function.bind_to_vfio().expect_err("no IOMMU");
        assert!(matches!(error, FunctionError::NoIommu(_)), "{error}");
    }
}
