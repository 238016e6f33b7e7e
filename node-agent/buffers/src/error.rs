//! The error of this crate: the failed operation, the reason and the remedy.

use std::io;

use reprise_policy::ByteSize;

/// Reason for which memory cannot be allocated, mapped, accessed or passed.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// Fix the call: the range lies outside the memory.
    #[error("invalid range {offset}..+{bytes}: {what} has {limit} bytes")]
    OutOfBounds {
        /// Name of the memory.
        what: &'static str,
        /// First byte of the range.
        offset: u64,
        /// Length of the range.
        bytes: u64,
        /// Length of the memory.
        limit: u64,
    },
    /// Fix the call: source and destination of a copy differ in length.
    #[error("invalid copy of {source_bytes} bytes to {destination_bytes} bytes: lengths must be equal")]
    LengthMismatch {
        /// Length of the source.
        source_bytes: usize,
        /// Length of the destination.
        destination_bytes: usize,
    },
    /// Fix the call: the memory is mapped for reading only.
    #[error("cannot write to read-only memory: reserve a slot in a writable region")]
    ReadOnly,
    /// Fix the configuration or the call: a size or count is invalid.
    #[error("{0}")]
    Invalid(String),
    /// Request less memory, or free memory.
    #[error(
        "{wanted} of memory do not fit: {usable} are usable ({limit}); lower the arena's size, free memory or \
         raise the limit"
    )]
    NotEnoughMemory {
        /// Number of requested bytes.
        wanted: ByteSize,
        /// Number of usable bytes.
        usable: ByteSize,
        /// Source of the limit.
        limit: String,
    },
    /// The other side violated the protocol of descriptor passing: close the connection.
    #[error("cannot receive all descriptors of a message: {0}")]
    Descriptors(&'static str),
    /// A system call failed.
    #[error("cannot {what}: {source}")]
    System {
        /// Failed operation, as a verb phrase.
        what: String,
        /// Error of the kernel.
        source: io::Error,
    },
}

impl BufferError {
    /// Wraps the error of a system call.
    pub(crate) fn system(what: impl Into<String>, source: io::Error) -> BufferError {
        BufferError::System { what: what.into(), source }
    }

    /// Returns the kind of the underlying system error, for callers that poll or set timeouts (`WouldBlock`,
    /// `ConnectionReset`).
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            BufferError::System { source, .. } => Some(source.kind()),
            _ => None,
        }
    }
}

/// Checks that `offset..offset + bytes` lies inside `limit`, without overflow; returns both as `usize`.
pub(crate) fn check_range(
    what: &'static str,
    limit: usize,
    offset: u64,
    bytes: u64,
) -> Result<(usize, usize), BufferError> {
    let inside = offset.checked_add(bytes).is_some_and(|end| end <= limit as u64);
    if inside {
        // Both are at most `limit`, which is a usize.
        Ok((offset as usize, bytes as usize))
    } else {
        Err(BufferError::OutOfBounds { what, offset, bytes, limit: limit as u64 })
    }
}
