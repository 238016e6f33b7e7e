//! Slots of a device: their sizes, states and contents.
//!
//! A segment belongs to one slot size from its first use until its last slot is free again. The size is not
//! recorded: the layouts of the blocks in the segment determine it, and a segment without blocks is
//! unassigned.
//!
//! ```text
//! Free ──allocate──► Reserved ──begin_write──► Writing ──commit──► Stored ──begin_free──► Freeing ──finish_free──► Free
//!                       └──────release──────► Free   └──quarantine──► Quarantined ◄──quarantine──┘
//!
//! Reserved ──lend──► Lent ──begin_commit──► Writing     Lent ──begin_free──► Returning ──finish_free──► Free
//! ```
//!
//! Stored ──withdraw──► Lent: the block is removed while another process reads its slot.
//!
//! A lent slot is accessed by another process. It becomes free only by a durable record, like a stored block.
//!
//! Memory: 32 bytes per slot and 32 per segment. Nothing else grows with the number of blocks, except a map
//! entry per known content id. A free slot stores the link of its segment's free list in place of a block.
//!
//! Invariants ([`Slots::audit`]): every slot is in exactly one state, and the counters match the slots. The
//! bytes used, free, being freed, quarantined and unusable add up to the data area.

mod audit;
mod drain;
mod freeing;
mod lend;
mod read_only;
mod restore;

pub(super) use restore::Restored;

use std::collections::{BTreeMap, BTreeSet};

use reprise_policy::layout::PAGE_BYTES;
use reprise_policy::{BlockKey, ContentId, Generation};

use super::geometry::Geometry;
use super::layouts::{LayoutIndex, Layouts, TenantLayout};
use super::record::{Record, RecordKind};
use super::{PageNumber, StoredBlock};

/// End marker of a free list.
const NO_SLOT: u32 = u32::MAX;

/// State of a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub(super) enum SlotState {
    /// Empty, and on its segment's free list.
    Free,
    /// Allocated, and not written yet.
    Reserved,
    /// Being written, or waiting for its record to become durable.
    Writing,
    /// Written by another process or offered to it, or read by one after the removal of its block.
    Lent,
    /// Holds a block with a durable record.
    Stored,
    /// Holds a block whose free record is not durable yet.
    Freeing,
    /// Was lent; its free record is not durable yet. No process writes to it, so a checkpoint omits it.
    Returning,
    /// Never used again.
    Quarantined,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Slot {
    key: BlockKey,
    generation: u64,
    /// CRC32C of the header page; in a free slot, the index of the next free one.
    header_crc: u32,
    layout: LayoutIndex,
    priority: u8,
    state: SlotState,
}

const _: () = assert!(size_of::<Slot>() == 32, "the memory budget of a stored block counts on it");

const FREE_SLOT: Slot = Slot {
    key: BlockKey([0; 16]),
    generation: 0,
    header_crc: NO_SLOT,
    layout: LayoutIndex(0),
    priority: 0,
    state: SlotState::Free,
};

/// Run of slots of one size.
#[derive(Debug, Default)]
pub(super) struct Segment {
    /// Pages of a slot; zero while the segment is unassigned.
    pub(super) slot_pages: u32,
    /// Number of free slots.
    free: u32,
    /// First slot of the free list.
    free_head: u32,
    /// Slots of the segment.
    pub(super) slots: Box<[Slot]>,
}

const _: () = assert!(size_of::<Segment>() <= 32);

/// Segments of one slot size that have free slots.
#[derive(Debug, Default)]
struct FreeSegments {
    /// Segment numbers. Low ones are used first, so that high ones become empty.
    with_free: BTreeSet<u32>,
    /// Number of free slots in these segments.
    free: u64,
}

/// Position of a slot in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SlotPlace {
    segment: usize,
    slot: usize,
}

