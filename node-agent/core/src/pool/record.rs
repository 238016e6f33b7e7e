//! Journal records and the pages that carry them.
//!
//! A record is 64 bytes and complete in itself: it carries the block's whole layout instead of a reference to a
//! table, so a lost page costs exactly the records it held and no other page's meaning.
//! A page holds up to 63 records behind a 60-byte header and before its checksum (see [`page`](super::page)).
//!
//! Invariant: a page is only accepted for the place that it names (pool, life of the bank, sequence), so stale pages of
//! an earlier epoch or of an earlier pool on the same device, and misdirected writes, read as absent.

use reprise_policy::{BlockKey, ContentId, Layout, TenantId};

use super::PageNumber;
use super::page::{CRC_AT, PAGE, bytes_at, intact, put, seal, u16_at, u32_at, u64_at};
use super::superblock::GENERATION_MAX;

/// Bytes of a record.
pub(super) const RECORD_BYTES: usize = 64;

/// Records of a page: (4096 − 60 − 4) / 64.
pub(super) const RECORDS_PER_PAGE: usize = 63;

/// Bytes of a page before its records.
const PAGE_HEADER: usize = 60;

const MAGIC_AT: usize = 0;
const COUNT_AT: usize = 4;
const GROUP_PAGES_AT: usize = 6;
const UUID_AT: usize = 8;
const EPOCH_AT: usize = 24;
const SEQUENCE_AT: usize = 32;
const GROUP_FIRST_AT: usize = 36;
const NEXT_GENERATION_AT: usize = 40;
const BEGUN_AT: usize = 48;

const KIND_AT: usize = 0;
const PRIORITY_AT: usize = 1;
const LAYOUT_AT: usize = 2;
const PAGE_AT: usize = 16;
const HEADER_CRC_AT: usize = 20;
const GENERATION_AT: usize = 24;
const TENANT_AT: usize = 30;
const KEY_AT: usize = 32;
const CONTENT_AT: usize = 48;

/// Bytes of a layout's encoding that a record keeps; the other two are always zero.
const LAYOUT_BYTES: usize = 14;

/// Bytes of a generation in a record. Version 1 had eight; those beyond six were never anything but zero.
const GENERATION_BYTES: usize = 6;

const _: () = assert!(PAGE_HEADER + RECORDS_PER_PAGE * RECORD_BYTES == CRC_AT);
const _: () = assert!(LAYOUT_AT + LAYOUT_BYTES == PAGE_AT && CONTENT_AT + 16 == RECORD_BYTES);
const _: () = assert!(GENERATION_AT + GENERATION_BYTES == TENANT_AT && TENANT_AT + 2 == KEY_AT);
const _: () = assert!(GENERATION_MAX == 1 << (8 * GENERATION_BYTES));
const _: () = assert!(BEGUN_AT + 8 <= PAGE_HEADER);

/// What a record says about its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// The slot holds this block; its bytes were durable before this record was written.
    Store = 1,
    /// The slot no longer holds the block of this generation.
    Free = 2,
    /// The slot must not be used any more.
    Quarantine = 3,
}

/// One fact about one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// What happened.
    pub(super) kind: RecordKind,
    /// Priority class of the block.
    pub(super) priority: u8,
    /// Whose block it is; in records of version 1 always the default tenant's.
    pub(super) tenant: TenantId,
    /// Geometry of the block; gives the slot's size.
    pub(super) layout: Layout,
    /// The slot.
    pub(super) page: PageNumber,
    /// CRC32C that the slot's header page must have.
    pub(super) header_crc: u32,
    /// Number of the write that this is about; greater is later, none is used twice.
    pub(super) generation: u64,
    /// Key of the block.
    pub(super) key: BlockKey,
    /// Content id of the block, or unknown.
    pub(super) content: ContentId,
}

impl Record {
    fn encode(&self, out: &mut [u8]) {
        out[KIND_AT] = self.kind as u8;
        out[PRIORITY_AT] = self.priority;
        put(out, LAYOUT_AT, &self.layout.encode()[..LAYOUT_BYTES]);
        put(out, PAGE_AT, &self.page.0.to_le_bytes());
        put(out, HEADER_CRC_AT, &self.header_crc.to_le_bytes());
        assert!(self.generation < GENERATION_MAX, "a pool is not opened when its generations run out");
        put(out, GENERATION_AT, &self.generation.to_le_bytes()[..GENERATION_BYTES]);
        put(out, TENANT_AT, &self.tenant.0.to_le_bytes());
        put(out, KEY_AT, &self.key.0);
        put(out, CONTENT_AT, &self.content.0);
    }

