//! Fixed metadata of a device: its superblock and the headers of its journal banks.
//!
//! The superblock is written when the device is formatted and when its pool grows. Otherwise it is written only
//! to replace a damaged copy, or one that an interrupted growth left behind. All versions have its magic,
//! version field and page checksum at the same offsets, so that every agent can distinguish a pool of another
//! version from a damaged one.

use super::error::PoolError;
use super::geometry::Geometry;
use super::page::{PAGE, bytes_at, intact, is_blank, put, seal, u32_at, u64_at};
use super::record::BankIncarnation;

/// Format version that this build reads and writes.
pub const FORMAT_VERSION: u32 = 4;

const MAGIC: [u8; 8] = *b"REPRISE\0";
const MAGIC_AT: usize = 0;
const VERSION_AT: usize = 8;
const DEVICE_INDEX_AT: usize = 12;
const UUID_AT: usize = 16;
const DEVICE_BYTES_AT: usize = 32;
const SEGMENT_BYTES_AT: usize = 40;
const BANKS_AT: [usize; 2] = [48, 56];
const BANK_BYTES_AT: usize = 64;
const CHECKPOINT_PAGES_AT: usize = 72;
const LOG_PAGES_AT: usize = 76;
const ENTRIES_MAX_AT: usize = 80;
const DATA_OFFSET_AT: usize = 88;
const SEGMENTS_AT: usize = 96;
const CREATED_AT: usize = 104;

/// Upper bound of generations and epochs; a higher value on a device is invalid. A record has 48 bits for it.
/// At 150,000 blocks per second they last for 59 years, or for 268 million openings that skip 2²⁰ generations
/// each.
pub(super) const GENERATION_MAX: u64 = 1 << 48;

/// First bytes of a bank header.
pub(super) const BANK_MAGIC: [u8; 8] = *b"RPRBANK\0";
const BANK_INDEX_AT: usize = 8;
const BANK_UUID_AT: usize = 16;
const BANK_EPOCH_AT: usize = 32;
const BANK_GENERATION_AT: usize = 40;
const BANK_RECORDS_AT: usize = 48;
const BANK_PAGES_AT: usize = 56;
const BANK_BEGUN_AT: usize = 64;

/// Identity and geometry of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Superblock {
    /// Identity of the pool, independent of where the device is attached.
    pub(super) pool_uuid: [u8; 16],
    /// Index in the node's configuration when it was formatted.
    pub(super) device_index: u8,
    /// Time of formatting in microseconds since 1970.
    pub(super) created_unix_us: u64,
    /// Areas of the device.
    pub(super) geometry: Geometry,
}

/// Contents of the place of a superblock copy.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FoundSuperblock {
    /// Intact copy of the current version.
    Valid(Superblock),
    /// Intact copy of an older version.
    Older(u32),
    /// Intact copy of a newer version.
    Newer(u32),
    /// Damaged copy, recognised by its magic.
    Damaged,
    /// Only zeros.
    Blank,
    /// Other data; contains its first bytes.
    Foreign([u8; 8]),
}

impl Superblock {
    /// Whether both copies belong to one pool. Their sizes may differ, because growth rewrites one copy after
    /// the other.
    pub(super) fn is_same_pool(&self, other: &Superblock) -> bool {
        let Geometry { device_bytes, segments, .. } = other.geometry;
        *other == Superblock { geometry: Geometry { device_bytes, segments, ..self.geometry }, ..*self }
    }

    /// Returns the page of one copy.
    pub(super) fn encode(&self) -> Vec<u8> {
        let geometry = &self.geometry;
        let mut page = vec![0; PAGE];
        put(&mut page, MAGIC_AT, &MAGIC);
        put(&mut page, VERSION_AT, &FORMAT_VERSION.to_le_bytes());
        page[DEVICE_INDEX_AT] = self.device_index;
        put(&mut page, UUID_AT, &self.pool_uuid);
        put(&mut page, DEVICE_BYTES_AT, &geometry.device_bytes.to_le_bytes());
        put(&mut page, SEGMENT_BYTES_AT, &geometry.segment_bytes.to_le_bytes());
        for (at, offset) in BANKS_AT.into_iter().zip(geometry.bank_offsets) {
            put(&mut page, at, &offset.to_le_bytes());
        }
        put(&mut page, BANK_BYTES_AT, &geometry.bank_bytes().to_le_bytes());
        put(&mut page, CHECKPOINT_PAGES_AT, &geometry.checkpoint_pages.to_le_bytes());
        put(&mut page, LOG_PAGES_AT, &geometry.log_pages.to_le_bytes());
        put(&mut page, ENTRIES_MAX_AT, &geometry.entries_max.to_le_bytes());
        put(&mut page, DATA_OFFSET_AT, &geometry.data_offset.to_le_bytes());
        put(&mut page, SEGMENTS_AT, &geometry.segments.to_le_bytes());
        put(&mut page, CREATED_AT, &self.created_unix_us.to_le_bytes());
        seal(&mut page);
        page
    }

