//! Regions that change tenants.
//!
//! ```text
//! in use by A ──retire──▶ retiring: no new slots ──last block gone──▶ renewing: the runtime replaces the memory
//!                                                                        │
//!                            unused, kept for B ◀──renewed───────────────┘ (failed: free, for A)
//! ```
//!
//! The runtime gives the region a new memory file, so descriptors and mappings of the old one never reach the bytes
//! of the next tenant. A tenant that finds no region may take one, the first possible of:
//!
//! * its first region, if it has a session: from the tenant with the most regions, also if sessions map the region,
//! * up to its fair part, if it has a session: from a tenant beyond its own part, if no session maps the region,
//! * an empty region that no session maps.
//!
//! The fair part is the number of regions divided by the number of tenants with sessions; other tenants have none. No
//! tenant loses regions that it has reserved, or its only region while it has a session. Of several regions, the one
//! that no session maps and with the fewest blocks in use is taken.

use reprise_policy::TenantId;

use crate::cache::arena::{Arena, Region, SlotGroup, SlotGroupId};
use crate::cache::frames::FrameIndex;

/// Stage of a region on its way to another tenant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Stage {
    InUse,
    /// Gets no new blocks, for this tenant.
    Retiring(TenantId),
    /// Without blocks; the runtime replaces the memory for this tenant.
    Renewing(TenantId),
}

/// Result of the replacement of a region's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Renewal {
    /// The region has new, zeroed memory.
    Done,
    /// The region still has its old memory.
    Failed,
}

/// Regions that change tenants.
#[derive(Debug)]
pub(super) struct Renewals {
    /// Regions that get no new blocks and still have some.
    retiring: Vec<u16>,
    /// Regions without blocks whose replacement has not been requested yet.
    vacated: Vec<u16>,
    /// Number of tenants with sessions.
    active: u64,
    /// Whether a search can find a region: the last one has found some, or owners or grants have changed since.
    is_search_due: bool,
}

/// Right of a tenant to a region of another one.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Claim {
    /// It has a session and no region.
    First,
    /// It has fewer regions than its fair part.
    FairPart,
    /// It may only take an empty region that no session maps.
    Unused,
}

impl Default for Renewals {
    fn default() -> Renewals {
        Renewals { retiring: Vec::new(), vacated: Vec::new(), active: 0, is_search_due: true }
    }
}

impl Renewals {
    /// Lets the next search proceed.
    pub(super) fn search_again(&mut self) {
        self.is_search_due = true;
    }
}

impl Region {
    fn may_pass(&self, claim: Claim, from: TenantId, slot_bytes: u64) -> bool {
        let is_allowed = match claim {
            Claim::First => true,
            Claim::FairPart => self.grants == 0,
            Claim::Unused => self.grants == 0 && self.owner.is_none(),
        };
        is_allowed && self.stage == Stage::InUse && self.tenant == Some(from) && self.bytes >= slot_bytes
    }
}

impl Arena {
    /// Counts one more session of a tenant.
    pub(in crate::cache) fn session_opened(&mut self, tenant: TenantId) {
        let share = self.reservations.share(tenant);
        share.sessions += 1;
        self.renewals.active += u64::from(share.sessions == 1);
        self.renewals.search_again();
    }

    /// Counts one session of a tenant less.
    pub(in crate::cache) fn session_closed(&mut self, tenant: TenantId) {
        let share = self.reservations.share(tenant);
        share.sessions -= 1;
        if share.sessions == 0 {
            share.has_arrival = false;
            self.renewals.active -= 1;
        }
        self.renewals.search_again();
    }

    /// Number of memory files that a region has had before the current one.
    pub(in crate::cache) fn generation(&self, region: u16) -> u32 {
        self.regions[usize::from(region)].generation
    }

    /// Counts a grant of a region's memory to a session.
    pub(in crate::cache) fn granted(&mut self, region: u16) {
        self.regions[usize::from(region)].grants += 1;
    }

    /// Ends a grant of a closed session. Grants of earlier memory no longer count.
    pub(in crate::cache) fn revoke(&mut self, region: u16, generation: u32) {
        let state = &mut self.regions[usize::from(region)];
        if state.generation == generation {
            state.grants -= 1;
            self.renewals.search_again();
        }
    }

