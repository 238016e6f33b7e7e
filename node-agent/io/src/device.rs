//! The file or block device under an engine: opened for direct I/O, locked, sized.
//!
//! The lock (`flock`) lives with the open file description, and an io_uring that registered the file keeps that
//! alive until its last operation has ended. So after `kill -9` the lock also fences out writes of the dead process that
//! are still on their way; that is why opening waits [`LOCK_PATIENCE`] for it, and why no POSIX record lock is used.

use std::fmt;
use std::fs::{File, Metadata, OpenOptions, TryLockError};
use std::io::{self, Seek, SeekFrom};
use std::ops::Range;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::{FileExt, FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use reprise_buffers::PageBuffer;

use crate::error::{Call, IoError, IoErrorKind};
use crate::op::Bounds;
use crate::sys;

/// How long opening waits for a lock: operations of a killed process end within device latencies (milliseconds); what
/// holds longer is a living process.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);

/// Pause between two attempts to lock.
const LOCK_RETRY: Duration = Duration::from_millis(10);

/// One write of an erasure.
const ERASE_BYTES: usize = 1 << 20;

/// Attempts to open a path whose file is removed while they wait for its lock: another starting agent gave up on a file
/// that it had created.
const OPEN_ATTEMPTS_MAX: u32 = 8;

/// What may be done with a [`DeviceFile`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FileAccess {
    /// Reads only; shares the lock with other readers.
    ReadOnly,
    /// Reads only, beside whoever has it open and without a lock, so what is read may change meanwhile: for yardsticks.
    ReadBeside,
    /// Reads and writes; nobody else has it open.
    ReadWrite,
}

/// What [`DeviceFile::open`] does about a path that does not exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Missing {
    /// Refuses.
    Fail,
    /// Creates an empty file, readable and writable by its owner only.
    Create,
}

/// Whether transfers go through the page cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Caching {
    /// O_DIRECT: between device and the span, nothing in between.
    Direct,
    /// The file system refuses O_DIRECT: every byte is copied and kept twice.
    PageCache,
}

/// What [`DeviceFile::preallocate`] achieved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Preallocated {
    /// Space is reserved; writes inside will not run out of it.
    Reserved,
    /// The file system cannot reserve; the file has holes, and writes may run out of space.
    Sparse,
    /// A block device: its size is what it is, and large enough.
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

/// Where the file comes from.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Origin {
    /// It was there, or somebody else has used it since.
    Found,
    /// This opening has created it, and it is empty.
    Created,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Unlocking {
    /// By hand, when dropped.
    AtDrop,
    /// By the kernel, when nobody refers to the open file any more.
    WithLastReference,
}

impl DeviceFile {
    /// Opens and locks a file or block device.
    ///
    /// # Errors
    /// `InUse` when another process has it open, or the kernel uses the block device (mounted, RAID, …);
    /// `Unavailable` when it does not exist, permissions forbid it, or it is neither file nor block device.
    pub fn open(path: &Path, access: FileAccess, missing: Missing) -> Result<DeviceFile, IoError> {
        for _ in 0..OPEN_ATTEMPTS_MAX {
            if let Some(device) = DeviceFile::attempt(path, access, missing)? {
                return Ok(device);
            }
        }
        let text = format!("{} is removed again and again while it is being opened", path.display());
        Err(IoError::new(IoErrorKind::InUse, text))
    }

