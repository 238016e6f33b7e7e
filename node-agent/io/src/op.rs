//! Operations: what is submitted, what comes back, and the rules both keep.
//!
//! Whatever is submitted is checked once, by [`Bounds::check`], before a device sees it; engines rely on it.

use reprise_buffers::Span;

use crate::device::FileAccess;
use crate::error::{IoError, IoErrorKind};

/// Offsets, lengths and addresses of all transfers are multiples of this: the page size of the pool format, and enough
/// for O_DIRECT on every device that Reprise accepts.
pub const IO_ALIGN: usize = 4096;

/// Spans of one operation: `UIO_MAXIOV`, the kernel's own limit for vectored calls.
pub const IOVECS_MAX: usize = 1024;

/// Bytes of one operation: eight times the largest block (128 MiB); results fit the `i32` that io_uring returns.
pub const TRANSFER_BYTES_MAX: u64 = 1 << 30;

const _: () = assert!(TRANSFER_BYTES_MAX <= i32::MAX as u64);

/// Names an operation until its completion; chosen by the caller, not interpreted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Token(pub u64);

/// One operation. Offsets are bytes on the device; offset, address and length of every span are multiples of
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
        /// Sources; their owner leaves them unchanged until completion.
        from: Vec<Span>,
    },
    /// Makes durable every write whose completion was reaped before this was submitted, and nothing more.
    Sync,
}

/// An operation with its name.
#[derive(Clone, Debug)]
pub struct Submission {
    /// Comes back with the completion.
    pub token: Token,
    /// What to do.
    pub op: Op,
}

/// An operation that ended. Its memory is no longer touched.
#[derive(Debug)]
pub struct Completion {
    /// From the submission.
    pub token: Token,
    /// From the submission: the spans come back.
    pub op: Op,
    /// All of it was transferred, or an error; after an error nothing is known about the range and the spans.
    pub result: Result<(), IoError>,
}

/// What an engine allows, from its device.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Bounds {
    /// Bytes of the device.
    pub(crate) size: u64,
    /// How it was opened.
    pub(crate) access: FileAccess,
}

impl Op {
    /// Bytes that the operation moves; zero for a sync.
    pub fn bytes(&self) -> u64 {
        self.spans().iter().map(|span| span.len() as u64).sum()
    }

    /// The memory of the operation; empty for a sync.
    pub fn spans(&self) -> &[Span] {
        match self {
            Op::Read { into: spans, .. } | Op::Write { from: spans, .. } => spans,
            Op::Sync => &[],
        }
    }

    /// First byte on the device; zero for a sync.
    pub fn offset(&self) -> u64 {
        match self {
            Op::Read { offset, .. } | Op::Write { offset, .. } => *offset,
            Op::Sync => 0,
        }
    }
}

impl Bounds {
    /// Checks everything that is promised about an [`Op`].
    ///
    /// # Errors
    /// `Invalid`, with what is wrong.
    pub(crate) fn check(&self, op: &Op) -> Result<(), IoError> {
        let invalid = |text: String| Err(IoError::new(IoErrorKind::Invalid, text));
        let write = match op {
            Op::Sync => return Ok(()),
            Op::Read { .. } => false,
            Op::Write { .. } => true,
        };
        let (offset, spans, align) = (op.offset(), op.spans(), IO_ALIGN as u64);
        if spans.is_empty() || spans.len() > IOVECS_MAX {
            return invalid(format!("transfer of {} spans; 1 to {IOVECS_MAX} are allowed", spans.len()));
        }
        for span in spans {
            if span.is_empty()
                || !span.len().is_multiple_of(IO_ALIGN)
                || !span.as_ptr().addr().is_multiple_of(IO_ALIGN)
            {
                return invalid(format!("span of {} bytes is not made of whole pages", span.len()));
            }
            if !write && span.as_mut_ptr().is_none() {
                return invalid("read into memory that is not writable".into());
            }
        }
        if write && self.access != FileAccess::ReadWrite {
            return invalid("write to a device that was opened read-only".into());
        }
        let bytes = op.bytes();
        if bytes > TRANSFER_BYTES_MAX {
            return invalid(format!("transfer of {bytes} bytes; {TRANSFER_BYTES_MAX} are allowed"));
        }
        if !offset.is_multiple_of(align) {
            return invalid(format!("offset {offset} is no multiple of {align}"));
        }
        match offset.checked_add(bytes) {
            Some(end) if end <= self.size => Ok(()),
            _ => invalid(format!("{bytes} bytes at {offset} lie outside the device of {} bytes", self.size)),
        }
    }
}
