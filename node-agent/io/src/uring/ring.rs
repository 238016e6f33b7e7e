//! The ring: set up in the best mode that the kernel supports, entered with timeouts.
//!
//! The ring starts disabled and is enabled by the thread that first enters it: that thread becomes the single
//! issuer (io_uring_setup(2), IORING_SETUP_SINGLE_ISSUER with IORING_SETUP_R_DISABLED), so an engine may be
//! opened on one thread and used on another.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd};
use std::time::Duration;

use io_uring::types::{SubmitArgs, Timespec};
use io_uring::{IoUring, Probe, opcode, squeue};

use crate::error::{IoError, IoErrorKind};
use crate::probe::RingMode;

/// Index of the device in the registered files.
pub(crate) const FILE_DEVICE: u32 = 0;

/// Index of the doorbell's eventfd in the registered files.
pub(crate) const FILE_BELL: u32 = 1;

/// Longest single wait: far below the limits of the kernel's clocks. An early return is harmless.
const ENTER_LIMIT: Duration = Duration::from_secs(3600);

/// Operation codes that the engine uses.
const OPCODES: [u8; 7] = [
    opcode::Read::CODE,
    opcode::Write::CODE,
    opcode::ReadFixed::CODE,
    opcode::WriteFixed::CODE,
    opcode::Readv::CODE,
    opcode::Writev::CODE,
    opcode::Fsync::CODE,
];

/// A ring and its mode.
pub(crate) struct Ring {
    pub(crate) uring: IoUring,
    pub(crate) mode: RingMode,
    enabled: RingState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum RingState {
    /// No thread has entered the ring.
    NotYet,
    Yes,
}

/// Result of a call of [`Ring::enter`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum EnterOutcome {
    /// Submitted, and the requested number of operations completed, or the kernel returned earlier.
    Returned,
    /// The timeout has passed.
    TimedOut,
}

/// What [`Ring::enter`] waits for.
#[derive(Clone, Copy, Debug)]
pub(crate) enum EnterWait {
    No,
    /// One completion, for at most this long.
    One(Duration),
}

impl Ring {
    /// Sets up a ring for `capacity` operations and one read of the doorbell.
    ///
    /// # Errors
    /// `Unsupported` with the rejected step.
    pub(crate) fn set_up(capacity: usize) -> Result<Ring, IoError> {
        // Each operation has one entry at a time, so neither queue overflows (the completion queue has twice
        // the entries).
        let entries = u32::try_from(capacity + 1).unwrap_or(u32::MAX).next_power_of_two();
        let (uring, mode) = build(entries).map_err(|error| refused("io_uring_setup", error))?;
        if !uring.params().is_feature_ext_arg() {
            let text = "io_uring lacks waits with a timeout (needs Linux 5.11)";
            return Err(IoError::new(IoErrorKind::Unsupported, text));
        }
        let mut probe = Probe::new();
        uring.submitter().register_probe(&mut probe).map_err(|error| refused("probing io_uring", error))?;
        if let Some(code) = OPCODES.into_iter().find(|code| !probe.is_supported(*code)) {
            let text = format!("io_uring lacks operation {code}");
            return Err(IoError::new(IoErrorKind::Unsupported, text));
        }
        Ok(Ring { uring, mode, enabled: RingState::NotYet })
    }

    /// Registers the device and the doorbell as [`FILE_DEVICE`] and [`FILE_BELL`].
    pub(crate) fn register_files(&self, device: BorrowedFd<'_>, bell: BorrowedFd<'_>) -> Result<(), IoError> {
        let files = [device.as_raw_fd(), bell.as_raw_fd()];
        self.uring.submitter().register_files(&files).map_err(|error| refused("registering files", error))
    }

