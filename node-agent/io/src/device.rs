//! The file or block device under an engine: opened for direct I/O, locked, sized.
//!
//! The lock (`flock`) lives with the open file description, and an io_uring that registered the file keeps
//! that alive until its last operation has ended. After `kill -9`, the lock therefore also fences writes of
//! the dead process that are still in flight. The same applies to the exclusive claim on a block device
//! (O_EXCL). For this reason opening waits [`HOLDER_PATIENCE`] for both, and no POSIX record lock is used.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

use reprise_buffers::PageBuffer;

use crate::error::{Call, IoError, IoErrorKind};
use crate::op::Bounds;
use crate::sys;

/// How long opening waits until the former holder has released the device. Operations of a killed process end
/// within device latencies: milliseconds, or seconds on an overloaded machine. A longer holder is a living
/// process, or the kernel itself.
pub const HOLDER_PATIENCE: Duration = Duration::from_secs(10);

/// Pause between two attempts to acquire a device.
const HOLDER_RETRY: Duration = Duration::from_millis(10);

/// Explanation of EBUSY after [`HOLDER_PATIENCE`].
const BUSY_DEVICE: &str = ": the device is in use: it is mounted, part of a RAID or volume group, or another process has \
    it open exclusively. Release it, or configure another device";

/// Size of one write of an erasure in bytes.
const ERASE_BYTES: usize = 1 << 20;

/// Held while a file is enlarged: between the check of the file system's space and its reservation.
static PREALLOCATION: Mutex<()> = Mutex::new(());

/// Attempts to open a path whose file is removed while they wait for its lock: another starting agent has
/// discarded a file that it had created.
const OPEN_ATTEMPTS_MAX: u32 = 8;

/// Default share of a file system that pool files leave to others, in thousandths. File systems slow down when
/// they are nearly full.
const RESERVE_PERMILLE: u64 = 50;

/// Minimum of the default reserve: room for the logs and images of a small system disk.
const RESERVE_BYTES_MIN: u64 = 1 << 30;

/// Space that a new or growing file leaves on its file system. Block devices have none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Reserve {
    /// 5 % of the file system, at least 1 GiB.
    #[default]
    Default,
    /// A number of bytes.
    Bytes(u64),
}

impl Reserve {
    /// Returns the reserve on a file system of this size, in bytes.
    pub fn of(self, total_bytes: u64) -> u64 {
        match self {
            Reserve::Default => (total_bytes / 1000 * RESERVE_PERMILLE).max(RESERVE_BYTES_MIN),
            Reserve::Bytes(bytes) => bytes,
        }
    }
}

/// Access to a [`DeviceFile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Reads only; shares the lock with other readers.
    ReadOnly,
    /// Reads only and without a lock, concurrently with other users, so the contents may change: for
    /// benchmarks.
    ReadUnlocked,
    /// Reads and writes, with an exclusive lock.
    ReadWrite,
}

/// Behaviour of [`DeviceFile::open`] for a path that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum IfMissing {
    /// Fails with the error `Unavailable`.
    Fail,
    /// Creates an empty file, readable and writable by its owner only.
    Create,
}

/// Whether transfers go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// O_DIRECT: transfers directly between device and span.
    Direct,
    /// The file system does not support O_DIRECT: every byte is copied and cached a second time.
    PageCache,
}

/// Result of a call of [`DeviceFile::preallocate`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocation {
    /// Space is reserved; writes inside do not run out of space.
    Reserved,
    /// The file system cannot reserve; the file has holes, and writes may run out of space.
    Sparse,
    /// A block device of fixed and sufficient size.
    Device,
}

/// An open, locked file or block device.
pub struct DeviceFile {
    file: File,
    path: PathBuf,
    size: u64,
    access: FileAccess,
    caching: Caching,
    block_device: bool,
    origin: Origin,
    unlocking: Unlocking,
}

/// Origin of the opened file.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It existed, or another process has used it since its creation.
    Existing,
    /// This call has created it, and it is empty.
    Created,
}

