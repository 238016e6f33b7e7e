//! Decides when errors of single operations mean that a device rejects writes, or is lost.
//!
//! A medium error affects one block. [`ERRORS_MAX`] of them within [`ERROR_WINDOW`] end writing if they are
//! errors of writes, and the use of the device if they are errors of reads. A device without space, or one
//! that is read-only, ends writing at once: durable blocks are still read. Other errors that the device
//! reports as fatal count as loss immediately, and so does a failed sync, after which the state of written
//! data is unknown (fsync(2)). Lack of kernel memory is not counted.

use std::time::{Duration, Instant};

use reprise_agent_core::pool::DeviceError;
use reprise_io::{IoError, IoErrorKind};

/// Number of errors within a window at which writing or the use of the device ends.
const ERRORS_MAX: u32 = 16;

/// Length of the window.
const ERROR_WINDOW: Duration = Duration::from_secs(60);

/// Kind of an operation, as far as the consequences of its errors differ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    Write,
    Sync,
}

/// Error counters of a device.
#[derive(Debug, Default)]
pub(super) struct Health {
    writes: ErrorWindow,
    others: ErrorWindow,
}

/// Number of errors in the current window.
#[derive(Debug, Default)]
struct ErrorWindow {
    errors: u32,
    start: Option<Instant>,
}

impl ErrorWindow {
    /// Counts an error; returns the number of errors in the window.
    fn count(&mut self) -> u32 {
        let now = Instant::now();
        if self.start.is_none_or(|start| now.duration_since(start) > ERROR_WINDOW) {
            (self.start, self.errors) = (Some(now), 0);
        }
        self.errors += 1;
        self.errors
    }
}

impl Health {
    /// Classifies an error, and logs it unless it ends writing or the use of the device.
    pub(super) fn judge(&mut self, access: Access, error: &IoError, path: &str) -> DeviceError {
        let fatal = match error.kind() {
            IoErrorKind::Busy => {
                tracing::warn!(path, %error, "the device rejected an operation");
                return DeviceError::Refused;
            }
            // A range beyond the end or a wrong alignment comes from a damaged record and affects only that
            // block.
            IoErrorKind::Media | IoErrorKind::ShortTransfer | IoErrorKind::Invalid => false,
            IoErrorKind::NoSpace | IoErrorKind::ReadOnly if access == Access::Write => {
                return DeviceError::Unwritable;
            }
            IoErrorKind::Lost
            | IoErrorKind::ReadOnly
            | IoErrorKind::NoSpace
            | IoErrorKind::InUse
            | IoErrorKind::Unavailable
            | IoErrorKind::Unsupported
            | IoErrorKind::NoEngine => true,
        };
        let window = if access == Access::Write { &mut self.writes } else { &mut self.others };
        match (window.count() >= ERRORS_MAX, access) {
            _ if fatal => DeviceError::Lost,
            (true, Access::Write) => DeviceError::Unwritable,
            (true, Access::Read | Access::Sync) => DeviceError::Lost,
            (false, _) => {
                tracing::warn!(path, %error, "device error");
                DeviceError::Media
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(health: &mut Health, access: Access, kind: IoErrorKind) -> DeviceError {
        health.judge(access, &IoError::new(kind, "test"), "device")
    }

    #[test]
    fn medium_errors_are_counted_and_lack_of_memory_is_not() {
        for (access, end) in [(Access::Read, DeviceError::Lost), (Access::Write, DeviceError::Unwritable)] {
            let mut health = Health::default();
            for _ in 0..10 * ERRORS_MAX {
                assert_eq!(judge(&mut health, access, IoErrorKind::Busy), DeviceError::Refused);
            }
            for _ in 1..ERRORS_MAX {
                assert_eq!(judge(&mut health, access, IoErrorKind::Media), DeviceError::Media);
            }
            assert_eq!(judge(&mut health, access, IoErrorKind::Media), end);
        }
    }

    #[test]
    fn errors_of_writes_do_not_count_as_errors_of_reads() {
        let mut health = Health::default();
        for _ in 0..10 * ERRORS_MAX {
            judge(&mut health, Access::Write, IoErrorKind::Media);
        }
        assert_eq!(judge(&mut health, Access::Read, IoErrorKind::Media), DeviceError::Media);
    }

    #[test]
    fn full_or_read_only_device_ends_writing_and_a_missing_one_its_use() {
        for kind in [IoErrorKind::NoSpace, IoErrorKind::ReadOnly] {
            assert_eq!(judge(&mut Health::default(), Access::Write, kind), DeviceError::Unwritable);
            assert_eq!(judge(&mut Health::default(), Access::Sync, kind), DeviceError::Lost);
        }
        for access in [Access::Read, Access::Write, Access::Sync] {
            assert_eq!(judge(&mut Health::default(), access, IoErrorKind::Lost), DeviceError::Lost);
        }
    }
}
