//! Passing regions of the arena from tenant to tenant: their blocks, and the requests for new memory.
//!
//! Blocks of a retiring region leave DRAM as in any eviction: copies that are durable at once, blocks that are being
//! saved once they are durable. Blocks in DRAM only are saved first where admission accepts them (`save`). Readers
//! keep their leases, and the region waits for them. Retention pins are advice and yield.

use reprise_policy::TenantId;

use crate::cache::Cache;
use crate::cache::arena::{Renewal, SlotGroupId};
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::sizes::SizeClassId;
use crate::context::Context;
use crate::effect::{Effect, RegionId};
use crate::limits::RENEWAL_RETRY;
use crate::regions::RegionSet;

impl Cache {
    /// Counts a session of a tenant, and starts to get its guaranteed region if none is left.
    pub(crate) fn session_opened(&mut self, size_class: SizeClassId) {
        let (tenant, slot_group) = self.group_of(size_class);
        self.arena.session_opened(tenant);
        if self.arena.lacks_region(tenant) {
            self.request_region(slot_group);
        }
    }

    /// Counts one session of a tenant less.
    pub(crate) fn session_closed(&mut self, size_class: SizeClassId) {
        let (tenant, _) = self.group_of(size_class);
        self.arena.session_closed(tenant);
    }

    fn group_of(&self, size_class: SizeClassId) -> (TenantId, SlotGroupId) {
        let state = self.sizes.get(size_class);
        (state.tenant, state.slot_group)
    }

    /// Ends the grants of a closed session.
    pub(crate) fn revoke_regions(&mut self, regions: &RegionSet) {
        regions.iter().for_each(|(region, generation)| self.arena.revoke(region, generation));
    }

    /// Starts to take a region of another tenant for a group without a free slot, if its tenant may have it.
    pub(super) fn request_region(&mut self, slot_group: SlotGroupId) {
        if self.now < self.renewals_from {
            return;
        }
        let frames = &self.frames;
        let is_stuck = |frame| frames.get(frame).state == FrameState::Retired;
        if self.arena.retire_for(slot_group, is_stuck).is_some() {
            self.outcomes.regions_retired = true;
        }
    }

    /// Returns an error if a tenant has no region and can get none.
    pub(crate) fn check_regions(&self, size_class: SizeClassId) -> Result<(), String> {
        let (tenant, _) = self.group_of(size_class);
        let Some((regions, kept)) = self.arena.shortage(tenant) else { return Ok(()) };
        Err(format!(
            "this tenant has no memory: the arena has {regions} regions, and other tenants keep {kept} of them, one for \
             each tenant with a session and those of reservations: raise arena.bytes, or lower \
             arena.region_bytes or dram.reserved of [[tenants]] in the agent's configuration"
        ))
    }

    /// Frames of retiring regions that have blocks in DRAM only.
    pub(crate) fn retiring_frames(&self) -> Vec<FrameIndex> {
        let frames = self.arena.retiring_frames().into_iter();
        frames.filter(|frame| self.frames.get(*frame).state == FrameState::Clean).collect()
    }

    /// Evicts the blocks of retiring regions that are not in use, and requests new memory for empty regions.
    pub(crate) fn drain_regions(&mut self, cx: &mut Context) {
        if self.arena.has_retiring_victims() {
            for frame in self.arena.retiring_frames() {
                let state = self.frames.get(frame);
                if state.state == FrameState::Clean && state.leases == 0 {
                    self.arena.remove_evictable(state.place, frame);
                    self.evict_frame(frame);
                }
            }
        }
        for region in self.arena.take_vacated() {
            self.counters.regions_retired += 1;
            cx.emit(Effect::RenewRegion { region: self.arena.region_id(region) });
        }
    }

    /// Ends the retention of copies in retiring regions.
    pub(crate) fn break_retained_in_retiring(&mut self) {
        let is_retiring = |frame: &FrameIndex| self.arena.is_retiring(self.frames.get(*frame).place.region);
        let retained: Vec<FrameIndex> = self.retained.in_dram.keys().copied().filter(is_retiring).collect();
        for frame in retained {
            self.retained.broken += 1;
            self.lose_retained_frame(frame);
        }
    }

    /// Handles the result of [`Effect::RenewRegion`].
    pub(crate) fn region_renewed(&mut self, region: RegionId, renewal: Renewal) {
        let Some(position) = self.arena.position_of(region) else { return };
        self.arena.renewed(position, renewal);
        match renewal {
            Renewal::Done => self.counters.regions_renewed += 1,
            Renewal::Failed => self.renewals_from = self.now.after(RENEWAL_RETRY),
        }
    }
}
