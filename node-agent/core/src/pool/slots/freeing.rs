//! Slots whose free record is not durable yet.

use super::{SlotPlace, SlotState, Slots};

impl SlotState {
    /// Whether the slot becomes free when its free record is durable.
    pub(super) fn is_being_freed(self) -> bool {
        matches!(self, SlotState::Freeing | SlotState::Returning)
    }
}

impl Slots {
    pub(super) fn count_freeing(&mut self, place: SlotPlace) {
        let slot_pages = self.segments[place.segment].slot_pages;
        self.tally.freeing += u64::from(slot_pages);
        *self.freeing.entry(slot_pages).or_default() += 1;
    }

    pub(super) fn uncount_freeing(&mut self, place: SlotPlace) {
        let slot_pages = self.segments[place.segment].slot_pages;
        self.tally.freeing -= u64::from(slot_pages);
        let count = self.freeing.get_mut(&slot_pages).expect("a slot that is being freed is counted");
        *count -= 1;
        if *count == 0 {
            self.freeing.remove(&slot_pages);
        }
    }
}
