//! Slots of a device that can no longer be written: only stored blocks keep a slot.
//!
//! Nothing further becomes durable, so these changes exist in memory only. The next start finds blocks again
//! whose removal was not durable; their bytes are intact, since no slot is written after the last write.

use crate::pool::PageNumber;

use super::{SlotPlace, SlotState, Slots};

impl Slots {
    /// Frees all slots whose free record is not durable. O(slots).
    pub(in crate::pool) fn finish_all_frees(&mut self) {
        let freeing: Vec<PageNumber> = (0..self.segments.len())
            .flat_map(|segment| (0..self.segments[segment].slots.len()).map(move |slot| (segment, slot)))
            .map(|(segment, slot)| SlotPlace { segment, slot })
            .filter(|place| self.slot(*place).state.is_being_freed())
            .map(|place| self.page_of(place))
            .collect();
        for page in freeing {
            self.finish_free(page);
        }
    }

    /// Frees the slot of a block that was written by a batch without a result.
    pub(in crate::pool) fn forget_write(&mut self, page: PageNumber) {
        match self.stored(page) {
            Some(_) => {
                // Without a record: the journal has ended.
                let _ = self.begin_free(page);
                self.finish_free(page);
            }
            None if self.is_being_written(page) => self.abandon_write(page),
            // Quarantined: it stays so.
            None => {}
        }
    }

    fn is_being_written(&self, page: PageNumber) -> bool {
        self.place(page).is_some_and(|place| self.slot(place).state == SlotState::Writing)
    }
}
