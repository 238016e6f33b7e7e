//! A small memory that one process writes and others read: words with acquire and release order, and waits
//! for their changes.
//!
//! The writer's file is sealed against changes of its size. Readers get a descriptor that cannot be mapped
//! for writing, so a reader cannot affect the writer.

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering, fence};
use std::time::Duration;

use reprise_policy::ByteSize;

use crate::error::BufferError;
use crate::memory::{Access, Advice, Memory};
use crate::sys;

/// Memory shared between processes.
#[derive(Debug)]
pub struct SharedMemory {
    memory: Memory,
    readonly: Option<OwnedFd>,
}

/// Result of a wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FutexOutcome {
    /// Woken or interrupted: check the word again.
    Woken,
    /// The word had another value already.
    Changed,
    /// The timeout has passed.
    TimedOut,
}

impl SharedMemory {
    /// Allocates `bytes` zero bytes that this process may write.
    pub fn create(bytes: usize) -> Result<SharedMemory, BufferError> {
        let failed = |source| BufferError::system(format!("allocate {bytes} bytes of shared memory"), source);
        if bytes == 0 {
            return Err(BufferError::Invalid("invalid shared memory of 0 bytes".to_owned()));
        }
        let writable = sys::sealed_memfd(c"reprise-shared", bytes as u64, 0).map_err(failed)?;
        let readonly = sys::reopen_readonly(writable.as_fd()).map_err(failed)?;
        let memory = Memory::map(writable.as_fd(), bytes, Access::ReadWrite).map_err(failed)?;
        memory.advise(0, bytes, Advice::PopulateWrite).map_err(failed)?;
        Ok(SharedMemory { memory, readonly: Some(readonly) })
    }

    /// Maps memory that another process created, for reading; an error when the file is shorter than `bytes`.
    pub fn map_readonly(fd: OwnedFd, bytes: usize) -> Result<SharedMemory, BufferError> {
        let failed = |source| BufferError::system(format!("map {bytes} bytes of shared memory"), source);
        let there = sys::file_bytes(fd.as_fd()).map_err(failed)?;
        if bytes == 0 || there < bytes as u64 {
            return Err(BufferError::Invalid(format!(
                "invalid descriptor for shared memory of {bytes} bytes: the file has {}",
                ByteSize(there)
            )));
        }
        let memory = Memory::map(fd.as_fd(), bytes, Access::ReadOnly).map_err(failed)?;
        drop(fd); // the mapping does not need it
        memory.advise(0, bytes, Advice::PopulateRead).map_err(failed)?;
        Ok(SharedMemory { memory, readonly: None })
    }

    /// Returns the descriptor for readers; `None` for a mapping of another process's memory.
    pub fn readonly_fd(&self) -> Option<BorrowedFd<'_>> {
        self.readonly.as_ref().map(AsFd::as_fd)
    }

    /// Returns the size in bytes.
    pub fn len(&self) -> usize {
        self.memory.bytes()
    }

    /// Always false: there is at least one byte.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the word at a byte offset. Panics for a read-only mapping (a store would fault), and unless
    /// the word lies inside and is aligned.
    pub fn atomic_u32(&self, offset: usize) -> &AtomicU32 {
        self.assert_writable();
        self.word_u32(offset)
    }

    /// Returns the double word at a byte offset. Panics like [`SharedMemory::atomic_u32`].
    pub fn atomic_u64(&self, offset: usize) -> &AtomicU64 {
        self.assert_writable();
        self.word_u64(offset)
    }

    /// Loads the word at a byte offset with acquire order, from either kind of mapping. Panics unless the
    /// word lies inside and is aligned.
    pub fn load_u32(&self, offset: usize) -> u32 {
        // On read-only memory only relaxed loads are guaranteed not to write (std::sync::atomic, "Atomic
        // accesses to read-only memory"); the fence makes it an acquire.
        let value = self.word_u32(offset).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// Loads the double word at a byte offset, like [`SharedMemory::load_u32`].
    pub fn load_u64(&self, offset: usize) -> u64 {
        let value = self.word_u64(offset).load(Ordering::Relaxed);
        fence(Ordering::Acquire);
        value
    }

    /// Sleeps while the word at `offset` is `expected`, at most `timeout`. Works on either kind of mapping.
    /// Panics unless the word lies inside and is aligned.
    pub fn futex_wait(
        &self,
        offset: usize,
        expected: u32,
        timeout: Duration,
    ) -> Result<FutexOutcome, BufferError> {
        match sys::futex_wait(self.word_u32(offset), expected, timeout) {
            Ok(()) => Ok(FutexOutcome::Woken),
            Err(error) => match error.raw_os_error() {
                Some(libc::EINTR) => Ok(FutexOutcome::Woken),
                Some(libc::EAGAIN) => Ok(FutexOutcome::Changed),
                Some(libc::ETIMEDOUT) => Ok(FutexOutcome::TimedOut),
                _ => Err(BufferError::system("wait for a change of shared memory", error)),
            },
        }
    }

    /// Wakes all waiters on the word at `offset`, in any process; returns their number. Panics unless the
    /// word lies inside and is aligned.
    pub fn futex_wake(&self, offset: usize) -> u32 {
        let woken: io::Result<u32> = sys::futex_wake(self.word_u32(offset));
        woken.expect("FUTEX_WAKE on a mapped, aligned word has no error (futex(2))")
    }

    fn assert_writable(&self) {
        assert_eq!(self.memory.access(), Access::ReadWrite, "shared memory of another process is read-only");
    }

    fn word_u32(&self, offset: usize) -> &AtomicU32 {
        let address = self.word_address(offset, size_of::<AtomicU32>());
        // SAFETY: inside the mapping that `self` keeps alive, aligned, and all processes access it with
        // atomics only; all bit patterns are valid. On read-only mappings the reference stays inside this
        // module, which only loads.
        unsafe { AtomicU32::from_ptr(address.cast()) }
    }

    fn word_u64(&self, offset: usize) -> &AtomicU64 {
        let address = self.word_address(offset, size_of::<AtomicU64>());
        // SAFETY: as for `word_u32`.
        unsafe { AtomicU64::from_ptr(address.cast()) }
    }

    fn word_address(&self, offset: usize, size: usize) -> *mut u8 {
        let inside = offset.checked_add(size).is_some_and(|end| end <= self.memory.bytes());
        assert!(
            inside && offset.is_multiple_of(size),
            "no word of {size} bytes at {offset} of {}",
            self.len()
        );
        self.memory.at(offset)
    }
}
