//! The agent's memory for blocks: regions, each a sealed memory file in the largest available pages.
//!
//! Kinds of pages in order of preference: the hugetlb pool; ordinary memory collapsed into 2 MiB pages
//! (`MADV_COLLAPSE`, which works independently of `shmem_enabled`); 4 KiB pages. A collapse needs one
//! existing page in each 2 MiB and fills the rest with zeros. One page of each is therefore touched before,
//! and the whole region after, so that later accesses cause no page fault.
//!
//! The first touch runs at 0.3–3 GB/s a core (the hypervisor may also have to allocate the memory), so
//! several threads create the regions. An arena is never resized, but a region gets a new file before it passes to another tenant.
//!
//! Populating is not permanent: a process with a writable descriptor may punch holes into the file. The
//! crate's doc describes the consequences.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, PoisonError, RwLock};
use std::thread;

use reprise_policy::ByteSize;

use crate::error::BufferError;
use crate::meminfo::Available;
use crate::memory::{Access, Advice, Memory};
use crate::page_kind::{PageCoverage, PageKind, measure};
use crate::span::Span;
use crate::{HUGE_PAGE_BYTES, PAGE_BYTES, sys};

/// Maximum number of regions: io_uring registers at most 2^14 buffers (io_uring_register(2)).
pub const REGIONS_MAX: usize = 1 << 14;

/// Maximum size of a region: io_uring registers buffers of at most 1 GiB (io_uring_register(2)).
pub const REGION_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of threads that populate memory at start.
const BUILDERS_MAX: usize = 8;

/// A collapse fails occasionally because a page is in use at that moment (EAGAIN, EBUSY).
const COLLAPSE_ATTEMPTS_MAX: u32 = 3;

/// Kind of pages to try.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum HugePolicy {
    /// Huge pages where the machine has them.
    Prefer,
    /// Ordinary 4 KiB pages only.
    Never,
}

/// Size of an arena and of its regions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// Total size in bytes, a multiple of 4096.
    pub bytes: u64,
    /// Size of a region in bytes (the last one may be smaller): a multiple of 4096 (of 2 MiB for huge pages),
    /// at most [`REGION_BYTES_MAX`].
    pub region_bytes: u64,
    /// Kind of pages to try.
    pub huge: HugePolicy,
}

/// All regions of an agent.
#[derive(Debug)]
pub struct Arena {
    /// Replaced when a region passes to another tenant.
    regions: Vec<RwLock<Arc<Region>>>,
    huge: HugePolicy,
}

/// One memory file of the arena: the unit that engines map and io_uring registers.
#[derive(Debug)]
pub struct Region {
    id: u16,
    /// Number of memory files that the region has had before.
    generation: u32,
    memory: Arc<Memory>,
    writable: OwnedFd,
    readonly: OwnedFd,
    coverage: PageCoverage,
}

/// A region whose pages are not measured yet.
struct FreshRegion {
    memory: Memory,
    writable: OwnedFd,
    readonly: OwnedFd,
}

impl ArenaConfig {
    /// Sizes of the regions, in order.
    fn region_sizes(&self) -> Result<Vec<u64>, BufferError> {
        let invalid = |text: String| Err(BufferError::Invalid(text));
        let whole_pages = |bytes: u64| bytes > 0 && bytes.is_multiple_of(PAGE_BYTES as u64);
        if !whole_pages(self.bytes) || !whole_pages(self.region_bytes) {
            return invalid(format!(
                "invalid arena of {} in regions of {}: expected whole 4 KiB pages, use multiples of 2MiB",
                ByteSize(self.bytes),
                ByteSize(self.region_bytes)
            ));
        }
        if self.region_bytes > REGION_BYTES_MAX {
            return invalid(format!(
                "invalid region size {}: at most {}",
                ByteSize(self.region_bytes),
                ByteSize(REGION_BYTES_MAX)
            ));
        }
        let count = self.bytes.div_ceil(self.region_bytes);
        if count > REGIONS_MAX as u64 {
            return invalid(format!(
                "invalid arena of {} in regions of {}: {count} regions, at most {REGIONS_MAX}, use larger ones",
                ByteSize(self.bytes),
                ByteSize(self.region_bytes)
            ));
        }
        Ok((0..count).map(|index| self.region_bytes.min(self.bytes - index * self.region_bytes)).collect())
    }