/// How the lock is released.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Unlocking {
    /// Explicitly, in the drop.
    AtDrop,
    /// By the kernel, when the last reference to the open file is closed.
    WithLastReference,
}

impl DeviceFile {
    /// Opens and locks a file or block device.
    ///
    /// # Errors
    /// `InUse` when another process has it open, or the kernel uses the block device (mounted, RAID, …).
    /// `Unavailable` when it does not exist, permissions forbid the access, or it is neither a file nor a
    /// block device.
    pub fn open(path: &Path, access: FileAccess, missing: IfMissing) -> Result<DeviceFile, IoError> {
        DeviceFile::open_within(path, (access, missing), HOLDER_PATIENCE)
    }

    /// Opens and locks an existing file or block device for reading and writing, unless it is in use now.
    ///
    /// # Errors
    /// As for [`DeviceFile::open`].
    pub fn open_unless_busy(path: &Path) -> Result<DeviceFile, IoError> {
        DeviceFile::open_within(path, (FileAccess::ReadWrite, IfMissing::Fail), Duration::ZERO)
    }

    /// Like [`DeviceFile::open`], but waits for a former holder for at most `patience`.
    ///
    /// # Errors
    /// As for [`DeviceFile::open`].
    pub fn open_within(
        path: &Path,
        (access, missing): (FileAccess, IfMissing),
        patience: Duration,
    ) -> Result<DeviceFile, IoError> {
        for _ in 0..OPEN_ATTEMPTS_MAX {
            if let Some(device) = DeviceFile::attempt(path, (access, missing), patience)? {
                return Ok(device);
            }
        }
        let text = format!("{} is removed repeatedly while it is being opened", path.display());
        Err(IoError::new(IoErrorKind::InUse, text))
    }

    /// Uses a pool file that the owner of its lock has lent: see [`SharedFile`](crate::SharedFile). It has no path here,
    /// and its lock stays with its owner.
    ///
    /// # Errors
    /// `Unavailable` if the system does not answer, or the file is not open for direct I/O.
    pub fn lent(mut file: File) -> Result<DeviceFile, IoError> {
        let failed = |error| IoError::from_call(Call::Open, "using a lent file".to_owned(), error);
        if !sys::is_direct(file.as_fd()).map_err(failed)? {
            let text = "using a lent file: it is not open for direct I/O";
            return Err(IoError::new(IoErrorKind::Unavailable, text));
        }
        let size = file.seek(SeekFrom::End(0)).map_err(failed)?;
        let block_device = file.metadata().map_err(failed)?.file_type().is_block_device();
        Ok(DeviceFile {
            file,
            path: PathBuf::from("lent"),
            size,
            access: FileAccess::ReadWrite,
            caching: Caching::Direct,
            block_device,
            origin: Origin::Existing,
            unlocking: Unlocking::WithLastReference,
        })
    }

