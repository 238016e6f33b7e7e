//! Registered buffers: the arena's regions, pinned and mapped by the kernel once instead of once per
//! operation.
//!
//! A region that exceeds the kernel's limit for one buffer is registered in pieces; a transfer across two
//! pieces uses no registered buffer.

use std::collections::BTreeMap;
use std::io;
use std::ops::Range;
use std::sync::Arc;

use io_uring::IoUring;
use reprise_buffers::{Region, Span};

/// Maximum size of a registered buffer: `SZ_1G` in the kernel's `io_buffer_validate`.
const BUFFER_BYTES_MAX: u64 = 1 << 30;

/// Maximum number of registered buffers: `IORING_MAX_REG_BUFFERS`, 16 TiB of arena.
const BUFFERS_MAX: usize = 1 << 14;

/// The registered buffers of one ring, by address.
#[derive(Default)]
pub(crate) struct FixedBuffers {
    /// Sorted by address, not overlapping.
    buffers: Vec<FixedBuffer>,
    /// Places in the kernel's table of each region that was registered.
    places: BTreeMap<u16, Range<u16>>,
    /// Keeps the memory mapped while the ring can refer to it.
    regions: BTreeMap<u16, Arc<Region>>,
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
    /// The kernel's error; ENOMEM means the limit of locked memory (io_uring_register(2)).
    pub(crate) fn register(ring: &IoUring, regions: &[Arc<Region>]) -> io::Result<FixedBuffers> {
        let iovecs = pieces(regions, BUFFER_BYTES_MAX);
        if iovecs.is_empty() {
            return Ok(FixedBuffers::default());
        }
        if iovecs.len() > BUFFERS_MAX {
            return Err(io::Error::other(format!(
                "{} buffers exceed the kernel's limit of {BUFFERS_MAX}",
                iovecs.len()
            )));
        }
        // SAFETY: the iovecs lie in mappings of the regions, which are kept alive by the returned value,
        // which the engine drops after its ring (io_uring_register(2), IORING_REGISTER_BUFFERS).
        unsafe { ring.submitter().register_buffers(&iovecs) }?;
        Ok(FixedBuffers::of(&iovecs, regions))
    }

    fn of(iovecs: &[libc::iovec], regions: &[Arc<Region>]) -> FixedBuffers {
        let mut places = BTreeMap::new();
        let mut next = 0;
        for region in regions {
            let end = next + pieces(std::slice::from_ref(region), BUFFER_BYTES_MAX).len() as u16;
            places.insert(region.id(), next..end);
            next = end;
        }
        let regions = regions.iter().map(|region| (region.id(), region.clone())).collect();
        FixedBuffers { buffers: table(iovecs, 0), places, regions }
    }

    /// Ends the registration of a region's memory.
    ///
    /// # Errors
    /// The kernel's error: the memory stays registered, and is no longer used.
    pub(crate) fn release(&mut self, ring: &IoUring, region: u16) -> io::Result<()> {
        let Some(places) = self.places.get(&region).cloned() else { return Ok(()) };
        let Some(memory) = self.regions.get(&region).cloned() else { return Ok(()) };
        self.buffers.retain(|buffer| !places.contains(&buffer.index));
        let empty = libc::iovec { iov_base: std::ptr::null_mut(), iov_len: 0 };
        let iovecs = vec![empty; places.len()];
        // SAFETY: empty entries refer to no memory (io_uring_register(2), IORING_REGISTER_BUFFERS_UPDATE).
        let updated = unsafe { ring.submitter().register_buffers_update(places.start.into(), &iovecs, None) };
        if updated.is_ok() {
            self.regions.remove(&region);
        }
        drop(memory);
        updated
    }

