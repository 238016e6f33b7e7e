//! Sets of hash slots: one bit per slot, 512 bytes, in the same format in memory and on the wire.
//!
//! Slot `s` is bit `s % 8` of byte `s / 8`.
//!
//! Ownership of slots is out of scope (`shards.rs`).

use std::fmt;

use crate::key::{BlockKey, HASH_SLOTS};

const WORDS: usize = HASH_SLOTS as usize / 64;

/// Set of hash slots.
#[derive(Clone, PartialEq, Eq)]
pub struct SlotSet {
    words: [u64; WORDS],
}

impl SlotSet {
    /// Size of a set on the wire, in bytes.
    pub const BYTES: usize = HASH_SLOTS as usize / 8;
    /// Set without any slot.
    pub const EMPTY: SlotSet = SlotSet { words: [0; WORDS] };
    /// Set of all slots.
    pub const ALL: SlotSet = SlotSet { words: [u64::MAX; WORDS] };

    /// Whether a slot is in the set.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn contains(&self, slot: u16) -> bool {
        self.words[usize::from(slot / 64)] & (1 << (slot % 64)) != 0
    }

    /// Whether a key's slot is in the set.
    pub fn has_key(&self, key: &BlockKey) -> bool {
        self.contains(key.hash_slot())
    }

    /// Adds a slot to the set.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn insert(&mut self, slot: u16) {
        self.words[usize::from(slot / 64)] |= 1 << (slot % 64);
    }

    /// Removes a slot from the set.
    ///
    /// # Panics
    /// If the slot does not exist.
    pub fn remove(&mut self, slot: u16) {
        self.words[usize::from(slot / 64)] &= !(1 << (slot % 64));
    }

    /// Whether no slot is in the set.
    pub fn is_empty(&self) -> bool {
        *self == SlotSet::EMPTY
    }

    /// Number of slots in the set.
    pub fn len(&self) -> usize {
        self.words.iter().map(|word| word.count_ones() as usize).sum()
    }

    /// Iterates the slots in ascending order.
    pub fn iter(&self) -> impl Iterator<Item = u16> + use<> {
        (0..).step_by(64).zip(self.words).flat_map(|(first, word): (u16, u64)| {
            (0..64).filter(move |bit| word & (1 << bit) != 0).map(move |bit| first + bit)
        })
    }

    /// Union of both sets.
    #[must_use]
    pub fn or(&self, other: &SlotSet) -> SlotSet {
        self.with(other, |mine, its| mine | its)
    }

    /// Intersection of both sets.
    #[must_use]
    pub fn and(&self, other: &SlotSet) -> SlotSet {
        self.with(other, |mine, its| mine & its)
    }

    /// Slots of this set that are not in the other.
    #[must_use]
    pub fn without(&self, other: &SlotSet) -> SlotSet {
        self.with(other, |mine, its| mine & !its)
    }

    /// Wire format of the set.
    pub fn to_bytes(&self) -> [u8; SlotSet::BYTES] {
        let mut bytes = [0; SlotSet::BYTES];
        for (place, word) in bytes.as_chunks_mut::<8>().0.iter_mut().zip(self.words) {
            *place = word.to_le_bytes();
        }
        bytes
    }

    /// Parses the wire format; `None` if it does not have [`SlotSet::BYTES`] bytes.
    pub fn from_bytes(bytes: &[u8]) -> Option<SlotSet> {
        let bytes: &[u8; SlotSet::BYTES] = bytes.try_into().ok()?;
        let mut set = SlotSet::EMPTY;
        for (word, bytes) in set.words.iter_mut().zip(bytes.as_chunks::<8>().0) {
            *word = u64::from_le_bytes(*bytes);
        }
        Some(set)
    }

    fn with(&self, other: &SlotSet, combine: impl Fn(u64, u64) -> u64) -> SlotSet {
        let mut words = self.words;
        for (word, its) in words.iter_mut().zip(other.words) {
            *word = combine(*word, its);
        }
        SlotSet { words }
    }
}

impl Default for SlotSet {
    fn default() -> SlotSet {
        SlotSet::EMPTY
    }
}

impl FromIterator<u16> for SlotSet {
    fn from_iter<I: IntoIterator<Item = u16>>(slots: I) -> SlotSet {
        let mut set = SlotSet::EMPTY;
        slots.into_iter().for_each(|slot| set.insert(slot));
        set
    }
}

impl fmt::Debug for SlotSet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == SlotSet::ALL {
            return f.write_str("SlotSet(all)");
        }
        write!(f, "SlotSet({} slots:", self.len())?;
        self.iter().take(8).try_for_each(|slot| write!(f, " {slot}"))?;
        f.write_str(")")
    }
}

const _: () = assert!(HASH_SLOTS.is_multiple_of(64), "whole words");

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn slots() -> impl Strategy<Value = BTreeSet<u16>> {
        prop::collection::btree_set(0..HASH_SLOTS, 0..100)
    }

    #[test]
    fn empty_and_full_sets_have_the_expected_slots() {
        assert!(SlotSet::EMPTY.is_empty() && SlotSet::EMPTY.iter().next().is_none());
        assert_eq!(SlotSet::ALL.len(), usize::from(HASH_SLOTS));
        assert!(SlotSet::ALL.iter().eq(0..HASH_SLOTS));
        assert!(SlotSet::ALL.has_key(&BlockKey([0xff; 16])));
    }

    #[test]
    fn slots_are_bits_from_the_lowest_of_the_first_byte() {
        let bytes = SlotSet::from_iter([0, 9, 4095]).to_bytes();
        assert_eq!((bytes[0], bytes[1], bytes[511]), (1, 2, 0x80));
        assert_eq!(bytes.iter().filter(|byte| **byte != 0).count(), 3);
    }

    #[test]
    fn rejects_bytes_of_another_length() {
        for length in [0, 511, 513] {
            assert_eq!(SlotSet::from_bytes(&vec![0; length]), None);
        }
    }

    proptest! {
        #[test]
        fn behaves_like_a_set_of_numbers(one in slots(), other in slots()) {
            let (a, b) = (SlotSet::from_iter(one.clone()), SlotSet::from_iter(other.clone()));
            prop_assert!(a.iter().eq(one.iter().copied()));
            prop_assert_eq!(a.len(), one.len());
            prop_assert!(a.or(&b).iter().eq(one.union(&other).copied()));
            prop_assert!(a.and(&b).iter().eq(one.intersection(&other).copied()));
            prop_assert!(a.without(&b).iter().eq(one.difference(&other).copied()));
            prop_assert_eq!(SlotSet::from_bytes(&a.to_bytes()), Some(a.clone()));
            let mut less = a.clone();
            other.iter().for_each(|slot| less.remove(*slot));
            prop_assert_eq!(less, a.without(&b));
        }
    }
}
