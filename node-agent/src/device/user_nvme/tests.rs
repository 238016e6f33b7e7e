//! Controllers that this process opens, and the obstacles of a machine that has none.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

use reprise_buffers::PageBuffer;
use reprise_io::{EngineSettings, IfMissing, Reserve};
use reprise_nvme::host::Host;
use tempfile::TempDir;

use super::*;
use crate::device::access::{Creation, open, open_unless_busy, read_start};

const BYTES: u64 = 8 << 20;

fn emulated(folder: &TempDir) -> DeviceDescription {
    DeviceDescription::Emulated(folder.path().join("disk"))
}

fn create(bytes: u64) -> Creation {
    let reserve = Reserve::Bytes(0);
    Creation { missing: IfMissing::Create, bytes: Some(bytes), reserve, ..Creation::NONE }
}

#[test]
fn an_emulated_controller_has_an_identity_and_a_health_log_until_its_engine_ends() {
    let folder = tempfile::tempdir().expect("a folder");
    let opened = open(&emulated(&folder), create(BYTES)).expect("created");
    assert_eq!(opened.device.size(), BYTES);
    let handle = opened.controller.expect("a controller");
    let properties = handle.properties().clone();
    assert_eq!((properties.kind, properties.address), (ControllerKind::Emulated, None));
    assert_eq!((properties.namespace, properties.queue_pairs), (1, 64));
    assert!(properties.serial.starts_with("EMU-"), "{}", properties.serial);
    let engine = opened.device.start_engine(&EngineSettings::default()).expect("an engine");
    assert_eq!(engine.kind(), reprise_io::EngineKind::UserNvme);
    assert!(handle.health_log().is_some(), "next to the engine");
    drop(engine);
    assert_eq!((handle.health_log(), handle.controller().is_none()), (None, true));
    let again = open(&emulated(&folder), Creation::NONE).expect("it exists");
    assert_eq!(again.controller.expect("a controller").properties(), &properties, "the same after a restart");
}

#[test]
fn an_emulated_controller_has_one_user_and_keeps_its_contents() {
    let folder = tempfile::tempdir().expect("a folder");
    let device = emulated(&folder);
    let mut opened = open(&device, create(BYTES)).expect("created").device;
    let refused = open_unless_busy(&device).err().expect("it is in use");
    assert_eq!(refused.kind(), IoErrorKind::InUse);
    opened.erase_ends(4096).expect("erased");
    drop(opened);
    let path = folder.path().join("disk");
    let mut contents = vec![0; BYTES as usize];
    contents[4096..8192].fill(7);
    fs::write(&path, contents).expect("written");
    let mut opened = open(&device, create(2 * BYTES)).expect("it grows").device;
    assert_eq!((opened.size(), fs::metadata(&path).expect("a file").len()), (2 * BYTES, 2 * BYTES));
    let mut page = PageBuffer::new(4096).expect("a page");
    opened.read(4096, &mut page).expect("inside");
    assert!(page.iter().all(|byte| *byte == 7));
    assert_eq!(read_start(&device, 5000).expect("readable").len(), 5000);
}

#[test]
fn an_emulated_controller_without_a_file_or_a_size_is_refused() {
    let folder = tempfile::tempdir().expect("a folder");
    let refused = open(&emulated(&folder), Creation::NONE).err().expect("missing");
    assert_eq!(refused.kind(), IoErrorKind::Unavailable);
    let unsized_ = Creation { bytes: None, ..create(0) };
    let refused = open(&emulated(&folder), unsized_).err().expect("no size").to_string();
    assert!(refused.contains("configure its bytes"), "{refused}");
    assert!(!folder.path().join("disk").exists(), "the empty file is removed");
}

