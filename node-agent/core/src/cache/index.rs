//! Index of the blocks on this node and their locations.
//!
//! A vector holds one entry of 32 bytes per block. A hash table maps keys to 4-byte entry numbers (5 bytes a
//! bucket, load at most 7/8). A block is on this node if it is in an arena slot (readable or being filled),
//! on a device, or both. The code that removes the last copy also removes the entry. The origin of a block
//! serves diagnostics only.
//!
//! Lookups of long chains take two passes over short runs of keys. The first pass touches only the hash
//! table, the second only entries, so that the cache misses of a run overlap.
//!
//! Out of scope: payloads, checksums (stored with arena slots and in header pages), contents of header pages
//! (kept by the pool, which needs them for checkpoints) and the eviction order.

use hashbrown::HashTable;
use reprise_policy::BlockKey;
use reprise_policy::eviction::EntryIndex;

use crate::cache::describe::BlockOrigin;
use crate::cache::frames::FrameIndex;
use crate::cache::sizes::{RankClasses, SizeClassId};
use crate::effect::{DeviceId, Source};
use crate::event::Priority;
use crate::limits::DEVICES_MAX;
use crate::pool::{PAGE_NUMBER_BITS, PageNumber};

/// Keys of one two-pass run: no core sustains 64 outstanding cache misses.
const RUN_KEYS: usize = 64;

/// Bits of the highest page number bits in [`Entry::device_page`]; the others contain the device.
const PAGE_HIGH_BITS: u32 = PAGE_NUMBER_BITS - u32::BITS;

/// Position of a block whose chain is not known: it came from a peer or from recovery, and no match found it yet.
const POSITION_UNKNOWN: u32 = u32::MAX;

const _: () = assert!(DEVICES_MAX << PAGE_HIGH_BITS == 1 << u8::BITS);

/// Entries of all blocks, and a hash table over them.
#[derive(Debug)]
pub(crate) struct Index {
    entries: Vec<Entry>,
    free: Vec<EntryIndex>,
    table: HashTable<u32>,
    stored: u64,
}

/// Index entry of one block.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    key: BlockKey,
    /// Low bits of the page number. A block that is on no device has page 0, which holds a superblock.
    page: u32,
    frame: FrameIndex,
    /// Number of blocks before it in its chain, or [`POSITION_UNKNOWN`].
    position: u32,
    size_class: SizeClassId,
    /// Number of the device, and the high bits of the page number.
    device_page: u8,
    state: EntryState,
}

/// Priority, residency and origin of a block, in one byte.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct EntryState(u8);

/// Location of a block in the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dram {
    /// Not in the arena.
    Absent,
    /// Being filled into this frame.
    Filling(FrameIndex),
    /// Readable in this frame.
    Resident(FrameIndex),
}

/// Location of a block on a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stored {
    pub(crate) device: DeviceId,
    pub(crate) page: PageNumber,
}

const _: () = assert!(size_of::<Entry>() == 32, "memory per block is part of the design");

impl EntryState {
    const PRIORITY: u8 = 0b0011;
    const RESIDENT: u8 = 0b0100;
    const VACANT: u8 = 0b1000;
    const ORIGIN: u8 = 0b0011_0000;
    const REUSED: u8 = 0b0100_0000;

    fn new(priority: Priority, origin: BlockOrigin) -> EntryState {
        EntryState(priority as u8 | EntryState::of_origin(origin))
    }

    fn of_origin(origin: BlockOrigin) -> u8 {
        (origin as u8) << EntryState::ORIGIN.trailing_zeros()
    }

    fn has(self, bit: u8) -> bool {
        self.0 & bit != 0
    }
}

impl Entry {
    pub(crate) fn key(&self) -> BlockKey {
        self.key
    }

    pub(crate) fn size_class(&self) -> SizeClassId {
        self.size_class
    }

    /// Number of blocks before it in its chain, if known.
    pub(crate) fn position(&self) -> Option<u32> {
        (self.position != POSITION_UNKNOWN).then_some(self.position)
    }

    /// Sets the position in the chain, once: links between blocks depend on it.
    pub(crate) fn learn_position(&mut self, position: u32) {
        if self.position == POSITION_UNKNOWN {
            self.position = position.min(POSITION_UNKNOWN - 1);
        }
    }

    /// Number of the priority; blocks of priority 0 are evicted first.
    pub(crate) fn class(&self) -> u8 {
        self.state.0 & EntryState::PRIORITY
    }

    /// Raises the priority of the block; a lower priority has no effect.
    pub(crate) fn raise_priority(&mut self, priority: Priority) {
        let class = self.class().max(priority as u8);
        self.state.0 = (self.state.0 & !EntryState::PRIORITY) | class;
    }

