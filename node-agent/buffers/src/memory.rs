//! A range of memory that is released with its last owner: a mapping of a file, or heap pages.
//!
//! Only this module maps and unmaps. Other processes and devices may write to the memory at any time, so this
//! module creates no reference into it.

use std::alloc::Layout;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::ptr::NonNull;

use crate::error::{BufferError, check_range};
use crate::{HUGE_PAGE_BYTES, PAGE_BYTES};

/// `MADV_COLLAPSE` of madvise(2), Linux 6.1: make huge pages of this range now.
const MADV_COLLAPSE: libc::c_int = 25;

/// Allowed access through a mapping.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Access {
    /// Load from the memory.
    ReadOnly,
    /// Load from and store to the memory.
    ReadWrite,
}

/// Advice to the kernel about a range; see madvise(2).
#[derive(Clone, Copy, Debug)]
pub(crate) enum Advice {
    /// Map every page for writing now; an error instead of SIGBUS when there is no memory.
    PopulateWrite,
    /// Map every page for reading now.
    PopulateRead,
    /// Replace ordinary pages by huge pages now.
    Collapse,
    /// Use huge pages when the range is touched.
    HugePage,
    /// Leave the range out of core dumps.
    DontDump,
}

/// Owned memory: mapped or allocated at construction, released on drop.
#[derive(Debug)]
pub(crate) struct Memory {
    base: NonNull<u8>,
    bytes: usize,
    access: Access,
    region: Option<u16>,
    release: Release,
}

#[derive(Debug)]
enum Release {
    Unmap,
    Free(Layout),
}

// SAFETY: the memory belongs to the process, not to a thread; mmap(2) and the global allocator allow both use
// and release from any thread. All access goes through raw pointers whose users handle races.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` only returns addresses.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps the first `bytes` of a file, shared. The address is a multiple of 2 MiB when the range is at
    /// least that long, because the kernel can only then map it in huge pages.
    pub(crate) fn map(fd: BorrowedFd<'_>, bytes: usize, access: Access) -> io::Result<Memory> {
        let alignment = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let reserved = Reservation::new(bytes, alignment)?;
        let protection = match access {
            Access::ReadOnly => libc::PROT_READ,
            Access::ReadWrite => libc::PROT_READ | libc::PROT_WRITE,
        };
        // SAFETY: MAP_FIXED replaces `bytes` bytes at an address inside our own reservation, which has no
        // user (mmap(2)); the descriptor is open.
        let mapped = unsafe {
            libc::mmap(
                reserved.aligned().cast(),
                bytes,
                protection,
                libc::MAP_SHARED | libc::MAP_FIXED,
                fd.as_raw_fd(),
                0,
            )
        };
        let failure = (mapped == libc::MAP_FAILED).then(io::Error::last_os_error);
        // Also after a failure: MAP_FIXED removes the old mapping before it can fail (mmap(2); hugetlb with
        // an empty pool does), and another thread may have mapped memory into the hole since. Unmapping the
        // aligned range would destroy that mapping; at worst some address space without memory stays
        // reserved.
        let base = reserved.keep_aligned();
        if let Some(error) = failure {
            return Err(error);
        }
        Ok(Memory { base, bytes, access, region: None, release: Release::Unmap })
    }

    /// Allocates zeroed heap memory of whole pages; 2 MiB-aligned and in huge pages if it is long enough.
    pub(crate) fn heap(bytes: usize) -> Result<Memory, BufferError> {
        let alignment = if bytes >= HUGE_PAGE_BYTES { HUGE_PAGE_BYTES } else { PAGE_BYTES };
        let layout = Layout::from_size_align(bytes, alignment)
            .ok()
            .filter(|layout| layout.size() > 0 && layout.size().is_multiple_of(PAGE_BYTES))
            .ok_or_else(|| {
                BufferError::Invalid(format!(
                    "invalid buffer of {bytes} bytes: expected whole {PAGE_BYTES}-byte pages"
                ))
            })?;
        // SAFETY: the layout's size is not zero.
        let allocated = unsafe { std::alloc::alloc(layout) };
        let Some(base) = NonNull::new(allocated) else { std::alloc::handle_alloc_error(layout) };
        let memory =
            Memory { base, bytes, access: Access::ReadWrite, region: None, release: Release::Free(layout) };
        if bytes >= HUGE_PAGE_BYTES {
            // Best effort: without huge pages the buffer works as well, only slower for devices.
            let _ = memory.advise(0, bytes - bytes % HUGE_PAGE_BYTES, Advice::HugePage);
        }
        // SAFETY: the allocation is `bytes` long and not shared yet.
        unsafe { base.as_ptr().write_bytes(0, bytes) };
        Ok(memory)
    }

    /// Sets the arena region that this memory belongs to.
    pub(crate) fn with_region(mut self, region: u16) -> Memory {
        self.region = Some(region);
        self
    }

    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.base.as_ptr()
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    pub(crate) fn access(&self) -> Access {
        self.access
    }

    pub(crate) fn region(&self) -> Option<u16> {
        self.region
    }

    /// Address of a byte that [`check_range`] found inside, or of the end.
    pub(crate) fn at(&self, offset: usize) -> *mut u8 {
        debug_assert!(offset <= self.bytes);
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Calls madvise(2) for a part of the memory.
    pub(crate) fn advise(&self, offset: usize, bytes: usize, advice: Advice) -> io::Result<()> {
        check_range("a mapping", self.bytes, offset as u64, bytes as u64)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?;
        let advice = match advice {
            Advice::PopulateWrite => libc::MADV_POPULATE_WRITE,
            Advice::PopulateRead => libc::MADV_POPULATE_READ,
            Advice::Collapse => MADV_COLLAPSE,
            Advice::HugePage => libc::MADV_HUGEPAGE,
            Advice::DontDump => libc::MADV_DONTDUMP,
        };
        loop {
            // SAFETY: the range was checked to belong to this memory; none of these advices changes its
            // content (madvise(2)).
            let rc = unsafe { libc::madvise(self.at(offset).cast(), bytes, advice) };
            match crate::sys::check(rc) {
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                result => return result.map(|_| ()),
            }
        }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.release {
            // SAFETY: the range was mapped by `map`, is unmapped once, and no span of it is left.
            Release::Unmap => unsafe { unmap(self.base.as_ptr(), self.bytes) },
            // SAFETY: allocated by `heap` with this layout, freed once, and no span of it is left.
            Release::Free(layout) => unsafe { std::alloc::dealloc(self.base.as_ptr(), layout) },
        }
    }
}

