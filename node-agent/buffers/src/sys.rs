//! System calls on descriptors and futexes, each wrapped once. Mapping calls are in `memory`, those on
//! sockets in `descriptors`.

use std::ffi::CStr;
use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd};
use std::os::unix::fs::PermissionsExt;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use reprise_policy::ByteSize;

use crate::error::BufferError;

/// Unit of `st_blocks`, stat(3type).
const STAT_BLOCK_BYTES: u64 = 512;

/// Prevents an engine that holds the descriptor from changing the size (this process would fault), and from
/// adding seals (this process could no longer map it for writing). It does not prevent holes: see the crate's
/// doc. memfd_create(2), fcntl(2) "File Sealing".
const SEALS: libc::c_int = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;

/// Mode of a memfd's inode. A new memfd has mode 0777, so a process with a read-only descriptor could reopen
/// it for writing through /proc/self/fd; without mode bits only its owner and root can.
const MEMFD_MODE: u32 = 0o400;

/// Creates a memory file of `bytes` zero bytes, sealed against changes of its size.
pub(crate) fn sealed_memfd(name: &CStr, bytes: u64, extra_flags: libc::c_uint) -> io::Result<OwnedFd> {
    let fd = create_memfd(name, libc::MFD_CLOEXEC | libc::MFD_ALLOW_SEALING | extra_flags)?;
    let length = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    // SAFETY: ftruncate(2) reads no memory of this process; the descriptor is open.
    check(unsafe { libc::ftruncate(fd.as_raw_fd(), length) })?;
    // SAFETY: F_ADD_SEALS takes an int (fcntl(2)); the descriptor is open.
    check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_ADD_SEALS, SEALS) })?;
    Ok(fd)
}

/// Frees all pages of a file, which then reads as zeros: fallocate(2).
pub(crate) fn punch(fd: BorrowedFd<'_>, bytes: u64) -> io::Result<()> {
    let length = libc::off_t::try_from(bytes).map_err(|_| io::ErrorKind::InvalidInput)?;
    let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
    // SAFETY: fallocate(2) reads no memory of this process; the descriptor is open.
    check(unsafe { libc::fallocate(fd.as_raw_fd(), mode, 0, length) })?;
    Ok(())
}

/// Calls memfd_create(2), with a flag that forbids executing the file where the kernel supports that (6.3).
fn create_memfd(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    let mut created = raw_memfd(name, flags | libc::MFD_NOEXEC_SEAL);
    if matches!(&created, Err(error) if error.raw_os_error() == Some(libc::EINVAL)) {
        created = raw_memfd(name, flags);
    }
    created
}