    /// Whether a request has used the block since its first commit.
    pub(crate) fn is_reused(&self) -> bool {
        self.state.has(EntryState::REUSED)
    }

    /// Records that a request has used the block; returns whether it is the first one.
    pub(crate) fn mark_reused(&mut self) -> bool {
        let is_first = !self.is_reused();
        self.state.0 |= EntryState::REUSED;
        is_first
    }

    /// Why the block is on this node.
    pub(crate) fn origin(&self) -> BlockOrigin {
        let is = |origin: &BlockOrigin| self.state.0 & EntryState::ORIGIN == EntryState::of_origin(*origin);
        BlockOrigin::ALL.into_iter().find(is).expect("two bits have four values")
    }

    /// Sets the origin of the block, unless an engine saved it.
    pub(crate) fn set_origin(&mut self, origin: BlockOrigin) {
        if self.origin() != BlockOrigin::Saved {
            self.state.0 = (self.state.0 & !EntryState::ORIGIN) | EntryState::of_origin(origin);
        }
    }

    pub(crate) fn dram(&self) -> Dram {
        if self.frame == FrameIndex::NONE {
            Dram::Absent
        } else if self.state.has(EntryState::RESIDENT) {
            Dram::Resident(self.frame)
        } else {
            Dram::Filling(self.frame)
        }
    }

    pub(crate) fn set_dram(&mut self, dram: Dram) {
        let (frame, resident) = match dram {
            Dram::Absent => (FrameIndex::NONE, 0),
            Dram::Filling(frame) => (frame, 0),
            Dram::Resident(frame) => (frame, EntryState::RESIDENT),
        };
        self.frame = frame;
        self.state.0 = (self.state.0 & !EntryState::RESIDENT) | resident;
    }

    pub(crate) fn stored(&self) -> Option<Stored> {
        let page_high = self.device_page & ((1 << PAGE_HIGH_BITS) - 1);
        let page = PageNumber(u64::from(page_high) << u32::BITS | u64::from(self.page));
        let device = DeviceId(self.device_page >> PAGE_HIGH_BITS);
        (page.0 != 0).then_some(Stored { device, page })
    }

    /// Returns where a block of this size class is readable now, or is already being read from.
    pub(crate) fn source(&self, size_class: SizeClassId) -> Option<Source> {
        if self.size_class != size_class {
            None
        } else if self.state.has(EntryState::RESIDENT) {
            Some(Source::OwnDram)
        } else if self.stored().is_some() {
            Some(Source::OwnNvme)
        } else {
            None
        }
    }
}

impl Index {
    /// Creates an empty index.
    pub(crate) fn new() -> Index {
        Index { entries: Vec::new(), free: Vec::new(), table: HashTable::new(), stored: 0 }
    }

    /// Reserves memory for a total number of blocks, so that growth does not delay a later event.
    pub(crate) fn reserve(&mut self, blocks: usize) {
        let entries = &self.entries;
        let missing = blocks.saturating_sub(self.table.len());
        self.table.reserve(missing, |slot| entries[*slot as usize].key.table_hash());
        self.entries.reserve(blocks.saturating_sub(self.entries.len()));
    }

    /// Number of blocks in the index.
    pub(crate) fn len(&self) -> usize {
        self.table.len()
    }

    /// Number of blocks on devices.
    pub(crate) fn stored_blocks(&self) -> u64 {
        self.stored
    }

    /// Returns the entry of a key.
    pub(crate) fn find(&self, key: &BlockKey) -> Option<EntryIndex> {
        let found = self.table.find(key.table_hash(), |slot| self.entries[*slot as usize].key == *key);
        found.map(|slot| EntryIndex(*slot))
    }

    /// Adds a block without a location. The key must not be in the index.
    pub(crate) fn insert(
        &mut self,
        key: BlockKey,
        size_class: SizeClassId,
        priority: Priority,
        origin: BlockOrigin,
    ) -> EntryIndex {
        debug_assert!(self.find(&key).is_none(), "{key} is in the index already");
        let entry = Entry {
            key,
            page: 0,
            frame: FrameIndex::NONE,
            position: POSITION_UNKNOWN,
            size_class,
            device_page: 0,
            state: EntryState::new(priority, origin),
        };
        let index = match self.free.pop() {
            Some(index) => {
                self.entries[index.0 as usize] = entry;
                index
            }
            None => {
                let next = u32::try_from(self.entries.len()).expect("pools hold fewer than 2^32 slots");
                self.entries.push(entry);
                EntryIndex(next)
            }
        };
        let entries = &self.entries;
        self.table.insert_unique(key.table_hash(), index.0, |slot| entries[*slot as usize].key.table_hash());
        index
    }

