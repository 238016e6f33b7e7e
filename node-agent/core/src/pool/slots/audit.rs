//! Full check of the invariants of the slots, for tests. O(slots).

use std::collections::BTreeMap;

use super::{NO_SLOT, SlotState, Slots, Tally};

impl Slots {
    /// Recounts everything.
    ///
    /// # Errors
    /// A description of the first violated invariant.
    pub(in crate::pool) fn audit(&self) -> Result<(), String> {
        let mut tally = Tally::default();
        let mut free_by_size: BTreeMap<u32, u64> = BTreeMap::new();
        let mut freeing: BTreeMap<u32, u64> = BTreeMap::new();
        for (index, segment) in self.segments.iter().enumerate() {
            if segment.slot_pages == 0 {
                tally.free += u64::from(self.segment_pages);
                continue;
            }
            let free = self.audit_segment(index, &mut tally)?;
            if free as usize == segment.slots.len() {
                return Err(format!("segment {index} is empty but assigned"));
            }
            if !self.draining.contains(&(index as u32)) {
                *free_by_size.entry(segment.slot_pages).or_default() += u64::from(free);
            }
            let freeing_here = segment.slots.iter().filter(|slot| slot.state.is_being_freed()).count();
            *freeing.entry(segment.slot_pages).or_default() += freeing_here as u64;
        }
        freeing.retain(|_, slots| *slots > 0);
        if freeing != self.freeing {
            return Err(format!("slots being freed: {freeing:?}, counted as {:?}", self.freeing));
        }
        if self.draining.iter().any(|segment| self.segments[*segment as usize].slot_pages == 0) {
            return Err("an unassigned segment is being emptied".to_owned());
        }
        if tally != self.tally {
            return Err(format!("recounted {tally:?}, but the tally is {:?}", self.tally));
        }
        free_by_size.retain(|_, free| *free > 0);
        let kept: BTreeMap<u32, u64> =
            self.free_segments.iter().map(|(pages, of_size)| (*pages, of_size.free)).collect();
        if free_by_size != kept {
            return Err(format!("free slots by class: counted {free_by_size:?}, kept {kept:?}"));
        }
        let sum = tally.used + tally.free + tally.freeing + tally.quarantined + tally.slack;
        if sum != self.capacity_pages() {
            return Err(format!("{sum} pages accounted for, of {}", self.capacity_pages()));
        }
        Ok(())
    }

    fn audit_segment(&self, index: usize, tally: &mut Tally) -> Result<u32, String> {
        let segment = &self.segments[index];
        let pages = u64::from(segment.slot_pages);
        let mut free = 0;
        for slot in &segment.slots {
            match slot.state {
                SlotState::Free => {
                    free += 1;
                    tally.free += pages;
                    continue;
                }
                SlotState::Reserved | SlotState::Lent | SlotState::Writing => tally.used += pages,
                SlotState::Stored => {
                    tally.used += pages;
                    tally.stored += 1;
                }
                SlotState::Freeing | SlotState::Returning => tally.freeing += pages,
                SlotState::Quarantined => {
                    tally.quarantined += pages;
                    tally.quarantined_slots += 1;
                }
            }
            tally.entries += 1;
        }
        tally.slack += u64::from(self.segment_pages) - pages * segment.slots.len() as u64;
        tally.slots += segment.slots.len() as u64;
        let mut linked = 0;
        let mut next = segment.free_head;
        while next != NO_SLOT && linked <= free {
            let slot = segment.slots.get(next as usize).ok_or("a free list leaves its segment")?;
            if slot.state != SlotState::Free {
                return Err(format!(
                    "slot {next} of segment {index} is on the free list but {:?}",
                    slot.state
                ));
            }
            linked += 1;
            next = slot.header_crc;
        }
        if linked != free || free != segment.free {
            return Err(format!("segment {index}: {free} free, {linked} linked, {} counted", segment.free));
        }
        Ok(free)
    }
}
