//! Decides when errors of single operations mean that the device is lost.
//!
//! A medium error affects one block; [`ERRORS_MAX`] of them within [`ERROR_WINDOW`] make the device lost.
//! Errors that the device reports as fatal count immediately, and so does a failed sync, after which the
//! state of written data is unknown (fsync(2)). Lack of kernel memory is not counted.

use std::time::{Duration, Instant};

use reprise_agent_core::pool::DeviceError;
use reprise_io::{IoError, IoErrorKind};

/// Number of errors within a window at which the device is lost.
const ERRORS_MAX: u32 = 16;

/// Length of the window.
const ERROR_WINDOW: Duration = Duration::from_secs(60);

/// Error counter of a device.
#[derive(Debug, Default)]
pub(super) struct Health {
    errors: u32,
    window: Option<Instant>,
}

impl Health {
    /// Classifies and logs an error.
    pub(super) fn judge(&mut self, error: &IoError, path: &str) -> DeviceError {
        let fatal = match error.kind() {
            IoErrorKind::Busy => {
                tracing::warn!(path, %error, "the device rejected an operation");
                return DeviceError::Refused;
            }
            // A range beyond the end or a wrong alignment comes from a damaged record and affects only that
            // block.
            IoErrorKind::Media | IoErrorKind::ShortTransfer | IoErrorKind::Invalid => false,
            IoErrorKind::Lost
            | IoErrorKind::NoSpace
            | IoErrorKind::InUse
            | IoErrorKind::Unavailable
            | IoErrorKind::Unsupported => true,
        };
        let now = Instant::now();
        if self.window.is_none_or(|start| now.duration_since(start) > ERROR_WINDOW) {
            (self.window, self.errors) = (Some(now), 0);
        }
        self.errors += 1;
        if fatal || self.errors >= ERRORS_MAX {
            return DeviceError::Lost;
        }
        tracing::warn!(path, %error, "device error");
        DeviceError::Media
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn judge(health: &mut Health, kind: IoErrorKind) -> DeviceError {
        health.judge(&IoError::new(kind, "test"), "device")
    }

    #[test]
    fn medium_errors_are_counted_and_lack_of_memory_is_not() {
        let mut health = Health::default();
        for _ in 0..10 * ERRORS_MAX {
            assert_eq!(judge(&mut health, IoErrorKind::Busy), DeviceError::Refused);
        }
        for _ in 1..ERRORS_MAX {
            assert_eq!(judge(&mut health, IoErrorKind::Media), DeviceError::Media);
        }
        assert_eq!(judge(&mut health, IoErrorKind::Media), DeviceError::Lost);
    }

    #[test]
    fn fatal_errors_make_the_device_lost_immediately() {
        for kind in [IoErrorKind::Lost, IoErrorKind::NoSpace] {
            assert_eq!(judge(&mut Health::default(), kind), DeviceError::Lost);
        }
    }
}
