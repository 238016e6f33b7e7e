//! Next victims of the arena, for decisions ahead of their eviction.

use reprise_policy::eviction::Group;

use crate::cache::arena::Arena;
use crate::cache::frames::FrameIndex;

impl Arena {
    /// Bytes of slots that are free. A slot group without a region cannot use all of them.
    pub(in crate::cache) fn free_bytes(&self) -> u64 {
        self.bytes - self.used_bytes
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
}
