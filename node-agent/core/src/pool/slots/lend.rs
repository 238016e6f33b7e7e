//! Lent slots: another process writes the payload, and the pool writes only the header page.
//!
//! The generation of a block is that of its lease: it names the slot from the lease to the free record.

use crate::pool::record::{Record, RecordKind};
use crate::pool::{PageNumber, StoredBlock};

use super::{LayoutIndex, Slot, SlotContent, SlotState, Slots};
use reprise_policy::{BlockKey, ContentId};

impl Slots {
    /// Lends an allocated slot; returns its record.
    pub(in crate::pool) fn lend(&mut self, page: PageNumber, layout: LayoutIndex, generation: u64) -> Record {
        let place = self.expect_state(page, SlotState::Reserved);
        let (key, content) = (BlockKey([0; 16]), ContentId::UNKNOWN);
        let lent = SlotContent { key, layout, generation, header_crc: 0, priority: 0, content };
        self.fill(place, &lent, SlotState::Lent);
        self.record(place, RecordKind::Lend)
    }

    /// Whether a slot is allocated and holds nothing.
    pub(in crate::pool) fn is_reserved(&self, page: PageNumber) -> bool {
        self.place(page).is_some_and(|place| self.slot(place).state == SlotState::Reserved)
    }

    /// Generation of a lent slot; `None` if the slot is not lent.
    pub(in crate::pool) fn lent_generation(&self, page: PageNumber) -> Option<u64> {
        let slot = self.slot(self.place(page)?);
        (slot.state == SlotState::Lent).then_some(slot.generation)
    }

    /// Records the block of a lent slot whose header page is being written.
    pub(in crate::pool) fn begin_commit(
        &mut self,
        page: PageNumber,
        (key, header_crc, priority): (BlockKey, u32, u8),
    ) {
        let place = self.expect_state(page, SlotState::Lent);
        let slot = self.slot_mut(place);
        (slot.key, slot.header_crc, slot.priority) = (key, header_crc, priority);
        slot.state = SlotState::Writing;
    }

    /// Turns a stored block's slot into a lent one of a new generation; returns its record, or `None` if the
    /// slot is quarantined.
    pub(in crate::pool) fn withdraw(&mut self, page: PageNumber, generation: u64) -> Option<Record> {
        let place = self.place(page).expect("only stored blocks are withdrawn");
        if self.slot(place).state == SlotState::Quarantined {
            return None;
        }
        self.expect_state(page, SlotState::Stored);
        self.tally.stored -= 1;
        self.contents.remove(&page);
        let slot = self.slot_mut(place);
        let (layout, key, state) = (slot.layout, BlockKey([0; 16]), SlotState::Lent);
        *slot = Slot { key, generation, header_crc: 0, layout, priority: 0, state };
        Some(self.record(place, RecordKind::Lend))
    }

    /// Describes a lent slot like a block; its key and checksum are zero.
    pub(in crate::pool) fn lent(&self, page: PageNumber) -> StoredBlock {
        self.stored_block(self.expect_state(page, SlotState::Lent))
    }

    /// Returns the lent slots after a recovery, in device order. O(slots) if there are any.
    pub(in crate::pool) fn recovered_leases(&self) -> Vec<PageNumber> {
        let mut pages = Vec::new();
        // Recovery leaves only stored, quarantined and lent slots.
        if self.tally.entries == self.tally.stored + self.tally.quarantined_slots {
            return pages;
        }
        let mut cursor = Slots::FIRST_PLACE;
        while let Some((place, next)) = self.next_place(cursor) {
            if self.slot(place).state == SlotState::Lent {
                pages.push(self.page_of(place));
            }
            cursor = next;
        }
        pages
    }
}