    /// `None` when the path has come to name another file, or none, until this one was locked.
    fn attempt(path: &Path, access: FileAccess, missing: Missing) -> Result<Option<DeviceFile>, IoError> {
        let opening = || format!("opening {}", path.display());
        let failed = |error| IoError::from_call(Call::Open, opening(), error);
        let may_create = missing == Missing::Create && access == FileAccess::ReadWrite;
        let (block_device, created) = match std::fs::metadata(path) {
            Ok(found) if found.file_type().is_block_device() => (true, Origin::Found),
            Ok(found) if found.is_file() => (false, Origin::Found),
            Ok(_) => {
                let text = format!("{}; give a file or a block device", opening());
                return Err(IoError::new(IoErrorKind::Unavailable, text));
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound && may_create => {
                (false, create(path).map_err(failed)?)
            }
            Err(error) => return Err(failed(error)),
        };
        let mut options = OpenOptions::new();
        options.read(true).write(access == FileAccess::ReadWrite);
        // O_EXCL without O_CREAT on a block device fails while the kernel itself uses it: open(2).
        let flags = if block_device { libc::O_EXCL } else { 0 };
        let (file, caching) = match open_direct(&mut options, path, flags) {
            Ok(opened) => opened,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                let in_use = error.raw_os_error() == Some(libc::EBUSY);
                let hint =
                    if in_use { ": the device is mounted or otherwise in use by the kernel" } else { "" };
                return Err(IoError::from_call(Call::Open, opening() + hint, error));
            }
        };
        lock(&file, path, access)?;
        let (path, unlocking, origin) = (path.to_owned(), Unlocking::AtDrop, Origin::Found);
        let mut device = DeviceFile { file, path, size: 0, access, caching, block_device, origin, unlocking };
        if !device.is_named_by_its_path() {
            return Ok(None);
        }
        device.refresh_size()?;
        // Somebody else may have opened and filled it between creation and lock.
        if device.size == 0 {
            device.origin = created;
        }
        Ok(Some(device))
    }

    /// Closes the file and, if this opening has created it, removes it; what was there before stays. The lock is held
    /// until the file has no name any more, so it is nobody else's pool.
    pub fn discard(self) {
        if self.origin == Origin::Found || !self.is_named_by_its_path() {
            return;
        }
        if let Err(error) = std::fs::remove_file(&self.path) {
            tracing::warn!(path = %self.path.display(), %error, "cannot remove the file that was created");
        }
    }

    /// Reads whole pages, waiting for them: what is to be known of a device before it has an engine.
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

    /// Destroys what is there: all of it reads as zeroes afterwards, durably. The kernel does it where it can; else zeroes are written,
    /// which takes as long as writing the whole device.
    ///
    /// # Errors
    /// Any: some of it may be left.
    pub fn erase(&self) -> Result<(), IoError> {
        self.zero(0..self.size)?;
        self.sync()
    }

    /// Destroys so many of the first and of the last bytes, durably: where others look whose a device is.
    ///
    /// # Errors
    /// Any: some of it may be left.
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
            tracing::info!(path = %self.path.display(), %error, "the kernel cannot zero this; zeroes are written");
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

    /// Makes durable what was written before, by whomever, waiting for it.
    ///
    /// # Errors
    /// `Lost` or another: it is not known what is durable.
    pub fn sync(&self) -> Result<(), IoError> {
        let syncing = || format!("syncing {}", self.path.display());
        self.file.sync_data().map_err(|error| IoError::from_call(Call::Sync, syncing(), error))
    }

    /// Makes the file at least `bytes` long and reserves its space, without writing: what was never written reads as
    /// zeroes. Size and name are durable afterwards. A file that could not be enlarged keeps its size.
    ///
    /// # Errors
    /// `NoSpace` when the file system has less than that available, or the block device is smaller.
    pub fn preallocate(&mut self, bytes: u64) -> Result<Preallocated, IoError> {
        let refuse = |have: u64, what: &str| {
            let text = format!(
                "pool of {bytes} bytes at {}: {what} {have} bytes; free space or configure a smaller pool",
                self.path.display()
            );
            Err(IoError::new(IoErrorKind::NoSpace, text))
        };
        if self.block_device {
            return if self.size >= bytes {
                Ok(Preallocated::Device)
            } else {
                refuse(self.size, "the device has")
            };
        }
        let grow = bytes.saturating_sub(self.size);
        // Asked beforehand: filling a file system to its last block to learn that it is too small hurts its other users.
        let available = sys::available_bytes(self.file.as_fd()).map_err(|e| self.open_error("sizing", e))?;
        if grow > available {
            return refuse(available, "the file system has left");
        }
        let outcome = self.enlarge(bytes).and_then(|outcome| self.make_durable().map(|()| outcome));
        if outcome.is_err() {
            // Gives back what was reserved before it failed; the error that matters is the first.
            let _ = self.file.set_len(self.size);
        }
        self.refresh_size()?;
        outcome
    }

