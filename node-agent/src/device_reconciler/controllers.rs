//! Reads the node's NVMe controllers from `class/nvme` below `/sys`: serial number, PCI address, I/O queue
//! pairs, and the pool that uses one of the controller's devices.
//!
//! A controller that the agent drives is not there. It is reported with the queue pairs that it has granted.
//! All complete controllers on the PCI bus are reported, with or without a pool. A drive with two ports has
//! two controllers with one serial number and is reported once. A pool in a directory uses a file, not a
//! device, and therefore has no controller.
//!
//! Reservations of queue pairs for GPUs are in [`super::queue_reservations`].

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use reprise_agent_kubernetes::ControllerFact;

use super::reconciler::{DesiredPool, Kind};
use crate::device::{ControllerHandle, ControllerProperties};

/// Maximum number of reported controllers; those with a pool come first.
const CONTROLLERS_MAX: usize = 32;

/// Maximum length of a serial number; NVMe allows 20 characters.
const SERIAL_CHARS_MAX: usize = 64;

/// Transport of controllers whose queues other PCI devices can access.
const PCI: &str = "pcie";

/// Serial number and model of the drive behind a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drive {
    pub(super) serial: String,
    pub(super) model: Option<String>,
}

/// Returns the NVMe drives of claimed devices, on any bus, by the devices' stable paths.
pub(super) fn drives(sys: &Path, pools: &[DesiredPool]) -> BTreeMap<String, Drive> {
    let devices = pools.iter().flat_map(|pool| &pool.devices);
    let devices = devices.filter(|device| device.spec.kind == Kind::Device);
    devices
        .filter_map(|device| Some((device.path.clone(), drive(sys, device.description.path()?)?)))
        .collect()
}

fn drive(sys: &Path, at: &Path) -> Option<Drive> {
    let real = fs::canonicalize(at).ok()?;
    let controller = controllers_of(&sys.join("class/block").join(real.file_name()?)).into_iter().next()?;
    let folder = sys.join("class/nvme").join(controller);
    let text = |file: &str| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    let serial = text("serial").filter(|serial| is_serial(serial))?;
    Some(Drive { serial, model: text("model").filter(|model| !model.is_empty()) })
}

/// Returns the complete controllers below `sys` and those that the agent drives (`open`, by device path), sorted by
/// serial number. Unreadable ones are omitted.
pub(super) fn scan(
    sys: &Path,
    pools: &[DesiredPool],
    open: &BTreeMap<String, ControllerHandle>,
) -> Vec<ControllerFact> {
    let owners = owners(sys, pools);
    let mut found: BTreeMap<String, ControllerFact> = BTreeMap::new();
    for name in names(&sys.join("class/nvme")) {
        let Some(fact) = read(&sys.join("class/nvme").join(&name), owners.get(&name).cloned()) else {
            continue;
        };
        let records = found.entry(fact.serial.clone()).or_insert_with(|| fact.clone());
        if records.pool.is_none() && fact.pool.is_some() {
            *records = fact;
        }
    }
    for (path, handle) in open {
        let fact = granted(handle.properties(), pool_of(pools, path));
        if is_serial(&fact.serial) {
            found.insert(fact.serial.clone(), fact);
        }
    }
    let (mut reported, others): (Vec<_>, Vec<_>) = found.into_values().partition(|fact| fact.pool.is_some());
    reported.extend(others);
    reported.truncate(CONTROLLERS_MAX);
    reported.sort_by(|a, b| a.serial.cmp(&b.serial));
    reported
}

/// Returns a controller that the agent drives, with the queue pairs that it has granted.
fn granted(properties: &ControllerProperties, pool: Option<String>) -> ControllerFact {
    ControllerFact {
        serial: properties.serial.clone(),
        pci_address: properties.address.map(|address| address.to_string()).filter(|text| is_address(text)),
        pool,
        queue_pairs: properties.queue_pairs.into(),
    }
}

/// Returns the pool that claims a device.
fn pool_of(pools: &[DesiredPool], path: &str) -> Option<String> {
    let claims = |pool: &&DesiredPool| pool.devices.iter().any(|device| device.path == path);
    pools.iter().find(claims).map(|pool| pool.pool.clone())
}

