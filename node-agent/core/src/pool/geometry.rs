//! Areas of a device and their offsets.
//!
//! ```text
//! 0        superblock, copy 0
//! 1 MiB    superblock, copy 1
//!          bank 0: header copy 0 | checkpoint pages | log pages | header copy 1
//!          bank 1: the same
//! 2 MiB·k  segments, contiguous; a remainder shorter than a segment is unused
//! ```
//!
//! The two superblock copies are 1 MiB apart, and the copies of a bank's header are at its two ends. A tool
//! that overwrites the beginning of a disk, or damage of one flash page, thus affects only one copy.
//! Invariant: areas are disjoint, page-aligned and within the device. [`Geometry::check`] enforces it also
//! for geometry read from a device.

use reprise_policy::layout::PAGE_BYTES;

use super::PAGE_NUMBER_BITS;
use super::error::PoolError;
use super::record::RECORDS_PER_PAGE;

/// Byte offsets of the two copies of the superblock.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 1 << 20];

/// Alignment of segments and of the data area: the size of a huge page and of many SSDs' stripes.
pub const SEGMENT_ALIGNMENT: u64 = 2 << 20;

/// Default bytes of a segment: 31 slots of 2 MiB.
pub const SEGMENT_BYTES_DEFAULT: u64 = 64 << 20;

/// Maximum bytes of a segment.
pub const SEGMENT_BYTES_MAX: u64 = 4 << 30;

/// Maximum bytes of a device, 128 TiB: page numbers have 35 bits.
pub const DEVICE_BYTES_MAX: u64 = PAGE_BYTES << PAGE_NUMBER_BITS;

/// Device bytes per journal entry on large devices: a checkpoint of 64 bytes per 64 KiB is 0.1 % of the
/// device per bank. Smaller blocks cannot fill a large device; I/O operations would limit them anyway.
const BYTES_PER_ENTRY: u64 = 64 << 10;

/// Number of entries up to which a device can index every possible slot (8 KiB each): 4 MiB of checkpoint.
const ENTRIES_SMALL: u64 = 64 << 10;

/// Bytes of the smallest slot: header page and one payload page.
const SLOT_BYTES_MIN: u64 = 2 * PAGE_BYTES;

/// Minimum log pages of a bank: four groups of [`GROUP_PAGES_MAX`].
const LOG_PAGES_MIN: u64 = 64;

/// Maximum log pages of a bank: 256 MiB, read in 0.1 s at 2.5 GB/s when the pool is opened.
const LOG_PAGES_MAX: u64 = 64 << 10;

/// Maximum pages of one journal append: 1,008 records, 64 KiB.
pub(super) const GROUP_PAGES_MAX: u32 = 16;

const _: () = assert!(LOG_PAGES_MIN >= 4 * GROUP_PAGES_MAX as u64);
const _: () =
    assert!(LOG_PAGES_MAX / 2 <= u16::MAX as u64, "a group copied to the other bank has a 16-bit page count");

/// Parameters for formatting a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolParams {
    /// Bytes of the device or file; a remainder shorter than a page is not used.
    pub device_bytes: u64,
    /// Bytes of a segment: a multiple of 2 MiB, and at least the largest slot including its header page.
    pub segment_bytes: u64,
    /// Random identity of the device's pool, independent of where the device is attached. Must be unique.
    pub pool_uuid: [u8; 16],
    /// Index of the device in the node's configuration.
    pub device_index: u8,
    /// Time of formatting in microseconds since 1970, for diagnostics.
    pub created_unix_us: u64,
}

/// Areas of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Geometry {
    /// Bytes of the device that belong to the pool.
    pub(super) device_bytes: u64,
    /// Bytes of a segment.
    pub(super) segment_bytes: u64,
    /// Byte offsets of the journal banks.
    pub(super) bank_offsets: [u64; 2],
    /// Pages of a bank's checkpoint area.
    pub(super) checkpoint_pages: u32,
    /// Pages of a bank's log area.
    pub(super) log_pages: u32,
    /// Maximum blocks and quarantined slots: the capacity of a checkpoint.
    pub(super) entries_max: u64,
    /// Byte offset of the first segment.
    pub(super) data_offset: u64,
    /// Number of segments.
    pub(super) segments: u32,
}

