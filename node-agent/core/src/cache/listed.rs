//! Blocks that requests list which have begun: their eviction class differs from their own one meanwhile.
//!
//! A listed block need not be on this node: it has its class from the moment it is saved or read here. Listing costs a
//! look-up in a hash table, and moves the block in its eviction orders if its class changes. The order between tenants
//! does not depend on classes.

use hashbrown::HashTable;
use reprise_policy::BlockKey;
use reprise_policy::eviction::listed::ListedBy;
use reprise_policy::eviction::{Class, EntryIndex};
use reprise_policy::prefetch::RequestState;

use crate::cache::Cache;
use crate::cache::blocks::class_of;
use crate::cache::index::Dram;
use crate::cache::sizes::SizeClassId;

/// Table of all listed blocks.
#[derive(Debug, Default)]
pub(super) struct Listed {
    blocks: HashTable<ListedBlock>,
}

#[derive(Clone, Copy, Debug)]
struct ListedBlock {
    key: BlockKey,
    /// Its tenant and layout: a request lists blocks of its own tenant only.
    size_class: SizeClassId,
    by: ListedBy,
}

const _: () = assert!(size_of::<ListedBlock>() == 28, "memory per listed block is part of the design");

impl Listed {
    fn find(&self, key: &BlockKey, size_class: SizeClassId) -> Option<&ListedBlock> {
        self.blocks.find(key.table_hash(), |listed| listed.key == *key && listed.size_class == size_class)
    }

    /// Number of listed blocks; each uses its size class.
    pub(super) fn len(&self) -> usize {
        self.blocks.len()
    }

    /// Requests that list a block. Hot path: without hints, this is one comparison.
    pub(super) fn of(&self, key: &BlockKey, size_class: SizeClassId) -> ListedBy {
        if self.blocks.is_empty() {
            return ListedBy::default();
        }
        self.find(key, size_class).map(|listed| listed.by).unwrap_or_default()
    }
}

impl Cache {
    /// Records that a request lists a block, no longer lists it, or has changed its state. Returns whether the class of
    /// a block on this node has changed.
    pub(crate) fn list_block(
        &mut self,
        (key, size_class): (BlockKey, SizeClassId),
        from: Option<RequestState>,
        to: Option<RequestState>,
    ) -> bool {
        let Cache { listed, sizes, .. } = self;
        let is_block = |listed: &ListedBlock| listed.key == key && listed.size_class == size_class;
        let hash = |listed: &ListedBlock| listed.key.table_hash();
        let mut entry = match listed.blocks.entry(key.table_hash(), is_block, hash) {
            hashbrown::hash_table::Entry::Occupied(entry) => entry,
            hashbrown::hash_table::Entry::Vacant(vacant) => {
                sizes.hold(size_class);
                vacant.insert(ListedBlock { key, size_class, by: ListedBy::default() })
            }
        };
        let by = &mut entry.get_mut().by;
        let before = *by;
        from.into_iter().for_each(|state| by.remove(state));
        to.into_iter().for_each(|state| by.add(state));
        let after = *by;
        if after.is_empty() {
            entry.remove();
            sizes.release(size_class);
        }
        let Some(found) = self.index.find(&key) else { return false };
        let state = self.index.entry(found);
        let own = class_of(state.class());
        let changes = state.size_class() == size_class && before.class(own) != after.class(own);
        if changes {
            self.reclass(found, after.class(own));
        }
        changes
    }

    /// Class of a block in the eviction orders.
    pub(super) fn eviction_class(&self, entry: EntryIndex) -> Class {
        let state = self.index.entry(entry);
        self.listed.of(&state.key(), state.size_class()).class(class_of(state.class()))
    }

    /// Moves a block to a class in both tiers.
    pub(super) fn reclass(&mut self, entry: EntryIndex, class: Class) {
        self.devices.order.reclass(entry, class);
        if let Dram::Resident(frame) = self.index.entry(entry).dram() {
            self.arena.reclass(frame, class);
        }
    }

    /// Checks that evictable blocks are in their classes. Costs time in proportion to all blocks.
    pub(super) fn audit_classes(&self) -> Result<(), String> {
        for (entry, state) in self.index.iter() {
            let class = self.eviction_class(entry);
            let in_dram = match state.dram() {
                Dram::Resident(frame) => self.arena.class(frame),
                Dram::Filling(_) | Dram::Absent => None,
            };
            let ordered = [in_dram, self.devices.order.class(entry)];
            let is_class = ordered.into_iter().flatten().all(|ordered| ordered == class);
            ensure!(is_class, "{} has class {class:?}, and is ordered by {ordered:?}", state.key());
        }
        Ok(())
    }

    /// Number of blocks that requests list.
    pub(crate) fn listed_blocks(&self) -> usize {
        self.listed.len()
    }

    /// Requests that list a block, for checks.
    pub(crate) fn listed_by(&self, key: &BlockKey, size_class: SizeClassId) -> ListedBy {
        self.listed.of(key, size_class)
    }
}
