//! Emptying a whole segment, so that another slot size can use it.
//!
//! A segment belongs to one slot size until its last slot is free. On a full device, blocks of a new size
//! therefore need a segment without blocks; free bytes elsewhere do not help. After [`Slots::start_drain`],
//! no slot of the segment is allocated: its free slots leave the free lists of their size, and slots freed
//! later do not enter them. When the last slot is free, the segment becomes unassigned. A slot that is
//! quarantined ends the drain, because the segment can never become empty.

use super::{SlotState, Slots};
use crate::pool::PageNumber;
use reprise_policy::BlockKey;

impl Slots {
    /// Number of the segment that contains a page.
    pub(in crate::pool) fn segment_of(&self, page: PageNumber) -> Option<u32> {
        self.split(page).map(|(segment, _)| segment)
    }

    /// Pages of the slot at a page.
    pub(in crate::pool) fn size_of(&self, page: PageNumber) -> Option<u32> {
        let segment = self.segments.get(self.segment_of(page)? as usize)?;
        (segment.slot_pages > 0).then_some(segment.slot_pages)
    }

    /// Returns the stored blocks of a segment that, when freed, make it available for slots of `slot_pages`
    /// pages. `None` if the segment has that size itself, is being emptied, or holds a slot that freeing
    /// blocks does not free.
    pub(in crate::pool) fn drainable(
        &self,
        segment: u32,
        slot_pages: u32,
    ) -> Option<Vec<(BlockKey, PageNumber)>> {
        let state = self.segments.get(segment as usize)?;
        let of_use =
            state.slot_pages != 0 && state.slot_pages != slot_pages && slot_pages <= self.segment_pages;
        if !of_use || self.draining.contains(&segment) {
            return None;
        }
        let (first, slot_pages) = (self.first_page(segment), u64::from(state.slot_pages));
        let mut blocks = Vec::new();
        for (number, slot) in (0..).zip(&state.slots) {
            match slot.state {
                SlotState::Stored => {
                    blocks.push((slot.key, PageNumber(first + number * slot_pages)));
                }
                SlotState::Free | SlotState::Freeing | SlotState::Returning => {}
                SlotState::Reserved | SlotState::Lent | SlotState::Writing | SlotState::Quarantined => {
                    return None;
                }
            }
        }
        Some(blocks)
    }

    /// Returns the [`Slots::drainable`] segment with the fewest blocks. O(slots of the device).
    pub(in crate::pool) fn emptiest_drainable(&self, slot_pages: u32) -> Option<u32> {
        let segments = 0..u32::try_from(self.segments.len()).expect("fewer than 2^26 segments");
        let blocks = |segment| self.drainable(segment, slot_pages).map(|blocks| (blocks.len(), segment));
        segments.filter_map(blocks).min().map(|(_, segment)| segment)
    }

    /// Stops allocation in a segment. The caller frees its blocks next.
    pub(in crate::pool) fn start_drain(&mut self, segment: u32) {
        let (slot_pages, free) = {
            let state = &self.segments[segment as usize];
            (state.slot_pages, state.free)
        };
        self.draining.insert(segment);
        if free > 0 {
            let of_size =
                self.free_segments.get_mut(&slot_pages).expect("a segment with a free slot is in its class");
            of_size.free -= u64::from(free);
            self.remove_free_segment(slot_pages, segment);
        }
    }

    /// Ends the drain of a segment that cannot become empty: its free slots are allocated again.
    pub(super) fn end_drain(&mut self, segment: u32) {
        if !self.draining.remove(&segment) {
            return;
        }
        let state = &self.segments[segment as usize];
        if state.free > 0 {
            let of_size = self.free_segments.entry(state.slot_pages).or_default();
            of_size.with_free.insert(segment);
            of_size.free += u64::from(state.free);
        }
    }

    /// Whether slots of this size, segments or entries become free when pending frees are durable.
    pub(in crate::pool) fn space_pending(&self, slot_pages: u32) -> bool {
        let entries_short = self.tally.entries >= self.entries_max;
        !self.draining.is_empty()
            || self.freeing.contains_key(&slot_pages)
            || (entries_short && !self.freeing.is_empty())
    }

    /// Number of entries that are not used, and of those whose free record is not durable yet.
    pub(in crate::pool) fn entries_free(&self) -> (u64, u64) {
        let freeing = self.freeing.values().sum();
        (self.entries_max.saturating_sub(self.tally.entries), freeing)
    }

    /// Maximum number of entries.
    pub(in crate::pool) fn entries_max(&self) -> u64 {
        self.entries_max
    }
}
