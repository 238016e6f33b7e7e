//! Space on the devices for a slot size without a free slot.
//!
//! The next victim determines where space is freed. If the victim has the needed size, its slot is reused.
//! Otherwise its whole segment is emptied, because a segment holds slots of one size. The evicted blocks are
//! cold, and at most one segment is emptied at a time. Victims in segments that cannot be emptied now keep
//! their place in the order. Such a segment has a block that is being read or written, or a quarantined slot.

use reprise_policy::eviction::EntryIndex;

use super::super::AgentCore;
use super::super::index::{Dram, Stored};
use super::super::limits::{POOL_EVICTIONS_FOR_SIZE, POOL_VICTIMS_MAX};
use super::super::writeback::Lane;
use crate::effect::DeviceId;

/// Prospect of free space on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::agent) enum SpaceState {
    /// An operation is in progress whose end is an event.
    Pending,
    /// Nothing can be freed.
    Unavailable,
}

/// Way in which evicting a victim helps a slot size.
enum Reclaim {
    /// Its slot, or its journal entry, is directly usable.
    Slot,
    /// Its segment can be emptied by evicting these blocks.
    Segment { segment: u32, blocks: Vec<EntryIndex> },
    /// Evicting it does not help.
    Nothing { segment: u32 },
}

impl AgentCore {
    /// Starts to free space for a block size without a free slot, unless that is in progress.
    pub(in crate::agent) fn make_pool_room(&mut self, lane: Lane) -> SpaceState {
        if self.devices.usable_devices().any(|device| device.pool.space_pending(lane.slot_bytes)) {
            return SpaceState::Pending;
        }
        if self.evict_for_size(lane) || self.empty_some_segment(lane) {
            return SpaceState::Pending;
        }
        // The end of a read or batch is an event, after which further segments may be emptied.
        let being_read = self.index.stored_blocks() > self.devices.evictable() as u64;
        let being_written = self.devices.usable_devices().any(|device| device.batches_in_flight > 0);
        if being_read || being_written { SpaceState::Pending } else { SpaceState::Unavailable }
    }

    /// Evicts victims in order until slots of the size or one segment become free; returns whether any was
    /// evicted.
    fn evict_for_size(&mut self, lane: Lane) -> bool {
        let (mut evicted, mut passed) = (0, Vec::new());
        let mut tried: Vec<(DeviceId, u32)> = Vec::new();
        while evicted < POOL_EVICTIONS_FOR_SIZE && passed.len() < POOL_VICTIMS_MAX {
            let Some(entry) = self.take_nvme_victim(Some(lane)) else { break };
            let stored = self.index.entry(entry).stored().expect("only stored blocks are in the order");
            match self.victim_for(stored, lane, &tried) {
                Reclaim::Slot => {
                    self.drop_victim(entry);
                    evicted += 1;
                }
                Reclaim::Segment { segment, blocks } if evicted == 0 => {
                    self.reinsert_nvme_victim(entry);
                    self.empty_segment(stored.device, segment, blocks);
                    evicted = POOL_EVICTIONS_FOR_SIZE;
                }
                Reclaim::Segment { .. } => {
                    passed.push(entry);
                    break;
                }
                Reclaim::Nothing { segment } => {
                    tried.push((stored.device, segment));
                    passed.push(entry);
                }
            }
        }
        for entry in passed.into_iter().rev() {
            self.reinsert_nvme_victim(entry);
        }
        evicted > 0
    }

    fn reinsert_nvme_victim(&mut self, entry: EntryIndex) {
        let rank = self.nvme_rank(entry);
        self.devices.insert_oldest(entry, rank);
    }

    fn victim_for(&self, stored: Stored, lane: Lane, tried: &[(DeviceId, u32)]) -> Reclaim {
        let pool = &self.devices.device(stored.device).pool;
        let segment = pool.segment_of(stored.page).expect("a stored block is in a segment");
        if pool.has_size(stored.page, lane.slot_bytes) || pool.usage().entries_free == 0 {
            return Reclaim::Slot;
        }
        if tried.contains(&(stored.device, segment)) {
            return Reclaim::Nothing { segment };
        }
        match self.drainable(stored.device, segment, lane) {
            Some(blocks) => Reclaim::Segment { segment, blocks },
            None => Reclaim::Nothing { segment },
        }
    }

    /// Empties the segment with the least data, because no cold block is in a segment that can be emptied.
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

    /// Returns the blocks of a segment if all of them may be evicted for the lane's tenant, and emptying it
    /// gives the size a segment.
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
            self.devices.remove_evictable(entry);
            self.drop_victim(entry);
        }
    }
}
