//! Next victims of the arena, for decisions ahead of their eviction, and regions that few slots keep.

use std::collections::BTreeMap;

use reprise_policy::eviction::{Class, EntryIndex, Group};

use crate::cache::arena::renewal::Stage;
use crate::cache::arena::{Arena, RegionSlot, SlotGroup, SlotGroupId};
use crate::cache::frames::FrameIndex;

impl Arena {
    /// Bytes of slots that are free. A slot group without a region cannot use all of them.
    pub(in crate::cache) fn free_bytes(&self) -> u64 {
        self.bytes - self.used_bytes
    }

    /// Moves an evictable frame to a class.
    pub(in crate::cache) fn reclass(&mut self, frame: FrameIndex, class: Class) {
        self.order.reclass(EntryIndex(frame.0), class);
    }

    /// Class of an evictable frame, for checks.
    pub(in crate::cache) fn class(&self, frame: FrameIndex) -> Option<Class> {
        self.order.class(EntryIndex(frame.0))
    }

    /// Returns the next victims of each slot group in the order of eviction, as far as lists determine it: at most
    /// `count` of all groups.
    pub(in crate::cache) fn next_victims(&self, count: usize) -> Vec<Vec<FrameIndex>> {
        let used = (0..self.groups.len()).filter(|at| self.groups[*at].size_classes > 0);
        let groups: Vec<Group> = used.map(|at| Group(at as u16)).collect();
        let each = count.div_ceil(groups.len().max(1));
        let of = |group: Group| self.order.following(group, None, each).into_iter();
        groups.into_iter().map(|group| of(group).map(|entry| FrameIndex(entry.0)).collect()).collect()
    }

    /// Returns the region that a group could take over if these slots, which are not evictable, were: it belongs to
    /// another group of the tenant, and all its other slots are evictable. Chooses the region with the fewest of them.
    pub(in crate::cache) fn region_kept_by(
        &self,
        group: SlotGroupId,
        slots: impl Iterator<Item = RegionSlot>,
    ) -> Option<u16> {
        let SlotGroup { tenant, slot_bytes, .. } = self.group(group);
        let mut keeping: BTreeMap<u16, u32> = BTreeMap::new();
        for slot in slots {
            *keeping.entry(slot.region).or_default() += 1;
        }
        let could_take = |(region, count): &(u16, u32)| {
            let region = &self.regions[usize::from(*region)];
            region.stage == Stage::InUse
                && region.owner.is_some_and(|owner| owner != group)
                && region.tenant == Some(*tenant)
                && region.bytes >= *slot_bytes
                && region.evictable + count == region.used()
        };
        keeping.into_iter().filter(could_take).min_by_key(|(_, count)| *count).map(|(region, _)| region)
    }
}
