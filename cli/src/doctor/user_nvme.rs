//! Requirements of NVMe controllers that agents drive themselves, step by step: those of the machine in the order in
//! which they are set up, then each controller. Only files are read; no controller is opened.

use std::fs::File;
use std::io::Read;
use std::path::Path;

use reprise_io::{POOL_MAGIC, SIGNATURE_BYTES, foreign_signature};
use reprise_nvme::host::{Host, InterruptRemapping, NvmeFunction, Obstacle};
use reprise_testkit::output::bytes_text;

use super::{Finding, Verdict, place_text};

/// Default size of an agent's arena, which a controller accesses: it is locked in memory.
const ARENA_BYTES: u64 = 1 << 30;

/// Returns the findings of a machine whose files are below `root`.
pub(super) fn findings(root: &Path) -> Vec<Finding> {
    let host = Host::at(root);
    let mut all =
        vec![iommu(&host), interrupts(&host), driver(&host), locked_memory(&host), huge_pages(&host)];
    let functions = host.nvme_functions();
    if functions.is_empty() {
        all.push(Finding::new(
            "user NVMe: controllers",
            Verdict::Absent,
            "no NVMe controller on the PCI bus",
            "for tests, an agent emulates a controller on a file (emulated = … in pool.devices)",
        ));
    }
    all.extend(functions.iter().map(|function| controller(root, &host, function)));
    all
}

/// Builds the finding of a step: an obstacle, or the effect without one.
fn step(name: &'static str, found: String, obstacle: Option<Obstacle>, effect: &str) -> Finding {
    match obstacle {
        None => Finding::new(name, Verdict::Good, found, effect),
        Some(Obstacle { what, remedy }) => {
            Finding::new(name, Verdict::Absent, format!("{found}; {what}"), remedy)
        }
    }
}

fn iommu(host: &Host) -> Finding {
    let found = format!("{} IOMMUs with {} groups", host.iommus(), host.iommu_groups());
    let effect = "a controller accesses only memory that its driver maps";
    step("user NVMe: IOMMU", found, host.iommu_obstacle(), effect)
}

fn interrupts(host: &Host) -> Finding {
    let state = host.interrupt_remapping();
    let found = match state {
        InterruptRemapping::On => "on",
        InterruptRemapping::Off => "off",
        InterruptRemapping::OffAccepted => "off, accepted by allow_unsafe_interrupts",
        InterruptRemapping::Unknown => "unknown: /proc/interrupts cannot be read",
    };
    let name = "user NVMe: interrupt remapping";
    match state {
        InterruptRemapping::OffAccepted => Finding::new(
            name,
            Verdict::Fair,
            found,
            "a controller can send any interrupt: use it only with trusted hardware, or enable remapping in the firmware",
        ),
        InterruptRemapping::Unknown => {
            Finding::new(name, Verdict::Absent, found, "run this command where /proc is mounted")
        }
        InterruptRemapping::On | InterruptRemapping::Off => {
            let effect = "a controller sends only its own interrupts";
            step(name, found.to_owned(), host.interrupt_obstacle(), effect)
        }
    }
}

fn driver(host: &Host) -> Finding {
    let state = |is: bool| if is { "yes" } else { "no" };
    let found =
        format!("loaded {}; /dev/vfio/vfio {}", state(host.has_vfio_driver()), state(host.has_vfio_node()));
    step("user NVMe: vfio-pci", found, host.driver_obstacle(), "the kernel gives controllers to processes")
}

fn locked_memory(host: &Host) -> Finding {
    let found = host
        .memlock_limit()
        .map_or_else(|| "no limit".to_owned(), |limit| format!("limit {}", bytes_text(limit)));
    let effect = "an arena of 1 GiB can be mapped for a controller";
    step("user NVMe: locked memory", found, host.memlock_obstacle(ARENA_BYTES), effect)
}