    fn decode(bytes: &[u8], layouts: &mut LayoutCache) -> Option<Record> {
        let kind = match bytes[KIND_AT] {
            1 => RecordKind::Store,
            2 => RecordKind::Free,
            3 => RecordKind::Quarantine,
            _ => return None,
        };
        let mut generation = [0; 8];
        generation[..GENERATION_BYTES].copy_from_slice(&bytes[GENERATION_AT..TENANT_AT]);
        Some(Record {
            kind,
            priority: bytes[PRIORITY_AT],
            tenant: TenantId(u16_at(bytes, TENANT_AT)),
            layout: layouts.decode(bytes_at(bytes, LAYOUT_AT))?,
            page: PageNumber(u32_at(bytes, PAGE_AT)),
            header_crc: u32_at(bytes, HEADER_CRC_AT),
            generation: u64::from_le_bytes(generation),
            key: BlockKey(bytes_at(bytes, KEY_AT)),
            content: ContentId(bytes_at(bytes, CONTENT_AT)),
        })
    }
}

/// Remembers the layout decoded last: neighbouring records nearly always share one.
#[derive(Debug, Default)]
pub(super) struct LayoutCache {
    last: Option<([u8; LAYOUT_BYTES], Layout)>,
}

impl LayoutCache {
    fn decode(&mut self, bytes: [u8; LAYOUT_BYTES]) -> Option<Layout> {
        if let Some((known, layout)) = self.last
            && known == bytes
        {
            return Some(layout);
        }
        let mut encoding = [0; 16];
        encoding[..LAYOUT_BYTES].copy_from_slice(&bytes);
        let layout = Layout::decode(&encoding)?;
        self.last = Some((bytes, layout));
        Some(layout)
    }
}

/// Which of the two page sequences of a bank a page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Area {
    /// Everything that was stored when the bank was begun.
    Checkpoint,
    /// What happened since.
    Log,
}

impl Area {
    /// First bytes of its pages.
    pub(super) fn magic(self) -> [u8; 4] {
        match self {
            Area::Checkpoint => *b"RPCP",
            Area::Log => *b"RPLG",
        }
    }
}

/// One life of a bank: from the change of banks that begins it to the one that overwrites it.
///
/// A change that is cut off is begun again, with the same epoch, over what the first one left behind. The generation that
/// was next when it began tells the two apart: if anything was committed in between, it is greater the second time, and
/// if nothing was, the first one has left no records that the second one does not write as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BankLife {
    /// Counts bank changes.
    pub(super) epoch: u64,
    /// The next generation when the bank was begun.
    pub(super) begun: u64,
}

/// The pool and the life of a bank that a page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageOwner {
    /// The pool.
    pub(super) pool_uuid: [u8; 16],
    /// The bank's life.
    pub(super) life: BankLife,
    /// Where in the bank.
    pub(super) area: Area,
}

/// What a page's header says besides whose it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHead {
    /// Index of the page in its area, from zero.
    pub(super) sequence: u32,
    /// Sequence of the first page of the group that was written and synced together with this one.
    pub(super) group_first: u32,
    /// Pages of that group.
    pub(super) group_pages: u16,
    /// Every generation issued before the page was written is smaller.
    pub(super) next_generation: u64,
}

/// Builds a page.
///
/// # Panics
/// When there are more than [`RECORDS_PER_PAGE`] records.
pub(super) fn encode_page(out: &mut [u8], owner: &PageOwner, head: &PageHead, records: &[Record]) {
    assert!(records.len() <= RECORDS_PER_PAGE, "a page holds {RECORDS_PER_PAGE} records");
    let count = u16::try_from(records.len()).expect("at most 63");
    out.fill(0);
    put(out, MAGIC_AT, &owner.area.magic());
    put(out, COUNT_AT, &count.to_le_bytes());
    put(out, GROUP_PAGES_AT, &head.group_pages.to_le_bytes());
    put(out, UUID_AT, &owner.pool_uuid);
    put(out, EPOCH_AT, &owner.life.epoch.to_le_bytes());
    put(out, BEGUN_AT, &owner.life.begun.to_le_bytes());
    put(out, SEQUENCE_AT, &head.sequence.to_le_bytes());
    put(out, GROUP_FIRST_AT, &head.group_first.to_le_bytes());
    put(out, NEXT_GENERATION_AT, &head.next_generation.to_le_bytes());
    let slots = out[PAGE_HEADER..CRC_AT].chunks_exact_mut(RECORD_BYTES);
    records.iter().zip(slots).for_each(|(record, slot)| record.encode(slot));
    seal(out);
}

