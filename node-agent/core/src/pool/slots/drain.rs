//! Emptying a whole segment, so that another slot size can have it.
//!
//! A segment belongs to one slot size until its last slot is free, so blocks of a new size on a full device need one
//! segment without blocks, not as many bytes anywhere. From [`Slots::start_drain`] on nothing is put into the segment:
//! its free slots leave their class, and the slots freed in it do not enter it. When the last is free, the segment
//! belongs to no size, as ever. A slot of it that turns out bad ends the emptying: the segment can never be empty.

use super::{SlotState, Slots};
use crate::pool::PageNumber;
use reprise_policy::BlockKey;

impl Slots {
    /// The segment of a slot.
    pub(in crate::pool) fn segment_of(&self, page: PageNumber) -> Option<u32> {
        Some(page.0.checked_sub(self.data_page)? / self.segment_pages)
    }

    /// Pages of the slot at a page.
    pub(in crate::pool) fn size_of(&self, page: PageNumber) -> Option<u32> {
        let segment = self.segments.get(self.segment_of(page)? as usize)?;
        (segment.slot_pages > 0).then_some(segment.slot_pages)
    }

    /// The stored blocks of a segment that would be of use to slots of so many pages if they were freed; `None`
    /// when it is of that size itself, is being emptied, or holds a slot that freeing blocks does not free.
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
        let first = self.data_page + segment * self.segment_pages;
        let mut blocks = Vec::new();
        for (number, slot) in (0..).zip(&state.slots) {
            match slot.state {
                SlotState::Stored => {
                    blocks.push((slot.key, PageNumber(first + number * state.slot_pages)));
                }
                SlotState::Free | SlotState::Freeing => {}
                SlotState::Reserved | SlotState::Writing | SlotState::Quarantined => return None,
            }
        }
        Some(blocks)
    }

    /// The segment with the fewest blocks of those that [`Slots::drainable`] allows. O(slots of the device).
    pub(in crate::pool) fn emptiest_drainable(&self, slot_pages: u32) -> Option<u32> {
        let segments = 0..u32::try_from(self.segments.len()).expect("fewer than 2^23 segments");
        let blocks = |segment| self.drainable(segment, slot_pages).map(|blocks| (blocks.len(), segment));
        segments.filter_map(blocks).min().map(|(_, segment)| segment)
    }

    /// Nothing is put into a segment any more. Its blocks are freed next.
    pub(in crate::pool) fn start_drain(&mut self, segment: u32) {
        let (slot_pages, free) = {
            let state = &self.segments[segment as usize];
            (state.slot_pages, state.free)
        };
        self.draining.insert(segment);
        if free > 0 {
            let class =
                self.classes.get_mut(&slot_pages).expect("a segment with a free slot is in its class");
            class.free -= u64::from(free);
            self.leave_class(slot_pages, segment);
        }
    }

    /// A segment that was being emptied never will be: its free slots are of use again.
    pub(super) fn end_drain(&mut self, segment: u32) {
        if !self.draining.remove(&segment) {
            return;
        }
        let state = &self.segments[segment as usize];
        if state.free > 0 {
            let class = self.classes.entry(state.slot_pages).or_default();
            class.with_free.insert(segment);
            class.free += u64::from(state.free);
        }
    }

    /// Whether slots of so many pages, segments or entries will be free when what was freed is durable.
    pub(in crate::pool) fn room_coming(&self, slot_pages: u32) -> bool {
        let entries_short = self.tally.entries >= self.entries_max;
        !self.draining.is_empty()
            || self.freeing.contains_key(&slot_pages)
            || (entries_short && !self.freeing.is_empty())
    }

    /// Entries that are not taken, and those of slots whose end is not durable yet.
    pub(in crate::pool) fn entries_free(&self) -> (u64, u64) {
        let freeing = self.freeing.values().sum();
        (self.entries_max.saturating_sub(self.tally.entries), freeing)
    }

    /// Entries that there may be at once.
    pub(in crate::pool) fn entries_max(&self) -> u64 {
        self.entries_max
    }
}