/// Address space without memory, large enough to hold an aligned range.
struct Reservation {
    start: *mut u8,
    reserved: usize,
    skip: usize,
    bytes: usize,
}

impl Reservation {
    fn new(bytes: usize, alignment: usize) -> io::Result<Reservation> {
        let out_of_range = || io::Error::from(io::ErrorKind::InvalidInput);
        let whole_pages = bytes.checked_next_multiple_of(PAGE_BYTES).ok_or_else(out_of_range)?;
        let reserved = whole_pages.checked_add(alignment).ok_or_else(out_of_range)?;
        let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
        // SAFETY: an anonymous mapping at an address of the kernel's choice replaces no other mapping
        // (mmap(2)).
        let start = unsafe { libc::mmap(std::ptr::null_mut(), reserved, libc::PROT_NONE, flags, -1, 0) };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let skip = start.addr().next_multiple_of(alignment) - start.addr();
        Ok(Reservation { start: start.cast(), reserved, skip, bytes: whole_pages })
    }

    fn aligned(&self) -> *mut u8 {
        self.start.wrapping_add(self.skip)
    }

    /// Releases the parts before and behind the aligned range; returns the range's address.
    fn keep_aligned(self) -> NonNull<u8> {
        let end = self.skip + self.bytes;
        // SAFETY: the head of our reservation, which nothing was mapped over.
        unsafe { unmap(self.start, self.skip) };
        // SAFETY: the tail of our reservation, which nothing was mapped over.
        unsafe { unmap(self.start.wrapping_add(end), self.reserved - end) };
        NonNull::new(self.aligned()).expect("mmap never returns address 0 without MAP_FIXED")
    }
}

/// munmap(2) of whole pages.
///
/// # Safety
/// The range must be a mapping of this process that is no longer in use.
unsafe fn unmap(start: *mut u8, bytes: usize) {
    if bytes > 0 {
        // SAFETY: by the contract of this function.
        let rc = unsafe { libc::munmap(start.cast(), bytes) };
        // EINVAL would mean a range that was never mapped; ENOMEM only occurs when splitting a mapping.
        debug_assert_eq!(rc, 0, "munmap: {}", io::Error::last_os_error());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arena::{Arena, ArenaConfig, HugePolicy};

    /// Where the hugetlb pool is empty, every arena made with `Prefer` begins with a mapping that fails.
    #[test]
    fn a_failed_mapping_does_not_affect_other_threads() {
        let config = ArenaConfig { bytes: 8 << 20, region_bytes: 2 << 20, huge: HugePolicy::Prefer };
        std::thread::scope(|scope| {
            for seed in 1..=4u8 {
                let config = &config;
                scope.spawn(move || {
                    for round in 0..100 {
                        let arena = Arena::new(config)
                            .unwrap_or_else(|error| panic!("thread {seed}, round {round}: {error}"));
                        for region in arena.regions() {
                            let page = region.span(0, PAGE_BYTES as u64).expect("inside");
                            page.copy_in(&[seed; PAGE_BYTES]).expect("writable");
                        }
                    }
                });
            }
        });
    }
}