    /// Rejects an arena that exceeds the available memory, before memory is touched.
    fn check_memory(&self, available: &Available) -> Result<(), BufferError> {
        let from_pool = match self.huge {
            HugePolicy::Prefer => available.hugetlb_bytes - available.hugetlb_bytes % self.region_bytes,
            HugePolicy::Never => 0,
        };
        available.check(self.bytes.saturating_sub(from_pool))
    }
}

impl Arena {
    /// Allocates and populates the memory.
    ///
    /// Errors: invalid sizes, more than the available memory, too few descriptors (two for each region).
    pub fn new(config: &ArenaConfig) -> Result<Arena, BufferError> {
        Arena::check(config)?;
        let sizes = config.region_sizes()?;
        let fresh = build_all(&sizes, config.huge)?;
        let addresses: Vec<Range<usize>> = fresh.iter().map(FreshRegion::addresses).collect();
        let coverages = measure(&addresses);
        let regions = (0u16..)
            .zip(fresh)
            .zip(coverages)
            .map(|((id, fresh), coverage)| RwLock::new(Arc::new(fresh.into_region((id, 0), coverage))))
            .collect();
        Ok(Arena { regions, huge: config.huge })
    }

    /// Makes the checks of [`Arena::new`] that precede the allocation.
    ///
    /// Errors: invalid sizes, more than the available memory.
    pub fn check(config: &ArenaConfig) -> Result<(), BufferError> {
        config.region_sizes()?;
        // Without /proc/meminfo there is no early check; populating then reports ENOMEM.
        Available::now().map_or(Ok(()), |available| config.check_memory(&available))
    }

    /// Returns the regions; the id of a region is its index.
    pub fn regions(&self) -> Vec<Arc<Region>> {
        self.regions.iter().map(current).collect()
    }

    /// Returns a region; `None` beyond the last one.
    pub fn region(&self, id: u16) -> Option<Arc<Region>> {
        self.regions.get(usize::from(id)).map(current)
    }

    /// Gives a region new, zeroed memory, which no descriptor or mapping of the old memory reaches, and returns it. The
    /// pages of the old memory are freed first, also in processes that still map it. The caller must ensure that no
    /// slot of the region is in use, and that no device maps it.
    ///
    /// # Errors
    /// Too little memory, or too few descriptors: the region keeps its old memory, whose bytes are zeros.
    pub fn renew(&self, id: u16) -> Result<Arc<Region>, BufferError> {
        let Some(place) = self.regions.get(usize::from(id)) else {
            return Err(self.no_region(id));
        };
        let old = current(place);
        old.clear();
        let fresh = FreshRegion::new(old.bytes(), self.huge)?;
        let coverage = measure(&[fresh.addresses()]).pop().unwrap_or_default();
        let renewed = Arc::new(fresh.into_region((id, old.generation + 1), coverage));
        *place.write().unwrap_or_else(PoisonError::into_inner) = renewed.clone();
        Ok(renewed)
    }

    fn no_region(&self, id: u16) -> BufferError {
        BufferError::Invalid(format!("invalid region {id}: the arena has {} regions", self.regions.len()))
    }

    /// Returns the kind of pages of the whole arena; [`Arena::coverage`] has the parts.
    pub fn page_kind(&self) -> PageKind {
        self.coverage().kind()
    }

    /// Returns the page sizes that were measured when the arena was created.
    pub fn coverage(&self) -> PageCoverage {
        self.regions
            .iter()
            .map(|region| current(region).coverage)
            .fold(PageCoverage::default(), PageCoverage::plus)
    }

    /// Returns `bytes` bytes from `offset` of a region; an error if the range lies outside.
    pub fn span(&self, region: u16, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        match self.regions.get(usize::from(region)) {
            Some(region) => current(region).span(offset, bytes),
            None => Err(self.no_region(region)),
        }
    }
}

