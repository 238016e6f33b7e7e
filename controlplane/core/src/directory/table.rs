//! The table of one hash slot: replica entries in one array, ordered by hash.
//!
//! ```text
//!  hash 0 ──────────────────────────────────────────────── 2^64      home(hash) = hash × homes / 2^64
//!  │ e │ e │ e │   │ e │ e │   │ e │ e │ e │ e │   │ ... │   │ tail │
//!              └ empty         └── a run: entries pushed right of their home, never left of it
//! ```
//!
//! Linear probing with entries in hash order (home is monotone in hash). A search starts at the home and ends
//! at the first entry with a larger hash. So a miss costs as much as a hit: (1 + 1/(1 − load)) / 2 = 4.5
//! entries at the maximum load, usually within two cache lines. Entries of one key (one per node) are
//! adjacent. Deletion moves the rest of the run back, so there are no tombstones. Growth is one sequential
//! pass.
//!
//! Memory: an entry has 24 bytes; the load is between 0.7 and 0.875 while growing by a quarter, so an entry
//! costs 27 to 34 bytes. By comparison, `hashbrown` doubles (up to 57 bytes), doubles early under churn
//! because of tombstones (up to 71), and accesses two memory locations per search.
//!
//! Block keys have 64 uniformly distributed bits. Keys that agree in all of them work, but make runs longer.

use reprise_policy::{BlockKey, NodeId, Tier};

/// Maximum number of entries per home, as a fraction: 7/8.
const LOAD_MAX: (usize, usize) = (7, 8);
/// Minimum number of entries per home, as a fraction: 1/2. Below it the table is rebuilt smaller.
const LOAD_MIN: (usize, usize) = (1, 2);
/// Minimum number of homes of a table.
const HOMES_MIN: usize = 8;
/// Places after the last home, for runs that extend beyond it; extended when needed.
const TAIL: usize = 8;

/// Tiers in which a node holds a block: a set of two bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Tiers(u8);

/// A node's replicas of one block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Entry {
    pub(super) key: BlockKey,
    /// Generation of the inventory that this entry belongs to; older ones are stale.
    pub(super) generation: u32,
    pub(super) node: NodeId,
    /// Tiers of the replicas; not empty in a used entry.
    pub(super) tiers: Tiers,
}

const _: () = assert!(size_of::<Entry>() == 24, "the memory figures of this module are for 24-byte entries");

/// The entries of one hash slot.
#[derive(Debug, Default)]
pub(super) struct Table {
    /// `homes` places and a tail. The last place is always empty, which ends every search.
    entries: Vec<Entry>,
    homes: usize,
    len: usize,
}

/// Effect of a change on the number of distinct keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum KeyCountChange {
    /// The key has other entries.
    Same,
    /// The key was added or removed with this entry.
    Changed,
}

/// Number of entries and keys that [`Table::retain`] removed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct RemovedCounts {
    pub(super) entries: usize,
    pub(super) keys: usize,
}

impl Tiers {
    pub(super) const NONE: Tiers = Tiers(0);

    pub(super) fn contains(self, tier: Tier) -> bool {
        self.0 & (tier as u8) != 0
    }

    pub(super) fn with(self, tier: Tier) -> Tiers {
        Tiers(self.0 | tier as u8)
    }

    pub(super) fn without(self, tier: Tier) -> Tiers {
        Tiers(self.0 & !(tier as u8))
    }

    pub(super) fn is_empty(self) -> bool {
        self == Tiers::NONE
    }
}

// A tier's number is its bit.
const _: () = assert!(Tier::Dram as u8 == 1 && Tier::Nvme as u8 == 2);

impl Entry {
    const EMPTY: Entry = Entry { key: BlockKey([0; 16]), generation: 0, node: NodeId(0), tiers: Tiers::NONE };

    fn is_empty(&self) -> bool {
        self.tiers.is_empty()
    }
}

impl Table {
    /// Number of entries in the table.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Heap memory, in bytes.
    pub(super) fn bytes(&self) -> usize {
        self.entries.capacity() * size_of::<Entry>()
    }