    /// One attempt; `None` when the path no longer names the opened file once its lock is acquired.
    fn attempt(
        path: &Path,
        (access, missing): (FileAccess, IfMissing),
        patience: Duration,
    ) -> Result<Option<DeviceFile>, IoError> {
        let opening = || format!("opening {}", path.display());
        let failed = |error| IoError::from_call(Call::Open, opening(), error);
        let may_create = missing == IfMissing::Create && access == FileAccess::ReadWrite;
        let (block_device, created) = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => (true, Origin::Existing),
            Ok(found) if found.is_file() => (false, Origin::Existing),
            Ok(_) => {
                let text = format!("{}; expected a file or a block device", opening());
                return Err(IoError::new(IoErrorKind::Unavailable, text));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => {
                (false, create(path).map_err(failed)?)
            }
            Err(error) => return Err(failed(error)),
        };
        let mut options = OpenOptions::new();
        options.read(true).write(access == FileAccess::ReadWrite);
        // O_EXCL without O_CREAT on a block device fails while the kernel or another process has it
        // exclusively: open(2).
        let flags = if block_device { libc::O_EXCL } else { 0 };
        let patience = Patience { start: Instant::now(), limit: patience };
        let (file, caching) = loop {
            match open_direct(&mut options, path, flags) {
                Ok(opened) => break opened,
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
                Err(error) if error.raw_os_error() == Some(libc::EBUSY) => {
                    if !patience.pause() {
                        return Err(IoError::from_call(Call::Open, opening() + BUSY_DEVICE, error));
                    }
                }
                Err(error) => return Err(failed(error)),
            }
        };
        lock(&file, path, access, &patience)?;
        let (path, unlocking, origin) = (path.to_owned(), Unlocking::AtDrop, Origin::Existing);
        let mut device = DeviceFile { file, path, size: 0, access, caching, block_device, origin, unlocking };
        if !device.is_named_by_its_path() {
            return Ok(None);
        }
        device.refresh_size()?;
        // Another process may have opened and filled it between creation and lock.
        if device.size == 0 {
            device.origin = created;
        }
        Ok(Some(device))
    }

    /// Closes the file and removes it if this process has created it; an existing file stays. The lock is
    /// held until the file has no name, so no other process can have started to use it as its pool.
    pub fn discard(self) {
        if self.origin == Origin::Existing || !self.is_named_by_its_path() {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the created file");
        }
    }

    /// Reads whole pages synchronously; for checks of a device before it has an engine.
    ///
    /// # Errors
    /// `Media`, `Lost`, or `ShortTransfer` beyond the end.
    pub fn read(&self, offset: u64, into: &mut PageBuffer) -> Result<(), IoError> {
        let bytes = into.len();
        let reading = || format!("reading {bytes} bytes at {offset} of {}", self.path.display());
        match self.file.read_exact_at(&mut into[..], offset) {
            Ok(()) => Ok(()),
            Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => {
                Err(IoError::new(IoErrorKind::ShortTransfer, reading()))
            }
            Err(error) => Err(IoError::from_call(Call::Transfer, reading(), error)),
        }
    }

    /// Erases the contents: everything reads as zeroes afterwards, durably. Uses the kernel's zeroing where
    /// supported; otherwise writes zeroes, which takes as long as writing the whole device.
    ///
    /// # Errors
    /// Any; a part of the contents may remain.
    pub fn erase(&self) -> Result<(), IoError> {
        self.zero(0..self.size)?;
        self.sync()
    }

    /// Erases the first and the last `bytes` bytes, durably: other programs identify a device by these
    /// ranges.
    ///
    /// # Errors
    /// Any; a part of the contents may remain.
    pub fn erase_ends(&self, bytes: u64) -> Result<(), IoError> {
        let first = bytes.min(self.size);
        self.zero(0..first)?;
        self.zero(self.size.saturating_sub(bytes).max(first)..self.size)?;
        self.sync()
    }

    fn zero(&self, range: Range<u64>) -> Result<(), IoError> {
        if range.is_empty() {
            return Ok(());
        }
        if let Err(error) = sys::zero(self.file.as_fd(), range.clone()) {
            tracing::info!(path = %self.path.display(), %error, "the kernel cannot zero the range, writing zeroes");
            self.write_zeroes(range)?;
        }
        Ok(())
    }

    fn write_zeroes(&self, range: Range<u64>) -> Result<(), IoError> {
        let erasing = || format!("erasing {}", self.path.display());
        let no_memory = |_| IoError::new(IoErrorKind::Busy, erasing());
        let zeroes = PageBuffer::new(ERASE_BYTES).map_err(no_memory)?;
        let mut offset = range.start;
        while offset < range.end {
            let bytes = usize::try_from(range.end - offset).unwrap_or(ERASE_BYTES).min(ERASE_BYTES);
            let written = self.file.write_all_at(&zeroes[..bytes], offset);
            written.map_err(|error| IoError::from_call(Call::Transfer, erasing(), error))?;
            offset += bytes as u64;
        }
        Ok(())
    }