/// Pages of the data area by use. Together they are the pages of all segments.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tally {
    /// Pages of reserved, lent, written and stored slots.
    pub(super) used: u64,
    /// Pages of free slots and unassigned segments.
    pub(super) free: u64,
    /// Pages of slots whose free record is not durable yet.
    pub(super) freeing: u64,
    /// Pages of quarantined slots.
    pub(super) quarantined: u64,
    /// Pages at the ends of assigned segments, where no slot fits.
    pub(super) slack: u64,
    /// Number of slots that are not free.
    pub(super) entries: u64,
    /// Number of quarantined slots.
    pub(super) quarantined_slots: u64,
    /// Number of stored blocks, without those being freed.
    pub(super) stored: u64,
    /// Number of slots of assigned segments.
    pub(super) slots: u64,
}

/// Contents of a slot after a write.
#[derive(Clone, Copy, Debug)]
pub(super) struct SlotContent {
    /// Key of the block.
    pub(super) key: BlockKey,
    /// Tenant and layout of the block, already counted by [`Slots::acquire_layout`].
    pub(super) layout: LayoutIndex,
    /// Generation of the write.
    pub(super) generation: u64,
    /// CRC32C of the header page.
    pub(super) header_crc: u32,
    /// Priority class of the block.
    pub(super) priority: u8,
    /// Content id of the block, or unknown.
    pub(super) content: ContentId,
}

/// All slots of a device.
#[derive(Debug)]
pub(super) struct Slots {
    data_page: u64,
    segment_pages: u32,
    entries_max: u64,
    segments: Vec<Segment>,
    /// By slot size in pages; only sizes with a free slot.
    free_segments: BTreeMap<u32, FreeSegments>,
    unassigned: BTreeSet<u32>,
    /// Segments that are being emptied: their slots are not allocated.
    draining: BTreeSet<u32>,
    /// Number of slots whose free record is not durable yet, by slot size in pages; without zero counts.
    freeing: BTreeMap<u32, u64>,
    layouts: Layouts,
    contents: BTreeMap<PageNumber, ContentId>,
    tally: Tally,
}

impl Slots {
    /// Creates the slots of a device without blocks.
    pub(super) fn new(geometry: &Geometry) -> Slots {
        let segments = (0..geometry.segments).map(|_| Segment::default()).collect();
        Slots {
            data_page: geometry.data_page(),
            segment_pages: geometry.segment_pages(),
            entries_max: geometry.entries_max,
            segments,
            free_segments: BTreeMap::new(),
            unassigned: (0..geometry.segments).collect(),
            draining: BTreeSet::new(),
            freeing: BTreeMap::new(),
            layouts: Layouts::default(),
            contents: BTreeMap::new(),
            tally: Tally {
                free: u64::from(geometry.segments) * u64::from(geometry.segment_pages()),
                ..Tally::default()
            },
        }
    }

    /// Appends segments without blocks, up to this number of segments.
    pub(super) fn grow(&mut self, segments: u32) {
        let before = u32::try_from(self.segments.len()).expect("fewer than 2^26 segments");
        self.segments.resize_with(segments as usize, Segment::default);
        self.unassigned.extend(before..segments);
        self.tally.free += u64::from(segments - before) * u64::from(self.segment_pages);
    }

    /// Pages of the data area by use.
    pub(super) fn tally(&self) -> &Tally {
        &self.tally
    }

    /// Total pages of the data area.
    pub(super) fn capacity_pages(&self) -> u64 {
        self.segments.len() as u64 * u64::from(self.segment_pages)
    }

    /// Allocates a slot of `slot_pages` pages, header page included.
    pub(super) fn allocate(&mut self, slot_pages: u32) -> Option<PageNumber> {
        if slot_pages > self.segment_pages || self.tally.entries >= self.entries_max {
            return None;
        }
        let segment = match self.free_segments.get(&slot_pages).and_then(|of_size| of_size.with_free.first())
        {
            Some(segment) => *segment,
            None => self.assign_one(slot_pages)?,
        };
        let place = self.pop_free(segment);
        self.slot_mut(place).state = SlotState::Reserved;
        self.tally.free -= u64::from(slot_pages);
        self.tally.used += u64::from(slot_pages);
        self.tally.entries += 1;
        Some(self.page_of(place))
    }

