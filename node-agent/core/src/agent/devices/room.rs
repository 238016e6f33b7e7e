//! Room on the devices for a slot size that found none anywhere.
//!
//! The block that should go next says where room is made. If it has the wanted size itself, its slot is what is
//! wanted. If not, its whole segment is emptied, because a segment belongs to one size: what goes is cold, and no more
//! than one segment at a time. Blocks that stand in segments which cannot be emptied now (one of their blocks is being
//! read or written, or a slot is quarantined) are passed over and stay where they are in the order.

use reprise_policy::eviction::{EntryIndex, Group};

use super::super::AgentCore;
use super::super::index::{Dram, Stored};
use super::super::limits::{POOL_EVICTIONS_FOR_SIZE, POOL_VICTIMS_TRIED};
use crate::effect::DeviceId;

/// Whether there will be room on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum Room {
    /// Something is under way whose end is an event.
    Coming,
    /// Nothing can be freed.
    Never,
}

/// What the next victim is to a slot size that wants room.
enum Victim {
    /// Its slot, or its entry in the journal, is what is wanted.
    Slot,
    /// Its segment can be emptied: these blocks go.
    Segment { segment: u32, blocks: Vec<EntryIndex> },
    /// It is in the way of nothing.
    Useless { segment: u32 },
}

impl AgentCore {
    /// A block of some size found no slot anywhere: makes some room, unless some is on its way.
    pub(in crate::agent) fn make_pool_room(&mut self, slot_bytes: u64) -> Room {
        if self.devices.usable_devices().any(|device| device.pool.room_coming(slot_bytes)) {
            return Room::Coming;
        }
        if self.evict_for_size(slot_bytes) || self.empty_some_segment(slot_bytes) {
            return Room::Coming;
        }
        // The end of a read or of a batch is an event, after which other segments can be emptied.
        let being_read = self.index.stored_blocks() > self.devices.evictable() as u64;
        let being_written = self.devices.usable_devices().any(|device| device.batches_in_flight > 0);
        if being_read || being_written { Room::Coming } else { Room::Never }
    }

    /// Evicts in order until slots of the size or one segment will be free; whether anything went.
    fn evict_for_size(&mut self, slot_bytes: u64) -> bool {
        let (mut evicted, mut passed) = (0, Vec::new());
        let mut tried: Vec<(DeviceId, u32)> = Vec::new();
        while evicted < POOL_EVICTIONS_FOR_SIZE && passed.len() < POOL_VICTIMS_TRIED {
            let Some(entry) = self.devices.order.victim(Group::default()) else { break };
            let stored = self.index.entry(entry).stored().expect("only stored blocks are in the order");
            match self.victim_for(stored, slot_bytes, &tried) {
                Victim::Slot => {
                    self.drop_victim(entry);
                    evicted += 1;
                }
                Victim::Segment { segment, blocks } if evicted == 0 => {
                    self.devices.put_back(entry, self.index.entry(entry).class());
                    self.empty_segment(stored.device, segment, blocks);
                    evicted = POOL_EVICTIONS_FOR_SIZE;
                }
                Victim::Segment { .. } => {
                    passed.push(entry);
                    break;
                }
                Victim::Useless { segment } => {
                    tried.push((stored.device, segment));
                    passed.push(entry);
                }
            }
        }
        for entry in passed.into_iter().rev() {
            self.devices.put_back(entry, self.index.entry(entry).class());
        }
        evicted > 0
    }

    fn victim_for(&self, stored: Stored, slot_bytes: u64, tried: &[(DeviceId, u32)]) -> Victim {
        let pool = &self.devices.device(stored.device).pool;
        let segment = pool.segment_of(stored.page).expect("a stored block is in a segment");
        if pool.has_size(stored.page, slot_bytes) || pool.usage().entries_free == 0 {
            return Victim::Slot;
        }
        if tried.contains(&(stored.device, segment)) {
            return Victim::Useless { segment };
        }
        match self.drainable(stored.device, segment, slot_bytes) {
            Some(blocks) => Victim::Segment { segment, blocks },
            None => Victim::Useless { segment },
        }
    }

    /// None of the coldest blocks is in a segment that can be emptied: takes the one that costs least, wherever it is.
    fn empty_some_segment(&mut self, slot_bytes: u64) -> bool {
        for device in self.devices.ids().filter(|id| self.devices.is_usable(*id)).collect::<Vec<_>>() {
            let Some(segment) = self.devices.device(device).pool.emptiest_drainable(slot_bytes) else {
                continue;
            };
            if let Some(blocks) = self.drainable(device, segment, slot_bytes) {
                self.empty_segment(device, segment, blocks);
                return true;
            }
        }
        false
    }

    /// The blocks of a segment, when all of them may go and the wanted size gains a segment by it.
    fn drainable(&self, device: DeviceId, segment: u32, slot_bytes: u64) -> Option<Vec<EntryIndex>> {
        let blocks = self.devices.device(device).pool.drainable(segment, slot_bytes)?;
        blocks
            .into_iter()
            .map(|(key, page)| {
                let entry = self.index.find(&key)?;
                let state = self.index.entry(entry);
                let here = state.stored().is_some_and(|at| at.device == device && at.page == page);
                (here && !matches!(state.dram(), Dram::Filling(_))).then_some(entry)
            })
            .collect()
    }

    fn empty_segment(&mut self, device: DeviceId, segment: u32, blocks: Vec<EntryIndex>) {
        self.devices.device_mut(device).pool.start_drain(segment);
        for entry in blocks {
            self.devices.leave_order(entry);
            self.drop_victim(entry);
        }
    }
}