    /// Whether a tenant has neither a region nor an unused one that is kept for it.
    pub(in crate::cache) fn lacks_region(&self, tenant: TenantId) -> bool {
        let can_own = self.fresh > 0 && self.reservations.may_own(tenant, self.fresh);
        self.reservations.of(tenant).owned == 0 && !can_own
    }

    /// Number of regions of the arena, if other tenants keep them all and a tenant has none.
    pub(in crate::cache) fn shortage(&self, tenant: TenantId) -> Option<usize> {
        let others = self.reservations.iter().filter(|(other, _)| *other != tenant);
        let kept: u64 = others.map(|(_, share)| share.unobtainable()).sum();
        let is_waiting = self.reservations.of(tenant).incoming > 0;
        let regions = self.regions.len();
        (kept >= regions as u64 && !is_waiting && self.lacks_region(tenant)).then_some(regions)
    }

    /// Starts to take a region for the tenant of a group that finds none; returns it. `is_stuck` states whether a frame
    /// can never be freed. O(1) while nothing has changed since a search without a result, else O(slots).
    pub(in crate::cache) fn retire_for(
        &mut self,
        group: SlotGroupId,
        is_stuck: impl Fn(FrameIndex) -> bool,
    ) -> Option<u16> {
        let SlotGroup { tenant, slot_bytes, .. } = *self.group(group);
        if !self.renewals.is_search_due {
            return None;
        }
        let Some(region) = self.region_for(tenant, slot_bytes, is_stuck) else {
            self.renewals.is_search_due = false;
            return None;
        };
        self.leave_partial(region);
        let state = &mut self.regions[usize::from(region)];
        let from = state.tenant.expect("a region of another tenant");
        state.stage = Stage::Retiring(tenant);
        let is_empty = state.owner.is_none();
        self.reservations.share(from).owned -= 1;
        self.reservations.share(tenant).incoming += 1;
        self.note_idle(region);
        if is_empty {
            self.unowned.retain(|unowned| *unowned != region);
            self.vacate(region);
        } else {
            self.renewals.retiring.push(region);
        }
        Some(region)
    }

    fn region_for(
        &self,
        tenant: TenantId,
        slot_bytes: u64,
        is_stuck: impl Fn(FrameIndex) -> bool,
    ) -> Option<u16> {
        let own = self.reservations.of(tenant);
        if own.incoming > 0 {
            return None;
        }
        let fair_part = self.regions.len() as u64 / self.renewals.active.max(1);
        let claim = match (own.sessions, own.owned) {
            (0, _) => Claim::Unused,
            (_, 0) => Claim::First,
            (_, owned) if owned < fair_part => Claim::FairPart,
            _ => Claim::Unused,
        };
        let mut others: Vec<_> = self.reservations.iter().filter(|(other, _)| *other != tenant).collect();
        others.retain(|(_, share)| {
            let part = if share.sessions > 0 { fair_part } else { 0 };
            share.owned > share.guaranteed() && (claim != Claim::FairPart || share.owned > part)
        });
        others.sort_unstable_by_key(|(_, share)| (std::cmp::Reverse(share.owned), share.sessions > 0));
        others.into_iter().find_map(|(from, _)| {
            let mut regions: Vec<(bool, u32, u32, u16)> = (0..)
                .zip(&self.regions)
                .filter(|(_, region)| region.may_pass(claim, from, slot_bytes))
                .map(|(at, region)| (region.grants > 0, region.used() - region.evictable, region.used(), at))
                .collect();
            regions.sort_unstable();
            let frees = |at: &u16| {
                let mut frames = self.regions[usize::from(*at)].frames.iter();
                frames.all(|frame| *frame == FrameIndex::NONE || !is_stuck(*frame))
            };
            regions.into_iter().map(|(.., at)| at).find(frees)
        })
    }

    /// Frames of a region.
    pub(in crate::cache) fn frames_of(&self, region: u16) -> impl Iterator<Item = FrameIndex> {
        let frames = self.regions[usize::from(region)].frames.iter().copied();
        frames.filter(|frame| *frame != FrameIndex::NONE)
    }