    fn enlarge(&self, bytes: u64) -> Result<Preallocated, IoError> {
        match sys::fallocate(self.file.as_fd(), bytes) {
            Ok(()) => Ok(Preallocated::Reserved),
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => {
                if bytes > self.size {
                    self.file.set_len(bytes).map_err(|e| self.open_error("enlarging", e))?;
                }
                Ok(Preallocated::Sparse)
            }
            Err(error) => Err(self.open_error("reserving space for", error)),
        }
    }

    /// A power loss shall find the file, with its size: fsync(2) wants the directory synced for the name.
    fn make_durable(&self) -> Result<(), IoError> {
        self.file.sync_all().map_err(|e| self.open_error("syncing", e))?;
        let parent = self.path.parent().filter(|parent| !parent.as_os_str().is_empty());
        let directory = File::open(parent.unwrap_or(Path::new(".")));
        directory
            .and_then(|directory| directory.sync_all())
            .map_err(|e| self.open_error("syncing the directory of", e))
    }

    /// Bytes of the file or device, as of opening or the last [`preallocate`](Self::preallocate).
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The path it was opened by.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// How it was opened.
    pub fn access(&self) -> FileAccess {
        self.access
    }

    /// Whether direct I/O is in effect.
    pub fn caching(&self) -> Caching {
        self.caching
    }

    pub(crate) fn bounds(&self) -> Bounds {
        Bounds { size: self.size, access: self.access }
    }

    pub(crate) fn file(&self) -> &File {
        &self.file
    }

    /// For an engine that could not end its operations: the lock stands until the kernel has ended them.
    pub(crate) fn leave_lock_to_operations(&mut self) {
        self.unlocking = Unlocking::WithLastReference;
    }

    /// Whether its path still leads to the file that is open here.
    fn is_named_by_its_path(&self) -> bool {
        let identity = |found: Metadata| (found.dev(), found.ino());
        let (here, there) = (self.file.metadata().map(identity), std::fs::metadata(&self.path).map(identity));
        matches!((here, there), (Ok(here), Ok(there)) if here == there)
    }

    fn refresh_size(&mut self) -> Result<(), IoError> {
        // The end is also where block devices report their size; their st_size is zero.
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
    /// Unlocks by hand: a closed ring gives up its reference to the file some time later, and until then the lock
    /// would stand, though every engine has ended its operations before it drops its file (or said that it could not).
    fn drop(&mut self) {
        if self.unlocking == Unlocking::WithLastReference {
            return;
        }
        if let Err(error) = self.file.unlock() {
            tracing::warn!(path = %self.path.display(), %error, "cannot unlock a pool file");
        }
    }
}

/// Creates an empty file that only its owner can read and write; whatever came to be there meanwhile is as good.
fn create(path: &Path) -> io::Result<Origin> {
    match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
        Ok(_) => Ok(Origin::Created),
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(Origin::Found),
        Err(error) => Err(error),
    }
}

/// Opens with O_DIRECT where the file system has it with a granularity that suits, else without.
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

fn lock(file: &File, path: &Path, access: FileAccess) -> Result<(), IoError> {
    let start = Instant::now();
    loop {
        let attempt = match access {
            FileAccess::ReadWrite => file.try_lock(),
            FileAccess::ReadOnly => file.try_lock_shared(),
            FileAccess::ReadBeside => return Ok(()),
        };
        match attempt {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if start.elapsed() < LOCK_PATIENCE => {
                std::thread::sleep(LOCK_RETRY);
            }
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
