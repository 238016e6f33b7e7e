//! Journal records, and the pages that contain them.
//!
//! A record has 64 bytes and is self-contained: it includes the block's whole layout instead of a reference
//! to a table. A lost page thus costs exactly its own records. A page holds up to 63 records between a
//! 60-byte header and its checksum (see [`page`](super::page)).
//!
//! Invariant: a page is accepted only at the position that it names (pool, incarnation of the bank,
//! sequence). Stale pages of an earlier epoch or pool, and misdirected writes, thus read as absent.

use reprise_policy::{BlockKey, ContentId, Layout, TenantId};

use super::page::{CRC_AT, PAGE, bytes_at, intact, put, seal, u16_at, u32_at, u64_at};
use super::superblock::GENERATION_MAX;
use super::{PAGE_NUMBER_BITS, PageNumber};

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

/// The kind has the low half of its byte, and the highest bits of the page number have the other half.
const KIND_AT: usize = 0;
const KIND_BITS: u32 = 4;
const PRIORITY_AT: usize = 1;
const LAYOUT_AT: usize = 2;
const PAGE_AT: usize = 16;
const HEADER_CRC_AT: usize = 20;
const GENERATION_AT: usize = 24;
const TENANT_AT: usize = 30;
const KEY_AT: usize = 32;
const CONTENT_AT: usize = 48;

/// Bytes of a layout's encoding that a record contains; the other two are always zero.
const LAYOUT_BYTES: usize = 14;

/// Bytes of a generation in a record.
const GENERATION_BYTES: usize = 6;

const _: () = assert!(PAGE_HEADER + RECORDS_PER_PAGE * RECORD_BYTES == CRC_AT);
const _: () = assert!(LAYOUT_AT + LAYOUT_BYTES == PAGE_AT && CONTENT_AT + 16 == RECORD_BYTES);
const _: () = assert!(GENERATION_AT + GENERATION_BYTES == TENANT_AT && TENANT_AT + 2 == KEY_AT);
const _: () = assert!(GENERATION_MAX == 1 << (8 * GENERATION_BYTES));
const _: () = assert!(BEGUN_AT + 8 <= PAGE_HEADER);
const _: () = assert!(PAGE_NUMBER_BITS <= 32 + (8 - KIND_BITS));

/// Statement of a record about its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum RecordKind {
    /// The slot holds this block; its bytes were durable before the record was written.
    Store = 1,
    /// The slot no longer holds the block of this generation.
    Free = 2,
    /// The slot must not be used again.
    Quarantine = 3,
    /// The slot is lent: another process may write to it. It holds no block; key, checksum and content id are
    /// zero.
    Lend = 4,
}

/// Journal record about one slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Record {
    /// Kind of the record.
    pub(super) kind: RecordKind,
    /// Priority class of the block.
    pub(super) priority: u8,
    /// Tenant of the block.
    pub(super) tenant: TenantId,
    /// Layout of the block; determines the slot's size.
    pub(super) layout: Layout,
    /// Header page of the slot.
    pub(super) page: PageNumber,
    /// CRC32C that the slot's header page must have.
    pub(super) header_crc: u32,
    /// Generation of the slot write; increases with every write and never repeats.
    pub(super) generation: u64,
    /// Key of the block.
    pub(super) key: BlockKey,
    /// Content id of the block, or unknown.
    pub(super) content: ContentId,
}

impl Record {
    fn encode(&self, out: &mut [u8]) {
        assert!(self.page.0 >> PAGE_NUMBER_BITS == 0, "devices are bounded to 128 TiB");
        let (page, page_high) = (self.page.0.to_le_bytes(), (self.page.0 >> 32) as u8);
        out[KIND_AT] = self.kind as u8 | page_high << KIND_BITS;
        out[PRIORITY_AT] = self.priority;
        put(out, LAYOUT_AT, &self.layout.encode()[..LAYOUT_BYTES]);
        put(out, PAGE_AT, &page[..4]);
        put(out, HEADER_CRC_AT, &self.header_crc.to_le_bytes());
        assert!(self.generation < GENERATION_MAX, "a pool with exhausted generations is not opened");
        put(out, GENERATION_AT, &self.generation.to_le_bytes()[..GENERATION_BYTES]);
        put(out, TENANT_AT, &self.tenant.0.to_le_bytes());
        put(out, KEY_AT, &self.key.0);
        put(out, CONTENT_AT, &self.content.0);
    }

    fn decode(bytes: &[u8], layouts: &mut LayoutCache) -> Option<Record> {
        let page_high = u64::from(bytes[KIND_AT] >> KIND_BITS) << 32;
        let kind = match bytes[KIND_AT] & ((1 << KIND_BITS) - 1) {
            1 => RecordKind::Store,
            2 => RecordKind::Free,
            3 => RecordKind::Quarantine,
            4 => RecordKind::Lend,
            _ => return None,
        };
        let mut generation = [0; 8];
        generation[..GENERATION_BYTES].copy_from_slice(&bytes[GENERATION_AT..TENANT_AT]);
        Some(Record {
            kind,
            priority: bytes[PRIORITY_AT],
            tenant: TenantId(u16_at(bytes, TENANT_AT)),
            layout: layouts.decode(bytes_at(bytes, LAYOUT_AT))?,
            page: PageNumber(page_high | u64::from(u32_at(bytes, PAGE_AT))),
            header_crc: u32_at(bytes, HEADER_CRC_AT),
            generation: u64::from_le_bytes(generation),
            key: BlockKey(bytes_at(bytes, KEY_AT)),
            content: ContentId(bytes_at(bytes, CONTENT_AT)),
        })
    }
}