    /// Number of slots of this size that could be allocated now.
    pub(super) fn allocatable(&self, slot_pages: u32) -> u64 {
        if slot_pages == 0 || slot_pages > self.segment_pages {
            return 0;
        }
        let in_segments = self.free_segments.get(&slot_pages).map_or(0, |of_size| of_size.free);
        let per_segment = u64::from(self.segment_pages / slot_pages);
        let slots = in_segments + self.unassigned.len() as u64 * per_segment;
        slots.min(self.entries_max.saturating_sub(self.tally.entries))
    }

    /// Releases an allocated slot that was not written.
    pub(super) fn release(&mut self, page: PageNumber) {
        let place = self.expect_state(page, SlotState::Reserved);
        self.tally.used -= u64::from(self.segments[place.segment].slot_pages);
        self.push_free(place);
    }

    /// Returns the index of a tenant's layout and counts one more user; `None` if the table is full.
    pub(super) fn acquire_layout(&mut self, tenant_layout: &TenantLayout) -> Option<LayoutIndex> {
        self.layouts.acquire(tenant_layout)
    }

    /// Records the contents of a slot that is being written; returns the slot's payload bytes.
    pub(super) fn begin_write(&mut self, page: PageNumber, content: &SlotContent) -> u64 {
        let place = self.expect_state(page, SlotState::Reserved);
        self.fill(place, content, SlotState::Writing);
        u64::from(self.segments[place.segment].slot_pages - 1) * PAGE_BYTES
    }

    /// Frees a slot whose write the device did not start.
    pub(super) fn abandon_write(&mut self, page: PageNumber) {
        let place = self.expect_state(page, SlotState::Writing);
        self.tally.used -= u64::from(self.segments[place.segment].slot_pages);
        self.layouts.release(self.slot(place).layout);
        self.contents.remove(&page);
        self.push_free(place);
    }

    /// Marks a written block as stored, after its record became durable.
    pub(super) fn commit(&mut self, page: PageNumber) -> StoredBlock {
        let place = self.expect_state(page, SlotState::Writing);
        self.slot_mut(place).state = SlotState::Stored;
        self.tally.stored += 1;
        self.stored_block(place)
    }

    /// Starts to free a stored block or a lent slot; returns its free record, or `None` if the slot is
    /// quarantined.
    pub(super) fn begin_free(&mut self, page: PageNumber) -> Option<Record> {
        let place = self.place(page).expect("only stored blocks and lent slots are freed");
        match self.slot(place).state {
            SlotState::Quarantined => return None,
            SlotState::Lent => self.slot_mut(place).state = SlotState::Returning,
            state => {
                assert_eq!(state, SlotState::Stored, "only stored blocks are freed, and once");
                self.tally.stored -= 1;
                self.slot_mut(place).state = SlotState::Freeing;
            }
        }
        let pages = u64::from(self.segments[place.segment].slot_pages);
        self.tally.used -= pages;
        self.count_freeing(place);
        Some(self.record(place, RecordKind::Free))
    }

    /// Frees a slot whose free record is durable; `false` if the slot was quarantined meanwhile.
    pub(super) fn finish_free(&mut self, page: PageNumber) -> bool {
        let place = self.place(page).expect("a slot keeps its segment while it is being freed");
        if self.slot(place).state == SlotState::Quarantined {
            return false;
        }
        assert!(self.slot(place).state.is_being_freed(), "only slots being freed become free");
        self.uncount_freeing(place);
        self.layouts.release(self.slot(place).layout);
        self.contents.remove(&page);
        self.push_free(place);
        true
    }

