//! Search for the copies of blocks on this node.

use reprise_policy::eviction::EntryIndex;
use reprise_policy::{BlockKey, Layout, TenantId};

use crate::cache::Cache;
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::lease::{Lease, Read};
use crate::cache::sizes::{SizeClass, SizeClassId};
use crate::effect::Source;

/// State of a block on this node.
#[derive(Debug)]
pub(crate) enum LocalCopy {
    /// In DRAM, with a lease on its slot.
    InDram(Lease<Read>),
    /// Being filled, or on a device.
    Elsewhere(LocalBlock),
    Absent,
}

/// Block that this node has or is filling, but that is not readable in DRAM.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum LocalBlock {
    /// Being filled; contains the slot of the fill.
    Filling(u32),
    /// On a device.
    Stored(EntryIndex),
}

/// State of an offered block on this node.
pub(crate) enum OfferedBlock {
    /// Durable, or being written.
    Durable,
    /// In DRAM only.
    InDram(FrameIndex),
    /// Being fetched for a load; contains the slot of the fill.
    Filling(u32),
    /// Exists under another tenant or layout.
    Foreign,
    Unknown,
}

impl Cache {
    /// Finds consecutive blocks of a chain, marks them as used, and leases those in DRAM. Passes the state of
    /// each block on, in the order of the keys. No room is made before all of them are leased.
    pub(crate) fn acquire<'a>(
        &mut self,
        keys: impl Iterator<Item = &'a BlockKey> + Clone,
        size_class: SizeClassId,
        mut found: impl FnMut(LocalCopy),
    ) {
        let entries = self.index.find_all(keys);
        self.touch_chain(entries.iter().flatten().copied());
        for entry in entries {
            found(entry.map_or(LocalCopy::Absent, |entry| self.acquire_entry(entry, size_class)));
        }
    }

    /// Finds a block of a layout, under any tenant, and leases it if it is in DRAM.
    pub(crate) fn acquire_of(
        &mut self,
        key: &BlockKey,
        (tenant, layout): (TenantId, &Layout),
    ) -> Option<(EntryIndex, LocalCopy)> {
        let entry = self.index.find(key)?;
        let size_class = self.index.entry(entry).size_class();
        let SizeClass { tenant: owner, layout: of_block, .. } = self.sizes.get(size_class);
        let fits = *owner == tenant && of_block == layout;
        fits.then(|| (entry, self.acquire_entry(entry, size_class)))
    }

    fn acquire_entry(&mut self, entry: EntryIndex, size_class: SizeClassId) -> LocalCopy {
        if self.index.entry(entry).size_class() == size_class {
            self.count_use(entry);
        }
        let state = self.index.entry(entry);
        match state.dram() {
            _ if state.size_class() != size_class => LocalCopy::Absent,
            Dram::Resident(frame) => LocalCopy::InDram(self.lease(frame)),
            Dram::Filling(frame) => self
                .fill_of_frame(frame)
                .map_or(LocalCopy::Absent, |fill| LocalCopy::Elsewhere(LocalBlock::Filling(fill))),
            Dram::Absent => LocalCopy::Elsewhere(LocalBlock::Stored(entry)),
        }
    }

    /// Returns the slot of the fill of a block, if it is being filled.
    pub(crate) fn fill_of(&self, entry: EntryIndex) -> Option<u32> {
        match self.index.entry(entry).dram() {
            Dram::Filling(frame) => self.fill_of_frame(frame),
            Dram::Absent | Dram::Resident(_) => None,
        }
    }

    /// Returns the slot of the fill of a key, if a block of this size class is being filled.
    pub(crate) fn fill_of_key(&self, key: &BlockKey, size_class: SizeClassId) -> Option<u32> {
        let entry = self.index.find(key)?;
        (self.index.entry(entry).size_class() == size_class).then(|| self.fill_of(entry))?
    }

    fn fill_of_frame(&self, frame: FrameIndex) -> Option<u32> {
        match self.frames.get(frame).state {
            FrameState::Filling(fill) => Some(fill),
            _ => None,
        }
    }

    /// Returns where a block of a size class is readable on this node.
    pub(crate) fn local_source(&self, key: &BlockKey, size_class: SizeClassId) -> Option<Source> {
        self.index.find(key).and_then(|entry| self.index.entry(entry).source(size_class))
    }

    pub(crate) fn offered_block(&self, key: &BlockKey, size_class: SizeClassId) -> OfferedBlock {
        let Some(entry) = self.index.find(key) else { return OfferedBlock::Unknown };
        let state = self.index.entry(entry);
        let kept = state.stored().is_some();
        match state.dram() {
            _ if state.size_class() != size_class => OfferedBlock::Foreign,
            _ if kept => OfferedBlock::Durable,
            Dram::Resident(frame) => match self.frames.get(frame).state {
                FrameState::Unsaved(_) => OfferedBlock::Durable,
                _ => OfferedBlock::InDram(frame),
            },
            Dram::Filling(frame) => match self.fill_of_frame(frame) {
                Some(fill) => OfferedBlock::Filling(fill),
                None => OfferedBlock::Foreign,
            },
            Dram::Absent => OfferedBlock::Unknown,
        }
    }
}