    /// Loads the home of a key into the cache. The caller does this for many keys, so that cache misses
    /// overlap. The returned value has no meaning.
    #[inline]
    pub(super) fn touch(&self, key: &BlockKey) -> u8 {
        self.entries.get(home(key.table_hash(), self.homes)).map_or(0, |entry| entry.tiers.0)
    }

    /// Entries of a key, one per node.
    #[inline]
    pub(super) fn of_key(&self, key: &BlockKey) -> impl Iterator<Item = &Entry> {
        let hash = key.table_hash();
        // The slice of a table without entries is empty.
        self.entries
            .get(home(hash, self.homes)..)
            .unwrap_or_default()
            .iter()
            .take_while(move |entry| !entry.is_empty() && entry.key.table_hash() <= hash)
            .filter(move |entry| entry.key == *key)
    }

    /// Entries with a hash of at least `hash`, in hash order.
    pub(super) fn starting_at(&self, hash: u64) -> impl Iterator<Item = &Entry> {
        let places = self.entries.get(home(hash, self.homes)..).unwrap_or_default().iter();
        places.filter(move |entry| !entry.is_empty() && entry.key.table_hash() >= hash)
    }

    /// Entry of a key and node. The caller must not remove its last tier: use [`Table::remove`].
    pub(super) fn entry_mut(&mut self, key: &BlockKey, node: NodeId) -> Option<&mut Entry> {
        let index = self.find(key, node)?;
        Some(&mut self.entries[index])
    }

    /// Inserts an entry with at least one tier; the table must not have one of this key and node.
    pub(super) fn insert(&mut self, entry: Entry) -> KeyCountChange {
        debug_assert!(!entry.is_empty() && self.find(&entry.key, entry.node).is_none());
        if (self.len + 1) * LOAD_MAX.1 > self.homes * LOAD_MAX.0 {
            self.rebuild((self.homes + self.homes / 4).max(HOMES_MIN));
        }
        let hash = entry.key.table_hash();
        let start = home(hash, self.homes);
        let place = self.first(start, |other| other.is_empty() || other.key.table_hash() > hash);
        let known = self.entries[start..place].iter().rev().any(|other| other.key == entry.key);
        let gap = self.first(place, Entry::is_empty);
        if gap + 1 == self.entries.len() {
            self.entries.reserve_exact(TAIL);
            self.entries.extend([Entry::EMPTY; TAIL]);
        }
        self.entries.copy_within(place..gap, place + 1);
        self.entries[place] = entry;
        self.len += 1;
        if known { KeyCountChange::Same } else { KeyCountChange::Changed }
    }

    /// Removes the entry of a key and node; `None` if it does not exist.
    pub(super) fn remove(&mut self, key: &BlockKey, node: NodeId) -> Option<(Entry, KeyCountChange)> {
        let index = self.find(key, node)?;
        let entry = self.entries[index];
        // Move the rest of the run back by one, up to the first entry at its home (or the end of the run).
        let homes = self.homes;
        let mut end = index + 1;
        while !self.entries[end].is_empty() && home(self.entries[end].key.table_hash(), homes) < end {
            end += 1;
        }
        self.entries.copy_within(index + 1..end, index);
        self.entries[end - 1] = Entry::EMPTY;
        self.len -= 1;
        self.shrink();
        let count =
            if self.of_key(key).next().is_some() { KeyCountChange::Same } else { KeyCountChange::Changed };
        Some((entry, count))
    }

    /// Removes the entries that `keep` rejects; returns their counts. O(places).
    pub(super) fn retain(&mut self, keep: impl Fn(&Entry) -> bool) -> RemovedCounts {
        let kept = self.iter().filter(|entry| keep(entry)).count();
        if kept == self.len {
            return RemovedCounts { entries: 0, keys: 0 };
        }
        let before = (self.len, self.keys());
        // In place, from left to right: an entry never moves right, so unread entries are not overwritten.
        let mut next = 0;
        for index in 0..self.entries.len() {
            let entry = std::mem::replace(&mut self.entries[index], Entry::EMPTY);
            if !entry.is_empty() && keep(&entry) {
                let place = home(entry.key.table_hash(), self.homes).max(next);
                self.entries[place] = entry;
                next = place + 1;
            }
        }
        self.len = kept;
        self.shrink();
        RemovedCounts { entries: before.0 - kept, keys: before.1 - self.keys() }
    }

