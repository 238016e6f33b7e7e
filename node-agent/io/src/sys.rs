//! System calls of this crate that neither std nor the io-uring crate wraps, except the one command to NVMe
//! drives (`smart`).

use std::io;
use std::ops::Range;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::time::Duration;

use crate::op::IO_ALIGN;

/// Creates a blocking eventfd.
pub(crate) fn eventfd() -> io::Result<OwnedFd> {
    // SAFETY: eventfd(2) takes two integers.
    let fd = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
    check(fd)?;
    // SAFETY: eventfd(2) returned a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Adds one. Cannot fail: the counter would block at 2^64 - 2 and every write adds 1.
pub(crate) fn eventfd_add(fd: BorrowedFd<'_>) {
    let one = 1u64.to_ne_bytes();
    // SAFETY: the buffer has the 8 bytes that eventfd(2) reads.
    unsafe { libc::write(fd.as_raw_fd(), one.as_ptr().cast(), one.len()) };
}

/// Resets the counter; blocks while it is zero.
pub(crate) fn eventfd_take(fd: BorrowedFd<'_>) {
    let mut count = [0u8; 8];
    // SAFETY: the buffer has the 8 bytes that eventfd(2) writes.
    unsafe { libc::read(fd.as_raw_fd(), count.as_mut_ptr().cast(), count.len()) };
}

/// Waits until a read would not block; false after `limit`, and on a signal.
pub(crate) fn poll_readable(fd: BorrowedFd<'_>, limit: Duration) -> bool {
    let mut poll = libc::pollfd { fd: fd.as_raw_fd(), events: libc::POLLIN, revents: 0 };
    let limit = timespec(limit);
    // SAFETY: one valid pollfd, a valid timespec, and a null signal mask, which ppoll(2) allows.
    let ready = unsafe { libc::ppoll(&raw mut poll, 1, &raw const limit, std::ptr::null()) };
    ready == 1
}

/// Calls `preadv(2)`; returns the number of bytes read.
///
/// # Safety
/// Every iovec is memory that stays mapped and writable during the call.
pub(crate) unsafe fn preadv(fd: BorrowedFd<'_>, iovecs: &[libc::iovec], offset: u64) -> io::Result<usize> {
    let (count, offset) = (length(iovecs.len()), file_offset(offset)?);
    // SAFETY: the caller answers for the iovecs; count is their number.
    let done = unsafe { libc::preadv(fd.as_raw_fd(), iovecs.as_ptr(), count, offset) };
    transferred(done)
}

/// Calls `pwritev(2)`; returns the number of bytes written.
///
/// # Safety
/// Every iovec is memory that stays mapped and readable during the call.
pub(crate) unsafe fn pwritev(fd: BorrowedFd<'_>, iovecs: &[libc::iovec], offset: u64) -> io::Result<usize> {
    let (count, offset) = (length(iovecs.len()), file_offset(offset)?);
    // SAFETY: the caller answers for the iovecs; count is their number.
    let done = unsafe { libc::pwritev(fd.as_raw_fd(), iovecs.as_ptr(), count, offset) };
    transferred(done)
}

/// Reserves the file's first `bytes` on the file system and sets its size to at least that, without writing.
pub(crate) fn fallocate(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let bytes = file_offset(bytes)?;
    loop {
        // SAFETY: fallocate(2) takes integers only.
        let result = check(unsafe { libc::fallocate(fd.as_raw_fd(), 0, 0, bytes) });
        match result {
            Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
            other => return other,
        }
    }
}

/// Makes a range of a file or block device read as zeroes without moving data, with fallocate(2): by
/// releasing the space, or by marking it as unwritten. Both are passed to a device that can discard or write
/// zeroes by itself.
pub(crate) fn zero(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    let (offset, bytes) = (file_offset(range.start)?, file_offset(range.end - range.start)?);
    let modes = [libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE, libc::FALLOC_FL_ZERO_RANGE];
    let mut refused = io::Error::from_raw_os_error(libc::EOPNOTSUPP);
    for mode in modes {
        loop {
            // SAFETY: fallocate(2) takes integers only.
            match check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, offset, bytes) }) {
                Ok(()) => return Ok(()),
                Err(error) if error.raw_os_error() == Some(libc::EINTR) => {}
                Err(error) => {
                    refused = error;
                    break;
                }
            }
        }
    }
    Err(refused)
}

/// Space of a file system.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Space {
    /// Size of the file system in bytes.
    pub(crate) total_bytes: u64,
    /// Bytes that unprivileged writers can still use.
    pub(crate) available_bytes: u64,
}

