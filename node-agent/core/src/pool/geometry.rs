//! Where things lie on a device.
//!
//! ```text
//! 0        superblock, copy 0
//! 1 MiB    superblock, copy 1
//!          bank 0: header copy 0 | checkpoint pages | log pages | header copy 1
//!          bank 1: the same
//! 2 MiB·k  segments, one after the other; a rest shorter than a segment is unused
//! ```
//!
//! The copies of the superblock lie 1 MiB apart, those of a bank's header at its two ends: what tools write over the
//! beginning of a disk, and the damage of one flash page, hits one of them. Invariant: areas are disjoint, page aligned
//! and inside the device; [`Geometry::check`] enforces it for what is read from a device, too.

use reprise_policy::layout::PAGE_BYTES;

use super::error::PoolError;
use super::record::RECORDS_PER_PAGE;

/// Byte offsets of the two copies of the superblock.
pub const SUPERBLOCK_OFFSETS: [u64; 2] = [0, 1 << 20];

/// Segments and the data area are aligned to this: the size of a huge page and of many SSDs' stripes.
pub const SEGMENT_ALIGNMENT: u64 = 2 << 20;

/// Default bytes of a segment: 31 slots of 2 MiB.
pub const SEGMENT_BYTES_DEFAULT: u64 = 64 << 20;

/// Bytes of a segment at the most.
pub const SEGMENT_BYTES_MAX: u64 = 4 << 30;

/// Bytes of a device at the most: page numbers have 32 bits.
pub const DEVICE_BYTES_MAX: u64 = PAGE_BYTES << 32;

/// Device bytes per journal entry on large devices: a checkpoint of 64 bytes per 64 KiB is 0.1 % of the device and
/// bank. Blocks smaller than that cannot fill a large device; such blocks would drown in I/O operations anyway.
const BYTES_PER_ENTRY: u64 = 64 << 10;

/// Entries up to which a device has room for every slot that could exist (8 KiB each): 4 MiB of checkpoint.
const ENTRIES_SMALL: u64 = 64 << 10;

/// Bytes of the smallest slot: header page and one page of payload.
const SLOT_BYTES_MIN: u64 = 2 * PAGE_BYTES;

/// Log pages of a bank, at least: four groups of [`GROUP_PAGES_MAX`].
const LOG_PAGES_MIN: u64 = 64;

/// Log pages of a bank, at most: 256 MiB, read in 0.1 s at 2.5 GB/s when the pool is opened.
const LOG_PAGES_MAX: u64 = 64 << 10;

/// Pages of one journal append at the most: 1,008 records, 64 KiB.
pub(super) const GROUP_PAGES_MAX: u32 = 16;

const _: () = assert!(LOG_PAGES_MIN >= 4 * GROUP_PAGES_MAX as u64);
const _: () =
    assert!(LOG_PAGES_MAX / 2 <= u16::MAX as u64, "a carried-over group names its pages in 16 bits");

/// What a device is formatted with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PoolParams {
    /// Bytes of the device or file; a rest of less than a page is not used.
    pub device_bytes: u64,
    /// Bytes of a segment: a multiple of 2 MiB, at least the largest slot (payload and header page).
    pub segment_bytes: u64,
    /// Identity of the device's pool, wherever the device is plugged in. Must be fresh: random.
    pub pool_uuid: [u8; 16],
    /// Index of the device in the node's configuration when it was formatted.
    pub device_index: u8,
    /// When it was formatted, microseconds since 1970, for people.
    pub created_unix_us: u64,
}

/// The areas of a device.
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
    /// Blocks and quarantined slots that there may be at once: what fits a checkpoint.
    pub(super) entries_max: u64,
    /// Byte offset of the first segment.
    pub(super) data_offset: u64,
    /// Number of segments.
    pub(super) segments: u32,
}

impl Geometry {
    /// Lays out a new device.
    ///
    /// # Errors
    /// [`PoolError::BadParams`] or [`PoolError::TooSmall`].
    pub(super) fn plan(params: &PoolParams) -> Result<Geometry, PoolError> {
        let device_bytes = params.device_bytes - params.device_bytes % PAGE_BYTES;
        check_segment_bytes(params.segment_bytes)?;
        if device_bytes > DEVICE_BYTES_MAX {
            let what = format!(
                "a device has {DEVICE_BYTES_MAX} bytes (16 TiB) at the most; split it into partitions"
            );
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
            checkpoint_pages: u32::try_from(checkpoint_pages).expect("16 TiB have 2^28 entries"),
            log_pages: u32::try_from(log_pages).expect("clamped"),
            entries_max,
            data_offset,
            segments: u32::try_from(segments).expect("16 TiB have 2^23 segments of 2 MiB"),
        };
        geometry.check().map(|()| geometry)
    }

    /// Whether the areas are possible at all.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`], naming what is not.
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
        Err(PoolError::Corrupt { what: "the superblock's areas contradict each other".to_owned() })
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
    pub(super) fn data_page(&self) -> u32 {
        u32::try_from(self.data_offset / PAGE_BYTES).expect("devices are bounded to 2^32 pages")
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