    /// Makes all earlier writes durable, by any process, and waits for it.
    ///
    /// # Errors
    /// `Lost` or another: it is then unknown which writes are durable.
    pub fn sync(&self) -> Result<(), IoError> {
        let syncing = || format!("syncing {}", self.path.display());
        self.file.sync_data().map_err(|error| IoError::from_call(Call::Sync, syncing(), error))
    }

    /// Makes the file at least `bytes` long and reserves its space without writing; unwritten space reads as
    /// zeroes. Size and name are durable afterwards. A file that cannot be enlarged keeps its size. The file
    /// system keeps at least `reserve` available for others.
    ///
    /// # Errors
    /// `NoSpace` when the file system has less than that available, or the block device is smaller.
    pub fn preallocate(&mut self, bytes: u64, reserve: Reserve) -> Result<Preallocation, IoError> {
        let refuse = |reason: String| {
            let text = format!("pool of {bytes} bytes at {}: {reason}", self.path.display());
            Err(IoError::new(IoErrorKind::NoSpace, text))
        };
        if self.block_device {
            return if self.size >= bytes {
                Ok(Preallocation::Device)
            } else {
                refuse(format!("the device has only {} bytes; configure a smaller pool", self.size))
            };
        }
        // Devices are opened in parallel: two files must not use the same space.
        let _one = PREALLOCATION.lock().unwrap_or_else(PoisonError::into_inner);
        let grow = bytes.saturating_sub(self.size);
        // Check beforehand: filling the file system to its last block only to learn its size would disturb
        // its other users.
        let space = sys::space(self.file.as_fd()).map_err(|e| self.open_error("sizing", e))?;
        let (available, reserved) = (space.available_bytes, reserve.of(space.total_bytes));
        if grow > 0 && grow.saturating_add(reserved) > available {
            let possible = self.size + available.saturating_sub(reserved);
            return refuse(format!(
                "the file system has only {available} of {} bytes available, and {reserved} of them stay reserved for \
                 others, so the pool can have at most {possible} bytes; free space, configure a smaller pool, or lower \
                 the reserve (pool.reserve_bytes in the configuration file, directory.reserve in an SSDPool)",
                space.total_bytes
            ));
        }
        let outcome = self.enlarge(bytes).and_then(|outcome| self.make_durable().map(|()| outcome));
        if outcome.is_err() {
            // Releases the space that was reserved before the failure; only the first error matters.
            let _ = self.file.set_len(self.size);
        }
        self.refresh_size()?;
        outcome
    }

    fn enlarge(&self, bytes: u64) -> Result<Preallocation, IoError> {
        match sys::fallocate(self.file.as_fd(), bytes) {
            Ok(()) => Ok(Preallocation::Reserved),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                if bytes > self.size {
                    self.file.set_len(bytes).map_err(|e| self.open_error("enlarging", e))?;
                }
                Ok(Preallocation::Sparse)
            }
            Err(error) => Err(self.open_error("reserving space for", error)),
        }
    }

    /// Makes file and size survive a power loss: fsync(2) requires a sync of the directory for the name.
    fn make_durable(&self) -> Result<(), IoError> {
        self.file.sync_all().map_err(|e| self.open_error("syncing", e))?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = File::open(parent.unwrap_or(Path::new(".")));
        directory
            .and_then(|directory| directory.sync_all())
            .map_err(|e| self.open_error("syncing the directory of", e))
    }

    /// Returns the size in bytes, as of opening or the last [`preallocate`](Self::preallocate).
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns the path that was opened.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the access mode.
    pub fn access(&self) -> FileAccess {
        self.access
    }

    /// Reports whether this is a block device and not a file.
    pub fn is_block_device(&self) -> bool {
        self.block_device
    }

    /// Reports whether direct I/O is in effect.
    pub fn caching(&self) -> Caching {
        self.caching
    }

    pub(crate) fn bounds(&self) -> Bounds {
        Bounds { size: self.size, access: self.access }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// For an engine that could not end its operations: keeps the lock until the kernel has ended them.
    pub(crate) fn keep_lock_until_operations_end(&mut self) {
        self.unlocking = Unlocking::WithLastReference;
    }

    /// Reports whether the path still names the opened file.
    fn is_named_by_its_path(&self) -> bool {
        let identity = |found: Metadata| (found.dev(), found.ino());
        let (here, there) = (self.file.metadata().map(identity), std::fs::metadata(&self.path).map(identity));
        matches!((here, there), (Ok(here), Ok(there)) if here == there)
    }

    fn refresh_size(&mut self) -> Result<(), IoError> {
        // Block devices report their size as the end of the file; their st_size is zero.
        self.size = self.file.seek(SeekFrom::End(0)).map_err(|error| self.open_error("sizing", error))?;
        Ok(())
    }

    fn open_error(&self, doing: &str, source: io::Error) -> IoError {
        IoError::from_call(Call::Open, format!("{doing} {}", self.path.display()), source)
    }
}

