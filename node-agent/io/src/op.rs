//! Operations: submissions, completions, and their rules.
//!
//! [`Bounds::check`] checks every submission once, before a device sees it; engines rely on that.

use reprise_buffers::Span;

use crate::device::FileAccess;
use crate::error::{IoError, IoErrorKind};

/// Alignment of offsets, lengths and addresses of all transfers: the page size of the pool format, and
/// sufficient for O_DIRECT on every device that Reprise accepts.
pub const IO_ALIGN: usize = 4096;

/// Maximum number of spans of one operation: `UIO_MAXIOV`, the kernel's limit for vectored calls.
pub const IOVECS_MAX: usize = 1024;

/// Maximum size of one operation in bytes: eight times the largest block (128 MiB). Results fit the `i32` of
/// io_uring.
pub const TRANSFER_BYTES_MAX: u64 = 1 << 30;

const _: () = assert!(TRANSFER_BYTES_MAX <= i32::MAX as u64);

/// Identifies an operation until its completion; the caller chooses it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// One operation. Offsets are bytes on the device. Offset, address and length of every span are multiples of
/// [`IO_ALIGN`]; at most [`IOVECS_MAX`] spans and [`TRANSFER_BYTES_MAX`] bytes.
#[derive(Clone, Debug)]
pub enum Op {
    /// Reads a contiguous range into spans, in order.
    Read {
        /// First byte on the device.
        offset: u64,
        /// Destinations; must be writable.
        into: Vec<Span>,
    },
    /// Writes spans, in order, to a contiguous range.
    Write {
        /// First byte on the device.
        offset: u64,
        /// Sources; the owner must not change them until completion.
        from: Vec<Span>,
    },
    /// Makes every write durable whose completion was reaped before this submission, and no other writes.
    Sync,
}

/// An operation with its token.
#[derive(Clone, Debug)]
pub struct Submission {
    /// The completion has the same token.
    pub token: Token,
    /// The operation to run.
    pub op: Op,
}

/// An ended operation. The device no longer accesses its memory.
#[derive(Debug)]
pub struct Completion {
    /// Token of the submission.
    pub token: Token,
    /// Operation of the submission, with its spans.
    pub op: Op,
    /// Success means that all bytes were transferred. After an error, the contents of range and spans are
    /// unspecified.
    pub result: Result<(), IoError>,
}

/// Limits of an engine, from its device.
#[derive(Clone, Copy, Debug)]
pub struct Bounds {
    /// Size of the device in bytes.
    pub size: u64,
    /// Access mode of the device.
    pub access: FileAccess,
}

impl Op {
    /// Returns the number of bytes that the operation moves; zero for a sync.
    pub fn bytes(&self) -> u64 {
        self.spans().iter().map(|span| span.len() as u64).sum()
    }

    /// Returns the memory of the operation; empty for a sync.
    pub fn spans(&self) -> &[Span] {
        match self {
            Op::Read { into: spans, .. } | Op::Write { from: spans, .. } => spans,
            Op::Sync => &[],
        }
    }

    /// Returns the first byte on the device; zero for a sync.
    pub fn offset(&self) -> u64 {
        match self {
            Op::Read { offset, .. } | Op::Write { offset, .. } => *offset,
            Op::Sync => 0,
        }
    }
}

impl Bounds {
    /// Checks all rules of an [`Op`].
    ///
    /// # Errors
    /// `Invalid` with the violated rule.
    pub fn check(&self, op: &Op) -> Result<(), IoError> {
        let invalid = |text: String| Err(IoError::new(IoErrorKind::Invalid, text));
        let write = match op {
            Op::Sync => return Ok(()),
            Op::Read { .. } => false,
            Op::Write { .. } => true,
        };
        let (offset, spans, align) = (op.offset(), op.spans(), IO_ALIGN as u64);
        if spans.is_empty() || spans.len() > IOVECS_MAX {
            return invalid(format!("invalid transfer of {} spans: expected 1 to {IOVECS_MAX}", spans.len()));
        }
        for span in spans {
            if span.is_empty()
                || !span.len().is_multiple_of(IO_ALIGN)
                || !span.as_ptr().addr().is_multiple_of(IO_ALIGN)
            {
                return invalid(format!("invalid span of {} bytes: expected whole pages", span.len()));
            }
            if !write && span.as_mut_ptr().is_none() {
                return invalid("invalid read into read-only memory".into());
            }
        }
        if write && self.access != FileAccess::ReadWrite {
            return invalid("invalid write to a device opened read-only".into());
        }
        let bytes = op.bytes();
        if bytes > TRANSFER_BYTES_MAX {
            return invalid(format!("invalid transfer of {bytes} bytes: at most {TRANSFER_BYTES_MAX}"));
        }
        if !offset.is_multiple_of(align) {
            return invalid(format!("invalid offset {offset}: expected a multiple of {align}"));
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.size => Ok(()),
            _ => invalid(format!(
                "invalid range of {bytes} bytes at {offset}: the device has {} bytes",
                self.size
            )),
        }
    }
}
