//! Size classes: pairs of tenant and layout, numbered with 16 bits.
//!
//! A block is visible to a session exactly if their size classes are equal. One comparison thus excludes
//! blocks of other tenants and blocks of other layouts. A size class exists while sessions, blocks or frames
//! use it; when the table is full, an unused class is replaced.

use reprise_policy::layout::LayoutSpec;
use reprise_policy::session::Ranks;
use reprise_policy::{Layout, TenantId};

use crate::cache::Cache;
use crate::cache::accounts::TenantIndex;
use crate::cache::arena::{Arena, SlotGroupId};
use crate::cache::describe::BlockOrigin;
use crate::limits::{INDEX_RESERVE_MAX, SIZE_CLASSES_MAX};

/// Number of a size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct SizeClassId(pub(crate) u16);

/// A tenant's layout, and the group that its slots are allocated from.
#[derive(Clone, Debug)]
pub(crate) struct SizeClass {
    pub(crate) tenant: TenantId,
    pub(crate) tenant_index: TenantIndex,
    pub(crate) layout: Layout,
    /// Group of arena slots that holds its blocks.
    pub(crate) slot_group: SlotGroupId,
    /// Bytes of one slot.
    pub(crate) slot_bytes: u64,
    /// Whether the operator was notified that no device can hold its blocks.
    unstorable: UnstorableReport,
    origins: Origins,
    uses: u64,
}

/// Where the blocks of a size class have come from.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum Origins {
    /// Sessions of this node have saved or loaded all of them.
    #[default]
    Sessions,
    /// Recovery has found some, or peers have placed some: no session has stated their namespaces.
    Elsewhere,
}

impl SizeClass {
    /// Whether some blocks have come without a session of this node that uses their namespace.
    pub(crate) fn has_blocks_from_elsewhere(&self) -> bool {
        self.origins == Origins::Elsewhere
    }
}

/// State of the diagnostic for blocks that fit no device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum UnstorableReport {
    Pending,
    Sent,
}

/// Size classes of the keys of a match, by rank: a key at position `p` has that of rank `p mod ranks`.
#[derive(Clone, Debug)]
pub(crate) struct RankClasses(Vec<Option<SizeClassId>>);

/// Table of all size classes.
#[derive(Debug, Default)]
pub(crate) struct SizeClasses {
    size_classes: Vec<SizeClass>,
}

impl RankClasses {
    /// Classes of keys of one rank.
    pub(crate) fn one(class: SizeClassId) -> RankClasses {
        RankClasses(vec![Some(class)])
    }

    /// Number of ranks, and so of keys of a block.
    pub(crate) fn ranks(&self) -> usize {
        self.0.len()
    }

    /// Class of the key at a position of the match; `None` if the node has no block of that rank's layout.
    pub(crate) fn at(&self, position: usize) -> Option<SizeClassId> {
        self.0[position % self.0.len()]
    }

    /// Classes of all positions, without an end.
    pub(crate) fn cycle(&self) -> impl Iterator<Item = Option<SizeClassId>> {
        self.0.iter().copied().cycle()
    }
}

impl SizeClasses {
    /// Returns the classes of all ranks of a class's tensor-parallel group.
    fn of_all_ranks(&self, own: SizeClassId) -> RankClasses {
        let own = self.get(own);
        let group = LayoutSpec { tp_rank: 0, ..*own.layout.spec() };
        let mut classes = vec![None; usize::from(group.tp_size)];
        for (number, other) in (0..).zip(&self.size_classes) {
            let of_other = *other.layout.spec();
            if other.tenant == own.tenant && (LayoutSpec { tp_rank: 0, ..of_other }) == group {
                classes[usize::from(of_other.tp_rank)] = Some(SizeClassId(number));
            }
        }
        RankClasses(classes)
    }

    /// Returns the number of a tenant's layout, adding it if necessary; `None` if the table is full.
    pub(crate) fn intern(
        &mut self,
        (tenant, tenant_index): (TenantId, TenantIndex),
        layout: Layout,
        arena: &mut Arena,
    ) -> Option<SizeClassId> {
        if let Some(known) = self.find(tenant, layout) {
            return Some(known);
        }
        let (slot_bytes, unstorable) = (layout.slot_bytes(), UnstorableReport::Pending);
        if self.size_classes.len() < SIZE_CLASSES_MAX {
            let slot_group = arena.join_slot_group(tenant, slot_bytes);
            self.size_classes.push(SizeClass {
                tenant,
                tenant_index,
                layout,
                slot_group,
                slot_bytes,
                unstorable,
                origins: Origins::default(),
                uses: 0,
            });
            return Some(SizeClassId((self.size_classes.len() - 1) as u16));
        }
        let vacant = self.size_classes.iter().position(|size_class| size_class.uses == 0)?;
        arena.leave_slot_group(self.size_classes[vacant].slot_group);
        let slot_group = arena.join_slot_group(tenant, slot_bytes);
        let origins = Origins::default();
        self.size_classes[vacant] =
            SizeClass { tenant, tenant_index, layout, slot_group, slot_bytes, unstorable, origins, uses: 0 };
        Some(SizeClassId(vacant as u16))
    }