    /// Queues an entry; it starts with the next [`enter`](Self::enter).
    ///
    /// # Safety
    /// The memory of the entry must stay valid until its completion has been reaped.
    pub(crate) unsafe fn push(&mut self, entry: &squeue::Entry) {
        // SAFETY: passed on to the caller.
        let pushed = unsafe { self.uring.submission().push(entry) };
        pushed.expect("set_up made room for one entry of each operation and the doorbell");
    }

    /// Reports whether [`enter`](Self::enter) has work apart from waiting.
    pub(crate) fn wants_entering(&mut self) -> bool {
        let queue = self.uring.submission();
        !queue.is_empty() || queue.taskrun() || queue.cq_overflow()
    }

    /// Starts pushed operations, collects completions, and waits.
    ///
    /// # Errors
    /// `Invalid` when another thread owns the ring, `Lost` for errors from which the ring does not recover.
    pub(crate) fn enter(&mut self, wait: EnterWait) -> Result<EnterOutcome, IoError> {
        if self.enabled == RingState::NotYet {
            let enabled = self.uring.submitter().register_enable_rings();
            enabled.map_err(|error| IoError::with_source(IoErrorKind::Lost, "enabling io_uring", error))?;
            self.enabled = RingState::Yes;
        }
        let submitter = self.uring.submitter();
        let result = match wait {
            EnterWait::No => submitter.submit(),
            EnterWait::One(limit) => {
                let limit = Timespec::from(limit.min(ENTER_LIMIT));
                submitter.submit_with_args(1, &SubmitArgs::new().timespec(&limit))
            }
        };
        match result.map_err(|error| (error.raw_os_error(), error)) {
            Ok(_) => Ok(EnterOutcome::Returned),
            Err((Some(libc::ETIME), _)) => Ok(EnterOutcome::TimedOut),
            // Interrupted, or short of memory for requests: io_uring_enter(2) requires to reap and call
            // again.
            Err((Some(libc::EINTR | libc::EAGAIN | libc::EBUSY), _)) => Ok(EnterOutcome::Returned),
            Err((Some(libc::EEXIST), error)) => {
                let text = "invalid thread: an io_uring engine belongs to the thread that used it first";
                Err(IoError::with_source(IoErrorKind::Invalid, text, error))
            }
            Err((_, error)) => Err(IoError::with_source(IoErrorKind::Lost, "entering io_uring", error)),
        }
    }
}

/// Builds a ring, in the best mode first. Completions are processed when the engine asks for them, in
/// batches, instead of interrupting it (DEFER_TASKRUN, Linux 6.1), or at least without inter-processor
/// interrupts (COOP_TASKRUN, 5.19).
fn build(entries: u32) -> io::Result<(IoUring, RingMode)> {
    let mut builder = IoUring::builder();
    builder.dontfork().setup_clamp().setup_r_disabled();
    let mut deferred = builder.clone();
    deferred.setup_submit_all().setup_single_issuer().setup_defer_taskrun().setup_taskrun_flag();
    if let Ok(uring) = deferred.build(entries) {
        return Ok((uring, RingMode::DeferredTaskRun));
    }
    let mut cooperative = builder.clone();
    cooperative.setup_submit_all().setup_coop_taskrun().setup_taskrun_flag();
    if let Ok(uring) = cooperative.build(entries) {
        return Ok((uring, RingMode::CooperativeTaskRun));
    }
    builder.build(entries).map(|uring| (uring, RingMode::Interrupting))
}

fn refused(what: &str, error: io::Error) -> IoError {
    let hint = match error.raw_os_error() {
        Some(libc::EPERM | libc::EACCES) => {
            " (see kernel.io_uring_disabled and the container's seccomp profile)"
        }
        Some(libc::ENOSYS) => " (kernel built without io_uring, or a seccomp profile hides it)",
        Some(libc::ENOMEM) => " (limit of locked memory: raise RLIMIT_MEMLOCK)",
        _ => "",
    };
    IoError::with_source(IoErrorKind::Unsupported, format!("{what}{hint}"), error)
}