/// Returns the pool of each controller, by the controller's name. If two pools use a controller, the first
/// one wins.
fn owners(sys: &Path, pools: &[DesiredPool]) -> BTreeMap<String, String> {
    let mut owners = BTreeMap::new();
    for pool in pools {
        for device in pool.devices.iter().filter(|device| device.spec.kind == Kind::Device) {
            let Some(Ok(real)) = device.description.path().map(fs::canonicalize) else { continue };
            let Some(block) = real.file_name() else { continue };
            for controller in controllers_of(&sys.join("class/block").join(block)) {
                owners.entry(controller).or_insert_with(|| pool.pool.clone());
            }
        }
    }
    owners
}

/// Returns the names of a block device's controllers: several for a multipath drive.
fn controllers_of(block: &Path) -> Vec<String> {
    let Ok(block) = fs::canonicalize(block) else { return Vec::new() };
    // The directory of a partition is inside that of its disk.
    let is_partition = block.join("partition").exists();
    let disk = block.parent().filter(|_| is_partition).unwrap_or(block.as_path());
    let Ok(device) = fs::canonicalize(disk.join("device")) else { return Vec::new() };
    match device.file_name().and_then(|name| name.to_str()) {
        Some(name) if is_controller(name) => vec![name.to_owned()],
        // An NVMe subsystem, whose directory contains its controllers.
        Some(_) => names(&device),
        None => Vec::new(),
    }
}

/// Returns the sorted names of the controllers in a directory.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_controller(name)).collect();
    names.sort();
    names
}

/// Returns whether the name is `nvme` and a number; names of NVMe namespaces have a suffix.
fn is_controller(name: &str) -> bool {
    let number = name.strip_prefix("nvme").unwrap_or_default();
    !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit())
}

fn read(folder: &Path, pool: Option<String>) -> Option<ControllerFact> {
    let text = |file: &str| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    let serial = text("serial").filter(|serial| is_serial(serial))?;
    text("transport").filter(|transport| transport == PCI)?;
    let queues: u32 = text("queue_count")?.parse().ok()?;
    Some(ControllerFact {
        serial,
        pci_address: text("address").map(|address| address.to_ascii_lowercase()).filter(|it| is_address(it)),
        pool,
        // One queue pair is the admin queue pair.
        queue_pairs: queues.saturating_sub(1),
    })
}

/// Returns whether the schema of `CacheNode` accepts the value: one invalid value would invalidate the
/// whole status.
fn is_serial(serial: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_graphic());
    serial.len() <= SERIAL_CHARS_MAX && serial.split(' ').all(is_word)
}