fn current(region: &RwLock<Arc<Region>>) -> Arc<Region> {
    region.read().unwrap_or_else(PoisonError::into_inner).clone()
}

impl Region {
    /// Returns the number of memory files that the region has had before.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns the region's index in the arena.
    pub fn id(&self) -> u16 {
        self.id
    }

    /// Returns whether a [`Span`] of the region exists.
    pub fn is_lent(&self) -> bool {
        Arc::strong_count(&self.memory) > 1
    }

    /// Returns the region's size in bytes.
    pub fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Returns a descriptor for engines that save blocks.
    pub fn writable_fd(&self) -> BorrowedFd<'_> {
        self.writable.as_fd()
    }

    /// Returns a descriptor for engines that load blocks; it cannot be mapped for writing.
    pub fn readonly_fd(&self) -> BorrowedFd<'_> {
        self.readonly.as_fd()
    }

    /// Returns the kind of pages of the whole region.
    pub fn page_kind(&self) -> PageKind {
        self.coverage.kind()
    }

    /// Returns the page sizes that were measured when the region was created.
    pub fn coverage(&self) -> PageCoverage {
        self.coverage
    }

    /// Address of the first byte, valid while the region or a span of it lives. Regions of at least 2 MiB
    /// start at a multiple of 2 MiB.
    pub fn as_ptr(&self) -> *mut u8 {
        self.memory.as_ptr()
    }

    /// Returns `bytes` bytes from `offset`; an error if the range lies outside.
    pub fn span(&self, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        Span::of(&self.memory, offset, bytes)
    }

    /// Frees the pages of the memory file, whose bytes are zeros then; where that fails, overwrites them.
    fn clear(&self) {
        if sys::punch(self.writable.as_fd(), self.bytes()).is_ok() {
            return;
        }
        // SAFETY: the mapping is writable and `bytes()` long, and no reference into it exists (spans are
        // raw).
        unsafe { self.memory.as_ptr().write_bytes(0, self.memory.bytes()) };
    }
}

impl FreshRegion {
    /// Allocates a zeroed region in the best available pages.
    fn new(bytes: u64, huge: HugePolicy) -> Result<FreshRegion, BufferError> {
        let huge = match huge {
            HugePolicy::Prefer if bytes >= HUGE_PAGE_BYTES as u64 => HugePolicy::Prefer,
            _ => HugePolicy::Never,
        };
        if huge == HugePolicy::Prefer && bytes.is_multiple_of(HUGE_PAGE_BYTES as u64) {
            // EINVAL: this kernel has no hugetlb; ENOMEM: the pool is too small. In both cases fall back to
            // other pages.
            if let Ok(region) =
                FreshRegion::populated(bytes, libc::MFD_HUGETLB | libc::MFD_HUGE_2MB, HugePolicy::Never)
            {
                return Ok(region);
            }
        }
        FreshRegion::populated(bytes, 0, huge).map_err(|source| allocation_error(bytes, source))
    }

    fn populated(bytes: u64, flags: libc::c_uint, collapse: HugePolicy) -> io::Result<FreshRegion> {
        let writable = sys::sealed_memfd(c"reprise-region", bytes, flags)?;
        let readonly = sys::reopen_readonly(writable.as_fd())?;
        let length = usize::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
        let memory = Memory::map(writable.as_fd(), length, Access::ReadWrite)?;
        // Best effort: an old kernel then writes larger core dumps.
        let _ = memory.advise(0, length, Advice::DontDump);
        if collapse == HugePolicy::Prefer {
            collapse_whole(&memory)?;
        }
        memory.advise(0, length, Advice::PopulateWrite)?;
        Ok(FreshRegion { memory, writable, readonly })
    }

    fn addresses(&self) -> Range<usize> {
        let start = self.memory.as_ptr().addr();
        start..start + self.memory.bytes()
    }

