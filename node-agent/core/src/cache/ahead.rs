//! Where a block is that could be read ahead of its load.

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::index::Dram;
use crate::cache::sizes::SizeClassId;
use crate::effect::DeviceId;

/// State of a block, as a read ahead needs it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum AheadCopy {
    /// Readable in DRAM.
    InDram,
    /// On its way to DRAM.
    Filling,
    /// On a device only.
    OnDevice(DeviceId, EntryIndex),
    /// Not on this node, or of another tenant or layout.
    Absent,
}

impl Cache {
    /// Returns where a block of a size class is.
    pub(crate) fn ahead_copy(&self, key: &BlockKey, size_class: SizeClassId) -> AheadCopy {
        let Some(entry) = self.index.find(key) else { return AheadCopy::Absent };
        let state = self.index.entry(entry);
        if state.size_class() != size_class {
            return AheadCopy::Absent;
        }
        match (state.dram(), state.stored()) {
            (Dram::Absent, Some(stored)) => AheadCopy::OnDevice(stored.device, entry),
            (Dram::Absent, None) => AheadCopy::Absent,
            (Dram::Filling(_), _) => AheadCopy::Filling,
            (Dram::Resident(_), _) => AheadCopy::InDram,
        }
    }
}
