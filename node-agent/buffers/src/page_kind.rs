//! Sizes of the pages behind a mapping, as measured in `/proc/self/smaps`.
//!
//! The page size matters: on the measured class of machines, a device reads 2–5 times faster into memory that
//! is physically contiguous in 2 MiB steps.

use std::fmt;
use std::ops::Range;

use reprise_policy::ByteSize;

/// Size and kind of the pages behind a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageKind {
    /// 2 MiB pages of the hugetlb pool: set aside at boot or by `vm.nr_hugepages`.
    HugeTlb,
    /// 2 MiB pages made of ordinary memory.
    TransparentHuge,
    /// Ordinary pages of 4 KiB.
    Small,
}

/// Numbers of bytes in each kind of pages of a mapping.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PageCoverage {
    /// Bytes of the mapping.
    pub bytes: u64,
    /// Bytes in pages of the hugetlb pool.
    pub hugetlb_bytes: u64,
    /// Bytes in transparent huge pages that are mapped as such.
    pub transparent_bytes: u64,
}

impl PageCoverage {
    /// Returns the kind of pages of the whole mapping; `Small` as soon as a part is in ordinary pages.
    pub fn kind(&self) -> PageKind {
        if self.bytes == 0 || self.hugetlb_bytes + self.transparent_bytes < self.bytes {
            PageKind::Small
        } else if self.hugetlb_bytes >= self.bytes {
            PageKind::HugeTlb
        } else {
            PageKind::TransparentHuge
        }
    }

    /// Returns the number of bytes in pages of one kind.
    pub fn bytes_of(&self, kind: PageKind) -> u64 {
        match kind {
            PageKind::HugeTlb => self.hugetlb_bytes,
            PageKind::TransparentHuge => self.transparent_bytes,
            PageKind::Small => self.bytes.saturating_sub(self.hugetlb_bytes + self.transparent_bytes),
        }
    }

    /// Returns the sum of both coverages.
    pub fn plus(self, other: PageCoverage) -> PageCoverage {
        PageCoverage {
            bytes: self.bytes + other.bytes,
            hugetlb_bytes: self.hugetlb_bytes + other.hugetlb_bytes,
            transparent_bytes: self.transparent_bytes + other.transparent_bytes,
        }
    }
}

impl fmt::Display for PageKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            PageKind::HugeTlb => "hugetlb 2 MiB",
            PageKind::TransparentHuge => "transparent 2 MiB",
            PageKind::Small => "4 KiB",
        })
    }
}

impl fmt::Display for PageCoverage {
    /// Writes the kind if there is only one, the parts otherwise: `hugetlb 2 MiB: 1GiB, transparent 2 MiB:
    /// 512MiB, 4 KiB: 2MiB`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts = [PageKind::HugeTlb, PageKind::TransparentHuge, PageKind::Small]
            .map(|kind| (kind, self.bytes_of(kind)));
        if parts.iter().filter(|(_, bytes)| *bytes > 0).count() <= 1 {
            return write!(f, "{}", self.kind());
        }
        let mut separator = "";
        for (kind, bytes) in parts.into_iter().filter(|(_, bytes)| *bytes > 0) {
            write!(f, "{separator}{kind}: {}", ByteSize(bytes))?;
            separator = ", ";
        }
        Ok(())
    }
}

/// Measures the pages of these address ranges of this process, in their order. Reads the file once, for any
/// number of ranges. When the file is not readable, no page counts as huge.
pub(crate) fn measure(ranges: &[Range<usize>]) -> Vec<PageCoverage> {
    let text = std::fs::read_to_string("/proc/self/smaps").unwrap_or_default();
    measure_in(&text, ranges)
}

/// [`measure`] on a given text (proc_pid_smaps(5)).
fn measure_in(smaps: &str, ranges: &[Range<usize>]) -> Vec<PageCoverage> {
    let mut found: Vec<PageCoverage> = ranges
        .iter()
        .map(|range| PageCoverage { bytes: range.len() as u64, ..PageCoverage::default() })
        .collect();
    let mut by_start: Vec<(usize, usize)> = ranges.iter().map(|range| range.start).zip(0..).collect();
    by_start.sort_unstable();
    let mut current = None;
    for line in smaps.lines() {
        if let Some(area) = address_range(line) {
            // The last range that starts at or before the area; the area lies inside it or inside no range.
            let behind = by_start.partition_point(|(start, _)| *start <= area.start);
            current = behind
                .checked_sub(1)
                .map(|position| by_start[position].1)
                .filter(|index| area.end <= ranges[*index].end);
        } else if let (Some(index), Some((name, bytes))) = (current, field(line)) {
            match name {
                "Shared_Hugetlb" | "Private_Hugetlb" => found[index].hugetlb_bytes += bytes,
                "ShmemPmdMapped" => found[index].transparent_bytes += bytes,
                _ => {}
            }
        }
    }
    found
}

/// Parses the addresses of `7f12a0000000-7f12c0000000 rw-s 00000000 00:01 1234 /memfd:reprise`.
fn address_range(line: &str) -> Option<Range<usize>> {
    let (start, end) = line.split_whitespace().next()?.split_once('-')?;
    Some(usize::from_str_radix(start, 16).ok()?..usize::from_str_radix(end, 16).ok()?)
}

/// Parses `ShmemPmdMapped:   524288 kB` into name and bytes.
fn field(line: &str) -> Option<(&str, u64)> {
    let (name, value) = line.split_once(':')?;
    let kib: u64 = value.trim().strip_suffix(" kB")?.trim().parse().ok()?;
    Some((name, kib << 10))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: u64 = 1 << 20;

    const SMAPS: &str = "\
200000-600000 rw-s 00000000 00:01 7 /memfd:reprise (deleted)
Size:               4096 kB
Rss:                4096 kB
ShmemPmdMapped:     2048 kB
Shared_Hugetlb:        0 kB
VmFlags: rd wr sh mr mw me ms
600000-a00000 rw-s 00000000 00:01 8 /memfd:reprise (deleted)
ShmemPmdMapped:        0 kB
Shared_Hugetlb:     4096 kB
a00000-c00000 rw-p 00000000 00:00 0
ShmemPmdMapped:     2048 kB
";

    #[test]
    fn pages_are_counted_for_the_range_they_lie_in() {
        let found = measure_in(SMAPS, &[0x60_0000..0xa0_0000, 0x20_0000..0x60_0000]);
        assert_eq!(found[0], PageCoverage { bytes: 4 * MIB, hugetlb_bytes: 4 * MIB, transparent_bytes: 0 });
        assert_eq!(found[1], PageCoverage { bytes: 4 * MIB, hugetlb_bytes: 0, transparent_bytes: 2 * MIB });
    }

    #[test]
    fn a_mapping_is_huge_only_when_all_of_it_is() {
        let found = measure_in(SMAPS, &[0x60_0000..0xa0_0000, 0x20_0000..0x60_0000]);
        assert_eq!(found[0].kind(), PageKind::HugeTlb);
        assert_eq!(found[1].kind(), PageKind::Small);
        assert_eq!(found[1].to_string(), "transparent 2 MiB: 2MiB, 4 KiB: 2MiB");
        assert_eq!(found[0].plus(found[1]).kind(), PageKind::Small);
    }

    #[test]
    fn without_smaps_nothing_counts_as_huge() {
        let range = 0x20_0000..0x60_0000;
        assert_eq!(measure_in("", std::slice::from_ref(&range))[0].kind(), PageKind::Small);
    }
}
