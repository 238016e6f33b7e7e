//! Passing regions of the arena from tenant to tenant: their blocks, and the requests for new memory.
//!
//! Blocks of a retiring region leave DRAM as in any eviction: copies that are durable at once, blocks that are being
//! saved once they are durable. Blocks in DRAM only are saved first where admission accepts them (`save`). A copy in
//! use can no longer be found, so that no further reader keeps the region; it waits for the leases that exist, and each
//! of them ends in limited time. Retention pins are advice and yield.

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
        if let Some(region) = self.arena.retire_for(slot_group, is_stuck) {
            self.outcomes.regions_retired = true;
            let is_clean = |frame: &FrameIndex| frames.get(*frame).state == FrameState::Clean;
            self.leaving.extend(self.arena.frames_of(region).filter(is_clean));
        }
    }

    /// Returns an error if a tenant has no region and can get none.
    pub(crate) fn check_regions(&self, size_class: SizeClassId) -> Result<(), String> {
        let (tenant, _) = self.group_of(size_class);
        let Some(regions) = self.arena.shortage(tenant) else { return Ok(()) };
        Err(format!(
            "this tenant has no memory: other tenants keep all {regions} regions of the arena, one for each tenant with \
             a session, and their reservations: raise arena.bytes, or lower arena.region_bytes or dram.reserved of \
             [[tenants]] in the agent's configuration"
        ))
    }

    /// Frames whose blocks leave DRAM with the current event, unless they are saved first.
    pub(crate) fn leaving_frames(&self) -> Vec<FrameIndex> {
        self.leaving.iter().copied().filter(|frame| self.is_leaving(*frame)).collect()
    }

    /// Removes the blocks of retiring regions from DRAM that are durable or cannot be saved, and requests new memory for
    /// empty regions.
    pub(crate) fn drain_regions(&mut self, cx: &mut Context) {
        for frame in std::mem::take(&mut self.leaving) {
            if self.is_leaving(frame) {
                self.leave_dram(frame);
            }
        }
        for region in self.arena.take_vacated() {
            self.counters.regions_retired += 1;
            cx.emit(Effect::RenewRegion { region: self.arena.region_id(region) });
        }
    }

    /// Whether a frame still has a clean block of a retiring region: it may have been evicted, and be in use again.
    fn is_leaving(&self, frame: FrameIndex) -> bool {
        let state = self.frames.get(frame);
        state.state == FrameState::Clean && self.arena.is_retiring(state.place.region)
    }

    /// Removes a clean copy from DRAM, once its readers have released it.
    fn leave_dram(&mut self, frame: FrameIndex) {
        let state = self.frames.get(frame);
        if state.leases == 0 {
            self.arena.remove_evictable(state.place, frame);
            return self.evict_frame(frame);
        }
        let entry = state.entry().expect("a clean frame can be found");
        self.retained.broken += u64::from(self.retained.in_dram.contains_key(&frame));
        self.count_eviction(entry, frame);
        self.detach_resident(entry, frame);
        self.remove_if_absent(entry);
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