#[test]
fn a_controller_with_another_serial_number_or_namespace_is_refused() {
    let emulation = || {
        let storage = reprise_nvme::emulated::Storage::memory(1 << 20);
        let emulation = reprise_nvme::emulated::Emulation::of(storage);
        reprise_nvme::emulated::EmulatedController::start(emulation).expect("it starts")
    };
    let address = "0000:3b:00.0".parse().expect("an address");
    let described = |serials: &[&str], namespace| ControllerDescription {
        address,
        serials: serials.iter().map(|serial| (*serial).to_owned()).collect(),
        namespace,
    };
    let open = |description: &ControllerDescription| {
        let device = DeviceDescription::Controller(description.clone());
        open_namespace(&device, Expected::hardware(description), emulation())
    };
    for (description, words) in [
        (described(&["S1", "S2"], None), ["0000:3b:00.0", "EMULATED0", "S1 or S2"]),
        (described(&[], Some(2)), ["1 usable namespaces", "(1)", "configure one of them"]),
    ] {
        let refused = open(&description).err().expect("refused");
        assert_eq!(refused.kind(), IoErrorKind::Unavailable);
        assert!(words.iter().all(|word| refused.to_string().contains(word)), "{refused}");
    }
    let opened = open(&described(&["S1", "EMULATED0"], Some(1))).expect("it is that one");
    let handle = opened.controller.expect("a controller");
    let properties = handle.properties();
    assert_eq!((properties.kind, properties.address), (ControllerKind::Hardware, Some(address)));
}