    /// Removes a block that has no location left.
    pub(crate) fn remove(&mut self, index: EntryIndex) {
        let entry = &mut self.entries[index.0 as usize];
        assert!(entry.dram() == Dram::Absent && entry.stored().is_none(), "{} still has a copy", entry.key);
        entry.state = EntryState(EntryState::VACANT);
        let hash = entry.key.table_hash();
        if let Ok(occupied) = self.table.find_entry(hash, |slot| *slot == index.0) {
            occupied.remove();
            self.free.push(index);
        }
    }

    pub(crate) fn entry(&self, index: EntryIndex) -> &Entry {
        &self.entries[index.0 as usize]
    }

    pub(crate) fn entry_mut(&mut self, index: EntryIndex) -> &mut Entry {
        &mut self.entries[index.0 as usize]
    }

    /// Sets or clears the location of a block on a device.
    pub(super) fn set_stored(&mut self, index: EntryIndex, stored: Option<Stored>) {
        let entry = &mut self.entries[index.0 as usize];
        self.stored -= u64::from(entry.stored().is_some());
        (entry.device_page, entry.page) = stored.map_or((0, 0), |stored| {
            let page = stored.page.0;
            assert!(page != 0 && page >> PAGE_NUMBER_BITS == 0, "pages of slots are behind the superblock");
            (stored.device.0 << PAGE_HIGH_BITS | (page >> u32::BITS) as u8, page as u32)
        });
        self.stored += u64::from(stored.is_some());
    }