    /// All entries in hash order.
    pub(super) fn iter(&self) -> impl Iterator<Item = &Entry> {
        self.entries.iter().filter(|entry| !entry.is_empty())
    }

    /// Number of distinct keys. Entries of a key are adjacent unless another key has the same 64-bit hash;
    /// therefore all keys of the current hash are compared.
    fn keys(&self) -> usize {
        let mut keys = 0;
        let mut equal_hash: Vec<BlockKey> = Vec::new();
        for entry in self.iter() {
            if equal_hash.last().is_some_and(|last| last.table_hash() != entry.key.table_hash()) {
                equal_hash.clear();
            }
            if !equal_hash.contains(&entry.key) {
                equal_hash.push(entry.key);
                keys += 1;
            }
        }
        keys
    }

    fn find(&self, key: &BlockKey, node: NodeId) -> Option<usize> {
        let hash = key.table_hash();
        let start = home(hash, self.homes);
        let run = self.entries.get(start..)?;
        let offset = run
            .iter()
            .take_while(|entry| !entry.is_empty() && entry.key.table_hash() <= hash)
            .position(|entry| entry.node == node && entry.key == *key)?;
        Some(start + offset)
    }

    /// First place from `start` on that satisfies `wanted`. An empty place must satisfy it.
    fn first(&self, start: usize, wanted: impl Fn(&Entry) -> bool) -> usize {
        let offset = self.entries[start..].iter().position(wanted);
        start + offset.expect("the last place is always empty")
    }

    /// Frees memory when few entries are left.
    fn shrink(&mut self) {
        if self.len == 0 {
            *self = Table::default();
        } else if self.homes > HOMES_MIN && self.len * LOAD_MIN.1 < self.homes * LOAD_MIN.0 {
            self.rebuild(fitting(self.len));
        }
    }

    /// Rebuilds the table with `homes` homes, keeping the order.
    fn rebuild(&mut self, homes: usize) {
        let mut entries: Vec<Entry> = Vec::with_capacity(homes + TAIL);
        for entry in self.iter() {
            let place = home(entry.key.table_hash(), homes).max(entries.len());
            entries.resize(place, Entry::EMPTY);
            entries.push(*entry);
        }
        let places = (homes + TAIL).max(entries.len() + 1);
        entries.reserve_exact(places - entries.len());
        entries.resize(places, Entry::EMPTY);
        *self = Table { entries, homes, len: self.len };
    }
}

/// Place at which the search for a hash starts: `hash / 2^64` of the homes.
#[inline]
fn home(hash: u64, homes: usize) -> usize {
    ((u128::from(hash) * homes as u128) >> 64) as usize
}