    /// Quarantines a slot permanently; returns its record, or `None` if it was quarantined before.
    pub(super) fn quarantine(&mut self, page: PageNumber) -> Option<Record> {
        let place = self.place(page).expect("only slots that were written are quarantined");
        let pages = u64::from(self.segments[place.segment].slot_pages);
        match self.slot(place).state {
            SlotState::Quarantined => return None,
            SlotState::Writing => self.tally.used -= pages,
            SlotState::Freeing | SlotState::Returning => self.uncount_freeing(place),
            SlotState::Stored => {
                self.tally.used -= pages;
                self.tally.stored -= 1;
            }
            SlotState::Free | SlotState::Reserved | SlotState::Lent => {
                panic!("only slots that were written are quarantined")
            }
        }
        self.slot_mut(place).state = SlotState::Quarantined;
        self.tally.quarantined += pages;
        self.tally.quarantined_slots += 1;
        self.end_drain(u32::try_from(place.segment).expect("fewer than 2^26 segments"));
        Some(self.record(place, RecordKind::Quarantine))
    }

    /// Returns the record of a slot that a batch wrote: a store, or a quarantine if the write failed.
    pub(super) fn record_of_write(&self, page: PageNumber) -> Record {
        let place = self.place(page).expect("a slot keeps its segment while it is being written");
        match self.slot(place).state {
            SlotState::Writing => self.record(place, RecordKind::Store),
            SlotState::Quarantined => self.record(place, RecordKind::Quarantine),
            state => unreachable!("a slot that is being written is not {state:?}"),
        }
    }

    /// Returns the record of a slot for a checkpoint. A block that is being written has none, because it is
    /// not durable.
    pub(super) fn record_at(&self, place: SlotPlace) -> Option<Record> {
        match self.slot(place).state {
            SlotState::Free | SlotState::Reserved | SlotState::Writing | SlotState::Returning => None,
            SlotState::Lent => Some(self.record(place, RecordKind::Lend)),
            SlotState::Stored | SlotState::Freeing => Some(self.record(place, RecordKind::Store)),
            SlotState::Quarantined => Some(self.record(place, RecordKind::Quarantine)),
        }
    }

    /// Returns the block stored at a page, if any.
    pub(super) fn stored(&self, page: PageNumber) -> Option<StoredBlock> {
        let place = self.place(page)?;
        (self.slot(place).state == SlotState::Stored).then(|| self.stored_block(place))
    }

    /// Content id of the block at a page.
    fn content(&self, page: PageNumber) -> ContentId {
        self.contents.get(&page).copied().unwrap_or(ContentId::UNKNOWN)
    }

    /// Returns the next slot at or after `cursor` in device order, and the cursor behind it.
    pub(super) fn next_place(&self, mut cursor: SlotPlace) -> Option<(SlotPlace, SlotPlace)> {
        loop {
            let segment = self.segments.get(cursor.segment)?;
            if cursor.slot < segment.slots.len() {
                return Some((cursor, SlotPlace { segment: cursor.segment, slot: cursor.slot + 1 }));
            }
            cursor = SlotPlace { segment: cursor.segment + 1, slot: 0 };
        }
    }

    /// First cursor for [`Slots::next_place`].
    pub(super) const FIRST_PLACE: SlotPlace = SlotPlace { segment: 0, slot: 0 };

    /// Bytes of memory used for slots and segments.
    pub(super) fn memory_bytes(&self) -> usize {
        let slots = usize::try_from(self.tally.slots).expect("as many as are in memory") * size_of::<Slot>();
        let segments = self.segments.capacity() * size_of::<Segment>();
        let sets: usize = self.free_segments.values().map(|of_size| of_size.with_free.len()).sum::<usize>()
            + self.unassigned.len();
        slots
            + segments
            + sets * size_of::<u32>()
            + self.contents.len() * size_of::<(PageNumber, ContentId)>()
    }

