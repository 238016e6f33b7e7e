//! A piece of memory that other processes or devices may write at any time.
//!
//! A span is an address range and the mapping behind it; clones share the mapping, and the last one releases
//! it. Another process may store to the bytes at any time, so a span is never a `&[u8]`: bytes are copied
//! out, and checksums are computed over the copy. A copy that races with a writer returns unspecified bytes,
//! which the checksum detects; it never accesses memory outside the span.

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::checksum::Crc32c;
use crate::error::{BufferError, check_range};
use crate::kernel;
use crate::memory::{Access, Memory};

/// A range of an arena region, of a client's mapping, or of a [`PageBuffer`](crate::PageBuffer).
#[derive(Clone)]
pub struct Span {
    memory: Arc<Memory>,
    offset: usize,
    bytes: usize,
}

impl Span {
    /// Creates a span of a range of `memory`; an error if the range lies outside.
    pub(crate) fn of(memory: &Arc<Memory>, offset: u64, bytes: u64) -> Result<Span, BufferError> {
        let (offset, bytes) = check_range("a region", memory.bytes(), offset, bytes)?;
        Ok(Span { memory: Arc::clone(memory), offset, bytes })
    }

    /// Returns the length in bytes.
    pub fn len(&self) -> usize {
        self.bytes
    }

    /// Reports whether the span has no bytes.
    pub fn is_empty(&self) -> bool {
        self.bytes == 0
    }

    /// Reports whether this process may store to the span.
    pub fn is_writable(&self) -> bool {
        self.memory.access() == Access::ReadWrite
    }

    /// Returns `len` bytes from `offset` of this span; an error if the range lies outside.
    pub fn slice(&self, offset: usize, len: usize) -> Result<Span, BufferError> {
        let (offset, bytes) = check_range("a span", self.bytes, offset as u64, len as u64)?;
        Ok(Span { memory: Arc::clone(&self.memory), offset: self.offset + offset, bytes })
    }

    /// Address of the first byte, valid for reading `len()` bytes while a clone of the span lives.
    pub fn as_ptr(&self) -> *const u8 {
        self.memory.at(self.offset)
    }

    /// Address of the first byte for writing; `None` for a read-only mapping.
    pub fn as_mut_ptr(&self) -> Option<*mut u8> {
        self.is_writable().then(|| self.memory.at(self.offset))
    }