/// Returns whether the value is a PCI address like `0000:01:00.0`.
fn is_address(address: &str) -> bool {
    let bytes = address.as_bytes();
    let fits = |(at, byte): (usize, &u8)| match at {
        4 | 7 => *byte == b':',
        10 => *byte == b'.',
        11 => (b'0'..=b'7').contains(byte),
        _ => byte.is_ascii_digit() || (b'a'..=b'f').contains(byte),
    };
    bytes.len() == 12 && bytes.iter().enumerate().all(fits)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;
    use std::path::PathBuf;

    use reprise_agent_kubernetes::{DataPolicy, Engine, FallbackEngine, ForeignSignatures};
    use tempfile::TempDir;

    use super::super::reconciler::{DesiredDevice, DeviceSpec, Presence};
    use super::*;
    use crate::device::access::Creation;

    /// A temporary root directory with devices and a `/sys` tree.
    struct Root(TempDir);

    impl Root {
        fn new() -> Root {
            let root = Root(tempfile::tempdir().expect("a folder"));
            for folder in ["dev", "sys/class/nvme", "sys/class/block", "sys/devices"] {
                fs::create_dir_all(root.path(folder)).expect("a folder");
            }
            root
        }

        fn path(&self, below: &str) -> PathBuf {
            self.0.path().join(below)
        }

        /// Adds a controller with this serial number and `queue_count`.
        fn controller(&self, name: &str, serial: &str, queues: &str) {
            let folder = self.path("sys/devices").join(name);
            fs::create_dir_all(&folder).expect("a folder");
            let address = format!("0000:0{}:00.0\n", &name[4..5]);
            let files = [
                ("serial", format!("{serial}   \n")),
                ("queue_count", format!("{queues}\n")),
                ("address", address),
                ("transport", "pcie\n".to_owned()),
            ];
            for (file, text) in files {
                fs::write(folder.join(file), text).expect("a file");
            }
            symlink(format!("../../devices/{name}"), self.path("sys/class/nvme").join(name)).expect("a link");
        }

        /// Adds a disk below a directory of `sys/devices`; its `device` link points to `device`.
        fn disk(&self, folder: &str, name: &str, device: &str) {
            let disk = self.path("sys/devices").join(folder).join(name);
            fs::create_dir_all(&disk).expect("a folder");
            symlink(self.path("sys/devices").join(device), disk.join("device")).expect("a link");
            symlink(&disk, self.path("sys/class/block").join(name)).expect("a link");
            fs::write(self.path("dev").join(name), b"").expect("a device");
        }

        fn scan(&self, pools: &[DesiredPool]) -> Vec<(String, u32, Option<String>)> {
            let found = scan(&self.path("sys"), pools, &BTreeMap::new());
            found.into_iter().map(|fact| (fact.serial, fact.queue_pairs, fact.pool)).collect()
        }

        /// Returns a pool that claims a device of the node.
        fn pool(&self, name: &str, device: &str, kind: Kind) -> DesiredPool {
            let spec = DeviceSpec {
                pool: name.to_owned(),
                uid: "u".to_owned(),
                kind,
                bytes: None,
                reserve_bytes: None,
                engine: Engine::IoUring,
                fallback: FallbackEngine::None,
                foreign: ForeignSignatures::Refuse,
            };
            let at = self.path("dev").join(device);
            let device = DesiredDevice {
                path: at.display().to_string(),
                description: at.into(),
                presence: Presence::Present,
                spec,
            };
            let (pool, uid) = (name.to_owned(), "u".to_owned());
            DesiredPool {
                pool,
                uid,
                generation: 1,
                data: DataPolicy::Keep,
                devices: vec![device],
                fault: None,
            }
        }
    }

    #[test]
    fn reports_every_controller_with_its_queues_and_its_pool() {
        let root = Root::new();
        root.controller("nvme0", "S0 X", "65");
        root.controller("nvme1", "S1", "9");
        root.controller("nvme2", "S2", "1");
        root.disk("nvme0", "nvme0n1", "nvme0");
        root.disk("nvme1", "nvme1n1", "nvme1");
        // A partition of the second disk.
        let partition = root.path("sys/devices/nvme1/nvme1n1/nvme1n1p2");
        fs::create_dir_all(&partition).expect("a folder");
        fs::write(partition.join("partition"), "2\n").expect("a file");
        symlink(&partition, root.path("sys/class/block/nvme1n1p2")).expect("a link");
        fs::write(root.path("dev/nvme1n1p2"), b"").expect("a device");
        let pools = [root.pool("raw", "nvme0n1", Kind::Device), root.pool("part", "nvme1n1p2", Kind::Device)];
        fs::write(root.path("sys/devices/nvme0/model"), "Fast 9   \n").expect("a file");
        let path = |device: &str| root.path("dev").join(device).display().to_string();
        let drive = |serial: &str, model: Option<&str>| Drive {
            serial: serial.to_owned(),
            model: model.map(str::to_owned),
        };
        let drives = BTreeMap::from([
            (path("nvme0n1"), drive("S0 X", Some("Fast 9"))),
            (path("nvme1n1p2"), drive("S1", None)),
        ]);
        assert_eq!(super::drives(&root.path("sys"), &pools), drives);
        let reported = |serial: &str, pairs: u32, pool: Option<&str>| {
            (serial.to_owned(), pairs, pool.map(str::to_owned))
        };
        let all =
            [reported("S0 X", 64, Some("raw")), reported("S1", 8, Some("part")), reported("S2", 0, None)];
        assert_eq!(root.scan(&pools), all);
        // A file on a disk does not count as the disk.
        let file = [root.pool("raw", "nvme0n1", Kind::File)];
        assert_eq!(
            (root.scan(&file)[0].2.as_ref(), super::drives(&root.path("sys"), &file).len()),
            (None, 0)
        );
        let address = scan(&root.path("sys"), &[], &BTreeMap::new())[1].pci_address.clone();
        assert_eq!(address.as_deref(), Some("0000:01:00.0"));
        assert!(scan(&root.path("nowhere"), &pools, &BTreeMap::new()).is_empty());
    }

    #[test]
    fn drive_with_two_ports_is_reported_once_and_incomplete_controllers_are_omitted() {
        let root = Root::new();
        root.controller("nvme0", "S0", "9");
        root.controller("nvme1", "S0", "9");
        let subsystem = root.path("sys/devices/nvme-subsys0");
        fs::create_dir_all(&subsystem).expect("a folder");
        root.disk("nvme-subsys0", "nvme0n1", "nvme-subsys0");
        symlink(root.path("sys/devices/nvme1"), subsystem.join("nvme1")).expect("a link");
        let pools = [root.pool("raw", "nvme0n1", Kind::Device)];
        assert_eq!(root.scan(&pools), [("S0".to_owned(), 8, Some("raw".to_owned()))]);
        for (name, serial, queues) in
            [("nvme2", "", "9"), ("nvme3", "S3", "many"), ("nvme4", "S\u{fc}4", "9")]
        {
            root.controller(name, serial, queues);
        }
        root.controller("nvme5", "S5", "9");
        fs::write(root.path("sys/devices/nvme5/transport"), "tcp\n").expect("a file");
        assert_eq!(root.scan(&pools).len(), 1);
    }

    #[test]
    fn controllers_with_pools_are_kept_when_there_are_too_many() {
        let root = Root::new();
        for index in 0..40 {
            let name = format!("nvme{index}");
            root.controller(&name, &format!("S{index:02}"), "9");
            root.disk(&name, &format!("{name}n1"), &name);
        }
        let found = root.scan(&[root.pool("raw", "nvme39n1", Kind::Device)]);
        assert_eq!(found.len(), CONTROLLERS_MAX);
        assert_eq!(found[CONTROLLERS_MAX - 1], ("S39".to_owned(), 8, Some("raw".to_owned())));
    }

    #[test]
    fn controllers_that_the_agent_drives_are_reported_with_their_granted_pairs() {
        let root = Root::new();
        root.controller("nvme0", "S0", "9");
        let device = reprise_io::DeviceDescription::Emulated(root.path("disk"));
        let creation = Creation {
            missing: reprise_io::IfMissing::Create,
            bytes: Some(1 << 20),
            reserve: reprise_io::Reserve::Bytes(0),
            ..Creation::NONE
        };
        let opened = crate::device::access::open(&device, creation).expect("created");
        let handle = opened.controller.expect("a controller");
        let pool = root.pool("emulated", "disk", Kind::File);
        let path = pool.devices[0].path.clone();
        let open = BTreeMap::from([(path, handle.clone())]);
        let found = scan(&root.path("sys"), &[pool], &open);
        let serials: Vec<&str> = found.iter().map(|fact| fact.serial.as_str()).collect();
        assert_eq!(serials, [handle.properties().serial.as_str(), "S0"]);
        assert_eq!((found[0].queue_pairs, found[0].pool.as_deref()), (64, Some("emulated")));
        assert_eq!(found[0].pci_address, None);
    }

    #[test]
    fn only_pci_addresses_are_accepted() {
        for (address, fits) in [
            ("0000:01:00.0", true),
            ("10de:af:1f.7", true),
            ("0000:01:00.8", false),
            ("0000:01:00", false),
            ("0000-01:00.0", false),
            ("traddr=1.2.3.4", false),
        ] {
            assert_eq!(is_address(address), fits, "{address}");
        }
    }
}
