//! Restoring the slots from records, in the order of the journal.
//!
//! A record may occur twice, or after a checkpoint that already contains its effect. If the journal is
//! damaged, earlier records may be missing. A record therefore never depends on earlier ones:
//! * A store replaces older contents of its slot, and all older blocks in a segment of another slot size:
//!   these must have been freed when the segment changed its size, even if their free records are unreadable.
//! * A free removes the block of its generation or an older one, never a newer one.
//! * A quarantine is permanent.
//! * A lend replaces only older contents of its slot; the store of the same write replaces the lend.
//!
//! During restoring, free lists and counters are not updated; [`Slots::finish_restore`] builds them once.

use reprise_policy::ContentId;

use super::super::layouts::TenantLayout;
use super::super::record::{Record, RecordKind};
use super::super::{PageNumber, StoredBlock};
use super::{FREE_SLOT, Segment, SlotContent, SlotPlace, SlotState, Slots, Tally, slot_pages};

/// Result of restoring a record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::pool) enum Restored {
    /// The record was applied, or repeats a known state.
    Applied,
    /// A newer record was applied before.
    Outdated,
    /// The record refers to an impossible slot, or there are too many layouts.
    Rejected,
}

impl Slots {
    pub(in crate::pool) fn restore(&mut self, record: &Record) -> Restored {
        match record.kind {
            RecordKind::Store => self.restore_block(record, SlotState::Stored),
            RecordKind::Quarantine => self.restore_block(record, SlotState::Quarantined),
            RecordKind::Lend => self.restore_block(record, SlotState::Lent),
            RecordKind::Free => self.restore_free(record),
        }
    }