fn huge_pages(host: &Host) -> Finding {
    let pages = host.huge_pages();
    let found =
        format!("{} of {} hugetlb pages free, of {}", pages.free, pages.total, bytes_text(pages.page_bytes));
    let name = "user NVMe: huge pages";
    if pages.free > 0 {
        Finding::new(
            name,
            Verdict::Good,
            found,
            "mapping an arena for a controller takes few entries of the IOMMU",
        )
    } else {
        let remedy = "mapping an arena takes an entry of the IOMMU per 4 KiB unless pages are transparent huge pages: \
                      set vm.nr_hugepages to the arena's size / 2 MiB";
        Finding::new(name, Verdict::Fair, found, remedy)
    }
}

/// Reports one controller: its driver, its contents, its uses, and the first obstacle.
fn controller(root: &Path, host: &Host, function: &NvmeFunction) -> Finding {
    let mut found = vec![match &function.driver {
        Some(driver) => format!("driver {driver}"),
        None => "no driver".to_owned(),
    }];
    found.push(place_text(reprise_io::pci_place(root, function.address).ok()));
    found.extend(function.iommu_group.map(|group| format!("IOMMU group {group}")));
    found.extend(function.name.clone());
    found.extend(function.serial.as_ref().map(|serial| format!("serial {serial}")));
    found.extend(function.kernel_queue_pairs.map(|pairs| format!("{pairs} I/O queue pairs of the kernel")));
    if function.is_bound_to_vfio() {
        found.push("queue pairs: as granted when an agent opens it".to_owned());
    }
    let contents: Vec<String> =
        function.block_devices.iter().filter_map(|device| contents(root, device)).collect();
    let is_foreign = contents.iter().any(|text| !text.contains("Reprise pool"));
    found.extend(contents);
    found.extend(function.uses.iter().map(ToString::to_string));
    let machine = host.obstacles(ARENA_BYTES);
    let name = format!("user NVMe: {}", function.address);
    let found = found.join(", ");
    match (function.obstacles().first(), machine.first()) {
        (None, None) => {
            let use_it = format!("ready: configure pci = \"{}\" in pool.devices", function.address);
            Finding::new(name, Verdict::Good, found, use_it)
        }
        (Some(own), _) if !function.uses.is_empty() || is_foreign => {
            let remedy = format!("stays with the kernel: {own}");
            Finding::new(name, Verdict::Absent, found, remedy)
        }
        (Some(own), _) => {
            Finding::new(name, Verdict::Absent, found, format!("not available to agents: {own}"))
        }
        (None, Some(_)) => {
            Finding::new(name, Verdict::Absent, found, "ready, as soon as the steps above are done")
        }
    }
}

