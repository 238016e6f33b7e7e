//! Registered buffers: the arena's regions, pinned and mapped by the kernel once instead of once per operation.
//!
//! A region larger than the kernel takes in one buffer is registered in pieces; a transfer across two pieces
//! goes the unregistered way.

use std::io;
use std::sync::Arc;

use io_uring::IoUring;
use reprise_buffers::{Region, Span};

/// Largest registered buffer: `SZ_1G` in the kernel's `io_buffer_validate`.
const BUFFER_BYTES_MAX: u64 = 1 << 30;

/// Most registered buffers: `IORING_MAX_REG_BUFFERS`, 16 TiB of arena.
const BUFFERS_MAX: usize = 1 << 14;

/// The registered buffers of one ring, by address.
#[derive(Default)]
pub(crate) struct FixedBuffers {
    /// Sorted by address, not overlapping.
    buffers: Vec<FixedBuffer>,
    /// Keeps the memory mapped while the ring can name it.
    _regions: Vec<Arc<Region>>,
}

struct FixedBuffer {
    start: usize,
    bytes: usize,
    index: u16,
}

impl FixedBuffers {
    /// Registers the regions with a ring.
    ///
    /// # Errors
    /// What the kernel says; ENOMEM means the limit of locked memory (io_uring_register(2)).
    pub(crate) fn register(ring: &IoUring, regions: &[Arc<Region>]) -> io::Result<FixedBuffers> {
        let mut iovecs = Vec::new();
        for region in regions {
            let base = region.as_ptr();
            let mut start = 0;
            while start < region.bytes() {
                let bytes = (region.bytes() - start).min(BUFFER_BYTES_MAX);
                let iov_base = base.wrapping_byte_add(start as usize).cast();
                iovecs.push(libc::iovec { iov_base, iov_len: bytes as usize });
                start += bytes;
            }
        }
        if iovecs.is_empty() {
            return Ok(FixedBuffers::default());
        }
        if iovecs.len() > BUFFERS_MAX {
            return Err(io::Error::other(format!(
                "{} buffers; the kernel takes {BUFFERS_MAX}",
                iovecs.len()
            )));
        }
        // SAFETY: the iovecs lie in mappings of the regions, which are kept alive by the returned value, which the
        // engine drops after its ring (io_uring_register(2), IORING_REGISTER_BUFFERS).
        unsafe { ring.submitter().register_buffers(&iovecs) }?;
        let buffer = |(index, iovec): (usize, &libc::iovec)| FixedBuffer {
            start: iovec.iov_base.addr(),
            bytes: iovec.iov_len,
            index: u16::try_from(index).expect("BUFFERS_MAX fits 16 bits"),
        };
        let mut buffers: Vec<_> = iovecs.iter().enumerate().map(buffer).collect();
        buffers.sort_by_key(|buffer| buffer.start);
        Ok(FixedBuffers { buffers, _regions: regions.to_vec() })
    }

    /// How many buffers are registered.
    pub(crate) fn count(&self) -> usize {
        self.buffers.len()
    }

    /// The registered buffer that holds all of a span.
    pub(crate) fn index_of(&self, span: &Span) -> Option<u16> {
        let start = span.as_ptr().addr();
        let after = self.buffers.partition_point(|buffer| buffer.start <= start);
        let buffer = &self.buffers[after.checked_sub(1)?];
        let inside = span.len() <= buffer.bytes && start - buffer.start <= buffer.bytes - span.len();
        inside.then_some(buffer.index)
    }
}
