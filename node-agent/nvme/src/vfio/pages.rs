//! Mapped pages, of this machine's memory or of a BAR, and their mapping in an IOMMU.
//!
//! A device may write to the pages at any time. No reference to plain data in them exists: words are atomics, registers
//! are read and written by volatile accesses.
#![expect(unsafe_code, reason = "mmap(2), access to registers, mapping in the IOMMU")]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};

use reprise_buffers::Span;

use super::calls;

/// Pages that are unmapped when dropped.
#[derive(Debug)]
pub(super) struct Pages {
    base: NonNull<u8>,
    bytes: usize,
}

// SAFETY: mappings belong to the process, not to a thread (mmap(2)); all accesses are atomic or volatile.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// Allocates zeroed pages. Shared, so that a fork does not move them away from their device.
    pub(super) fn allocate(bytes: usize) -> io::Result<Pages> {
        Pages::map(bytes, libc::MAP_ANONYMOUS | libc::MAP_POPULATE, -1, 0)
    }

    /// Maps a range of a file: a BAR.
    pub(super) fn of_file(file: &impl AsRawFd, offset: u64, bytes: usize) -> io::Result<Pages> {
        let offset = libc::off_t::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput)?;
        Pages::map(bytes, 0, file.as_raw_fd(), offset)
    }

    fn map(bytes: usize, flags: libc::c_int, fd: libc::c_int, offset: libc::off_t) -> io::Result<Pages> {
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // SAFETY: a mapping at an address of the kernel's choice replaces no other mapping (mmap(2)).
        let base = unsafe {
            libc::mmap(std::ptr::null_mut(), bytes, protection, flags | libc::MAP_SHARED, fd, offset)
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).expect("mmap never returns address 0 without MAP_FIXED");
        Ok(Pages { base, bytes })
    }

    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    fn at(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.bytes);
        assert!(
            inside && offset.is_multiple_of(size),
            "no word of {size} bytes at {offset} of {}",
            self.bytes
        );
        self.base.as_ptr().wrapping_add(offset)
    }

    /// Returns the word at an offset. Panics outside of the pages.
    pub(super) fn word(&self, offset: usize) -> &AtomicU64 {
        // SAFETY: inside the mapping that `self` keeps, aligned, and only accessed by atomics and by devices.
        unsafe { AtomicU64::from_ptr(self.at(offset, 8).cast()) }
    }

    /// Returns the word of 4 bytes at an offset. Panics outside of the pages.
    pub(super) fn half_word(&self, offset: usize) -> &AtomicU32 {
        // SAFETY: as for `word`.
        unsafe { AtomicU32::from_ptr(self.at(offset, 4).cast()) }
    }

    /// Returns the address of a register, valid while the pages live. Panics outside of the pages.
    pub(super) fn register_address(&self, offset: usize) -> NonNull<u32> {
        NonNull::new(self.at(offset, 4).cast()).expect("inside the mapping")
    }

    /// Reads a register. Panics outside of the pages.
    pub(super) fn read_register(&self, offset: usize) -> u32 {
        let register = self.at(offset, 4).cast::<u32>();
        // SAFETY: inside the mapping that `self` keeps, and aligned.
        let value = unsafe { register.read_volatile() };
        // Loads of memory that the device has written come after.
        fence(Ordering::Acquire);
        value
    }

    /// Writes a register, after all earlier stores to memory. Panics outside of the pages.
    pub(super) fn write_register(&self, offset: usize, value: u32) {
        // x86-64 keeps the order of a store to memory and a later one to uncached memory (Intel SDM 3A, 11.3); the
        // compiler keeps it here. Memory in a BAR is mapped uncached too.
        fence(Ordering::Release);
        let register = self.at(offset, 4).cast::<u32>();
        // SAFETY: inside the mapping that `self` keeps, and aligned.
        unsafe { register.write_volatile(value) };
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this size, unmapped once, and no word outlives `self`.
        let rc = unsafe { libc::munmap(self.base.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(rc, 0, "munmap: {}", io::Error::last_os_error());
    }
}

/// Maps a span of whole pages at an address for the devices of a container.
pub(super) fn map_span(container: &File, address: u64, span: &Span) -> io::Result<()> {
    // SAFETY: spans copy, and other processes and devices may write to their memory at any time (`reprise_buffers`).
    // VFIO pins the pages, so they are not reused while they are mapped for the device.
    unsafe { calls::map(container, address, span.as_ptr().cast_mut(), span.len() as u64) }
}

/// Pages that devices of a container can access until this is dropped.
pub(super) struct SharedPages {
    pages: Option<Pages>,
    address: u64,
    /// The container whose IOMMU maps the pages; `None` for a device's own BAR, which passes no IOMMU.
    container: Option<Arc<File>>,
}

impl SharedPages {
    /// Maps pages at an address.
    pub(super) fn map(container: &Arc<File>, address: u64, pages: Pages) -> io::Result<SharedPages> {
        // SAFETY: `Pages` has no references to plain data, only atomics and volatile accesses. They are released after
        // `unmap`, or leaked.
        unsafe { calls::map(container, address, pages.base.as_ptr(), pages.bytes as u64) }?;
        Ok(SharedPages { pages: Some(pages), address, container: Some(Arc::clone(container)) })
    }

    /// Returns pages of a device's own BAR, which the device finds at an address.
    pub(super) fn own_bar(address: u64, pages: Pages) -> SharedPages {
        SharedPages { pages: Some(pages), address, container: None }
    }

    pub(super) fn address(&self) -> u64 {
        self.address
    }

    pub(super) fn pages(&self) -> &Pages {
        self.pages.as_ref().expect("present until dropped")
    }
}

impl SharedPages {
    /// Ends the access of the devices, and unmaps the pages. If that is not possible, the pages are leaked, and the
    /// address stays in use; returns false then.
    pub(super) fn end(&mut self) -> bool {
        let Some(pages) = self.pages.take() else { return true };
        let Some(container) = &self.container else { return true };
        let ended = calls::unmap(container, self.address, pages.bytes as u64);
        if let Err(error) = &ended {
            tracing::error!(%error, "leaking {} bytes that a controller may still access", pages.bytes);
            std::mem::forget(pages);
        }
        ended.is_ok()
    }
}

impl Drop for SharedPages {
    fn drop(&mut self) {
        self.end();
    }
}