    /// Whether a region gets no new blocks.
    pub(in crate::cache) fn is_retiring(&self, region: u16) -> bool {
        matches!(self.regions[usize::from(region)].stage, Stage::Retiring(_))
    }

    /// Leaves a retiring region with its tenant, because one of its slots can never be freed.
    pub(in crate::cache) fn stop_retiring(&mut self, region: u16) {
        let state = &mut self.regions[usize::from(region)];
        let Stage::Retiring(successor) = state.stage else { return };
        state.stage = Stage::InUse;
        let tenant = state.tenant.expect("a region that was taken from a tenant");
        let (owner, is_full) = (state.owner.expect("a retiring region has blocks"), state.full());
        self.renewals.retiring.retain(|retiring| *retiring != region);
        self.reservations.share(tenant).owned += 1;
        self.reservations.share(successor).incoming -= 1;
        if !is_full {
            self.enter_partial(region, owner);
        }
        self.note_idle(region);
        self.renewals.search_again();
    }

    /// Records that a retiring region has no blocks.
    pub(super) fn vacate(&mut self, region: u16) {
        let state = &mut self.regions[usize::from(region)];
        if let Stage::Retiring(tenant) = state.stage {
            state.stage = Stage::Renewing(tenant);
            self.renewals.retiring.retain(|retiring| *retiring != region);
            self.renewals.vacated.push(region);
        }
    }

    /// Returns the regions whose memory the runtime must replace.
    pub(in crate::cache) fn take_vacated(&mut self) -> Vec<u16> {
        std::mem::take(&mut self.renewals.vacated)
    }

    /// Makes a region available again after the replacement of its memory. A failed replacement leaves it with its tenant.
    pub(in crate::cache) fn renewed(&mut self, region: u16, renewal: Renewal) {
        let Some(state) = self.regions.get_mut(usize::from(region)) else { return };
        let Stage::Renewing(successor) = state.stage else { return };
        state.stage = Stage::InUse;
        self.unowned.push(region);
        self.renewals.search_again();
        let share = self.reservations.share(successor);
        share.incoming -= 1;
        match renewal {
            Renewal::Done => {
                share.has_arrival = share.sessions > 0;
                state.tenant = None;
                state.generation += 1;
                state.grants = 0;
                self.fresh += 1;
            }
            Renewal::Failed => {
                let tenant = state.tenant.expect("a region that was taken from a tenant");
                self.reservations.share(tenant).owned += 1;
            }
        }
    }

    /// Position of a region by its identifier.
    pub(in crate::cache) fn position_of(&self, region: crate::effect::RegionId) -> Option<u16> {
        self.regions.iter().position(|state| state.id == region).map(|at| at as u16)
    }

    /// Checks that shares and stages fit the regions.
    pub(super) fn audit_renewals(&self) -> Result<(), String> {
        for (tenant, share) in self.reservations.iter() {
            let is_owned = |region: &&Region| region.tenant == Some(tenant) && region.stage == Stage::InUse;
            let owned = self.regions.iter().filter(is_owned).count() as u64;
            if owned != share.owned {
                return Err(format!("tenant {tenant:?} owns {owned} regions, not {}", share.owned));
            }
            let is_incoming = |region: &&Region| match region.stage {
                Stage::InUse => false,
                Stage::Retiring(successor) | Stage::Renewing(successor) => successor == tenant,
            };
            let incoming = self.regions.iter().filter(is_incoming).count() as u64;
            if incoming != share.incoming || (share.has_arrival && share.sessions == 0) {
                return Err(format!("tenant {tenant:?}: {incoming} regions are incoming: {share:?}"));
            }
        }
        let active = self.reservations.iter().filter(|(_, share)| share.sessions > 0).count() as u64;
        if active != self.renewals.active {
            return Err(format!("{active} tenants have sessions, not {}", self.renewals.active));
        }
        for (at, region) in (0..).zip(&self.regions) {
            let is_listed = self.renewals.retiring.contains(&at);
            if is_listed != matches!(region.stage, Stage::Retiring(_)) || (is_listed && region.used() == 0) {
                return Err(format!(
                    "region {}: {:?}, {} used slots",
                    region.id.0,
                    region.stage,
                    region.used()
                ));
            }
        }
        Ok(())
    }
}