    /// Returns the entries of many keys, in their order. Hot path: one allocation, no formatting.
    pub(crate) fn find_all<'a>(
        &self,
        keys: impl Iterator<Item = &'a BlockKey> + Clone,
    ) -> Vec<Option<EntryIndex>> {
        // The first bucket with the same seven tag bits, which nearly always holds the key.
        let mut found: Vec<Option<EntryIndex>> = keys
            .clone()
            .map(|key| self.table.find(key.table_hash(), |_| true).map(|slot| EntryIndex(*slot)))
            .collect();
        for (key, found) in keys.zip(&mut found) {
            if found.is_some_and(|candidate| self.entry(candidate).key != *key) {
                *found = self.find(key);
            }
        }
        found
    }

    /// Returns the leading keys that are on this node in this size class, with their sources. Hot path: one
    /// allocation, no formatting.
    pub(crate) fn leading_run(&self, keys: &[BlockKey], classes: &RankClasses) -> Vec<(EntryIndex, Source)> {
        let mut run = Vec::with_capacity(keys.len());
        let mut classes = classes.cycle();
        let mut candidates = [None; RUN_KEYS];
        for chunk in keys.chunks(RUN_KEYS) {
            for (key, candidate) in chunk.iter().zip(&mut candidates) {
                // As in `find_all`.
                *candidate = self.table.find(key.table_hash(), |_| true).copied();
            }
            for (key, candidate) in chunk.iter().zip(&candidates) {
                let Some(slot) = candidate else { return run };
                let mut found = EntryIndex(*slot);
                if self.entries[*slot as usize].key != *key {
                    match self.find(key) {
                        Some(other) => found = other,
                        None => return run,
                    }
                }
                let class = classes.next().flatten();
                let Some(source) = class.and_then(|class| self.entry(found).source(class)) else {
                    return run;
                };
                run.push((found, source));
            }
        }
        run
    }

    /// Iterates all blocks, in the order of their entries.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (EntryIndex, &Entry)> {
        self.iter_from(EntryIndex(0), usize::MAX)
    }

    /// Iterates the blocks in at most `places` entries, starting at `first`.
    pub(crate) fn iter_from(
        &self,
        first: EntryIndex,
        places: usize,
    ) -> impl Iterator<Item = (EntryIndex, &Entry)> {
        (first.0..)
            .zip(self.entries.iter().skip(first.0 as usize).take(places))
            .filter(|(_, entry)| !entry.state.has(EntryState::VACANT))
            .map(|(slot, entry)| (EntryIndex(slot), entry))
    }

    /// Number of entries, including vacant ones.
    pub(crate) fn places(&self) -> usize {
        self.entries.len()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SAVED: BlockOrigin = BlockOrigin::Saved;

    fn key(number: u64) -> BlockKey {
        let mut bytes = [0; 16];
        bytes[8..].copy_from_slice(&number.wrapping_mul(0x9e37_79b9_7f4a_7c15).to_le_bytes());
        BlockKey(bytes)
    }

    fn stored(page: u64) -> Stored {
        Stored { device: DeviceId(0), page: PageNumber(page) }
    }

    #[test]
    fn finds_block_until_it_is_removed() {
        let mut index = Index::new();
        let entries: Vec<_> = (0..1000)
            .map(|number| index.insert(key(number), SizeClassId(0), Priority::Normal, SAVED))
            .collect();
        assert!(entries.iter().enumerate().all(|(n, entry)| index.find(&key(n as u64)) == Some(*entry)));
        index.remove(entries[500]);
        assert_eq!(index.find(&key(500)), None);
        assert_eq!(index.len(), 999);
        assert_eq!(index.insert(key(5000), SizeClassId(0), Priority::Low, SAVED), entries[500]);
        assert_eq!(index.iter().count(), 1000);
    }

    #[test]
    fn leading_run_ends_at_first_missing_block_or_other_size_class() {
        let mut index = Index::new();
        let keys: Vec<BlockKey> = (0..200).map(key).collect();
        for key in &keys {
            let entry = index.insert(*key, SizeClassId(3), Priority::Normal, SAVED);
            index.set_stored(entry, Some(stored(1)));
        }
        let first = index.find(&keys[0]).expect("inserted");
        index.entry_mut(first).set_dram(Dram::Resident(FrameIndex(0)));
        let of = |class| RankClasses::one(SizeClassId(class));
        let run = index.leading_run(&keys, &of(3));
        assert_eq!(run.len(), 200);
        assert_eq!([run[0].1, run[1].1], [Source::OwnDram, Source::OwnNvme]);
        assert!(run.iter().zip(&keys).all(|((entry, _), key)| index.find(key) == Some(*entry)));

        let middle = index.find(&keys[130]).expect("inserted");
        index.set_stored(middle, None);
        index.entry_mut(middle).set_dram(Dram::Filling(FrameIndex(1)));
        let run = index.leading_run(&keys, &of(3));
        assert_eq!(run.len(), 130, "a block that is only being filled does not count");
        assert!(index.leading_run(&keys, &of(4)).is_empty(), "blocks of another size class do not count");
        assert_eq!(index.stored_blocks(), 199);
    }

    #[test]
    fn finds_many_keys_like_single_keys() {
        let mut index = Index::new();
        for number in (0..2000).filter(|number| number % 3 != 0) {
            index.insert(key(number), SizeClassId(0), Priority::Normal, SAVED);
        }
        let keys: Vec<BlockKey> = (0..2000).map(key).collect();
        let one_by_one: Vec<_> = keys.iter().map(|key| index.find(key)).collect();
        assert_eq!(index.find_all(keys.iter()), one_by_one);
    }

    #[test]
    fn distinguishes_keys_with_equal_tag_bits() {
        let mut index = Index::new();
        let mut duplicates = [key(1), key(1)];
        duplicates[1].0[0] ^= 1;
        let first = index.insert(duplicates[0], SizeClassId(0), Priority::Normal, SAVED);
        index.set_stored(first, Some(stored(1)));
        assert_eq!(index.leading_run(&duplicates, &RankClasses::one(SizeClassId(0))).len(), 1);
        let second = index.insert(duplicates[1], SizeClassId(0), Priority::Normal, SAVED);
        index.set_stored(second, Some(stored(2)));
        assert_eq!(index.leading_run(&duplicates, &RankClasses::one(SizeClassId(0))).len(), 2);
        assert_ne!(index.find(&duplicates[0]), index.find(&duplicates[1]));
    }

    #[test]
    fn never_lowers_priority() {
        let mut index = Index::new();
        let entry = index.insert(key(1), SizeClassId(0), Priority::Normal, SAVED);
        index.entry_mut(entry).raise_priority(Priority::Low);
        assert_eq!(index.entry(entry).class(), Priority::Normal as u8);
        index.entry_mut(entry).raise_priority(Priority::High);
        assert_eq!(index.entry(entry).class(), Priority::High as u8);
    }

    #[test]
    fn fields_in_the_state_byte_are_independent() {
        for origin in BlockOrigin::ALL {
            let mut index = Index::new();
            let entry = index.insert(key(1), SizeClassId(0), Priority::Low, origin);
            let entry = index.entry_mut(entry);
            entry.raise_priority(Priority::High);
            entry.set_dram(Dram::Resident(FrameIndex(7)));
            assert_eq!(
                (entry.origin(), entry.class(), entry.dram()),
                (origin, Priority::High as u8, Dram::Resident(FrameIndex(7)))
            );
            entry.set_dram(Dram::Absent);
            assert_eq!((entry.origin(), entry.class()), (origin, Priority::High as u8));
            entry.set_origin(SAVED);
            entry.set_origin(BlockOrigin::Placed);
            assert_eq!((entry.origin(), entry.class()), (SAVED, Priority::High as u8));
            assert!(!entry.is_reused());
            assert_eq!((entry.mark_reused(), entry.mark_reused(), entry.is_reused()), (true, false, true));
            assert_eq!((entry.origin(), entry.class()), (SAVED, Priority::High as u8));
        }
    }
}
