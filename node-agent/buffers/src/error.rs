//! The error of this crate: what was asked, why it cannot be, and what to do about it.

use std::io;

use reprise_policy::ByteSize;

/// Why memory could not be had, mapped, reached or passed on.
#[derive(Debug, thiserror::Error)]
pub enum BufferError {
    /// Fix the call: the range does not lie inside the memory it names.
    #[error("bytes {offset}..+{bytes} do not lie inside {limit} bytes of {what}")]
    OutOfBounds {
        /// What was addressed.
        what: &'static str,
        /// First byte asked for.
        offset: u64,
        /// Bytes asked for.
        bytes: u64,
        /// Bytes there are.
        limit: u64,
    },
    /// Fix the call: source and destination of a copy differ in length.
    #[error("copy of {source_bytes} bytes into {destination_bytes} bytes: lengths must be equal")]
    LengthMismatch {
        /// Bytes to copy.
        source_bytes: usize,
        /// Bytes of room.
        destination_bytes: usize,
    },
    /// Fix the call: the memory is mapped for reading only.
    #[error("this memory is mapped read-only: ask the agent for a writable region before filling it")]
    ReadOnly,
    /// Fix the configuration or the call: a size or count is not usable.
    #[error("{0}")]
    Invalid(String),
    /// Ask for less, or free memory.
    #[error(
        "{wanted} of memory do not fit: {usable} can be used ({limit}); lower the arena's size, free memory or \
         raise the limit"
    )]
    NotEnoughMemory {
        /// Bytes asked for.
        wanted: ByteSize,
        /// Bytes that could be had.
        usable: ByteSize,
        /// What sets the limit.
        limit: String,
    },
    /// The other side broke the protocol of descriptor passing: close the connection.
    #[error("descriptors were not received whole: {0}")]
    Descriptors(&'static str),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// What was being done.
        what: String,
        /// What the kernel said.
        source: io::Error,
    },
}

impl BufferError {
    /// Wraps the error of a system call.
    pub(crate) fn system(what: impl Into<String>, source: io::Error) -> BufferError {
        BufferError::System { what: what.into(), source }
    }

    /// The kind of the system error below, for callers that poll or time out (`WouldBlock`, `ConnectionReset`).
    pub fn io_kind(&self) -> Option<io::ErrorKind> {
        match self {
            BufferError::System { source, .. } => Some(source.kind()),
            _ => None,
        }
    }
}

/// Checks that `offset..offset + bytes` lies inside `limit`, without overflow, and gives both as `usize`.
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