fn raw_memfd(name: &CStr, flags: libc::c_uint) -> io::Result<OwnedFd> {
    // SAFETY: `name` is a NUL-terminated string that lives through the call (memfd_create(2)).
    let fd = check(unsafe { libc::memfd_create(name.as_ptr(), flags) })?;
    // SAFETY: memfd_create returned a new descriptor without another owner.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}

/// Opens a second descriptor of the same memory file that can only be read and mapped for reading. Removes
/// the write permission from the file, so that the receiver cannot reopen it (unless it is root or has our
/// user id).
pub(crate) fn reopen_readonly(fd: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let path = format!("/proc/self/fd/{}", fd.as_raw_fd());
    fs::set_permissions(&path, fs::Permissions::from_mode(MEMFD_MODE))?;
    // std opens with O_CLOEXEC.
    Ok(OpenOptions::new().read(true).open(&path)?.into())
}

/// Makes malloc map allocations from `bytes` bytes on separately, and stops its automatic changes of that
/// limit (mallopt(3)).
#[cfg(target_env = "gnu")]
pub(crate) fn set_mapping_threshold(bytes: libc::c_int) {
    // SAFETY: mallopt(3) takes two integers; M_MMAP_THRESHOLD may be set at any time.
    let accepted = unsafe { libc::mallopt(libc::M_MMAP_THRESHOLD, bytes) };
    assert!(accepted == 1, "{bytes} is at most half of malloc's largest heap");
}

/// Returns the size of the file behind a descriptor.
pub(crate) fn file_bytes(fd: BorrowedFd<'_>) -> io::Result<u64> {
    Ok(file_size(fd)?.0)
}

/// Returns the size of a file, and the bytes that are allocated for it.
fn file_size(fd: BorrowedFd<'_>) -> io::Result<(u64, u64)> {
    let mut status = std::mem::MaybeUninit::<libc::stat>::uninit();
    // SAFETY: the pointer is valid for one `stat`, which fstat(2) fills.
    check(unsafe { libc::fstat(fd.as_raw_fd(), status.as_mut_ptr()) })?;
    // SAFETY: fstat succeeded, so the structure is filled.
    let status = unsafe { status.assume_init() };
    let unsigned = |value: i64| u64::try_from(value).map_err(|_| io::Error::from(io::ErrorKind::InvalidData));
    Ok((unsigned(status.st_size)?, unsigned(status.st_blocks)?.saturating_mul(STAT_BLOCK_BYTES)))
}

/// Checks that a received memory file has at least `bytes` bytes, and that no process can make it shorter: an access
/// beyond its end would end this process (SIGBUS). Files of the hugetlb pool are refused, because a hole in them has the
/// same effect when the pool is empty (see the crate's doc). The file must be allocated as a whole: the kernel charges
/// a page to the process that touches it first, which must not be this one.
pub(crate) fn check_sealed(fd: BorrowedFd<'_>, bytes: u64) -> Result<(), BufferError> {
    let failed = |source| BufferError::system("examine a received memory file", source);
    let (there, allocated) = file_size(fd).map_err(failed)?;
    if bytes == 0 || there < bytes {
        return Err(BufferError::Invalid(format!(
            "invalid memory file for {}: it has {}",
            ByteSize(bytes),
            ByteSize(there)
        )));
    }
    // SAFETY: F_GET_SEALS reads no memory of this process (fcntl(2)); the descriptor is open.
    let seals = check(unsafe { libc::fcntl(fd.as_raw_fd(), libc::F_GET_SEALS) });
    if !seals.is_ok_and(|seals| seals & libc::F_SEAL_SHRINK != 0) {
        let text = "invalid memory file: expected one of memfd_create(2) with the seal F_SEAL_SHRINK";
        return Err(BufferError::Invalid(text.to_owned()));
    }
    if allocated < there {
        return Err(BufferError::Invalid(format!(
            "invalid memory file of {}: only {} are allocated, touch or fallocate(2) all of it first",
            ByteSize(there),
            ByteSize(allocated)
        )));
    }
    let mut system = std::mem::MaybeUninit::<libc::statfs>::uninit();
    // SAFETY: the pointer is valid for one `statfs`, which fstatfs(2) fills.
    check(unsafe { libc::fstatfs(fd.as_raw_fd(), system.as_mut_ptr()) }).map_err(failed)?;
    // SAFETY: fstatfs succeeded, so the structure is filled.
    let kind = unsafe { system.assume_init() }.f_type;
    if kind == libc::HUGETLBFS_MAGIC as _ {
        let text =
            "invalid memory file: pages of the hugetlb pool cannot be registered, use transparent huge pages";
        return Err(BufferError::Invalid(text.to_owned()));
    }
    Ok(())
}

/// Sleeps while `*word == expected`, at most `timeout`; [`futex_wake`] through any mapping of the page wakes
/// it.
pub(crate) fn futex_wait(word: &AtomicU32, expected: u32, timeout: Duration) -> io::Result<()> {
    let limit = libc::timespec {
        // Saturates at 292 billion years.
        tv_sec: timeout.as_secs().try_into().unwrap_or(i64::MAX),
        tv_nsec: libc::c_long::from(timeout.subsec_nanos()),
    };
    // SAFETY: futex(2) FUTEX_WAIT reads an aligned u32 that `word` keeps alive, and a timespec (relative
    // time). Without FUTEX_PRIVATE_FLAG the key is the page of the file, so other processes' mappings match.
    // The kernel does not write to the word: a read-only mapping is enough.
    let rc = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAIT,
            expected,
            &raw const limit,
            0usize,
            0u32,
        )
    };
    if rc == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Wakes all waiters on the word.
pub(crate) fn futex_wake(word: &AtomicU32) -> io::Result<u32> {
    // SAFETY: futex(2) FUTEX_WAKE uses the address only as a key; the word is mapped.
    let woken = unsafe {
        libc::syscall(
            libc::SYS_futex,
            word.as_ptr(),
            libc::FUTEX_WAKE,
            libc::c_int::MAX,
            0usize,
            0usize,
            0u32,
        )
    };
    u32::try_from(woken).map_err(|_| io::Error::last_os_error())
}

/// Converts −1 to the error in errno.
pub(crate) fn check(rc: libc::c_int) -> io::Result<libc::c_int> {
    if rc < 0 { Err(io::Error::last_os_error()) } else { Ok(rc) }
}
