//! `reprise doctor`: probes the features of this machine and reports which of them Reprise will use.
//!
//! Probes of io_uring, memory and direct I/O try the operation; the others read /sys, /proc and /dev. The
//! command changes no setting of the machine; its advice names the setting to change.

mod certificates;
mod gpu_path;
mod user_nvme;

use std::borrow::Cow;
use std::fs;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use anyhow::Context;
use reprise_buffers::{
    Arena, ArenaConfig, BufferError, HugePolicy, Meminfo, PageKind, REGION_BYTES_MAX, REGIONS_MAX,
    checksum_method,
};
use reprise_policy::{ByteSize, DevicePlace};
use serde::Serialize;

use reprise_testkit::cluster::cache_directory;
use reprise_testkit::output::{Audience, bytes_text};

/// Size of the arena for the page-size probe: large enough to show partial success, and quick to touch.
const PROBE_ARENA_BYTES: u64 = 128 << 20;

/// open(2) flag for direct I/O.
const O_DIRECT: i32 = rustix::fs::OFlags::DIRECT.bits() as i32;

/// Region size of the probe arena.
const PROBE_REGION_BYTES: u64 = 64 << 20;

/// First Linux version that makes transparent huge pages of an arena (`MADV_COLLAPSE`).
const COLLAPSE_SINCE: (u32, u32) = (6, 1);

/// Arguments of `reprise doctor`.
#[derive(Clone, Debug, clap::Args)]
pub(crate) struct DoctorArgs {
    /// Probe direct I/O in this directory [default: ~/.cache/reprise].
    ///
    /// `$REPRISE_CACHE` replaces `~/.cache/reprise`.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Also report each requirement of I/O that GPUs issue.
    #[arg(long)]
    gpu: bool,
    /// Check the certificates in this directory; repeatable.
    #[arg(long, value_name = "DIR")]
    certs: Vec<PathBuf>,
    /// Expect the certificates to be of this node's agent.
    #[arg(long, value_name = "NODE", requires = "certs")]
    node: Option<String>,
    /// Read /sys, /proc and /dev of NVMe controllers and GPUs below this directory.
    #[arg(long, value_name = "DIR", default_value = "/")]
    root: PathBuf,
}

