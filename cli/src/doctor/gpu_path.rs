//! Requirements of I/O that GPUs issue, item by item: driver, library, GPUs, green contexts, dma-buf, GPUDirect Storage.
//! Only files are read; no GPU is used.

use std::fs;
use std::path::Path;

use super::{Finding, Verdict, place_text};

/// First driver with green contexts: that of CUDA 12.4.
const GREEN_CONTEXTS_SINCE: u32 = 550;
/// First Linux version with `pin_user_pages` of dma-buf importers for peer-to-peer transfers.
const DMA_BUF_SINCE: (u32, u32) = (5, 12);
/// Folders with the driver's library in distributions, containers and WSL.
const LIBRARY_FOLDERS: &[&str] = &[
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
    "usr/lib",
    "usr/local/nvidia/lib64",
    "usr/lib/wsl/lib",
];

/// Returns the findings of a machine whose files are below `root`.
pub(super) fn findings(root: &Path) -> Vec<Finding> {
    let version = text(root, "proc/driver/nvidia/version");
    let release = text(root, "proc/sys/kernel/osrelease");
    let mut all = vec![driver(version.as_deref()), library(root)];
    all.extend(gpus(root));
    all.push(nodes(root));
    all.push(green_contexts(version.as_deref()));
    all.push(dma_buf(version.as_deref(), release.as_deref()));
    all.push(direct_storage(root));
    all
}

fn text(root: &Path, file: &str) -> Option<String> {
    fs::read_to_string(root.join(file)).ok()
}

/// Returns the version of the driver, such as `580.65.06`.
fn release_of(version: &str) -> Option<&str> {
    let first = version.lines().next()?;
    first.split_whitespace().find(|word| word.contains('.') && word.starts_with(|c: char| c.is_ascii_digit()))
}

fn major_of(version: &str) -> Option<u32> {
    release_of(version)?.split('.').next()?.parse().ok()
}

fn driver(version: Option<&str>) -> Finding {
    let name = "GPU: kernel driver";
    match version.and_then(release_of) {
        Some(release) => Finding::new(name, Verdict::Good, format!("NVIDIA {release}"), "GPUs can be used"),
        None => Finding::new(
            name,
            Verdict::Absent,
            "not loaded: /proc/driver/nvidia/version is missing",
            "install the NVIDIA driver, or give the container access to GPUs; until then, engines read blocks through \
             host memory",
        ),
    }
}

fn library(root: &Path) -> Finding {
    let name = "GPU: driver library";
    let found = LIBRARY_FOLDERS.iter().find(|folder| root.join(folder).join("libcuda.so.1").exists());
    match found {
        Some(folder) => Finding::new(
            name,
            Verdict::Good,
            format!("/{folder}/libcuda.so.1"),
            "rings and kernels load it at run time",
        ),
        None => Finding::new(
            name,
            Verdict::Absent,
            "libcuda.so.1 is in none of the usual folders",
            "install the driver's user-space part (libnvidia-compute), or start the container with the NVIDIA runtime",
        ),
    }
}

fn gpus(root: &Path) -> Vec<Finding> {
    let folder = root.join("proc/driver/nvidia/gpus");
    let mut addresses: Vec<String> = fs::read_dir(&folder)
        .map(|entries| entries.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect())
        .unwrap_or_default();
    addresses.sort();
    if addresses.is_empty() {
        let consequence = "rings run as their host build, on processors; nothing runs on a GPU";
        return vec![Finding::new("GPU: devices", Verdict::Absent, "no GPU", consequence)];
    }
    let finding = |address: String| {
        let information = fs::read_to_string(folder.join(&address).join("information")).unwrap_or_default();
        let field = |name: &str| {
            let line =
                information.lines().find_map(|line| line.strip_prefix(name)?.trim_start().strip_prefix(':'));
            line.map_or("unknown", str::trim).to_owned()
        };
        let place = address.parse().ok().and_then(|address| reprise_io::pci_place(root, address).ok());
        let found = format!("{}, UUID {}, {}", field("Model"), field("GPU UUID"), place_text(place));
        Finding::new(
            format!("GPU: {address}"),
            Verdict::Good,
            found,
            "an allocation can name it by its UUID; sessions that state it get extents of devices near it",
        )
    };
    addresses.into_iter().map(finding).collect()
}

fn nodes(root: &Path) -> Finding {
    let missing: Vec<&str> = ["nvidiactl", "nvidia-uvm", "nvidia0"]
        .into_iter()
        .filter(|node| !root.join("dev").join(node).exists())
        .collect();
    let name = "GPU: device nodes";
    if missing.is_empty() {
        return Finding::new(
            name,
            Verdict::Good,
            "/dev/nvidiactl, /dev/nvidia-uvm, /dev/nvidia0",
            "processes open GPUs",
        );
    }
    let found = format!("missing in /dev: {}", missing.join(", "));
    let remedy = "run nvidia-modprobe -u -c=0, or request a GPU for the pod";
    Finding::new(name, Verdict::Absent, found, remedy)
}

