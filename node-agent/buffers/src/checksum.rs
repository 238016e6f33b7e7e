//! CRC32C (CRC-32/ISCSI) of memory, and checksummed copies; the implementations are in `kernel`.

use crate::error::BufferError;
use crate::kernel;
use crate::span::Span;

/// Piece size on CPUs that cannot copy and checksum in one pass: small enough for a 32 KiB first-level cache,
/// large enough to make the cost of a call negligible.
pub const PIECE_BYTES: usize = 16 << 10;

/// CRC32C over bytes that arrive in pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Crc32c {
    state: kernel::State,
}

impl Crc32c {
    /// Creates the checksum of zero bytes.
    pub fn new() -> Crc32c {
        Crc32c { state: kernel::EMPTY }
    }

    /// Adds bytes to the checksum.
    pub fn update(&mut self, bytes: &[u8]) {
        self.state = kernel::checksum_slice(self.state, bytes);
    }

    /// Adds the bytes of a span, as they are at the time of the call.
    pub fn update_span(&mut self, span: &Span) {
        // SAFETY: the span keeps its memory mapped.
        self.state = unsafe { kernel::checksum(self.state, span.as_ptr(), span.len()) };
    }

    /// Copies bytes to a span of the same length and adds the copied bytes. Fails if the lengths differ or
    /// the span is read-only.
    pub fn copy_in(&mut self, src: &[u8], dst: &Span) -> Result<(), BufferError> {
        let destination = dst.destination_of(src)?;
        // SAFETY: `destination` is valid for writing as many bytes as `src` has, and no reference into it
        // exists; `src` cannot overlap it, for spans' memory is never behind a `&[u8]` while spans exist.
        self.state = unsafe { kernel::copy_checked(self.state, src.as_ptr(), destination, src.len()) };
        Ok(())
    }

    /// Returns the checksum of the added bytes.
    pub fn value(self) -> u32 {
        !self.state
    }
}

impl Default for Crc32c {
    fn default() -> Crc32c {
        Crc32c::new()
    }
}

/// Returns the CRC32C of `bytes`.
pub fn crc32c(bytes: &[u8]) -> u32 {
    !kernel::checksum_slice(kernel::EMPTY, bytes)
}

/// Copies `src` to `dst` and returns its CRC32C. Panics when the lengths differ, like `copy_from_slice`.
pub fn copy_checked(src: &[u8], dst: &mut [u8]) -> u32 {
    assert_eq!(src.len(), dst.len(), "copy_checked: source and destination must be of one length");
    // SAFETY: two slices of one length, one of them exclusive: they do not overlap.
    !unsafe { kernel::copy_checked(kernel::EMPTY, src.as_ptr(), dst.as_mut_ptr(), src.len()) }
}

/// Describes the checksum implementation for this CPU, for logs.
pub fn checksum_method() -> String {
    kernel::method()
}
