//! NVMe controllers of the node, as the kernel shows them below `class/nvme` of its `/sys`: serial number, address, queue pairs for I/O, and the
//! pool that has a device of it.
//!
//! All controllers on the PCI bus that say what they have are told, also those that no pool claims; of one serial number one, since a
//! drive with two ports is one drive. A pool in a directory claims a file and no device, so it has no controller.
//!
//! Deliberately absent: what is kept of them for GPUs ([`super::queues`]).

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use reprise_agent_kubernetes::ControllerFact;

use super::board::{Kind, WantedPool};

/// Controllers that a node tells of, at the most; those of pools come first.
const CONTROLLERS_MAX: usize = 32;

/// Characters of a serial number; NVMe has 20.
const SERIAL_CHARS_MAX: usize = 64;

/// The bus whose controllers have queues in memory that others can reach.
const PCI: &str = "pcie";

/// The drive of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Drive {
    pub(super) serial: String,
    pub(super) model: Option<String>,
}

/// The NVMe drives of devices that pools claim, by the devices' stable paths, whatever bus they are on.
pub(super) fn drives(sys: &Path, pools: &[WantedPool]) -> BTreeMap<String, Drive> {
    let places = pools.iter().flat_map(|pool| &pool.places);
    let devices = places.filter(|place| place.recipe.kind == Kind::Device);
    devices.filter_map(|place| Some((place.path.clone(), drive(sys, &place.at)?))).collect()
}

fn drive(sys: &Path, at: &Path) -> Option<Drive> {
    let real = fs::canonicalize(at).ok()?;
    let controller = controllers_of(&sys.join("class/block").join(real.file_name()?)).into_iter().next()?;
    let folder = sys.join("class/nvme").join(controller);
    let text = |file: &str| Some(fs::read_to_string(folder.join(file)).ok()?.trim().to_owned());
    let serial = text("serial").filter(|serial| is_serial(serial))?;
    Some(Drive { serial, model: text("model").filter(|model| !model.is_empty()) })
}

/// What the kernel shows below `sys`, sorted by serial number. What cannot be read is not there.
pub(super) fn look(sys: &Path, pools: &[WantedPool]) -> Vec<ControllerFact> {
    let owners = owners(sys, pools);
    let mut found: BTreeMap<String, ControllerFact> = BTreeMap::new();
    for name in names(&sys.join("class/nvme")) {
        let Some(fact) = read(&sys.join("class/nvme").join(&name), owners.get(&name).cloned()) else {
            continue;
        };
        let known = found.entry(fact.serial.clone()).or_insert_with(|| fact.clone());
        if known.pool.is_none() && fact.pool.is_some() {
            *known = fact;
        }
    }
    let (mut told, others): (Vec<_>, Vec<_>) = found.into_values().partition(|fact| fact.pool.is_some());
    told.extend(others);
    told.truncate(CONTROLLERS_MAX);
    told.sort_by(|a, b| a.serial.cmp(&b.serial));
    told
}

/// Which pool has a device of a controller, by the controller's name. Of two pools the first.
fn owners(sys: &Path, pools: &[WantedPool]) -> BTreeMap<String, String> {
    let mut owners = BTreeMap::new();
    for pool in pools {
        for place in pool.places.iter().filter(|place| place.recipe.kind == Kind::Device) {
            let Ok(real) = fs::canonicalize(&place.at) else { continue };
            let Some(block) = real.file_name() else { continue };
            for controller in controllers_of(&sys.join("class/block").join(block)) {
                owners.entry(controller).or_insert_with(|| pool.pool.clone());
            }
        }
    }
    owners
}

/// Names of the controllers of a block device; of a drive with several paths there are several.
fn controllers_of(block: &Path) -> Vec<String> {
    let Ok(block) = fs::canonicalize(block) else { return Vec::new() };
    // A partition lies in the folder of its disk.
    let is_partition = block.join("partition").exists();
    let disk = block.parent().filter(|_| is_partition).unwrap_or(block.as_path());
    let Ok(device) = fs::canonicalize(disk.join("device")) else { return Vec::new() };
    match device.file_name().and_then(|name| name.to_str()) {
        Some(name) if is_controller(name) => vec![name.to_owned()],
        // A subsystem, whose controllers are in its folder.
        Some(_) => names(&device),
        None => Vec::new(),
    }
}

/// Names of controllers in a folder, sorted.
fn names(folder: &Path) -> Vec<String> {
    let Ok(entries) = fs::read_dir(folder) else { return Vec::new() };
    let names = entries.flatten().filter_map(|entry| entry.file_name().into_string().ok());
    let mut names: Vec<String> = names.filter(|name| is_controller(name)).collect();
    names.sort();
    names
}

/// `nvme` and a number; namespaces have more.
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
        // One of them is for administration.
        queue_pairs: queues.saturating_sub(1),
    })
}

/// Whether the definition takes it: one value that does not fit would cost the whole status.
fn is_serial(serial: &str) -> bool {
    let is_word = |word: &str| !word.is_empty() && word.bytes().all(|byte| byte.is_ascii_graphic());
    serial.len() <= SERIAL_CHARS_MAX && serial.split(' ').all(is_word)
}

