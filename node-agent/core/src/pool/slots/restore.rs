//! Rebuilding the slots from records, in the order of the journal.
//!
//! A record may be seen twice, or after a checkpoint that contains its consequences already, and where the journal is
//! damaged others may be missing. So a record never counts on what came before it:
//! * a store replaces what is older in its slot, and everything older in a segment of another slot size: the slots there
//!   must have been free when the segment changed size, whether the records of that are still readable or not;
//! * a free removes the block of its generation or an older one, never a younger one;
//! * a quarantine stays.
//!
//! While restoring, free lists, classes and counters are not kept; [`Slots::finish_restore`] builds them once.

use reprise_policy::ContentId;

use super::super::record::{Record, RecordKind};
use super::super::{PageNumber, StoredBlock};
use super::{FREE_SLOT, Segment, SlotContent, SlotPlace, SlotState, Slots, Tally, slot_pages};

/// What became of a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum Restored {
    /// It changed something, or says what is known already.
    Applied,
    /// Something younger is known.
    Outdated,
    /// It names a slot that cannot be, or there are too many layouts.
    Rejected,
}

impl Slots {
    /// Applies one record.
    pub(in crate::pool) fn restore(&mut self, record: &Record) -> Restored {
        match record.kind {
            RecordKind::Store => self.restore_block(record, SlotState::Stored),
            RecordKind::Quarantine => self.restore_block(record, SlotState::Quarantined),
            RecordKind::Free => self.restore_free(record),
        }
    }

    /// Builds free lists, classes and counters, and lists the stored blocks in the order of the device.
    pub(in crate::pool) fn finish_restore(&mut self) -> Vec<StoredBlock> {
        self.classes.clear();
        self.unassigned.clear();
        self.tally = Tally { free: self.capacity_pages(), ..Tally::default() };
        for index in 0..self.segments.len() {
            let live = self.segments[index].slots.iter().filter(|slot| slot.state != SlotState::Free).count();
            if live == 0 {
                self.segments[index] = Segment::default();
                self.unassigned.insert(u32::try_from(index).expect("fewer than 2^23 segments"));
            } else {
                self.link_free(index);
                self.count(index);
            }
        }
        let blocks = usize::try_from(self.tally.stored).expect("as many as records in memory");
        let mut stored = Vec::with_capacity(blocks);
        let mut cursor = Slots::FIRST_PLACE;
        while let Some((place, next)) = self.next_place(cursor) {
            if self.slot(place).state == SlotState::Stored {
                stored.push(self.stored_block(place));
            }
            cursor = next;
        }
        stored
    }

    fn count(&mut self, index: usize) {
        let segment = &self.segments[index];
        let pages = u64::from(segment.slot_pages);
        for slot in &segment.slots {
            match slot.state {
                SlotState::Free => continue,
                SlotState::Quarantined => {
                    self.tally.quarantined += pages;
                    self.tally.quarantined_slots += 1;
                }
                SlotState::Stored | SlotState::Reserved | SlotState::Writing | SlotState::Freeing => {
                    self.tally.used += pages;
                    self.tally.stored += 1;
                }
            }
            self.tally.free -= pages;
            self.tally.entries += 1;
        }
    }

    fn restore_block(&mut self, record: &Record, state: SlotState) -> Restored {
        let Some((place, pages)) = self.place_for(record) else { return Restored::Rejected };
        if self.segments[place.segment].slot_pages != pages {
            if self.youngest(place.segment).is_some_and(|youngest| youngest >= record.generation) {
                return Restored::Outdated;
            }
            self.empty_segment(place.segment);
            self.assign(place.segment, pages);
        }
        let there = self.slot(place);
        match there.state {
            SlotState::Free => {}
            SlotState::Quarantined => return Restored::Outdated,
            _ if there.generation > record.generation => return Restored::Outdated,
            _ => self.forget(place),
        }
        let Some(layout) = self.acquire_layout(&record.layout) else { return Restored::Rejected };
        let content = SlotContent {
            key: record.key,
            layout,
            generation: record.generation,
            header_crc: record.header_crc,
            priority: record.priority,
            content: record.content,
        };
        self.fill(place, &content, state);
        Restored::Applied
    }

    fn restore_free(&mut self, record: &Record) -> Restored {
        let Some(place) = self.place(record.page) else { return Restored::Outdated };
        let there = self.slot(place);
        if there.state != SlotState::Stored || there.generation > record.generation {
            return Restored::Outdated;
        }
        self.forget(place);
        Restored::Applied
    }

    /// The slot that a record's page and layout name, and its pages.
    fn place_for(&self, record: &Record) -> Option<(SlotPlace, u32)> {
        let pages = slot_pages(record.layout.slot_bytes())?;
        let offset = record.page.0.checked_sub(self.data_page)?;
        let (segment, within) = ((offset / self.segment_pages) as usize, offset % self.segment_pages);
        let fits = within.is_multiple_of(pages) && within + pages <= self.segment_pages;
        let place = SlotPlace { segment, slot: (within / pages) as usize };
        (fits && segment < self.segments.len()).then_some((place, pages))
    }

    /// Generation of the youngest block of a segment.
    fn youngest(&self, segment: usize) -> Option<u64> {
        let live = self.segments[segment].slots.iter().filter(|slot| slot.state != SlotState::Free);
        live.map(|slot| slot.generation).max()
    }

    fn empty_segment(&mut self, segment: usize) {
        for slot in 0..self.segments[segment].slots.len() {
            let place = SlotPlace { segment, slot };
            if self.slot(place).state != SlotState::Free {
                self.forget(place);
            }
        }
    }

    fn forget(&mut self, place: SlotPlace) {
        let page: PageNumber = self.page_of(place);
        self.layouts.release(self.slot(place).layout);
        if self.content(page) != ContentId::UNKNOWN {
            self.contents.remove(&page);
        }
        *self.slot_mut(place) = FREE_SLOT;
    }
}
