//! What other owners read of the cache: blocks, frames and size classes. They change them through methods
//! only.

use reprise_policy::eviction::{EntryIndex, Group};
use reprise_policy::{BlockKey, TenantName};

use crate::cache::Cache;
use crate::cache::accounts::TenantIndex;
use crate::cache::frames::{Frame, FrameIndex};
use crate::cache::index::Entry;
use crate::cache::sizes::{RankClasses, SizeClass, SizeClassId};
use crate::effect::Source;

impl Cache {
    /// Returns the entry of a key.
    pub(crate) fn find(&self, key: &BlockKey) -> Option<EntryIndex> {
        self.index.find(key)
    }

    /// Returns the entries of several keys, in their order.
    pub(crate) fn find_all<'a>(
        &self,
        keys: impl Iterator<Item = &'a BlockKey> + Clone,
    ) -> Vec<Option<EntryIndex>> {
        self.index.find_all(keys)
    }

    /// Returns the leading blocks that a size class has on this node, and where.
    pub(crate) fn leading_run(&self, keys: &[BlockKey], classes: &RankClasses) -> Vec<(EntryIndex, Source)> {
        self.index.leading_run(keys, classes)
    }

    /// Returns the block of an entry.
    pub(crate) fn entry(&self, entry: EntryIndex) -> &Entry {
        self.index.entry(entry)
    }

    /// Returns a frame in use.
    pub(crate) fn frame(&self, frame: FrameIndex) -> &Frame {
        self.frames.get(frame)
    }

    /// Iterates all frames in use.
    pub(crate) fn frames(&self) -> impl Iterator<Item = (FrameIndex, &Frame)> {
        self.frames.iter()
    }

    /// Returns a tenant's layout.
    pub(crate) fn size_class(&self, id: SizeClassId) -> &SizeClass {
        self.sizes.get(id)
    }

    /// Number of objects in a block of a tenant's layout.
    pub(crate) fn objects(&self, id: SizeClassId) -> usize {
        self.sizes.objects(id)
    }

    /// Returns a tenant's name, once it is known.
    pub(crate) fn tenant_name(&self, tenant: TenantIndex) -> Option<TenantName> {
        self.accounts.get(tenant).name.clone()
    }

    /// Number of blocks on devices.
    pub(crate) fn stored_blocks(&self) -> u64 {
        self.index.stored_blocks()
    }

    /// Iterates the blocks in a range of the index, in which blocks keep their places.
    pub(crate) fn entries_from(
        &self,
        first: EntryIndex,
        places: usize,
    ) -> impl Iterator<Item = (EntryIndex, &Entry)> {
        self.index.iter_from(first, places)
    }

    /// Number of places in the index, used or not.
    pub(crate) fn entry_places(&self) -> usize {
        self.index.places()
    }

    /// Returns the next victims of a tenant behind one of them, the coldest first.
    pub(crate) fn next_victims(
        &self,
        tenant: TenantIndex,
        behind: Option<EntryIndex>,
        count: usize,
    ) -> Vec<EntryIndex> {
        self.devices.next_victims(Group(tenant.0), behind, count)
    }
}