    /// Registers the new memory of a region in the places of the old one, unless it is registered.
    ///
    /// # Errors
    /// The kernel's error: the memory is used unregistered.
    pub(crate) fn add(&mut self, ring: &IoUring, region: &Arc<Region>) -> io::Result<()> {
        let Some(places) = self.places.get(&region.id()).cloned() else { return Ok(()) };
        if self.regions.get(&region.id()).is_some_and(|known| Arc::ptr_eq(known, region)) {
            return Ok(());
        }
        self.release(ring, region.id())?;
        let iovecs = pieces(std::slice::from_ref(region), BUFFER_BYTES_MAX);
        // SAFETY: the iovecs lie in the mapping of the region, which `regions` keeps alive; the engine drops it after
        // its ring, or after an update that removes it.
        unsafe { ring.submitter().register_buffers_update(places.start.into(), &iovecs, None) }?;
        self.buffers.extend(table(&iovecs, places.start));
        self.buffers.sort_by_key(|buffer| buffer.start);
        self.regions.insert(region.id(), region.clone());
        Ok(())
    }

    /// Returns the number of registered buffers.
    pub(crate) fn count(&self) -> usize {
        self.buffers.len()
    }

    /// Returns the registered buffer that contains the whole span.
    pub(crate) fn index_of(&self, span: &Span) -> Option<u16> {
        let start = span.as_ptr().addr();
        let after = self.buffers.partition_point(|buffer| buffer.start <= start);
        let buffer = &self.buffers[after.checked_sub(1)?];
        let inside = span.len() <= buffer.bytes && start - buffer.start <= buffer.bytes - span.len();
        inside.then_some(buffer.index)
    }
}

/// Splits the regions into pieces of at most `bytes_max`, in order.
fn pieces(regions: &[Arc<Region>], bytes_max: u64) -> Vec<libc::iovec> {
    let mut iovecs = Vec::new();
    for region in regions {
        for start in (0..region.bytes()).step_by(bytes_max as usize) {
            let iov_base = region.as_ptr().wrapping_byte_add(start as usize).cast();
            let iov_len = (region.bytes() - start).min(bytes_max) as usize;
            iovecs.push(libc::iovec { iov_base, iov_len });
        }
    }
    iovecs
}

/// Lists address and index of each buffer; the kernel's index is `first` and the position in `iovecs`.
fn table(iovecs: &[libc::iovec], first: u16) -> Vec<FixedBuffer> {
    let buffer = |(index, iovec): (usize, &libc::iovec)| FixedBuffer {
        start: iovec.iov_base.addr(),
        bytes: iovec.iov_len,
        index: first + u16::try_from(index).expect("BUFFERS_MAX fits 16 bits"),
    };
    let mut buffers: Vec<_> = iovecs.iter().enumerate().map(buffer).collect();
    buffers.sort_by_key(|buffer| buffer.start);
    buffers
}

#[cfg(test)]
mod tests {
    use reprise_buffers::{Arena, ArenaConfig, HugePolicy, PageBuffer};

    use super::*;

    const MIB: u64 = 1 << 20;

    #[test]
    fn a_span_is_found_in_the_piece_that_holds_all_of_it() {
        let config = ArenaConfig { bytes: 8 * MIB, region_bytes: 4 * MIB, huge: HugePolicy::Never };
        let arena = Arena::new(&config).expect("8 MiB");
        let buffers = table(&pieces(&arena.regions(), 3 * MIB), 0);
        let fixed = FixedBuffers { buffers, ..FixedBuffers::of(&[], &arena.regions()) };
        assert_eq!(fixed.count(), 4);
        let index =
            |region, offset, bytes| fixed.index_of(&arena.span(region, offset, bytes).expect("inside"));
        assert_eq!((index(0, 0, 3 * MIB), index(0, 3 * MIB, MIB)), (Some(0), Some(1)));
        assert_eq!((index(1, MIB, 4096), index(1, 4 * MIB - 4096, 4096)), (Some(2), Some(3)));
        assert_eq!((index(0, 3 * MIB - 4096, 8192), index(1, 0, 4 * MIB)), (None, None));
        assert_eq!(fixed.index_of(&PageBuffer::new(4096).expect("a page").span()), None);
        assert_eq!(FixedBuffers::default().index_of(&arena.span(0, 0, 4096).expect("inside")), None);
    }
}