    /// Returns the word at a byte offset, for memory that is only accessed as words: queues and doorbells. Panics for
    /// a read-only mapping, and unless the word lies inside and is aligned.
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        let address = self.word_address(offset, size_of::<AtomicU32>());
        // SAFETY: inside the mapping that `self` keeps alive, writable and aligned; all bit patterns are valid. The doc
        // of `kernel` covers copies that race with it.
        unsafe { AtomicU32::from_ptr(address.cast()) }
    }

    /// Returns the double word at a byte offset. Panics like [`Span::atomic_u32`].
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        let address = self.word_address(offset, size_of::<AtomicU64>());
        // SAFETY: as for `atomic_u32`.
        unsafe { AtomicU64::from_ptr(address.cast()) }
    }

    fn word_address(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.bytes);
        assert!(
            inside && self.is_writable(),
            "no writable word of {size} bytes at {offset} of {}",
            self.bytes
        );
        let address = self.memory.at(self.offset + offset);
        assert!(address.addr().is_multiple_of(size), "the word of {size} bytes at {offset} is not aligned");
        address
    }

    /// Returns the arena region of the span; `None` for a client's mapping and for page buffers.
    pub fn region_id(&self) -> Option<u16> {
        self.memory.region()
    }

    /// Copies the span to `dst`, unverified. Panics when the lengths differ, like `copy_from_slice`.
    pub fn copy_out(&self, dst: &mut [u8]) {
        assert_eq!(dst.len(), self.bytes, "copy_out: the destination must be as long as the span");
        // SAFETY: the span's range lies in a mapping that `self` keeps alive; `dst` is exclusively ours, so
        // it does not overlap memory that spans name. The doc of `kernel` covers concurrent stores.
        unsafe { kernel::copy(self.as_ptr(), dst.as_mut_ptr(), dst.len()) };
    }

    /// Copies `src` to the span; an error when the lengths differ or the span is read-only.
    pub fn copy_in(&self, src: &[u8]) -> Result<(), BufferError> {
        let dst = self.destination_of(src)?;
        // SAFETY: `dst` is valid for writing as many bytes as `src` has, and no reference into it exists;
        // `src` cannot overlap it, for spans' memory is never behind a `&[u8]` while spans exist.
        unsafe { kernel::copy(src.as_ptr(), dst, src.len()) };
        Ok(())
    }

    /// Copies bytes from `offset` to `dst`, unverified; an error if the range lies outside. Unlike
    /// [`Span::slice`], it does not touch the count of owners, which other processors may change at the same time.
    pub fn read_at(&self, offset: usize, dst: &mut [u8]) -> Result<(), BufferError> {
        let (offset, bytes) = check_range("a span", self.bytes, offset as u64, dst.len() as u64)?;
        // SAFETY: as for `copy_out`; the range was checked.
        unsafe { kernel::copy(self.memory.at(self.offset + offset), dst.as_mut_ptr(), bytes) };
        Ok(())
    }

    /// Copies `src` to `offset`, like [`Span::read_at`]; an error also if the span is read-only.
    pub fn write_at(&self, offset: usize, src: &[u8]) -> Result<(), BufferError> {
        let (offset, bytes) = check_range("a span", self.bytes, offset as u64, src.len() as u64)?;
        if !self.is_writable() {
            return Err(BufferError::ReadOnly);
        }
        // SAFETY: as for `copy_in`; the range was checked.
        unsafe { kernel::copy(src.as_ptr(), self.memory.at(self.offset + offset), bytes) };
        Ok(())
    }

    /// Returns the CRC32C of the bytes as they are at the time of the call.
    pub fn crc32c(&self) -> u32 {
        let mut checksum = Crc32c::new();
        checksum.update_span(self);
        checksum.value()
    }

    /// Copies the span to `dst` and returns the CRC32C of the copied bytes, so that no process can change
    /// them between check and use. Panics when the lengths differ, like `copy_from_slice`.
    pub fn copy_out_checked(&self, dst: &mut [u8]) -> u32 {
        assert_eq!(dst.len(), self.bytes, "copy_out_checked: the destination must be as long as the span");
        // SAFETY: as for `copy_out`.
        !unsafe { kernel::copy_checked(kernel::EMPTY, self.as_ptr(), dst.as_mut_ptr(), dst.len()) }
    }

    /// Copies `src` to the span and returns the CRC32C of `src`; an error when the lengths differ or the span
    /// is read-only.
    pub fn copy_in_checked(&self, src: &[u8]) -> Result<u32, BufferError> {
        let dst = self.destination_of(src)?;
        // SAFETY: as for `copy_in`.
        Ok(!unsafe { kernel::copy_checked(kernel::EMPTY, src.as_ptr(), dst, src.len()) })
    }

    /// Returns the address for a copy of `src`: valid for writing `src.len()` bytes.
    pub(crate) fn destination_of(&self, src: &[u8]) -> Result<*mut u8, BufferError> {
        let dst = self.as_mut_ptr().ok_or(BufferError::ReadOnly)?;
        if src.len() != self.bytes {
            return Err(BufferError::LengthMismatch {
                source_bytes: src.len(),
                destination_bytes: self.bytes,
            });
        }
        Ok(dst)
    }
}

impl fmt::Debug for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Span")
            .field("region", &self.region_id())
            .field("offset", &self.offset)
            .field("bytes", &self.bytes)
            .field("writable", &self.is_writable())
            .finish()
    }
}