    fn into_region(self, (id, generation): (u16, u32), coverage: PageCoverage) -> Region {
        Region {
            id,
            generation,
            memory: Arc::new(self.memory.with_region(id)),
            writable: self.writable,
            readonly: self.readonly,
            coverage,
        }
    }
}

/// Error for a region that cannot be allocated, with the remedy.
fn allocation_error(bytes: u64, source: io::Error) -> BufferError {
    let advice = match source.raw_os_error() {
        Some(libc::EMFILE) => {
            " (a region needs two descriptors: raise the limit on open files, or use larger regions)"
        }
        Some(libc::ENOMEM) => " (lower the arena's size or free memory)",
        Some(libc::EINVAL) => " (Linux 5.14 or newer is needed)",
        _ => "",
    };
    BufferError::system(format!("allocate a region of {}{advice}", ByteSize(bytes)), source)
}

/// Collapses as much as possible into huge pages; a later measurement finds the rest.
fn collapse_whole(memory: &Memory) -> io::Result<()> {
    let whole = memory.bytes() - memory.bytes() % HUGE_PAGE_BYTES;
    for offset in (0..whole).step_by(HUGE_PAGE_BYTES) {
        memory.advise(offset, PAGE_BYTES, Advice::PopulateWrite)?;
    }
    if memory.advise(0, whole, Advice::Collapse).is_ok() {
        return Ok(());
    }
    for offset in (0..whole).step_by(HUGE_PAGE_BYTES) {
        for _ in 0..COLLAPSE_ATTEMPTS_MAX {
            match memory.advise(offset, HUGE_PAGE_BYTES, Advice::Collapse) {
                // EINVAL: the kernel does not support it, or transparent huge pages are disabled. Further
                // attempts would fail too.
                Err(error) if error.raw_os_error() == Some(libc::EINVAL) => return Ok(()),
                Err(_) => {}
                Ok(()) => break,
            }
        }
    }
    Ok(())
}

/// Creates regions of these sizes, in order, on several threads.
fn build_all(sizes: &[u64], huge: HugePolicy) -> Result<Vec<FreshRegion>, BufferError> {
    let builders = thread::available_parallelism().map_or(1, usize::from).min(BUILDERS_MAX);
    let build = |share: &[u64]| {
        share.iter().map(|bytes| FreshRegion::new(*bytes, huge)).collect::<Result<Vec<_>, _>>()
    };
    let shares = sizes.chunks(sizes.len().div_ceil(builders));
    let built: Vec<Result<Vec<FreshRegion>, BufferError>> = thread::scope(|scope| {
        let threads: Vec<_> = shares.map(|share| scope.spawn(move || build(share))).collect();
        threads.into_iter().map(|thread| thread.join().expect("building a region does not panic")).collect()
    });
    let mut regions = Vec::with_capacity(sizes.len());
    for share in built {
        regions.extend(share?);
    }
    Ok(regions)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_remedy_when_descriptors_or_memory_run_out() {
        for (code, expected) in
            [(libc::EMFILE, "raise the limit on open files"), (libc::ENOMEM, "lower the arena")]
        {
            let text = allocation_error(1 << 21, io::Error::from_raw_os_error(code)).to_string();
            assert!(text.contains(expected) && text.contains("2MiB"), "{text}");
        }
    }

    #[test]
    fn the_hugetlb_pool_does_not_count_against_ordinary_memory() {
        let config = ArenaConfig { bytes: 10 << 30, region_bytes: 1 << 30, huge: HugePolicy::Prefer };
        let mut available = Available { bytes: 2 << 30, limit: "test".to_owned(), hugetlb_bytes: 0 };
        assert!(config.check_memory(&available).is_err());
        // 8.5 GiB in the pool hold eight regions; two more fit into 2 GiB only without the reserved headroom.
        available.hugetlb_bytes = 17 << 29;
        assert!(config.check_memory(&available).is_err());
        available.hugetlb_bytes = 9 << 30;
        assert!(config.check_memory(&available).is_ok());
        let never = ArenaConfig { huge: HugePolicy::Never, ..config };
        assert!(never.check_memory(&available).is_err());
    }
}
