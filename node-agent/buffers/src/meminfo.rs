//! Memory that this process may still allocate, by machine, hugetlb pool and control group.
//!
//! Checked before memory is touched, because the kernel overcommits and kills later.

use std::path::{Path, PathBuf};

use reprise_policy::ByteSize;

use crate::HUGE_PAGE_BYTES;
use crate::error::BufferError;

/// A sixteenth of the available memory stays free, for page tables, connections and the engine's growth.
const HEADROOM_SHIFT: u32 = 4;

/// Contents of `/proc/meminfo` at one moment.
#[derive(Clone, Debug)]
pub struct Meminfo(String);

/// Available memory, and the source of the figure.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Available {
    /// Ordinary memory in bytes.
    pub(crate) bytes: u64,
    /// Source of the figure, for error messages.
    pub(crate) limit: String,
    /// Free and unreserved pages of the hugetlb pool, in bytes.
    pub(crate) hugetlb_bytes: u64,
}

impl Meminfo {
    /// Reads the file; `None` where it is not readable.
    pub fn now() -> Option<Meminfo> {
        std::fs::read_to_string("/proc/meminfo").ok().map(Meminfo)
    }

    /// Returns a field that counts, such as `HugePages_Free`; `None` when the field does not exist.
    pub fn count(&self, name: &str) -> Option<u64> {
        let line = self.0.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.split_whitespace().next()?.parse().ok()
    }

    /// Returns a field in bytes, such as `MemAvailable`; the kernel reports it in units of 1,024.
    pub fn bytes(&self, name: &str) -> Option<u64> {
        self.count(name).map(|kib| kib << 10)
    }
}

impl Available {
    /// Reads machine and control group; `None` when `/proc/meminfo` is not usable.
    pub(crate) fn now() -> Option<Available> {
        let mut available = Available::from_meminfo(&Meminfo::now()?)?;
        for group in memory_groups() {
            if let Some(left) = memory_left(&group).filter(|left| *left < available.bytes) {
                available.bytes = left;
                available.limit = format!("control group {}", group.display());
            }
        }
        Some(available)
    }

    fn from_meminfo(meminfo: &Meminfo) -> Option<Available> {
        let count = |name| meminfo.count(name).unwrap_or(0);
        let free = count("HugePages_Free").saturating_sub(count("HugePages_Rsvd"));
        let of_our_size = meminfo.bytes("Hugepagesize") == Some(HUGE_PAGE_BYTES as u64);
        Some(Available {
            bytes: meminfo.bytes("MemAvailable")?,
            limit: "MemAvailable of /proc/meminfo".to_owned(),
            hugetlb_bytes: if of_our_size { free * HUGE_PAGE_BYTES as u64 } else { 0 },
        })
    }

    /// Rejects more than the usable memory.
    pub(crate) fn check(&self, wanted: u64) -> Result<(), BufferError> {
        let usable = self.bytes - (self.bytes >> HEADROOM_SHIFT);
        if wanted <= usable {
            return Ok(());
        }
        let left = 1u32 << HEADROOM_SHIFT;
        Err(BufferError::NotEnoughMemory {
            wanted: ByteSize(wanted),
            usable: ByteSize(usable),
            limit: format!("{} is {}, of which 1/{left} stays free", self.limit, ByteSize(self.bytes)),
        })
    }
}

/// Checks that `bytes` bytes fit into the memory of machine and control group, before they are touched.
///
/// # Errors
/// `NotEnoughMemory` with the limit and the remedy.
pub fn check_available(bytes: u64) -> Result<(), BufferError> {
    // Without /proc/meminfo there is no early check.
    Available::now().map_or(Ok(()), |available| available.check(bytes))
}

/// Returns the directories of this process's control group (version 2) and its ancestors.
fn memory_groups() -> Vec<PathBuf> {
    let root = Path::new("/sys/fs/cgroup");
    let membership = std::fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let Some(path) = membership.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return Vec::new();
    };
    root.join(path).ancestors().take_while(|group| group.starts_with(root)).map(Path::to_path_buf).collect()
}

/// Limit of a control group minus its use that cannot be dropped; `None` without a limit.
fn memory_left(group: &Path) -> Option<u64> {
    let read = |name: &str| std::fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?; // "max" does not parse: no limit
    let current: u64 = read("memory.current")?.trim().parse().ok()?;
    let droppable = droppable_bytes(&read("memory.stat")?);
    Some(limit.saturating_sub(current.saturating_sub(droppable)))
}

/// Page cache in a `memory.stat`; shared memory counts as anonymous there and is not part of it.
fn droppable_bytes(stat: &str) -> u64 {
    let counted = |line: &str| {
        let (name, value) = line.split_once(' ')?;
        matches!(name, "active_file" | "inactive_file").then(|| value.parse::<u64>().ok()).flatten()
    };
    stat.lines().filter_map(counted).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn available_memory_and_unreserved_huge_pages_are_read_in_bytes() {
        let text = "MemTotal: 100 kB\nMemAvailable:   2048 kB\nHugePages_Total: 9\nHugePages_Free:  5\n\
                    HugePages_Rsvd: 2\nHugepagesize: 2048 kB\n";
        let available = Available::from_meminfo(&Meminfo(text.to_owned())).expect("MemAvailable exists");
        assert_eq!((available.bytes, available.hugetlb_bytes), (2 << 20, 6 << 20));
        assert_eq!(Available::from_meminfo(&Meminfo("MemTotal: 100 kB\n".to_owned())), None);
    }

    #[test]
    fn memory_beyond_the_machine_is_refused_before_it_is_touched() {
        assert!(check_available(4096).is_ok());
        let refused = check_available(1 << 50).expect_err("a pebibyte").to_string();
        assert!(refused.contains("raise the limit"), "{refused}");
    }

    #[test]
    fn huge_pages_of_another_size_do_not_count() {
        let text = "MemAvailable: 2048 kB\nHugePages_Free: 5\nHugePages_Rsvd: 0\nHugepagesize: 1048576 kB\n";
        assert_eq!(
            Available::from_meminfo(&Meminfo(text.to_owned())).map(|available| available.hugetlb_bytes),
            Some(0)
        );
    }

    #[test]
    fn a_sixteenth_of_the_memory_stays_free() {
        let available = Available { bytes: 16 << 20, limit: "test".to_owned(), hugetlb_bytes: 0 };
        assert!(available.check(15 << 20).is_ok());
        let refused = available.check((15 << 20) + 1).expect_err("more than 15/16").to_string();
        assert!(
            refused.contains("15MiB") && refused.contains("16MiB") && refused.contains("lower"),
            "{refused}"
        );
    }

    #[test]
    fn only_the_page_cache_of_a_group_counts_as_droppable() {
        assert_eq!(droppable_bytes("anon 5\nfile 900\nshmem 800\ninactive_file 70\nactive_file 30\n"), 100);
    }
}