/// Cache of the layout decoded last: neighbouring records nearly always share one.
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

/// Area of a bank that contains a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Area {
    /// Checkpoint: all blocks stored when the bank was started.
    Checkpoint,
    /// Log: changes since then.
    Log,
}

impl Area {
    /// First bytes of the area's pages.
    pub(super) fn magic(self) -> [u8; 4] {
        match self {
            Area::Checkpoint => *b"RPCP",
            Area::Log => *b"RPLG",
        }
    }
}

/// Incarnation of a bank: from the bank switch that starts it to the one that overwrites it.
///
/// An interrupted bank switch starts again with the same epoch, over the remains of the first attempt. The
/// next generation at the start of the switch distinguishes the two attempts. If a record was committed in
/// between, it is higher at the second attempt. If none was, the second attempt writes all records of the
/// first one as well.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BankIncarnation {
    /// Number of the bank switch that started the incarnation.
    pub(super) epoch: u64,
    /// Next generation when the bank was started.
    pub(super) begun: u64,
}

/// Pool, bank incarnation and area that a page belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageOwner {
    /// Identity of the pool.
    pub(super) pool_uuid: [u8; 16],
    /// Incarnation of the bank.
    pub(super) incarnation: BankIncarnation,
    /// Area within the bank.
    pub(super) area: Area,
}

/// Other fields of a page's header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PageHead {
    /// Index of the page in its area, from zero.
    pub(super) sequence: u32,
    /// Sequence of the first page of the page's group, which was written and synced as a whole.
    pub(super) group_first: u32,
    /// Number of pages in the group.
    pub(super) group_pages: u16,
    /// Upper bound of all generations issued before the page was written.
    pub(super) next_generation: u64,
}

/// Builds a page.
///
/// # Panics
/// If there are more than [`RECORDS_PER_PAGE`] records.
pub(super) fn encode_page(out: &mut [u8], owner: &PageOwner, head: &PageHead, records: &[Record]) {
    assert!(records.len() <= RECORDS_PER_PAGE, "a page holds {RECORDS_PER_PAGE} records");
    let count = u16::try_from(records.len()).expect("at most 63");
    out.fill(0);
    put(out, MAGIC_AT, &owner.area.magic());
    put(out, COUNT_AT, &count.to_le_bytes());
    put(out, GROUP_PAGES_AT, &head.group_pages.to_le_bytes());
    put(out, UUID_AT, &owner.pool_uuid);
    put(out, EPOCH_AT, &owner.incarnation.epoch.to_le_bytes());
    put(out, BEGUN_AT, &owner.incarnation.begun.to_le_bytes());
    put(out, SEQUENCE_AT, &head.sequence.to_le_bytes());
    put(out, GROUP_FIRST_AT, &head.group_first.to_le_bytes());
    put(out, NEXT_GENERATION_AT, &head.next_generation.to_le_bytes());
    let slots = out[PAGE_HEADER..CRC_AT].chunks_exact_mut(RECORD_BYTES);
    records.iter().zip(slots).for_each(|(record, slot)| record.encode(slot));
    seal(out);
}

/// Builds consecutive pages of a group, with the last one padded.
///
/// # Panics
/// If the group has too many pages for its 16-bit field; callers bound it far below.
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

/// Number of pages for a group of records; at least one.
pub(super) fn group_pages(records: usize) -> u32 {
    u32::try_from(records.div_ceil(RECORDS_PER_PAGE).max(1)).expect("records of one group are bounded")
}

/// Contents of the place of a page.
#[derive(Debug)]
pub(super) enum FoundPage<'a> {
    /// The expected page.
    Page(PageHead, PageRecords<'a>),
    /// Damaged page of this pool: torn while it was written, or corrupted since.
    Damaged,
    /// No such page: blank, a page of an earlier epoch or of another pool, or other data.
    Absent,
}

/// Decodes the page at the place of page `sequence` of `owner`.
pub(super) fn decode_page<'a>(bytes: &'a [u8], owner: &PageOwner, sequence: u32) -> FoundPage<'a> {
    if bytes.len() != PAGE {
        return FoundPage::Damaged;
    }
    let matches =
        [bytes_at(bytes, MAGIC_AT) == owner.area.magic(), bytes_at(bytes, UUID_AT) == owner.pool_uuid];
    if matches == [false; 2] {
        return FoundPage::Absent;
    }
    if intact(bytes).is_none() {
        return FoundPage::Damaged;
    }
    if matches != [true; 2]
        || incarnation_of(bytes) != owner.incarnation
        || u32_at(bytes, SEQUENCE_AT) != sequence
    {
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

/// Returns the incarnation in a page's header, without any other check.
pub(super) fn incarnation_of(page: &[u8]) -> BankIncarnation {
    BankIncarnation { epoch: u64_at(page, EPOCH_AT), begun: u64_at(page, BEGUN_AT) }
}

/// Records of an intact page.
#[derive(Clone, Copy, Debug)]
pub(super) struct PageRecords<'a> {
    records: &'a [u8],
}

impl<'a> PageRecords<'a> {
    /// Iterates the records in order; `None` represents a record that this version cannot read.
    pub(super) fn iter(
        self,
        layouts: &mut LayoutCache,
    ) -> impl Iterator<Item = Option<Record>> + use<'a, '_> {
        self.records.chunks_exact(RECORD_BYTES).map(|bytes| Record::decode(bytes, layouts))
    }
}
