//! Search for the copies of blocks on this node.

use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use crate::cache::Cache;
use crate::cache::frames::{FrameIndex, FrameState};
use crate::cache::index::Dram;
use crate::cache::sizes::SizeClassId;
use crate::effect::Source;

/// State of a block on this node.
pub(crate) enum LocalCopy {
    InDram(FrameIndex),
    /// Being filled; contains the slot of the fill.
    Filling(u32),
    OnDevice(EntryIndex),
    Absent,
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
    /// Classifies an index entry for a load of a size class.
    pub(crate) fn classify_entry(&self, entry: Option<EntryIndex>, size_class: SizeClassId) -> LocalCopy {
        let Some(index) = entry else { return LocalCopy::Absent };
        let entry = self.index.entry(index);
        match entry.dram() {
            _ if entry.size_class() != size_class => LocalCopy::Absent,
            Dram::Resident(frame) => LocalCopy::InDram(frame),
            Dram::Filling(frame) => match self.fill_of_frame(frame) {
                Some(fill) => LocalCopy::Filling(fill),
                None => LocalCopy::Absent,
            },
            Dram::Absent => LocalCopy::OnDevice(index),
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