/// Returns what a block device of the kernel holds; `None` if it is blank or unknown, or cannot be read.
fn contents(root: &Path, device: &str) -> Option<String> {
    let mut start = Vec::new();
    let file = File::open(root.join("dev").join(device)).ok()?;
    file.take(SIGNATURE_BYTES).read_to_end(&mut start).ok()?;
    if start.starts_with(POOL_MAGIC) {
        return Some(format!("{device} holds a Reprise pool"));
    }
    foreign_signature(&start).map(|what| format!("{device} holds {what}"))
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use tempfile::TempDir;

    use super::*;

    const FUNCTION: &str = "sys/bus/pci/devices/0000:3b:00.0";

    fn write(root: &TempDir, file: &str, text: &str) {
        let path = root.path().join(file);
        fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        fs::write(path, text).expect("written");
    }

    /// A machine that has a controller with a driver, and nothing else.
    fn machine(driver: &str) -> TempDir {
        let root = tempfile::tempdir().expect("a folder");
        write(&root, &format!("{FUNCTION}/class"), "0x010802\n");
        let drivers = root.path().join("sys/bus/pci/drivers").join(driver);
        fs::create_dir_all(&drivers).expect("a folder");
        symlink(drivers, root.path().join(FUNCTION).join("driver")).expect("a link");
        write(&root, "proc/interrupts", "1: 0 IO-APIC i8042\n");
        write(&root, "proc/self/limits", "Max locked memory 8388608 8388608 bytes\n");
        write(&root, "proc/meminfo", "HugePages_Total: 8\nHugePages_Free: 4\nHugepagesize: 2048 kB\n");
        root
    }

    fn finding(root: &TempDir, name: &str) -> Finding {
        let all = findings(root.path());
        all.into_iter().find(|finding| finding.name == format!("user NVMe: {name}")).expect(name)
    }

    #[test]
    fn each_missing_step_is_reported_with_its_remedy() {
        let root = machine("nvme");
        for (name, words) in [
            ("IOMMU", ["0 IOMMUs with 0 groups", "intel_iommu=on"]),
            ("interrupt remapping", ["interrupt remapping is off", "firmware"]),
            ("vfio-pci", ["loaded no", "modprobe vfio-pci"]),
            ("locked memory", ["may lock 8 MiB", "ulimit -l"]),
            ("0000:3b:00.0", ["driver nvme", "enable VT-d"]),
        ] {
            let finding = finding(&root, name);
            assert_eq!(finding.verdict, Verdict::Absent, "{finding:?}");
            assert!(
                finding.found.contains(words[0]) && finding.consequence.contains(words[1]),
                "{finding:?}"
            );
        }
        let pages = finding(&root, "huge pages");
        assert_eq!(
            (pages.verdict, pages.found.as_str()),
            (Verdict::Good, "4 of 8 hugetlb pages free, of 2.0 MiB")
        );
    }

    #[test]
    fn a_controller_of_the_kernel_is_described_with_its_use_and_contents() {
        let root = machine("nvme");
        write(&root, &format!("{FUNCTION}/nvme/nvme0/serial"), "S5GX \n");
        write(&root, &format!("{FUNCTION}/nvme/nvme0/queue_count"), "17\n");
        fs::create_dir_all(root.path().join(FUNCTION).join("nvme/nvme0/nvme0n1")).expect("a folder");
        write(&root, "dev/nvme0n1", "XFSB");
        write(&root, "proc/mounts", "/dev/nvme0n1 /data xfs rw 0 0\n");
        let finding = finding(&root, "0000:3b:00.0");
        for words in [
            "nvme0, serial S5GX, 16 I/O queue pairs of the kernel",
            "nvme0n1 holds an XFS file system",
            "nvme0n1 is mounted at /data",
        ] {
            assert!(finding.found.contains(words), "{finding:?}");
        }
        assert!(finding.consequence.starts_with("stays with the kernel"), "{finding:?}");
    }

    #[test]
    fn a_controller_of_vfio_is_ready_when_the_machine_is() {
        let root = machine("vfio-pci");
        write(&root, "sys/kernel/iommu_groups/7/type", "DMA\n");
        symlink(
            root.path().join("sys/kernel/iommu_groups/7"),
            root.path().join(FUNCTION).join("iommu_group"),
        )
        .expect("a link");
        write(&root, "dev/vfio/vfio", "");
        write(&root, "dev/vfio/7", "");
        let waiting = finding(&root, "0000:3b:00.0");
        assert!(waiting.consequence.contains("steps above"), "{waiting:?}");
        write(&root, "sys/class/iommu/dmar0/name", "");
        write(&root, "proc/interrupts", "24: 0 IR-PCI-MSI 1 x\n");
        write(&root, "proc/self/status", "CapEff:\t0000000000004000\n");
        let ready = finding(&root, "0000:3b:00.0");
        assert_eq!(ready.verdict, Verdict::Good, "{ready:?}");
        assert!(ready.consequence.contains("pci = \"0000:3b:00.0\""), "{ready:?}");
        assert_eq!(finding(&root, "locked memory").found, "no limit");
    }

    #[test]
    fn a_machine_without_controllers_gets_advice_about_the_emulation() {
        let root = tempfile::tempdir().expect("a folder");
        let finding = finding(&root, "controllers");
        assert!(finding.consequence.contains("emulated"), "{finding:?}");
    }
}