/// A machine with one NVMe controller that is ready for user space.
pub(crate) fn ready_machine() -> TempDir {
    let root = tempfile::tempdir().expect("a folder");
    let at = |path: &str| root.path().join(path);
    let function = "sys/bus/pci/devices/0000:3b:00.0";
    for folder in [
        "sys/class/iommu/dmar0",
        "sys/kernel/iommu_groups/7/devices",
        "sys/bus/pci/drivers/vfio-pci",
        function,
    ] {
        fs::create_dir_all(at(folder)).expect("a folder");
    }
    symlink(at("sys/kernel/iommu_groups/7"), at(function).join("iommu_group")).expect("a link");
    symlink(at("sys/bus/pci/drivers/vfio-pci"), at(function).join("driver")).expect("a link");
    for (file, text) in [
        (format!("{function}/class"), "0x010802\n"),
        ("proc/interrupts".to_owned(), " 24: 0 IR-PCI-MSI 512 aerdrv\n"),
        ("proc/self/status".to_owned(), "CapEff:\t0000000000000000\n"),
        (
            "proc/self/limits".to_owned(),
            "Max locked memory         67108864             67108864             bytes\n",
        ),
        ("proc/mounts".to_owned(), "/dev/sda1 / ext4 rw 0 0\n"),
        ("dev/vfio/vfio".to_owned(), ""),
        ("dev/vfio/7".to_owned(), ""),
    ] {
        let path = at(&file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("written");
    }
    root
}

/// Gives the function to the kernel's driver, with a disk that has a partition.
fn give_to_kernel(root: &Path) {
    let function = root.join("sys/bus/pci/devices/0000:3b:00.0");
    fs::remove_file(function.join("driver")).expect("a link");
    fs::create_dir_all(root.join("sys/bus/pci/drivers/nvme")).expect("a folder");
    symlink(root.join("sys/bus/pci/drivers/nvme"), function.join("driver")).expect("a link");
    fs::create_dir_all(function.join("nvme/nvme0/nvme0n1/nvme0n1p2")).expect("a folder");
}

#[test]
fn a_ready_machine_has_no_obstacle() {
    let root = ready_machine();
    let address = "0000:3b:00.0".parse().expect("an address");
    vfio::check(&Host::at(root.path()), address, 32 << 20).expect("nothing is missing");
}

#[test]
fn each_obstacle_is_reported_with_its_remedy() {
    type Change = fn(&Path);
    let remove = |path: &Path| fs::remove_dir_all(path).or_else(|_| fs::remove_file(path)).expect("removed");
    let cases: [(Change, [&str; 2]); 10] = [
        (|_| {}, ["may lock 64 MiB of memory, and needs 80 MiB", "ulimit -l"]),
        (
            |root| fs::write(root.join("proc/interrupts"), "1: 0 IO-APIC i8042\n").expect("written"),
            ["interrupt remapping is off", "x2APIC"],
        ),
        (
            |root| fs::remove_dir_all(root.join("sys/class/iommu")).expect("removed"),
            ["no IOMMU in use", "intel_iommu=on"],
        ),
        (
            |root| fs::remove_dir_all(root.join("sys/bus/pci/drivers/vfio-pci")).expect("removed"),
            ["vfio-pci is not loaded", "modprobe vfio-pci"],
        ),
        (
            |root| fs::remove_file(root.join("dev/vfio/vfio")).expect("removed"),
            ["/dev/vfio/vfio is missing", "container"],
        ),
        (
            |root| {
                give_to_kernel(root);
                fs::write(root.join("proc/mounts"), "/dev/nvme0n1p2 /data ext4 rw 0 0\n").expect("written");
            },
            ["nvme0n1p2 is mounted at /data", "choose another controller"],
        ),
        (
            |root| {
                give_to_kernel(root);
                // With multipath, the disk of the subsystem is mounted, and that of the path is hidden.
                let controller = root.join("sys/bus/pci/devices/0000:3b:00.0/nvme/nvme0");
                fs::remove_dir_all(controller.join("nvme0n1")).expect("a folder");
                fs::create_dir_all(controller.join("nvme0c1n1")).expect("a folder");
                fs::create_dir_all(root.join("sys/class/block/nvme0n1/nvme0n1p1")).expect("a folder");
                fs::write(root.join("proc/mounts"), "/dev/nvme0n1p1 /data ext4 rw 0 0\n").expect("written");
            },
            ["nvme0n1p1 is mounted at /data", "choose another controller"],
        ),
        (
            |root| {
                give_to_kernel(root);
                fs::write(root.join("proc/swaps"), "Filename\n/dev/nvme0n1 partition 1 0 -2\n")
                    .expect("written");
            },
            ["nvme0n1 is a swap space", "choose another controller"],
        ),
        (
            |root| {
                give_to_kernel(root);
                let holders = root.join("sys/class/block/nvme0n1/holders/md0");
                fs::create_dir_all(holders).expect("a folder");
            },
            ["nvme0n1 is a part of md0", "choose another controller"],
        ),
        (
            |root| {
                fs::write(root.join("sys/bus/pci/devices/0000:3b:00.0/class"), "0x020000\n")
                    .expect("written");
            },
            ["not an NVMe controller", "reprise doctor"],
        ),
    ];
    let address = "0000:3b:00.0".parse().expect("an address");
    for (change, words) in cases {
        let root = ready_machine();
        change(root.path());
        let error = vfio::check(&Host::at(root.path()), address, 64 << 20).expect_err(words[0]);
        assert_eq!(error.kind(), IoErrorKind::Unavailable);
        assert!(words.iter().all(|word| error.to_string().contains(word)), "{error}");
    }
    let root = ready_machine();
    give_to_kernel(root.path());
    let error =
        vfio::check(&Host::at(root.path()), address, 1 << 20).expect_err("the kernel has it").to_string();
    assert!(
        error.contains("driver nvme") && error.contains("driverctl set-override 0000:3b:00.0 vfio-pci"),
        "{error}"
    );
    remove(&root.path().join("sys/bus/pci/devices/0000:3b:00.0"));
    let error = vfio::check(&Host::at(root.path()), address, 1 << 20).expect_err("gone").to_string();
    assert!(error.contains("no function is at the PCI address 0000:3b:00.0"), "{error}");
}

#[test]
fn a_group_with_other_users_and_a_missing_group_node_are_reported() {
    let root = ready_machine();
    let (members, address) = (root.path().join("sys/kernel/iommu_groups/7/devices"), "0000:3b:00.0");
    let folder = |name: &str, class: &str, driver: &str| {
        let at = members.join(name);
        fs::create_dir_all(&at).expect("a folder");
        fs::write(at.join("class"), class).expect("written");
        symlink(Path::new("/drivers").join(driver), at.join("driver")).expect("a link");
    };
    folder("0000:3a:00.0", "0x060400\n", "pcieport");
    folder("0000:3b:00.1", "0x010802\n", "vfio-pci");
    let parsed = address.parse().expect("an address");
    vfio::check(&Host::at(root.path()), parsed, 0).expect("bridges and functions of VFIO do not count");
    folder("0000:3b:00.2", "0x020000\n", "e1000e");
    let error = vfio::check(&Host::at(root.path()), parsed, 0).expect_err("shared").to_string();
    assert!(error.contains("also has 0000:3b:00.2") && error.contains("another slot"), "{error}");
    fs::remove_dir_all(members.join("0000:3b:00.2")).expect("removed");
    fs::remove_file(root.path().join("dev/vfio/7")).expect("removed");
    let error = vfio::check(&Host::at(root.path()), parsed, 0).expect_err("no node").to_string();
    assert!(error.contains("/dev/vfio/7 is missing") && error.contains("container"), "{error}");
}