impl Geometry {
    /// Computes the layout of a new device.
    ///
    /// # Errors
    /// [`PoolError::BadParams`] or [`PoolError::TooSmall`].
    pub(super) fn plan(params: &PoolParams) -> Result<Geometry, PoolError> {
        let device_bytes = params.device_bytes - params.device_bytes % PAGE_BYTES;
        check_segment_bytes(params.segment_bytes)?;
        if device_bytes > DEVICE_BYTES_MAX {
            let what =
                format!("a device has at most {DEVICE_BYTES_MAX} bytes (128 TiB); split it into partitions");
            return Err(PoolError::BadParams { what });
        }
        let small = (device_bytes / SLOT_BYTES_MIN).min(ENTRIES_SMALL);
        let entries_max = (device_bytes / BYTES_PER_ENTRY).max(small).max(1);
        let checkpoint_pages = entries_max.div_ceil(RECORDS_PER_PAGE as u64);
        let log_pages = (checkpoint_pages / 2).clamp(LOG_PAGES_MIN, LOG_PAGES_MAX);
        let bank_bytes = (2 + checkpoint_pages + log_pages) * PAGE_BYTES;
        let first_bank = SUPERBLOCK_OFFSETS[1] + PAGE_BYTES;
        let data_offset = (first_bank + 2 * bank_bytes).next_multiple_of(SEGMENT_ALIGNMENT);
        let segments = device_bytes.saturating_sub(data_offset) / params.segment_bytes;
        if segments == 0 {
            let needed = data_offset + params.segment_bytes;
            return Err(PoolError::TooSmall { needed, found: params.device_bytes });
        }
        let geometry = Geometry {
            device_bytes,
            segment_bytes: params.segment_bytes,
            bank_offsets: [first_bank, first_bank + bank_bytes],
            checkpoint_pages: u32::try_from(checkpoint_pages).expect("128 TiB have 2^31 entries"),
            log_pages: u32::try_from(log_pages).expect("clamped"),
            entries_max,
            data_offset,
            segments: u32::try_from(segments).expect("128 TiB have 2^26 segments of 2 MiB"),
        };
        geometry.check().map(|()| geometry)
    }

    /// Returns the areas of the same pool on a device of `device_bytes`; `None` if no further segment fits.
    /// Journal banks and existing segments keep their places, and segments are appended.
    pub(super) fn grown(&self, device_bytes: u64) -> Option<Geometry> {
        let device_bytes = device_bytes.min(DEVICE_BYTES_MAX) / PAGE_BYTES * PAGE_BYTES;
        let segments = device_bytes.saturating_sub(self.data_offset) / self.segment_bytes;
        let segments = u32::try_from(segments).expect("128 TiB have 2^26 segments of 2 MiB");
        (segments > self.segments).then_some(Geometry { device_bytes, segments, ..*self })
    }

    /// Checks that the areas are valid.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] if they are not.
    pub(super) fn check(&self) -> Result<(), PoolError> {
        let bank_bytes = self.bank_bytes();
        let [first, second] = self.bank_offsets;
        let order = SUPERBLOCK_OFFSETS[1] + PAGE_BYTES <= first
            && first.checked_add(bank_bytes).is_some_and(|end| end <= second)
            && second.checked_add(bank_bytes).is_some_and(|end| end <= self.data_offset);
        let data = u64::from(self.segments).checked_mul(self.segment_bytes);
        let end = data.and_then(|bytes| bytes.checked_add(self.data_offset));
        let inside = end.is_some_and(|end| end <= self.device_bytes) && self.device_bytes <= DEVICE_BYTES_MAX;
        let offsets = [first, second, self.device_bytes];
        let aligned = offsets.iter().all(|offset| offset.is_multiple_of(PAGE_BYTES))
            && self.data_offset.is_multiple_of(SEGMENT_ALIGNMENT);
        let log = u64::from(self.log_pages);
        let counts = (LOG_PAGES_MIN..=LOG_PAGES_MAX).contains(&log)
            && self.segments > 0
            && self.entries_max <= u64::from(self.checkpoint_pages) * RECORDS_PER_PAGE as u64;
        if order && inside && aligned && counts && check_segment_bytes(self.segment_bytes).is_ok() {
            return Ok(());
        }
        Err(PoolError::Corrupt { what: "the areas in the superblock are inconsistent".to_owned() })
    }

    /// Bytes of one bank: two copies of its header, checkpoint and log.
    pub(super) fn bank_bytes(&self) -> u64 {
        (2 + u64::from(self.checkpoint_pages) + u64::from(self.log_pages)) * PAGE_BYTES
    }

    /// Byte offsets of the two copies of a bank's header.
    pub(super) fn header_offsets(&self, bank: usize) -> [u64; 2] {
        let first = self.bank_offsets[bank];
        [first, first + self.bank_bytes() - PAGE_BYTES]
    }

    /// Byte offset of a bank's checkpoint page.
    pub(super) fn checkpoint_offset(&self, bank: usize, page: u32) -> u64 {
        self.bank_offsets[bank] + (1 + u64::from(page)) * PAGE_BYTES
    }

    /// Byte offset of a bank's log page.
    pub(super) fn log_offset(&self, bank: usize, page: u32) -> u64 {
        self.checkpoint_offset(bank, self.checkpoint_pages) + u64::from(page) * PAGE_BYTES
    }

    /// Number of the first page of the data area.
    pub(super) fn data_page(&self) -> u64 {
        self.data_offset / PAGE_BYTES
    }

    /// Pages of a segment.
    pub(super) fn segment_pages(&self) -> u32 {
        u32::try_from(self.segment_bytes / PAGE_BYTES).expect("segments are bounded to 4 GiB")
    }
}

fn check_segment_bytes(bytes: u64) -> Result<(), PoolError> {
    if bytes.is_multiple_of(SEGMENT_ALIGNMENT) && (SEGMENT_ALIGNMENT..=SEGMENT_BYTES_MAX).contains(&bytes) {
        return Ok(());
    }
    let what = format!("a segment of {bytes} bytes; choose a multiple of 2 MiB from 2 MiB to 4 GiB");
    Err(PoolError::BadParams { what })
}