/// Builds consecutive pages that are written and synced together, the last one padded.
///
/// # Panics
/// When the group has more pages than its 16-bit field can say; callers bound it far below.
pub(super) fn encode_group(
    owner: &PageOwner,
    first: u32,
    next_generation: u64,
    records: &[Record],
) -> Vec<u8> {
    let pages = group_pages(records.len());
    let group_pages = u16::try_from(pages).expect("groups are bounded below 65,536 pages");
    let mut out = vec![0; pages as usize * PAGE];
    let mut rest = records;
    for (sequence, page) in (first..).zip(out.chunks_exact_mut(PAGE)) {
        let (these, later) = rest.split_at(rest.len().min(RECORDS_PER_PAGE));
        encode_page(
            page,
            owner,
            &PageHead { sequence, group_first: first, group_pages, next_generation },
            these,
        );
        rest = later;
    }
    out
}

/// Pages of a group of so many records: at least one.
pub(super) fn group_pages(records: usize) -> u32 {
    u32::try_from(records.div_ceil(RECORDS_PER_PAGE).max(1)).expect("records of one group are bounded")
}

/// What is found where a page should be.
#[derive(Debug)]
pub(super) enum FoundPage<'a> {
    /// The page.
    Page(PageHead, PageRecords<'a>),
    /// Traces of a page of this pool, but no intact one: torn while it was written, or rotten.
    Damaged,
    /// Something else: nothing, an intact page of an earlier epoch, another pool's.
    Absent,
}

/// Checks the page found where page `sequence` of `owner` belongs.
pub(super) fn decode_page<'a>(bytes: &'a [u8], owner: &PageOwner, sequence: u32) -> FoundPage<'a> {
    if bytes.len() != PAGE {
        return FoundPage::Damaged;
    }
    let kin = [bytes_at(bytes, MAGIC_AT) == owner.area.magic(), bytes_at(bytes, UUID_AT) == owner.pool_uuid];
    if kin == [false; 2] {
        return FoundPage::Absent;
    }
    if intact(bytes).is_none() {
        return FoundPage::Damaged;
    }
    if kin != [true; 2] || life_of(bytes) != owner.life || u32_at(bytes, SEQUENCE_AT) != sequence {
        return FoundPage::Absent;
    }
    let count = usize::from(u16_at(bytes, COUNT_AT));
    let head = PageHead {
        sequence,
        group_first: u32_at(bytes, GROUP_FIRST_AT),
        group_pages: u16_at(bytes, GROUP_PAGES_AT),
        next_generation: u64_at(bytes, NEXT_GENERATION_AT),
    };
    if count > RECORDS_PER_PAGE || head.group_first > sequence {
        return FoundPage::Damaged;
    }
    FoundPage::Page(head, PageRecords { records: &bytes[PAGE_HEADER..PAGE_HEADER + count * RECORD_BYTES] })
}

/// The life of the bank that a page says it belongs to, whatever else it is.
pub(super) fn life_of(page: &[u8]) -> BankLife {
    BankLife { epoch: u64_at(page, EPOCH_AT), begun: u64_at(page, BEGUN_AT) }
}

/// The records of an intact page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageRecords<'a> {
    records: &'a [u8],
}

impl<'a> PageRecords<'a> {
    /// The records in order; `None` stands for one that this version cannot read.
    pub(super) fn iter(
        self,
        layouts: &mut LayoutCache,
    ) -> impl Iterator<Item = Option<Record>> + use<'a, '_> {
        self.records.chunks_exact(RECORD_BYTES).map(|bytes| Record::decode(bytes, layouts))
    }
}