    /// Builds free lists and counters, and returns the stored blocks in device order.
    pub(in crate::pool) fn finish_restore(&mut self) -> Vec<StoredBlock> {
        self.free_segments.clear();
        self.unassigned.clear();
        self.tally = Tally { free: self.capacity_pages(), ..Tally::default() };
        for index in 0..self.segments.len() {
            let live = self.segments[index].slots.iter().filter(|slot| slot.state != SlotState::Free).count();
            if live == 0 {
                self.segments[index] = Segment::default();
                self.unassigned.insert(u32::try_from(index).expect("fewer than 2^26 segments"));
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
                SlotState::Lent => self.tally.used += pages,
                SlotState::Stored
                | SlotState::Reserved
                | SlotState::Writing
                | SlotState::Freeing
                | SlotState::Returning => {
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
            if self.newest(place.segment).is_some_and(|newest| newest >= record.generation) {
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
            _ if there.generation == record.generation && state == SlotState::Lent => {
                return Restored::Outdated;
            }
            _ => self.clear_slot(place),
        }
        let tenant_layout = TenantLayout { tenant: record.tenant, layout: record.layout };
        let Some(layout) = self.acquire_layout(&tenant_layout) else { return Restored::Rejected };
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
        let is_freed = matches!(there.state, SlotState::Stored | SlotState::Lent);
        if !is_freed || there.generation > record.generation {
            return Restored::Outdated;
        }
        self.clear_slot(place);
        Restored::Applied
    }

    /// Returns the slot at a record's page for its layout, and the slot's pages.
    fn place_for(&self, record: &Record) -> Option<(SlotPlace, u32)> {
        let pages = slot_pages(record.layout.slot_bytes())?;
        let (segment, within) = self.split(record.page)?;
        let segment = segment as usize;
        let fits = within.is_multiple_of(pages) && within + pages <= self.segment_pages;
        let place = SlotPlace { segment, slot: (within / pages) as usize };
        (fits && segment < self.segments.len()).then_some((place, pages))
    }

    /// Generation of the newest block of a segment.
    fn newest(&self, segment: usize) -> Option<u64> {
        let live = self.segments[segment].slots.iter().filter(|slot| slot.state != SlotState::Free);
        live.map(|slot| slot.generation).max()
    }

    fn empty_segment(&mut self, segment: usize) {
        for slot in 0..self.segments[segment].slots.len() {
            let place = SlotPlace { segment, slot };
            if self.slot(place).state != SlotState::Free {
                self.clear_slot(place);
            }
        }
    }

    fn clear_slot(&mut self, place: SlotPlace) {
        let page: PageNumber = self.page_of(place);
        self.layouts.release(self.slot(place).layout);
        if self.content(page) != ContentId::UNKNOWN {
            self.contents.remove(&page);
        }
        *self.slot_mut(place) = FREE_SLOT;
    }
}

#[cfg(test)]
mod tests {
    use super::super::super::geometry::{Geometry, PoolParams};
    use super::*;
    use reprise_policy::{BlockKey, Dtype, Layout, LayoutSpec, Parts, TenantId};

    /// Slots of 2 pages (256 per segment) and of 4 pages (128 per segment).
    const SMALL: u16 = 1;
    const LARGE: u16 = 3;

    fn slots() -> Slots {
        let params = PoolParams {
            device_bytes: 12 << 20,
            segment_bytes: 2 << 20,
            pool_uuid: [1; 16],
            device_index: 0,
            created_unix_us: 0,
        };
        Slots::new(&Geometry::plan(&params).expect("possible"))
    }

    fn layout(pages: u16) -> Layout {
        let spec = LayoutSpec {
            layers: 1,
            parts: Parts::Latent,
            kv_heads: 1,
            head_dim: 4096,
            dtype: Dtype::Int8,
            tokens_per_block: pages,
            tp_rank: 0,
            tp_size: 1,
        };
        spec.validate().expect("valid")
    }

    /// Record about a slot of the first segment.
    fn record(kind: RecordKind, pages: u16, slot: u32, generation: u64) -> Record {
        let data_page = slots().data_page;
        Record {
            kind,
            priority: 1,
            tenant: TenantId(9),
            layout: layout(pages),
            page: PageNumber(data_page + u64::from(slot) * (u64::from(pages) + 1)),
            header_crc: 7,
            generation,
            key: BlockKey(u128::from(generation).to_le_bytes()),
            content: ContentId([3; 16]),
        }
    }

    fn store(pages: u16, slot: u32, generation: u64) -> Record {
        record(RecordKind::Store, pages, slot, generation)
    }

    /// Generations of the blocks that are stored after these records.
    fn after(records: &[Record]) -> Vec<u32> {
        let mut slots = slots();
        for record in records {
            let _ = slots.restore(record);
        }
        let stored = slots.finish_restore();
        slots.audit().expect("consistent");
        stored.iter().map(|block| block.generation.0).collect()
    }

    #[test]
    fn repeated_records_change_nothing() {
        let free = record(RecordKind::Free, SMALL, 0, 1);
        let once = [store(SMALL, 0, 1), store(SMALL, 1, 2), free, store(SMALL, 0, 3)];
        assert_eq!(after(&once), [3, 2]);
        assert_eq!(after(&[once, once].concat()), [3, 2]);
        assert_eq!(after(&[&once[3..], &once[..]].concat()), [3, 2]);
    }

    #[test]
    fn older_record_never_undoes_a_newer_one() {
        assert_eq!(after(&[store(SMALL, 0, 5), store(SMALL, 0, 4)]), [5]);
        assert_eq!(after(&[store(SMALL, 0, 5), record(RecordKind::Free, SMALL, 0, 4)]), [5]);
        assert_eq!(after(&[store(SMALL, 0, 5), record(RecordKind::Free, SMALL, 0, 5)]), []);
        assert_eq!(after(&[store(SMALL, 0, 5), store(LARGE, 3, 4)]), [5]);
    }

    #[test]
    fn free_with_lost_store_removes_the_older_block() {
        assert_eq!(after(&[store(SMALL, 0, 5), record(RecordKind::Free, SMALL, 0, 9)]), []);
    }

    #[test]
    fn block_of_another_size_replaces_older_blocks_of_the_segment() {
        let before: Vec<Record> = (0..9).map(|slot| store(SMALL, slot, u64::from(slot) + 1)).collect();
        assert_eq!(after(&[before.as_slice(), &[store(LARGE, 100, 50)]].concat()), [50]);
        assert_eq!(after(&[before.as_slice(), &[store(LARGE, 100, 9)]].concat()).len(), 9);
    }

    #[test]
    fn quarantined_slot_remains_quarantined() {
        let mut slots = slots();
        let quarantine = record(RecordKind::Quarantine, SMALL, 0, 5);
        for record in
            [store(SMALL, 0, 5), quarantine, store(SMALL, 0, 6), record(RecordKind::Free, SMALL, 0, 6)]
        {
            slots.restore(&record);
        }
        assert_eq!(slots.finish_restore(), []);
        assert_eq!((slots.tally().quarantined_slots, slots.tally().stored), (1, 0));
        slots.audit().expect("consistent");
    }

    #[test]
    fn lend_is_replaced_by_the_store_of_the_same_write_and_ended_by_its_free() {
        let lend = record(RecordKind::Lend, SMALL, 0, 5);
        let lent = |records: &[Record]| {
            let mut slots = slots();
            for record in records {
                let _ = slots.restore(record);
            }
            let stored = slots.finish_restore().len();
            slots.audit().expect("consistent");
            (stored, slots.recovered_leases().len())
        };
        assert_eq!(lent(&[lend]), (0, 1));
        assert_eq!(lent(&[lend, store(SMALL, 0, 5)]), (1, 0));
        assert_eq!(lent(&[lend, store(SMALL, 0, 5), lend]), (1, 0), "a repeated lend");
        assert_eq!(lent(&[store(SMALL, 0, 4), lend]), (0, 1), "the older block was freed");
        assert_eq!(lent(&[store(SMALL, 0, 6), lend]), (1, 0), "an outdated lend");
        assert_eq!(lent(&[lend, record(RecordKind::Free, SMALL, 0, 5)]), (0, 0));
        assert_eq!(lent(&[lend, record(RecordKind::Free, SMALL, 0, 4)]), (0, 1));
    }

    #[test]
    fn rejects_records_about_impossible_slots() {
        let good = store(SMALL, 0, 1);
        let at = |page: u64| Record { page: PageNumber(page), ..good };
        let first = good.page.0;
        let mut slots = slots();
        let inside_a_slot = Record { page: PageNumber(first + 1), ..good };
        for bad in [
            at(0),
            at(first - 1),
            at(first + 5 * 512),
            at(u64::from(u32::MAX)),
            at(1 << 35),
            inside_a_slot,
            store(600, 0, 1),
        ] {
            assert_eq!(slots.restore(&bad), Restored::Rejected, "{bad:?}");
        }
        assert_eq!(slots.restore(&store(LARGE, 127, 1)), Restored::Applied);
        assert_eq!(slots.finish_restore().len(), 1);
    }
}
