//! When errors of single operations add up to a lost device.
//!
//! A bad place of the medium is one error; a device that gives [`ERRORS_MAX`] of them within [`ERROR_WINDOW`] is no
//! longer worth asking. What the device itself calls fatal is fatal at once, and so is a failed sync: fsync(2) leaves
//! nothing certain then. Want of memory in the kernel is nobody's fault and not counted.

use std::time::{Duration, Instant};

use reprise_agent_core::pool::DeviceError;
use reprise_io::{IoError, IoErrorKind};

/// Errors that a device may have per window.
const ERRORS_MAX: u32 = 16;

/// A window.
const ERROR_WINDOW: Duration = Duration::from_secs(60);

/// Counts errors.
#[derive(Debug, Default)]
pub(super) struct Health {
    errors: u32,
    window: Option<Instant>,
}

impl Health {
    /// What an error means for the device; logs it.
    pub(super) fn judge(&mut self, error: &IoError, path: &str) -> DeviceError {
        let fatal = match error.kind() {
            IoErrorKind::Busy => {
                tracing::warn!(path, %error, "an operation of the device was not taken");
                return DeviceError::Refused;
            }
            // A range beyond the end or a wrong alignment comes from a damaged record: that block's fault.
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
    fn errors_of_places_add_up_and_want_of_memory_does_not() {
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
    fn what_the_device_calls_fatal_is_fatal_at_once() {
        for kind in [IoErrorKind::Lost, IoErrorKind::NoSpace] {
            assert_eq!(judge(&mut Health::default(), kind), DeviceError::Lost);
        }
    }
}