    fn fill(&mut self, place: SlotPlace, content: &SlotContent, state: SlotState) {
        let page = self.page_of(place);
        *self.slot_mut(place) = Slot {
            key: content.key,
            generation: content.generation,
            header_crc: content.header_crc,
            layout: content.layout,
            priority: content.priority,
            state,
        };
        if content.content != ContentId::UNKNOWN {
            self.contents.insert(page, content.content);
        }
    }

    fn record(&self, place: SlotPlace, kind: RecordKind) -> Record {
        let (slot, page) = (self.slot(place), self.page_of(place));
        let TenantLayout { tenant, layout } = self.layouts.get(slot.layout);
        Record {
            kind,
            priority: slot.priority,
            tenant,
            layout,
            page,
            header_crc: slot.header_crc,
            generation: slot.generation,
            key: slot.key,
            content: self.content(page),
        }
    }

    fn stored_block(&self, place: SlotPlace) -> StoredBlock {
        let slot = self.slot(place);
        let TenantLayout { tenant, layout } = self.layouts.get(slot.layout);
        StoredBlock {
            key: slot.key,
            tenant,
            layout,
            page: self.page_of(place),
            generation: short(slot.generation),
            header_crc: slot.header_crc,
            priority: slot.priority,
        }
    }

    fn assign_one(&mut self, slot_pages: u32) -> Option<u32> {
        let segment = self.unassigned.pop_first()?;
        self.assign(segment as usize, slot_pages);
        self.link_free(segment as usize);
        Some(segment)
    }

    /// Assigns an empty segment to a slot size.
    fn assign(&mut self, segment: usize, slot_pages: u32) {
        let count = self.segment_pages / slot_pages;
        self.segments[segment] = Segment {
            slot_pages,
            free: count,
            free_head: NO_SLOT,
            slots: vec![FREE_SLOT; count as usize].into_boxed_slice(),
        };
    }

    /// Builds the free list of an assigned segment, lowest slot first, and lists the segment if it has free
    /// slots.
    fn link_free(&mut self, index: usize) {
        let segment = &mut self.segments[index];
        segment.free_head = NO_SLOT;
        segment.free = 0;
        let slots = segment.slots.iter_mut().enumerate().rev();
        for (number, slot) in slots.filter(|(_, slot)| slot.state == SlotState::Free) {
            slot.header_crc = segment.free_head;
            segment.free_head = u32::try_from(number).expect("a segment has fewer than 2^20 slots");
            segment.free += 1;
        }
        let slack =
            self.segment_pages - segment.slot_pages * u32::try_from(segment.slots.len()).expect("as above");
        self.tally.slack += u64::from(slack);
        self.tally.free -= u64::from(slack);
        self.tally.slots += segment.slots.len() as u64;
        if segment.free > 0 {
            let of_size = self.free_segments.entry(segment.slot_pages).or_default();
            of_size.with_free.insert(u32::try_from(index).expect("fewer than 2^26 segments"));
            of_size.free += u64::from(segment.free);
        }
    }

    fn pop_free(&mut self, index: u32) -> SlotPlace {
        let segment = &mut self.segments[index as usize];
        let slot = segment.free_head as usize;
        segment.free_head = segment.slots[slot].header_crc;
        segment.free -= 1;
        let (slot_pages, full) = (segment.slot_pages, segment.free == 0);
        let of_size =
            self.free_segments.get_mut(&slot_pages).expect("a segment with a free slot is in its class");
        of_size.free -= 1;
        if full {
            self.remove_free_segment(slot_pages, index);
        }
        SlotPlace { segment: index as usize, slot }
    }