/// Number of homes for `len` entries with room for a quarter more.
fn fitting(len: usize) -> usize {
    (len * LOAD_MAX.1 / LOAD_MAX.0 * 5 / 4).max(HOMES_MIN)
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    /// A key with table hash `hash`; `other` distinguishes keys of equal hash.
    fn key(hash: u64, other: u8) -> BlockKey {
        let mut bytes = [other; 16];
        bytes[8..].copy_from_slice(&hash.to_le_bytes());
        BlockKey(bytes)
    }

    fn entry(key: BlockKey, node: u16) -> Entry {
        Entry { key, generation: u32::from(node), node: NodeId(node), tiers: Tiers::NONE.with(Tier::Dram) }
    }

    /// Checks the invariants of the module documentation.
    fn check(table: &Table) {
        let mut last = None;
        for (place, entry) in table.entries.iter().enumerate().filter(|(_, entry)| !entry.is_empty()) {
            let hash = entry.key.table_hash();
            let start = home(hash, table.homes);
            assert!(start <= place, "no entry is left of its home");
            assert!(table.entries[start..place].iter().all(|entry| !entry.is_empty()), "a run has no gaps");
            assert!(last <= Some(hash), "entries are in hash order");
            last = Some(hash);
        }
        assert!(table.entries.last().is_none_or(Entry::is_empty));
        assert_eq!(table.iter().count(), table.len);
        assert!(table.len * LOAD_MAX.1 <= table.homes * LOAD_MAX.0);
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(256))]

        /// Few hashes at both ends and in the middle: long runs, equal hashes, runs into the tail.
        #[test]
        fn a_table_behaves_like_a_map(
            steps in prop::collection::vec((0u8..6, 0u64..12, 0u8..3, 0u16..4), 1..300),
        ) {
            let mut table = Table::default();
            let mut model: BTreeMap<(BlockKey, u16), u32> = BTreeMap::new();
            for (operation, hash, other, node) in steps {
                let hash = match hash % 3 { 0 => hash, 1 => u64::MAX - hash, _ => hash << 58 };
                let key = key(hash, other);
                let keys_before = model.keys().map(|(key, _)| *key).collect::<BTreeSet<_>>().len();
                match operation {
                    0..=2 => if let std::collections::btree_map::Entry::Vacant(vacant) = model.entry((key, node)) {
                        vacant.insert(u32::from(node));
                        let count = table.insert(entry(key, node));
                        let keys = model.keys().map(|(key, _)| *key).collect::<BTreeSet<_>>().len();
                        prop_assert_eq!(count == KeyCountChange::Changed, keys != keys_before);
                    },
                    3 | 4 => {
                        let removed = table.remove(&key, NodeId(node));
                        prop_assert_eq!(removed.map(|(entry, _)| entry.generation), model.remove(&(key, node)));
                        let keys = model.keys().map(|(key, _)| *key).collect::<BTreeSet<_>>().len();
                        prop_assert_eq!(
                            removed.is_some_and(|(_, count)| count == KeyCountChange::Changed), keys != keys_before
                        );
                    }
                    _ => {
                        let gone = table.retain(|entry| entry.node.0 != node);
                        model.retain(|(_, other), _| *other != node);
                        let keys = model.keys().map(|(key, _)| *key).collect::<BTreeSet<_>>().len();
                        prop_assert_eq!(gone.keys, keys_before - keys);
                    }
                }
                check(&table);
                let held: BTreeSet<u16> = table.of_key(&key).map(|entry| entry.node.0).collect();
                let expected: BTreeSet<u16> =
                    model.keys().filter(|(other, _)| *other == key).map(|(_, node)| *node).collect();
                prop_assert_eq!(held, expected);
                let behind = table.iter().filter(|entry| entry.key.table_hash() >= hash);
                prop_assert!(table.starting_at(hash).map(|entry| entry.key).eq(behind.map(|entry| entry.key)));
            }
            prop_assert_eq!(table.len(), model.len());
        }
    }

    #[test]
    fn memory_per_entry_stays_bounded_while_growing_and_shrinking() {
        let mut table = Table::default();
        let hash = |number: u64| number.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for number in 0..100_000 {
            table.insert(entry(key(hash(number), 0), 1));
            if number > 1000 {
                let each = table.bytes() as f64 / table.len() as f64;
                assert!(each <= 35.0, "{each} bytes per entry at {number}");
            }
        }
        for number in 0..99_000 {
            assert!(table.remove(&key(hash(number), 0), NodeId(1)).is_some());
        }
        check(&table);
        let each = table.bytes() as f64 / table.len() as f64;
        assert!(each <= 49.0, "{each} bytes per entry after shrinking to 1,000");
    }

    #[test]
    fn an_empty_table_takes_no_memory_and_finds_nothing() {
        let mut table = Table::default();
        assert_eq!(table.bytes(), 0);
        assert_eq!(table.of_key(&key(5, 0)).count(), 0);
        assert!(table.remove(&key(5, 0), NodeId(1)).is_none());
        assert!(table.entry_mut(&key(5, 0), NodeId(1)).is_none());
        assert_eq!(table.touch(&key(5, 0)), 0);
    }
}