impl AsFd for DeviceFile {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

impl fmt::Debug for DeviceFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut text = f.debug_struct("DeviceFile");
        text.field("path", &self.path).field("size", &self.size).field("caching", &self.caching);
        text.finish_non_exhaustive()
    }
}

impl Drop for DeviceFile {
    /// Unlocks explicitly. A closed ring drops its reference to the file some time later, and would hold the
    /// lock until then, although every engine has ended its operations before it drops its file (or has
    /// called `keep_lock_until_operations_end`).
    fn drop(&mut self) {
        if self.unlocking == Unlocking::WithLastReference {
            return;
        }
        if let Err(error) = self.file.unlock() {
            tracing::warn!(path = %self.path.display(), %error, "cannot unlock a pool file");
        }
    }
}

/// Creates an empty file that only its owner can read and write. A file that another process created
/// meanwhile is accepted.
fn create(path: &Path) -> io::Result<Origin> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => Ok(Origin::Created),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Origin::Existing),
        Err(error) => Err(error),
    }
}

/// Opens with O_DIRECT if the file system supports it with a suitable granularity, otherwise without.
fn open_direct(options: &mut OpenOptions, path: &Path, flags: i32) -> io::Result<(File, Caching)> {
    match options.custom_flags(flags | libc::O_DIRECT).open(path) {
        Ok(file) if sys::direct_alignment_fits(file.as_fd()) != Some(false) => {
            return Ok((file, Caching::Direct));
        }
        Ok(too_coarse) => drop(too_coarse),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => {}
        Err(error) => return Err(error),
    }
    options.custom_flags(flags).open(path).map(|file| (file, Caching::PageCache))
}

/// Time that is left for a former holder to release a device.
struct Patience {
    start: Instant,
    limit: Duration,
}

impl Patience {
    /// Waits until the next attempt is due; false once the time has passed.
    fn pause(&self) -> bool {
        let has_time = self.start.elapsed() < self.limit;
        if has_time {
            std::thread::sleep(HOLDER_RETRY);
        }
        has_time
    }
}

fn lock(file: &File, path: &Path, access: FileAccess, patience: &Patience) -> Result<(), IoError> {
    loop {
        let attempt = match access {
            FileAccess::ReadWrite => file.try_lock(),
            FileAccess::ReadOnly => file.try_lock_shared(),
            FileAccess::ReadUnlocked => return Ok(()),
        };
        match attempt {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if patience.pause() => {}
            Err(TryLockError::WouldBlock) => {
                let text = format!(
                    "{} is locked by another process; two agents cannot share a pool: stop the other one or configure another path",
                    path.display()
                );
                return Err(IoError::new(IoErrorKind::InUse, text));
            }
            Err(TryLockError::Error(error)) => {
                return Err(IoError::from_call(Call::Open, format!("locking {}", path.display()), error));
            }
        }
    }
}