    /// Adds a slot to its segment's free list; a segment without blocks becomes unassigned.
    fn push_free(&mut self, place: SlotPlace) {
        let index = u32::try_from(place.segment).expect("fewer than 2^26 segments");
        let segment = &mut self.segments[place.segment];
        segment.slots[place.slot] = Slot { header_crc: segment.free_head, ..FREE_SLOT };
        segment.free_head = u32::try_from(place.slot).expect("a segment has fewer than 2^20 slots");
        segment.free += 1;
        let slot_pages = segment.slot_pages;
        self.tally.free += u64::from(slot_pages);
        self.tally.entries -= 1;
        let (free, empty) = (segment.free, segment.free as usize == segment.slots.len());
        let drains = self.draining.contains(&index);
        if !drains {
            let of_size = self.free_segments.entry(slot_pages).or_default();
            of_size.with_free.insert(index);
            of_size.free += 1;
        }
        if !empty {
            return;
        }
        if !drains {
            let of_size = self.free_segments.get_mut(&slot_pages).expect("just entered");
            of_size.free -= u64::from(free);
            self.remove_free_segment(slot_pages, index);
        }
        let slack = self.segment_pages - slot_pages * free;
        self.segments[place.segment] = Segment::default();
        self.tally.slack -= u64::from(slack);
        self.tally.free += u64::from(slack);
        self.tally.slots -= u64::from(free);
        self.draining.remove(&index);
        self.unassigned.insert(index);
    }

    fn remove_free_segment(&mut self, slot_pages: u32, segment: u32) {
        let of_size =
            self.free_segments.get_mut(&slot_pages).expect("a segment with a free slot is in its class");
        of_size.with_free.remove(&segment);
        if of_size.with_free.is_empty() {
            self.free_segments.remove(&slot_pages);
        }
    }

    fn expect_state(&self, page: PageNumber, state: SlotState) -> SlotPlace {
        let place = self.place(page).expect("page numbers come from `allocate` or from recovery");
        assert_eq!(self.slot(place).state, state, "slot {page:?}");
        place
    }

    /// Splits a page of the data area into its segment and its position there.
    fn split(&self, page: PageNumber) -> Option<(u32, u32)> {
        let (offset, pages) = (page.0.checked_sub(self.data_page)?, u64::from(self.segment_pages));
        let within = u32::try_from(offset % pages).expect("below the pages of a segment");
        Some((u32::try_from(offset / pages).ok()?, within))
    }

    /// Number of a segment's first page.
    fn first_page(&self, segment: u32) -> u64 {
        self.data_page + u64::from(segment) * u64::from(self.segment_pages)
    }

    /// Returns the slot that begins at a page, if any.
    fn place(&self, page: PageNumber) -> Option<SlotPlace> {
        let (index, within) = self.split(page)?;
        let index = index as usize;
        let segment = self.segments.get(index)?;
        if segment.slot_pages == 0 || !within.is_multiple_of(segment.slot_pages) {
            return None;
        }
        let slot = (within / segment.slot_pages) as usize;
        (slot < segment.slots.len()).then_some(SlotPlace { segment: index, slot })
    }

    fn page_of(&self, place: SlotPlace) -> PageNumber {
        let segment = u32::try_from(place.segment).expect("fewer than 2^26 segments");
        let slot_pages = u64::from(self.segments[place.segment].slot_pages);
        PageNumber(self.first_page(segment) + place.slot as u64 * slot_pages)
    }

    fn slot(&self, place: SlotPlace) -> &Slot {
        &self.segments[place.segment].slots[place.slot]
    }

    fn slot_mut(&mut self, place: SlotPlace) -> &mut Slot {
        &mut self.segments[place.segment].slots[place.slot]
    }
}

/// Part of a generation that headers and the index contain.
pub(super) fn short(generation: u64) -> Generation {
    let bytes = generation.to_le_bytes();
    Generation(u32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]]))
}

/// Pages of a device slot for a payload of this size, including the header page.
pub(super) fn slot_pages(payload_bytes: u64) -> Option<u32> {
    u32::try_from(payload_bytes.div_ceil(PAGE_BYTES) + 1).ok()
}
