//! A pool file that other processes may access, with proof of the end of their I/O.
//!
//! Each holder gets its own open file description, with a shared lock on a byte that no pool uses. The
//! kernel keeps an open file description, and with it the lock, until its last descriptor is closed, in all
//! processes, and its last operation has ended: reads and writes in flight, and operations of an io_uring or of
//! libaio, refer to it. A free byte therefore proves that no process can do I/O for the holder. This
//! covers killed processes, processes that live on after their session, descriptors that were passed on, and
//! holders of an earlier process of the agent.
//!
//! Alternatives: a pidfd shows the exit of one process, but not the end of operations that the kernel executes
//! for it, and nothing about other processes with the descriptor. `flock` is used for the agent's own lock.
//!
//! Only regular files with direct I/O are shared: locks belong to an inode, and a device node of a container is
//! another inode after a restart. Without direct I/O, a late write could remain in the page cache.

use std::fs::{File, OpenOptions};
use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::OpenOptionsExt;

use crate::device::{Caching, DeviceFile, FileAccess};
use crate::sys;

/// First byte of the locks: behind every file.
const LOCKS_START: u64 = 1 << 62;

/// End of the locks, the maximum offset of fcntl(2).
const LOCKS_END: u64 = i64::MAX as u64;

/// Bits of a holder's number within an era.
const HOLDER_BITS: u32 = 32;

/// Number of eras; each process of the agent uses one without locks of earlier ones.
const ERAS: u64 = (LOCKS_END - LOCKS_START) >> HOLDER_BITS;

/// Number of a holder within this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct HolderNumber(pub u32);

/// Pool file that holders may read and write.
#[derive(Debug)]
pub struct SharedFile {
    file: File,
    /// Range of lock bytes of this process. No holder of an earlier process had a lock here when it was
    /// chosen.
    era: Range<u64>,
}

impl SharedFile {
    /// Prepares a pool file; `None` if it cannot be shared.
    ///
    /// # Errors
    /// The system's error.
    pub fn of(device: &DeviceFile) -> io::Result<Option<SharedFile>> {
        let is_suitable = device.caching() == Caching::Direct && device.access() == FileAccess::ReadWrite;
        if !is_suitable || device.is_block_device() {
            return Ok(None);
        }
        let file = reopen(device.file())?;
        for number in 0..ERAS {
            let start = LOCKS_START + (number << HOLDER_BITS);
            let era = start..start + (1 << HOLDER_BITS);
            if !sys::is_range_locked(file.as_fd(), era.clone())? {
                return Ok(Some(SharedFile { file, era }));
            }
        }
        Ok(None)
    }

    /// Returns a descriptor for a holder. The file is open for direct reads and writes.
    ///
    /// # Errors
    /// The system's error.
    pub fn share(&self, holder: HolderNumber) -> io::Result<OwnedFd> {
        let file = reopen(&self.file)?;
        sys::lock_range(file.as_fd(), self.byte_of(holder))?;
        Ok(file.into())
    }

    /// Whether a process may still do I/O for a holder of this process of the agent.
    ///
    /// # Errors
    /// The system's error: the answer is unknown.
    pub fn is_held(&self, holder: HolderNumber) -> io::Result<bool> {
        sys::is_range_locked(self.file.as_fd(), self.byte_of(holder))
    }

    /// Whether a process may still do I/O for a holder of an earlier process of the agent.
    ///
    /// # Errors
    /// The system's error: the answer is unknown.
    pub fn is_held_by_earlier(&self) -> io::Result<bool> {
        let before = LOCKS_START..self.era.start;
        let behind = self.era.end..LOCKS_END;
        for range in [before, behind].into_iter().filter(|range| !range.is_empty()) {
            if sys::is_range_locked(self.file.as_fd(), range)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn byte_of(&self, holder: HolderNumber) -> Range<u64> {
        let byte = self.era.start + u64::from(holder.0);
        byte..byte + 1
    }
}

/// Opens the same file again, as another open file description without a lock.
fn reopen(file: &File) -> io::Result<File> {
    // By descriptor, because the path may name another file by now: proc(5).
    let path = format!("/proc/self/fd/{}", file.as_raw_fd());
    OpenOptions::new().read(true).write(true).custom_flags(libc::O_DIRECT).open(path)
}