    /// Returns the number of a tenant's layout that is in the table.
    pub(crate) fn find(&self, tenant: TenantId, layout: Layout) -> Option<SizeClassId> {
        let known = self
            .size_classes
            .iter()
            .position(|size_class| size_class.tenant == tenant && size_class.layout == layout);
        known.map(|known| SizeClassId(known as u16))
    }

    /// Number of size classes in use.
    pub(crate) fn in_use(&self) -> usize {
        self.size_classes.iter().filter(|size_class| size_class.uses > 0).count()
    }

    pub(crate) fn get(&self, id: SizeClassId) -> &SizeClass {
        &self.size_classes[usize::from(id.0)]
    }

    /// Number of objects of a block.
    pub(crate) fn objects(&self, id: SizeClassId) -> usize {
        self.get(id).layout.objects() as usize
    }

    /// Records a block of the size class.
    pub(super) fn add_origin(&mut self, id: SizeClassId, origin: BlockOrigin) {
        if matches!(origin, BlockOrigin::Placed | BlockOrigin::Recovered) {
            self.size_classes[usize::from(id.0)].origins = Origins::Elsewhere;
        }
    }

    /// Marks the size class as reported unstorable; returns whether it was not reported before.
    pub(super) fn mark_unstorable_reported(&mut self, id: SizeClassId) -> bool {
        let size_class = &mut self.size_classes[usize::from(id.0)];
        std::mem::replace(&mut size_class.unstorable, UnstorableReport::Sent) == UnstorableReport::Pending
    }

    /// Counts one more session, block or frame that uses the size class.
    pub(crate) fn hold(&mut self, id: SizeClassId) {
        self.size_classes[usize::from(id.0)].uses += 1;
    }

    /// Counts one user of the size class less.
    pub(crate) fn release(&mut self, id: SizeClassId) {
        let size_class = &mut self.size_classes[usize::from(id.0)];
        size_class.uses = size_class.uses.checked_sub(1).expect("every release follows a hold");
        if size_class.uses == 0 {
            size_class.origins = Origins::default();
        }
    }

    /// Number of users of each size class, for the audit.
    pub(crate) fn uses(&self) -> impl Iterator<Item = u64> {
        self.size_classes.iter().map(|size_class| size_class.uses)
    }
}

const _: () = assert!(SIZE_CLASSES_MAX <= u16::MAX as usize, "size class numbers are 16 bits");

impl Cache {
    /// Returns the number of a tenant's layout, or `None` if a table is full.
    pub(crate) fn intern(&mut self, tenant: TenantId, layout: Layout) -> Option<SizeClassId> {
        let index = self.accounts.register(tenant)?;
        self.sizes.intern((tenant, index), layout, &mut self.arena)
    }

    /// Returns the size class of a session that opens, and makes room in the index for as many blocks as
    /// there is space for; `None` if a table is full.
    pub(crate) fn open(&mut self, tenant: TenantId, layout: Layout) -> Option<SizeClassId> {
        let size_class = self.intern(tenant, layout)?;
        self.sizes.hold(size_class);
        let bytes = self.devices.usage().capacity_bytes + self.arena.bytes();
        let blocks = bytes / self.sizes.get(size_class).slot_bytes;
        self.index.reserve(blocks.min(INDEX_RESERVE_MAX) as usize);
        Some(size_class)
    }

    /// Whether a tenant's layout has a number.
    pub(crate) fn is_interned(&self, tenant: TenantId, layout: Layout) -> bool {
        self.sizes.find(tenant, layout).is_some()
    }

    /// Returns the classes of the keys of a match: those of the session's rank, or of all ranks of its group.
    pub(crate) fn rank_classes(&self, own: SizeClassId, ranks: Ranks) -> RankClasses {
        match ranks {
            Ranks::Own => RankClasses::one(own),
            Ranks::All => self.sizes.of_all_ranks(own),
        }
    }

    /// Returns the layouts of the keys of a match: that of the session's rank, or those of all ranks of its group.
    pub(crate) fn rank_layouts(&self, own: SizeClassId, ranks: Ranks) -> Vec<Layout> {
        let own = self.sizes.get(own).layout;
        match ranks {
            Ranks::Own => vec![own],
            Ranks::All => (0..own.spec().tp_size)
                .filter_map(|tp_rank| LayoutSpec { tp_rank, ..*own.spec() }.validate().ok())
                .collect(),
        }
    }

    /// Number of size classes in use.
    pub(crate) fn size_classes_in_use(&self) -> usize {
        self.sizes.in_use()
    }

    /// Counts one more user of a size class.
    pub(crate) fn hold_size_class(&mut self, size_class: SizeClassId) {
        self.sizes.hold(size_class);
    }

    /// Counts one user of a size class less.
    pub(crate) fn release_size_class(&mut self, size_class: SizeClassId) {
        self.sizes.release(size_class);
    }

    /// Bytes of one slot of a size class.
    pub(crate) fn slot_bytes(&self, size_class: SizeClassId) -> u64 {
        self.sizes.get(size_class).slot_bytes
    }

    /// Configured DRAM limit of the tenant of a size class, regardless of grants.
    pub(crate) fn dram_limit_configured(&self, size_class: SizeClassId) -> u64 {
        self.accounts.dram_limit_configured(self.sizes.get(size_class).tenant_index)
    }

    /// Bytes of the arena's regions.
    pub(crate) fn arena_bytes(&self) -> u64 {
        self.arena.bytes()
    }
}