/// `0000:01:00.0`.
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

    use reprise_agent_kubernetes::{Data, Engine, FallbackEngine, ForeignSignatures};
    use tempfile::TempDir;

    use super::super::board::{Presence, Recipe, WantedPlace};
    use super::*;

    /// A node's root with devices, and the kernel's view of them.
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

        /// A controller with a serial number and so many queues.
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

        /// A disk below a folder of `devices`, whose `device` leads to one of them.
        fn disk(&self, folder: &str, name: &str, device: &str) {
            let disk = self.path("sys/devices").join(folder).join(name);
            fs::create_dir_all(&disk).expect("a folder");
            symlink(self.path("sys/devices").join(device), disk.join("device")).expect("a link");
            symlink(&disk, self.path("sys/class/block").join(name)).expect("a link");
            fs::write(self.path("dev").join(name), b"").expect("a device");
        }

        fn look(&self, pools: &[WantedPool]) -> Vec<(String, u32, Option<String>)> {
            let found = look(&self.path("sys"), pools);
            found.into_iter().map(|fact| (fact.serial, fact.queue_pairs, fact.pool)).collect()
        }

        /// A pool that claims a device of the node.
        fn pool(&self, name: &str, device: &str, kind: Kind) -> WantedPool {
            let recipe = Recipe {
                pool: name.to_owned(),
                uid: "u".to_owned(),
                kind,
                bytes: None,
                engine: Engine::IoUring,
                fallback: FallbackEngine::None,
                foreign: ForeignSignatures::Refuse,
            };
            let at = self.path("dev").join(device);
            let place = WantedPlace { path: at.display().to_string(), at, presence: Presence::Here, recipe };
            let (pool, uid) = (name.to_owned(), "u".to_owned());
            WantedPool { pool, uid, generation: 1, data: Data::Kept, places: vec![place], trouble: None }
        }
    }

    #[test]
    fn every_controller_is_told_with_its_queues_and_the_pool_that_has_a_device_of_it() {
        let root = Root::new();
        root.controller("nvme0", "S0 X", "65");
        root.controller("nvme1", "S1", "9");
        root.controller("nvme2", "S2", "1");
        root.disk("nvme0", "nvme0n1", "nvme0");
        root.disk("nvme1", "nvme1n1", "nvme1");
        // A partition of the second one.
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
        let told = |serial: &str, pairs: u32, pool: Option<&str>| {
            (serial.to_owned(), pairs, pool.map(str::to_owned))
        };
        let all = [told("S0 X", 64, Some("raw")), told("S1", 8, Some("part")), told("S2", 0, None)];
        assert_eq!(root.look(&pools), all);
        // A file on a disk is not the disk.
        let file = [root.pool("raw", "nvme0n1", Kind::File)];
        assert_eq!(
            (root.look(&file)[0].2.as_ref(), super::drives(&root.path("sys"), &file).len()),
            (None, 0)
        );
        let address = look(&root.path("sys"), &[])[1].pci_address.clone();
        assert_eq!(address.as_deref(), Some("0000:01:00.0"));
        assert!(look(&root.path("nowhere"), &pools).is_empty());
    }

    #[test]
    fn a_drive_with_two_ports_is_one_and_what_does_not_say_what_it_has_is_none() {
        let root = Root::new();
        root.controller("nvme0", "S0", "9");
        root.controller("nvme1", "S0", "9");
        let subsystem = root.path("sys/devices/nvme-subsys0");
        fs::create_dir_all(&subsystem).expect("a folder");
        root.disk("nvme-subsys0", "nvme0n1", "nvme-subsys0");
        symlink(root.path("sys/devices/nvme1"), subsystem.join("nvme1")).expect("a link");
        let pools = [root.pool("raw", "nvme0n1", Kind::Device)];
        assert_eq!(root.look(&pools), [("S0".to_owned(), 8, Some("raw".to_owned()))]);
        for (name, serial, queues) in
            [("nvme2", "", "9"), ("nvme3", "S3", "many"), ("nvme4", "S\u{fc}4", "9")]
        {
            root.controller(name, serial, queues);
        }
        root.controller("nvme5", "S5", "9");
        fs::write(root.path("sys/devices/nvme5/transport"), "tcp\n").expect("a file");
        assert_eq!(root.look(&pools).len(), 1);
    }

    #[test]
    fn of_too_many_controllers_those_of_pools_are_told() {
        let root = Root::new();
        for index in 0..40 {
            let name = format!("nvme{index}");
            root.controller(&name, &format!("S{index:02}"), "9");
            root.disk(&name, &format!("{name}n1"), &name);
        }
        let found = root.look(&[root.pool("raw", "nvme39n1", Kind::Device)]);
        assert_eq!(found.len(), CONTROLLERS_MAX);
        assert_eq!(found[CONTROLLERS_MAX - 1], ("S39".to_owned(), 8, Some("raw".to_owned())));
    }

    #[test]
    fn addresses_are_those_of_the_bus() {
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
