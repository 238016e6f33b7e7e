//! Room on the devices for a slot size that found none anywhere.
//!
//! The block that should go next says where room is made. If it has the wanted size itself, its slot is what is
//! wanted. If not, its whole segment is emptied, because a segment belongs to one size: what goes is cold, and no more
//! than one segment at a time. Blocks that stand in segments which cannot be emptied now (one of their blocks is being
//! read or written, or a slot is quarantined) are passed over and stay where they are in the order.

use reprise_policy::eviction::EntryIndex;

use super::super::AgentCore;
use super::super::index::{Dram, Stored};
use super::super::limits::{POOL_EVICTIONS_FOR_SIZE, POOL_VICTIMS_TRIED};
use super::super::writeback::Lane;
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
    pub(in crate::agent) fn make_pool_room(&mut self, lane: Lane) -> Room {
        if self.devices.usable_devices().any(|device| device.pool.room_coming(lane.slot_bytes)) {
            return Room::Coming;
        }
        if self.evict_for_size(lane) || self.empty_some_segment(lane) {
            return Room::Coming;
        }
        // The end of a read or of a batch is an event, after which other segments can be emptied.
        let being_read = self.index.stored_blocks() > self.devices.evictable() as u64;
        let being_written = self.devices.usable_devices().any(|device| device.batches_in_flight > 0);
        if being_read || being_written { Room::Coming } else { Room::Never }
    }

    /// Evicts in order until slots of the size or one segment will be free; whether anything went.
    fn evict_for_size(&mut self, lane: Lane) -> bool {
        let (mut evicted, mut passed) = (0, Vec::new());
        let mut tried: Vec<(DeviceId, u32)> = Vec::new();
        while evicted < POOL_EVICTIONS_FOR_SIZE && passed.len() < POOL_VICTIMS_TRIED {
            let Some(entry) = self.take_nvme_victim(Some(lane)) else { break };
            let stored = self.index.entry(entry).stored().expect("only stored blocks are in the order");
            match self.victim_for(stored, lane, &tried) {
                Victim::Slot => {
                    self.drop_victim(entry);
                    evicted += 1;
                }
                Victim::Segment { segment, blocks } if evicted == 0 => {
                    self.put_nvme_victim_back(entry);
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
            self.put_nvme_victim_back(entry);
        }
        evicted > 0
    }

    fn put_nvme_victim_back(&mut self, entry: EntryIndex) {
        let standing = self.nvme_standing(entry);
        self.devices.put_back(entry, standing);
    }

    fn victim_for(&self, stored: Stored, lane: Lane, tried: &[(DeviceId, u32)]) -> Victim {
        let pool = &self.devices.device(stored.device).pool;
        let segment = pool.segment_of(stored.page).expect("a stored block is in a segment");
        if pool.has_size(stored.page, lane.slot_bytes) || pool.usage().entries_free == 0 {
            return Victim::Slot;
        }
        if tried.contains(&(stored.device, segment)) {
            return Victim::Useless { segment };
        }
        match self.drainable(stored.device, segment, lane) {
            Some(blocks) => Victim::Segment { segment, blocks },
            None => Victim::Useless { segment },
        }
    }

    /// None of the coldest blocks is in a segment that can be emptied: takes the one that costs least, wherever it is.
    fn empty_some_segment(&mut self, lane: Lane) -> bool {
        for device in self.devices.ids().filter(|id| self.devices.is_usable(*id)).collect::<Vec<_>>() {
            let Some(segment) = self.devices.device(device).pool.emptiest_drainable(lane.slot_bytes) else {
                continue;
            };
            if let Some(blocks) = self.drainable(device, segment, lane) {
                self.empty_segment(device, segment, blocks);
                return true;
            }
        }
        false
    }

    /// The blocks of a segment, when all of them may go for the sake of the lane's tenant and the wanted size gains a
    /// segment by it.
    fn drainable(&self, device: DeviceId, segment: u32, lane: Lane) -> Option<Vec<EntryIndex>> {
        let blocks = self.devices.device(device).pool.drainable(segment, lane.slot_bytes)?;
        let blocks: Option<Vec<EntryIndex>> = blocks
            .into_iter()
            .map(|(key, page)| {
                let entry = self.index.find(&key)?;
                let state = self.index.entry(entry);
                let here = state.stored().is_some_and(|at| at.device == device && at.page == page);
                (here && !matches!(state.dram(), Dram::Filling(_))).then_some(entry)
            })
            .collect();
        blocks.filter(|blocks| self.may_drop(blocks, Some(lane.tenant)))
    }

    fn empty_segment(&mut self, device: DeviceId, segment: u32, blocks: Vec<EntryIndex>) {
        self.devices.device_mut(device).pool.start_drain(segment);
        for entry in blocks {
            self.devices.leave_order(entry);
            self.drop_victim(entry);
        }
    }
}