/// Result of one probe.
#[derive(Clone, Debug, Serialize)]
struct Finding {
    name: Cow<'static, str>,
    verdict: Verdict,
    /// Observed state of the machine.
    found: String,
    /// Effect on Reprise, and the remedy if there is one.
    consequence: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum Verdict {
    /// Fully supported.
    Good,
    /// Supported with reduced performance.
    Fair,
    /// Missing or unused; Reprise works without it.
    Absent,
    /// Prevents Reprise from starting.
    Bad,
}

impl Finding {
    fn new(
        name: impl Into<Cow<'static, str>>,
        verdict: Verdict,
        found: impl Into<String>,
        consequence: impl Into<String>,
    ) -> Finding {
        Finding { name: name.into(), verdict, found: found.into(), consequence: consequence.into() }
    }
}

pub(crate) fn command(args: &DoctorArgs, audience: Audience) -> anyhow::Result<()> {
    let directory = args.dir.clone().unwrap_or_else(cache_directory);
    fs::create_dir_all(&directory).with_context(|| format!("cannot create {}", directory.display()))?;
    let arena = Arena::new(&ArenaConfig {
        bytes: PROBE_ARENA_BYTES,
        region_bytes: PROBE_REGION_BYTES,
        huge: HugePolicy::Prefer,
    });
    let mut findings = vec![processor(), memory(), huge_pages(&arena)];
    findings.extend(io(&arena));
    findings.extend([direct_io(&args.root, &directory), nvme(), rdma(), gpu()]);
    findings.extend(user_nvme::findings(&args.root));
    if args.gpu {
        findings.extend(gpu_path::findings(&args.root));
    }
    for folder in &args.certs {
        findings.extend(certificates::findings(folder, args.node.as_deref(), SystemTime::now()));
    }
    for finding in &findings {
        audience.emit(finding);
        let mark = match finding.verdict {
            Verdict::Good => "ok",
            Verdict::Fair => "fair",
            Verdict::Absent => "–",
            Verdict::Bad => "BAD",
        };
        audience.print_line(format!(
            "{:>4}  {}: {}\n      → {}",
            mark, finding.name, finding.found, finding.consequence
        ));
    }
    audience.print_line(
        "\nok: fully supported; fair: works with less performance; –: missing or unused, not required; BAD: agents do \
         not start",
    );
    Ok(())
}

fn processor() -> Finding {
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let flags = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let wide = flags.split_whitespace().any(|flag| flag == "vpclmulqdq");
    Finding {
        name: "processor".into(),
        verdict: if wide { Verdict::Good } else { Verdict::Fair },
        found: format!("{cores} cores; VPCLMULQDQ {}", if wide { "yes" } else { "no" }),
        consequence: format!("CRC32C of copied blocks: {}", checksum_method()),
    }
}

fn memory() -> Finding {
    let meminfo = Meminfo::now();
    let bytes = |name| meminfo.as_ref().and_then(|meminfo| meminfo.bytes(name));
    let field = |name| bytes(name).map_or_else(|| "unknown".to_owned(), bytes_text);
    Finding {
        name: "memory".into(),
        verdict: Verdict::Good,
        found: format!("{} of {} available", field("MemAvailable"), field("MemTotal")),
        consequence: match arena_bytes_max() {
            Some(bytes) => {
                format!(
                    "the arena of an agent can have at most {} plus the free hugetlb pages",
                    bytes_text(bytes)
                )
            }
            None => "an agent whose arena exceeds the available memory does not start".to_owned(),
        },
    }
}

/// Returns the largest size of an arena in ordinary memory; `None` if it is unknown or not limited by memory.
fn arena_bytes_max() -> Option<u64> {
    let largest = ArenaConfig {
        bytes: REGION_BYTES_MAX * REGIONS_MAX as u64,
        region_bytes: REGION_BYTES_MAX,
        huge: HugePolicy::Never,
    };
    match Arena::check(&largest) {
        Err(BufferError::NotEnoughMemory { usable, .. }) => Some(usable.0),
        Err(_) | Ok(()) => None,
    }
}

fn huge_pages(arena: &Result<Arena, BufferError>) -> Finding {
    let setting =
        |path: &str| fs::read_to_string(path).map_or_else(|_| "unknown".to_owned(), |text| chosen(&text));
    let free = Meminfo::now().and_then(|meminfo| meminfo.count("HugePages_Free")).unwrap_or(0);
    let settings = format!(
        "hugetlb pages free {free}; transparent: anonymous '{}', shared '{}'",
        setting("/sys/kernel/mm/transparent_hugepage/enabled"),
        setting("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
    );
    match arena {
        Ok(arena) => {
            let coverage = arena.coverage();
            let kind = coverage.kind();
            let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
            let upgrade = if is_older(&release, COLLAPSE_SINCE) { ", or use Linux 6.1 or later" } else { "" };
            Finding {
                name: "huge pages".into(),
                verdict: if kind == PageKind::Small { Verdict::Fair } else { Verdict::Good },
                found: format!(
                    "{settings}; pages of an arena of {}: {coverage}",
                    ByteSize(PROBE_ARENA_BYTES)
                ),
                consequence: match kind {
                    PageKind::Small => format!(
                        "reads into 4 KiB pages are 2–5 times slower: set vm.nr_hugepages to the arena's size / 2 MiB\
                         {upgrade}"
                    ),
                    PageKind::HugeTlb | PageKind::TransparentHuge => {
                        format!("arena regions use {kind} pages")
                    }
                },
            }
        }
        Err(error) => Finding {
            name: "huge pages".into(),
            verdict: Verdict::Bad,
            found: format!(
                "{settings}; cannot allocate an arena of {}: {error}",
                ByteSize(PROBE_ARENA_BYTES)
            ),
            consequence: "agents do not start".to_owned(),
        },
    }
}

fn io(arena: &Result<Arena, BufferError>) -> Vec<Finding> {
    let regions = arena.as_ref().map(Arena::regions).unwrap_or_default();
    let probe = reprise_io::probe(&regions);
    let ring = match &probe.io_uring {
        Ok(mode) => Finding {
            name: "io_uring".into(),
            verdict: Verdict::Good,
            found: format!("available ({mode})"),
            consequence: "device I/O uses io_uring, with one ring per device".to_owned(),
        },
        Err(error) => Finding {
            name: "io_uring".into(),
            verdict: Verdict::Fair,
            found: format!("not available: {error}"),
            consequence:
                "device I/O uses pread and pwrite on a few threads, with less bandwidth: check the seccomp \
                          profile and kernel.io_uring_disabled"
                    .to_owned(),
        },
    };
    let limit = probe.memlock_limit.map_or_else(|| "unlimited".to_owned(), bytes_text);
    let buffers = match &probe.registered_buffers {
        Ok(count) => Finding {
            name: "registered buffers".into(),
            verdict: Verdict::Good,
            found: format!(
                "a {} probe arena ({count} regions) was registered; memlock limit {limit}",
                ByteSize(PROBE_ARENA_BYTES)
            ),
            consequence: "the kernel maps arena regions once, not for each operation".to_owned(),
        },
        Err(error) => Finding {
            name: "registered buffers".into(),
            verdict: Verdict::Fair,
            found: format!("not available: {error}; memlock limit {limit}"),
            consequence:
                "the kernel maps memory for each operation: raise the memlock limit to the arena's size"
                    .to_owned(),
        },
    };
    vec![ring, buffers]
}

fn direct_io(root: &Path, directory: &Path) -> Finding {
    let place = place_text(reprise_io::device_place(root, &directory.into()));
    let path = directory.join(".reprise-doctor");
    let opened = fs::write(&path, [0; 4096]).and_then(|()| {
        fs::File::options().read(true).write(true).custom_flags(O_DIRECT).open(&path).map(drop)
    });
    drop(fs::remove_file(&path));
    match opened {
        Ok(()) => Finding {
            name: "direct I/O".into(),
            verdict: Verdict::Good,
            found: format!("files can be opened with O_DIRECT in {} ({place})", directory.display()),
            consequence: "pool files bypass the page cache".to_owned(),
        },
        Err(error) => Finding {
            name: "direct I/O".into(),
            verdict: Verdict::Fair,
            found: format!("cannot open a file with O_DIRECT in {} ({place}): {error}", directory.display()),
            consequence:
                "a pool here uses the page cache, which costs memory and copies: use ext4 or XFS on a \
                          local device"
                    .to_owned(),
        },
    }
}

fn nvme() -> Finding {
    let devices = entries("/sys/class/nvme");
    Finding {
        name: "NVMe".into(),
        verdict: if devices.is_empty() { Verdict::Absent } else { Verdict::Good },
        found: if devices.is_empty() { "no controller".to_owned() } else { devices.join(", ") },
        consequence: if devices.is_empty() {
            "pools are files on another block device".to_owned()
        } else {
            "configure /dev/disk/by-id/… as pool devices, or files on them".to_owned()
        },
    }
}

fn rdma() -> Finding {
    let devices = entries("/sys/class/infiniband");
    Finding {
        name: "RDMA".into(),
        verdict: Verdict::Absent,
        found: if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") },
        consequence: "transfers between nodes use TCP; this version does not support RDMA".to_owned(),
    }
}

fn gpu() -> Finding {
    let devices: Vec<String> =
        entries("/dev").into_iter().filter(|name| name.starts_with("nvidia")).collect();
    Finding {
        name: "GPU".into(),
        verdict: Verdict::Absent,
        found: if devices.is_empty() { "no device".to_owned() } else { devices.join(", ") },
        consequence:
            "engines read blocks through host memory unless queue pairs are granted to a GPU: see --gpu"
                .to_owned(),
    }
}

/// Describes where a device is in the machine.
fn place_text(place: Option<DevicePlace>) -> String {
    place.map_or_else(|| "place unknown".to_owned(), |place| format!("at {place}"))
}

/// Whether a kernel release such as `6.8.0-31-generic` is older than a version; false if it is not parsable.
fn is_older(release: &str, version: (u32, u32)) -> bool {
    let mut numbers = release.split(['.', '-']).map(|number| number.trim().parse::<u32>());
    matches!((numbers.next(), numbers.next()), (Some(Ok(major)), Some(Ok(minor))) if (major, minor) < version)
}

/// Returns the bracketed choice of a sysfs setting such as `always [madvise] never`.
fn chosen(text: &str) -> String {
    text.split(['[', ']']).nth(1).unwrap_or(text.trim()).to_owned()
}

fn entries(directory: &str) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(directory)
        .map(|entries| {
            entries.flatten().map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
        })
        .unwrap_or_default();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_releases_compare_by_major_and_minor_version() {
        assert!(is_older("5.14.0-427.el9.x86_64\n", COLLAPSE_SINCE));
        assert!(is_older("6.0.9", COLLAPSE_SINCE));
        assert!(!is_older("6.1.0-18-amd64\n", COLLAPSE_SINCE));
        assert!(!is_older("6.12\n", COLLAPSE_SINCE));
        assert!(!is_older("unknown", COLLAPSE_SINCE));
    }
}
