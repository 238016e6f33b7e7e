//! Allocation of frames, which evicts other blocks.

use crate::cache::Cache;
use crate::cache::checksums::ChecksumRow;
use crate::cache::frames::{CopyState, EvictionPosition, Frame, FrameIndex, FrameState, NO_ENTRY};
use crate::cache::sizes::{SizeClass, SizeClassId};

impl Cache {
    /// Allocates a frame with a slot for a size class, evicting other blocks if the arena is full or the
    /// tenant at its limit. `None` if nothing of the tenant's is evictable, and the rest of the arena belongs
    /// to other tenants, and for an erased tenant.
    pub(super) fn allocate_frame(
        &mut self,
        size_class: SizeClassId,
        state: FrameState,
    ) -> Option<FrameIndex> {
        let SizeClass { slot_group, slot_bytes, tenant_index: tenant, .. } = *self.sizes.get(size_class);
        if self.is_erased(tenant) {
            return None;
        }
        if !self.make_room_below_limit(tenant, slot_group, slot_bytes) {
            self.outcomes.arena_full = true;
            return None;
        }
        let mut is_first = true;
        let place = loop {
            match self.arena.allocate(slot_group) {
                Some(place) => break place,
                // In addition to the eviction of own blocks: another tenant may hold the memory of this one.
                None if std::mem::take(&mut is_first) => self.request_region(slot_group),
                None if self.make_room(slot_group) => {}
                None => {
                    self.outcomes.arena_full = true;
                    return None;
                }
            }
        };
        let checksums = ChecksumRow::UNKNOWN;
        let frame = Frame {
            state,
            leases: 0,
            entry: NO_ENTRY,
            checksums,
            place,
            size_class,
            copy_state: CopyState::Trusted,
            position: EvictionPosition::Last,
        };
        let frame = self.frames.insert(frame);
        self.arena.set_frame(place, frame);
        self.sizes.hold(size_class);
        self.accounts.charge_dram(tenant, slot_bytes);
        Some(frame)
    }
}
