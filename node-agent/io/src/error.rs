//! The error of this crate: kind (remedy), context (operation), source (the system's error).

use std::borrow::Cow;
use std::fmt;
use std::io;

/// Kind of an [`IoError`], by remedy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum IoErrorKind {
    /// This place of the medium cannot be read or written; others can. Stop using the place.
    Media,
    /// The kernel repeatedly had no memory or resources for the operation. The place is intact: try later.
    Busy,
    /// The device accepts no writes: its file system or the device itself is read-only. Stop writing.
    ReadOnly,
    /// The device is gone or otherwise unusable. Stop using the device.
    Lost,
    /// The file system or the device is full. Free space or configure a smaller size.
    NoSpace,
    /// The operation violates the rules of [`Op`](crate::Op) or lies outside the device. Fix the caller.
    Invalid,
    /// The file ended inside the range: it was truncated. Treat the range as lost.
    ShortTransfer,
    /// Another process uses the file or device. Stop that process or configure another path.
    InUse,
    /// The path cannot be opened as requested. Fix the path or its permissions.
    Unavailable,
    /// The kernel does not support the engine. Use another engine.
    Unsupported,
    /// No engine of this build serves this kind of device. Configure a device of another kind.
    NoEngine,
}

impl fmt::Display for IoErrorKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            IoErrorKind::Media => "media error",
            IoErrorKind::Busy => "no resources in the kernel",
            IoErrorKind::ReadOnly => "read-only",
            IoErrorKind::Lost => "device lost",
            IoErrorKind::NoSpace => "no space",
            IoErrorKind::Invalid => "invalid operation",
            IoErrorKind::ShortTransfer => "file shorter than its pool",
            IoErrorKind::InUse => "in use",
            IoErrorKind::Unavailable => "cannot be opened",
            IoErrorKind::Unsupported => "not supported by this kernel",
            IoErrorKind::NoEngine => "no I/O engine serves this kind of device",
        })
    }
}

/// A failed operation on a device file, or a failed attempt to open one.
#[derive(Debug, thiserror::Error)]
#[error("{context}: {kind}{}", SourceText(.source))]
pub struct IoError {
    kind: IoErrorKind,
    context: Cow<'static, str>,
    source: Option<io::Error>,
}

/// System call family of an errno: the meaning of an errno differs between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    /// `open`, `flock`, `fallocate`, `stat`.
    Open,
    /// A read or write.
    Transfer,
    /// The system call `fdatasync`.
    Sync,
}

struct SourceText<'a>(&'a Option<io::Error>);

impl fmt::Display for SourceText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Some(source) => write!(f, " ({source})"),
            None => Ok(()),
        }
    }
}

impl IoError {
    /// Creates an error that no system call reported.
    pub fn new(kind: IoErrorKind, context: impl Into<Cow<'static, str>>) -> IoError {
        IoError { kind, context: context.into(), source: None }
    }

    pub(crate) fn with_source(
        kind: IoErrorKind,
        context: impl Into<Cow<'static, str>>,
        source: io::Error,
    ) -> IoError {
        IoError { kind, context: context.into(), source: Some(source) }
    }

    /// Creates the error of a system call; its errno determines the kind.
    pub(crate) fn from_call(call: Call, context: impl Into<Cow<'static, str>>, source: io::Error) -> IoError {
        IoError::with_source(kind_of(call, &source), context, source)
    }

    /// Returns the kind of the error.
    pub fn kind(&self) -> IoErrorKind {
        self.kind
    }
}

/// Classifies an errno. The block layer's own mapping is the table `blk_errors` in the kernel's
/// `block/blk-core.c`.
fn kind_of(call: Call, source: &io::Error) -> IoErrorKind {
    let Some(errno) = source.raw_os_error() else {
        return if call == Call::Open { IoErrorKind::Unavailable } else { IoErrorKind::Lost };
    };
    match errno {
        libc::ENOSPC | libc::EDQUOT | libc::EFBIG => IoErrorKind::NoSpace,
        libc::EBUSY | libc::ETXTBSY if call == Call::Open => IoErrorKind::InUse,
        _ if call == Call::Open => IoErrorKind::Unavailable,
        // After a failed sync it is unknown which writes are durable, and the kernel reports the error only
        // once: treat the whole device as lost.
        _ if call == Call::Sync => IoErrorKind::Lost,
        libc::EROFS => IoErrorKind::ReadOnly,
        libc::EIO | libc::ENODATA | libc::EILSEQ | libc::EUCLEAN => IoErrorKind::Media,
        // One command that timed out or was lost on its way (a reset controller, a path that failed over)
        // does not prove a broken device. Many of them do, so the user of the device must count them.
        libc::ETIMEDOUT | libc::ETIME | libc::ENOLINK | libc::EREMOTEIO => IoErrorKind::Media,
        _ if is_transient(source) => IoErrorKind::Busy,
        libc::EINVAL | libc::EFAULT => IoErrorKind::Invalid,
        _ => IoErrorKind::Lost,
    }
}

/// Reports whether a failed read or write may be repeated at once, because the place is intact. Never for a
/// sync, which may have dropped the data that it could not write.
pub(crate) fn is_transient(source: &io::Error) -> bool {
    matches!(source.raw_os_error(), Some(libc::ENOMEM | libc::EAGAIN | libc::EINTR | libc::EBUSY))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kind(call: Call, errno: i32) -> IoErrorKind {
        IoError::from_call(call, "reading", io::Error::from_raw_os_error(errno)).kind()
    }

    #[test]
    fn distinguishes_a_media_error_from_a_lost_device() {
        assert_eq!(kind(Call::Transfer, libc::EIO), IoErrorKind::Media);
        assert_eq!(kind(Call::Transfer, libc::ENODATA), IoErrorKind::Media);
        assert_eq!(kind(Call::Transfer, libc::ENODEV), IoErrorKind::Lost);
        assert_eq!(kind(Call::Transfer, libc::EROFS), IoErrorKind::ReadOnly);
        assert_eq!(kind(Call::Transfer, libc::ENOSPC), IoErrorKind::NoSpace);
    }

    #[test]
    fn a_timed_out_command_or_lack_of_memory_does_not_lose_the_device() {
        for errno in [libc::ETIMEDOUT, libc::ETIME, libc::ENOLINK, libc::EREMOTEIO] {
            assert_eq!(kind(Call::Transfer, errno), IoErrorKind::Media);
        }
        for errno in [libc::ENOMEM, libc::EAGAIN, libc::EINTR, libc::EBUSY] {
            assert_eq!(kind(Call::Transfer, errno), IoErrorKind::Busy);
            assert_eq!(kind(Call::Sync, errno), IoErrorKind::Lost);
        }
    }

    #[test]
    fn a_file_system_that_forbids_writing_is_unavailable() {
        assert_eq!(kind(Call::Open, libc::EROFS), IoErrorKind::Unavailable);
        assert_eq!(kind(Call::Open, libc::EACCES), IoErrorKind::Unavailable);
    }

    #[test]
    fn a_failed_sync_loses_the_device_for_any_errno() {
        assert_eq!(kind(Call::Sync, libc::EIO), IoErrorKind::Lost);
        assert_eq!(kind(Call::Sync, libc::ENOSPC), IoErrorKind::NoSpace);
    }

    #[test]
    fn the_text_has_context_kind_and_system_error() {
        let error =
            IoError::from_call(Call::Open, "opening pool.dat", io::Error::from_raw_os_error(libc::ENOENT));
        let text = error.to_string();
        assert!(text.starts_with("opening pool.dat: cannot be opened (No such file"), "{text}");
    }
}