fn green_contexts(version: Option<&str>) -> Finding {
    let name = "GPU: green contexts";
    match version.and_then(major_of) {
        Some(major) if major >= GREEN_CONTEXTS_SINCE => Finding::new(
            name,
            Verdict::Good,
            format!("driver {major} has them"),
            "I/O kernels run on SMs of their own",
        ),
        Some(major) => Finding::new(
            name,
            Verdict::Fair,
            format!("driver {major} lacks them"),
            format!("I/O kernels run as a grid of few blocks: use driver {GREEN_CONTEXTS_SINCE} or later"),
        ),
        None => Finding::new(name, Verdict::Absent, "no driver", "install the NVIDIA driver"),
    }
}

/// Memory of a GPU is exported as dma-buf by the open kernel modules only.
fn dma_buf(version: Option<&str>, release: Option<&str>) -> Finding {
    let name = "GPU: dma-buf";
    let Some(version) = version else {
        return Finding::new(
            name,
            Verdict::Absent,
            "no driver",
            "install the NVIDIA driver, with its open kernel modules",
        );
    };
    let is_open = version.contains("Open Kernel Module");
    let is_old = release.is_some_and(|release| super::is_older(release, DMA_BUF_SINCE));
    let found = format!(
        "{} kernel modules, Linux {}",
        if is_open { "open" } else { "closed" },
        release.map_or("unknown", str::trim)
    );
    match (is_open, is_old) {
        (true, false) => {
            Finding::new(name, Verdict::Good, found, "NVMe controllers can access the memory of GPUs")
        }
        (false, _) => Finding::new(
            name,
            Verdict::Absent,
            found,
            "blocks pass through host memory (staged): install the open kernel modules (nvidia-open)",
        ),
        (true, true) => Finding::new(
            name,
            Verdict::Absent,
            found,
            "blocks pass through host memory (staged): use Linux 5.12 or later",
        ),
    }
}

fn direct_storage(root: &Path) -> Finding {
    let name = "GPU: GPUDirect Storage";
    match text(root, "proc/driver/nvidia-fs/version") {
        Some(version) => Finding::new(name, Verdict::Good, version.trim(), "the backend gds can be used"),
        None => Finding::new(
            name,
            Verdict::Absent,
            "nvidia-fs is not loaded",
            "not required: the backends gpu-queue and staged do without it",
        ),
    }
}

#[cfg(test)]
mod tests {
    use tempfile::TempDir;

    use super::*;

    const OPEN: &str =
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version\n";
    const CLOSED: &str = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12\n";

    fn machine(files: &[(&str, &str)]) -> TempDir {
        let root = tempfile::tempdir().expect("a folder");
        for (file, text) in files {
            let path = root.path().join(file);
            fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            fs::write(path, text).expect("written");
        }
        root
    }

    fn verdicts(root: &TempDir) -> Vec<(String, Verdict)> {
        findings(root.path())
            .into_iter()
            .map(|finding| (finding.name.into_owned(), finding.verdict))
            .collect()
    }

    #[test]
    fn a_machine_without_a_gpu_lacks_every_item() {
        let all = verdicts(&machine(&[]));
        assert_eq!(all.len(), 7);
        assert!(all.iter().all(|(_, verdict)| *verdict == Verdict::Absent), "{all:?}");
    }

    #[test]
    fn a_machine_with_open_modules_has_every_item() {
        let root = machine(&[
            ("proc/driver/nvidia/version", OPEN),
            ("proc/sys/kernel/osrelease", "6.8.0-31-generic\n"),
            ("usr/lib64/libcuda.so.1", ""),
            (
                "proc/driver/nvidia/gpus/0000:41:00.0/information",
                "Model: \t\t NVIDIA H100\nGPU UUID: \t GPU-1\n",
            ),
            ("dev/nvidiactl", ""),
            ("dev/nvidia-uvm", ""),
            ("dev/nvidia0", ""),
            ("proc/driver/nvidia-fs/version", "version: 2.20\n"),
            ("sys/devices/pci0000:40/0000:41:00.0/numa_node", "1\n"),
            ("sys/bus/pci/devices/other", ""),
        ]);
        let (function, bus) = ("sys/devices/pci0000:40/0000:41:00.0", "sys/bus/pci/devices/0000:41:00.0");
        std::os::unix::fs::symlink(root.path().join(function), root.path().join(bus)).expect("a link");
        let all = findings(root.path());
        assert!(all.iter().all(|finding| finding.verdict == Verdict::Good), "{all:?}");
        let gpu = all.iter().find(|finding| finding.name == "GPU: 0000:41:00.0").expect("the GPU");
        assert_eq!(gpu.found, "NVIDIA H100, UUID GPU-1, at pci0000:40, NUMA node 1");
        assert_eq!(all[0].found, "NVIDIA 580.65.06");
    }

    #[test]
    fn old_and_closed_drivers_are_reported_with_the_consequence() {
        let root =
            machine(&[("proc/driver/nvidia/version", CLOSED), ("proc/sys/kernel/osrelease", "6.8.0\n")]);
        let all = findings(root.path());
        let of = |name: &str| all.iter().find(|finding| finding.name == name).expect(name);
        assert_eq!(of("GPU: green contexts").verdict, Verdict::Fair);
        assert!(of("GPU: dma-buf").consequence.contains("open kernel modules"));
        let root =
            machine(&[("proc/driver/nvidia/version", OPEN), ("proc/sys/kernel/osrelease", "5.10.0\n")]);
        let old =
            findings(root.path()).into_iter().find(|finding| finding.name == "GPU: dma-buf").expect("it");
        assert!(old.consequence.contains("Linux 5.12"), "{old:?}");
    }
}
