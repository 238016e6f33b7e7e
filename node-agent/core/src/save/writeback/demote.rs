//! Writes of blocks that are in DRAM only: used again, or close to their eviction.
//!
//! No ticket waits for them: their commits have reported them as lost.

use reprise_policy::Tick;
use reprise_policy::demotion::Pressure;

use super::WriteCause;
use crate::cache::{Cache, EvictionPosition, FrameIndex};
use crate::context::Context;
use crate::limits::DEMOTION_ARENA_PERMILLE;
use crate::save::Save;
use crate::save::tickets::TicketList;
use crate::slab::SlabId;

impl Save {
    /// Queues blocks for writing that were used again, as far as admission accepts them now.
    pub(crate) fn save_used_again(&mut self, cache: &mut Cache, now: Tick, frames: &[FrameIndex]) {
        for frame in frames {
            if self.room_for_demotions(cache) >= cache.frame_slot(*frame).bytes
                && self.save_dram_only(cache, now, *frame, WriteCause::Committed).is_some()
            {
                cache.count_used_again();
            }
        }
    }

    /// Queues the next batch of blocks to demote. Their DRAM copies are the next victims once they are durable.
    pub(super) fn demote(&mut self, cache: &mut Cache, cx: &Context) {
        if self.writeback.is_stopping {
            return;
        }
        let room = self.room_for_demotions(cache);
        let Some(demotions) = cache.due_demotions(self.writeback.demoting_bytes, room) else { return };
        for (frame, temperature) in &demotions.frames {
            let record = self.save_dram_only(cache, cx.now, *frame, WriteCause::Demoted);
            if let Some(block) = record.and_then(|record| self.writeback.unsaved.get_mut(record)) {
                block.demoted = Some(*temperature);
            }
        }
        if demotions.pressure == Pressure::Emergency {
            self.writeback.expedite();
        }
    }

    /// Queues blocks in DRAM only for writing whose regions pass to other tenants, as far as admission accepts them. Starts
    /// the writes of the others at once.
    pub(crate) fn save_leaving(&mut self, cache: &mut Cache, now: Tick) {
        for frame in cache.leaving_frames() {
            if self.room_for_demotions(cache) >= cache.frame_slot(frame).bytes {
                self.save_dram_only(cache, now, frame, WriteCause::Demoted);
            }
        }
        self.writeback.expedite();
    }

    /// Slot bytes of blocks that are not durable yet and were in DRAM only before.
    pub(crate) fn demoting_bytes(&self) -> u64 {
        self.writeback.demoting_bytes
    }

    fn room_for_demotions(&self, cache: &Cache) -> u64 {
        cache.share_of_arena(DEMOTION_ARENA_PERMILLE).saturating_sub(self.writeback.unsaved_bytes())
    }

    fn save_dram_only(
        &mut self,
        cache: &mut Cache,
        now: Tick,
        frame: FrameIndex,
        cause: WriteCause,
    ) -> Option<SlabId> {
        let lease = cache.claim_dram_only(frame)?;
        let position = match cause {
            WriteCause::Demoted => EvictionPosition::First,
            WriteCause::Committed | WriteCause::Replicated => EvictionPosition::Last,
        };
        Some(self.writeback.queue_save(cache, now, (lease, cause, position), TicketList::default()))
    }
}