    /// Decodes the page of one copy.
    ///
    /// # Errors
    /// [`PoolError::Corrupt`] if the page is intact but its areas are invalid.
    pub(super) fn decode(page: &[u8]) -> Result<FoundSuperblock, PoolError> {
        if is_blank(page) {
            return Ok(FoundSuperblock::Blank);
        }
        if page.len() != PAGE {
            return Ok(FoundSuperblock::Damaged);
        }
        let magic = bytes_at(page, MAGIC_AT);
        if magic != MAGIC {
            return Ok(FoundSuperblock::Foreign(magic));
        }
        if intact(page).is_none() {
            return Ok(FoundSuperblock::Damaged);
        }
        match u32_at(page, VERSION_AT) {
            FORMAT_VERSION => Superblock::fields(page).map(FoundSuperblock::Valid),
            newer if newer > FORMAT_VERSION => Ok(FoundSuperblock::Newer(newer)),
            older => Ok(FoundSuperblock::Older(older)),
        }
    }

    fn fields(page: &[u8]) -> Result<Superblock, PoolError> {
        let geometry = Geometry {
            device_bytes: u64_at(page, DEVICE_BYTES_AT),
            segment_bytes: u64_at(page, SEGMENT_BYTES_AT),
            bank_offsets: BANKS_AT.map(|at| u64_at(page, at)),
            checkpoint_pages: u32_at(page, CHECKPOINT_PAGES_AT),
            log_pages: u32_at(page, LOG_PAGES_AT),
            entries_max: u64_at(page, ENTRIES_MAX_AT),
            data_offset: u64_at(page, DATA_OFFSET_AT),
            segments: u32_at(page, SEGMENTS_AT),
        };
        geometry.check()?;
        if u64_at(page, BANK_BYTES_AT) != geometry.bank_bytes() {
            return Err(PoolError::Corrupt {
                what: "the bank size in the superblock does not match its areas".to_owned(),
            });
        }
        Ok(Superblock {
            pool_uuid: bytes_at(page, UUID_AT),
            device_index: page[DEVICE_INDEX_AT],
            created_unix_us: u64_at(page, CREATED_AT),
            geometry,
        })
    }
}

/// Header of a journal bank, written last when the bank is started: it makes the bank valid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BankHeader {
    /// Incarnation of the bank; the valid bank with the higher epoch is the active one.
    pub(super) incarnation: BankIncarnation,
    /// Upper bound of all generations issued before the header was written.
    pub(super) next_generation: u64,
    /// Number of records in the checkpoint.
    pub(super) checkpoint_records: u64,
    /// Number of pages in the checkpoint.
    pub(super) checkpoint_pages: u32,
}

impl BankHeader {
    /// Returns the page of both copies.
    pub(super) fn encode(&self, superblock: &Superblock, bank: usize) -> Vec<u8> {
        let mut page = vec![0; PAGE];
        put(&mut page, 0, &BANK_MAGIC);
        page[BANK_INDEX_AT] = u8::try_from(bank).expect("there are two banks");
        put(&mut page, BANK_UUID_AT, &superblock.pool_uuid);
        put(&mut page, BANK_EPOCH_AT, &self.incarnation.epoch.to_le_bytes());
        put(&mut page, BANK_GENERATION_AT, &self.next_generation.to_le_bytes());
        put(&mut page, BANK_RECORDS_AT, &self.checkpoint_records.to_le_bytes());
        put(&mut page, BANK_PAGES_AT, &self.checkpoint_pages.to_le_bytes());
        put(&mut page, BANK_BEGUN_AT, &self.incarnation.begun.to_le_bytes());
        seal(&mut page);
        page
    }

    /// Decodes a copy; `None` if it is not an intact header of this bank.
    pub(super) fn decode(page: &[u8], superblock: &Superblock, bank: usize) -> Option<BankHeader> {
        intact(page)?;
        let header = BankHeader {
            incarnation: BankIncarnation {
                epoch: u64_at(page, BANK_EPOCH_AT),
                begun: u64_at(page, BANK_BEGUN_AT),
            },
            next_generation: u64_at(page, BANK_GENERATION_AT),
            checkpoint_records: u64_at(page, BANK_RECORDS_AT),
            checkpoint_pages: u32_at(page, BANK_PAGES_AT),
        };
        let ours = bytes_at(page, 0) == BANK_MAGIC
            && usize::from(page[BANK_INDEX_AT]) == bank
            && bytes_at(page, BANK_UUID_AT) == superblock.pool_uuid
            && header.checkpoint_pages <= superblock.geometry.checkpoint_pages
            && header.incarnation.epoch < GENERATION_MAX
            && header.next_generation < GENERATION_MAX;
        ours.then_some(header)
    }
}