/// Returns the space of the file system that holds an open file.
pub(crate) fn space(fd: BorrowedFd<'_>) -> io::Result<Space> {
    // SAFETY: statvfs is plain data for which zeroes are valid.
    let mut stat: libc::statvfs = unsafe { std::mem::zeroed() };
    // SAFETY: fstatvfs(3) fills the struct that it is given.
    check(unsafe { libc::fstatvfs(fd.as_raw_fd(), &raw mut stat) })?;
    let bytes = |blocks: u64| blocks.saturating_mul(stat.f_frsize);
    Ok(Space { total_bytes: bytes(stat.f_blocks), available_bytes: bytes(stat.f_bavail) })
}

/// Reports whether a descriptor was opened with O_DIRECT.
pub(crate) fn is_direct(fd: BorrowedFd<'_>) -> io::Result<bool> {
    // SAFETY: fcntl(2) with F_GETFL takes no further argument.
    let flags = unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GETFL) };
    check(flags).map(|()| flags & libc::O_DIRECT != 0)
}

/// Reports whether statx(2) confirms O_DIRECT on this file with transfers aligned to [`IO_ALIGN`] (Linux
/// 6.1); `None` when it does not report an alignment.
pub(crate) fn direct_alignment_fits(fd: BorrowedFd<'_>) -> Option<bool> {
    // SAFETY: statx is plain data for which zeroes are valid.
    let mut stat: libc::statx = unsafe { std::mem::zeroed() };
    let (flags, mask) = (libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN);
    // SAFETY: an empty C string with AT_EMPTY_PATH names the descriptor itself; statx(2) fills the struct.
    let result = unsafe { libc::statx(fd.as_raw_fd(), c"".as_ptr(), flags, mask, &raw mut stat) };
    if result != 0 || stat.stx_mask & mask == 0 {
        return None;
    }
    let fits = |align: u32| align != 0 && align as usize <= IO_ALIGN;
    Some(fits(stat.stx_dio_mem_align) && fits(stat.stx_dio_offset_align))
}

/// Returns the soft limit of locked memory in bytes; `None` when unlimited.
pub(crate) fn memlock_limit() -> Option<u64> {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: getrlimit(2) fills the struct that it is given.
    let result = unsafe { libc::getrlimit(libc::RLIMIT_MEMLOCK, &raw mut limit) };
    (result == 0 && limit.rlim_cur != libc::RLIM_INFINITY).then_some(limit.rlim_cur)
}

/// Acquires a shared lock on a byte range for the open file description (`F_OFD_SETLK`, fcntl(2)). The kernel
/// releases it when the last descriptor of the description is closed and its last operation has ended.
pub(crate) fn lock_range(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<()> {
    let lock = byte_range(range, libc::F_RDLCK)?;
    // SAFETY: fcntl(2) reads the struct that it is given.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_SETLK, &raw const lock) })
}

/// Reports whether another open file description has a lock on a part of a byte range (`F_OFD_GETLK`).
pub(crate) fn is_range_locked(fd: BorrowedFd<'_>, range: Range<u64>) -> io::Result<bool> {
    let mut lock = byte_range(range, libc::F_WRLCK)?;
    // SAFETY: fcntl(2) reads and fills the struct that it is given.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_OFD_GETLK, &raw mut lock) })?;
    Ok(i32::from(lock.l_type) != libc::F_UNLCK)
}

fn byte_range(range: Range<u64>, kind: libc::c_int) -> io::Result<libc::flock> {
    // SAFETY: flock is plain data for which zeroes are valid; l_pid must be zero, fcntl(2).
    let mut lock: libc::flock = unsafe { std::mem::zeroed() };
    lock.l_type = libc::c_short::try_from(kind).unwrap_or_default();
    lock.l_whence = libc::c_short::try_from(libc::SEEK_SET).unwrap_or_default();
    (lock.l_start, lock.l_len) = (file_offset(range.start)?, file_offset(range.end - range.start)?);
    Ok(lock)
}

fn timespec(time: Duration) -> libc::timespec {
    libc::timespec {
        tv_sec: time.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: libc::c_long::from(time.subsec_nanos()),
    }
}

fn check(result: libc::c_int) -> io::Result<()> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn transferred(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn length(count: usize) -> libc::c_int {
    libc::c_int::try_from(count).unwrap_or(libc::c_int::MAX)
}

fn file_offset(offset: u64) -> io::Result<libc::off_t> {
    libc::off_t::try_from(offset).map_err(|_| io::Error::from_raw_os_error(libc::EINVAL))
}
